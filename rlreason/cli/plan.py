"""Show the memory that a run of these overrides takes, and what numbers of seeds and problems can show.

Overrides are those of a run, as in `rlreason plan model=qwen3_0_6b`; none: the default run. With `--seeds`, the
smallest difference of two settings that a sweep would settle, where accuracies go from 0 to 1; a sweep says the same of
itself before it starts (python -m rlreason -m ... dry=true). `rlreason doctor` looks at the machine as well.
"""

import argparse
from typing import Any

from rlreason.cli.check import requested_run
from rlreason.errors import ConfigError
from rlreason.model.plan import cure, figures, planned, table, verdict
from rlreason.records.console import Console
from rlreason.runtime.machine import believed_device
from rlreason.runtime.statistics import ASSUMED, LEVEL, smallest_difference
from rlreason.runtime.streams import Answer, Parser, number_in
from rlreason.runtime.text import duration
from rlreason.sweeps.texts import power_text, problems_of


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
    seeds, problems, settings, spread = arguments.seeds, arguments.problems, arguments.settings, arguments.spread
    runs, minutes = arguments.count, arguments.minutes
    if seeds is None and any(one is not None for one in (problems, settings, spread, runs, minutes)):
        options = "--problems, --settings, --spread, --runs and --minutes"
        raise ConfigError(f"{options} are about seeds of several runs: add --seeds 4, or leave them out")
    lines, found = list[str](), dict[str, Any]()
    if arguments.words or seeds is None:
        from rlreason.training.preflight import assumed_prompt

        run, _ = requested_run(arguments.words, "plan", console.say)
        outcome = planned(run, believed_device(), assumed_prompt(run))  # as far as it is known without torch
        lines += [*table(outcome), "", verdict(outcome)]
        lines += [f"cure: {cure(outcome)}"] if cure(outcome) else []
        found["memory"] = figures(outcome)
        problems = problems or problems_of(run)
    if seeds is not None:
        problems, settings = problems or 1000, settings or 2
        comparisons, spreads = max(1, settings - 1), list(ASSUMED) if spread is None else [spread]
        lines += ["", f"can show   {power_text(seeds, problems, comparisons, spread)}"]
        found |= {"seeds": seeds, "problems": problems, "settings": settings, "assumed": spread is None}
        found["spread"] = spreads
        for name, level in (("smallest_difference", LEVEL), ("smallest_difference_holm", LEVEL / comparisons)):
            found[name] = [smallest_difference(seeds, problems, one, level) for one in spreads]
        if minutes is not None:
            runs = runs or seeds * settings
            found |= {"runs": runs, "seconds": 60 * minutes * runs}
            lines.append(f"time       {duration(60 * minutes * runs)}: {runs} runs of {minutes:g} min")
    return Answer("\n".join(lines).lstrip("\n"), found)
