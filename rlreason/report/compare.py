"""Compare two settings or more, also from CSV files or of TRL: which is better, by how much, or that no one can tell.

A and B are runs, sweeps, settings of a sweep (SWEEP/KEY=VALUE), evaluations, CSV files with the columns
setting,seed,problem,correct, or folders of TRL's completions. The first is the reference. A sweep or a CSV file alone:
all its settings against its reference. Of two sweeps, or two files, the best settings are compared.
"""

import argparse
import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError, DataError
from rlreason.records.console import Console
from rlreason.report.content import Verdict, counted
from rlreason.report.read import read_given, study_of
from rlreason.report.remarks import warnings_of
from rlreason.report.study import Answers, GradedProblem, Setting, Study, StudyRun, labels_of
from rlreason.report.verdicts import EQUAL_WITHIN, best_of, comparing_half, how_chosen, verdicts_of
from rlreason.runtime.streams import Answer, Parser, folded
from rlreason.runtime.text import few, shorten

OUTCOMES = ("better", "worse", "same")
NOT_AS_EXPECTED = 1  # exit code


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason compare`."""
    parser.add_argument("sides", metavar="RUN", type=Path, nargs="+", help="the reference, and what to compare with it")
    unless = f"exit with {NOT_AS_EXPECTED} unless every verdict is this one"
    parser.add_argument("--expect", choices=OUTCOMES, help=unless)
    parser.add_argument(
        "--equal-within",
        type=float,
        default=100 * EQUAL_WITHIN,
        metavar="POINTS",
        help=f"'same' needs an interval inside this ({100 * EQUAL_WITHIN:g} accuracy points)",
    )


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Return the verdict on each pair, as text and figures."""
    if not 0 < arguments.equal_within < 100:
        raise ConfigError(f"--equal-within {arguments.equal_within:g} is no width: give points above 0 and below 100")
    with console.wait("reading"):
        study = compared_study(arguments.sides)
    verdicts = verdicts_of(study, arguments.equal_within / 100)
    comparable = any(verdict.difference for verdict in verdicts)
    if not comparable and arguments.json is None:
        raise ConfigError(" ".join(verdict.sentence for verdict in verdicts[:3]) or "there is nothing to compare")
    lines = []
    for verdict in verdicts:
        lines.append(folded(f"{verdict.outcome or verdict.word}: {verdict.sentence}", console.width))
        lines += [folded(f"  {verdict.small}", console.width)] if verdict.small else []
    notes = [*study.notes, *study.problems, *warnings_of(study)]
    lines += [folded(f"! {text}", console.width) for text in notes]
    exit_code = 0 if comparable else ConfigError.exit_code
    if arguments.expect and (other := [v for v in verdicts if v.outcome != arguments.expect]):
        exit_code = NOT_AS_EXPECTED
        lines.append(f"expected {arguments.expect}: {other[0].setting} is {other[0].outcome or other[0].word!r}")
    return Answer("\n".join(lines), [entry(verdict, notes) for verdict in verdicts], exit_code)


def entry(verdict: Verdict, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return a verdict for JSON; the difference and its ends are accuracies, 0 to 1. `notes`: apply to all verdicts."""
    difference = verdict.difference
    return {
        "setting": verdict.typed[0],
        "reference": verdict.typed[1],
        "difference": difference.mean if difference else None,
        "low": difference.low if difference else None,
        "high": difference.high if difference else None,
        "verdict": verdict.outcome or verdict.word,
        "seeds": difference.seeds if difference else 0,
        "problems": difference.problems if difference else 0,
        "p": difference.p if difference else None,
        "adjusted_p": verdict.adjusted_p,
        "sentence": verdict.sentence,
        "notes": list(notes),
    }


def compared_study(paths: Sequence[Path]) -> Study:
    """Return the study of the arguments: `paths[0]` is the reference, or contains it if it is alone."""
    files = [study_of_file(path) if path.is_file() or trl_files(path) else None for path in paths]
    studies = [file or study_of([read_given(path)]) for path, file in zip(paths, files, strict=True)]
    if len(paths) == 1:
        if len(studies[0].settings) < 2:
            one = studies[0].reference.label
            raise ConfigError(f"{paths[0]} holds one setting, {one}: give a second one to compare with it")
        return studies[0]
    unknown = match_problems([file for file in files if file], [study for study in studies if study not in files])
    sides = [best_of(study) for study in studies]
    labels = _labels(paths, studies, sides)
    path_of: dict[tuple[tuple[Path, str], ...], Path] = {}
    for path, side in zip(paths, sides, strict=True):
        runs = tuple((run.folder.resolve(), run.name) for run in side.runs)
        if runs in path_of:
            raise ConfigError(f"{path_of[runs]} and {path} are the same runs ({side.label}): give two different sides")
        path_of[runs] = path
    same_sweep = len({path.parent.resolve() for path in paths}) == 1 and all("=" in path.name for path in paths)
    joined = Study(
        studies[0].name,
        "How do these compare?",
        [],
        [Setting((), label, side.runs, side.best_of) for label, side in zip(labels, sides, strict=True)],
        on_purpose=studies[0].on_purpose if same_sweep else [],
        problems=[line for study in studies for line in study.problems],
        notes=[line for study in studies for line in study.notes] + unknown,
        folders=list(paths),
    )
    tried = [len(study.settings) for study in studies]
    if max(tried) > 1:
        joined.among = comparing_half(joined.settings)
        if not joined.among:
            raise ConfigError(
                f"{paths[0]}: too few problems to keep half of them from choosing: give one setting a side"
            )
        joined.notes += [how_chosen(label, n) for label, n in zip(labels, tried, strict=True) if n > 1]
        joined.notes += [
            f"{label} was tuned over {counted(n, 'setting')}, {labels[0]} over {tried[0]}."
            for label, n in zip(labels, tried, strict=True)
            if n != tried[0]
        ]
    return joined


def _labels(paths: Sequence[Path], studies: Sequence[Study], sides: Sequence[Setting]) -> list[str]:
    """Return the name of each side: its setting if the sweep is the same, else with the folder that was given."""
    given = [path.name or str(path) for path in paths]
    if len(set(given)) < len(given):
        given = [str(path) for path in paths]
    if len(set(given)) < len(given):
        raise ConfigError(f"{given[0]} is given twice: give two different sides")
    return [
        f"{name}: {side.label}" if len(study.settings) > 1 else name
        for name, study, side in zip(given, studies, sides, strict=True)
    ]


COLUMNS = ("setting", "seed", "problem", "correct")
TRUTH_VALUES = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
Cells = dict[str, dict[int, dict[str, list[float]]]]  # setting -> seed -> problem -> [sum of correct, samples]


def study_of_file(path: Path) -> Study:
    """Return the settings of a CSV file, the first one as the reference; or one setting of TRL's completions.

    `DataError` names the file, the line, the rule and the cure.
    """
    files = trl_files(path)
    if files:  # a run of TRL's has the name of its output_dir
        folder = (path.parent if path.is_file() else path).resolve()
        name = (folder.parent if folder.name == "completions" else folder).name or path.stem
        cells: Cells = {name: {seed: _read_trl(file) for seed, file in files.items()}}
    else:
        cells = {}
        for name, seed, problem, correct in _rows(path):
            cell = cells.setdefault(name, {}).setdefault(seed, {}).setdefault(problem, [0.0, 0])
            cell[0] += correct
            cell[1] += 1
        if not cells:
            raise DataError(f"{path} holds no row: give a file with a row for each setting, seed and problem")
    settings = [_setting(name, seeds, path) for name, seeds in cells.items()]
    for setting, label in zip(settings, labels_of([setting.key for setting in settings]), strict=True):
        setting.label = label
    notes = [f"{path.name}: TRL's completions are of the last step's training prompts."] if files else []
    return Study(path.stem, "How do these settings compare?", ["setting"], settings, notes=notes, folders=[path])


def match_problems(files: Sequence[Study], others: Sequence[Study]) -> list[str]:
    """Match the problems of files to those of runs, by id or by question; return a note on each file."""
    named = {name for study in files for run in study.runs if run.final for name in run.final.problems}
    questions: dict[str, str] = {}  # problem, by the name that the files use -> question
    for run in (run for study in others for run in study.runs):
        if run.final is None:
            continue
        if not named & run.final.problems.keys():
            by_question = {p.question if p.question in named else name: p for name, p in run.final.problems.items()}
            run.final = replace(run.final, problems=by_question)
        questions |= {name: p.question for name, p in run.final.problems.items()}
    for run in (run for study in files for run in study.runs):
        if run.final is not None:  # the question decides which half of the problems one is in
            problems = {name: replace(p, question=questions.get(name, name)) for name, p in run.final.problems.items()}
            run.final = replace(run.final, problems=problems)
    return [
        f"{study.folders[0].name} does not say how it was measured: that prompt, sampling, grader and data are those "
        "of the runs beside it cannot be checked."
        for study in files
        if others
    ]


def _setting(name: str, seeds: dict[int, dict[str, list[float]]], path: Path) -> Setting:
    key = (("setting", name),)
    runs = []
    for seed, cells in sorted(seeds.items()):
        problems = {one: GradedProblem(right, int(samples), one) for one, (right, samples) in cells.items()}
        run = StudyRun(path, f"{name},seed={seed}", key, seed, "finished", final=Answers(problems))
        run.accuracy = sum(p.correct for p in problems.values()) / sum(p.samples for p in problems.values())
        runs.append(run)
    return Setting(key, name, runs)


def _rows(path: Path) -> Iterator[tuple[str, int, str, float]]:
    """Yield (setting, seed, problem, correct) of each row."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            head = [name.strip().lower() for name in next(reader, [])]
            if missing := [name for name in COLUMNS if name not in head]:
                rule = f"its first line must name {', '.join(COLUMNS)} (in any order)"
                raise DataError(f"{path} has no column {missing[0]}: {rule}")
            at = [head.index(name) for name in COLUMNS]
            for row in reader:
                if not row:
                    continue
                try:
                    name, seed, problem, correct = (row[k] for k in at)
                except IndexError:
                    raise _line_error(path, reader.line_num, f"has {len(row)} cells, fewer than its head") from None
                name, share = " ".join(name.split()), _correct(correct)
                try:
                    number = int(seed)
                except ValueError:
                    what = f"has seed={shorten(seed, 20)}, which is no whole number"
                    raise _line_error(path, reader.line_num, what) from None
                if not 0 <= share <= 1:
                    what = f"has correct={shorten(correct, 20)}, which is neither 0, 1 nor a share in between"
                    raise _line_error(path, reader.line_num, what)
                if not name or not problem:
                    raise _line_error(path, reader.line_num, "names no setting or no problem")
                yield name, number, problem, share
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}): give a UTF-8 file with commas") from None


def _line_error(path: Path, line: int, what: str) -> DataError:
    return DataError(f"{path}, line {line} {what}: mend the line, or leave it out")


def _correct(text: str) -> float:
    """Return the share that a cell states; NaN where it states none."""
    word = text.strip().lower()
    try:
        return TRUTH_VALUES[word] if word in TRUTH_VALUES else float(text)
    except ValueError:
        return math.nan


def trl_files(path: Path) -> dict[int, Path]:
    """Return the last completions that TRL has logged, by seed.

    A file, an output_dir, or a folder with an output_dir for each seed: the number at the end of its name is the seed.
    """
    if path.is_file():
        return {0: path} if path.suffix == ".parquet" else {}
    if not path.is_dir():
        return {}
    if (own := _last_completions(path)) is not None:
        return {0: own}
    inner = [(place, file) for place in sorted(path.glob("*")) if (file := _last_completions(place)) is not None]
    numbers = [re.search(r"(\d+)$", place.name) for place, _ in inner]
    seeds = [int(number[1]) for number in numbers if number is not None]
    if len(set(seeds)) < len(inner):
        names = few([place.name for place, _ in inner], 4)
        raise ConfigError(f"{path} holds the runs {names}: end each name with the number of its seed, seed_0, seed_1")
    return dict(zip(seeds, (file for _, file in inner), strict=True))


def _last_completions(folder: Path) -> Path | None:
    """Return the completions of the last step in an output_dir, or in its folder of completions."""
    files = [file for place in (folder, folder / "completions") for file in place.glob("completions_*.parquet")]
    return max(files, key=lambda file: (len(file.stem), file.stem), default=None)


def _read_trl(path: Path) -> dict[str, list[float]]:
    """Read the last step's completions: a problem is a prompt, and correct is its first reward, in 0 to 1.

    A reward that is called accuracy or correct takes precedence.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} is a parquet file: pip install pyarrow, which reads it") from None
    try:
        table: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet ({shorten(str(error), 80)}): give another file") from None
    others = {"step", "prompt", "completion", "advantage", "timestamp"}
    rewards = [n for n, cells in table.items() if n not in others and cells and isinstance(cells[0], int | float)]
    if "prompt" not in table or not rewards:
        raise DataError(f"{path} has no prompt and reward columns: give completions that TRL's GRPOTrainer has logged")
    reward = next((name for name in rewards if "acc" in name or "correct" in name), rewards[0])
    newest = max(table["step"]) if table.get("step") else None
    cells: dict[str, list[float]] = {}
    for k, (prompt, value) in enumerate(zip(table["prompt"], table[reward], strict=True)):
        if newest is not None and table["step"][k] != newest:
            continue
        if value is None or not 0 <= float(value) <= 1:
            raise DataError(f"{path}, row {k + 1} has {reward}={value}: only rewards of 0 to 1 can be compared")
        cell = cells.setdefault(str(prompt), [0.0, 0])
        cell[0] += float(value)
        cell[1] += 1
    return cells
