"""Which responses to a problem give the same answer, for majority votes.

Equality is the grader's own, by its exact rules (no symbolic library): `1/2` and `0.5` are one answer, whether it
is right or wrong, so that a vote favours neither. It must not know tensors or settings.
"""

from collections.abc import Sequence

from rlreason.answers.decide import decide_pair
from rlreason.answers.verdict import Settings
from rlreason.grading.formats import Extract, candidates
from rlreason.grading.grader import FORMATS


def can_vote(reward: str) -> bool:
    """Whether answers can be read out of responses: a reward of one's own hides where they stand."""
    return reward in FORMATS


def answer_classes(
    texts: Sequence[str], reward: str, extract: Extract, percent: bool, rel_tol: float
) -> list[int | None]:
    """For each response the class of its answer, numbered as they appear; None where it gives none.

    >>> told = ["so </think> <answer>0.5</answer>", "</think> <answer> 1/2 </answer>", "no idea"]
    >>> answer_classes(told, "r1_zero", "strict", percent=True, rel_tol=1e-6)
    [0, 0, None]
    """
    settings, firsts = Settings(percent=percent, rel_tol=rel_tol), list[str]()
    return [_class_of(FORMATS[reward](text).answer, firsts, extract, settings) for text in texts]


def _class_of(answer: str | None, firsts: list[str], extract: Extract, settings: Settings) -> int | None:
    """The place of the first equal answer in `firsts`, where a new one is added."""
    if answer is None or not answer.strip():
        return None
    for place, first in enumerate(firsts):
        for read in candidates(answer, extract):
            verdict = decide_pair(read, first, settings)
            if verdict is not None and verdict.outcome == "correct":
                return place
    firsts.append(candidates(answer, extract)[-1])
    return len(firsts) - 1
