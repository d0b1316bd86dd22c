"""`python -m rlreason.curves RUN`: draw a run's curves again, or those of a run that is still under way."""

import sys
from collections.abc import Sequence
from pathlib import Path

from rlreason.cli.entry import Parser, ended
from rlreason.records.console import Console
from rlreason.records.curves import draw_curves
from rlreason.records.reader import RunFolder


def main(words: Sequence[str]) -> None:
    """The command line."""
    parser = Parser(prog="python -m rlreason.curves", description="Draw RUN/curves.png from RUN/metrics.jsonl.")
    parser.add_argument("run", metavar="RUN", type=Path, help="a training run's folder, such as runs/grpo/DATE")
    run, console = RunFolder(parser.parse_args(words).run), Console()
    with console.wait("drawing the curves"):
        picture = draw_curves(run)
    console.say(f"curves: {picture}")


if __name__ == "__main__":
    ended(lambda: main(sys.argv[1:]))
