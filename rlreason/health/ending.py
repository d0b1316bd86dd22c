"""How a run stands or ended, told from its status, its lock and the logs that it left."""

from collections.abc import Iterator
from typing import Any

from rlreason.config.monitors import monitor_of
from rlreason.health.finding import Finding
from rlreason.monitors.table import MONITORS
from rlreason.records.files import CONFIG, ENGINE_LOG, HYDRA, STACKS
from rlreason.records.reader import RunFolder
from rlreason.records.status import how_it_ended
from rlreason.runtime.lock import holder
from rlreason.runtime.stderr_log import NAME as LOG

LINES = 4  # of a log that are quoted
ENDED = "ended:"  # and the rule: what the monitors do not find again, as an evaluation that was not recorded
RESUME = "go on from its newest checkpoint (resume=RUN)"
#: Words in an error -> (the commonest cause, what to try).
KNOWN = {
    "out of memory": (
        "the run needs more memory than this machine has free",
        "ask rlreason doctor with the run's words for a memory plan and the settings that fit",
    ),
    "No space left": ("the disk is full", "free some space, or choose another hydra.run.dir; then resume=RUN"),
    "CUDA error": ("an earlier kernel failed, or the driver does not fit torch", "ask rlreason doctor"),
    "vLLM": ("the engine failed", f"read {ENGINE_LOG} in the folder, and ask rlreason doctor rollout=vllm"),
    "Killed": ("the system ended a process, mostly for memory", "ask rlreason doctor for a memory plan"),
    "wait": ("a part of the run answered no more", f"read {STACKS} in the folder: what every process did then"),
}


def how_it_stands(folder: RunFolder, settings: dict[str, Any]) -> tuple[str, list[Finding]]:
    """(how the run stands in a sentence, what is wrong with that)."""
    status, ended = folder.status, how_it_ended(folder.path)
    reached = _reached(folder, settings)
    if status == "running" and (by := holder(folder.path)):
        return f"under way in {by}{reached}", list(_waits(folder))
    if status is None and not any((folder.path / name).exists() for name in (CONFIG, HYDRA)):
        return f"a copy of its metrics, which does not say how it ended{reached}", []
    if status in (None, "running"):
        return f"broken off without a word{reached}", [_killed(folder, status), *_waits(folder)]
    word, _, rule = status.partition(":")
    reason = ended.get("reason", "")
    if word in ("finished", "budget", "stopped", "diverged"):
        stands = f"{word}{f' by the rule {rule}' if rule else ''}{reached}"
        asked = word in ("stopped", "diverged")
        return stands, [_ended_by_rule(rule, reason)] if asked else list(_waits(folder))
    return f"{word}{reached}", [_failed(folder, word, reason), *_waits(folder)]


def _reached(folder: RunFolder, settings: dict[str, Any]) -> str:
    done = max((int(row.get("rollout_step") or 0) for row in folder.metrics), default=0)
    planned = settings.get("n_steps") or settings.get("n_ei_steps")
    return f", {done} of {planned} steps done" if isinstance(planned, int) else f", {done} steps done" * (done > 0)


def _ended_by_rule(rule: str, reason: str) -> Finding:
    known = MONITORS.get(monitor_of(rule))
    what = f"a monitor ended the run: {reason or rule}"
    cure = f"mend that, then resume=RUN monitors.{monitor_of(rule)}=warn, or start anew with the cure"
    return Finding(f"{ENDED}{rule}", what, causes=known.causes if known else "", cure=cure)


def _killed(folder: RunFolder, status: str | None) -> Finding:
    left = "its status still says running, and no process writes there" if status else "it left no status"
    causes = "A process that the system ended for memory, a machine that went down, kill -9, or a job's time limit."
    quoted = _quoted(folder.tail(LOG, LINES), LOG)
    cure = f"{RESUME}; rlreason doctor has a memory plan" if folder.metrics else "start it again"
    return Finding("killed", f"the run was killed: {left}", quoted, causes, cure)


def _failed(folder: RunFolder, word: str, reason: str) -> Finding:
    if word == "interrupted":
        what = f"the run was interrupted{f': {reason}' if reason else ''}"
        return Finding("interrupted", what, (), "A signal: Ctrl-C, or a job's time limit.", RESUME, problem=False)
    log = [*folder.tail(LOG, LINES), *folder.tail(ENGINE_LOG, LINES)]
    told = "\n".join([reason, *log])
    causes, cure = next(
        (pair for words, pair in KNOWN.items() if words.lower() in told.lower()),
        ("", "read the traceback on the terminal or in the log; what the command says of it has the cure"),
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
