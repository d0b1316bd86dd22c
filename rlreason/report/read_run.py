"""Read one run's folder for a report: its curves, its first and its last evaluation, and how it ended."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from rlreason.config.leaves import flat
from rlreason.errors import ConfigError
from rlreason.evaluation.tables import CATEGORIES
from rlreason.health.examine import course_of
from rlreason.health.grading import lost_grades
from rlreason.monitors.replay import as_numbers
from rlreason.records.files import METRICS, RESPONSES, ResponseFile
from rlreason.records.lines import each_line
from rlreason.records.reader import RunFolder
from rlreason.records.status import how_it_ended, read_status
from rlreason.report.study import AXES, RUNNING, Answers, Problem, Run, Series
from rlreason.runtime.json_fields import LARGEST, number
from rlreason.runtime.lock import holder
from rlreason.sweeps.design import Key
from rlreason.sweeps.state import KILLED, WAITING, RunState

#: What a report draws or counts of `metrics.jsonl`, by the beginnings of the names.
READ = ("eval/", "final/", "reward/", "rollout/", "train/", "time/", "ei/", "sft/", "grading/", "memory/")
_ALIAS = re.compile(r"(?:^|[\s\[{,:-])\*\w", re.MULTILINE)
MOST_SETTINGS = 5000  # of a run's config; what has more is none
Say = Callable[[str], None]


def read_run(folder: Path, setting: Key, seed: int | None, state: RunState | None, say: Say) -> Run:
    """One run; what is broken in its folder is told to `say`, a line each, and left out.

    `state`: what its sweep knows of it. A run that is still under way has no final evaluation.
    """
    status, reason = _status(folder, state)
    run = Run(folder, folder.name, setting, seed or 0, status, reason)
    if state is not None:
        run.shared_machine, run.seconds = state.shared_machine, state.seconds
    if not folder.is_dir():
        return run
    try:
        reader = RunFolder(folder, say)
        run.settings = settings_of(reader)
    except ConfigError as error:
        say(str(error))
        return _unreadable(run, str(error))
    run.seed = int(run.settings.get("seed") or 0) if seed is None else seed
    run.provenance, run.summary = reader.provenance, reader.summary or {}
    steps = run.settings.get("n_steps") or run.settings.get("n_ei_steps")
    run.planned_steps = steps if isinstance(steps, int) else None
    run.series, run.totals = _series(reader, say)
    if run.series:
        rows = as_numbers(reader.metrics)
        run.findings = [*course_of(rows, reader.settings, run.status), *lost_grades(rows, reader.incidents)]
    run.seconds = number(run.summary.get("seconds")) if run.seconds is None else run.seconds
    protocol = run.summary.get("protocol")
    run.protocol = dict(protocol) if isinstance(protocol, Mapping) else None
    _with_answers(run, reader, say)
    return run


def _unreadable(run: Run, why: str) -> Run:
    if run.status.partition(":")[0] not in (RUNNING, WAITING):
        run.status, run.reason = "failed", f"its folder cannot be read: {why}"
    return run


def _status(folder: Path, state: RunState | None) -> tuple[str, str]:
    """How a run stands: by its sweep, else by its own folder."""
    if state is not None:
        return state.status, state.reason
    status = read_status(folder)
    if status is None:
        begun = (folder / METRICS).is_file()
        return ("interrupted", "it left no status") if begun else (WAITING, "")
    if status == RUNNING and holder(folder) is None:
        return "interrupted", KILLED
    return status, how_it_ended(folder).get("reason", "")


def settings_of(reader: RunFolder) -> dict[str, Any]:
    """Every setting by its dotted name. `ConfigError` for a config that is none, or that names parts of itself.

    Aliases are refused where it is read: a few lines of them can stand for more values than any memory holds.
    """
    text = reader.config
    if _ALIAS.search(text):
        try:
            aliased = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader))
        except yaml.YAMLError:
            aliased = False  # `settings` says what is wrong
        if aliased:
            raise ConfigError(f"{reader.path} has a config.yaml with aliases, which no run writes: leave this run out")
    found = flat(reader.settings)
    if len(found) > MOST_SETTINGS:
        raise ConfigError(f"{reader.path} has a config.yaml of {len(found)} settings, which no run has: leave it out")
    return found


def _series(reader: RunFolder, say: Say) -> tuple[dict[str, Series], dict[str, float]]:
    """The curves of a run's metrics, and where each counter ended."""
    try:
        rows = reader.metrics
    except ConfigError as error:
        say(str(error))
        return {}, {}
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(READ))
    counters = {axis: _column(rows, name) for axis, name in AXES.items()}
    found = {}
    for name in names:
        values = _column(rows, name)
        kept = np.isfinite(values)
        if kept.any():
            x = {axis: at[kept] for axis, at in counters.items() if np.isfinite(at[kept]).all()}
            found[name] = Series(x, values[kept])
    totals = {axis: float(at[np.isfinite(at)][-1]) for axis, at in counters.items() if np.isfinite(at).any()}
    return found, totals


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> Any:
    """One metric of all rows; NaN where a row has none, or one too large to be drawn."""
    values = (row.get(name) for row in rows)
    drawn = (math.nan if value is None or not abs(value) < LARGEST else float(value) for value in values)
    return np.fromiter(drawn, np.float64)


