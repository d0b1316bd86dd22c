"""Read folders of runs and sweeps, finished or not, into one `Study`."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.config.leaves import flat, resource_dir
from rlreason.errors import ConfigError
from rlreason.evaluation.cases import CATEGORY_TEXTS
from rlreason.health.examine import findings_of
from rlreason.health.watch import as_numbers
from rlreason.records.files import CONFIG, METRICS, RESPONSES, STATUS, ResponseFile, each_line
from rlreason.records.reader import RunFolder, read_ending, read_status, runs_in
from rlreason.report.study import (
    AXES,
    RUNNING,
    Answers,
    GradedProblem,
    Series,
    Setting,
    Study,
    StudyRun,
    labels_of,
    setting_text,
)
from rlreason.report.verdicts import picked
from rlreason.runtime.files import LARGEST, holder, number
from rlreason.runtime.text import few
from rlreason.sweeps.closing import purposes
from rlreason.sweeps.state import FILE, KILLED, SAME_FIGURES, WAITING, Key, RunState, SweepState, read_state

#: The metrics that a report reads, by the beginnings of their names.
READ = ("eval/", "final/", "reward/", "rollout/", "train/", "time/", "ei/", "sft/", "grading/", "memory/")
Say = Callable[[str], None]


def read_run(folder: Path, setting: Key, seed: int | None, state: RunState | None, say: Say) -> StudyRun:
    """Read one run; broken parts of its folder are reported to `say`, a line each, and left out.

    `state`: from its sweep. A run in progress has no final evaluation.
    """
    status, reason = _status(folder, state)
    run = StudyRun(folder, folder.name, setting, seed or 0, status, reason)
    if state is not None:
        run.shared_machine, run.seconds = state.shared_machine, state.seconds
    if not folder.is_dir():
        return run
    try:
        reader = RunFolder(folder, say)
        run.settings = flat(reader.settings)
    except ConfigError as error:
        say(str(error))
        if run.status.partition(":")[0] not in (RUNNING, WAITING):
            run.status, run.reason = "failed", f"its folder cannot be read: {error}"
        return run
    run.seed = int(run.settings.get("seed") or 0) if seed is None else seed
    run.provenance, run.summary = reader.provenance, reader.summary or {}
    steps = run.settings.get("n_steps") or run.settings.get("n_ei_steps")
    run.planned_steps = steps if isinstance(steps, int) else None
    run.series, run.totals = _series(reader, say)
    if run.series:
        rows = as_numbers(reader.metrics)
        run.findings = findings_of(rows, reader.settings, reader.incidents, run.status)
    run.seconds = number(run.summary.get("seconds")) if run.seconds is None else run.seconds
    protocol = run.summary.get("protocol")
    run.protocol = dict(protocol) if isinstance(protocol, Mapping) else None
    _with_answers(run, reader, say)
    return run


def _status(folder: Path, state: RunState | None) -> tuple[str, str]:
    """Return the status of a run: from its sweep, else from its own folder."""
    if state is not None:
        return state.status, state.reason
    status = read_status(folder)
    if status is None:
        begun = (folder / METRICS).is_file()
        return ("interrupted", "it left no status") if begun else (WAITING, "")
    if status == RUNNING and holder(folder) is None:
        return "interrupted", KILLED
    return status, read_ending(folder).get("reason", "")


def _series(reader: RunFolder, say: Say) -> tuple[dict[str, Series], dict[str, float]]:
    """Return the curves of a run's metrics, and the final value of each counter."""
    try:
        rows = reader.metrics
    except ConfigError as error:
        say(str(error))
        return {}, {}
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(READ))
    counters = {axis: _column(rows, name) for axis, name in AXES.items()}
    series = {}
    for name in names:
        values = _column(rows, name)
        finite = np.isfinite(values)
        if finite.any():
            x = {axis: at[finite] for axis, at in counters.items() if np.isfinite(at[finite]).all()}
            series[name] = Series(x, values[finite])
    totals = {axis: float(at[np.isfinite(at)][-1]) for axis, at in counters.items() if np.isfinite(at).any()}
    return series, totals


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> Any:
    """Return one metric of all rows; NaN if a row has none, or one too large to be drawn."""
    values = (row.get(name) for row in rows)
    numbers = (math.nan if value is None or not abs(value) < LARGEST else float(value) for value in values)
    return np.fromiter(numbers, np.float64)


