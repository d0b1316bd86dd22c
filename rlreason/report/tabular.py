"""Read results that other programs left: CSV files, TRL's completions, lm-eval's samples and Inspect's logs."""

import csv
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError, DataError
from rlreason.report.study import Answers, GradedProblem, Setting, Study, StudyRun, labels_of
from rlreason.runtime.text import few, shorten

COLUMNS = ("setting", "seed", "problem", "correct")
TRUTH_VALUES = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?")
INSPECT_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # correct, partly, incorrect, no answer
#: Fields of lm-eval's samples that are no metric, for files that do not name their metrics.
NO_METRIC = ("doc_id", "doc", "target", "arguments", "resps", "filtered_resps", "filter", "metrics")
Sample = tuple[str, str, Any]  # problem, name of its measure, share correct
Shares = dict[str, list[float]]  # problem -> share correct of each sample


def study_of_results(path: Path) -> Study | None:
    """Return the settings of a CSV file, the first being the reference, or the one setting of a program's results.

    None for anything else. `DataError` names the file, the line, the rule and the cure.
    """
    notes, shares = list[str](), dict[str, dict[int, Shares]]()
    for program in FORMATS:
        if files := _files_of(program, path):
            folder = (
                path.parent if path.is_file() else path
            ).resolve()  # a run of TRL's has the name of its output_dir
            name = (folder.parent if folder.name == "completions" else folder).name
            if program == "TRL":
                notes.append(f"{path.name}: TRL's completions are of the last step's training prompts.")
            elif path.is_file():
                name = path.stem
            shares[name] = {seed: _shares_of(program, file) for seed, file in files.items()}
            break
    if not shares and not path.is_file():
        return None
    settings = []
    for name, of_seeds in (shares or _shares_of_csv(path)).items():
        key, runs = (("setting", name),), []
        for seed, of_problems in sorted(of_seeds.items()):
            answers = Answers({name: GradedProblem(sum(of), len(of), name) for name, of in of_problems.items()})
            run = StudyRun(path, f"{name},seed={seed}", key, seed, "finished", final=answers, accuracy=answers.accuracy)
            runs.append(run)
        settings.append(Setting(key, name, runs))
    for setting, label in zip(settings, labels_of([setting.key for setting in settings]), strict=True):
        setting.label = label
    return Study(path.stem, "How do these settings compare?", ["setting"], settings, notes=notes, folders=[path])


# ---- files of programs ----


def _files_of(program: str, path: Path) -> dict[int, Path]:
    """Return a program's last file, by seed: a file, its folder, or a folder with one for each seed.

    The number at the end of such a folder's name is the seed.
    """
    if path.is_file():
        return {0: path} if path.suffix in FORMATS[program][1] else {}
    if (own := _last_file(path, program)) is not None:
        return {0: own}
    inner = {place.name: file for place in sorted(path.glob("*")) if (file := _last_file(place, program))}
    seeds = {int(match[1]): file for name, file in inner.items() if (match := re.search(r"(\d+)$", name))}
    if len(seeds) < len(inner):
        names = few([*inner], 4)
        raise ConfigError(f"{path} holds the runs {names}: end each name with the number of its seed, as in seed_0")
    return seeds


def _last_file(folder: Path, program: str) -> Path | None:
    """Return the newest of a program's files, by the numbers in their names; None if there is none in one folder."""
    files = [file for pattern in FORMATS[program][0] for file in folder.glob(pattern)]
    if len({file.parent for file in files}) != 1:
        return None
    tasks = {file.stem.rpartition("_")[0] for file in files}  # samples_TASK_TIME.jsonl
    if program == "lm-eval" and len(tasks) > 1:
        raise ConfigError(f"{folder} holds samples of {len(tasks)} tasks: give the file of one, {files[0].name}")
    return max(files, key=lambda file: ([int(number) for number in re.findall(r"\d+", file.stem)], file.stem))


def _shares_of(program: str, path: Path) -> Shares:
    shares: Shares = defaultdict(list)
    try:
        for number, (problem, measure, value) in enumerate(FORMATS[program][2](path), 1):
            share = INSPECT_VALUES.get(value) if isinstance(value, str) else value
            if not isinstance(share, int | float) or not 0 <= share <= 1:
                raise DataError(f"{path}, row {number} has {measure}={value}: only values of 0 to 1 can be compared")
            shares[problem].append(share)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, NotImplementedError, zipfile.BadZipFile) as e:
        what = f"{type(e).__name__}: {shorten(str(e), 80)}"
        raise DataError(f"{path} cannot be read as a file of {program} ({what}): give another file") from None
    if not shares:
        raise DataError(f"{path} holds no graded response of {program}: give another file")
    return shares


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
    with path.open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    metrics = [n for n, v in rows[0].items() if n not in NO_METRIC and not isinstance(v, str)] if rows else []
    for row in (row for row in rows if row.get("filter") == rows[0].get("filter")):
        metric = (rows[0].get("metrics") or metrics)[0]
        question = next((q for key in ("question", "problem") if isinstance(q := row["doc"].get(key), str)), None)
        yield question or str(row.get("doc_hash", row["doc_id"])), metric, row[metric]


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
        yield sample["input"] if isinstance(sample["input"], str) else str(sample["id"]), scorer, score["value"]


#: Program -> patterns of its files in a folder, endings of a file that is given, and how to read one.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...], Callable[[Path], Iterator[Sample]]]] = {
    "TRL": (("completions_*.parquet", "completions/completions_*.parquet"), (".parquet",), _trl),
    "lm-eval": (("samples_*.jsonl", "*/samples_*.jsonl"), (".jsonl",), _lm_eval),
    "Inspect": (("*.eval",), (".eval", ".json"), _inspect),
}


# ---- CSV ----


def _shares_of_csv(path: Path) -> dict[str, dict[int, Shares]]:
    """Return the shares of each setting and seed of a CSV file."""
    shares: dict[str, dict[int, Shares]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or []]
            if missing := [name for name in COLUMNS if name not in reader.fieldnames]:
                rule = f"its first line must name {', '.join(COLUMNS)} (in any order)"
                raise DataError(f"{path} has no column {missing[0]}: {rule}")
            for row in reader:
                name, seed, problem, correct = (" ".join((row[column] or "").split()) for column in COLUMNS)
                word = correct.lower()
                share = TRUTH_VALUES[word] if word in TRUTH_VALUES else float(word) if NUMBER.fullmatch(word) else -1.0
                if not name or not problem or not re.fullmatch(r"[-+]?\d+", seed) or not 0 <= share <= 1:
                    line = ", ".join(f"{column}={shorten(row[column] or '', 20)}" for column in COLUMNS)
                    rule = "name setting and problem, give a whole number as seed, and correct as 0, 1 or in between"
                    raise DataError(f"{path}, line {reader.line_num} has {line}: {rule}")
                shares[name][int(seed)][row["problem"]].append(share)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}): give a UTF-8 file with commas") from None
    if not shares:
        raise DataError(f"{path} holds no row: give a file with a row for each setting, seed and problem")
    return shares
