"""The distribution over seeds, and each setting against independent sampling at equal calls, in words that say no more
than the figures.
"""

import statistics
from collections.abc import Sequence

from rlreason.report.discovery.draws import FEW, Baseline
from rlreason.report.discovery.log import Log
from rlreason.report.discovery.picture import Panel
from rlreason.report.discovery.settings import Comparison, Setting
from rlreason.report.discovery.texts import counted, figure, listed, said, table, whole
from rlreason.statistics.best_of_k import smallest_p
from rlreason.statistics.differences import LEVEL
from rlreason.statistics.intervals import mean_interval

FEWEST_FOR_MEAN = 3  # seeds, for an interval of their mean
MOST_SEEDS = 20  # named in a cell
SEVERAL = 5  # seeds that a command proposes


def distribution(settings: Sequence[Setting]) -> list[str]:
    """A table with the final score of every seed, and what one seed cannot tell."""
    head = [
        "setting",
        "seeds",
        "final score of each seed",
        "median",
        "min-max",
        "mean (95% interval)",
        "calls",
        "valid",
    ]
    rows = [_row(setting) for setting in settings]
    lines = table(head, rows, frozenset({1, 3, 4, 5, 6, 7}))
    lines += [
        "",
        "calls: of the model, retries counted, all seeds together; valid: the share of replies whose set counts.",
    ]
    lines[-1] += f" The interval is Student's t over seeds, for {FEWEST_FOR_MEAN} or more."
    if any(log.ended is None for setting in settings for log in setting.logs):
        lines[-1] += " \\* has not ended."
    alone = [said(setting.label) for setting in settings if len(setting.logs) == 1]
    if alone:
        lines += ["", f"One seed: no distribution. It says little about a setting ({listed(alone)}): add seeds."]
    return lines


def _row(setting: Setting) -> list[str]:
    logs = setting.logs
    finals = [log.best.score for log in logs]
    each = [f"{figure(log.best.score)}{'' if log.ended is not None else chr(92) + '*'}" for log in logs[:MOST_SEEDS]]
    more = f" and {len(logs) - MOST_SEEDS} more" if len(logs) > MOST_SEEDS else ""
    mean, low, high = mean_interval(finals)
    told = f"{figure(round(mean, 1))} ({figure(round(low, 1))} to {figure(round(high, 1))})"
    told = f"{figure(mean)} (all alike)" if min(finals) == max(finals) else told
    return [
        said(setting.label),
        str(len(logs)),
        ", ".join(each) + more,
        figure(statistics.median(finals)),
        f"{figure(min(finals))}-{figure(max(finals))}",
        told if len(logs) >= FEWEST_FOR_MEAN else "",
        f"{sum(log.calls for log in logs):,}",
        share_of_valid(logs),
    ]


def share_of_valid(logs: Sequence[Log]) -> str:
    """Replies with a valid set, of all replies."""
    replies = sum(log.answered for log in logs)
    valid = sum(turn.is_valid for log in logs for turn in log.turns)
    return f"{valid} of {replies} ({min(valid / replies, 1):.0%})" if replies else "no reply"


def baseline_lines(panels: Sequence[Panel], comparisons: Sequence[Comparison]) -> list[str]:
    """Each baseline with how far it goes, then each setting against its own."""
    lines = [
        "A draw is one call of the first prompt with nothing before it, by whatever strategy; calls that gave no valid "
        "set count as 0, retries too, because the budget counts them. The best of k draws is never below the starting "
        "program, as no run is."
    ]
    for panel in panels:
        of = f" ({said(panel.title)})" if len(panels) > 1 else ""
        lines += ["", f"**Independent draws{of}:** {_reach(panel)}"]
    lines.append("")
    if any(len(one.setting.ended) < len(one.setting.logs) for one in comparisons):
        lines += ["Runs that have not ended are left out of what follows.", ""]
    lines += [f"- **{said(one.setting.label)}:** {verdict(one, comparisons)}" for one in comparisons]
    return lines