def _with_answers(run: StudyRun, reader: RunFolder, say: Say) -> None:
    """Read the first and the last evaluation, and the accuracy of the last."""
    evaluations = reader.evaluations()
    if evaluations and evaluations[0].step == 0 and (len(evaluations) > 1 or not run.ended):
        run.start = answers_of(evaluations[0], say)
    if run.status.partition(":")[0] in (RUNNING, WAITING):
        return
    file = evaluations[-1] if evaluations else None
    if file is None and (run.folder / RESPONSES).is_file():  # of algorithm=evaluate or best_of_n
        file = ResponseFile(run.folder / RESPONSES, RESPONSES)
    if run.ended and run.summary and run.summary.get("accuracy") is None and run.diverged:
        run.accuracy = 0.0  # with weights of NaN it answers nothing
        return
    if file is None:
        if run.ended:
            say(f"{run.folder} has lost the responses of its final evaluation: it is not compared")
        return
    run.final = answers_of(file, say)
    if run.final is None:
        return
    problems = run.final.problems.values()
    samples = sum(p.samples for p in problems)
    run.accuracy = sum(p.correct for p in problems) / samples if samples else None


def answers_of(file: ResponseFile, say: Say) -> Answers | None:
    """Return the graded responses of a file by problem; None, after a report to `say`, if none can be used."""
    try:
        rows = each_line(file.path, _wrong, say, without_ids)
        correct: dict[str, list[int]] = {}
        texts: dict[str, tuple[str, Mapping[str, Any]]] = {}  # problem -> question and facts
        categories = dict.fromkeys(CATEGORY_TEXTS, 0)
        for _, row in rows:
            right = row["outcome"] == "correct"
            correct.setdefault(row["problem_id"], []).append(right)
            facts = row.get("facts")
            texts.setdefault(row["problem_id"], (row["question"], facts if isinstance(facts, dict) else {}))
            well_formed = float(row.get("format_reward") or 0.0) > 0
            categories["correct" if right else "format1_wrong" if well_formed else "format0"] += 1
    except ConfigError as error:
        say(str(error))
        return None
    if not correct:
        say(f"{file.path} holds no response that can be used: its run is not compared")
        return None
    problems = {name: GradedProblem(sum(right), len(right), *texts[name]) for name, right in correct.items()}
    return Answers(problems, file.step, categories)


def _wrong(row: dict[str, Any]) -> str:
    for name in ("problem_id", "question", "outcome"):
        if not isinstance(row.get(name), str):
            return f"no usable '{name}'"
    if number(row.get("format_reward") or 0.0) is None:
        return "no usable 'format_reward'"
    return ""


def without_ids(line: bytes) -> bytes:
    r"""Strip token ids and log-probabilities from a line of responses: they are most of it and not needed.

    Inside a JSON string every quote has a backslash before it, so these bytes can only be the name of a field.

    >>> without_ids(b'{"response": ", \\"prompt_ids\\": [", "prompt_ids": [1], "token_ids": [2]}\n')
    b'{"response": ", \\"prompt_ids\\": ["}\n'
    """
    head, separator, rest = line.rpartition(b', "prompt_ids": [')
    complete = rest.rstrip().endswith((b"]}", b"}"))
    return head + b"}\n" if separator and complete else line


def question_of(sweep: str, axes: Sequence[str]) -> str:
    """Return the question of the sweep of this name.

    It is the first question in the comment of its file in `multirun_sweeps/`, else that comment's first sentence; a
    sweep without a file gets a question about its keys.

    >>> question_of("mine", ["learning_rate"]), question_of("mine", [])
    ('Which learning_rate?', 'How do these runs compare?')
    >>> question_of("grpo_prompt_ablation", ["prompt"])
    'The r1_zero prompt against the bare question'
    """
    file = resource_dir("multirun_sweeps") / f"{sweep}.yaml"
    if re.fullmatch(r"[\w-]+", sweep) and file.is_file() and (question := first_question(file.read_text("utf-8"))):
        return question
    return f"Which {' and '.join(axes)}?" if axes else "How do these runs compare?"


def first_question(text: str) -> str:
    """Return the first question of a file's opening comment, or else its first sentence after the first colon.

    >>> first_question("# CS336, lr: which rate is\\n# best? And why?\\na: 1")
    'Which rate is best?'
    """
    comment = " ".join(line[1:].strip() for line in takewhile(lambda line: line[:1] == "#", text.splitlines()))
    match = re.search(r"(?:[^.?]*?:)?\s*([^.?:]*\?)", comment) or re.search(r"(?:[^.:]*:)?\s*([^.:]{9,})", comment)
    return "" if match is None else match[1][:1].upper() + match[1][1:].strip()


