"""Monitors of diverging numbers, and of the mismatch between trainer and engine."""

import math
from collections.abc import Callable, Sequence
from statistics import median

from rlreason.config.groups import WEIGHTS
from rlreason.health.finding import FEWEST_ASKED, SLOWER, Alert, Metrics, Monitor, Observation, exploded, in_a_row
from rlreason.runtime.intervals import fewer_p

BEGINNING = 5  # steps
POOLED = 8  # evaluations, few, so that a run that was at 0 for long and then learned has an accuracy to lose
COLLAPSED = 0.2  # of the accuracy before
COLLAPSE_LEVEL = 1e-4
WATCHED = ("train/", "rollout/", "reward/", "eval/")  # metrics that must be numbers


def _nan(seen: Observation) -> Alert | None:
    """Check weights first, since nothing can be sampled without finite ones. A non-finite gradient moves no weight."""
    if not seen.finite_weights:
        return Alert("weights are no numbers", SLOWER, rule=WEIGHTS)
    if any(not math.isfinite(u.get("train/loss", 0.0)) for u in seen.updates):
        return Alert("the loss is no number", SLOWER, rule="loss")
    tried = [u for u in seen.updates if not u.get("train/empty_updates")]
    if tried and all(u.get("train/skipped_updates") for u in tried):
        return Alert("no update had a finite gradient", SLOWER, rule="gradient")
    if broken := seen.metrics.get("train/moments_not_finite", 0.0):
        text = f"the optimizer's moments of {broken:.0f} weight tensors are no numbers: every further update is lost"
        return Alert(text, f"{SLOWER}, and go on from an earlier checkpoint", {"tensors": broken}, "optimizer")
    judged = ("train/loss", "train/grad_norm")
    wrong = [k for k, v in seen.metrics.items() if k.startswith(WATCHED) and k not in judged and not math.isfinite(v)]
    return Alert(f"{wrong[0]} is no number", SLOWER, rule="metric") if wrong else None


def _skipped(seen: Observation) -> Alert | None:
    count = seen.metrics.get("train/skipped_updates", 0)
    if not count:
        return None
    text = "the gradient was not finite, so the optimizer step was left out: the run is diverging"
    return Alert(text, SLOWER, {"skipped": count})


def _gradient_norm(seen: Observation) -> Alert | None:
    """Compare the gradient norm with its median; steps without a gradient, as without a live group, do not count.

    A norm that falls with the loss may rise again to its first values: that is no explosion.
    """
    before = [norm for norm in seen.before("train/grad_norm") if norm > 0]
    now = seen.worst("train/grad_norm")
    if now is None or len(before) < seen.limits["gradient_norm_after"]:
        return None
    usual = median(before)
    if not exploded(now, usual, seen.limits["gradient_norm_factor"]) or now <= max(before[:BEGINNING]):
        return None
    text = f"the gradient norm is {now:.3g}, {now / usual:.0f} times the median of the steps before ({usual:.3g})"
    return Alert(text, SLOWER, {"gradient_norm": now, "median": usual})


def _kl(seen: Observation) -> Alert | None:
    for name, of in (("train/kl_reference", "the reference model"), ("train/approx_kl", "the policy that sampled")):
        before, now = seen.before(name), seen.worst(name)
        if now is None or len(before) < seen.limits["kl_after"] or now <= seen.limits["kl_above"]:
            continue
        usual = median(before)
        if exploded(now, usual, seen.limits["kl_factor"]):
            text = f"the KL to {of} is {now:.3g} nats per token; the median of the steps before is {usual:.3g}"
            return Alert(text, "lower learning_rate or the updates per batch", {"kl": now, "median": usual})
    return None


