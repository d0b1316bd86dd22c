"""Decide whether a run resumes what an interrupted one left in its folder, and with which settings."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.groups import settings_of
from rlreason.config.leaves import flat
from rlreason.errors import ConfigError
from rlreason.records.files import (
    CALLS,
    CONTENTS,
    CURVES,
    EVALS,
    GROWING,
    METRICS,
    MODEL,
    PROVENANCE,
    ROLLOUTS,
    STATE,
    SUMMARY,
    UNFINISHED,
    Note,
    checkpoints_in,
    moments_in,
    newest_good,
    read_json,
    response_files,
    sets_of,
)
from rlreason.records.reader import RunFolder, settings_in
from rlreason.runtime.files import explained, removed, write_whole
from rlreason.runtime.text import few

#: Settings that may differ when an interrupted job resumes: they change its speed, its memory or its output.
HARMLESS: tuple[str, ...] = (
    "threads", "log_generations", "micro_batch_tokens", "gpus", "parallel", "rollout.max_rows", "rollout.kv_cache_gb",
    "model.check_memory", "eval.score",
)  # fmt: skip
#: Settings that may differ when a training run resumes, by their names or those of their groups.
MAY_CHANGE = (
    *HARMLESS, "n_steps", "eval_every", "save_rollouts_every", "save_model", "profile", "checkpoint", "logger", "waits",
    "monitors", "budget", "rollout.timeout_s",
    # savings of memory that a plan suggests; the run learns the same except for rounding
    "model.gradient_checkpointing", "rollout.sleep",
)  # fmt: skip
#: Settings that may differ when a run of discovery resumes: its budget, where the same model is served, its waits.
DISCOVERY_MAY_CHANGE = (
    "budget", "waits", "client.base_url", "client.env_variable", "client.timeout_s", "client.retries", "client.pause_s",
    "client.max_tokens", "client.extra", "client.prompt_price", "client.completion_price", "score.workers",
)  # fmt: skip


def flat_text(config: str) -> dict[str, Any]:
    """Return the settings of a YAML text by their dotted names."""
    return flat(yaml.safe_load(config))


def is_below(name: str, groups: Iterable[str]) -> bool:
    """Return whether a setting is one of these, or in one of these groups."""
    return any(f"{name}.".startswith(f"{group}.") for group in groups)


def changed(old: dict[str, Any], new: dict[str, Any], allowed: tuple[str, ...]) -> str:
    """Return the settings in which two configs differ, as text; empty where only `allowed` ones do.

    >>> changed({"seed": 0, "sampling.max_tokens": 48}, {"seed": 0, "sampling.max_tokens": 64}, ())
    'sampling.max_tokens=48 there, 64 here'
    >>> changed({"logger.mode": None}, {"logger.mode": "offline"}, ("logger",))
    ''
    """
    keys = [key for key in {**old, **new} if old.get(key) != new.get(key) and not is_below(key, allowed)]
    return few([f"{key}={old.get(key, 'not set')} there, {new.get(key, 'not set')} here" for key in keys])


def resumes(folder: Path, config: str, trains: bool) -> bool:
    """Whether a run with this config resumes the one in the folder; else it begins there. `trains`: a training run.

    A training run resumes from its checkpoints, a job with the responses of an interrupted one of its algorithm,
    discovery with its calls; a finished run resumes with another number of steps, another budget, or another setting of
    the monitor that stopped it. `ConfigError` where the run can do neither: the folder holds another run or other
    files, the run there has other settings than those that may change, or it has ended and nothing is left to do.
    """
    before, now = settings_in(folder), flat_text(config)
    algorithm, finished = now.get("algorithm"), (folder / SUMMARY).exists()
    allowed = HARMLESS
    if trains:
        left, allowed = bool(before and checkpoints_in(folder)), MAY_CHANGE
    elif algorithm == "discover":
        left, allowed = (folder / CALLS).exists(), DISCOVERY_MAY_CHANGE
    else:
        left = (folder / UNFINISHED).exists() and not finished and before.get("algorithm") == algorithm
    if not left:
        refuse_occupied(folder)
    elif different := changed(before, now, allowed):
        kind = "a finished run" if finished else "an interrupted run"
        raise ConfigError(
            f"hydra.run.dir={folder} holds {kind} with other settings ({different}): type its command again to go on "
            f"with it (resume={folder}), or choose another folder"
        )
    elif finished:
        status = str((RunFolder(folder).summary or {}).get("status", ""))  # a killed start may have changed status.json
        kind, _, rule = status.partition(":")
        ended_by: Sequence[str] = ["n_steps"]
        if algorithm == "discover" or kind == "budget":
            ended_by = [key for key in now if key.startswith("budget.")]
        elif kind in ("stopped", "diverged"):
            ended_by = settings_of(rule)
        if all(before.get(key) == now.get(key) for key in ended_by):
            raise ConfigError(
                f"hydra.run.dir={folder} holds a finished run, which ended as {status}: choose another, or type "
                f"resume={folder} with more n_steps, a larger budget, or the monitor that stopped it at warn"
            )
    return left


def refuse_occupied(folder: Path) -> None:
    """`ConfigError` for a folder with a finished run, or with files that no run wrote."""
    if (folder / SUMMARY).exists():
        raise ConfigError(f"hydra.run.dir={folder} holds a finished run: choose another folder, or move that one away")
    names = [name for name in CONTENTS if (folder / name).exists()]
    if names and not (folder / PROVENANCE).exists():
        raise ConfigError(f"hydra.run.dir={folder} holds {names[0]}, which no run left there: choose another folder")


def checkpoint_to_resume(folder: Path, config: str, say: Note) -> Path:
    """Return the checkpoint from which a training run with this config resumes, and `say` what changes in its course.

    `ConfigError` where none can be used, or where it has come further than `n_steps`.
    """
    checkpoint = newest_good(folder, say)
    before, now, state = settings_in(folder), flat_text(config), read_json(checkpoint / STATE)
    if before.get("n_steps") != now.get("n_steps") and now.get("lr_schedule", "constant") != "constant":
        say(f"! so far the learning rate fell towards step {before['n_steps']}, and from here on towards the new end")
    if (folder / SUMMARY).exists() and not moments_in(checkpoint):
        say("! the run goes on with new moments of its optimizer: it kept none (checkpoint.keep_final=false)")
    if (steps := now.get("n_steps")) and state["step"] > steps:
        raise ConfigError(
            f"n_steps={steps}: the run in {folder} has come to step {state['step']}: give it at least so many"
        )
    return checkpoint


def drop_later(folder: Path, state: Mapping[str, Any]) -> int:
    """Drop what a run recorded after a checkpoint and will record again; return how many rows that were.

    Rows and files of responses of later steps and evaluations go, and so do the later model and curves.
    """
    dropped = 0
    for name in GROWING:
        path = folder / name
        if path.exists():
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = lines[: state["lines"].get(name, 0)]
            dropped += len(lines) - len(kept) if name == METRICS else 0
            write_whole(path, "".join(kept))
    evaluated = {evaluation["step"] for evaluation in state["parts"]["validation"]}
    later = [file for file in response_files(folder, ROLLOUTS) if (file.step or 0) > state["step"]]
    kinds = [EVALS, *(f"{EVALS}/{name}" for name in sets_of(folder))]
    files = [file for kind in kinds for file in response_files(folder, kind)]
    later += [file for file in files if file.update is not None or file.step not in evaluated]
    with explained(folder):
        partial = [*folder.glob("*/*.partial"), *folder.glob(f"{EVALS}/*/*.partial")]
        for path in (*(file.path for file in later), *partial, folder / MODEL, folder / CURVES):
            removed(path)
    return dropped


def drop_behind(checkpoint: Path) -> None:
    """Remove the checkpoints that are newer than this one, which could not be used and will be written again."""
    paths = checkpoints_in(checkpoint.parents[1])
    with explained(checkpoint):
        for path in paths[paths.index(checkpoint) + 1 :]:
            removed(path)
