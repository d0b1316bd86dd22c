"""Monitors of samples and rewards."""

import math
from collections.abc import Callable
from statistics import median

from rlreason.health.finding import FEWEST_ASKED, Alert, Monitor, Observation, exploded, in_a_row, start_and_end

RECENT = 30  # steps
LIKELY = 4.0  # nats: a response of probability e^-4 may well be drawn several times


def _entropy(seen: Observation) -> Alert | None:
    entropy, least = seen.metrics.get("rollout/entropy", math.inf), seen.limits["entropy_below"]
    if entropy >= least:
        return None
    text = f"the entropy is {entropy:.4f} nats per token (monitors.entropy_below={least:g}): responses hardly differ"
    cure = "lower learning_rate, raise sampling.temperature, or add a KL or entropy term (kl_placement, entropy_coef)"
    return Alert(text, cure, {"entropy": entropy})


def _no_live_group(seen: Observation) -> Alert | None:
    """Check for groups with different rewards, in GRPO only: imitation compares nothing."""
    if seen.group_size < 2 or seen.metrics.get("reward/frac_reward_zero_std", 0.0) < 1:
        return None
    share = seen.metrics.get("reward/mean", 0.0)
    text = (
        f"no group holds better and worse responses (mean reward {share:.2f}): every advantage is 0 (a KL term aside) "
        "and the rewards teach nothing"
    )
    row = 1 + in_a_row(seen.before("reward/frac_reward_zero_std"), lambda dead: dead >= 1)
    return Alert(text, "use easier or harder questions, or a larger group_size", {"reward": share, "steps": row})


def _zero_reward(seen: Observation) -> Alert | None:
    """Check for rewards that are all 0; a mean of 0 from rewards of both signs has groups that differ."""
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
    return Alert(text, cure, {"steps": row, "format": formatted})


def _identical(seen: Observation) -> Alert | None:
    """Check for identical samples, which share a seed unless the entropy is near 0."""
    m, size = seen.metrics, seen.group_size
    copies = m.get("rollout/improbable_copies", 0.0)
    if size > 1 and copies > 0:
        text = (
            f"{copies:.0%} of the responses repeat one of their group word for word against odds of less than one to "
            "ten billion: samples share a seed"
        )
        return Alert(text, "give every sample of a group a seed of its own in the engine", {"copies": copies})
    usual = m.get("rollout/nll", math.inf) * m.get("rollout/length", math.inf)  # -log p of a response, in nats
    uncertain = m.get("train/entropy", math.inf) > 0.05 and usual > LIKELY
    if size > 1 and uncertain and m.get("rollout/distinct", 1.0) <= 1 / size + 1e-9:
        text = "all responses of every group are identical: the samples share one seed, or the temperature is too low"
        return Alert(text, "raise sampling.temperature", {"distinct": m["rollout/distinct"]})
    return None


def _truncated(seen: Observation) -> Alert | None:
    most = seen.limits["truncated_above"]
    share = seen.metrics.get("rollout/truncated", 0.0)
    if share > most:
        text, cure = f"{share:.0%} of the responses were cut at sampling.max_tokens", "raise it, or expect no reward"
        return Alert(text, cure, {"share": share})
    share = seen.metrics.get("eval/truncated", 0.0)
    if not seen.eval_limit or share <= most:
        return None
    text = f"{'in evaluation: ' if seen.steps else ''}{share:.0%} of the responses were cut at {seen.eval_limit}"
    cure = "raise it, as what is cut before its answer counts as wrong"
    return Alert(text, cure, {"share": share}, "truncated_evaluation")


def _length(seen: Observation) -> Alert | None:
    """Compare the length with the last steps only: growth over hundreds of steps may be learned reasoning."""
    before = [length for length in seen.before("rollout/length") if length > 0][-RECENT:]
    now = seen.metrics.get("rollout/length", 0.0)
    if len(before) < seen.limits["length_after"]:
        return None
    usual = median(before)
    if not exploded(now, usual, seen.limits["length_factor"]):
        return None
    text = f"responses have {now:.0f} tokens, {now / usual:.1f} times the median of the last steps ({usual:.0f})"
    cure = "lower learning_rate, or make long responses cost something (overlong, length_norm)"
    return Alert(text, cure, {"length": now, "median": usual})


def _round_trip(seen: Observation) -> Alert | None:
    share, least = seen.metrics.get("rollout/round_trip", 1.0), seen.limits["round_trip_below"]
    if share >= least:
        return None
    text = f"only {share:.0%} of the prompts or responses stay the same when they are turned into tokens and back"
    cure = "give the tokenizer that belongs to the model (model.path), and one that keeps digits, letters and tags"
    return Alert(text, cure, {"share": share})


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


Sign = tuple[str, dict[str, float]]  # a sign of reward hacking, as text, and its numbers
LOOK = "look at the responses (rlreason inspect)"
HALF = 0.5
FEWEST_RIGHT = 0.02  # of the responses, in the first step
FALLEN = 0.7  # remaining share of the right answers of the first step
WIDENED = 0.3  # least growth of the gap between reward and accuracy; unstable runs reach half of it


def _same_answer(seen: Observation) -> Alert | None:
    m = seen.metrics
    share, true = m.get("eval/same_answer", 0.0), m.get("eval/same_answer_right", 0.0)
    if m.get("eval/problems", 0) < FEWEST_ASKED or share - true <= seen.limits["same_answer_above"]:
        return None
    text = f"{share:.0%} of the questions got one and the same answer, which is right for {true:.0%} of them"
    return Alert(text, f"{LOOK}, lower learning_rate", {"share": share, "right": true})


