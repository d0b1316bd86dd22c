"""Decide whether a run resumes what an interrupted one left in its folder, and with which settings."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.algorithms import DISCOVERY_BUDGETS
from rlreason.config.groups import settings_of
from rlreason.config.leaves import below, flat
from rlreason.config.training import BUDGETS, raised
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


def resumes_job(folder: Path, config: str) -> bool:
    """Whether a job with this config resumes the interrupted one in the folder, which has the same algorithm.

    `ConfigError` where other settings differ: it was probably meant to resume, and its responses must not be mixed
    with others.
    """
    before, now = settings_in(folder), flat_text(config)
    if not before or not (folder / UNFINISHED).exists() or before.get("algorithm") != now.get("algorithm"):
        return False
    refuse_changed(folder, before, now, HARMLESS)
    return True


def refuse_changed(folder: Path, before: dict[str, Any], now: dict[str, Any], allowed: tuple[str, ...]) -> None:
    """`ConfigError` where other settings than the allowed ones differ from those of the run in the folder."""
    if different := changed(before, now, allowed):
        kind = "a finished run" if (folder / SUMMARY).exists() else "an interrupted run"
        raise ConfigError(
            f"hydra.run.dir={folder} holds {kind} with other settings ({different}): type its command again to go on "
            f"with it (resume={folder}), or choose another folder"
        )


def checkpoint_to_resume(folder: Path, config: str, say: Callable[[str], object]) -> Path | None:
    """Return the checkpoint from which a training run with this config resumes; None: it begins anew.

    A run that has ended resumes with more steps, a larger budget, or another setting of the monitor that stopped it.
    `ConfigError` where the folder has a run with other settings, except for `MAY_CHANGE`, or one with nothing left to
    do.
    """
    if not (folder / CONFIG).exists() or not checkpoints_in(folder):
        return None
    before, now = settings_in(folder), flat_text(config)
    refuse_other_run(folder, config)
    checkpoint = newest_good(folder, say)
    if checkpoint is None:
        return None
    if before.get("n_steps") != now.get("n_steps") and now.get("lr_schedule", "constant") != "constant":
        say(
            f"! n_steps={now.get('n_steps')} with lr_schedule={now['lr_schedule']}: so far the rate fell towards step "
            f"{before.get('n_steps')}, and from here on it falls towards the new end"
        )
    state = read_state(checkpoint)
    if (folder / SUMMARY).exists() and state["parts"]["counters"]["train_step"] and not moments_in(checkpoint):
        say(
            f"! {checkpoint.name} is of a finished run that kept no moments of its optimizer "
            "(checkpoint.keep_final=false): it goes on with new ones, not as a run of so many steps from the start"
        )
    if (steps := now.get("n_steps")) and state["step"] > steps:
        raise ConfigError(
            f"n_steps={steps}: the run in {folder} has come to step {state['step']}: give it at least so many"
        )
    return checkpoint


def refuse_other_run(folder: Path, config: str) -> None:
    """`ConfigError` where the folder has another training run, or one with nothing left to do."""
    if not (folder / CONFIG).exists():
        return
    before, now = settings_in(folder), flat_text(config)  # a damaged config differs in everything
    refuse_changed(folder, before, now, MAY_CHANGE)
    if (folder / SUMMARY).exists() and not _has_more_to_do(folder, before, now):
        more = f", or type resume={folder} {key}" if (key := _how_to_resume(folder, before)) else ""
        ended = _final_status(folder) or "failed"
        raise ConfigError(
            f"hydra.run.dir={folder} holds a finished run, which ended as {ended}: choose another folder{more}"
        )


def _has_more_to_do(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a run that ended by itself can resume, because the setting that ended it has changed."""
    kind, _, rule = _final_status(folder).partition(":")
    if kind == "budget":
        return raised(below(before, "budget."), below(now, "budget."))
    if kind in ("stopped", "diverged"):
        return any(key in before and before[key] != now.get(key) for key in settings_of(rule))
    old, new = before.get("n_steps"), now.get("n_steps")
    return kind == "finished" and isinstance(old, int) and isinstance(new, int) and new > old


