"""Make texts safe for a discovery report, name kinds of calls, and keep what a reader wrote."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rlreason.config.leaves import typed_word
from rlreason.errors import ConfigError
from rlreason.report.build import fenced, text
from rlreason.runtime.files import explained, whole
from rlreason.runtime.text import shorten

_LINKED = re.compile(r"(?<=[:])//|(?<=\bwww)\.|[@$]", re.IGNORECASE)


def inline(given: str, most: int = 160) -> str:
    r"""Make a foreign text safe within a line: cut, with all of Markdown and HTML escaped, no links or formulas.

    >>> inline("<b>*a*</b> $x$ https://evil.test @all")
    '&lt;b&gt;\\*a\\*&lt;/b&gt; \\$x\\$ https:\\/\\/evil.test \\@all'
    """
    return _LINKED.sub(lambda found: "".join(f"\\{one}" for one in found[0]), text(shorten(given, most)))


def quoted(given: str, most: int, lines: int = 24) -> list[str]:
    """Return a foreign text in a fence that it cannot end: only beginning and end if it is long."""
    every = given.splitlines()
    if len(every) > lines:
        half = lines // 2
        left_out = counted(len(every) - 2 * half, "line")
        given = "\n".join([*every[:half], f"[... {left_out} ...]", *every[-half:]])
    return fenced(shorten(given, most, "both"))


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: frozenset[int] = frozenset()) -> list[str]:
    """Return a table of cells that are already Markdown; columns in `numbers` are right-aligned."""
    marks = ["--:" if k in numbers else "---" for k in range(len(head))]
    return ["| " + " | ".join(row) + " |" for row in (head, marks, *rows)]


def name_in(path: str) -> str:
    """Return the last part of a path; the folders above it are private.

    >>> name_in("/home/me/mine.py"), name_in("kissing_11")
    ('mine.py', 'kissing_11')
    """
    return PurePosixPath(path).name or path


def counted(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "seed"), counted(2000, "call")
    ('1 seed', '2,000 calls')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"


def times_word(number: int) -> str:
    """Return "once", "twice" and so on.

    >>> times_word(1), times_word(2), times_word(3)
    ('once', 'twice', '3 times')
    """
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def listed(parts: Sequence[str]) -> str:
    """Join parts of a sentence.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def figure(value: float) -> str:
    """Return a score or a mean of scores: as a whole number, or else with one digit.

    >>> figure(438.0), figure(153.33), figure(1234)
    ('438', '153.3', '1,234')
    """
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def whole_number(value: int) -> str:
    """Return a whole number of any size, cut in its middle if it is long.

    >>> whole_number(10**50)
    '100000000000...000000000000 (51 digits)'
    """
    try:
        digits = str(value)
    except ValueError:
        return "a number of thousands of digits"
    return digits if len(digits) <= 40 else f"{digits[:12]}...{digits[-12:]} ({len(digits)} digits)"


LARGEST_SCORE = 1e15


def records_of(record: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """Return (score, who) of the entries of a problem's `record` that have a number as their score."""
    found = []
    for row in record:
        score = row.get("score")
        if isinstance(score, int | float) and not isinstance(score, bool) and 0 <= score <= LARGEST_SCORE:
            found.append((float(score), str(row.get("who") or "")))
    return found


def standing(record: Sequence[Mapping[str, Any]], score: int, unit: str) -> list[str]:
    """Return the record of a problem, and where a score ranks among it."""
    if not record:
        return ["The problem names no records."]
    rows = [
        [
            inline(typed_word(row.get("score")), 30),
            inline(str(row.get("who") or ""), 80),
            inline(str(row.get("note") or "")),
        ]
        for row in record
    ]
    lines = [*table([inline(unit, 30), "who", "note"], rows, frozenset({0})), ""]
    known = sorted(records_of(record), key=lambda one: one[0])
    below, above = [one for one in known if one[0] <= score], [one for one in known if one[0] > score]
    reached = f"reaches {figure(below[-1][0])} ({inline(below[-1][1], 80)})" if below else "reaches none of these"
    if above:
        ahead = f"; the next above it is {figure(above[0][0])} ({inline(above[0][1], 80)})."
    else:
        ahead = ", the highest figure of the table: check it by other means before you believe it."
    return [*lines, f"The best score here, {figure(score)}, {reached}{ahead}" if known else ""]


HEADING = "## Reflection"
INVITATION = (
    f"{HEADING}\n\n"
    "_Write here what you make of it: what worked, what did not, and why; what you would try next. Everything from "
    "this heading on stays as it is when the report is written again._\n"
)
BEFORE = "report.before"  # .md: a report without the heading, which somebody else must have written
_FENCE = re.compile(rb" {0,3}(`{3,}|~{3,})(.*)")


def reader_text(report: Path) -> bytes:
    """Return the text after the generated part: the reader's text of an existing report, or an invitation.

    A report without the heading is someone's own: it is moved next to the new one, which says so.
    """
    if not report.is_file():
        return INVITATION.encode()
    try:
        old = report.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{report} cannot be read ({error.strerror}), and what was written into it would be lost"
        ) from (error)
    place = _place_of_heading(old)
    if place is not None:
        return old[place:]
    if not old.strip():
        return INVITATION.encode()
    aside = _unused(report.with_name(f"{BEFORE}.md"))
    with whole(aside) as partial:
        partial.write_bytes(old)
    return f"{INVITATION}\nThe report that was here before had no such heading: it is kept as {aside.name}.\n".encode()


