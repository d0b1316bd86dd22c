"""Read results that other programs left: CSV files, TRL's completions, lm-eval's samples and Inspect's logs."""

import csv
import json
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError, DataError
from rlreason.report.study import Answers, GradedProblem, Setting, Study, StudyRun, labels_of
from rlreason.runtime.text import few, shorten

COLUMNS = ("setting", "seed", "problem", "correct")
TRUTH_VALUES = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
INSPECT_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # correct, partly, incorrect, no answer
#: Fields of lm-eval's samples that are no metric, for files that do not name their metrics.
NO_METRIC = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics")
Cells = dict[str, dict[int, dict[str, list[float]]]]  # setting -> seed -> problem -> [sum of correct, samples]
Sample = tuple[str, str, Any]  # problem, name of its measure, share correct


@dataclass(frozen=True, slots=True)
class ResultFormat:
    """The files in which a program leaves graded responses: patterns in its folder, endings, and how to read one."""

    program: str
    patterns: tuple[str, ...]
    endings: tuple[str, ...]
    read: Callable[[Path], Iterator[Sample]]
    note: str = ""


def study_of_results(path: Path) -> Study | None:
    """Return the settings of a CSV file, the first being the reference, or the one setting of a program's results.

    None for anything else. `DataError` names the file, the line, the rule and the cure.
    """
    notes = []
    if (found := _files_of(path)) is not None:
        form, files = found
        folder = (path.parent if path.is_file() else path).resolve()  # a run of TRL's has the name of its output_dir
        name = (folder.parent if folder.name == "completions" else folder).name or path.stem
        name = name if form.program == "TRL" or path.is_dir() else path.stem
        cells: Cells = {name: {seed: _cells_of(form, file) for seed, file in files.items()}}
        notes = [f"{path.name}: {form.note}"] if form.note else []
    elif path.is_file():
        cells = {}
        for name, seed, problem, correct in _rows_of_csv(path):
            cell = cells.setdefault(name, {}).setdefault(seed, {}).setdefault(problem, [0.0, 0])
            cell[0] += correct
            cell[1] += 1
        if not cells:
            raise DataError(f"{path} holds no row: give a file with a row for each setting, seed and problem")
    else:
        return None
    settings = [_setting(name, seeds, path) for name, seeds in cells.items()]
    for setting, label in zip(settings, labels_of([setting.key for setting in settings]), strict=True):
        setting.label = label
    return Study(path.stem, "How do these settings compare?", ["setting"], settings, notes=notes, folders=[path])


def _setting(name: str, seeds: dict[int, dict[str, list[float]]], path: Path) -> Setting:
    key = (("setting", name),)
    runs = []
    for seed, cells in sorted(seeds.items()):
        problems = {one: GradedProblem(right, int(samples), one) for one, (right, samples) in cells.items()}
        run = StudyRun(path, f"{name},seed={seed}", key, seed, "finished", final=Answers(problems))
        run.accuracy = sum(p.correct for p in problems.values()) / sum(p.samples for p in problems.values())
        runs.append(run)
    return Setting(key, name, runs)


# ---- files of programs ----


def _files_of(path: Path) -> tuple[ResultFormat, dict[int, Path]] | None:
    """Return a program's format and its last file, by seed: a file, its folder, or a folder with one for each seed.

    The number at the end of such a folder's name is the seed.
    """
    for form in FORMATS:
        if path.is_file() and path.suffix in form.endings:
            return form, {0: path}
        if (own := _last_file(path, form)) is not None:
            return form, {0: own}
        inner = [(place, file) for place in sorted(path.glob("*")) if (file := _last_file(place, form)) is not None]
        numbers = [re.search(r"(\d+)$", place.name) for place, _ in inner]
        seeds = [int(number[1]) for number in numbers if number is not None]
        if len(set(seeds)) < len(inner):
            names = few([place.name for place, _ in inner], 4)
            raise ConfigError(
                f"{path} holds the runs {names}: end each name with the number of its seed, seed_0, seed_1"
            )
        if inner:
            return form, dict(zip(seeds, (file for _, file in inner), strict=True))
    return None


def _last_file(folder: Path, form: ResultFormat) -> Path | None:
    """Return the newest of a program's files, by the numbers in their names; None if there is none in one folder."""
    files = [file for pattern in form.patterns for file in folder.glob(pattern)] if folder.is_dir() else []
    if len({file.parent for file in files}) != 1:
        return None
    tasks = {file.stem.rpartition("_")[0] for file in files}  # samples_TASK_TIME.jsonl
    if form.program == "lm-eval" and len(tasks) > 1:
        raise ConfigError(f"{folder} holds samples of {len(tasks)} tasks: give the file of one, {files[0].name}")
    return max(files, key=lambda file: ([int(number) for number in re.findall(r"\d+", file.stem)], file.stem))


