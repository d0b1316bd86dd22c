"""Read folders of runs and sweeps, finished or not, into one `Study`; and results that other programs left.

These are CSV files, TRL's completions, lm-eval's samples and Inspect's logs.
"""

import csv
import json
import math
import os
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.config.leaves import flat, resource_dir, typed_word
from rlreason.errors import ConfigError, DataError
from rlreason.health.watch import findings_of
from rlreason.records.files import CONFIG, RESPONSES, Note, ResponseFile, sets_of
from rlreason.records.reader import RunFolder, runs_in
from rlreason.records.resume import is_below
from rlreason.report.content import Series
from rlreason.report.study import (
    AXES,
    PAPER_AXES,
    RUNNING,
    Answers,
    GradedProblem,
    Setting,
    Study,
    StudyRun,
    labels_of,
    purposes,
)
from rlreason.runtime.text import few, shorten
from rlreason.sweeps.state import (
    FILE,
    NO_SETTING,
    WAITING,
    Key,
    RunState,
    SweepState,
    looks_text,
    read_state,
    refreshed,
)

GRADED = ("problem_id", "question", "outcome")  # fields of a response


def read_run(folder: Path, state: RunState, note: Note, x: str = "") -> StudyRun:
    """Read one run; broken parts of its folder are noted and left out. A run in progress has no final evaluation.

    `x`: one more axis of its curves, of PAPER_AXES or a key of metrics.jsonl.
    """
    run = StudyRun(folder, state.key, state.seed, state.status, state.reason)
    run.shared_machine, run.seconds = state.shared_machine, state.seconds
    if not folder.is_dir():
        return run
    reader = RunFolder(folder, note)
    try:
        run.settings, rows = flat(reader.settings), reader.metrics
    except ConfigError as error:
        note(str(error))
        if run.state not in (RUNNING, WAITING):
            run.status, run.reason = "failed", f"its folder cannot be read: {error}"
        return run
    run.provenance, run.summary = reader.provenance, reader.summary or {}
    run.planned_steps = run.settings.get("n_steps")
    run.protocol = run.summary.get("protocol") or {}
    if rows:
        names = dict.fromkeys(name for row in rows for name in row)
        columns = {name: np.array([row.get(name) for row in rows], np.float64) for name in names}
        counters = {axis: columns[name] for axis, name in AXES.items() if name in columns}
        key, _, unit = PAPER_AXES.get(x, (x, x, 1))
        if x == "prompts":
            unit = run.settings.get("group_size", math.nan) / run.settings.get("rollout_batch_size", math.nan)
        if key in columns:
            from pandas import Series as Column  # here: it takes half a second to import

            counters[x] = Column(columns[key]).ffill().to_numpy() / unit
        for name, values in columns.items():
            finite = np.isfinite(values)  # None has become NaN
            if finite.any():
                xs = {axis: at[finite] for axis, at in counters.items() if axis == x or np.isfinite(at[finite]).all()}
                run.series[name] = Series(xs, values[finite])
        run.totals = {axis: float(run.series[name].y[-1]) for axis, name in AXES.items() if name in run.series}
        run.findings = findings_of(rows, reader.settings, reader.incidents, run.status)
    for name in sets_of(folder):
        protocol = (run.summary.get("sets") or {}).get(name, {}).get("protocol") or {}
        algorithm = {"algorithm": run.settings.get("algorithm")}  # the others decide the run's own protocol
        run.sets[name] = replace(run, protocol=protocol, settings=algorithm, sets={})
        read_answers(run.sets[name], reader, reader.evaluations(name), note)
    files = reader.evaluations()
    if not files and (folder / RESPONSES).is_file():  # of algorithm=evaluate or best_of_n
        files = [ResponseFile(folder / RESPONSES, RESPONSES)]
    read_answers(run, reader, files, note)
    return run


def read_answers(run: StudyRun, reader: RunFolder, files: Sequence[ResponseFile], note: Note) -> None:
    """Read a run's first and last evaluation from these files, oldest first, into it."""
    if files and files[0].step == 0 and (len(files) > 1 or not run.ended):
        run.start = answers_of(files[0], reader, note)
    if files and run.state not in (RUNNING, WAITING, "failed") and run.accuracy is None:
        run.final = answers_of(files[-1], reader, note)
    if run.ended and run.accuracy is None:
        note(f"{run.folder} has lost the responses of its final evaluation: it is not compared")


