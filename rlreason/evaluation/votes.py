"""Which responses give the same answer: to one problem, for majority votes; or to most of them, which is no answer.

Equality is the grader's own, by its exact rules (no symbolic library): `1/2` and `0.5` are one answer, whether it
is right or wrong, so that a vote favours neither.
"""

from collections import Counter
from collections.abc import Sequence

from rlreason.grading import Grader
from rlreason.types import Counted


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


def same_answers(samples: Sequence[Counted], truths: Sequence[str], grader: Grader) -> dict[str, float]:
    """Shares of responses with the commonest answer, as it is written, and of ground truths that it equals.

    Under the names `eval/same_answer` and `eval/same_answer_right`; {} where a reward of one's own reads answers.
    """
    if grader.plugin or not samples or not truths:
        return {}
    read = (grader.read(s.text).answer for s in samples)
    said = Counter(answer.strip() for answer in read if answer is not None and answer.strip())
    if not said:
        return {}
    (answer, count), *_ = said.most_common(1)
    right = sum(times for truth, times in Counter(truths).items() if grader.same(answer, truth))
    return {"eval/same_answer": count / len(samples), "eval/same_answer_right": right / len(truths)}
