"""Decide whether a run resumes what an interrupted one left in its folder, and with which settings."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.algorithms import DISCOVERY_BUDGETS
from rlreason.config.groups import settings_of
from rlreason.config.leaves import below, flat
from rlreason.config.training import raised
from rlreason.errors import ConfigError
from rlreason.records.files import (
    CALLS,
    CHECKPOINTS,
    CONFIG,
    CURVES,
    EVALS,
    GROWING,
    METRICS,
    MODEL,
    ROLLOUTS,
    SUMMARY,
    UNFINISHED,
    checkpoints_in,
    moments_in,
    newest_good,
    read_state,
    response_files,
)
from rlreason.records.reader import RunFolder
from rlreason.runtime.files import explained, removed, write_whole
from rlreason.runtime.text import few

#: Settings that may differ when an interrupted job resumes: they change its speed, its memory or its output.
HARMLESS = (
    "threads", "log_generations", "micro_batch_tokens", "gpus", "parallel", "rollout.max_rows", "rollout.kv_cache_gb",
    "model.check_memory",
)  # fmt: skip
#: Settings that may differ when a training run resumes, by their names or those of their groups.
MAY_CHANGE = (
    "n_steps", "eval_every", "save_rollouts_every", "save_model", "threads", "log_generations", "profile", "checkpoint",
    "logger", "waits", "monitors", "budget", "rollout.timeout_s", "gpus", "parallel",
    # savings of memory that a plan suggests; the run learns the same except for rounding
    "micro_batch_tokens", "model.gradient_checkpointing", "model.check_memory", "rollout.max_rows", "rollout.sleep",
    "rollout.kv_cache_gb",
)  # fmt: skip
#: Settings that may differ when a run of discovery resumes: its budget, where the same model is served, its waits.
DISCOVERY_MAY_CHANGE = (
    "budget", "waits", "client.base_url", "client.env_variable", "client.timeout_s", "client.retries", "client.pause_s",
    "client.max_tokens", "client.extra", "client.prompt_price", "client.completion_price", "score.workers",
)  # fmt: skip


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in a folder by their dotted names; {} where there is none."""
    return flat(RunFolder(folder).settings) if (folder / CONFIG).exists() else {}


def flat_text(config: str) -> dict[str, Any]:
    """Return the settings of a YAML text by their dotted names."""
    return flat(yaml.safe_load(config))


def changed(old: dict[str, Any], new: dict[str, Any], allowed: tuple[str, ...] = HARMLESS) -> str:
    """Return the settings in which two configs differ, as text; empty where only `allowed` ones do.

    >>> changed({"seed": 0, "sampling.max_tokens": 48}, {"seed": 0, "sampling.max_tokens": 64})
    'sampling.max_tokens=48 there, 64 here'
    >>> changed({"logger.mode": None}, {"logger.mode": "offline"}, ("logger",))
    ''
    """
    keys = [
        key
        for key in {**old, **new}
        if old.get(key) != new.get(key) and not any(key == name or key.startswith(f"{name}.") for name in allowed)
    ]
    return few([f"{key}={old.get(key, 'not set')} there, {new.get(key, 'not set')} here" for key in keys])


