"""Counts over a window of grades, as flat numbers for the logger and as warnings in words.

It must not know how a grade came about beyond what `Grade` says.
"""

import statistics
from collections import Counter
from collections.abc import Sequence

from rlreason.types import Grade

WARN_SHARE = 0.005  # of the responses in a window
COUNTED = {
    "timeouts": "ran out of time",
    "kills": "killed their worker",
    "errors": "ended in an error of the grader or the plug-in",
    "bad_golds": "have no usable gold answer (null, or not a string, number or list)",
}


class Window:
    """Everything graded since the window was opened."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.paths: Counter[str] = Counter()
        self.milliseconds: list[float] = []
        self.seen = 0

    def add(self, grades: Sequence[Grade], hits: int, ms: Sequence[float]) -> None:
        self.seen += len(grades)
        self.counts["cache_hits"] += hits
        self.milliseconds += ms[: max(0, 100_000 - len(self.milliseconds))]
        for grade in grades:
            self.paths[grade.path] += 1
            self.counts["formatted"] += grade.format > 0
            self.counts["correct"] += grade.answer > 0
            self.counts[_event(grade)] += 1

    def metrics(self) -> dict[str, float]:
        if not self.seen:
            return {}
        rates = {
            "format_rate": self.counts["formatted"] / self.seen,
            "answer_rate": self.counts["correct"] / self.seen,
            "answer_given_format": self.counts["correct"] / max(1, self.counts["formatted"]),
            "cache_hit_rate": self.counts["cache_hits"] / self.seen,
        }
        events = {name: float(self.counts[name]) for name in (*COUNTED, "refusals", "bad_responses")}
        paths = {f"path/{path}": count / self.seen for path, count in sorted(self.paths.items())}
        times = sorted(self.milliseconds)
        if times:
            rates |= {"ms_median": statistics.median(times), "ms_p99": times[int(0.99 * (len(times) - 1))]}
        named = {"responses": float(self.seen)} | rates | events | paths
        return {f"grading/{name}": value for name, value in named.items()}

    def warnings(self) -> list[str]:
        """One sentence for each kind of failure that touched more than 0.5% of the responses."""
        return [
            f"grading: {self.counts[name]} of {self.seen} responses ({self.counts[name] / self.seen:.1%}) "
            f"{words}; "
            "they earned no reward, and that says nothing about the model"
            for name, words in COUNTED.items()
            if self.seen and self.counts[name] > WARN_SHARE * self.seen
        ]


def _event(grade: Grade) -> str:
    """The counter of a grade; `plain` for verdicts on the model rather than on the grader."""
    if grade.outcome == "error":
        return {"killed": "kills", "bad_gold": "bad_golds", "bad_response": "bad_responses"}.get(grade.path, "errors")
    return {"timeout": "timeouts", "refused": "refusals"}.get(grade.outcome, "plain")
