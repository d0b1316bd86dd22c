"""Inside the sandbox: run the program, and write the set that it gives to the channel as plain text integers.

    points            a first line, then one row a line, integers in decimal with single spaces; then
    end N             the number of rows; nothing may follow
    error KIND        instead: why there is no set; what follows is text of the program's

Started as `python -I -B run_program.py PROGRAM MOST_ROWS MOST_DIGITS`. What is checked here helps a person to find a
mistake and is believed by nobody: the program shares this process, and only the integers count.
"""

import contextlib
import os
import sys
import types
from os import _exit as leave
from os import write

CHANNEL = 3
INTEGERS = {f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)} | {"longlong", "ulonglong"}  # of numpy
LONGEST_ROW = 1000
LONGEST_TEXT = 4000


class Refused(Exception):  # noqa: N818  # what is said, not an error of this program
    """Why there is no set: its kind and a message."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind, self.text = kind, text


def main() -> None:
    """Run, write, end. Threads and exit functions of the program do not run."""
    program, most_rows, most_digits = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sys.argv[:] = [program]
    set_digits = sys.set_int_max_str_digits
    try:
        given = value_of(loaded(program))
        set_digits(most_digits + 10 if most_digits >= 640 else 640)
        text = rows_text(given, most_rows, most_digits)
    except Refused as refused:
        text = f"error {refused.kind}\n{refused.text[:LONGEST_TEXT]}"
    except MemoryError:
        text = "error memory\nMemoryError"
    except SystemExit as error:
        text = f"error exit\nthe program called sys.exit({error.code!r:.100}) before it gave points"
    except BaseException as error:
        text = f"error exception\n{described(error, program)[-LONGEST_TEXT:]}"
    data = text.encode("utf-8", "backslashreplace")
    with contextlib.suppress(BaseException):  # replaced or closed by the program
        sys.stdout.flush()
    while data:
        data = data[write(CHANNEL, data) :]
    leave(0)


def loaded(path: str) -> types.ModuleType:
    """Load the program as a module named `program`."""
    with open(path, "rb") as file:
        source = file.read()
    module = types.ModuleType("program")
    module.__file__ = path
    sys.modules["program"] = module
    sys.path.insert(0, os.path.dirname(path))
    exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    return module


def value_of(module: types.ModuleType) -> object:
    """Return the program's set, by the first of the interfaces that it has."""
    names = module.__dict__
    if "run_code" in names:
        return without_dimension(names["run_code"]())
    if "get_centers" in names:
        return without_dimension(names["get_centers"]())
    if "points" in names:
        return without_dimension(names["points"])
    raise Refused("no_points", "the program defines none of run_code(), get_centers() and points")


def without_dimension(given: object) -> object:
    """Return the points of (points, d)."""
    return given[0] if isinstance(given, tuple) and len(given) == 2 and not is_row(given[1]) else given


def is_row(value: object) -> bool:
    """Return whether a value may be a row of numbers, by its class."""
    return isinstance(value, (list, tuple)) or is_array(value)


def is_array(value: object) -> bool:
    """Return whether a value is an array of numpy's, of any type."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def listed(value: object) -> object:
    """Return arrays of integers or objects as lists, other values unchanged; `Refused` for other arrays."""
    if not is_array(value):
        return value
    kind, axes = value.dtype.kind, value.ndim  # type: ignore[attr-defined]
    if kind not in "iuO" or axes == 0:
        what = "a single number" if axes == 0 else f"of type {value.dtype}"  # type: ignore[attr-defined]
        raise Refused("type", f"an array of numpy's is {what}: integers only")
    return value.tolist()  # type: ignore[attr-defined]


def rows_text(given: object, most_rows: int, most_digits: int) -> str:
    """Return the rows as text; `Refused` if something is no plain integer, or there is too much of it."""
    given = listed(given)
    if isinstance(given, (str, bytes, bytearray, dict)) or not hasattr(type(given), "__iter__"):
        raise Refused("type", f"the points are of class {type(given).__name__}: give a list of lists of integers")
    lines = ["points"]
    for number, row in enumerate(given):  # type: ignore[var-annotated, arg-type]
        if number >= most_rows:
            raise Refused("size", f"more than {most_rows} points")
        lines.append(row_text(row, number, most_digits))
    return "\n".join([*lines, f"end {len(lines) - 1}", ""])


def row_text(row: object, number: int, most_digits: int) -> str:
    """Return one row as text."""
    row = listed(row)
    if not isinstance(row, (list, tuple)):
        raise Refused("type", f"point {number} is of class {type(row).__name__}: a point is a list of integers")
    words: list[str] = []
    for value in row:
        if len(words) >= LONGEST_ROW:
            raise Refused("size", f"point {number} has more than {LONGEST_ROW} coordinates")
        if type(value).__module__ == "numpy" and type(value).__name__ in INTEGERS:
            value = value.item()
        if type(value) is not int:
            shown = repr(value)[:60] if type(value) in (float, bool, complex, str, type(None)) else "a value"
            raise Refused("type", f"point {number} holds {shown} of class {type(value).__name__}: integers only")
        if value.bit_length() > most_digits * 3.33:
            raise Refused("size", f"point {number} holds an integer of more than {most_digits} digits")
        words.append(int.__repr__(value))
    return " ".join(words)


def described(error: BaseException, program: str) -> str:
    """Return the error with the lines of the program in its traceback, as Python prints it."""
    import traceback

    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == program]
    places = "".join(traceback.format_list(frames[-5:])).replace(f'"{program}"', '"program.py"')
    said = "".join(traceback.format_exception_only(error)).replace(f'"{program}"', '"program.py"')
    return f"{places}{said[: LONGEST_TEXT // 2]}".strip()


if __name__ == "__main__":
    main()
