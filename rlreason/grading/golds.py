"""Every gold answer must grade itself right before a run is spent on it."""

from collections.abc import Sequence

from rlreason.answers.verdict import Gold, gold_texts
from rlreason.grading.grader import Grader

WRITTEN = {
    "r1_zero": "</think> <answer>{}</answer>",
    "question_only": "\\boxed{{{}}}",
}


def check_golds(grader: Grader, golds: Sequence[Gold]) -> list[int]:
    """Indices of the golds that are not graded right when a response states them word for word.

    A plug-in's response format is unknown, so nothing can be checked for one.
    """
    if grader.plugin:
        return []
    template = WRITTEN[grader.reward]
    responses = [template.format((gold_texts(gold) or [""])[0]) for gold in golds]
    grades = grader.grade_batch(responses, golds)
    return [index for index, grade in enumerate(grades) if grade.outcome != "correct"]
