"""Grades that could not be given: summed over the rows of a run, with the commonest reason that was written down."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlreason.grading.metrics import COUNTED, WARN_SHARE
from rlreason.health.finding import Course, Finding
from rlreason.monitors.replay import Row
from rlreason.runtime.text import shorten

CAUSES = {
    "timeouts": "Answers that computer algebra cannot settle in time; a reward that is slow or waits for a network.",
    "kills": "A reward function or an expression that took more memory than grading.memory_mb.",
    "errors": "A reward function that raises on responses it did not foresee.",
    "bad_golds": "Ground truths that are null or no text, number or list.",
    "eval": "The same, in evaluations, where such a response counts as wrong.",
}
CURE = "read grading_incidents.jsonl in the folder; raise grading.timeout_s or grading.memory_mb, or repair the reward"


def lost_grades(rows: Sequence[Row], incidents: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """One finding for each kind of failure that touched more than 0.5% of a step's or an evaluation's responses.

    `incidents`: the lines of grading_incidents.jsonl.
    """
    for kind, words in COUNTED.items():
        yield from _found(rows, incidents, kind, words, f"grading/{kind}", "grading/responses")
    yield from _found(rows, incidents, "eval", "of evaluations got no grade", "eval/grading_failures", "eval/samples")


def _found(
    rows: Sequence[Row], incidents: Sequence[Mapping[str, Any]], kind: str, words: str, lost: str, asked: str
) -> Iterator[Finding]:
    counts = [(int(row.get("rollout_step") or 0), row.get(lost) or 0.0, of) for row in rows if (of := row.get(asked))]
    hit = [step for step, n, of in counts if n > WARN_SHARE * of]
    if not hit:
        return
    in_all, of_all = sum(n for _, n, _ in counts), sum(of for _, _, of in counts)
    share = in_all / of_all if of_all > 0 else 1.0
    what = f"{in_all:.0f} of {of_all:.0f} responses ({share:.1%}) {words}; that says nothing about the model"
    evidence = [f"first at step {hit[0]}, in {len(hit)} steps or evaluations", *_reasons(incidents)]
    courses = [Course(lost, [(step, n) for step, n, _ in counts])] if len(counts) > 1 else []
    yield Finding(f"grader_{kind}", what, evidence, CAUSES[kind], CURE, True, hit[0], {"lost": in_all}, courses)


def _reasons(incidents: Sequence[Mapping[str, Any]]) -> list[str]:
    """The commonest reasons, as the grader wrote them down."""
    reasons = Counter(str(row.get("error") or row.get("status")) for row in incidents)
    return [
        f"grading_incidents.jsonl, {count} times: {shorten(reason, 160)}" for reason, count in reasons.most_common(2)
    ]
