"""Show the memory that a run of these overrides takes, and what numbers of seeds and problems can show.

Overrides are those of a run, as in `rlreason plan model=qwen3_0_6b`; none: the default run. With `--seeds`, the
smallest difference of two settings that a sweep would settle, where accuracies go from 0 to 1; a sweep says the same of
itself before it starts (python -m rlreason -m ... dry=true). `rlreason doctor` looks at the machine as well.
"""

import argparse
from typing import Any

from rlreason.cli.doctor import requested_run
from rlreason.cli.subcommands import number_in
from rlreason.errors import ConfigError
from rlreason.model.savings import cure, planned, table, verdict
from rlreason.model.savings import figures as memory_figures
from rlreason.model.shapes import believed_device
from rlreason.records.console import Console
from rlreason.runtime.differences import ASSUMED, LEVEL, Spread, smallest_difference
from rlreason.runtime.streams import Answer, Parser, folded
from rlreason.runtime.text import duration
from rlreason.sweeps.preview import power_text, problems_of


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason plan`."""
    whole, number = number_in(1, 10**7, int), number_in(1e-6, 10**7)
    parser.add_argument(
        "words", metavar="WORD", nargs="*", default=[], help="settings of the run whose memory is planned"
    )
    parser.add_argument("--seeds", type=whole, help="seeds of each setting: what they can show is said")
    problems = "in the final evaluation (those of the run by its words, or 1000)"
    parser.add_argument("--problems", type=whole, help=problems)
    parser.add_argument("--settings", type=whole, help="in all, the reference among them (2)")
    spread = "standard deviation of a setting's accuracy over seeds, such as 0.03; without it 0.02 to 0.05 is assumed"
    parser.add_argument("--spread", type=number_in(1e-6, 1), help=spread)
    runs = "for the time: how many; without it settings x seeds"
    parser.add_argument("--runs", dest="count", metavar="RUNS", type=whole, help=runs)
    parser.add_argument("--minutes", type=number, help="for the time: of one run")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Return the memory plan of the run, and what the seeds can show; either one if requested."""
    given = {name: getattr(arguments, name) for name in ("spread", "count", "minutes", "problems", "settings")}
    idle = [name for name, value in given.items() if value is not None]
    if arguments.seeds is None and idle:
        option = f"--{idle[0]} {given[idle[0]]:g}".replace("count", "runs")
        raise ConfigError(f"{option} is about seeds of several runs: add --seeds 4, or leave it out")
    lines, figures, problems = list[str](), dict[str, Any](), arguments.problems
    if arguments.words or arguments.seeds is None:
        from rlreason.training.preflight import assumed_prompt

        run = requested_run(arguments.words, "plan", console.say).run
        told = planned(run, believed_device(), assumed_prompt(run))  # as far as it is known without torch
        helps = f"cure: {cure(told)}" if cure(told) else ""
        said = [folded(text, console.width, 0) for text in (verdict(told), helps) if text]
        lines += [*table(told), "", *said] if told.plan else [said[0]]
        figures["memory"] = memory_figures(told)
        problems = problems or problems_of(run)
    if arguments.seeds is not None:
        shown, of_seeds = _of_seeds(arguments, problems or 1000)
        lines += [""] * bool(lines) + [folded(line, console.width) for line in shown]
        figures |= of_seeds
    return Answer("\n".join(lines), figures)


def _of_seeds(arguments: argparse.Namespace, problems: int) -> tuple[list[str], dict[str, Any]]:
    """Return the smallest difference for these numbers, and the time of all runs."""
    seeds, settings = arguments.seeds, arguments.settings or 2
    comparisons = max(1, settings - 1)
    residual = ASSUMED[0].residual
    given = None if arguments.spread is None else Spread(arguments.spread**2, residual)
    spread = None if given is None else (given, f"seeds that spread by {arguments.spread:g}, half of it in both")
    lines = [f"can show   {power_text(seeds, problems, spread, comparisons)}"]
    spreads = ASSUMED if given is None else (given,)
    figures: dict[str, Any] = {
        "seeds": seeds,
        "problems": problems,
        "settings": settings,
        "assumed": given is None,
        "spread": [one.seeds**0.5 for one in spreads],
        "smallest_difference": [smallest_difference(seeds, problems, one) for one in spreads],
        "smallest_difference_holm": [smallest_difference(seeds, problems, one, LEVEL / comparisons) for one in spreads],
    }
    if arguments.minutes is not None:
        runs = arguments.count or seeds * settings
        figures |= {"runs": runs, "seconds": 60 * arguments.minutes * runs}
        lines.append(f"time       {duration(60 * arguments.minutes * runs)}: {runs} runs of {arguments.minutes:g} min")
    elif arguments.count is not None:
        raise ConfigError(f"--runs {arguments.count} needs the time of one: add --minutes")
    return lines, figures
