"""Show the memory that a run of these overrides takes, and what numbers of seeds and problems can show.

Overrides are those of a run, as in `rlreason plan model=qwen3_0_6b`; none: the default run. With `--seeds`, the
smallest difference of two settings that a sweep would settle, where accuracies go from 0 to 1; a sweep says the same of
itself before it starts (python -m rlreason -m ... dry=true). With `--gpu`, memory and hours on a card that is not here,
as in `rlreason plan experiment=cs336_2025 --gpu h100`; with `--hours 20` too, which sweeps, seeds and steps of that
assignment fit into 20 hours of it. `rlreason doctor` looks at the machine as well.
"""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlreason.cli.check import reading, requested_run
from rlreason.cli.compose import composed_run
from rlreason.cli.flags import read
from rlreason.cli.sweep import designed, file_of, shared_config
from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.model.hours import CARDS, Card, hours
from rlreason.model.plan import cure, figures, planned, table, verdict
from rlreason.records.console import Console
from rlreason.runtime.machine import believed_device
from rlreason.runtime.statistics import ASSUMED, LEVEL, smallest_difference
from rlreason.runtime.streams import Answer, Parser, number_in
from rlreason.runtime.text import duration
from rlreason.sweeps.design import key_of
from rlreason.sweeps.texts import power_text, problems_of

SEEDS = (4, 3, 2, 1)  # that are tried


class SweepCost(NamedTuple):
    """What one sweep of an assignment takes on a card: its runs of each seed, and the hours of all of these."""

    sweep: str
    runs: int
    low: float
    high: float


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
    parser.add_argument("--gpu", choices=CARDS, help="a card instead of this machine; with the hours on it")
    fit = "with --gpu and experiment=: which sweeps and seeds of the assignment fit into so many hours"
    parser.add_argument("--hours", type=number, help=fit)
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
    if arguments.hours is not None and arguments.gpu is None:
        raise ConfigError(f"--hours {arguments.hours:g} is about a card: add --gpu h100, or leave it out")
    if runs is not None and minutes is None:
        raise ConfigError(f"--runs {runs} is for the time: add --minutes, of one run, or leave it out")
    lines, found = list[str](), dict[str, Any]()
    if arguments.words or seeds is None or arguments.gpu is not None:
        from rlreason.training.preflight import assumed_prompt

        words, device, card = arguments.words, believed_device(), CARDS.get(arguments.gpu)
        if card is not None:
            device = card.device(arguments.gpu)
            words = [*words, *(["rollout=vllm"] if "rollout" not in map(key_of, words) else [])]
        run, _ = requested_run(words, "plan", console.say)
        outcome = planned(run, device, assumed_prompt(run))  # as far as it is known without torch
        lines += [*table(outcome), "", verdict(outcome)]
        lines += [f"cure: {cure(outcome)}"] if cure(outcome) else []
        found["memory"] = figures(outcome)
        problems = problems or problems_of(run)
        if card is not None and outcome.work is not None:
            low, high = hours(run, outcome.work.shape.numbers, card)
            lines.append(f"time: {hours_text(low, high)} a run, an estimate by step times {card.source}")
            found["hours"] = {"low": low, "high": high, "source": card.source}
            if arguments.hours is not None:
                with console.wait("composing the sweeps"):
                    rows = sweeps_of(words, outcome.work.shape.numbers, card)
                lines += ["", *fitting_sweeps(rows, arguments.hours)]
                found["sweeps"] = [row._asdict() for row in rows]
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


def sweeps_of(words: Sequence[str], parameters: int, card: Card) -> list[SweepCost]:
    """Return the cost of each sweep of the assignment that `experiment=` names, in the handout's order.

    Every sweep is composed as its start would, each with one seed.
    """
    from rlreason.report.assignment import course_of  # slow to import

    course = next((word.partition("=")[2] for word in words if key_of(word) == "experiment"), "")
    try:
        questions = course_of(course).questions
    except KeyError:
        raise ConfigError(f"experiment={course}: --hours is about an assignment: add experiment=cs336_2025") from None
    rows = list[SweepCost]()
    for sweep in dict.fromkeys(sweep for question in questions for sweep in question.sweeps):
        request = read(["-m", f"sweep={sweep}", *words])
        with reading(request, note=str) as request:
            if file_of(request.overrides).chain:
                continue
            design, _ = designed(request, shared_config(request), note=str)
            seed = design.runs[0].seed
            runs = [one for one in design.runs if one.seed == seed]
            each = [composed_run(one.overrides, request.config_name, True, []).run for one in runs]
        costs = [hours(run, parameters, card) for run in each if isinstance(run, RunConfig)]
        rows.append(SweepCost(sweep, len(runs), sum(low for low, _ in costs), sum(high for _, high in costs)))
    return rows


def fitting_sweeps(rows: Sequence[SweepCost], limit: float) -> list[str]:
    """Say what fits into `limit` hours: all sweeps with the most seeds, or else the first ones with one."""
    lines = [f"{'sweep of one seed':<36}{'runs':>5}  hours"]
    lines += [f"{row.sweep:<36}{row.runs:>5}  {hours_text(row.low, row.high)}" for row in rows]
    n, total = len(rows), sum(row.high for row in rows)
    seeds = next((seeds for seeds in SEEDS if seeds * total <= limit), 1)
    while n and seeds * sum(row.high for row in rows[:n]) > limit:
        n -= 1
    used = seeds * sum(row.high for row in rows[:n])
    what = "all of them fit" if n == len(rows) else f"the first {n} of {len(rows)} fit"
    typed = f"seed={','.join(map(str, range(seeds)))}"
    lines.append(f"{limit:g} hours: {what}, with {typed}: at most {duration(3600 * used)}")
    if seeds == 1:
        lines.append("one seed tells trained models apart, and no settings")
    return lines


def hours_text(low: float, high: float) -> str:
    """Format a span of hours."""
    return f"{duration(3600 * low)} to {duration(3600 * high)}"
