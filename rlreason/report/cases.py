"""The same few problems over training: what each setting answered at the first, a middle and the last evaluation."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.files import EVALS, ResponseFile, response_files
from rlreason.records.lines import each_line
from rlreason.report.content import Case, Shown
from rlreason.report.read_run import without_ids
from rlreason.report.study import Run, Study
from rlreason.runtime.text import visible

PROBLEMS, STEPS, SETTINGS = 4, 3, 6  # shown at most
LONGEST = 600  # characters of a response
Found = dict[str, tuple[dict[str, Any], int]]  # problem -> its first response, and the line that it stands in


def cases_of(study: Study) -> list[Case]:
    """Problems by a rule fixed before looking, responses of the smallest seed that all settings share.

    One problem that all settings solve in the end, one that none does, one that some do, and the first, in the order of
    a hash. The steps are those of the reference. [] where the runs have saved no evaluations.
    """
    runs = _one_seed(study)
    files = {label: _last_of_each_step(run) for label, run in runs.items()}
    shared = sorted(next(iter(files.values()))) if files else []
    steps = list(dict.fromkeys([shared[0], shared[len(shared) // 2], shared[-1]])) if shared else []
    if not steps:
        return []
    chosen = _chosen(list(runs.values()))
    found = {
        (label, step): _responses(files[label][step], chosen)
        for label in runs
        for step in steps
        if step in files[label]
    }
    cases = []
    for problem in chosen:
        of_steps = {step: _side_by_side(problem, step, list(runs), found, files) for step in steps}
        rows = [row for (_, _), of in found.items() if (row := of.get(problem)) is not None]
        if rows and all(of_steps.values()):
            question, gold = rows[0][0].get("question"), rows[0][0].get("gold")
            cases.append(Case(shown_text(str(question)), shown_text(str(gold)), of_steps))
    return cases


def _one_seed(study: Study) -> dict[str, Run]:
    """A run of each setting, up to SETTINGS of them, with the smallest seed that they share."""
    saved = [(one, {run.seed: run for run in one.runs if run.final is not None}) for one in study.settings]
    saved = [(one, of) for one, of in saved if of][:SETTINGS]
    if not saved:
        return {}
    shared = set(saved[0][1]).intersection(*(of for _, of in saved[1:]))
    return {one.label: of[min(shared or of)] for one, of in saved}


def _last_of_each_step(run: Run) -> dict[int, ResponseFile]:
    """Step -> its evaluation; where there are two of one step, the later one, which is the final one."""
    return {file.step: file for file in response_files(run.folder, EVALS) if file.step is not None}


def _chosen(runs: Sequence[Run]) -> list[str]:
    """The problems to show."""
    finals = [run.final.problems for run in runs if run.final is not None]
    common = set(finals[0]).intersection(*finals[1:]) if finals else set()
    for run in runs:
        common &= set(run.start.problems) if run.start is not None else common
    ordered = sorted(common, key=lambda name: (zlib.crc32(name.encode()), name))
    solved = {name: sum(final[name].share == 1 for final in finals) for name in ordered}
    kinds: list[Callable[[str], bool]] = [
        lambda name: solved[name] == len(finals),
        lambda name: solved[name] == 0,
        lambda name: 0 < solved[name] < len(finals),
    ]
    first = [next((name for name in ordered if kind(name)), None) for kind in kinds]
    return list(dict.fromkeys([name for name in first if name is not None] + ordered))[:PROBLEMS]


def _responses(file: ResponseFile, problems: Sequence[str]) -> Found:
    """The first response to each of these problems, with its line."""
    found: Found = {}
    try:
        for number, row in each_line(file.path, _wrong, lambda _: None, without_ids):
            if row["problem_id"] in problems and row["problem_id"] not in found:
                found[row["problem_id"]] = row, number
                if len(found) == len(problems):
                    break
    except ConfigError:  # reading the study has named it
        return {}
    return found


def _wrong(row: dict[str, Any]) -> str:
    names = ("problem_id", "response", "outcome")
    return "" if all(isinstance(row.get(name), str) for name in names) else "no usable response"


def _side_by_side(
    problem: str, step: int, labels: Sequence[str], found: dict[tuple[str, int], Found], files: Any
) -> list[Shown]:
    shown = []
    for label in labels:
        if (one := found.get((label, step), {}).get(problem)) is not None:
            row, line = one
            where = Path(*files[label][step].path.parts[-3:])
            shown.append(Shown(label, step, outcome_of(row), shown_text(row["response"]), f"{where}:{line}"))
    return shown


def outcome_of(row: dict[str, Any]) -> str:
    """correct, wrong or no format."""
    if row["outcome"] == "correct":
        return "correct"
    return "wrong" if float(row.get("format_reward") or 0) > 0 else "no format"


def shown_text(text: str) -> str:
    r"""A text of at most LONGEST characters, with what a reader could not see written out.

    >>> shown_text("a\u202eb"), shown_text("x" * 601)[-23:]
    ('a\\u202eb', 'x ... 1 more characters')
    """
    cut = text[:LONGEST]
    more = f" ... {len(text) - LONGEST:,} more characters" if len(text) > LONGEST else ""
    return visible(cut) + more