def _first_ratio(seen: Observation) -> Alert | None:
    """Check that pi / pi_old is 1 in the first update on fresh samples, when the weights are still those that sampled.

    Its mean may be 1 by chance, so the approximate KL, which must be 0 and is never negative, is checked as well.
    """
    first, bound = (seen.updates[0] if seen.updates else {}), seen.limits["first_ratio_bound"]
    if "train/ratio" not in first or seen.metrics.get("rollout/staleness", 0.0):
        return None
    ratio, kl = first["train/ratio"], first.get("train/approx_kl", 0.0)
    if abs(ratio - 1) <= bound and kl <= bound:
        return None
    text = (
        f"the first update of the step has a mean ratio of {ratio:.4g} to the policy that sampled (approximate KL "
        f"{kl:.2g} nats per token), and nothing had been learned from the samples yet: it must be 1"
    )
    cure = "compare sampling.temperature with that of learning, turn dropout off, or set model.dtype=float32"
    return Alert(text, cure, {"ratio": ratio, "approx_kl": kl})


def _still_weights(seen: Observation) -> Alert | None:
    """Check that updates change the weights that have a gradient. Adam moves each by about the learning rate.

    Weights in bfloat16 have 8 bits: a change below a 256th of a weight is rounded away. Where the learning rate is
    below half of its maximum, as at the end of a schedule, nothing is concluded.
    """
    name, below = "train/weights_changed", seen.limits["still_weights_below"]
    rate, changed = seen.worst("train/learning_rate") or 0.0, seen.worst(name)
    if changed is None or changed >= below or rate < 0.5 * max([rate, *seen.before("train/learning_rate")]):
        return None
    row = 1 + in_a_row(seen.before(name), lambda share: share < below)
    if rate == 0 or not seen.worst("train/grad_norm") or row < seen.limits["still_weights_steps"]:
        return None
    text = f"only {changed:.1%} of the weights that have a gradient change in an update, {row} steps in a row"
    cure = f"keep weights in float32 (model.weights=float32), or raise learning_rate={rate:g}"
    return Alert(text, cure, {"changed": changed, "learning_rate": rate, "steps": row})


def _accuracy(seen: Observation) -> Alert | None:
    if not collapsed(seen.evaluations):
        return None
    newest = seen.evaluations[-1]
    best = max(a for e in seen.evaluations if math.isfinite(a := e["eval/accuracy"]))
    now, n_problems = newest["eval/accuracy"], newest["eval/problems"]
    text = f"accuracy has collapsed to {now:.3g} of {n_problems:.0f} problems, twice in a row, from {best:.3g} at best"
    return Alert(text, SLOWER, {"best": best, "accuracy": now, "problems": n_problems})


def collapsed(evaluations: Sequence[Metrics]) -> bool:
    """Whether the last two accuracies are significantly below a fifth of the accuracy of the evaluations before.

    Each of the two is compared with the (up to 8) evaluations before them, pooled; both together by Fisher's exact test
    at 1e-4, which finds all that each alone at 1e-3 would find, and more. Fewer than 8 problems conclude nothing.
    Simulated, accuracies of 0.01 to 0.8, 8 to 256 problems, accuracy unchanged: ends at most 0.2% of runs of 50
    evaluations (a rule of 0 right against the best one: up to 100%).

    >>> of = lambda *right: [{"eval/accuracy": k / 64, "eval/problems": 64} for k in right]
    >>> collapsed(of(16, 0)), collapsed(of(16, 0, 0)), collapsed(of(3, 5, 2, 0, 0)), collapsed(of(16, 0, 9))
    (False, True, False, False)
    """
    finite = [e for e in evaluations if math.isfinite(e["eval/accuracy"])]
    if len(finite) < 3 or finite[-1] is not evaluations[-1]:
        return False
    earlier, newest = finite[-2 - POOLED : -2], finite[-2:]
    (k_before, n_before), (k, n) = pooled(earlier), pooled(newest, math.ceil)
    if not n_before or min(questions(e) for e in newest) < FEWEST_ASKED:
        return False
    low = all(e["eval/accuracy"] < COLLAPSED * k_before / n_before for e in newest)
    return low and fewer_p(k, n, k_before, n_before) <= COLLAPSE_LEVEL


def questions(evaluation: Metrics) -> int:
    """Return the number of different questions of an evaluation; repeated rows and samples are no further evidence."""
    count = evaluation.get("eval/questions", evaluation.get("eval/problems", 0.0))
    return int(count) if math.isfinite(count) else 0


