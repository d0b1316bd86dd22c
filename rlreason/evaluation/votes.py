"""Which responses to a problem give the same answer, for majority votes.

Equality is the grader's own, by its exact rules (no symbolic library): `1/2` and `0.5` are one answer, whether it
is right or wrong, so that a vote favours neither.
"""

from collections.abc import Sequence

from rlreason.grading import Grader


def answer_classes(texts: Sequence[str], grader: Grader) -> list[int | None]:
    """For each response the class of its answer, numbered as they appear; None where it gives none.

    >>> said = ["so </think> <answer>0.5</answer>", "</think> <answer> 1/2 </answer>", "no idea"]
    >>> answer_classes(said, Grader())
    [0, 0, None]
    """
    firsts: list[str] = []
    classes: list[int | None] = []
    for read in map(grader.read, texts):
        if read.answer is None or not read.answer.strip():
            classes.append(None)
            continue
        place = next((place for place, first in enumerate(firsts) if grader.same(read.answer, first)), len(firsts))
        if place == len(firsts):
            firsts.append(read.candidates[-1])
        classes.append(place)
    return classes
