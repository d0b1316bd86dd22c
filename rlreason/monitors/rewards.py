"""Monitors of what is rewarded: one answer to all questions, and rewards that are hacked."""

from collections.abc import Callable
from statistics import median

from rlreason.monitors.seen import FEWEST_ASKED, Found, Monitor, Seen, start_and_end

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
