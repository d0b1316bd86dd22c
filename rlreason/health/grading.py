"""Grades that could not be given: summed over the rows of a run, with the commonest reason that was written down."""

from collections import Counter
from collections.abc import Iterator

from rlreason.grading.metrics import COUNTED, WARN_SHARE
from rlreason.health.finding import Course, Finding
from rlreason.records.reader import RunFolder
from rlreason.runtime.text import shorten

CAUSES = {
    "timeouts": "Answers that computer algebra cannot settle in time; a reward that is slow or waits for a network.",
    "kills": "A reward function or an expression that took more memory than grading.memory_mb.",
    "errors": "A reward function that raises on responses it did not foresee.",
    "bad_golds": "Ground truths that are null or no text, number or list.",
    "eval": "The same, in evaluations, where such a response counts as wrong.",
}
CURE = "read grading_incidents.jsonl in the folder; raise grading.timeout_s or grading.memory_mb, or repair the reward"


def lost_grades(folder: RunFolder) -> Iterator[Finding]:
    """One finding for each kind of failure that touched more than 0.5% of a step's or an evaluation's responses."""
    for kind, words in COUNTED.items():
        counts = [
            (row, row.get(f"grading/{kind}") or 0.0, row.get("grading/responses") or 0.0) for row in folder.metrics
        ]
        yield from _found(folder, kind, words, counts, f"grading/{kind}")
    counts = [(row, row.get("eval/grading_failures") or 0.0, row.get("eval/samples") or 0.0) for row in folder.metrics]
    yield from _found(folder, "eval", "of evaluations got no grade", counts, "eval/grading_failures")


def _found(
    folder: RunFolder, kind: str, words: str, counts: list[tuple[dict[str, float], float, float]], metric: str
) -> Iterator[Finding]:
    hit = [(int(row.get("rollout_step") or 0), n) for row, n, of in counts if of and n > WARN_SHARE * of]
    if not hit:
        return
    lost, asked = sum(n for _, n, _ in counts), sum(of for _, _, of in counts)
    what = f"{lost:.0f} of {asked:.0f} responses ({lost / asked:.1%}) {words}; that says nothing about the model"
    evidence = [f"first at step {hit[0][0]}, in {len(hit)} steps or evaluations", *_incidents(folder)]
    points = [(int(row.get("rollout_step") or 0), n) for row, n, of in counts if of]
    courses = [Course(metric, points)] if len(points) > 1 else []
    yield Finding(f"grader_{kind}", what, evidence, CAUSES[kind], CURE, True, hit[0][0], {"lost": lost}, courses)


def _incidents(folder: RunFolder) -> list[str]:
    """The commonest reason with its answer, as the grader wrote them down."""
    reasons = Counter(str(row.get("error") or row.get("status")) for row in folder.incidents)
    return [
        f"grading_incidents.jsonl, {count} times: {shorten(reason, 160)}" for reason, count in reasons.most_common(2)
    ]
