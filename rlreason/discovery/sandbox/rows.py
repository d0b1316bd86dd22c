"""What comes through the channel of a program: rows of integers, or why there are none. Read strictly."""

import re
from typing import NamedTuple

POINTS, END = b"points", re.compile(rb"end (0|[1-9]\d{0,8})")
ROW = re.compile(rb"(?:0|-?[1-9]\d*)(?: (?:0|-?[1-9]\d*))*")
ERROR = re.compile(rb"error (no_points|type|size|memory|exit|exception)")
LONGEST_ROW = 1000  # integers: as run_program.py has it
LONGEST_TEXT = 4000  # characters of an error


class Given(NamedTuple):
    """The rows that a program gave, or the kind of error and its text: words of the program's, which may say anything.

    Kind "channel": something else was written there. None for both: nothing was.
    """

    rows: list[list[int]] | None = None
    kind: str | None = None
    text: str = ""


def read_channel(data: bytes, most_rows: int, most_digits: int) -> Given:
    """Rows from the channel's bytes.

    >>> read_channel(b"points\\n1 -2\\n0 3\\nend 2\\n", 10, 10).rows
    [[1, -2], [0, 3]]
    >>> read_channel(b"points\\n1 02\\nend 1\\n", 10, 10).kind, read_channel(b"points\\n1 2\\n", 10, 10).kind
    ('channel', 'channel')
    """
    if not data:
        return Given()
    first, _, rest = data.partition(b"\n")
    if named := ERROR.fullmatch(first):
        return Given(kind=named[1].decode(), text=rest.decode("utf-8", "backslashreplace")[:LONGEST_TEXT])
    lines = rest.split(b"\n")
    if first != POINTS or len(lines) < 2 or lines[-1] or not (end := END.fullmatch(lines[-2])):
        return Given(kind="channel", text="something else than rows of integers came from the program")
    rows = lines[:-2]
    if len(rows) != int(end[1]):
        return Given(kind="channel", text="the number of rows is another than was said")
    if len(rows) > most_rows:
        return Given(kind="size", text=f"more than {most_rows} points")
    found = []
    for row in rows:
        if row.count(b" ") >= LONGEST_ROW:
            return Given(kind="size", text=f"a point has more than {LONGEST_ROW} coordinates")
        if row and not ROW.fullmatch(row):
            return Given(kind="channel", text="a row holds something else than integers")
        words = row.split()
        if any(len(word) > most_digits + 1 for word in words):
            return Given(kind="size", text=f"an integer has more than {most_digits} digits")
        found.append(list(map(int, words)))
    return Given(found)
