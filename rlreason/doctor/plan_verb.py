"""What so many seeds and problems can show: the smallest difference between two settings that a sweep would settle.

A sweep says the same of itself before it starts (python -m rlreason -m ... dry=true). Accuracies go from 0 to 1.
"""

import argparse
from collections.abc import Callable

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.runtime.streams import folded
from rlreason.runtime.text import duration
from rlreason.runtime.verb import Answer, Parser
from rlreason.statistics import ASSUMED, Spread, smallest_difference
from rlreason.statistics.differences import LEVEL
from rlreason.sweeps.plan import shown_by

MOST = 10**7


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason plan`."""
    whole, number = _whole, _number
    parser.add_argument("--seeds", type=whole("seeds"), required=True, help="seeds of each setting")
    parser.add_argument("--problems", type=whole("problems"), default=1000, help="in the final evaluation (1000)")
    parser.add_argument("--settings", type=whole("settings"), default=2, help="in all, the reference among them (2)")
    parser.add_argument(
        "--spread",
        type=number("spread"),
        help="standard deviation of a setting's accuracy over seeds, such as 0.03; without it 0.02 to 0.05 is assumed",
    )
    parser.add_argument(
        "--runs",
        dest="count",
        metavar="RUNS",
        type=whole("runs"),
        help="for the time: how many; without it settings x seeds",
    )
    parser.add_argument("--minutes", type=number("minutes"), help="for the time: of one run")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """The smallest difference by the numbers given, and the time of all runs."""
    seeds, problems, comparisons = arguments.seeds, arguments.problems, max(1, arguments.settings - 1)
    residual = ASSUMED[0].residual
    given = None if arguments.spread is None else Spread(arguments.spread**2, residual)
    spread = None if given is None else (given, f"seeds that spread by {arguments.spread:g}, half of it in both")
    lines = [f"can show   {shown_by(seeds, problems, spread, comparisons)}"]
    spreads = ASSUMED if given is None else (given,)
    figures = {
        "seeds": seeds,
        "problems": problems,
        "settings": arguments.settings,
        "assumed": given is None,
        "spread": [one.seeds**0.5 for one in spreads],
        "smallest_difference": [smallest_difference(seeds, problems, one) for one in spreads],
        "smallest_difference_holm": [smallest_difference(seeds, problems, one, LEVEL / comparisons) for one in spreads],
    }
    if arguments.minutes is not None:
        runs = arguments.count or seeds * arguments.settings
        figures |= {"runs": runs, "seconds": 60 * arguments.minutes * runs}
        lines.append(f"time       {duration(60 * arguments.minutes * runs)}: {runs} runs of {arguments.minutes:g} min")
    elif arguments.count is not None:
        raise ConfigError(f"--runs {arguments.count} needs the time of one: add --minutes")
    return Answer("\n".join(folded(line, console.width) for line in lines), figures)


def _whole(name: str) -> Callable[[str], int]:
    def read(word: str) -> int:
        if not word.isdecimal() or not 1 <= int(word) <= MOST:
            raise ConfigError(f"--{name} {word} must be a whole number from 1 to {MOST}: try --{name} 4")
        return int(word)

    return read


def _number(name: str) -> Callable[[str], float]:
    def read(word: str) -> float:
        try:
            number = float(word)
        except ValueError:
            number = 0.0
        most = 1.0 if name == "spread" else float(MOST)
        if not 0 < number <= most:
            raise ConfigError(f"--{name} {word} must be a number above 0 and at most {most:g}: try --{name} 0.03")
        return number

    return read
