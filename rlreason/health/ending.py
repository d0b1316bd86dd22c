"""How a run stands or ended, told from its status, its lock and the logs that it left."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlreason.config.monitors import WEIGHTS, monitor_of, settings_of
from rlreason.health.finding import Finding
from rlreason.monitors.table import MONITORS
from rlreason.records.files import CONFIG, ENGINE_LOG, HYDRA, METRICS, STACKS
from rlreason.records.reader import RunFolder, setting_in
from rlreason.records.status import how_it_ended
from rlreason.runtime.lock import holder, sign_of_life
from rlreason.runtime.stderr_log import NAME as LOG
from rlreason.runtime.text import duration

LINES = 4  # of a log that are quoted
SILENT_S = 3600.0  # without a sign of life; waits.run_s where the run has one
ENDED = "ended:"  # and the rule: what the monitors do not find again, as an evaluation that was not recorded
RESUME = "go on from its newest checkpoint (resume=RUN)"
MEMORY = (
    "the run needs more memory than this machine has free",
    "ask rlreason plan with the run's words for its memory and the settings that fit",
)
#: The beginning of a reason, or a part of it -> (the commonest cause, what to try).
KNOWN = {
    "does not hold the trainer's weights": (
        "a weight sync reached only some tensors, or vLLM computes in another precision",
        f"read {ENGINE_LOG} in the folder; choose rollout=hf, or model.dtype=float32, to see whether it goes away",
    ),
    "out of memory": MEMORY,
    "can't allocate memory": MEMORY,
    "No space left": ("the disk is full", "free some space, or choose another hydra.run.dir; then resume=RUN"),
    "CUDA error": ("an earlier kernel failed, or the driver does not fit torch", "ask rlreason doctor"),
    "vLLM": ("the engine failed", "read its log in the folder, and ask rlreason doctor rollout=vllm"),
}


def how_it_stands(folder: RunFolder, done: int, settings: dict[str, Any]) -> tuple[str, list[Finding]]:
    """(how the run stands in a sentence, what is wrong with that). `done`: the steps that its metrics have."""
    status, ended = folder.status, how_it_ended(folder.path)
    reached = _reached(done, settings)
    if status in (None, "running") and (by := holder(folder.path)):
        return f"under way in {by}{reached}", [*_silent(folder, settings), *_waits(folder)]
    if status is None and not any((folder.path / name).exists() for name in (CONFIG, HYDRA)):
        return f"a copy of its metrics, which does not say how it ended{reached}", []
    if status in (None, "running"):
        return f"broken off without a word{reached}", [_killed(folder, status), *_waits(folder)]
    word, _, rule = status.partition(":")
    reason = ended.get("reason", "")
    if word in ("finished", "budget", "stopped", "diverged"):
        stands = f"{word}{f' by the rule {rule}' if rule else ''}{reached}"
        asked = word in ("stopped", "diverged") and rule != "dominated"
        return stands, [_ended_by_rule(rule, reason)] if asked else [*_lost_rows(folder, done), *_waits(folder)]
    return f"{word}{reached}", [_failed(folder, word, reason), *_waits(folder)]


def _reached(done: int, settings: dict[str, Any]) -> str:
    planned = settings.get("n_steps") or settings.get("n_ei_steps")
    return f", {done} of {planned} steps done" if isinstance(planned, int) else f", {done} steps done" * (done > 0)


def _ended_by_rule(rule: str, reason: str) -> Finding:
    known, settings = MONITORS.get(monitor_of(rule)), settings_of(rule)
    again = f"resume=RUN {settings[0]}=warn goes on without it" if settings else "start anew"
    causes = known.causes if known else MONITORS["nan"].causes if rule == WEIGHTS else ""
    cure = f"mend what it says; {again}"
    return Finding(f"{ENDED}{rule}", f"a monitor ended the run: {reason or rule}", causes=causes, cure=cure)


def _silent(folder: RunFolder, settings: Mapping[str, Any]) -> Iterator[Finding]:
    """A run that is under way and has shown no sign of life for as long as a sweep would wait for one."""
    shown, limit = sign_of_life(folder.path), setting_in(settings, "waits.run_s")
    silent = 0.0 if shown is None else time.time() - shown / 1e9
    if silent > (limit if isinstance(limit, int | float) else SILENT_S):
        causes = "It was stopped (Ctrl-Z), or waits for an engine, a grader or a file system that answers no more."
        cure = f"look at its process and at {STACKS}; end it, and resume=RUN"
        yield Finding("silent", f"the run has shown no sign of life for {duration(silent)}", (), causes, cure)


def _lost_rows(folder: RunFolder, done: int) -> Iterator[Finding]:
    """An ended run whose summary knows more steps than its metrics."""
    taken = (folder.summary or {}).get("rollout_step")
    if isinstance(taken, int) and done < taken:
        what = f"its metrics end at step {done}, and it took {taken}: {METRICS} was cut, removed or replaced"
        yield Finding("lost_metrics", what, cure="look for a copy; what is left was examined")


def _killed(folder: RunFolder, status: str | None) -> Finding:
    left = "its status still says running, and no process writes there" if status else "it left no status"
    causes = "A process that the system ended for memory, a machine that went down, kill -9, or a job's time limit."
    quoted = _quoted(folder.tail(LOG, LINES), LOG)
    cure = f"{RESUME}; rlreason doctor has a memory plan" if folder.metrics else "start it again"
    return Finding("killed", f"the run was killed: {left}", quoted, causes, cure)


def _failed(folder: RunFolder, word: str, reason: str) -> Finding:
    if word == "interrupted":
        what = f"the run was interrupted{f' {reason}' if reason else ''}"
        cure = RESUME if folder.metrics else "start it again"
        return Finding("interrupted", what, (), "A signal: Ctrl-C, or a job's time limit.", cure, problem=False)
    causes, cure = next(
        (pair for words, pair in KNOWN.items() if words.lower() in reason.lower()),
        ("", "read the traceback on the terminal or in the log"),
    )
    evidence = [*_quoted(folder.tail(LOG, LINES), LOG), *_quoted(folder.tail(ENGINE_LOG, LINES), ENGINE_LOG)]
    return Finding("failed", f"the run failed: {reason or 'it does not say why'}", evidence, causes, cure)


def _waits(folder: RunFolder) -> Iterator[Finding]:
    if stacks := folder.tail(STACKS, 1):
        causes = "A grader, an engine or a file system that did not answer for a long time."
        cure = f"read {STACKS}: what every process did meanwhile; the limits are the settings waits.*"
        yield Finding("waited", "a part of the run was waited for too long", [f"{STACKS}: {stacks[0]}"], causes, cure)


def _quoted(lines: list[str], name: str) -> list[str]:
    return [f"{name}: {line}" for line in lines]
