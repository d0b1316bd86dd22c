"""Findings, and the monitors that make them: of diverging numbers, trainer against engine, samples, and rewards."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from rlreason.config.groups import MonitorsConfig
from rlreason.runtime.statistics import fewer_p

#: Rule -> what it finds (with the finding's figures), where it is always put alike; its commonest causes; what to try.
RULES: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("rules.yaml").read_text("utf-8"))


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem or a note about a run: what a live run warns of, `health` lists and a report tabulates."""

    rule: str  # its name, often a monitor's
    what: str  # the problem, in a sentence with its figures
    cure: str = ""  # what to try
    figures: dict[str, float] = field(default_factory=dict)
    problem: bool = True  # or a note, which makes no run unhealthy
    evidence: Sequence[str] = ()  # steps, files, lines
    causes: str = ""  # the commonest causes, in a sentence
    step: int | None = None  # where it began


def found(entry: str, figures: dict[str, float] | None = None, what: str = "", **more: Any) -> Finding:
    """Return a finding with the words of an entry of rules.yaml, "RULE" or "RULE: CASE". `what`: another sentence."""
    own, figures = RULES[entry], figures or {}
    what, cure = what or own["what"].format(**figures), own.get("cure", "").format(**figures)
    return Finding(entry.partition(":")[0], what, cure, figures, causes=own.get("causes", ""), **more)


Metrics = Mapping[str, float]
FEWEST_ASKED = 8  # questions; an evaluation of fewer says too little


@dataclass(frozen=True, slots=True)
class Observation:
    """The input of the monitors after a step or an evaluation."""

    metrics: Metrics
    updates: Sequence[Metrics]  # of the step, one by one
    limits: MonitorsConfig
    #: Metric -> its first value in the run and those of earlier steps, the largest of each step's updates.
    history: Mapping[str, Sequence[float]]
    group_size: int
    evaluations: Sequence[Metrics]  # all of the run; empty where none has been added
    eval_limit: str  # the setting at which evaluations cut responses

    def value(self, name: str, default: float = 0.0) -> float:
        """Return a metric of the step or the evaluation; `default` where it was not measured."""
        return self.metrics.get(name, default)

    def worst(self, name: str) -> float | None:
        """Return the largest value of a metric among the step's updates; None where none measured it."""
        return max((u[name] for u in self.updates if name in u), default=None)


# ---- monitors ----

SAMPLED, EVALUATED = "rollout/mismatch_mean", "eval/mismatch_mean"
#: Metrics that must be numbers; loss and gradient norm have rules of their own.
WATCHED = re.compile("train/(?!loss$|grad_norm$)|rollout/|reward/|eval/")

Found = dict[str, float] | Finding | None  # the figures of a finding of its name, or another
Look = Callable[[Observation], Found]
MONITORS: dict[str, Look] = {}  # by name, in the order in which they are asked
DIVERGES = ("nan", "skipped_update", "gradient_norm", "kl", "accuracy")  # a run that one of these stops has diverged


def monitor(look: Look) -> Look:
    """Register a function as the monitor of its name, without the underscore."""
    MONITORS[look.__name__[1:]] = look
    return look


def in_a_row(values: Sequence[float], holds: Callable[[float], bool]) -> int:
    """Count the latest values in a row for which `holds` is true, and the current one."""
    return 1 + next((n for n, value in enumerate(reversed(values)) if not holds(value)), len(values))


def exploded(
    name: str, now: float | None, before: Sequence[float], after: int, factor: float, above: float = 0.0
) -> dict[str, float] | None:
    """Return the figures of a value above `factor` times the median of before, and `above`, after so many values."""
    if now is None or len(before) < after or now <= max(above, factor * median(before)):
        return None
    return {name: now, "median": median(before)}


def start_and_end(values: Sequence[float], width: int) -> tuple[float, float] | None:
    """Return the first value, as a policy can change in three steps, and the median of the last `width`, if later."""
    return (values[0], median(values[-width:])) if len(values) > width else None


