"""What can go wrong in a run without an error, each as one pure function of the metrics that were recorded anyway.

To add a monitor: a function here and its line in `MONITORS`, and a setting of its name in `config/monitors.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

from rlreason.config.monitors import WEIGHTS

Metrics = Mapping[str, float]
FEWEST_LOST = 3  # n wrong of n exclude, at 95%, an accuracy above 3 / n
FEWEST_ASKED = 8  # questions of an evaluation, below which its answers say too little
SLOWER = "lower learning_rate or max_grad_norm"
WATCHED = ("train/", "rollout/", "reward/", "eval/")  # metrics that must be numbers


@dataclass(frozen=True, slots=True)
class Seen:
    """What the monitors look at behind a step, or behind an evaluation.

    `limits`: the settings in use, by their names in `MonitorsConfig`. `history`: metric -> its values in the steps
    before, the largest of each step's updates, as far as they were measured.
    """

    metrics: Metrics
    updates: Sequence[Metrics] = ()  # of the step, one by one
    limits: Mapping[str, Any] = field(default_factory=dict)
    history: Mapping[str, Sequence[float]] = field(default_factory=dict)
    finite_weights: bool = True
    group_size: int = 1
    evaluations: Sequence[Metrics] = ()  # all of the run; empty where none has been added
    eval_limit: str = ""  # the setting at which evaluations cut responses, where it is not that of the rollouts
    steps: bool = True  # whether the run has any, so that an evaluation is one of several

    def worst(self, name: str) -> float | None:
        """The largest value of a metric among the step's updates; None where none measured it."""
        return max((u[name] for u in self.updates if name in u), default=None)


@dataclass(frozen=True, slots=True)
class Found:
    """What a monitor has found: in words, what helps, and the numbers. `rule`: where it is not the monitor's name."""

    text: str
    cure: str
    numbers: dict[str, float] = field(default_factory=dict)
    rule: str = ""


class Monitor(NamedTuple):
    """`diverges`: a run that it stops has diverged; else it was stopped."""

    look: Callable[[Seen], Found | None]
    diverges: bool = False


def _nan(seen: Seen) -> Found | None:
    """Weights first: from such ones nothing can be sampled. A gradient that is not finite moves no weight."""
    if not seen.finite_weights:
        return Found("weights are no numbers", SLOWER, rule=WEIGHTS)
    if any(not math.isfinite(u.get("train/loss", 0.0)) for u in seen.updates):
        return Found("the loss is no number", SLOWER, rule="loss")
    tried = [u for u in seen.updates if not u.get("train/empty_updates")]
    if tried and all(u.get("train/skipped_updates") for u in tried):
        return Found("no update had a finite gradient", SLOWER, rule="gradient")
    judged = ("train/loss", "train/grad_norm")
    broken = [k for k, v in seen.metrics.items() if k.startswith(WATCHED) and k not in judged and not math.isfinite(v)]
    if broken:
        return Found(f"{broken[0]} is no number", SLOWER, rule="metric")
    return None


def _skipped(seen: Seen) -> Found | None:
    count = seen.metrics.get("train/skipped_updates", 0)
    if not count:
        return None
    text = "the gradient was not finite, so the optimizer step was left out: the run is diverging"
    return Found(text, SLOWER, {"skipped": count})


def _gradient_norm(seen: Seen) -> Found | None:
    """Steps without a gradient, as where no group is live, say nothing about its usual size."""
    before = [norm for norm in seen.history.get("train/grad_norm", ()) if norm > 0]
    now = seen.worst("train/grad_norm")
    if now is None or len(before) < seen.limits["gradient_norm_after"]:
        return None
    usual = median(before)
    if not exploded(now, usual, seen.limits["gradient_norm_factor"]):
        return None
    text = f"the gradient norm is {now:.3g}, {now / usual:.0f} times the median of the steps before ({usual:.3g})"
    return Found(text, SLOWER, {"gradient_norm": now, "median": usual})


def _kl(seen: Seen) -> Found | None:
    for name, of in (("train/kl_reference", "the reference model"), ("train/approx_kl", "the policy that sampled")):
        before, now = seen.history.get(name, ()), seen.worst(name)
        if now is None or len(before) < seen.limits["kl_after"] or now <= seen.limits["kl_above"]:
            continue
        usual = median(before)
        if exploded(now, usual, seen.limits["kl_factor"]):
            text = f"the KL to {of} is {now:.3g} nats per token; the median of the steps before is {usual:.3g}"
            return Found(text, "lower learning_rate or the updates per batch", {"kl": now, "median": usual})
    return None


def exploded(now: float, usual: float, factor: float) -> bool:
    """Whether a measure is above so many times its usual size: x > f * median(x before). No number is above nothing.

    >>> exploded(2.1, 0.1, 20), exploded(1.9, 0.1, 20)
    (True, False)
    """
    return now > factor * usual


def _entropy(seen: Seen) -> Found | None:
    entropy, least = seen.metrics.get("rollout/entropy", math.inf), seen.limits["entropy_below"]
    if entropy >= least:
        return None
    text = f"the entropy is {entropy:.4f} nats per token (monitors.entropy_below={least:g}): responses hardly differ"
    cure = "lower learning_rate, raise sampling.temperature, or add a KL or entropy term (kl_placement, entropy_coef)"
    return Found(text, cure, {"entropy": entropy})


