"""A run's health as a text for a terminal: how it stands, then each finding with its evidence and what to try."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rlreason.health.examine import Health
from rlreason.health.finding import Course, Finding
from rlreason.runtime.streams import folded

BARS = "\N{LOWER ONE EIGHTH BLOCK}▂▃▄▅▆▇█"
COLUMNS = 32  # of a course that is drawn
INDENT = "  "


def told(name: str, health: Health, width: int) -> str:
    """All of it for one run."""
    problems = sum(finding.problem for finding in health.findings)
    verdict = f"{problems} problem{'s' * (problems > 1)}{_first(health)}" if problems else "No problem found"
    lines = [f"{name}: {health.stands}. {verdict}."]
    for finding in health.findings:
        lines += ["", *_told(finding, width)]
    return "\n".join(folded(line, width, len(INDENT) if line[:2] in ("! ", "- ") else None) for line in lines)


def _first(health: Health) -> str:
    """What began first, where several things went wrong: the others may follow from it."""
    begun = [finding for finding in health.findings if finding.problem and finding.step is not None]
    if len(begun) < 2:
        return ""
    first = min(begun, key=lambda finding: finding.step or 0)
    return f"; what began first is {first.rule}, at step {first.step}"


def _told(finding: Finding, width: int) -> Iterator[str]:
    yield f"{'!' if finding.problem else '-'} {finding.rule}: {finding.what}"
    rows = [("evidence", line) for line in finding.evidence] + [("course", drawn(course)) for course in finding.courses]
    rows += [("causes", finding.causes), ("try", finding.cure)]
    before = ""
    for title, line in rows:
        if line:
            yield f"{INDENT}{title if title != before else '':<10}{line}"
            before = title


def drawn(course: Course) -> str:
    """A course as a line of bars with its first and its last value.

    >>> drawn(Course("train/loss", [(1, 0.0), (2, 0.5), (3, 1.0)]))
    'train/loss ▁▅█  0 at step 1, 1 at step 3'
    """
    values = bucketed([value for _, value in course.points], COLUMNS)
    low, high = min(values), max(values)
    bars = "".join(
        BARS[round((len(BARS) - 1) * (value - low) / (high - low))] if high > low else BARS[0] for value in values
    )
    (first, begin), (last, end) = course.points[0], course.points[-1]
    return f"{course.metric} {bars}  {begin:.3g} at step {first}, {end:.3g} at step {last}"


def bucketed(values: Sequence[float], most: int) -> list[float]:
    """Means of neighbours, so that at most so many are left.

    >>> bucketed([1.0, 3.0, 5.0, 7.0], 2), bucketed([1.0], 2)
    ([2.0, 6.0], [1.0])
    """
    n = min(len(values), most)
    cuts = [round(k * len(values) / n) for k in range(n + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]