#: Differences in these do not make two settings of two runs.
NO_SETTING = (*SAME_FIGURES, "seed", "eval_every", "save_model", "profile", "monitors", "hydra")
MOST_KEYS = 4  # runs without a sweep that differ in more are named by their folders


@dataclass(slots=True)
class ReportInput:
    """The runs of one argument, and their sweep, if any."""

    path: Path
    runs: list[StudyRun]
    state: SweepState | None = None
    part: bool = False  # one setting of that sweep
    problems: list[str] = field(default_factory=list)  # broken parts, a line each
    picked: int = 0  # the number of settings of its sweep, if this one was the best of them


def read_study(folders: Sequence[Path], say: Say = lambda _: None) -> Study:
    """Read all arguments into one study: runs, sweeps, settings of sweeps (SWEEP/KEY=VALUE).

    `say` gets a line for whatever is broken, also in `Study.problems`. `ConfigError` if nothing was found.
    """
    return study_of([read_given(folder, say) for folder in folders])


def read_given(path: Path, say: Say = lambda _: None) -> ReportInput:
    """Read the runs of one argument; `ConfigError` if it is none of these."""
    problems: list[str] = []

    def note(text: str) -> None:
        if text not in problems:
            problems.append(text)
            say(text)

    if not path.is_dir():
        sweep = path.parent
        if "=" not in path.name or not sweep.is_dir() or not ((sweep / FILE).exists() or runs_in(sweep)):
            what = "is no folder" if path.exists() else "is not there"
            raise ConfigError(f"RUNS={path} {what}: give the folder of a run or of a sweep, as printed at its start")
        state = read_state(sweep, note)
        everyone = state.runs
        state.runs = [run for run in everyone if set(path.name.split(",")) <= set(run.name.split(","))]
        if not state.runs:
            names = few([run.name for run in everyone], 3)
            raise ConfigError(f"RUNS={path}: no run of {sweep} has {path.name}: its runs are {names}")
        runs, best_of = _runs_of(sweep, state, note), picked(state.runs, everyone)
        return ReportInput(path, runs, state, part=True, problems=problems, picked=best_of)
    if (path / CONFIG).exists() or ((path / STATUS).exists() and not runs_in(path)):
        try:
            in_sweep = read_state(path.parent, lambda _: None).run(path.name) if (path.parent / FILE).exists() else None
        except (ConfigError, KeyError):
            in_sweep = None
        return ReportInput(path, [read_run(path, (), None, in_sweep, note)], problems=problems)
    if (path / FILE).exists() or runs_in(path):
        state = read_state(path, note)
        return ReportInput(path, _runs_of(path, state, note), state, problems=problems)
    if inner := sorted(file.parent.name for file in path.glob(f"*/{FILE}")):
        each = "as each asks a question of its own"
        raise ConfigError(f"RUNS={path} holds the sweeps {few(inner)}: give one of them, {each}")
    raise ConfigError(f"RUNS={path} holds no run: give the folder of a run or of a sweep, as printed at its start")


def _runs_of(path: Path, state: SweepState, note: Say) -> list[StudyRun]:
    return [read_run(path / run.name, run.key, run.seed, run, note) for run in state.runs]