@monitor
def _nan(seen: Observation) -> Found:
    # A gradient that is not finite moves no weight.
    if not all(math.isfinite(update.get("train/loss", 0.0)) for update in seen.updates):
        return found("loss")
    tried = [update for update in seen.updates if not update.get("train/empty_updates")]
    if tried and all(update.get("train/skipped_updates") and not update.get("train/overflows") for update in tried):
        return found("gradient")
    if broken := seen.value("train/moments_not_finite"):
        return found("optimizer", {"tensors": broken})
    for name, value in seen.metrics.items():
        if WATCHED.match(name) and not math.isfinite(value):
            return found("metric", what=f"{name} is no number")
    return None


@monitor
def _skipped_update(seen: Observation) -> Found:
    count = seen.value("train/skipped_updates")
    if count and count == seen.value("train/overflows"):
        return found("skipped_update: overflow", {"skipped": count, "loss_scale": seen.value("train/loss_scale")})
    return {"skipped": count} if count else None


@monitor
def _gradient_norm(seen: Observation) -> Found:
    # Steps without a gradient do not count. A norm that fell with the loss may rise again to its first values.
    before = [norm for norm in seen.history["train/grad_norm"] if norm > 0]
    now, first, limits = seen.worst("train/grad_norm"), max(before[:5], default=0.0), seen.limits
    return exploded("gradient_norm", now, before, limits.gradient_norm_after, limits.gradient_norm_factor, first)


@monitor
def _kl(seen: Observation) -> Found:
    for name, entry in (("train/kl_reference", "kl: reference"), ("train/approx_kl", "kl")):
        limits = seen.limits.kl_after, seen.limits.kl_factor, seen.limits.kl_above
        if figures := exploded("kl", seen.worst(name), seen.history[name], *limits):
            return found(entry, figures)
    return None


@monitor
def _first_ratio(seen: Observation) -> Found:
    """Check that pi / pi_old is 1, also by the approximate KL, while the weights are still those that sampled."""
    first, bound = seen.updates[0], seen.limits.first_ratio_bound
    if "train/ratio" not in first or seen.value("rollout/staleness"):
        return None
    ratio, kl = first["train/ratio"], first.get("train/approx_kl", 0.0)
    if abs(ratio - 1) <= bound and kl <= bound:
        return None
    return {"ratio": ratio, "approx_kl": kl}


@monitor
def _still_weights(seen: Observation) -> Found:
    """Check that updates change the weights, where the learning rate is at least half of its highest."""
    name, below = "train/weights_changed", seen.limits.still_weights_below
    rate, changed = seen.worst("train/learning_rate") or 0.0, seen.worst(name)
    if changed is None or changed >= below or rate < 0.5 * max([rate, *seen.history["train/learning_rate"]]):
        return None
    row = in_a_row(seen.history[name], lambda share: share < below)
    if rate == 0 or not seen.worst("train/grad_norm") or row < seen.limits.still_weights_steps:
        return None
    return {"changed": changed, "learning_rate": rate, "steps": row}


POOLED = 8  # evaluations, few, so that a run that was at 0 for long and then learned has an accuracy to lose
COLLAPSED = 0.2  # of the accuracy before
COLLAPSE_LEVEL = 1e-4