def answers_of(file: ResponseFile, reader: RunFolder, note: Note) -> Answers:
    """Return the graded responses of a file by problem; none, which is noted, of a file that is damaged."""
    problems: Answers = {}
    try:
        rows = reader.rows(file, GRADED)
    except ConfigError as error:
        note(str(error))
        return problems
    for row in rows.values():
        problem = problems.setdefault(row["problem_id"], GradedProblem(row["question"], facts=row.get("facts") or {}))
        problem.correct += row["outcome"] == "correct"
        problem.samples += 1
    return problems


@dataclass(slots=True)
class Given:
    """The runs of one argument, and their sweep, if any."""

    path: Path
    runs: list[StudyRun]
    state: SweepState | None = None
    is_whole: bool = False  # the argument is the sweep itself
    picked: int = 0  # the number of settings of its sweep, if it is the best one of them


def read_study(folders: Sequence[Path], x: str = "") -> Study:
    """Read runs, sweeps, settings of sweeps (SWEEP/KEY=VALUE) into one study; `ConfigError` if nothing was found.

    Settings are distinguished by what was swept, or by differences of their configs. The reference is that of the
    first whole sweep, else the first setting given. What is broken has a line in `Study.problems`. `x`: see `read_run`.
    """
    problems, notes = list[str](), list[str]()
    given = [_given(folder, problems.append, x) for folder in folders]
    state, runs = given[0].state, [run for one in given for run in one.runs]
    on_purpose, head = list(purposes(state.axes)) if state is not None else [], None
    if given[0].is_whole and state is not None and (reference := state.reference) is not None:
        # Found by the words that were typed, before runs of several sweeps are named by their configs.
        like_it = [run for run in given[0].runs if reference.items() <= dict(run.setting).items()]  # some of their keys
        head = min(like_it, key=lambda run: len(run.setting), default=None)
    if not all(one.state for one in given) or len({run.folder.parent for run in runs}) > 1:  # of no sweep, or several
        on_purpose = []
        for run, key in zip(runs, _keys_of(runs), strict=True):
            run.setting = key
    by_key: dict[Key, Setting] = {}
    for run in runs:
        setting = by_key.setdefault(run.setting, Setting(run.setting, "", []))
        if earlier := [one for one in setting.runs if one.seed == run.seed]:
            where = earlier[0].folder
            problems.append(f"{run.folder} is left out: {where} has the same setting and seed {run.seed}")
        else:
            setting.runs.append(run)
    settings = list(by_key.values())
    for setting in settings:
        setting.runs.sort(key=lambda run: run.seed)
    for one in given:
        if one.picked:
            by_key[one.runs[0].setting].best_of = one.picked
            notes.append(
                f"{one.path.name} was the best of {one.picked} settings on these problems: if it is compared for that, "
                "its lead is flattered. Fresh seeds would settle it; the whole sweep, given alone, is corrected for "
                "all its settings."
            )
    if head is not None:
        settings.sort(key=lambda one: one.key != head.setting)
    for setting, label in zip(settings, labels_of([setting.key for setting in settings]), strict=True):
        setting.label = label
    notes += [f"{looks_text(one.state)}." for one in given if one.state and one.state.looks]
    axes = list(dict.fromkeys(key for setting in settings for key, _ in setting.key))
    question = f"Which {' and '.join(axes)}?" if axes else "How do these runs compare?"
    file = resource_dir("multirun_sweeps") / f"{Path(state.sweep).name if state else ''}.yaml"
    if file.is_file():  # its first sentence, from its colon on
        comment = " ".join(re.findall(r"^# ?(.*)", file.read_text("utf-8"), re.M))
        if match := re.search(r"(?:[^.?:]*:)?\s*([^.?:]{9,}\??)", comment):
            question = match[1][:1].upper() + match[1][1:]
    return Study(
        state.name if state is not None else folders[0].resolve().name,
        question,
        axes,
        settings,
        on_purpose,
        problems=list(dict.fromkeys(problems)),
        notes=notes,
        carried=[
            f"Carried from an earlier sweep: {of['sentence']}" for one in given if one.state for of in one.state.carried
        ],
        command=state.command if state is not None else "",
        max_seeds=max(map(_max_seeds, given), default=0),
    )