def unchanged(folder: Path, config: str, allowed: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the run in the folder and those of a config, flat.

    `ConfigError` where others than the allowed ones differ: it was probably meant to resume, and its records must not
    be mixed with others.
    """
    before, now = settings_in(folder), flat_text(config)
    if different := changed(before, now, allowed):
        kind = "a finished run" if (folder / SUMMARY).exists() else "an interrupted run"
        raise ConfigError(
            f"hydra.run.dir={folder} holds {kind} with other settings ({different}): type its command again to go on "
            f"with it (resume={folder}), or choose another folder"
        )
    return before, now


def resumes_job(folder: Path, config: str) -> bool:
    """Whether a job with this config resumes the interrupted one in the folder, which has the same algorithm.

    `ConfigError` where other settings differ.
    """
    algorithm = flat_text(config).get("algorithm")
    if not (folder / UNFINISHED).exists() or settings_in(folder).get("algorithm") != algorithm:
        return False
    unchanged(folder, config, HARMLESS)
    return True


def resumes_discovery(folder: Path, config: str) -> bool:
    """Whether a run with this config resumes the one in the folder; a finished one only with a larger budget.

    `ConfigError` where the folder has one with other settings, or one with nothing left to do.
    """
    if flat_text(config).get("algorithm") != "discover" or not (folder / CALLS).exists():
        return False
    before, now = unchanged(folder, config, DISCOVERY_MAY_CHANGE)
    if (folder / SUMMARY).exists() and not raised(below(before, "budget."), below(now, "budget."), DISCOVERY_BUDGETS):
        raise ConfigError(
            f"hydra.run.dir={folder} holds a finished run that has spent its budget: choose another folder, or type "
            f"resume={folder} with a larger budget ({', '.join(f'budget.{name}' for name in DISCOVERY_BUDGETS)})"
        )
    return True


def checkpoint_to_resume(folder: Path, config: str, say: Callable[[str], object]) -> Path | None:
    """Return the checkpoint from which a training run with this config resumes; None: it begins anew.

    A run that has ended resumes with more steps, a larger budget, or another setting of the monitor that stopped it.
    `ConfigError` where the folder has a run with other settings, except for `MAY_CHANGE`, or one with nothing left to
    do.
    """
    if not (folder / CONFIG).exists() or not checkpoints_in(folder):
        return None
    refuse_other_run(folder, config)
    checkpoint = newest_good(folder, say)
    if checkpoint is None:
        return None
    before, now, state = settings_in(folder), flat_text(config), read_state(checkpoint)
    if before.get("n_steps") != now.get("n_steps") and now.get("lr_schedule", "constant") != "constant":
        say(f"! so far the learning rate fell towards step {before['n_steps']}, and from here on towards the new end")
    if (folder / SUMMARY).exists() and state["parts"]["counters"]["train_step"] and not moments_in(checkpoint):
        say("! the run goes on with new moments of its optimizer: it kept none (checkpoint.keep_final=false)")
    if (steps := now.get("n_steps")) and state["step"] > steps:
        raise ConfigError(
            f"n_steps={steps}: the run in {folder} has come to step {state['step']}: give it at least so many"
        )
    return checkpoint


def refuse_other_run(folder: Path, config: str) -> None:
    """`ConfigError` where the folder has another training run, or one with nothing left to do."""
    if not (folder / CONFIG).exists():
        return
    before, now = unchanged(folder, config, MAY_CHANGE)
    if not (folder / SUMMARY).exists():
        return
    status = str((RunFolder(folder).summary or {}).get("status", ""))  # a killed start may have changed status.json
    kind, _, rule = status.partition(":")
    if kind == "budget":
        goes_on, by = raised(below(before, "budget."), below(now, "budget.")), "a larger budget"
    elif kind in ("stopped", "diverged"):
        keys = [key for key in settings_of(rule) if key in before]
        goes_on, by = any(before[key] != now.get(key) for key in keys), f"{keys[0]}=warn" if keys else ""
    else:
        goes_on, by = (now.get("n_steps") or 0) > (before.get("n_steps") or 0), "n_steps=MORE"
    if not goes_on:
        more = f", or type resume={folder} with {by}" if by else ""
        raise ConfigError(f"hydra.run.dir={folder} holds a finished run, which ended as {status}: choose another{more}")


def reopen(folder: Path, checkpoint: Path) -> None:
    """Rename the summary of a finished run, so that the run counts as unfinished.

    This comes before any other change, so that the run can resume also if this start is killed.
    """
    if (summary := folder / SUMMARY).exists():
        with explained(summary):
            summary.rename(folder / f"summary_of_{read_state(checkpoint)['step']}_steps.json")


def drop_later(folder: Path, state: Mapping[str, Any]) -> int:
    """Drop what a run recorded after a checkpoint and will record again; return how many rows that were.

    Rows and files of responses of later steps and evaluations go, and so do the later model and curves.
    """
    dropped = 0
    for name in GROWING:
        path = folder / name
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            kept = lines[: state["lines"].get(name, 0)]
            dropped += (len(lines) - len(kept)) * (name == METRICS)
            write_whole(path, b"".join(line for line in kept if line.endswith(b"\n")).decode(errors="replace"))
    evaluated = {evaluation["step"] for evaluation in state["parts"]["validation"]}
    later = [file for file in response_files(folder, ROLLOUTS) if (file.step or 0) > state["step"]]
    later += [file for file in response_files(folder, EVALS) if file.update or file.step not in evaluated]
    unfinished = [path for kind in (CHECKPOINTS, ROLLOUTS, EVALS) for path in (folder / kind).glob("*.partial")]
    with explained(folder):
        for path in (*(file.path for file in later), *unfinished, folder / MODEL, folder / CURVES):
            removed(path)
    return dropped


def drop_behind(checkpoint: Path) -> None:
    """Remove the checkpoints that are newer than this one, which could not be used and will be written again."""
    with explained(checkpoint):
        for path in checkpoints_in(checkpoint.parents[1])[::-1]:
            if path == checkpoint:
                break
            removed(path)