def pooled(evaluations: Sequence[Metrics], whole: Callable[[float], int] = math.floor) -> tuple[int, int]:
    """Return (right, asked) over several evaluations; `whole` rounds the count where there are several samples."""
    counts = [questions(e) for e in evaluations]
    right = [whole(round(e["eval/accuracy"] * n, 6)) for e, n in zip(evaluations, counts, strict=True)]
    return sum(right), sum(counts)


RATE = "The learning rate is too large for this model, batch or loss"
DIVERGENCE = {
    "nan": Monitor(
        _nan, f"{RATE}, or a logarithm or a division met 0 in a reward or a loss of one's own.", ("train/loss",), True
    ),
    "skipped_update": Monitor(
        _skipped, f"{RATE}, or half precision overflowed.", ("train/grad_norm", "train/loss"), True
    ),
    "gradient_norm": Monitor(
        _gradient_norm,
        f"{RATE}; few groups carry the whole gradient; ratios far from 1 without a clip.",
        ("train/grad_norm",),
        True,
    ),
    "kl": Monitor(
        _kl, f"{RATE}, or a batch is learned from too often.", ("train/approx_kl", "train/kl_reference"), True
    ),
    "first_ratio": Monitor(
        _first_ratio,
        "Old log-probabilities that belong to other weights, another temperature or other tokens; dropout; rounding in "
        "half precision.",
        ("train/ratio", "train/approx_kl"),
    ),
    "still_weights": Monitor(
        _still_weights,
        "Weights in half precision, where small updates are rounded away; a tiny learning rate; frozen parameters.",
        ("train/weights_changed",),
    ),
    "accuracy": Monitor(
        _accuracy,
        f"{RATE}; the format of the answers was unlearned; the reward is hacked.",
        ("eval/accuracy", "reward/mean"),
        True,
    ),
}


SAMPLED, EVALUATED = "rollout/mismatch_mean", "eval/mismatch_mean"


def _parity(seen: Observation) -> Alert | None:
    """Check that engine and trainer give sampled tokens the same probability, while they have the same weights."""
    m, bound = seen.metrics, seen.limits["parity_bound"]
    mismatch = max(m.get(SAMPLED, 0.0), m.get(EVALUATED, 0.0))
    if mismatch <= bound or m.get("rollout/staleness", 0.0):
        return None
    corrected = "; mismatch weights correct for it" if seen.limits["parity"] == "correct" else ""
    text = (
        f"engine and trainer disagree by {mismatch:.3f} nats per token (monitors.parity_bound={bound:g}): weights, "
        f"temperature or precision differ{corrected}"
    )
    cure = "use rollout=hf, model.dtype=float32, or monitors.parity=correct with mismatch=truncate"
    return Alert(text, cure, {"mismatch": mismatch})


def _engine_weights(seen: Observation) -> Alert | None:
    """Check that the mismatch stays at its size in the first step; without weight syncs it grows.

    It is compared with the run's first value, before any update, because its size depends on rounding: float32 has
    1e-7 nats, bfloat16 1e-2.
    """
    above, factor = seen.limits["engine_weights_above"], seen.limits["engine_weights_factor"]
    for name in (SAMPLED, EVALUATED):
        before, now = seen.before(name), seen.metrics.get(name, 0.0)
        if not before or now <= above or seen.metrics.get("rollout/staleness", 0.0):
            continue
        if exploded(now, first := before[0], factor):
            text = (
                f"the engine's log-probabilities are {now:.2g} nats per token from the trainer's, and were "
                f"{first:.2g} in the first step: the engine samples from other weights than those that were trained"
            )
            cure = "sync the weights after every update; rollout=hf samples from the trainer's own weights"
            return Alert(text, cure, {"mismatch": now, "first": first})
    return None


ENGINE = {
    "parity": Monitor(
        _parity,
        "Half precision on one side; another temperature; an engine with its own kernels or with old weights.",
        (SAMPLED,),
    ),
    "engine_weights": Monitor(
        _engine_weights,
        "A weight sync that was left out or that reached only some tensors; a cache of old keys and values.",
        (SAMPLED,),
    ),
}