def _how_to_resume(folder: Path, before: Mapping[str, Any]) -> str:
    """Return the setting with which a run that has ended would resume; "" where there is none."""
    kind, _, rule = _final_status(folder).partition(":")
    if kind == "budget":
        spent = [f"budget.{name}=MORE" for name in BUDGETS if before.get(f"budget.{name}") is not None]
        return spent[0] if spent else "budget.hours=MORE"
    if keys := settings_of(rule):
        return f"{keys[0]}=warn"
    return "n_steps=MORE" if kind == "finished" and before.get("n_steps") is not None else ""


def _final_status(folder: Path) -> str:
    """Return the status in a run's summary, and not in its status file, which a killed start may have overwritten."""
    return str((RunFolder(folder).summary or {}).get("status", ""))


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


def changed(old: dict[str, Any], new: dict[str, Any], allowed: tuple[str, ...] = HARMLESS) -> str:
    """Return the settings in which two configs differ, as text, three at most; empty where only `allowed` ones do.

    >>> changed({"seed": 0, "sampling.max_tokens": 48}, {"seed": 0, "sampling.max_tokens": 64})
    'sampling.max_tokens=48 there, 64 here'
    >>> changed({"logger.mode": None}, {"logger.mode": "offline"}, ("logger",))
    ''
    """
    keys = [
        key
        for key in dict.fromkeys((*old, *new))
        if old.get(key) != new.get(key) and not any(key == name or key.startswith(f"{name}.") for name in allowed)
    ]
    return few([f"{key}={old.get(key, 'not set')} there, {new.get(key, 'not set')} here" for key in keys], 3)


def settings_changed(old: str, new: str, allowed: tuple[str, ...] = HARMLESS) -> str:
    """Return the same for two configs as YAML texts.

    >>> settings_changed("loss: {beta: 0.1}", "loss: {beta: 0.2}")
    'loss.beta=0.1 there, 0.2 here'
    """
    return changed(flat_text(old), flat_text(new), allowed)


def settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of the run in a folder by their dotted names; {} where there is none."""
    path = folder / CONFIG
    return flat_text(path.read_text(encoding="utf-8", errors="replace")) if path.exists() else {}


def flat_text(config: str) -> dict[str, Any]:
    """Return the settings of a YAML text by their dotted names; {} where it is no config."""
    try:
        settings = yaml.safe_load(config)
    except yaml.YAMLError:
        return {}
    return flat(settings) if isinstance(settings, dict) else {}


#: Settings that may differ when a run of discovery resumes: its budget, where the same model is served, its waits.
DISCOVERY_MAY_CHANGE = (
    "budget", "waits", "client.base_url", "client.env_variable", "client.timeout_s", "client.retries", "client.pause_s",
    "client.max_tokens", "client.extra", "client.prompt_price", "client.completion_price", "score.workers",
)  # fmt: skip


def resumes_discovery(folder: Path, config: str) -> bool:
    """Whether a run with this config resumes the one in the folder; a finished one only with a larger budget.

    `ConfigError` where the folder has one with other settings, or one with nothing left to do.
    """
    before, now = settings_in(folder), flat_text(config)
    if now.get("algorithm") != "discover" or not before or not (folder / CALLS).exists():
        return False
    refuse_changed(folder, before, now, DISCOVERY_MAY_CHANGE)
    if not (folder / SUMMARY).exists():
        return True
    if not raised(below(before, "budget."), below(now, "budget."), DISCOVERY_BUDGETS):
        spent = [name for name in DISCOVERY_BUDGETS if before.get(f"budget.{name}") is not None]
        raise ConfigError(
            f"hydra.run.dir={folder} holds a finished run that has spent its budget: choose another folder, or type "
            f"resume={folder} budget.{[*spent, 'calls'][0]}=MORE"
        )
    return True
