"""What somebody wrote into a report stays when it is written again: all from "## Reflection" on, to the byte."""

import re
from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.runtime.atomic_files import explained, whole

HEADING = "## Reflection"
INVITATION = (
    f"{HEADING}\n\n"
    "_Write here what you make of it: what worked, what did not, and why; what you would try next. Everything from "
    "this heading on stays as it is when the report is written again._\n"
)
BEFORE = "report.before"  # .md: a report without the heading, which somebody else must have written
_FENCE = re.compile(rb" {0,3}(`{3,}|~{3,})(.*)")


def kept_text(report: Path) -> bytes:
    """What is to follow the part that is written anew: the reader's text of a report that is there, or an invitation.

    A report without the heading is somebody's own: it is kept beside the new one, which says so.
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
    """Replace the report, atomically. `UnwritableError` where the system refuses."""
    with explained(report), whole(report) as partial:
        partial.write_bytes(text.encode() + kept)


def _place_of_heading(old: bytes) -> int | None:
    """Where the first line with the heading begins that is not inside a fence, as what models wrote is."""
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
    """The path, or one with a number where something lies there."""
    number, found = 1, path
    while found.exists() or found.is_symlink():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found