@monitor
def _accuracy(seen: Observation) -> Found:
    """Check that the last two accuracies are not significantly below a fifth of that of the evaluations before.

    Each of the two is compared with the (up to 8) evaluations before them, pooled; both together by Fisher's exact
    test. Fewer than 8 problems conclude nothing. Simulated, accuracies of 0.01 to 0.8, 8 to 256 problems, accuracy
    unchanged: ends at most 0.2% of runs of 50 evaluations (a rule of 0 right against the best one: up to 100%).
    """
    finite = [e for e in seen.evaluations if math.isfinite(e["eval/accuracy"])]
    if len(finite) < 3 or finite[-1] is not seen.evaluations[-1]:
        return None
    accuracies = [e["eval/accuracy"] for e in finite]
    asked = [int(e.get("eval/questions", e.get("eval/problems", 0))) for e in finite]  # repeated rows: no evidence
    right = [round(accuracy * n, 6) for accuracy, n in zip(accuracies, asked, strict=True)]  # several samples: no whole
    earlier, newest = slice(-2 - POOLED, -2), slice(-2, None)
    k_before, n_before = sum(map(math.floor, right[earlier])), sum(asked[earlier])
    k, n = sum(map(math.ceil, right[newest])), sum(asked[newest])
    if not n_before or min(asked[newest]) < FEWEST_ASKED or max(accuracies[newest]) >= COLLAPSED * k_before / n_before:
        return None
    if fewer_p(k, n, k_before, n_before) > COLLAPSE_LEVEL:
        return None
    return {"best": max(accuracies), "accuracy": accuracies[-1], "problems": asked[-1]}


@monitor
def _entropy(seen: Observation) -> Found:
    entropy = seen.value("rollout/entropy", math.inf)
    return {"entropy": entropy} if entropy < seen.limits.entropy_below else None


@monitor
def _no_live_group(seen: Observation) -> Found:
    """Check for groups with different rewards, in GRPO only: imitation compares nothing."""
    if seen.group_size < 2 or seen.value("reward/frac_reward_zero_std") < 1:
        return None
    row = in_a_row(seen.history["reward/frac_reward_zero_std"], lambda dead: dead >= 1)
    if (right := seen.value("rollout/right")) >= FEWEST_RIGHT and not seen.value("reward/mean"):
        return found("no_live_group: unpaid", {"right": right, "steps": row})
    return {"reward": seen.value("reward/mean"), "steps": row}


@monitor
def _zero_reward(seen: Observation) -> Found:
    """Check for rewards that are all 0; a mean of 0 from rewards of both signs has groups that differ."""
    row = in_a_row(seen.history["reward/mean"], lambda reward: reward == 0)
    is_zero = seen.value("reward/mean", math.nan) == 0 and seen.value("reward/frac_reward_zero_std", 1.0) >= 1
    if not is_zero or row < seen.limits.zero_reward_steps:
        return None
    if (right := seen.value("rollout/right")) >= FEWEST_RIGHT:
        return found("zero_reward: unpaid", {"steps": row, "right": right})
    return {"steps": row, "format": seen.value("reward/format")}


@monitor
def _identical_samples(seen: Observation) -> Found:
    """Check for identical samples, which share a seed unless the entropy is near 0."""
    copies, length = seen.value("rollout/improbable_copies"), seen.value("rollout/length", math.inf)
    if seen.group_size < 2:
        return None
    if copies > 0:
        return found("identical_samples: improbable", {"copies": copies})
    usual = seen.value("rollout/nll", math.inf) * length  # -log p of a response, in nats
    uncertain = seen.value("train/entropy", math.inf) > 0.05 and usual > 4  # e^-4 may well be drawn several times
    distinct = seen.value("rollout/distinct", 1.0)
    return {"distinct": distinct} if uncertain and distinct <= 1 / seen.group_size + 1e-9 else None


@monitor
def _truncated(seen: Observation) -> Found:
    most, share = seen.limits.truncated_above, seen.value("rollout/truncated")
    if share > most:
        return {"share": share}
    share = seen.value("eval/truncated") if seen.eval_limit else 0.0
    text = f"{share:.0%} of the responses of the evaluation were cut at {seen.eval_limit}"
    return found("truncated_evaluation", {"share": share}, text) if share > most else None


@monitor
def _length(seen: Observation) -> Found:
    """Compare the length with the last steps only: growth over hundreds of steps may be learned reasoning."""
    before = [length for length in seen.history["rollout/length"] if length > 0][-30:]
    now, limits = seen.value("rollout/length"), seen.limits
    return exploded("length", now, before, limits.length_after, limits.length_factor)


@monitor
def _round_trip(seen: Observation) -> Found:
    share = seen.value("rollout/round_trip", 1.0)
    return {"share": share} if share < seen.limits.round_trip_below else None


