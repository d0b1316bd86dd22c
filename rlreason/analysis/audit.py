"""`python -m rlreason.grading.audit RUN [--other module:function] [--write]`: grade saved responses again.

Compares the rewards that a run was trained on with this grader as it is now, with plain math-verify and with
any other function, and prints where they disagree.
"""

from collections.abc import Sequence
from pathlib import Path

from rlreason.cli.entry import Parser, answered, ended
from rlreason.errors import ConfigError, DataError
from rlreason.grading.grader import FORMATS, Grader
from rlreason.grading.metrics import grading_warnings
from rlreason.grading.run_grading import RunGrading
from rlreason.records.console import Console
from rlreason.records.reader import RunFolder
from rlreason.records.rows import TO_REGRADE, Row, grade_columns
from rlreason.records.writer import rewrite_rows
from rlreason.runtime.streams import complain
from rlreason.types import Grade

EXAMPLES = 5
SHOWN_CHARS = 70


def main(arguments: Sequence[str] | None = None) -> int:
    return answered(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m rlreason.grading.audit", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of one run, with config.yaml and rollouts/")
    parser.add_argument("--other", metavar="MODULE:FUNCTION", help="another reward function to compare with")
    parser.add_argument("--write", action="store_true", help="save the new grades; the old ones move to previous_grade")
    chosen = parser.parse_args(arguments)
    audit(chosen.run, chosen.other, chosen.write)


def audit(folder: Path, other: str | None, write: bool) -> None:
    """Grade a run's saved rollouts again and tell where the grades differ; `write` replaces the saved ones."""
    console, run = Console(), RunFolder(folder)
    graded, files = RunGrading.of(*run.grading()), run.rollouts()
    if not files:
        raise ConfigError(f"{folder} has no rollouts/step_*.jsonl; only a run that saved its rollouts can be audited")
    found = [run.rows(file, TO_REGRADE) for file in files]
    rows = [row for of_file in found for row in of_file.values()]
    if not rows:
        raise DataError(f"{files[0].path.parent} holds no responses: choose another run")
    told = graded.settings or "default settings"
    console.say(f"{len(rows)} responses in {len(files)} files of {folder}; {graded.reward}, {told}")
    fresh = grade_rows(rows, graded)
    if rows and all(grade.outcome == "error" for grade in fresh):
        raise ConfigError(f"{graded.reward} fails on every response of {folder}: start this where it can be imported")
    marks = {"saved": [row["outcome"] == "correct" for row in rows], "now": right(fresh)}
    others = [("math-verify", f"rlreason.grading.peers:{graded.reward}_math_verify")]
    if graded.reward not in FORMATS:
        console.say(f"math-verify is left out: it compares values, and {graded.reward} has rules of its own")
        others = []
    for name, function in others + ([(other, other)] if other else []):
        marks[name] = right(grade_rows(rows, graded._replace(reward=function)))
    console.say(report(marks, rows))
    if write:  # file by file, each replaced as a whole
        grades = iter(fresh)
        for file, of_file in zip(files, found, strict=True):
            rewrite_rows(file.path, {number: regraded(row, next(grades)) for number, row in of_file.items()})
        place = files[0].path.parent
        console.say(f"wrote {len(rows)} new grades into {place}; the old ones are in previous_grade")


def right(grades: Sequence[Grade]) -> list[bool]:
    """Which of the graded responses are correct."""
    return [grade.outcome == "correct" for grade in grades]


def grade_rows(rows: Sequence[Row], graded: RunGrading) -> list[Grade]:
    """The rows' responses graded again, in order; what the grader warns of goes to stderr."""
    try:
        grader = Grader(reward=graded.reward, **graded.settings)
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from None
    with grader, Console().wait(f"grading with {graded.reward}"):
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


def regraded(row: Row, grade: Grade) -> Row:
    """The row with its new grade; the one that the run was trained on is kept, however often this runs."""
    new = {name: value for name, value in grade_columns(grade).items() if name != "path"}
    previous = row.get("previous_grade") or {key: row.get(key) for key in new}
    return {**row, **new, "previous_grade": previous}


if __name__ == "__main__":
    ended(lambda: _main(None))
