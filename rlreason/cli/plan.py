"""Show the memory that a run of these overrides takes, and what numbers of seeds and problems can show.

Overrides are those of a run, as in `rlreason plan model=qwen3_0_6b`; none: the default run. With `--seeds`, the
smallest difference of two settings that a sweep would settle, where accuracies go from 0 to 1; a sweep says the same of
itself before it starts (python -m rlreason -m ... dry=true). `rlreason doctor` looks at the machine as well.
"""

import argparse
from collections.abc import Callable
from typing import Any

from rlreason.cli.doctor import requested_run
from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.model.savings import Planned, cure, planned, table, verdict
from rlreason.model.savings import figures as memory_figures
from rlreason.model.shapes import believed_device
from rlreason.records.console import Console
from rlreason.runtime.differences import ASSUMED, LEVEL, Spread, smallest_difference
from rlreason.runtime.streams import Answer, Parser, folded
from rlreason.runtime.text import duration
from rlreason.sweeps.preview import power_text, problems_of

MOST = 10**7
SETTINGS = 2


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason plan`."""
    whole, number = _whole, _number
    parser.add_argument(
        "words", metavar="WORD", nargs="*", default=[], help="settings of the run whose memory is planned"
    )
    parser.add_argument("--seeds", type=whole("seeds"), help="seeds of each setting: what they can show is said")
    parser.add_argument(
        "--problems", type=whole("problems"), help="in the final evaluation (those of the run by its words, or 1000)"
    )
    parser.add_argument(
        "--settings", type=whole("settings"), default=SETTINGS, help="in all, the reference among them (2)"
    )
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
    """Return the memory plan of the run, and what the seeds can show; either one if requested."""
    if arguments.seeds is None and (given := _idle(arguments)):
        raise ConfigError(f"{given} is about seeds of several runs: add --seeds 4, or leave it out")
    lines, figures, problems = list[str](), dict[str, Any](), arguments.problems
    if arguments.words or arguments.seeds is None:
        run = requested_run(arguments.words, "plan", console.say).run
        told = plan_here(run)
        helps = f"cure: {cure(told)}" if cure(told) else ""
        said = [folded(text, console.width, 0) for text in (verdict(told), helps) if text]
        lines += [*table(told), "", *said] if told.plan else [said[0]]
        figures["memory"] = memory_figures(told)
        problems = problems or problems_of(run, None)
    if arguments.seeds is not None:
        shown, of_seeds = _of_seeds(arguments, problems or 1000)
        lines += [""] * bool(lines) + [folded(line, console.width) for line in shown]
        figures |= of_seeds
    return Answer("\n".join(lines), figures)


def plan_here(run: RunConfig) -> Planned:
    """Return the memory plan of a run on this machine, as far as it is known without torch."""
    from rlreason.training.preflight import assumed_prompt

    return planned(run, believed_device(), assumed_prompt(run))


def _idle(arguments: argparse.Namespace) -> str:
    """Return an option that was given but only has a meaning with seeds."""
    given = {"spread": arguments.spread, "runs": arguments.count, "minutes": arguments.minutes}
    given |= {
        "problems": arguments.problems,
        "settings": None if arguments.settings == SETTINGS else arguments.settings,
    }
    return next((f"--{name} {value:g}" for name, value in given.items() if value is not None), "")


def _of_seeds(arguments: argparse.Namespace, problems: int) -> tuple[list[str], dict[str, Any]]:
    """Return the smallest difference for these numbers, and the time of all runs."""
    seeds, comparisons = arguments.seeds, max(1, arguments.settings - 1)
    residual = ASSUMED[0].residual
    given = None if arguments.spread is None else Spread(arguments.spread**2, residual)
    spread = None if given is None else (given, f"seeds that spread by {arguments.spread:g}, half of it in both")
    lines = [f"can show   {power_text(seeds, problems, spread, comparisons)}"]
    spreads = ASSUMED if given is None else (given,)
    figures: dict[str, Any] = {
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
    return lines, figures


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
