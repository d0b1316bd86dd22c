"""Read results that other programs left: CSV files, TRL's completions, lm-eval's samples and Inspect's logs."""

import csv
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError, DataError
from rlreason.report.study import GradedProblem, Setting, Study, StudyRun
from rlreason.runtime.text import few, shorten

COLUMNS = ("setting", "seed", "problem", "correct")
RULE = "name setting and problem, give a whole number as seed, and correct as 0, 1 or in between"
TRUTH_VALUES = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
INSPECT_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # correct, partly, incorrect, no answer
NO_REWARDS = ("step", "prompt", "completion", "advantage", "timestamp")  # other columns of TRL's completions
Sample = dict[str, Any]  # of COLUMNS, without the first two where the files give them


def study_of_results(path: Path) -> Study | None:
    """Return the settings of a CSV file, the first being the reference, or the one setting of a program's results.

    None for anything else. `DataError` names the file, the row, the rule and the cure.
    """
    for program in FORMATS:
        if files := _files_of(program, path):
            break
    else:
        return None
    settings: dict[str, Setting] = {}
    runs: dict[tuple[str, int], StudyRun] = {}
    number = 0
    try:
        for of_file, file in files.items():
            for sample in FORMATS[program][2](file):
                number += 1
                values = [({"setting": path.stem, "seed": of_file} | sample)[name] for name in COLUMNS]
                texts = ["" if value is None else str(value).strip() for value in values]
                label, seed, problem, correct = texts
                try:
                    share, whole = float(TRUTH_VALUES.get(correct.lower(), correct)), int(seed)
                except ValueError:
                    share, whole = -1.0, 0
                if not label or not problem or not 0 <= share <= 1:
                    line = ", ".join(f"{name}={shorten(text, 20)}" for name, text in zip(COLUMNS, texts, strict=True))
                    raise DataError(f"{path}, row {number} has {line}: {RULE}")
                setting = settings.setdefault(label, Setting((("setting", label),), label, []))
                if (label, whole) not in runs:
                    runs[label, whole] = StudyRun(path, setting.key, whole, "finished")
                    setting.runs.append(runs[label, whole])
                name = str(sample["problem"])  # as the runs have it
                graded = runs[label, whole].final.setdefault(name, GradedProblem(name))
                graded.correct += share
                graded.samples += 1
    except ConfigError:
        raise
    except Exception as error:  # whatever its reader raises
        what = f"{type(error).__name__}: {shorten(str(error), 80)}"
        raise DataError(f"{path} cannot be read as {program} ({what}): give another file") from None
    if not runs:
        raise DataError(f"{path} holds no row of results: give a file of {program} with some")
    for setting in settings.values():
        setting.runs.sort(key=lambda run: run.seed)
    notes = [f"{path.name}: TRL's completions are of the last step's training prompts."] if program == "TRL" else []
    question = "How do these settings compare?"
    return Study(path.stem, question, ["setting"], list(settings.values()), notes=notes)


# ---- files of programs ----


def _files_of(program: str, path: Path) -> dict[int, Path]:
    """Return a program's newest file, by seed: a file, its folder, or a folder with one for each seed.

    The number at the end of such a folder's name is the seed.
    """
    if path.is_file():
        return {0: path} if path.name.endswith(FORMATS[program][1]) else {}
    if (own := _newest_file(path, program)) is not None:
        return {0: own}
    inner = {place.name: file for place in sorted(path.glob("*")) if (file := _newest_file(place, program))}
    seeds = {int(match[1]): file for name, file in inner.items() if (match := re.search(r"(\d+)$", name))}
    if len(seeds) < len(inner):
        names = few([*inner], 4)
        raise ConfigError(f"{path} holds the runs {names}: end each name with the number of its seed, as in seed_0")
    return seeds


def _newest_file(folder: Path, program: str) -> Path | None:
    """Return the newest of a program's files, by the numbers in their names; None if there is none in one folder."""
    files = [file for pattern in FORMATS[program][0] for file in folder.glob(pattern)]
    if len({file.parent for file in files}) != 1:
        return None
    tasks = {file.stem.rpartition("_")[0] for file in files}  # samples_TASK_TIME.jsonl
    if program == "lm-eval" and len(tasks) > 1:
        raise ConfigError(f"{folder} holds samples of {len(tasks)} tasks: give the file of one, {files[0].name}")
    return max(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.stem)])


def _csv(path: Path) -> Iterator[Sample]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or []]
        if missing := [name for name in COLUMNS if name not in reader.fieldnames]:
            rule = f"its first line must name {', '.join(COLUMNS)} (in any order)"
            raise DataError(f"{path} has no column {missing[0]}: {rule}")
        yield from reader


def _trl(path: Path) -> Iterator[Sample]:
    """Yield prompt and reward of the last step's completions: the reward called accuracy or correct, else the first."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} is a parquet file: pip install 'rlreason[report]', which reads it") from None
    rows = parquet.read_table(path).to_pylist()
    rewards = [n for n, value in rows[0].items() if n not in NO_REWARDS and isinstance(value, int | float)]
    reward = next((name for name in rewards if "acc" in name or "correct" in name), rewards[0])
    newest = max(row.get("step", 0) for row in rows)
    for row in rows:
        if row.get("step", 0) == newest:
            yield {"problem": row["prompt"], "correct": row[reward]}


def _lm_eval(path: Path) -> Iterator[Sample]:
    """Yield a task's samples under the first filter and metric: a problem is its question, else its document's hash."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    metric = next(n for n, value in rows[0].items() if n != "doc_id" and isinstance(value, int | float))
    for row in rows:
        if row.get("filter") == rows[0].get("filter"):
            asked = row["doc"].get("question") or row["doc"].get("problem") or row.get("doc_hash", row["doc_id"])
            yield {"problem": asked, "correct": row[metric]}


def _inspect(path: Path) -> Iterator[Sample]:
    """Yield a log's samples under the first scorer; a problem is its input if that is text, else its id."""
    if path.suffix == ".eval":
        with zipfile.ZipFile(path) as log:
            names = sorted(name for name in log.namelist() if name.startswith("samples/"))
            samples = [json.loads(log.read(name)) for name in names]
    else:
        samples = json.loads(path.read_text("utf-8"))["samples"]
    for sample in samples:
        value = next(iter(sample["scores"].values()))["value"]
        problem = sample["input"] if isinstance(sample["input"], str) else sample["id"]
        yield {"problem": problem, "correct": INSPECT_VALUES.get(value, value) if isinstance(value, str) else value}


#: Program -> patterns of its files in a folder, endings of a file that is given, and how to read one.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Path], Iterator[Sample]]]] = {
    "TRL": (("completions_*.parquet", "completions/completions_*.parquet"), (".parquet",), _trl),
    "lm-eval": (("samples_*.jsonl", "*/samples_*.jsonl"), (".jsonl",), _lm_eval),
    "Inspect": (("*.eval",), (".eval", ".json"), _inspect),
    "CSV": ((), ("",), _csv),
}
