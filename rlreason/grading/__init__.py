"""The reward: reads an answer out of a response and says whether it is right.

Cheap rules first, in process and exact (`rlreason.grading.answers`); what they cannot decide goes to worker processes
that can be killed, where the symbolic library is loaded. Importing this package is cheap.
"""

from rlreason.grading.formats import boxed
from rlreason.grading.grader import Grader, GroundTruth
from rlreason.grading.rewards import question_only_reward_fn, r1_zero_reward_fn

__all__ = ["Grader", "GroundTruth", "boxed", "question_only_reward_fn", "r1_zero_reward_fn"]
