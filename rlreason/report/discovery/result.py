"""What runs ended with: the score, the program's hash and how to check it again; and how they got there, in a line."""

import hashlib
import json
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rlreason.records.files import PROGRAM
from rlreason.report.discovery.log import Log, Result
from rlreason.report.discovery.settings import Setting
from rlreason.report.discovery.texts import counted, figure, listed, name_in, said, table, whole

MOST_BYTES = 1 << 24  # of a program
DEFAULT_PROBLEM = "kissing_11"  # of `rlreason score`, which needs no word for it


def progress(settings: Sequence[Setting]) -> str:
    """The initial and the final score, and in how many calls."""
    logs = [log for setting in settings for log in setting.logs]
    starts = listed(sorted({figure(log.start.score) for log in logs}))
    if len(logs) > 1:
        finals = sorted(log.best.score for log in logs)
        calls = counted(sum(log.calls for log in logs), "call")
        return (
            f"{counted(len(logs), 'run')} of {counted(len(settings), 'setting')} began at {starts} and stand at "
            f"{figure(finals[0])} to {figure(finals[-1])}, after {calls} in all."
        )
    log = logs[0]
    valid = sum(turn.is_valid for turn in log.turns)
    text = (
        f"The score went from {starts} ({said(name_in(log.start.program), 60)}) to {figure(log.best.score)} in "
        f"{counted(log.calls, 'call')}, of which {log.answered:,} gave a reply and {valid:,} a valid set."
    )
    xs, bests = log.curve()
    if bests[-1] > bests[0]:
        text += f" The best set came with call {xs[bests.index(bests[-1])]:,}."
    if bests[-1] != log.best.score:
        text += f" The verdicts in the log give {figure(bests[-1])} instead: do not trust it."
    return text + ("" if log.ended is not None else " The run has not ended.")


def of_one_run(log: Log) -> list[str]:
    """Score, hash, figures of the set, how to check it, and what is wrong with a set that is not valid."""
    result = log.best_turn.result if log.best_turn else log.start.result
    whose = f"the program of turn {log.best.turn}" if log.best_turn else "the program that the run began with"
    lines = [f"**{figure(log.best.score)} {said(log.unit, 40)}**, by {whose}. {_file(log)}"]
    if told := _of_set(result):
        lines[0] += f" In its set {told}."
    lines += invalid(result)
    return [*lines, "", "Check it again, RUN being the folder of this report:", "", *command(log, "RUN")]


def of_several(settings: Sequence[Setting]) -> list[str]:
    """The largest set of each setting, said to be the best of so many runs."""
    rows = []
    for setting in settings:
        log = max(setting.logs, key=lambda one: one.best.score)
        runs, sha = len(setting.logs), hash_word(log.best.program_sha256)
        rows.append([said(setting.label), figure(log.best.score), str(runs), said(name_of(log)), sha])
    head = ["setting", "its largest set", "of so many runs", "run", "SHA-256 of its program"]
    best = max((log for setting in settings for log in setting.logs), key=lambda one: one.best.score)
    result = best.best_turn.result if best.best_turn else best.start.result
    told = f" In the largest of all {told}." if (told := _of_set(result)) else ""
    return [
        *table(head, rows, frozenset({1, 2})),
        "",
        f"The largest of several runs says more of their number than of a setting: see Seeds.{told} Check one again, "
        "RUN being its folder:",
        "",
        *command(best, "RUN"),
    ]


def command(log: Log, run: str) -> list[str]:
    """The command that scores a run's program again, in a fence."""
    is_shipped = re.fullmatch(r"[a-z0-9_]+", log.problem) is not None  # else it is somebody's folder
    problem = "" if log.problem == DEFAULT_PROBLEM else f" --problem {log.problem if is_shipped else 'FOLDER'}"
    told = [] if is_shipped else ["", "FOLDER is that of the problem."]
    return ["```bash", f"rlreason score {run}/{PROGRAM}{problem}", "```", *told]


def name_of(log: Log) -> str:
    """The name of a run's folder."""
    return log.folder.resolve().name


def hash_word(sha256: str | None) -> str:
    """A hash as code; what is none is said to be."""
    return f"`{sha256}`" if sha256 and re.fullmatch(r"[0-9a-f]{64}", sha256) else "not in the log"


def _file(log: Log) -> str:
    """The program's hash, and whether the file in the folder has it."""
    told = f"{PROGRAM} has the SHA-256 {hash_word(log.best.program_sha256)}."
    found = _sha256(log.folder / PROGRAM)
    if found is None:
        return f"{told} There is no readable {PROGRAM} in the folder."
    return (
        told if found == log.best.program_sha256 else f"{told} **The file in the folder has another one**, `{found}`."
    )


def _sha256(path: Path) -> str | None:
    with suppress(OSError):
        if path.is_file() and path.stat().st_size <= MOST_BYTES:
            return hashlib.sha256(path.read_bytes()).hexdigest()
    return None


def _of_set(result: Result | None) -> str:
    """The largest squared norm and the smallest squared distance of a set, where the verifier tells them."""
    told = []
    if result and result.max_squared_norm is not None:
        told.append(f"the largest squared norm is {whole(result.max_squared_norm)}")
    if result and result.min_squared_distance is not None:
        told.append(f"the smallest squared distance is {whole(result.min_squared_distance)}")
    return listed(told)


def invalid(result: Result | None) -> list[str]:
    """Why a set is not valid, with its worst pair; [] for one that is, and for one without a verdict."""
    if result is None or (result.validity == 1 and result.alarm is None):
        return []
    lines = [
        "",
        f"It is not valid: {said(result.alarm or result.error or result.error_kind or 'no reason given', 400)}",
    ]
    if result.worst_pair is not None:
        lines += ["", f"The worst pair: {said(json.dumps(result.worst_pair), 400)}"]
    return lines