def _reach(panel: Panel) -> str:
    baseline = panel.baseline
    if not baseline.count:
        return f"none yet. {more_draws(panel)}"
    longest = max(log.calls for setting in panel.settings for log in setting.logs)
    reach = min(baseline.count, longest)
    ks = sorted({1, max(1, reach // 4), max(1, reach // 2), reach} - {0})
    told = [f"{_expected(baseline, k)} in {counted(k, 'call')}" for k in ks]
    runs = f"{counted(baseline.count, 'draw')} from {counted(baseline.runs, 'run')}"
    few = baseline.count < FEW
    bounds = "too few for an interval" if few else "in brackets the 95% bootstrap interval of the draws"
    text = f"{runs}; the expected best is {listed(told)}; {bounds}."
    if baseline.count < longest:
        text += f" They reach to {counted(baseline.count, 'call')}, and the longest run made {longest:,}. "
        text += more_draws(panel)
    return text


def _expected(baseline: Baseline, k: int) -> str:
    """The expected best of k draws with its interval, where there are draws enough for one."""
    (best,) = baseline.expected([k])
    if baseline.count < FEW:
        return figure(round(best, 1))
    (low,), (high,) = baseline.interval([k])
    return f"{figure(round(best, 1))} ({figure(round(low, 1))} to {figure(round(high, 1))})"


def more_draws(panel: Panel) -> str:
    """The words that give more draws of the same kind."""
    used = [log.seed for setting in panel.settings for log in setting.logs if log.strategy == "simple"]
    calls = max(1, *(log.calls for setting in panel.settings for log in setting.logs))
    return (
        f"More: the same command with `strategy=simple seed={whole(max(used, default=-1) + 1)} budget.calls={calls}`."
    )


def verdict(one: Comparison, family: Sequence[Comparison]) -> str:
    """A setting against independent draws, and "cannot tell" where the seeds or draws are too few to say."""
    if one.word == "itself":
        return "independent draws itself: it makes the baseline, and is not held against it."
    if one.word == "no draws":
        return "cannot tell: there is no call of the first prompt to compare it with."
    seeds, groups = len(one.bests), len(one.groups)
    middle = figure(statistics.median(one.bests)) + " in the median" * (seeds > 1)
    compared = (
        f"after {counted(one.calls, 'call')} the {'seed has' if seeds == 1 else f'{seeds} seeds have'} "
        f"{middle}; as many independent draws are expected to have "
        f"{_expected(one.baseline, one.calls)}"
    )
    if seeds == 1:
        return f"cannot tell, with one seed: {compared}."
    test = f"exact rank test of {seeds} seeds against {counted(groups, 'group')} of {counted(one.calls, 'draw')}"
    tested = sum(len(other.bests) > 1 and bool(other.groups) for other in family)
    if not one.can_tell:
        return f"cannot tell: {compared}. {_too_few(one, tested)}"
    p = "p < 0.001" if one.p < 0.001 else f"p = {one.p:.3f}"
    holm = f", Holm over {tested} comparisons" if tested > 1 else ""
    if one.word == "cannot tell":
        return f"cannot tell: {compared} ({test}: {p}{holm})."
    return f"{one.word} than independent draws: {compared} ({test}: {p}{holm})."


def _too_few(one: Comparison, family: int) -> str:
    """Why no outcome could have told, and what would change that."""
    seeds, groups = len(one.bests), len(one.groups)
    needed = next((n for n in range(groups, 60) if n and smallest_p(seeds, n) * family <= LEVEL), None)
    start = (
        f"The {counted(one.baseline.count, 'draw')} make {counted(groups, 'group')} of {one.calls:,}: {seeds} seeds "
        "against so few could not be told from chance, whatever their scores."
    )
    if needed is None or needed <= groups:
        return f"{start} Add seeds."
    more = counted(needed * one.calls - one.baseline.count, "more draw")
    return f"{start} Add {more} (`strategy=simple`), or seeds."