def _max_seeds(given: Given) -> int:
    """Return the most seeds of the looks (`seed=auto`) of the sweep that the runs are of; 0 without looks."""
    beside = given.path.parent
    state = given.state or (read_state(beside, lambda _: None) if (beside / FILE).exists() else None)
    return state.max_seeds if state else 0


def _given(path: Path, note: Note, x: str) -> Given:
    """Read the runs of one argument; `ConfigError` if it is none of these."""
    if (path / CONFIG).exists() and not (path / FILE).exists():
        run = read_run(path, refreshed(RunState(path.name, [], {}, 0), path.parent, note), note, x)
        run.seed = int(run.settings.get("seed") or 0)
        return Given(path, [run])
    sweep, part = (path, "") if path.is_dir() else (path.parent, path.name)
    if not ((sweep / FILE).exists() or runs_in(sweep)) or (part and "=" not in part):
        what = "holds no run" if path.exists() else "is not there"
        raise ConfigError(f"RUNS={path} {what}: give the folder of a run or of one sweep, as printed at its start")
    state = read_state(sweep, note)
    some = [run for run in state.runs if not part or set(part.split(",")) <= set(run.name.split(","))]
    if not some:
        names = few([run.name for run in state.runs], 3)
        raise ConfigError(f"RUNS={path}: no run of {sweep} has {part}: its runs are {names}")
    given = Given(path, [read_run(sweep / run.name, run, note, x) for run in some], state, not part)
    accuracies = defaultdict[Key, list[float]](list)
    for one in state.runs:
        accuracies[one.key].append(one.accuracy or 0.0)
    best = max(accuracies, key=lambda key: np.mean(accuracies[key]))
    if part and len(accuracies) >= FEWEST_CHOSEN and {one.key for one in some} == {best}:
        given.picked = len(accuracies)
    return given


FEWEST_CHOSEN = 3  # settings; the better one of two is not said to be chosen
MOST_KEYS = 4  # runs without a sweep that differ in more are named by their folders


