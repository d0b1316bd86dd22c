"""Tasks whose answer is checked rather than compared: one module a task, one function a prompt format in each.

`r1_zero(response, ground_truth)` and `question_only(response, ground_truth)` are plug-ins of the grader and run in its
worker processes. How an answer is read out of a response is the same as everywhere, and so is what it earns: format,
answer and reward are 0 or 1, and the reward is the answer's.
"""

from collections.abc import Callable

from rlreason.grading.formats import Extracted


def reward_name(reward: str, verifier: str | None) -> str:
    """What grades answers given in a prompt's form: the data's own verifier where it has one, else the prompt's reward.

    A reward of the user's own, as `module:function`, grades data with a verifier too.

    >>> reward_name("r1_zero", "rlreason.grading.verifiers.countdown"), reward_name("mine:reward", "another.verifier")
    ('rlreason.grading.verifiers.countdown:r1_zero', 'mine:reward')
    """
    return reward if verifier is None or ":" in reward else f"{verifier}:{reward}"


def graded(read: Extracted, is_right: Callable[[str], bool]) -> dict[str, float]:
    """What a plug-in returns for an answer that was read out of a response.

    >>> graded(Extracted(True, "4"), lambda answer: answer == "4")
    {'format_reward': 1.0, 'answer_reward': 1.0, 'reward': 1.0}
    >>> graded(Extracted(False, None), lambda answer: True)["reward"]
    0.0
    """
    right = float(read.formatted and read.answer is not None and is_right(read.answer))
    return {"format_reward": float(read.formatted), "answer_reward": right, "reward": right}
