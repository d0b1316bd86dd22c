"""Show responses of a run with a guess at what went wrong in each, and write them as Markdown.

Without --regrade or --gradients: responses of an evaluation, or of a training run's newest evaluation.
"""

import argparse
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from rlreason.errors import ConfigError, DataError
from rlreason.evaluation import cases
from rlreason.evaluation.cases import agreement, grade_rows, opinions, regraded, second_grader
from rlreason.grading import Grader
from rlreason.grading.grader import RunGrading
from rlreason.records.console import Console
from rlreason.records.files import CASES, CASES_OF, ROLLOUTS
from rlreason.records.reader import RunFolder
from rlreason.records.rows import TO_REGRADE, TO_SHOW
from rlreason.records.writer import rewrite_rows
from rlreason.runtime.files import write_whole
from rlreason.runtime.plugins import NAMED_REWARDS
from rlreason.runtime.streams import Answer, Parser, number_in, refuse_target
from rlreason.runtime.text import few, shorten, visible

EXAMPLES, CASES_SHOWN = 5, 10
LINE = 70  # characters of a text in a line


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason inspect`."""
    parser.add_run("folder of an evaluation or of a training run")
    parser.add_argument("--category", choices=cases.CATEGORIES, help="only these; disagree: a second grader differs")
    parser.add_argument("--problem", metavar="ID", help="only the responses to this problem")
    cases_shown = f"how many cases, in the order of the file ({CASES_SHOWN})"
    parser.add_argument("-n", type=number_in(1, 10**6, int), default=CASES_SHOWN, metavar="N", help=cases_shown)
    parser.add_argument("--step", type=int, metavar="N", help="of a training run (the newest; with --regrade all)")
    parser.add_argument("--set", default="", metavar="NAME", help="the responses to one of eval.sets")
    parser.add_argument("--rollouts", action="store_true", help="training responses instead of evaluations")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="where the text for a write-up goes")
    ways = parser.add_mutually_exclusive_group()
    ways.add_argument("--regrade", action="store_true", help="grade the rollouts again; show where graders disagree")
    of_gradients = "compare every objective on one step's rollouts; leaves RUN/lab/"
    ways.add_argument("--gradients", action="store_true", help=of_gradients)
    parser.add_argument("--other", metavar="MODULE:FUNCTION", help="with --regrade: a reward function to compare with")
    to_write = "with --regrade: save the new grades; the old ones go to previous_grade"
    parser.add_argument("--write", action="store_true", help=to_write)


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Show cases, grade again, or compare objectives."""
    if arguments.set and (arguments.gradients or arguments.regrade or arguments.rollouts):
        raise ConfigError(f"--set {arguments.set} is of evaluations: leave --gradients, --regrade and --rollouts out")
    of_cases = [f"--{name}" for name in ("category", "problem", "markdown") if getattr(arguments, name) is not None]
    if of_cases and (arguments.gradients or arguments.regrade):
        raise ConfigError(f"{few(of_cases)} choose cases to show: leave --gradients and --regrade out")
    if arguments.gradients:
        from rlreason.training.laboratory import compare_gradients

        return compare_gradients(RunFolder(arguments.run), arguments.step, console)
    if arguments.regrade:
        return regrade(arguments, console)
    if arguments.write or arguments.other:
        raise ConfigError("--write and --other are of --regrade: add it, or leave them out")
    return inspect(arguments, console)


def inspect(arguments: argparse.Namespace, console: Console) -> Answer:
    """Show the first responses of a category or a problem in a file of a run, and write them down as Markdown."""
    category = arguments.category
    run, target = RunFolder(arguments.run), arguments.markdown or arguments.run / CASES
    refuse_target("--markdown", target)
    if category and not arguments.markdown:
        target = arguments.run / CASES_OF / f"{category}.md"
    file = run.responses(arguments.step, arguments.rollouts, arguments.set)
    rows = list(run.rows(file, TO_SHOW).values())
    if not rows:
        raise DataError(f"{file.path} holds no responses: choose another run or step")
    if arguments.problem is not None:
        rows = [row for row in rows if row["problem_id"] == arguments.problem]
        if not rows:
            raise ConfigError(f"--problem {arguments.problem} is not in {file.path}: give an id that stands there")
    graded = RunGrading.of(*run.grading(file.kind != ROLLOUTS, arguments.set))
    if category == "disagree":
        judged = zip(rows, opinions(rows, graded, console), strict=True)
        chosen = [row for row, second in judged if second not in (None, row["outcome"] == "correct")]
    else:
        chosen = [row for row in rows if cases.is_in(row, category)]
    grader, shown, counts = Grader(*graded, symbolic=False), chosen[: arguments.n], cases.counts(rows)
    told = f"{len(rows)} responses: {', '.join(f'{count} {name}' for name, count in counts.items())}"
    counted = dict(Counter(cases.reasons(row, grader)[0].partition(": ")[0] for row in chosen).most_common())
    seconds = opinions(shown, graded, console) if graded.reward in NAMED_REWARDS else [None] * len(shown)
    found = [cases.reasons(row, grader, second) for row, second in zip(shown, seconds, strict=True)]
    every = category or "any category"
    lines = [f"{file.path}\n{told}\n", f"why (a guess), over all {len(chosen)} of {every}:"]
    lines += [f"{count:>7}  {kind}" for kind, count in counted.items()]
    for number, (row, why) in enumerate(zip(shown, found, strict=True), 1):
        lines += ["", cases.case_text(number, row, why)]
    fence = "`" * 8  # a response may have shorter ones
    written = [f"# Cases from {run.path.name}", "", f"{fence}text", *lines, fence, ""]
    target.parent.mkdir(exist_ok=True)
    write_whole(target, visible("\n".join(written)))
    shown_cases = []
    for row, why in zip(shown, found, strict=True):
        one = {key: row[key] for key in (*TO_SHOW, "sample", "entropy") if key in row}
        shown_cases.append(one | {"category": cases.category(row["outcome"], row["format_reward"]), "why": why})
    figures = {
        "run": run.path,
        "file": file.path,
        "responses": len(rows),
        "counts": counts,
        "category": category,
        "in_category": len(chosen),
        "reasons": counted,
        "cases": shown_cases,
        "written": target,
    }
    return Answer("\n".join([*lines, f"\nwritten to {target}"]), figures)


