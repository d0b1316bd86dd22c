"""Draw RUN/curves.png from RUN/metrics.jsonl again, or of a run that is still in progress."""

import argparse

from rlreason.records.console import Console
from rlreason.records.reader import RunFolder, draw_curves, title_of
from rlreason.runtime.streams import Answer, Parser, folded


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason curves`."""
    parser.add_run("a training run's folder, such as runs/grpo/DATE")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Draw the curves; `ConfigError` if there is nothing to draw."""
    run = RunFolder(arguments.run)
    with console.wait("drawing the curves"):
        picture = draw_curves(run)
    figures = {"run": run.path, "title": title_of(run), "picture": picture}
    figures |= {"rows": len(run.metrics), "last": run.metrics[-1]}
    return Answer(folded(f"curves: {picture}", console.width), figures)
