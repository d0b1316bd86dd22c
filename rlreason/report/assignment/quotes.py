"""Ten responses of each failing category, as the handout asks for them, read line by line from a run's folder."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.evaluation.cases import category_of, reasons
from rlreason.grading import Grader
from rlreason.records.files import RESPONSES
from rlreason.records.lines import each_line
from rlreason.records.rows import TO_SHOW, lacks
from rlreason.report.assignment.section import Quote
from rlreason.report.cases import shown_text
from rlreason.report.study import Run

#: Failing category -> what the handout calls it.
FAILING = {"format1_wrong": "format 1, answer 0", "format0": "format 0, answer 0"}
CASES = 10
GUESSED = "r1_zero"  # the reward of a `Grader` without further words


def quotes_of(run: Run, problems: list[str]) -> Iterator[tuple[str, list[Quote]]]:
    """(title, the first ten responses) of each failing category; lines that are broken are named in `problems`."""
    rows = rows_of(run, problems)
    for category, title in FAILING.items():
        found = [_quote(row, line, run) for line, row in rows[category]]
        count = run.final.categories.get(category, len(found)) if run.final is not None else len(found)
        if found:
            shown = f"the first {len(found)} of {count:,}" if count > len(found) else f"all {len(found)}"
            yield f"{title}: {shown} (seed {run.seed})", found


def rows_of(run: Run, problems: list[str]) -> dict[str, list[tuple[int, dict[str, Any]]]]:
    """Category -> (line, row) of its first CASES responses."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {category: [] for category in FAILING}
    try:
        for line, row in each_line(run.folder / RESPONSES, lambda row: lacks(row, TO_SHOW), problems.append):
            kept = found.get(category_of(row))
            if kept is not None and len(kept) < CASES:
                kept.append((line, row))
            if all(len(rows) == CASES for rows in found.values()):
                break
    except ConfigError as error:
        problems.append(str(error))
    return found


def _quote(row: dict[str, Any], line: int, run: Run) -> Quote:
    """With a guess at why, where the run was graded by the reward that this grader has."""
    known = run.protocol is not None and run.protocol.get("reward") == GUESSED
    why = "; ".join(str(reason) for reason in reasons(row, Grader())) if known else ""
    where = Path(run.folder.name, RESPONSES)
    question, gold, response = (shown_text(str(row[name])) for name in ("question", "gold", "response"))
    return Quote(question, gold, response, shown_text(why), f"{where}:{line}")