def regrade(arguments: argparse.Namespace, console: Console) -> Answer:
    """Grade the rollouts of a run with several graders, including --other; with --write, save the current grades.

    Raise `ConfigError` if the run's own reward fails on every response; then nothing is written.
    """
    folder, run = arguments.run, RunFolder(arguments.run)
    graded, files = RunGrading.of(*run.grading()), run.rollouts()
    if not files:
        raise ConfigError(f"{folder} has no {ROLLOUTS}/: only a run that saved its rollouts can be audited")
    if arguments.step is not None:
        files = [run.responses(arguments.step, True)]
    found = [run.rows(file, TO_REGRADE) for file in files]
    rows, place = [row for of_file in found for row in of_file.values()], files[0].path.parent
    if not rows:
        raise DataError(f"{place} holds no responses: choose another run")
    fresh = grade_rows(rows, graded, console)
    if all(grade.outcome == "error" for grade in fresh):
        raise ConfigError(f"{graded.reward} fails on every response of {folder}: start this where it can be imported")
    others = {"math-verify": second_grader(graded)} if graded.reward in NAMED_REWARDS else {}
    others |= {arguments.other: graded._replace(reward=arguments.other)} if arguments.other else {}
    graded_by = {"now": fresh} | {name: grade_rows(rows, other, console) for name, other in others.items()}
    marks = {"saved": [row["outcome"] == "correct" for row in rows]}
    marks |= {name: [grade.outcome == "correct" for grade in grades] for name, grades in graded_by.items()}
    graders, width = agreement(marks), max(map(len, marks)) + 2
    about = f"{len(rows)} responses in {len(files)} files of {folder}; {graded.reward}, {graded.grading}"
    lines = [about, "", f"{'grader':<{width}}{'right':>8}{'agree':>8}{'only it':>9}{'only now':>10}"]
    examples = []
    for name, of in graders.items():
        more, fewer = of["only_it"], of["only_now"]
        lines.append(f"{name:<{width}}{of['correct']:>8.1%}{of['agrees']:>8.1%}{len(more):>9}{len(fewer):>10}")
        for title, places in ((f"right only for {name}", more), (f"wrong only for {name}", fewer)):
            examples += [f"\n{title}:"] if places else []
            for row in (rows[n] for n in places[:EXAMPLES]):
                truth, response = shorten(str(row["gold"]), LINE), shorten(row["response"], LINE, "end")  # the answer
                examples.append(f"  {row.get('problem_id', '?')}  ground truth {truth!r}  response {response!r}")
    lines += examples
    if arguments.write:  # each file as a whole, so that an interruption leaves every file either old or new
        left = iter(fresh)
        for file, of_file in zip(files, found, strict=True):
            rewrite_rows(file.path, {number: regraded(row, next(left)) for number, row in of_file.items()})
        lines += [f"wrote {len(rows)} new grades into {place}; the old ones are in previous_grade"]
    figures = {
        "run": folder,
        "responses": len(rows),
        "files": len(files),
        "written": arguments.write,
        "reward": graded.reward,
        "settings": asdict(graded.grading),
        "graders": graders,
    }
    return Answer("\n".join(lines), figures)