@monitor
def _same_answer(seen: Observation) -> Found:
    share, true = seen.value("eval/same_answer"), seen.value("eval/same_answer_right")
    if seen.value("eval/problems") < FEWEST_ASKED or share - true <= seen.limits.same_answer_above:
        return None
    return {"share": share, "right": true}


HALF = 0.5
FEWEST_RIGHT = 0.02  # of the responses, in the first step
FALLEN = 0.7  # remaining share of the right answers of the first step
WIDENED = 0.3  # least growth of the gap between reward and accuracy; unstable runs reach half of it


@monitor
def _reward_hacking(seen: Observation) -> Found:
    """Check for a reward that rises for another reason than right answers; without a rise there is no alert.

    It is measured as a share of its range, 0 included, so that 0 to 10 or -1 to 1 counts like 0 to 1.
    """
    width, plain = seen.limits.reward_hacking_after, seen.history["reward/mean"]
    low, high = min([0.0, *seen.history["reward/min"]]), max(seen.history["reward/max"], default=1.0)
    rewards = start_and_end([(value - low) / (high - low) for value in plain] if high > low else [], width)
    if rewards is None or rewards[1] - rewards[0] < seen.limits.reward_hacking_gain:
        return None
    first, now = rewards
    begin, end = start_and_end(plain, width) or rewards
    rises = {"reward_first": begin, "reward": end}
    share, true = seen.value("rollout/same_answer"), seen.value("rollout/same_answer_right")
    if share - true > HALF:
        return found("reward_hacking: one answer", rises | {"same": share, "right": true})
    # Most of the reward is earned while few responses state the right answer, fewer than before or no more. A format
    # that is learned first is no sign, and nothing is where hardly any response ever stated one.
    right = start_and_end(seen.history["rollout/right"], width)
    if right and right[0] >= FEWEST_RIGHT and now >= HALF and right[1] <= HALF * now:
        gain, formats = now - first, start_and_end(seen.history["reward/format"], width) or (0.0, 0.0)
        flat = right[1] - right[0] <= gain / 4 and formats[1] - formats[0] < gain
        if flat or right[1] <= FALLEN * right[0]:
            rises |= {"right_first": right[0], "right": right[1]}
            return found("reward_hacking: unconfirmed", rises)
    # The intervals of the last two evaluations, not one by chance, are below the median one before.
    lows, highs = seen.history["eval/accuracy_low"], seen.history["eval/accuracy_high"]
    if len(lows) < 3 or len(lows) != len(highs) or max(highs[-2:]) >= median(lows[:-2]):
        return None
    accuracies, ends = seen.history["eval/accuracy"], start_and_end(seen.history["rollout/length_correct"], width)
    rises |= {"before": median(accuracies[:-2]), "accuracy": accuracies[-1]}
    if ends and ends[1] <= HALF * ends[0]:
        return found("reward_hacking: shorter", rises | {"length_first": ends[0], "length": ends[1]})
    gap_widened = (now - accuracies[-1]) - (first - accuracies[0])
    return found("reward_hacking: accuracy falls", rises) if gap_widened >= WIDENED else None


@monitor
def _parity(seen: Observation) -> Found:
    """Check that engine and trainer give sampled tokens the same probability, while they have the same weights."""
    mismatch = max(seen.value(SAMPLED), seen.value(EVALUATED))
    if mismatch <= seen.limits.parity_bound or seen.value("rollout/staleness"):
        return None
    return {"mismatch": mismatch}


@monitor
def _engine_weights(seen: Observation) -> Found:
    """Check that the mismatch stays at its size in the first step, set by rounding; without weight syncs it grows."""
    above, factor = seen.limits.engine_weights_above, seen.limits.engine_weights_factor
    for name in (SAMPLED, EVALUATED):
        before, now = seen.history[name], seen.value(name)
        if before and now > max(above, factor * before[0]) and not seen.value("rollout/staleness"):
            return {"mismatch": now, "first": before[0]}
    return None
