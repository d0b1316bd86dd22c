"""A batch of grades summed up, as flat metrics and as warnings: pure functions of grades.

They count the grades they are given and nothing else, so that what is graded at the same time for another purpose
stays out of the metrics of a step or of an evaluation.
"""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from rlreason.types import Grade

WARN_SHARE = 0.005  # of the responses of a batch
COUNTED = {
    "timeouts": "ran out of time",
    "kills": "killed their worker",
    "errors": "ended in an error of the grader or the plug-in",
    "bad_golds": "have no usable ground truth (null, or not a string, number or list)",
}


def grading_metrics(grades: Sequence[Grade]) -> dict[str, float]:
    """`grading/...`: shares of formats and right answers, of rules that decided, failures by kind, milliseconds.

    >>> right = Grade(1.0, 1.0, 1.0, "correct", "number")
    >>> m = grading_metrics([right, Grade(1.0, 0.1, 0.1, "wrong", "plugin")])
    >>> m["grading/answer_rate"], m["grading/path/number"], m["grading/timeouts"]
    (0.5, 0.5, 0.0)
    """
    if not grades:
        return {}
    n, events = len(grades), Counter(map(event, grades))
    formatted = sum(grade.format > 0 for grade in grades)
    correct = sum(grade.outcome == "correct" for grade in grades)
    rates = {
        "format_rate": formatted / n,
        "answer_rate": correct / n,
        "answer_given_format": correct / max(1, formatted),
        "cache_hit_rate": sum(grade.remembered for grade in grades) / n,
    }
    times = sorted(grade.milliseconds for grade in grades if grade.milliseconds is not None)
    if times:
        rates |= {"ms_median": statistics.median(times), "ms_p99": times[int(0.99 * (len(times) - 1))]}
    counts = {name: float(events[name]) for name in (*COUNTED, "refusals", "bad_responses")}
    paths = {f"path/{path}": count / n for path, count in sorted(Counter(g.path for g in grades).items())}
    return {f"grading/{name}": value for name, value in ({"responses": float(n)} | rates | counts | paths).items()}


def grading_warnings(grades: Sequence[Grade], reasons: Mapping[str, str] | None = None) -> list[str]:
    """One sentence for each kind of failure that touched more than 0.5% of the responses.

    `reasons`: for a kind of failure, the cause of the last one, where it is known.
    """
    last = {name: f" (the last: {reason})" for name, reason in (reasons or {}).items()}
    events, n = Counter(map(event, grades)), len(grades)
    return [
        f"grading: {events[name]} of {n} responses ({events[name] / n:.1%}) {words}{last.get(name, '')}; "
        "they earned no reward, and that says nothing about the model"
        for name, words in COUNTED.items()
        if events[name] > WARN_SHARE * n
    ]


def grading_failures(grades: Sequence[Grade]) -> int:
    """Grades that say something about the grader instead of the model: they count as not correct, and are shown."""
    return sum(event(grade) in COUNTED for grade in grades)


def event(grade: Grade) -> str:
    """The counter of a grade; `plain` for verdicts on the model rather than on the grader."""
    if grade.outcome == "error":
        return {"killed": "kills", "bad_gold": "bad_golds", "bad_response": "bad_responses"}.get(grade.path, "errors")
    return {"timeout": "timeouts", "refused": "refusals"}.get(grade.outcome, "plain")
