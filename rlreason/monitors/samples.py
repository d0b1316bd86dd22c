"""Monitors of what was sampled: rewards that teach nothing, copies, lengths, cuts, and texts that do not come back."""

import math
from statistics import median

from rlreason.monitors.seen import Found, Monitor, Seen, exploded, in_a_row

RECENT = 30  # steps
LIKELY = 4.0  # nats: e^-4, a response that may well be drawn several times


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
    share = seen.metrics.get("reward/mean", 0.0)
    text = (
        f"no group holds better and worse responses (mean reward {share:.2f}): every advantage is 0 (a KL term aside) "
        "and the rewards teach nothing"
    )
    row = 1 + in_a_row(seen.before("reward/frac_reward_zero_std"), lambda dead: dead >= 1)
    return Found(text, "use easier or harder questions, or a larger group_size", {"reward": share, "steps": row})


def _zero_reward(seen: Seen) -> Found | None:
    """Rewards that are all 0. A mean of 0 out of rewards of both signs leaves groups that differ."""
    m = seen.metrics
    if m.get("reward/mean") != 0 or m.get("reward/frac_reward_zero_std", 1.0) < 1:
        return None
    row = 1 + in_a_row(seen.before("reward/mean"), lambda reward: reward == 0)
    if row < seen.limits["zero_reward_steps"]:
        return None
    formatted = m.get("reward/format", 0.0)
    text = f"all rewards were 0 in {row} steps in a row ({formatted:.0%} of the responses keep the format)"
    cure = (
        "look at responses (rlreason inspect): raise sampling.max_tokens where they are cut, choose another prompt "
        "where they have no format, easier questions or SFT first where they are wrong"
    )
    return Found(text, cure, {"steps": row, "format": formatted})


def _identical(seen: Seen) -> Found | None:
    """A model with an entropy near 0 repeats itself for good reason; another one's samples must share a seed."""
    m, size = seen.metrics, seen.group_size
    copies = m.get("rollout/improbable_copies", 0.0)
    if size > 1 and copies > 0:
        text = (
            f"{copies:.0%} of the responses repeat one of their group word for word against odds of less than one to "
            "ten billion: samples share a seed"
        )
        return Found(text, "give every sample of a group a seed of its own in the engine", {"copies": copies})
    usual = m.get("rollout/nll", math.inf) * m.get("rollout/length", math.inf)  # -log p of a response, in nats
    uncertain = m.get("train/entropy", math.inf) > 0.05 and usual > LIKELY
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


def _length(seen: Seen) -> Found | None:
    """Against the last steps alone: responses that grow over hundreds of steps may well have learned to reason."""
    before = [length for length in seen.before("rollout/length") if length > 0][-RECENT:]
    now = seen.metrics.get("rollout/length", 0.0)
    if len(before) < seen.limits["length_after"]:
        return None
    usual = median(before)
    if not exploded(now, usual, seen.limits["length_factor"]):
        return None
    text = f"responses have {now:.0f} tokens, {now / usual:.1f} times the median of the last steps ({usual:.0f})"
    cure = "lower learning_rate, or make long responses cost something (overlong, length_norm)"
    return Found(text, cure, {"length": now, "median": usual})


def _round_trip(seen: Seen) -> Found | None:
    share, least = seen.metrics.get("rollout/round_trip", 1.0), seen.limits["round_trip_below"]
    if share >= least:
        return None
    text = f"only {share:.0%} of the prompts or responses stay the same when they are turned into tokens and back"
    cure = "give the tokenizer that belongs to the model (model.path), and one that keeps digits, letters and tags"
    return Found(text, cure, {"share": share})


SAMPLES = {
    "entropy": Monitor(
        _entropy, "Training went on after everything was learned; the learning rate is too large.", ("rollout/entropy",)
    ),
    "no_live_group": Monitor(
        _no_live_group,
        "Questions that are all too easy or all too hard for this model; too few responses to a question.",
        ("reward/frac_reward_zero_std", "reward/mean"),
    ),
    "zero_reward": Monitor(
        _zero_reward,
        "A prompt whose format the model does not know; responses cut before their answer; ground truths in a form "
        "that the grader cannot read; questions far too hard.",
        ("reward/mean", "reward/format", "rollout/truncated"),
    ),
    "identical_samples": Monitor(
        _identical, "One seed for all samples of a request; a temperature near 0.", ("rollout/distinct",)
    ),
    "truncated": Monitor(
        _truncated,
        "A limit that is too small for the task; a model that does not know its end token; endless repetition.",
        ("rollout/truncated", "rollout/length"),
    ),
    "length": Monitor(
        _length,
        "Long responses cost nothing under this normalisation, or the model repeats itself without an end.",
        ("rollout/length", "rollout/truncated"),
    ),
    "round_trip": Monitor(
        _round_trip,
        "The tokenizer of another model; one that lowers case or has no token for some letters.",
        ("rollout/round_trip",),
    ),
}