def write_keeping(report: Path, text: str, kept: bytes) -> None:
    """Replace the report, atomically. `UnwritableError` if the system refuses."""
    with explained(report), whole(report) as partial:
        partial.write_bytes(text.encode() + kept)


def _place_of_heading(old: bytes) -> int | None:
    """Return the position of the first line with the heading outside fences, which quote what models wrote."""
    place, fence, last = 0, b"", None
    for line in old.splitlines(keepends=True):
        stripped = line.rstrip()
        is_heading = stripped == HEADING.encode()
        if is_heading and not fence:
            return place
        if is_heading:
            last = place
        if found := _FENCE.fullmatch(stripped):
            mark, rest = found[1], found[2].strip()
            if not fence:
                fence = mark if not (mark[:1] == b"`" and b"`" in rest) else b""
            elif mark.startswith(fence) and not rest:
                fence = b""
        place += len(line)
    return last  # somebody has opened a fence above it that is not closed


def _unused(path: Path) -> Path:
    """Return the path, or one with a number if it exists."""
    number, found = 1, path
    while found.exists() or found.is_symlink():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


STRATEGIES = {
    "simple": "every call asks the first prompt anew, with nothing before it: independent draws",
    "best_of_n": "several replies to the first prompt side by side, again and again; the verifier selects the best",
    "refine": "one conversation, in which the exact error is given back after a failure, and a larger set is asked for "
    "after a valid one",
    "hybrid": "as refine, with several replies to every prompt, of which the verifier selects the one to go on with",
}
PROMPTS = {
    "first": "the first prompt",
    "error": "the exact error given back",
    "extend": "a larger set asked for",
    "no_code": "a program asked for that was missing",
}
#: Outcomes of calls other than "ok".
CALLS = {
    "timeout": "no answer in time",
    "connection": "no connection",
    "empty": "an empty answer",
    "no_code": "a reply without a program",
    "truncated": "a reply cut at the limit of tokens",
    "broken": "an answer that is not in the protocol",
    "interrupted": "the run was stopped meanwhile",
}
#: Kinds of errors -> (whose they are, what they mean).
ERRORS = {
    "exception": ("program", "it raised an error"),
    "exit": ("program", "it ended before it gave points"),
    "timeout": ("program", "it took too long"),
    "memory": ("program", "it took too much memory"),
    "output": ("program", "it printed without end"),
    "disk": ("program", "it wrote too much"),
    "processes": ("program", "it ran too many processes"),
    "no_points": ("program", "it gave no points"),
    "type": ("program", "it gave values that are no integers"),
    "size": ("program", "it gave too many rows, digits or bytes"),
    "channel": ("program", "what it gave are no rows of integers"),
    "program": ("program", "it cannot be read, or is too large"),
    "empty": ("set", "it has no points"),
    "ragged": ("set", "its rows have different lengths"),
    "dimension": ("set", "its vectors have another dimension"),
    "zero_vector": ("set", "it holds the zero vector"),
    "too_close": ("set", "two of its points are too close, or equal"),
    "alarm": ("set", "its score is impossible: look at the verifier"),
}


def outcome_text(outcome: str) -> str:
    """Return an outcome of a call in words; "" if it is unknown.

    >>> outcome_text("http_429")
    'the endpoint refused it with status 429'
    """
    status = outcome.removeprefix("http_")
    if status != outcome and status.isdecimal() and len(status) == 3:
        return f"the endpoint refused it with status {status}"
    return CALLS.get(outcome, "")
