"""Read results of any program as a study: a CSV with columns setting, seed, problem, correct; or TRL's completions."""

import csv
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError, DataError
from rlreason.report.study import Answers, GradedProblem, Setting, Study, StudyRun, labels_of
from rlreason.runtime.text import few, shorten

COLUMNS = ("setting", "seed", "problem", "correct")
WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
Cells = dict[str, dict[int, dict[str, list[float]]]]  # setting -> seed -> problem -> [sum of correct, samples]


def is_tabular(path: Path) -> bool:
    """Return whether an argument is a file of results, or a folder of TRL's completions."""
    return path.is_file() or bool(trl_files(path))


def study_of_file(path: Path) -> Study:
    """Return the settings of a CSV file, the first one as the reference; or one setting of TRL's completions.

    `DataError` names the file, the line, the rule and the cure.
    """
    files = trl_files(path)
    cells = {_name(path): {seed: _of_trl(file) for seed, file in files.items()}} if files else _of_csv(path)
    settings = [_setting(name, seeds, path) for name, seeds in cells.items()]
    for setting, label in zip(settings, labels_of([setting.key for setting in settings]), strict=True):
        setting.label = label
    notes = [f"{path.name}: TRL's completions are of the last step's training prompts."] if files else []
    return Study(path.stem, "How do these settings compare?", ["setting"], settings, notes=notes, folders=[path])


def beside_runs(files: Sequence[Study], others: Sequence[Study]) -> list[str]:
    """Match files to runs whose problems they name, by id or by question; return a note on each file."""
    named = {name for study in files for run in study.runs if run.final for name in run.final.problems}
    questions: dict[str, str] = {}  # of the runs' problems, by what they go by here
    for run in (run for study in others for run in study.runs):
        if run.final is None:
            continue
        if not named & run.final.problems.keys():
            by_question = {p.question if p.question in named else name: p for name, p in run.final.problems.items()}
            run.final = replace(run.final, problems=by_question)
        questions |= {name: p.question for name, p in run.final.problems.items()}
    for run in (run for study in files for run in study.runs):
        if run.final is not None:  # the question says on which half of the problems one is
            of = {name: replace(p, question=questions.get(name, name)) for name, p in run.final.problems.items()}
            run.final = replace(run.final, problems=of)
    return [
        f"{study.folders[0].name} does not say how it was measured: that prompt, sampling, grader and data are those "
        "of the runs beside it cannot be checked."
        for study in files
        if others
    ]


def _setting(name: str, seeds: dict[int, dict[str, list[float]]], path: Path) -> Setting:
    key = (("setting", name),)
    runs = []
    for seed, of in sorted(seeds.items()):
        problems = {one: GradedProblem(right, int(samples), one) for one, (right, samples) in of.items()}
        run = StudyRun(path, f"{name},seed={seed}", key, seed, "finished", final=Answers(problems))
        run.accuracy = sum(p.correct for p in problems.values()) / sum(p.samples for p in problems.values())
        runs.append(run)
    return Setting(key, name, runs)


def _of_csv(path: Path) -> Cells:
    cells: Cells = {}
    for name, seed, problem, correct in _rows(path):
        cell = cells.setdefault(name, {}).setdefault(seed, {}).setdefault(problem, [0.0, 0])
        cell[0] += correct
        cell[1] += 1
    if not cells:
        raise DataError(f"{path} holds no row: give a file with a row for each setting, seed and problem")
    return cells


def _rows(path: Path) -> Iterator[tuple[str, int, str, float]]:
    """Yield (setting, seed, problem, correct) of each row."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            head = [name.strip().lower() for name in next(reader, [])]
            if missing := [name for name in COLUMNS if name not in head]:
                raise DataError(
                    f"{path} has no column {missing[0]}: its first line must name {', '.join(COLUMNS)} (in any order)"
                )
            at = [head.index(name) for name in COLUMNS]
            seeds: dict[str, int] = {}
            corrects: dict[str, float] = {}
            names: dict[str, str] = {}  # as written -> on one line
            for row in reader:
                if not row:
                    continue
                try:
                    name, seed, problem, correct = (row[k] for k in at)
                except IndexError:
                    raise _wrong(path, reader.line_num, f"has {len(row)} cells, fewer than its head") from None
                if seed not in seeds:
                    seeds[seed] = _seed(path, reader.line_num, seed)
                if correct not in corrects:
                    corrects[correct] = _correct(path, reader.line_num, correct)
                if name not in names:
                    names[name] = " ".join(name.split())
                if not names[name] or not problem:
                    raise _wrong(path, reader.line_num, "names no setting or no problem")
                yield names[name], seeds[seed], problem, corrects[correct]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}): give a UTF-8 file with commas") from None


def _wrong(path: Path, line: int, what: str) -> DataError:
    return DataError(f"{path}, line {line} {what}: mend the line, or leave it out")


def _seed(path: Path, line: int, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise _wrong(path, line, f"has seed={shorten(word, 20)}, which is no whole number") from None


def _correct(path: Path, line: int, word: str) -> float:
    try:
        value = WORDS[word.strip().lower()] if word.strip().lower() in WORDS else float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise _wrong(path, line, f"has correct={shorten(word, 20)}, which is neither 0, 1 nor a share in between")
    return value


def trl_files(path: Path) -> dict[int, Path]:
    """Return the last completions that TRL has logged, by seed.

    A file, an output_dir, or a folder with an output_dir for each seed: the number at the end of its name is the seed.
    """
    if path.is_file():
        return {0: path} if path.suffix == ".parquet" else {}
    if not path.is_dir():
        return {}
    if (own := _last_of(path)) is not None:
        return {0: own}
    inner = [(place, file) for place in sorted(path.glob("*")) if (file := _last_of(place)) is not None]
    numbers = [re.search(r"(\d+)$", place.name) for place, _ in inner]
    seeds = [int(number[1]) for number in numbers if number is not None]
    if len(set(seeds)) < len(inner):
        named = few([place.name for place, _ in inner], 4)
        raise ConfigError(f"{path} holds the runs {named}: end each name with the number of its seed, seed_0, seed_1")
    return dict(zip(seeds, (file for _, file in inner), strict=True))


def _last_of(folder: Path) -> Path | None:
    """Return the completions of the last step in an output_dir, or in its folder of completions."""
    found = [file for place in (folder, folder / "completions") for file in place.glob("completions_*.parquet")]
    return max(found, key=lambda file: (len(file.stem), file.stem), default=None)


def _name(path: Path) -> str:
    """Return the name of a run of TRL's: its output_dir."""
    folder = path.parent if path.is_file() else path
    return (folder.resolve().parent if folder.name == "completions" else folder.resolve()).name or path.stem


def _of_trl(path: Path) -> dict[str, list[float]]:
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
    known = {"step", "prompt", "completion", "advantage", "timestamp"}
    rewards = [n for n, of in table.items() if n not in known and of and isinstance(of[0], int | float)]
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