def _keys_of(runs: Sequence[StudyRun]) -> list[Key]:
    """Return what distinguishes each run: the settings that differ, else the names of folders without the seed."""
    configs = [run.settings for run in runs]
    alike = [  # a stage of a chain begins with the model of its own seed
        {name: re.sub(r"\bseed=\d+", "seed=*", typed_word(value)) for name, value in of.items()} for of in configs
    ]
    for of_runs in (alike, configs):
        differing = differing_keys(of_runs)
        keys: list[Key] = [tuple((name, typed_word(of.get(name))) for name in differing) for of in of_runs]
        distinct = {(key, run.seed) for key, run in zip(keys, runs, strict=True)}
        if len(differing) <= MOST_KEYS and len(distinct) == len(runs):
            return keys
    beside = os.path.commonpath([run.folder.resolve().parent for run in runs])
    names = [str(run.folder.resolve().relative_to(beside)) for run in runs]
    return [(("run", re.sub("[,/]?seed=[^,/]*", "", name)),) for name in names]


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings in which configs differ, except the seed and what changes no figure."""
    names = dict.fromkeys(name for config in configs for name in config if not is_below(name, NO_SETTING))
    return [name for name in names if len({typed_word(config.get(name)) for config in configs}) > 1]


# ---- results of other programs ----

COLUMNS = ("setting", "seed", "problem", "correct")
RULE = "name setting and problem, give a whole number as seed, and correct as 0, 1 or in between"
TRUTH_VALUES = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
INSPECT_VALUES = {"C": 1.0, "P": 0.5, "I": 0.0, "N": 0.0}  # correct, partly, incorrect, no answer
NO_REWARDS = ("step", "prompt", "completion", "advantage", "timestamp")  # other columns of TRL's completions
Sample = dict[str, Any]  # of COLUMNS, without the first two where the files give them
#: Ending of a file -> the program that writes it, and patterns of these files in a folder; any other is a CSV file.
FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    ".parquet": ("TRL", ("completions_*.parquet", "completions/completions_*.parquet")),
    ".jsonl": ("lm-eval", ("samples_*.jsonl", "*/samples_*.jsonl")),
    ".eval": ("Inspect", ("*.eval",)),
    ".json": ("Inspect", ()),
}


def study_of_results(path: Path) -> Study | None:
    """Return the settings of a CSV file, the first being the reference, or the one setting of a program's results.

    None for anything else. `DataError` names the file, the row, the rule and the cure.
    """
    in_folder = (_files_of(path, patterns) for _, patterns in FORMATS.values())
    files = {0: path} if path.is_file() else next(filter(None, in_folder), {})
    if not files:
        return None
    program, _ = FORMATS.get(next(iter(files.values())).suffix, ("CSV", ()))
    settings: dict[str, Setting] = {}
    runs: dict[tuple[str, int], StudyRun] = {}
    cluster_of: dict[str, str] = {}  # problem -> its cluster
    samples = ((seed, sample) for seed, file in files.items() for sample in _samples(file))
    try:
        for number, (of_file, sample) in enumerate(samples, 1):
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
            facts = {"cluster": (sample["cluster"] or "").strip()} if "cluster" in sample else {}
            for cluster in facts.values():
                first = cluster_of.setdefault(name, cluster)
                if not cluster or first != cluster:
                    raise DataError(f"{path}: problem {name} has the clusters {first!r} and {cluster!r}: give it one")
            graded = runs[label, whole].final.setdefault(name, GradedProblem(name, facts=facts))
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


def _files_of(path: Path, patterns: Sequence[str]) -> dict[int, Path]:
    """Return a program's newest file, by seed: of its folder, or of a folder with one for each seed.

    The number at the end of such a folder's name is the seed.
    """
    if (own := _newest_file(path, patterns)) is not None:
        return {0: own}
    inner = {place.name: file for place in sorted(path.glob("*")) if (file := _newest_file(place, patterns))}
    seeds = {int(match[1]): file for name, file in inner.items() if (match := re.search(r"(\d+)$", name))}
    if len(seeds) < len(inner):
        names = few([*inner], 4)
        raise ConfigError(f"{path} holds the runs {names}: end each name with the number of its seed, as in seed_0")
    return seeds


def _newest_file(folder: Path, patterns: Sequence[str]) -> Path | None:
    """Return the newest of a program's files, by the numbers in their names; None if there is none in one folder."""
    files = [file for pattern in patterns for file in folder.glob(pattern)]
    if len({file.parent for file in files}) != 1:
        return None
    tasks = {file.stem.rpartition("_")[0] for file in files if file.suffix == ".jsonl"}  # samples_TASK_TIME.jsonl
    if len(tasks) > 1:
        raise ConfigError(f"{folder} holds samples of {len(tasks)} tasks: give the file of one, {files[0].name}")
    return max(files, key=lambda file: [int(number) for number in re.findall(r"\d+", file.stem)])


def _samples(path: Path) -> Iterator[Sample]:
    """Yield the samples of a file: problem and correct, of CSV also setting and seed.

    TRL's are prompt and reward of the last step's completions: the reward called accuracy or correct, else the first.
    lm-eval's are those under the first filter and metric; a problem is its question, else its document's hash.
    Inspect's are those under the first scorer; a problem is its input if that is text, else its id.
    """
    if path.suffix == ".parquet":
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
    elif path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        metric = next(n for n, value in rows[0].items() if n != "doc_id" and isinstance(value, int | float))
        for row in rows:
            if row.get("filter") == rows[0].get("filter"):
                asked = row["doc"].get("question") or row["doc"].get("problem") or row.get("doc_hash", row["doc_id"])
                yield {"problem": asked, "correct": row[metric]}
    elif path.suffix in (".eval", ".json"):
        if path.suffix == ".eval":
            with zipfile.ZipFile(path) as log:
                names = sorted(name for name in log.namelist() if name.startswith("samples/"))
                rows = [json.loads(log.read(name)) for name in names]
        else:
            rows = json.loads(path.read_text("utf-8"))["samples"]
        for row in rows:
            value = next(iter(row["scores"].values()))["value"]
            problem = row["input"] if isinstance(row["input"], str) else row["id"]
            yield {"problem": problem, "correct": INSPECT_VALUES.get(value, value) if isinstance(value, str) else value}
    else:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            reader.fieldnames = [name.strip().lower() for name in reader.fieldnames or []]
            if missing := [name for name in COLUMNS if name not in reader.fieldnames]:
                rule = f"its first line must name {', '.join(COLUMNS)} (in any order)"
                raise DataError(f"{path} has no column {missing[0]}: {rule}")
            yield from reader
