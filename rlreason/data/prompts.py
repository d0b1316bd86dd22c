"""Fill questions into prompt templates, and write the traces that SFT imitates."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from random import Random
from string import Formatter
from typing import Any

from rlreason.errors import ConfigError, DataError
from rlreason.grading import Grader
from rlreason.grading.formats import FORMATS
from rlreason.runtime.text import few
from rlreason.types import Problem, Sample

_CALCULATOR = re.compile(r"<<[^<>=\n]*=[^<>\n]*>>")  # GSM8K's annotations: 48/2 = <<48/2=24>>24


def trace_text(problem: Problem, template: str) -> str:
    r"""Return the response to imitate: the given one, or `template` filled with `{solution}` and `{answer}`.

    >>> sum_ = Problem("a", "48/2?", "24", solution="It is <<48/2=24>>24.")
    >>> trace_text(sum_, " {solution} </think> <answer>{answer}</answer>")
    ' It is 24. </think> <answer>24</answer>'
    """
    if problem.response is not None:
        return problem.response
    solution, answer = problem.claim or (problem.solution or "", problem.answer)
    return template.format(solution=_CALCULATOR.sub("", solution), answer=answer)


def _fields(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name is not None}


def check_template(template: str) -> None:
    """`ConfigError` unless the template has `{solution}` or `{answer}`, and no other field."""
    try:
        names = _fields(template)
    except ValueError:
        names = set()
    if not names or names - {"solution", "answer"}:
        raise ConfigError(
            f"prompt.trace={template!r}: it is written from {{solution}} and {{answer}} only: double literal braces, "
            "as in \\boxed{{{answer}}}"
        )


def with_traces(problems: list[Problem], template: str, skip: bool, say: Callable[[str], None]) -> list[Problem]:
    """Return the problems with a response, or all fields of the template.

    Others are a `DataError`, or with `skip` left out with a note.
    """
    kept, without = list[Problem](), list[str]()
    for p in problems:
        if p.response is not None or all(getattr(p, name) for name in _fields(template)):
            kept.append(p)
        else:
            without.append(p.id)
    if not without:
        return problems
    found = (
        f"{len(without)} of {len(problems)} training problems have neither a response nor what prompt.trace is "
        f"written from ({few(without)})"
    )
    if not skip or not kept:
        cure = "SFT needs responses or solutions: name their field (data.fields), or set data.bad_rows=skip to leave "
        raise DataError(f"{found}: {cure}such rows out")
    say(f"! {found}: left out")
    return kept


def note_other_forms(problems: list[Problem], template: str, reward: str, say: Callable[[str], None]) -> None:
    """Count the traces in another form than the reward reads: imitated, they teach responses that earn nothing."""
    read = FORMATS[reward].read
    if off := sum(not read(trace_text(p, template)).formatted for p in problems):
        cure = "data.response_as=solution fills them into prompt.trace; or choose the prompt that they answer"
        say(f"! {off} of {len(problems)} traces have another form than {reward} reads, and teach it: {cure}")


def filter_correct(problems: list[Problem], template: str, grader: Grader, say: Callable[[str], None]) -> list[Problem]:
    """Return the problems whose trace is graded correct, and count the others; `DataError` where none is."""
    graded = [p for p in problems if p.answer]
    grades = grader.grade_batch([trace_text(p, template) for p in graded], [p.answer for p in graded])
    kept = [p for p, g in zip(graded, grades, strict=True) if g.outcome == "correct"]
    outcomes = Counter[str](g.outcome for g in grades if g.outcome != "correct")
    outcomes["without a ground truth"] = len(problems) - len(graded)
    dropped = ", ".join(f"{n} {outcome}" for outcome, n in outcomes.most_common() if n) or "none"
    counts = f"kept {len(kept)} of {len(problems)} traces whose answer the grader accepts; dropped: {dropped}"
    if not kept:
        raise DataError(
            f"data.filter=correct: {counts}: choose the prompt that the traces were written for, or "
            "data.response_as=solution to put them into this prompt's form"
        )
    say(counts)
    return kept


class ProblemSampler:
    """An endless stream of problems; `skip_solved` all-correct groups in a row exclude a problem, 0 excludes none."""

    def __init__(self, problems: Sequence[Problem], seed: int, skip_solved: int = 0) -> None:
        self.problems, self.seed, self.skip_solved = problems, seed, skip_solved
        self.position = 0
        self.streaks: Counter[str] = Counter()  # problem id -> all-correct groups in a row

    def next_batch(self, count: int, excluded: Collection[str] = ()) -> list[Problem]:
        """Return the next `count` different problems, fewer when there are no more; none of the ids in `excluded`.

        A batch that spans two passes may meet a problem twice; the second time the next problem replaces it.
        """
        chosen: dict[str, Problem] = {}
        passed: set[str] = set()
        while len(chosen) < count and len(passed) < len(self.problems):
            epoch, place = divmod(self.position, len(self.problems))
            shuffled = list(self.problems)
            Random(f"{self.seed}/epoch/{epoch}").shuffle(shuffled)
            for problem in shuffled[place:]:
                self.position += 1
                passed.add(problem.id)
                if problem.id not in excluded and not self.solved(problem.id):
                    chosen.setdefault(problem.id, problem)
                if len(chosen) == count:
                    break
        return list(chosen.values())

    def solved(self, problem_id: str) -> bool:
        """Whether this problem is excluded from now on."""
        return 0 < self.skip_solved <= self.streaks[problem_id]

    @property
    def n_solved(self) -> int:
        """The number of problems that are excluded from now on."""
        return sum(map(self.solved, self.streaks))

    def update(self, samples: Sequence[Sample]) -> None:
        """Update the number of all-correct groups in a row of each problem."""
        correct: dict[str, bool] = {}
        for s in samples if self.skip_solved else ():
            correct[s.group] = correct.get(s.group, True) and s.grade.outcome == "correct"
        for problem_id, all_correct in correct.items():
            self.streaks[problem_id] = self.streaks[problem_id] + 1 if all_correct else 0

    @property
    def state(self) -> dict[str, Any]:
        """The state, as JSON values, with which a resumed run draws the same problems as an uninterrupted one."""
        return {"position": self.position, "streaks": dict(+self.streaks)}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.position, self.streaks = state["position"], Counter(state["streaks"])
