"""Choose the problems of each step: passes over the data, each in its own random order."""

from collections import Counter
from collections.abc import Collection, Sequence
from random import Random
from typing import Any

from rlreason.types import Problem, Sample


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
            for index in self._order(epoch)[place:]:
                self.position += 1
                problem = self.problems[index]
                passed.add(problem.id)
                if problem.id not in excluded and not self.solved(problem.id):
                    chosen.setdefault(problem.id, problem)
                if len(chosen) == count:
                    break
        return list(chosen.values())

    def solved(self, problem_id: str) -> bool:
        """Whether this problem is excluded from now on."""
        return bool(self.skip_solved) and self.streaks[problem_id] >= self.skip_solved

    @property
    def n_solved(self) -> int:
        """The number of problems that are excluded from now on."""
        return sum(streak >= self.skip_solved for streak in self.streaks.values()) if self.skip_solved else 0

    def update(self, samples: Sequence[Sample]) -> None:
        """Update the number of all-correct groups in a row of each problem."""
        if not self.skip_solved:
            return
        correct: dict[str, bool] = {}
        for s in samples:
            correct[s.group] = correct.get(s.group, True) and s.grade.outcome == "correct"
        for problem_id, all_correct in correct.items():
            self.streaks[problem_id] = self.streaks[problem_id] + 1 if all_correct else 0

    @property
    def state(self) -> dict[str, Any]:
        """The state, as JSON values, with which a resumed run draws the same problems as an uninterrupted one."""
        return {"position": self.position, "streaks": {k: v for k, v in self.streaks.items() if v}}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self.position, self.streaks = state["position"], Counter(state["streaks"])

    def _order(self, epoch: int) -> list[int]:
        order = list(range(len(self.problems)))
        Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
        return order
