"""`python -m rlreason.inspect RUN [--category NAME] [-n 10] [--step N] [--rollouts] [--markdown FILE]`.

Shows responses of an evaluation or of a training run's newest evaluation, with a guess at what went wrong in each,
and writes them as Markdown.
"""

from collections.abc import Sequence
from pathlib import Path

from rlreason.analysis.audit import grade_rows
from rlreason.cli.entry import Parser, answered, ended
from rlreason.errors import ConfigError, DataError
from rlreason.evaluation import cases
from rlreason.grading.grader import FORMATS
from rlreason.grading.run_grading import RunGrading
from rlreason.records.console import Console
from rlreason.records.files import CASES, ROLLOUTS
from rlreason.records.reader import RunFolder
from rlreason.records.rows import TO_SHOW, Row
from rlreason.runtime.atomic_files import write_whole


def main(arguments: Sequence[str] | None = None) -> int:
    return answered(lambda: _main(arguments))


def _main(arguments: Sequence[str] | None) -> None:
    parser = Parser(prog="python -m rlreason.inspect", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of an evaluation or of a training run")
    parser.add_argument("--category", choices=cases.CATEGORIES, help="only these; disagree: a second grader differs")
    parser.add_argument("-n", type=int, default=10, help="how many cases, in the order of the file")
    parser.add_argument("--step", type=int, help="of a training run; the newest if not given")
    parser.add_argument("--rollouts", action="store_true", help="training responses instead of evaluations")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where the text for a write-up goes")
    chosen = parser.parse_args(arguments)
    if chosen.n < 1:
        raise ConfigError(f"-n {chosen.n} shows nothing: give a number above 0")
    inspect(chosen.run, chosen.category, chosen.n, chosen.step, chosen.rollouts, chosen.markdown)


def inspect(folder: Path, category: str | None, n: int, step: int | None, rollouts: bool, target: Path | None) -> None:
    """Show `n` responses of a run that belong to a category, and write them as Markdown."""
    console, run = Console(), RunFolder(folder)
    file = run.responses(step, rollouts)
    rows = list(run.rows(file, TO_SHOW).values())
    if not rows:
        raise DataError(f"{file.path} holds no responses: choose another run or step")
    graded = RunGrading.of(*run.grading(evaluates=file.kind != ROLLOUTS))
    console.say(f"{file.path}\n{cases.counts_line(rows)}")
    if category == "disagree":
        chosen = disagreeing(rows, graded)
    else:
        chosen = [row for row in rows if cases.is_in(row, category)]
    if not chosen:
        console.say(f"none of them is in category {category}: choose another, or leave it out")
        return
    counted = dict(cases.tally(chosen, graded))
    console.say(f"\nwhy (a guess), over all {len(chosen)} of {category or 'any category'}:")
    for kind, count in counted.items():
        console.say(f"{count:>7}  {kind}")
    shown = chosen[:n]
    found = [cases.reasons(row, graded, second) for row, second in zip(shown, opinions(shown, graded), strict=True)]
    target = target or folder / CASES
    heading = f"{cases.counts_line(rows)}. Shown: {len(shown)} of {len(chosen)} in {category or 'any category'}."
    write_whole(target, cases.markdown(folder, heading, shown, found, counted))
    for number, (row, why) in enumerate(zip(shown, found, strict=True), 1):
        console.say("\n" + cases.case_text(number, row, why))
    console.say(f"\nwritten to {target}")


def opinions(rows: Sequence[Row], graded: RunGrading) -> list[bool | None]:
    """What plain math-verify thinks of each formatted answer; None where it was not asked or could not say."""
    asked = [row for row in rows if row["format_reward"] > 0] if graded.reward in FORMATS else []
    if not asked:
        return [None] * len(rows)
    grades = grade_rows(asked, graded._replace(reward=f"rlreason.grading.peers:{graded.reward}_math_verify"))
    thought = {
        id(row): None if grade.outcome in ("timeout", "error") else grade.outcome == "correct"
        for row, grade in zip(asked, grades, strict=True)
    }
    return [thought.get(id(row)) for row in rows]


def disagreeing(rows: Sequence[Row], graded: RunGrading) -> list[Row]:
    """Rows whose answer a second grader judges otherwise."""
    if graded.reward not in FORMATS:
        raise ConfigError(
            f"--category disagree: {graded.reward} has no second grader; only {' and '.join(FORMATS)} have one"
        )
    return [
        row
        for row, second in zip(rows, opinions(rows, graded), strict=True)
        if second is not None and second != (row["outcome"] == "correct")
    ]


if __name__ == "__main__":
    ended(lambda: _main(None))
