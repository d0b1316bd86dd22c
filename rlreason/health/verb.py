"""What is wrong with runs that have finished, go on or were broken off: evidence, commonest causes, what to try.

The monitors look at the recorded metrics again, all of them, whatever the run had switched off. The exit code is 1
where a problem was found.
"""

import argparse
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.health.examine import examine
from rlreason.health.words import told
from rlreason.records.console import Console
from rlreason.records.files import HYDRA
from rlreason.records.reader import runs_in
from rlreason.runtime.verb import Answer, Parser


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
        texts.append(told(str(folder), health, console.width))
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
    """The folder of a run itself; of a sweep, those of its runs, also of those that never wrote their settings."""
    if not (runs := runs_in(folder)):
        return [folder]
    unbegun = [path.parent for path in folder.glob(f"*/{HYDRA}") if path.parent not in runs]
    return sorted([*runs, *unbegun])