def _hacking(seen: Observation) -> Alert | None:
    """Check for a reward that rises for another reason than right answers; without a rise there is no alert.

    It is measured as a share of its range, so that 0 to 10 or -1 to 1 counts like 0 to 1.
    """
    width = seen.limits["reward_hacking_after"]
    rewards = start_and_end(in_range(seen, "reward/mean"), width)
    if rewards is None or rewards[1] - rewards[0] < seen.limits["reward_hacking_gain"]:
        return None
    found = next((sign for look in SIGNS if (sign := look(seen, width, rewards))), None)
    if found is None:
        return None
    text, numbers = found
    begin, now = start_and_end(seen.before("reward/mean"), width) or rewards
    cure = f"{LOOK}; judge evaluations by another reward (eval.reward), and repair what the reward pays for"
    message = f"signs of reward hacking: the training reward rose from {begin:.2f} to {now:.2f} while {text}"
    return Alert(message, cure, {"reward_first": begin, "reward": now} | numbers)


def in_range(seen: Observation, name: str) -> list[float]:
    """Return the values of a reward as shares of the range of all rewards so far, 0 included.

    >>> in_range(Observation({}, history={"reward/mean": [2.0, 5.0], "reward/max": [10.0, 10.0]}), "reward/mean")
    [0.2, 0.5]
    """
    low, high = min([0.0, *seen.before("reward/min")]), max(seen.before("reward/max"), default=1.0)
    return [(value - low) / (high - low) for value in seen.before(name)] if high > low else []


def _one_answer(seen: Observation, width: int, rewards: tuple[float, float]) -> Sign | None:
    share, true = seen.metrics.get("rollout/same_answer", 0.0), seen.metrics.get("rollout/same_answer_right", 0.0)
    if share - true <= HALF:
        return None
    return f"{share:.0%} of the responses give one answer, right for {true:.0%} of the questions", {"same": share}


def _unconfirmed(seen: Observation, width: int, rewards: tuple[float, float]) -> Sign | None:
    """Find that most of the reward is earned while few responses state the right answer: fewer than before, or no more.

    A format that is learned first, and that the reward itself reports, is no sign unless right answers become fewer.
    Where hardly any response ever stated one, the reward measures something else, and there is no sign.
    """
    right, formats = start_and_end(seen.before("rollout/right"), width), seen.before("reward/format")
    if right is None or right[0] < FEWEST_RIGHT or rewards[1] < HALF or right[1] > HALF * rewards[1]:
        return None
    gain, format_first, format_now = rewards[1] - rewards[0], *(start_and_end(formats, width) or (0.0, 0.0))
    flat = right[1] - right[0] <= gain / 4 and format_now - format_first < gain
    if not flat and right[1] > FALLEN * right[0]:
        return None
    text = f"the share of responses that state the right answer went from {right[0]:.0%} to {right[1]:.0%}"
    return text, {"right_first": right[0], "right": right[1]}


def _accuracy_falls(seen: Observation, width: int, rewards: tuple[float, float]) -> Sign | None:
    """Find that the last two evaluations are significantly worse than those before, while the reward rose."""
    accuracies = seen.before("eval/accuracy")
    if not surely_worse(seen) or (rewards[1] - accuracies[-1]) - (rewards[0] - accuracies[0]) < WIDENED:
        return None
    usual, newest = median(accuracies[:-2]), accuracies[-1]
    return f"the accuracy of evaluations fell from {usual:.2f} to {newest:.2f}", {"before": usual, "accuracy": newest}


def surely_worse(seen: Observation) -> bool:
    """Whether the intervals of the last two evaluations are below the median interval of those before.

    Two, because one out of many may be so by chance.
    """
    lows, highs = seen.before("eval/accuracy_low"), seen.before("eval/accuracy_high")
    return len(lows) > 2 and len(lows) == len(highs) and max(highs[-2:]) < median(lows[:-2])


def _short(seen: Observation, width: int, rewards: tuple[float, float]) -> Sign | None:
    """Find that rewarded responses became half as long, while evaluations are significantly worse."""
    ends = start_and_end(seen.before("rollout/length_correct"), width)
    if ends is None or ends[1] > HALF * ends[0] or not surely_worse(seen):
        return None
    accuracies = seen.before("eval/accuracy")
    text = (
        f"what it pays for became shorter, from {ends[0]:.0f} to {ends[1]:.0f} tokens, and evaluations are answered "
        f"worse ({accuracies[0]:.2f} at first, now {accuracies[-1]:.2f})"
    )
    return text, {"length_first": ends[0], "length": ends[1]}


SIGNS: tuple[Callable[[Observation, int, tuple[float, float]], Sign | None], ...] = (
    _one_answer, _unconfirmed, _short, _accuracy_falls,
)  # fmt: skip

REWARDS = {
    "same_answer": Monitor(
        _same_answer, "The model collapsed to one answer; the questions are not in the prompt.", ("eval/accuracy",)
    ),
    "reward_hacking": Monitor(
        _hacking,
        "The reward pays for a format, a phrase or a short cut; the answer can be read off the question; training "
        "problems that differ from those of evaluation.",
        ("reward/mean", "rollout/right", "eval/accuracy", "rollout/length_correct"),
    ),
}
