"""Notes on what a run has learned: nothing of it is wrong by itself, and each is a reason to look."""

from collections.abc import Collection, Iterator, Sequence
from statistics import mean

from rlreason.health.finding import Finding
from rlreason.monitors.replay import Row

FEW_LIVE = 0.3  # share of groups with better and worse responses
MANY_CUT = 0.1  # share of truncated responses
LATE = 0.25  # of the rows: the end of a run
FEWEST = 4  # rows that make a course
#: A note -> the rule of a monitor that says more.
SAID_BY = {"accuracy_fell": "accuracy", "few_live_groups": "no_live_group", "many_cut": "truncated"}


def notes_on_learning(rows: Sequence[Row], known: Collection[str] = ()) -> Iterator[Finding]:
    """Accuracy that fell or did not move, few live groups, many cut responses, at the end of the run.

    `known`: the rules of what was found already; the same is not said twice.
    """
    yield from (finding for finding in _notes(rows) if SAID_BY.get(finding.rule) not in known)


def _notes(rows: Sequence[Row]) -> Iterator[Finding]:
    evaluated = [row for row in rows if row.get("eval/accuracy") is not None]
    if len(evaluated) > 1:
        yield from _accuracy(evaluated[0], evaluated[-1])
    dead, cut = late(rows, "reward/frac_reward_zero_std"), late(rows, "rollout/truncated")
    if dead is not None and 1 - dead < FEW_LIVE:
        what = f"only {1 - dead:.0%} of the groups held better and worse responses in the end: little signal a step"
        cure = "harder or easier questions, a larger group_size, max_resampling_rounds, or fewer steps"
        yield Finding("few_live_groups", what, (), "Most questions are mastered, or out of reach.", cure, problem=False)
    if cut is not None and cut > MANY_CUT:
        what = f"{cut:.0%} of the responses were cut at their limit in the end"
        yield Finding("many_cut", what, cure="raise sampling.max_tokens: a cut response earns nothing", problem=False)


def _accuracy(first: Row, last: Row) -> Iterator[Finding]:
    """Intervals over problems that overlap: the run may have moved nothing."""
    begin, end = (row["eval/accuracy"] or 0.0 for row in (first, last))
    low, high = last.get("eval/accuracy_low"), last.get("eval/accuracy_high")
    at_first = first.get("eval/accuracy_low"), first.get("eval/accuracy_high")
    if low is None or high is None or at_first[0] is None or at_first[1] is None:
        return
    step = int(last.get("rollout_step") or 0)
    told = f"accuracy was {begin:.3f} at first and {end:.3f} at step {step}"
    if high < at_first[0]:
        cure = "lower learning_rate, or stop at the best checkpoint (checkpoints/, rlreason curves RUN)"
        yield Finding("accuracy_fell", f"{told}: surely lower", cure=cure, step=step)
    elif low <= at_first[1]:
        cure = "ask more problems (eval.problems), run longer, or run more seeds"
        what = f"{told}: by these problems nobody can tell whether it learned"
        yield Finding("accuracy_did_not_move", what, cure=cure, problem=False, step=step)


def late(rows: Sequence[Row], metric: str) -> float | None:
    """The mean of a metric over the last quarter of its rows; None where there are too few."""
    values = [value for row in rows if (value := row.get(metric)) is not None]
    return mean(values[-max(1, int(LATE * len(values))) :]) if len(values) >= FEWEST else None
