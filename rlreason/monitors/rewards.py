"""Monitors of what is rewarded: one answer to all questions, and rewards that are hacked."""

from collections.abc import Callable

from rlreason.monitors.seen import FEWEST_ASKED, Found, Monitor, Seen, start_and_end

LOOK = "look at the responses (rlreason inspect)"
HALF = 0.5
FEWEST_RIGHT = 0.05  # of the responses, at first
WIDENED = 0.3  # by which the reward must have left the accuracy behind: unstable runs come to half of that


def _same_answer(seen: Seen) -> Found | None:
    m = seen.metrics
    share, true = m.get("eval/same_answer", 0.0), m.get("eval/same_answer_right", 0.0)
    if m.get("eval/problems", 0) < FEWEST_ASKED or share - true <= seen.limits["same_answer_above"]:
        return None
    text = f"{share:.0%} of the questions got one and the same answer, which is right for {true:.0%} of them"
    return Found(text, f"{LOOK}, lower learning_rate", {"share": share, "right": true})


def _hacking(seen: Seen) -> Found | None:
    """A reward that rises by something else than right answers. Nothing is said as long as it does not rise."""
    width = seen.limits["reward_hacking_after"]
    rewards = start_and_end(seen.before("reward/mean"), width)
    if rewards is None or rewards[1] - rewards[0] < seen.limits["reward_hacking_gain"]:
        return None
    begin, now = rewards
    found = next((sign for look in SIGNS if (sign := look(seen, width))), None)
    if found is None:
        return None
    text, numbers = found
    cure = f"{LOOK}; judge evaluations by another reward (eval.reward), and repair what the reward pays for"
    told = f"signs of reward hacking: the training reward rose from {begin:.2f} to {now:.2f} while {text}"
    return Found(told, cure, {"reward_first": begin, "reward": now} | numbers)


Sign = tuple[str, dict[str, float]]


def _one_answer(seen: Seen, width: int) -> Sign | None:
    share, true = seen.metrics.get("rollout/same_answer", 0.0), seen.metrics.get("rollout/same_answer_right", 0.0)
    if share - true <= HALF:
        return None
    return f"{share:.0%} of the responses give one answer, right for {true:.0%} of the questions", {"same": share}


def _unconfirmed(seen: Seen, width: int) -> Sign | None:
    """The reward rises, and the share of responses that state the right answer does not, and is far below it.

    Where hardly any response ever stated it, the reward judges something else than that, and nothing is said.
    """
    right = start_and_end(seen.before("rollout/right"), width)
    rewards = start_and_end(seen.before("reward/mean"), width)
    if right is None or rewards is None or right[0] < FEWEST_RIGHT or right[1] > HALF * rewards[1]:
        return None
    if right[1] - right[0] > (rewards[1] - rewards[0]) / 4:
        return None
    text = f"the share of responses that state the right answer went from {right[0]:.0%} to {right[1]:.0%}"
    return text, {"right_first": right[0], "right": right[1]}


def _accuracy_falls(seen: Seen, width: int) -> Sign | None:
    """Evaluations are answered surely worse than before, and the reward has left them far behind."""
    lows, highs, accuracies = (seen.before(f"eval/accuracy{end}") for end in ("_low", "_high", ""))
    if len(lows) < 2 or len(lows) != len(accuracies) or highs[-1] >= max(lows[:-1]):
        return None
    rewards = start_and_end(seen.before("reward/mean"), width) or (0.0, 0.0)
    best, newest = max(accuracies[:-1]), accuracies[-1]
    if (rewards[1] - newest) - (rewards[0] - accuracies[0]) < WIDENED:
        return None
    return f"the accuracy of evaluations fell from {best:.2f} to {newest:.2f}", {"best": best, "accuracy": newest}


def _short(seen: Seen, width: int) -> Sign | None:
    """What is rewarded became half as long, and evaluations are not answered better than at the start."""
    ends, accuracies = start_and_end(seen.before("rollout/length_correct"), width), seen.before("eval/accuracy")
    if ends is None or ends[1] > HALF * ends[0] or len(accuracies) < 2 or accuracies[-1] > accuracies[0]:
        return None
    text = (
        f"what it pays for became shorter, from {ends[0]:.0f} to {ends[1]:.0f} tokens, and evaluations are answered "
        f"no better ({accuracies[0]:.2f}, now {accuracies[-1]:.2f})"
    )
    return text, {"length_first": ends[0], "length": ends[1]}


SIGNS: tuple[Callable[[Seen, int], Sign | None], ...] = (_one_answer, _unconfirmed, _accuracy_falls, _short)

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
