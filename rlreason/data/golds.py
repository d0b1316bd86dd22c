"""A gold answer that does not grade itself right can never be earned: found before a run is spent on it."""

from collections.abc import Sequence

from rlreason.errors import DataError
from rlreason.grading import Grader, check_golds
from rlreason.runtime.text import few
from rlreason.types import Problem


def check_answers(
    problems: Sequence[Problem], grader: Grader, on_bad: str, needed: bool = True
) -> tuple[list[Problem], list[str]]:
    """(problems, notes): those that cannot be earned are named, and with `on_bad="drop"` left out.

    Where nothing can be earned at all it is refused, unless answers are not `needed`: SFT learns without them.
    """
    if grader.plugin:  # its form of an answer is unknown
        return list(problems), []
    wrong = {problems[i].id for i in check_golds(grader, [p.answer for p in problems])}
    none = [p.id for p in problems if not p.answer]
    if len(none) == len(problems) and not needed:
        return list(problems), ["! no validation problem has a gold answer: accuracy stays 0 and says nothing"]
    if len(wrong) == len(problems):
        what = "has a gold answer" if len(none) == len(problems) else "has a gold answer that grades itself right"
        raise DataError(
            f"none of {len(problems)} problems {what}, so nothing can be earned ({few([p.id for p in problems], 3)}): "
            "choose data with answers, or say where they stand (data.gold, data.fields.answer, or a file of their own: "
            "data.ground_truth)"
        )
    done = "dropped" if on_bad == "drop" else "cannot be earned"
    notes = []
    if none:
        notes.append(f"! {len(none)} of {len(problems)} problems have no gold answer; {done}: {few(none)}")
    if bad := [p.id for p in problems if p.id in wrong and p.answer]:
        notes.append(f"! {len(bad)} of {len(problems)} gold answers do not grade themselves right; {done}: {few(bad)}")
    return [p for p in problems if p.id not in wrong or on_bad == "keep"], notes
