"""`python -m rlreason.lab RUN [--step N]`: the command line of the loss laboratory."""

import argparse
import sys
from pathlib import Path

from rlreason.cli.entry import Parser, ended
from rlreason.config.store import register
from rlreason.records.console import Console
from rlreason.records.reader import RunFolder


def arguments(words: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m rlreason.lab",
        description="Compare every named objective with a run's own, on the run's saved responses and final "
        "policy: loss, gradient, clipping and the weight of each token. Nothing is sampled again.",
        epilog="Leaves RUN/lab/step_NNNNN.json and step_NNNNN.png.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, such as runs/grpo/DATE")
    parser.add_argument("--step", type=int, metavar="N", help="a saved training step (default: the last saved one)")
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    asked = arguments(words)
    from rlreason.analysis.saved_run import read_run, read_step

    register()
    folder = RunFolder(asked.run)
    run = read_run(folder)
    step, samples = read_step(folder, run, asked.step)
    console = Console(run.n_steps)
    with console.wait("loading torch and transformers"):  # after what can be mistaken
        from rlreason.analysis.gradient_report import draw, table, write_numbers
        from rlreason.analysis.gradients import laboratory
    with console.wait("comparing the objectives"):
        result = laboratory(folder, run, step, samples, console)
    console.table(table(result))
    with console.wait("drawing"):
        numbers, picture = write_numbers(asked.run, result), draw(asked.run, result)
    console.say(f"\npicture: {picture}, numbers: {numbers}")


if __name__ == "__main__":
    ended(lambda: main(sys.argv[1:]))