def _with_answers(run: Run, reader: RunFolder, say: Say) -> None:
    """Take the first evaluation and the last one, and the accuracy of the last."""
    evaluations = reader.evaluations()
    if evaluations and evaluations[0].step == 0 and (len(evaluations) > 1 or not run.ended):
        run.start = answers_of(evaluations[0], say)
    if run.status.partition(":")[0] in (RUNNING, WAITING):
        return
    file = evaluations[-1] if evaluations else _of_a_job(run.folder)
    if run.ended and run.summary and run.summary.get("accuracy") is None and run.diverged:
        run.accuracy = 0.0  # its weights are no numbers: it can answer nothing
        return
    if file is None:
        if run.ended:
            say(f"{run.folder} has lost the responses of its final evaluation: it is not compared")
        return
    run.final = answers_of(file, say)
    if run.final is None:
        return
    problems = run.final.problems.values()
    of_all = sum(p.samples for p in problems)
    run.accuracy = sum(p.correct for p in problems) / of_all if of_all else None


def _of_a_job(folder: Path) -> ResponseFile | None:
    path = folder / RESPONSES
    return ResponseFile(path, RESPONSES) if path.is_file() else None


def answers_of(file: ResponseFile, say: Say) -> Answers | None:
    """The graded responses of a file by problem; None where none can be used, which is told."""
    try:
        rows = each_line(file.path, _wrong, say, without_ids)
        correct: dict[str, list[int]] = {}
        told: dict[str, tuple[str, Mapping[str, Any]]] = {}
        categories = dict.fromkeys(CATEGORIES, 0)
        for _, row in rows:
            right = row["outcome"] == "correct"
            correct.setdefault(row["problem_id"], []).append(right)
            facts = row.get("facts")
            told.setdefault(row["problem_id"], (row["question"], facts if isinstance(facts, dict) else {}))
            well_formed = float(row.get("format_reward") or 0.0) > 0
            categories["correct" if right else "format1_wrong" if well_formed else "format0"] += 1
    except ConfigError as error:
        say(str(error))
        return None
    if not correct:
        say(f"{file.path} holds no response that can be used: its run is not compared")
        return None
    problems = {name: Problem(sum(right), len(right), *told[name]) for name, right in correct.items()}
    return Answers(problems, file.step, categories)


def _wrong(row: dict[str, Any]) -> str:
    for name in ("problem_id", "question", "outcome"):
        if not isinstance(row.get(name), str):
            return f"no usable '{name}'"
    if number(row.get("format_reward") or 0.0) is None:
        return "no usable 'format_reward'"
    return ""


def without_ids(line: bytes) -> bytes:
    r"""A line of responses without its token ids and log-probabilities, which are most of it and are not needed.

    Within a string of JSON every quote has a backslash before it, so these bytes can only be the name of a field.

    >>> without_ids(b'{"response": ", \\"prompt_ids\\": [", "prompt_ids": [1], "token_ids": [2]}\n')
    b'{"response": ", \\"prompt_ids\\": ["}\n'
    """
    head, found, rest = line.rpartition(b', "prompt_ids": [')
    whole = rest.rstrip().endswith((b"]}", b"}"))
    return head + b"}\n" if found and whole else line
