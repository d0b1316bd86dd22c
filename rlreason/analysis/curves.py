"""Draw RUN/curves.png from RUN/metrics.jsonl: again, or for a run that is still under way."""

import argparse

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.curves import draw_curves, read_metrics, title_of
from rlreason.runtime.streams import folded
from rlreason.runtime.verb import Answer, Parser


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason curves`."""
    parser.add_run("a training run's folder, such as runs/grpo/DATE")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Draw the curves; `ConfigError` where there is nothing to draw from."""
    folder = arguments.run
    if not (folder / "metrics.jsonl").is_file() or not (rows := read_metrics(folder)):
        raise ConfigError(f"RUN={folder} holds no metrics.jsonl with a row in it: give the folder of a training run")
    title = title_of(folder)
    with console.wait("drawing the curves"):
        picture = draw_curves(folder, title)
    figures = {"run": folder, "title": title, "picture": picture, "rows": len(rows), "last": rows[-1]}
    return Answer(folded(f"curves: {picture}", console.width), figures)
