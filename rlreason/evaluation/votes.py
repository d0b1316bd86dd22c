"""Which responses give the same answer: to one problem, for majority votes; or to most of them, which is no answer.

Equality is the grader's own, by its exact rules (no symbolic library): `1/2` and `0.5` are one answer, whether it
is right or wrong, so that a vote favours neither.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from rlreason.answers.sketch import Sketch, apart, sketch
from rlreason.grading import Grader
from rlreason.types import Counted


def answer_classes(texts: Sequence[str], grader: Grader) -> list[int | None]:
    """For each response the class of its answer, numbered as they appear; None where it gives none.

    >>> said = ["so </think> <answer>0.5</answer>", "</think> <answer> 1/2 </answer>", "no idea"]
    >>> answer_classes(said, Grader())
    [0, 0, None]
    """
    classes = _Classes(grader)
    answers = ((read.answer, read.candidates) for read in map(grader.read, texts))
    return [classes.of(answer, said) if answer is not None and answer.strip() else None for answer, said in answers]


class _Classes:
    """The classes so far, each with its first answer.

    An answer belongs to the first class whose first answer is the same. What was compared once is remembered by the
    text, and what surely differs is told by its sketch: only the rest is compared by the grader's rules.
    """

    def __init__(self, grader: Grader) -> None:
        self._grader, self._rel_tol = grader, grader.comparison.rel_tol
        self._firsts: list[tuple[str, Sketch | None]] = []
        self._place: dict[str, int] = {}  # text -> its class
        self._passed: dict[str, int] = {}  # text -> how many classes it does not belong to

    def of(self, answer: str, candidates: Sequence[str]) -> int:
        """The class of an answer, a new one where it is like none before; `candidates`: the texts that may state it."""
        if (known := self._place.get(answer)) is not None:
            return known
        sketches = [sketch(text) for text in candidates]
        for place in range(self._passed.get(answer, 0), len(self._firsts)):
            first, drawn = self._firsts[place]
            if all(apart(one, drawn, self._rel_tol) for one in sketches):
                continue
            if self._grader.same(answer, first):
                self._place[answer] = place
                return place
        self._firsts.append((candidates[-1], sketches[-1]))
        self._passed[answer] = len(self._firsts) - 1
        return len(self._firsts) - 1


def same_answers(samples: Sequence[Counted], truths: Sequence[str], grader: Grader) -> dict[str, float]:
    """Shares of responses with the commonest answer, as it is written, and of ground truths that it equals.

    Under the names `eval/same_answer` and `eval/same_answer_right`; {} where a reward of one's own reads answers.
    """
    if grader.plugin:
        return {}
    return common_answer([grader.read(s.text).answer for s in samples], truths, grader.same, "eval")


def common_answer(
    answers: Sequence[str | None], truths: Sequence[str], same: Callable[[str, str], bool], prefix: str
) -> dict[str, float]:
    """`PREFIX/same_answer`: the share of responses with the commonest answer; `..._right`: of truths that it equals.

    `answers`: one for each response, None where it states none. {} where nobody answers anything.

    >>> common_answer(["7", " 7", None, "8"], ["7", "9"], str.__eq__, "eval")
    {'eval/same_answer': 0.5, 'eval/same_answer_right': 0.5}
    """
    said = Counter(answer.strip() for answer in answers if answer is not None and answer.strip())
    if not said or not truths:
        return {}
    (answer, count), *_ = said.most_common(1)
    right = sum(times for truth, times in Counter(truths).items() if same(answer, truth))
    return {f"{prefix}/same_answer": count / len(answers), f"{prefix}/same_answer_right": right / len(truths)}