def study_of(given: Sequence[ReportInput]) -> Study:
    """Return one study of the inputs; settings are distinguished by what was swept, or by differences of their configs.

    The reference is that of the first whole sweep, else the first setting given.
    """
    first = given[0]
    whole = [one for one in given if one.state is not None]
    if len(given) == 1 and first.state is not None:
        groups = _by_key(first.runs)
    elif whole and len(whole) == len(given) and _one_sweep(whole):
        groups = _by_key([run for one in given for run in one.runs])
    else:
        groups = _by_config([run for one in given for run in one.runs])
    for key, runs in groups.items():
        for run in runs:
            run.setting = key
    settings = [Setting(key, "", sorted(runs, key=lambda run: run.seed)) for key, runs in groups.items()]
    state = first.state
    axes = list(dict.fromkeys(key for setting in settings for key, _ in setting.key))
    if state is not None:
        name, sweep = state.name, state.requested
    else:
        name = first.path.resolve().name
        sweep = str(first.runs[0].provenance.get("sweep") or name) if first.runs else name
    study = Study(
        name,
        question_of(sweep, axes),
        axes,
        settings,
        on_purpose=list(purposes(state.axes)) if state is not None and _one_sweep(given) else [],
        problems=list(dict.fromkeys(line for one in given for line in one.problems)),
        notes=[
            f"{one.path.name} was the best of {one.picked} settings on these problems: if it is compared for that, its "
            "lead is flattered. Fresh seeds would settle it; the whole sweep, given alone, is corrected for all its "
            "settings."
            for one in given
            if one.picked
        ],
        carried=[one for each in whole if each.state for one in each.state.carried],
        command=state.command if state is not None else "",
        folders=[one.path for one in given],
    )
    if not study.runs:
        raise ConfigError(f"RUNS={first.path} holds no run: give the folder of a run or of a sweep")
    for one in given:
        for setting in settings:
            if one.picked and one.runs[0] in setting.runs:
                setting.best_of = one.picked
    _put_reference_first(study, None if first.part else state)
    labels = labels_of([setting.key for setting in study.settings])
    for setting, label in zip(study.settings, labels, strict=True):
        setting.label = label
    for setting in study.settings:
        first_run: dict[int, StudyRun] = {}
        for run in setting.runs:
            if (earlier := first_run.setdefault(run.seed, run)) is not run:
                same = f"{earlier.folder} has the same setting and seed {run.seed}"
                study.problems.append(f"{run.folder} is left out: {same}")
        setting.runs = list(first_run.values())
    return study


def _one_sweep(given: Sequence[ReportInput]) -> bool:
    """Return whether all inputs are of one sweep."""
    return len({one.path.parent if one.part else one.path for one in given}) == 1 and all(one.state for one in given)


def _by_key(runs: Sequence[StudyRun]) -> dict[Key, list[StudyRun]]:
    groups: dict[Key, list[StudyRun]] = {}
    for run in runs:
        groups.setdefault(run.setting, []).append(run)
    return groups


def _by_config(runs: Sequence[StudyRun]) -> dict[Key, list[StudyRun]]:
    """Group runs by what differs between their configs; by folder if config and seed are the same."""
    differing = differing_keys([run.settings for run in runs if run.settings])
    if len(differing) > MOST_KEYS:
        return _by_name(runs)
    groups: dict[Key, list[StudyRun]] = {}
    for run in runs:
        key = tuple((name, setting_text(run.settings.get(name))) for name in differing) if run.settings else ()
        groups.setdefault(key or run.setting, []).append(run)
    twice = any(len({run.seed for run in group}) < len(group) for group in groups.values())  # a setting and seed
    return _by_name(runs) if twice else groups


def _by_name(runs: Sequence[StudyRun]) -> dict[Key, list[StudyRun]]:
    """Group runs by the names of their folders without the seed, and by the parent folders if those are equal."""
    by_name: dict[str, list[StudyRun]] = {}
    for run in runs:
        parts = [part for part in run.name.split(",") if not part.startswith("seed=")]
        by_name.setdefault(",".join(parts) or run.folder.parent.name, []).append(run)
    groups: dict[Key, list[StudyRun]] = {}
    for name, group in by_name.items():
        several = len({run.folder.parent for run in group}) > 1
        for run in group:
            full_name = f"{run.folder.parent.name}/{name}" if several else name
            groups.setdefault((("run", full_name),), []).append(run)
    return groups


def differing_keys(configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the settings in which configs differ, except the seed and what changes no figure.

    >>> differing_keys([{"seed": 0, "lr": 1, "n": 2, "threads": 1}, {"seed": 1, "lr": 1, "n": 3, "threads": 2}])
    ['n']
    """
    names = dict.fromkeys(name for config in configs for name in config)
    return [
        name
        for name in names
        if not any(name == skip or name.startswith(f"{skip}.") for skip in NO_SETTING)
        and len({setting_text(config.get(name)) for config in configs}) > 1
    ]


def _put_reference_first(study: Study, state: SweepState | None) -> None:
    """Move the sweep's reference, which may name fewer keys than a setting has, to the front."""
    named = state.reference if state is not None else None
    if named is None:
        return
    matches = [one for one in study.settings if dict(one.key) == named]
    matches = matches or [one for one in study.settings if named.items() <= dict(one.key).items()]
    if len(matches) != 1:
        study.notes.append(
            f"{'Several settings have' if matches else 'No setting is'} the sweep's reference "
            f"({' '.join(f'{key}={value}' for key, value in named.items())}): the first one stands for it."
        )
    if matches:
        study.settings.sort(key=lambda one: one is not matches[0])
