"""What is wrong with runs that have finished, go on or were broken off: evidence, commonest causes, what to try.

The monitors look at the recorded metrics again, all of them, whatever the run had switched off. The exit code is 1
where a problem was found.
"""

import argparse

from rlreason.errors import ConfigError
from rlreason.health.examine import examine
from rlreason.health.words import told
from rlreason.records.console import Console
from rlreason.records.reader import runs_in
from rlreason.runtime.verb import Answer, Parser


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason health`."""
    parser.add_run("the folder of a run, or of a sweep: then of each of its runs", several=True)


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Examine each run."""
    folders = list(dict.fromkeys(run for folder in arguments.runs for run in runs_in(folder) or [folder]))
    texts, figures, well = [], [], True
    for folder in folders:
        try:
            health = examine(folder)
        except ConfigError:
            if len(folders) == 1:
                raise
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
    text = "\n\n".join(texts)
    if len(folders) > 1:
        ill = sum(not one["healthy"] for one in figures)
        text += f"\n\n{len(folders)} runs, {ill} of them with problems."
    return Answer(text, {"healthy": well, "runs": figures}, 0 if well else 1)
