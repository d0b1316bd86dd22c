"""Grade responses: extract the answer and decide whether it is right.

Exact, cheap rules in this process come first (`rlreason.grading.answers`); what they cannot decide goes to worker
processes that can be killed, where the symbolic library is loaded. Importing this package is cheap.
"""

from rlreason.grading.build import question_only_reward_fn, r1_zero_reward_fn
from rlreason.grading.formats import boxed
from rlreason.grading.grader import Grader, GroundTruth

__all__ = ["Grader", "GroundTruth", "boxed", "question_only_reward_fn", "r1_zero_reward_fn"]
