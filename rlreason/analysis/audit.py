"""`python -m rlreason.grading.audit RUN [--other module:function] [--write]`: grade saved responses again.

Compares the rewards that a run was trained on with this grader as it is now, with plain math-verify and with
any other function, and prints where they disagree. It knows rollout files; it must not know training.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlreason.cli.entry import Parser, answered, complain, ended
from rlreason.config.groups import NAMED_REWARDS
from rlreason.errors import ConfigError, DataError
from rlreason.grading.metrics import grading_warnings
from rlreason.grading.run_grading import RunGrading, read_grading
from rlreason.records.console import Console
from rlreason.runtime.atomic_files import whole
from rlreason.types import Grade

EXAMPLES = 5
SHOWN_CHARS = 70
Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    return answered(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m rlreason.grading.audit", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of one run, with config.yaml and rollouts/")
    parser.add_argument("--other", metavar="MODULE:FUNCTION", help="another reward function to compare with")
    parser.add_argument("--write", action="store_true", help="save the new grades; the old ones move to previous_grade")
    chosen = parser.parse_args(arguments)
    audit(chosen.run, chosen.other, chosen.write)


def audit(run: Path, other: str | None, write: bool) -> None:
    console, graded = Console(), read_grading(run)
    files = read_rollouts(run)
    rows = [row for _, found in files for row in found]
    told = graded.settings or "default settings"
    console.say(f"{len(rows)} responses in {len(files)} files of {run}; {graded.reward}, {told}")
    fresh = grade_rows(rows, graded)
    if rows and all(grade.outcome == "error" for grade in fresh):
        raise ConfigError(f"{graded.reward} fails on every response of {run}: start this where it can be imported")
    marks = {"saved": [row["outcome"] == "correct" for row in rows], "now": right(fresh)}
    others = [("math-verify", f"rlreason.grading.peers:{graded.reward}_math_verify")]
    if graded.reward not in NAMED_REWARDS:
        console.say(f"math-verify is left out: it compares values, and {graded.reward} has rules of its own")
        others = []
    for name, function in others + ([(other, other)] if other else []):
        marks[name] = right(grade_rows(rows, graded._replace(reward=function)))
    console.say(report(marks, rows))
    if write:
        save(files, fresh)
        console.say(f"wrote {len(rows)} new grades into {run / 'rollouts'}; the old ones are in previous_grade")


def read_rollouts(run: Path) -> list[tuple[Path, list[Row]]]:
    paths = sorted((run / "rollouts").glob("step_*.jsonl"))
    if not paths:
        raise ConfigError(f"{run} has no rollouts/step_*.jsonl; only a run that saved its rollouts can be audited")
    files = []
    for path in paths:
        rows = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                row["response"], row["gold"] = str(row["response"]), row["gold"]
                row["outcome"] = str(row["outcome"])
            except (ValueError, KeyError, TypeError) as error:
                told = f"it has no {error}" if isinstance(error, KeyError) else str(error)
                raise DataError(f"line {number} of {path} is no rollout ({told}): mend or remove the line") from None
            rows.append(row)
        files.append((path, rows))
    return files


def right(grades: Sequence[Grade]) -> list[bool]:
    return [grade.outcome == "correct" for grade in grades]


def grade_rows(rows: Sequence[Row], graded: RunGrading) -> list[Grade]:
    """The rows' responses graded again, in order; what the grader warns of goes to stderr."""
    with graded.grader() as grader, Console().wait(f"grading with {graded.reward}"):
        grades = grader.grade_batch([row["response"] for row in rows], [row["gold"] for row in rows])
        for warning in [*grading_warnings(grades), *([grader.broken] if grader.broken else [])]:
            complain(f"{graded.reward}: {warning}")
    return grades


def report(marks: dict[str, list[bool]], rows: Sequence[Row]) -> str:
    """The share each grader calls right, and its disagreements with this one, with examples."""
    now = marks["now"]
    width = max(map(len, marks)) + 2
    lines = ["", f"{'grader':<{width}}{'right':>8}{'agree':>8}{'only it':>9}{'only now':>10}"]
    examples = []
    for name, right in marks.items():
        more = [index for index in range(len(rows)) if right[index] and not now[index]]
        fewer = [index for index in range(len(rows)) if now[index] and not right[index]]
        total = max(1, len(rows))
        agree = 1 - (len(more) + len(fewer)) / total
        lines.append(f"{name:<{width}}{sum(right) / total:>8.1%}{agree:>8.1%}{len(more):>9}{len(fewer):>10}")
        for title, found in ((f"right only for {name}", more), (f"wrong only for {name}", fewer)):
            examples += [f"\n{title}:"] * bool(found) + [_example(rows[index]) for index in found[:EXAMPLES]]
    return "\n".join(lines + examples)


def _example(row: Row) -> str:
    tail = " ".join(str(row["response"]).split())[-SHOWN_CHARS:]
    return f"  {row.get('problem_id', '?')}  gold {str(row['gold'])[:SHOWN_CHARS]!r}  response ...{tail!r}"


def save(files: Sequence[tuple[Path, list[Row]]], grades: Sequence[Grade]) -> None:
    """Each file is replaced as a whole, so an interruption leaves every file either old or new."""
    position = 0
    for path, rows in files:
        with whole(path) as partial, partial.open("w", encoding="utf-8") as lines:
            for row, grade in zip(rows, grades[position : position + len(rows)], strict=True):
                lines.write(json.dumps(regraded(row, grade), ensure_ascii=False) + "\n")
        position += len(rows)


def regraded(row: Row, grade: Grade) -> Row:
    """The row with its new grade; the one that the run was trained on is kept, however often this runs."""
    new = {
        "reward": grade.reward,
        "format_reward": grade.format,
        "answer_reward": grade.answer,
        "outcome": grade.outcome,
    }
    previous = row.get("previous_grade") or {key: row.get(key) for key in new}
    return {**row, **new, "previous_grade": previous}


if __name__ == "__main__":
    ended(lambda: _main(None))
