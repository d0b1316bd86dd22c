"""Report the problems of runs that have finished, still run or were broken off: evidence, commonest causes, cures.

All monitors are replayed on the recorded metrics, also those that the run had switched off. The exit code is 1 where
a problem was found.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.health.examine import Health, examine
from rlreason.health.finding import Finding, MetricCourse
from rlreason.records.console import Console
from rlreason.records.files import HYDRA
from rlreason.records.reader import runs_in
from rlreason.runtime.streams import folded
from rlreason.runtime.subcommand import Answer, Parser

BARS = "\N{LOWER ONE EIGHTH BLOCK}▂▃▄▅▆▇█"
COLUMNS = 32  # of a sparkline
INDENT = "  "


def describe_health(name: str, health: Health, width: int) -> str:
    """Format the examination of one run."""
    problems = sum(finding.problem for finding in health.findings)
    verdict = f"{problems} problem{'s' * (problems > 1)}{_began_first(health)}" if problems else "No problem found"
    lines = [f"{name}: {health.stands}. {verdict}."]
    for finding in health.findings:
        lines += ["", *_finding_lines(finding, width)]
    return "\n".join(folded(line, width, len(INDENT) if line[:2] in ("! ", "- ") else None) for line in lines)


def _began_first(health: Health) -> str:
    """Name the problem that began first, where there are several: the others may follow from it."""
    begun = [finding for finding in health.findings if finding.problem and finding.step is not None]
    if len(begun) < 2:
        return ""
    first = min(begun, key=lambda finding: finding.step or 0)
    return f"; what began first is {first.rule}, at step {first.step}"


def _finding_lines(finding: Finding, width: int) -> Iterator[str]:
    yield f"{'!' if finding.problem else '-'} {finding.rule}: {finding.what}"
    rows = [("evidence", line) for line in finding.evidence]
    rows += [("course", sparkline(course)) for course in finding.courses]
    rows += [("causes", finding.causes), ("try", finding.cure)]
    before = ""
    for title, line in rows:
        if line:
            yield f"{INDENT}{title if title != before else '':<10}{line}"
            before = title


def sparkline(course: MetricCourse) -> str:
    """Draw a course as a line of bars with its first and its last value.

    >>> sparkline(MetricCourse("train/loss", [(1, 0.0), (2, 0.5), (3, 1.0)]))
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
    """Average neighbouring values, so that at most `most` are left.

    >>> bucketed([1.0, 3.0, 5.0, 7.0], 2), bucketed([1.0], 2)
    ([2.0, 6.0], [1.0])
    """
    n = min(len(values), most)
    cuts = [round(k * len(values) / n) for k in range(n + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in pairwise(cuts)]


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason health`."""
    parser.add_run("the folder of a run, or of a sweep: then of each of its runs", several=True)


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Examine each run."""
    folders = list(dict.fromkeys(run for folder in arguments.runs for run in _runs_of(folder)))
    texts, unread, figures, well = list[str](), list[str](), list[dict[str, Any]](), True
    for folder in folders:
        try:
            health = examine(folder)
        except ConfigError as error:
            if len(folders) == 1:
                raise
            unread.append(str(error))
            continue
        texts.append(describe_health(str(folder), health, console.width))
        well &= health.healthy
        figures.append(
            {
                "run": str(folder),
                "stands": health.stands,
                "healthy": health.healthy,
                "findings": [finding.plain() for finding in health.findings],
            }
        )
    texts += [f"! not read: {line}" for line in unread]
    if len(folders) > 1:
        ill = sum(not one["healthy"] for one in figures)
        texts.append(f"{len(figures)} runs, {ill} of them with problems." + f" {len(unread)} not read." * bool(unread))
    well &= not unread
    return Answer("\n\n".join(texts), {"healthy": well, "runs": figures, "not_read": unread}, 0 if well else 1)


def _runs_of(folder: Path) -> list[Path]:
    """Return the folder of a run itself; of a sweep, those of its runs, also of runs without settings."""
    if not (runs := runs_in(folder)):
        return [folder]
    unbegun = [path.parent for path in folder.glob(f"*/{HYDRA}") if path.parent not in runs]
    return sorted([*runs, *unbegun])