def _no_live_group(seen: Seen) -> Found | None:
    """Of GRPO alone: imitation compares nothing."""
    if seen.group_size < 2 or seen.metrics.get("reward/frac_reward_zero_std", 0.0) < 1:
        return None
    share = seen.metrics["reward/mean"]
    text = (
        f"no group holds better and worse responses (mean reward {share:.2f}): every advantage is 0 (a KL term aside) "
        "and the rewards teach nothing"
    )
    row = 1
    for dead in reversed(seen.history.get("reward/frac_reward_zero_std", ())):
        if dead < 1:
            break
        row += 1
    return Found(text, "use easier or harder questions, or a larger group_size", {"reward": share, "steps": row})


def _identical(seen: Seen) -> Found | None:
    """A model with an entropy near 0 repeats itself for good reason; another one's samples must share a seed."""
    m, size = seen.metrics, seen.group_size
    uncertain = m.get("train/entropy", math.inf) > 0.05
    if size > 1 and uncertain and m.get("rollout/distinct", 1.0) <= 1 / size + 1e-9:
        text = "all responses of every group are identical: the samples share one seed, or the temperature is too low"
        return Found(text, "raise sampling.temperature", {"distinct": m["rollout/distinct"]})
    return None


def _truncated(seen: Seen) -> Found | None:
    most = seen.limits["truncated_above"]
    share = seen.metrics.get("rollout/truncated", 0.0)
    if share > most:
        text, cure = f"{share:.0%} of the responses were cut at sampling.max_tokens", "raise it, or expect no reward"
        return Found(text, cure, {"share": share})
    share = seen.metrics.get("eval/truncated", 0.0)
    if not seen.eval_limit or share <= most:
        return None
    text = f"{'in evaluation: ' if seen.steps else ''}{share:.0%} of the responses were cut at {seen.eval_limit}"
    cure = "raise it, as what is cut before its answer counts as wrong"
    return Found(text, cure, {"share": share}, "truncated_evaluation")


def _same_answer(seen: Seen) -> Found | None:
    m = seen.metrics
    share, true = m.get("eval/same_answer", 0.0), m.get("eval/same_answer_right", 0.0)
    if m.get("eval/problems", 0) < FEWEST_ASKED or share - true <= seen.limits["same_answer_above"]:
        return None
    text = f"{share:.0%} of the questions got one and the same answer, which is right for {true:.0%} of them"
    return Found(text, "look at the responses (rlreason inspect), lower learning_rate", {"share": share, "right": true})


def _accuracy(seen: Seen) -> Found | None:
    if not seen.evaluations or not fell_to_zero(seen.evaluations):
        return None
    asked = seen.evaluations[-1]["eval/problems"]
    text = f"accuracy fell to 0 of {asked:.0f} problems, from one that this excludes"
    best = max(e["eval/accuracy"] for e in seen.evaluations)
    return Found(text, SLOWER, {"best": best, "problems": asked})


def _parity(seen: Seen) -> Found | None:
    """Engine and trainer must give sampled tokens the same probability, while they hold the same weights."""
    m, bound = seen.metrics, seen.limits["parity_bound"]
    mismatch = max(m.get("rollout/mismatch_mean", 0.0), m.get("eval/mismatch_mean", 0.0))
    if mismatch <= bound or m.get("rollout/staleness", 0.0):
        return None
    corrected = "; mismatch weights correct for it" if seen.limits["parity"] == "correct" else ""
    text = (
        f"engine and trainer disagree by {mismatch:.3f} nats per token (monitors.parity_bound={bound:g}): weights, "
        f"temperature or precision differ{corrected}"
    )
    cure = "use rollout=hf, model.dtype=float32, or monitors.parity=correct with mismatch=truncate"
    return Found(text, cure, {"mismatch": mismatch})


def fell_to_zero(evaluations: Sequence[Metrics]) -> bool:
    """Whether the newest accuracy is 0 and excludes one that was measured before.

    None right of n excludes, at 95%, accuracies above 3 / n (the rule of three). Of fewer than 8 nothing is concluded.

    >>> fell_to_zero([{"eval/accuracy": 0.25, "eval/problems": 16}, {"eval/accuracy": 0.0, "eval/problems": 16}])
    True
    >>> fell_to_zero([{"eval/accuracy": 0.0625, "eval/problems": 16}, {"eval/accuracy": 0.0, "eval/problems": 16}])
    False
    """
    *earlier, newest = evaluations
    best = max((e["eval/accuracy"] for e in earlier), default=0.0)
    asked = newest["eval/problems"]
    return newest["eval/accuracy"] == 0 and asked >= FEWEST_ASKED and best * asked >= FEWEST_LOST


#: By the names of their settings. A warning of the grader comes in words of its own and is no function of metrics.
MONITORS: dict[str, Monitor] = {
    "nan": Monitor(_nan, diverges=True),
    "skipped_update": Monitor(_skipped, diverges=True),
    "gradient_norm": Monitor(_gradient_norm, diverges=True),
    "kl": Monitor(_kl, diverges=True),
    "accuracy": Monitor(_accuracy, diverges=True),
    "entropy": Monitor(_entropy),
    "no_live_group": Monitor(_no_live_group),
    "identical_samples": Monitor(_identical),
    "truncated": Monitor(_truncated),
    "same_answer": Monitor(_same_answer),
    "parity": Monitor(_parity),
}
#: Metrics whose values the monitors remember, step by step.
REMEMBERED = ("train/grad_norm", "train/kl_reference", "train/approx_kl", "reward/frac_reward_zero_std")
