r"""The reward: reads an answer out of a response and says whether it is right.

Cheap paths first, in process and exact; what they cannot decide goes to killable worker processes, where the
symbolic library lives. This package must not know the trainer, prompts or devices, and importing it is cheap.
"""

from rlreason.answers.verdict import Gold
from rlreason.grading.formats import boxed
from rlreason.grading.golds import check_golds
from rlreason.grading.grader import Grader
from rlreason.grading.rewards import question_only_reward_fn, r1_zero_reward_fn

__all__ = ["Gold", "Grader", "boxed", "check_golds", "question_only_reward_fn", "r1_zero_reward_fn"]
