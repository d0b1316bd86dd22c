"""Monitors of what was sampled and how it was rewarded."""

import math
from collections.abc import Callable
from statistics import median

from rlreason.health.finding import FEWEST_ASKED, Found, Monitor, Seen, exploded, in_a_row, start_and_end

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


Sign = tuple[str, dict[str, float]]  # what else happened, in words, and its numbers
LOOK = "look at the responses (rlreason inspect)"
HALF = 0.5
FEWEST_RIGHT = 0.02  # of the responses, in the first step
FALLEN = 0.7  # of the right answers of the first step are left
WIDENED = 0.3  # by which the reward must have left the accuracy behind: unstable runs come to half of that


def _same_answer(seen: Seen) -> Found | None:
    m = seen.metrics
    share, true = m.get("eval/same_answer", 0.0), m.get("eval/same_answer_right", 0.0)
    if m.get("eval/problems", 0) < FEWEST_ASKED or share - true <= seen.limits["same_answer_above"]:
        return None
    text = f"{share:.0%} of the questions got one and the same answer, which is right for {true:.0%} of them"
    return Found(text, f"{LOOK}, lower learning_rate", {"share": share, "right": true})


def _hacking(seen: Seen) -> Found | None:
    """A reward that rises by something else than right answers. Nothing is said as long as it does not rise.

    It is measured as a share of its range, so that one of 0 to 10 or of -1 to 1 is judged like one of 0 to 1.
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
    told = f"signs of reward hacking: the training reward rose from {begin:.2f} to {now:.2f} while {text}"
    return Found(told, cure, {"reward_first": begin, "reward": now} | numbers)


def in_range(seen: Seen, name: str) -> list[float]:
    """The values of a reward as shares of the range that rewards have had so far, which holds 0.

    >>> in_range(Seen({}, history={"reward/mean": [2.0, 5.0], "reward/max": [10.0, 10.0]}), "reward/mean")
    [0.2, 0.5]
    """
    low, high = min([0.0, *seen.before("reward/min")]), max(seen.before("reward/max"), default=1.0)
    return [(value - low) / (high - low) for value in seen.before(name)] if high > low else []


def _one_answer(seen: Seen, width: int, rewards: tuple[float, float]) -> Sign | None:
    share, true = seen.metrics.get("rollout/same_answer", 0.0), seen.metrics.get("rollout/same_answer_right", 0.0)
    if share - true <= HALF:
        return None
    return f"{share:.0%} of the responses give one answer, right for {true:.0%} of the questions", {"same": share}


def _unconfirmed(seen: Seen, width: int, rewards: tuple[float, float]) -> Sign | None:
    """Most of the reward is earned, and few responses state the right answer: fewer than before, or no more.

    A format that is learned first, and that the reward itself tells apart, is no sign as long as right answers do not
    become fewer. Where hardly any response ever stated one, the reward judges something else, and nothing is said.
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


def _accuracy_falls(seen: Seen, width: int, rewards: tuple[float, float]) -> Sign | None:
    """The last two evaluations are answered surely worse than those before, and the reward has left them far behind."""
    accuracies = seen.before("eval/accuracy")
    if not surely_worse(seen) or (rewards[1] - accuracies[-1]) - (rewards[0] - accuracies[0]) < WIDENED:
        return None
    usual, newest = median(accuracies[:-2]), accuracies[-1]
    return f"the accuracy of evaluations fell from {usual:.2f} to {newest:.2f}", {"before": usual, "accuracy": newest}


def surely_worse(seen: Seen) -> bool:
    """Whether the intervals of the last two evaluations lie below those of the ones before (their median).

    Two, because one out of many lies there by chance.
    """
    lows, highs = seen.before("eval/accuracy_low"), seen.before("eval/accuracy_high")
    return len(lows) > 2 and len(lows) == len(highs) and max(highs[-2:]) < median(lows[:-2])


def _short(seen: Seen, width: int, rewards: tuple[float, float]) -> Sign | None:
    """What is rewarded became half as long, and evaluations are answered surely worse."""
    ends = start_and_end(seen.before("rollout/length_correct"), width)
    if ends is None or ends[1] > HALF * ends[0] or not surely_worse(seen):
        return None
    accuracies = seen.before("eval/accuracy")
    text = (
        f"what it pays for became shorter, from {ends[0]:.0f} to {ends[1]:.0f} tokens, and evaluations are answered "
        f"worse ({accuracies[0]:.2f} at first, now {accuracies[-1]:.2f})"
    )
    return text, {"length_first": ends[0], "length": ends[1]}


SIGNS: tuple[Callable[[Seen, int, tuple[float, float]], Sign | None], ...] = (
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
