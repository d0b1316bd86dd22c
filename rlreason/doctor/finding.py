"""One finding of `rlreason doctor`, and several of them as text."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from rlreason.runtime.streams import folded

OK, WARN, FAIL = "ok", "warn", "fail"
BEHIND = 15  # columns of the names
SHORT = {"antlr4-python3-runtime": "antlr4 runtime", "latex2sympy2_extended": "latex2sympy2"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it stands, and what helps where it is not well."""

    name: str
    state: str  # ok | warn | fail
    words: str
    cure: str = ""

    def figures(self) -> dict[str, Any]:
        """The same for `--json`."""
        return asdict(self)


def lines_of(findings: Iterable[Finding], width: int) -> list[str]:
    """Aligned lines, folded at `width` behind the names; a cure stands below what it cures.

    >>> lines_of([Finding("python", OK, "3.11"), Finding("disk", FAIL, "full", "free some space")], 60)
    ['  python         3.11', '! disk           full', '                 cure: free some space']
    """
    marks, out = {OK: " ", WARN: "?", FAIL: "!"}, []
    for one in findings:
        text = [one.words] + [f"cure: {one.cure}"] * bool(one.cure)
        rows = [row for part in text for row in folded(part, max(40, width - BEHIND - 2), 0).splitlines()]
        out.append(f"{marks[one.state]} {SHORT.get(one.name, one.name):<{BEHIND - 1}} {rows[0]}")
        out += [" " * (BEHIND + 2) + row.strip() for row in rows[1:]]
    return out