def _cells_of(form: ResultFormat, path: Path) -> dict[str, list[float]]:
    """Return problem -> [sum of correct, samples] of one file."""
    cells: dict[str, list[float]] = {}
    try:
        for number, (problem, measure, value) in enumerate(form.read(path), 1):
            share = INSPECT_VALUES.get(value) if isinstance(value, str) else value
            if not isinstance(share, int | float) or not 0 <= share <= 1:
                raise DataError(f"{path}, row {number} has {measure}={value}: only values of 0 to 1 can be compared")
            cell = cells.setdefault(problem, [0.0, 0])
            cell[0] += share
            cell[1] += 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError, zipfile.BadZipFile) as error:
        what = f"{type(error).__name__}: {shorten(str(error), 80)}"
        raise DataError(f"{path} cannot be read as a file of {form.program} ({what}): give another file") from None
    if not cells:
        raise DataError(f"{path} holds no graded response of {form.program}: give another file")
    return cells


def _trl(path: Path) -> Iterator[Sample]:
    """Yield the last step's completions: a problem is a prompt, and correct is its first reward.

    A reward that is called accuracy or correct takes precedence.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} is a parquet file: pip install 'rlreason[report]', which reads it") from None
    table: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    others = {"step", "prompt", "completion", "advantage", "timestamp"}
    rewards = [n for n, cells in table.items() if n not in others and cells and isinstance(cells[0], int | float)]
    if "prompt" not in table or not rewards:
        raise DataError(f"{path} has no prompt and reward columns: give completions that TRL's GRPOTrainer has logged")
    reward = next((name for name in rewards if "acc" in name or "correct" in name), rewards[0])
    steps = table.get("step") or [0] * len(table["prompt"])
    newest = max(steps)
    for step, prompt, value in zip(steps, table["prompt"], table[reward], strict=True):
        if step == newest:
            yield str(prompt), reward, value


def _lm_eval(path: Path) -> Iterator[Sample]:
    """Yield a task's samples under the first filter and metric: a problem is its question, else its document's hash."""
    first: Mapping[str, Any] | None = None
    with path.open(encoding="utf-8") as file:
        for row in map(json.loads, filter(str.strip, file)):
            first = row if first is None else first
            if row.get("filter") != first.get("filter"):
                continue
            names = first.get("metrics") or [
                n for n, v in first.items() if n not in NO_METRIC and not isinstance(v, str)
            ]
            doc = row["doc"]
            question = next((doc[key] for key in ("question", "problem") if isinstance(doc.get(key), str)), None)
            yield question or str(row.get("doc_hash", row["doc_id"])), names[0], row[names[0]]


def _inspect(path: Path) -> Iterator[Sample]:
    """Yield a log's samples under the first scorer; a problem is its input if that is text, else its id."""
    if path.suffix == ".eval":
        with zipfile.ZipFile(path) as log:
            names = sorted(name for name in log.namelist() if name.startswith("samples/"))
            samples = [json.loads(log.read(name)) for name in names]
    else:
        samples = json.loads(path.read_text("utf-8"))["samples"]
    for sample in samples:
        scorer, score = next(iter(sample["scores"].items()))
        asked = sample["input"] if isinstance(sample["input"], str) else str(sample["id"])
        yield asked, scorer, score["value"]


FORMATS = (
    ResultFormat(
        "TRL",
        ("completions_*.parquet", "completions/completions_*.parquet"),
        (".parquet",),
        _trl,
        "TRL's completions are of the last step's training prompts.",
    ),
    ResultFormat("lm-eval", ("samples_*.jsonl", "*/samples_*.jsonl"), (".jsonl",), _lm_eval),
    ResultFormat("Inspect", ("*.eval",), (".eval", ".json"), _inspect),
)


# ---- CSV ----


def _rows_of_csv(path: Path) -> Iterator[tuple[str, int, str, float]]:
    """Yield (setting, seed, problem, correct) of each row."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            head = [name.strip().lower() for name in next(reader, [])]
            if missing := [name for name in COLUMNS if name not in head]:
                rule = f"its first line must name {', '.join(COLUMNS)} (in any order)"
                raise DataError(f"{path} has no column {missing[0]}: {rule}")
            at = [head.index(name) for name in COLUMNS]
            for row in filter(None, reader):
                if what := _fault(row, at):
                    raise DataError(f"{path}, line {reader.line_num} {what}: mend the line, or leave it out")
                name, seed, problem, correct = (row[k] for k in at)
                yield " ".join(name.split()), int(seed), problem, _share(correct)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}): give a UTF-8 file with commas") from None


def _fault(row: list[str], at: list[int]) -> str:
    """Return what is wrong with a row, or ""."""
    if len(row) <= max(at):
        return f"has {len(row)} cells, fewer than its head"
    name, seed, problem, correct = (row[k] for k in at)
    if not re.fullmatch(r"\s*[-+]?\d+\s*", seed):
        return f"has seed={shorten(seed, 20)}, which is no whole number"
    if not 0 <= _share(correct) <= 1:
        return f"has correct={shorten(correct, 20)}, which is neither 0, 1 nor a share in between"
    return "" if name.strip() and problem else "names no setting or no problem"


def _share(text: str) -> float:
    """Return the share that a cell states; NaN where it states none."""
    word = text.strip().lower()
    try:
        return TRUTH_VALUES[word] if word in TRUTH_VALUES else float(text)
    except ValueError:
        return math.nan
