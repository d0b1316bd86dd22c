"""Where two settings differ: accuracy on parts of the problems, with Holm's correction over all parts and settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rlreason.report.content import Table
from rlreason.report.pairing import Pairing, pair, side_of
from rlreason.report.study import Problem, Study
from rlreason.report.tables import NONE, percent
from rlreason.report.words import signed
from rlreason.statistics import holm
from rlreason.statistics.differences import LEVEL, PROBLEMS

MOST_PARTS = 40  # of one fact: with more different values it tells problems apart, not kinds of them
FEWEST_PROBLEMS = 8  # of a part


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of the problems, by what makes it one."""

    kind: str  # "level", "question length" ...
    name: str
    problems: frozenset[str]


def slices_of(study: Study) -> list[Slice]:
    """The parts of the problems that all runs answered: by fact, by length of the question, by difficulty at the start.

    Parts of fewer than FEWEST_PROBLEMS problems are left out, and so is a kind with one part.
    """
    problems = _problems(study)
    kinds = [*_by_facts(problems), ("question length", _by_length(problems))]
    kinds.append(("difficulty for the starting model", _by_difficulty(study)))
    found = []
    for kind, parts in kinds:
        large = {
            name: of & problems.keys() for name, of in parts.items() if len(of & problems.keys()) >= FEWEST_PROBLEMS
        }
        if len(large) > 1:
            found += [Slice(kind, name, frozenset(of)) for name, of in large.items()]
    return found


def _problems(study: Study) -> dict[str, Problem]:
    """Those that every run answered."""
    finals = [run.final.problems for run in study.runs if run.final is not None]
    if not finals:
        return {}
    common = set(finals[0]).intersection(*finals[1:])
    return {name: finals[0][name] for name in sorted(common)}


def _by_facts(problems: Mapping[str, Problem]) -> Iterator[tuple[str, dict[str, set[str]]]]:
    for fact in dict.fromkeys(name for problem in problems.values() for name in problem.facts):
        parts: dict[str, set[str]] = {}
        for name, problem in problems.items():
            parts.setdefault(str(problem.facts.get(fact, "not told")), set()).add(name)
        if 1 < len(parts) <= MOST_PARTS:
            yield str(fact), dict(sorted(parts.items()))


def _by_length(problems: Mapping[str, Problem]) -> dict[str, set[str]]:
    """Thirds by the characters of the question."""
    lengths = {name: len(problem.question) for name, problem in problems.items()}
    if len(set(lengths.values())) < 3:
        return {}
    low, high = np.quantile(list(lengths.values()), (1 / 3, 2 / 3))
    return {
        f"short (up to {low:.0f} characters)": {n for n, k in lengths.items() if k <= low},
        "middle": {n for n, k in lengths.items() if low < k <= high},
        f"long (over {high:.0f})": {n for n, k in lengths.items() if k > high},
    }


def _by_difficulty(study: Study) -> dict[str, set[str]]:
    """By how many of the evaluations before training solved a problem: none, some or all."""
    starts = [run.start.problems for run in study.runs if run.start is not None]
    if not starts:
        return {}
    asked = set(starts[0]).intersection(*starts[1:])
    share = {name: float(np.mean([start[name].share for start in starts])) for name in asked}
    return {
        "solved by no starting run": {n for n, s in share.items() if s == 0},
        "by some": {n for n, s in share.items() if 0 < s < 1},
        "by all": {n for n, s in share.items() if s == 1},
    }


def slices_table(study: Study) -> Table | None:
    """Each slice: the reference's accuracy, and the others' differences to it; a sign where Holm allows one."""
    slices, reference = slices_of(study), side_of(study.reference)
    others = [(one, side_of(one)) for one in study.settings[1:]]
    if not slices or not reference.right or not any(side.right for _, side in others):
        return None
    found = {(s, one.label): pair(side, reference, set(s.problems)) for s in slices for one, side in others}
    tested = {key: pairing for key, pairing in found.items() if pairing is not None}
    adjusted = dict(zip(tested, holm([p.difference.p for p in tested.values()]), strict=True))
    rows = []
    for s in slices:
        pairings = [found[s, one.label] for one, _ in others]
        first = next((p for p in pairings if p is not None), None)
        rows.append(
            [
                f"{s.kind}\n{s.name}",
                f"{len(s.problems):,}",
                NONE if first is None else percent(first.means[1]),
                *(_cell(found[s, one.label], adjusted.get((s, one.label), 1.0)) for one, _ in others),
            ]
        )
    return Table(
        "Accuracy by slice",
        ["problems that are", "number", study.reference.label, *(one.label for one, _ in others)],
        rows,
        frozenset(range(1, len(others) + 3)),
        "Accuracy of the reference, and differences to it in points with 95% intervals. With "
        "\N{BLACK UP-POINTING TRIANGLE} or \N{BLACK DOWN-POINTING TRIANGLE}: different by Holm over all "
        f"{len(tested)} comparisons of this table; "
        "everything else cannot be told.",
    )


def _cell(pairing: Pairing | None, p: float) -> str:
    if pairing is None:
        return NONE
    found = pairing.difference
    sure = p <= LEVEL and found.over != PROBLEMS
    sign = ("\N{BLACK UP-POINTING TRIANGLE} " if found.mean > 0 else "\N{BLACK DOWN-POINTING TRIANGLE} ") * sure
    return f"{sign}{signed(found.mean)}\n{signed(found.low)} to {signed(found.high)}"
