"""Compose one run: from overrides, or from the settings that an earlier run has written down and overrides on top."""

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.flags import OWN_CONFIGS, OneRun
from rlreason.cli.mistakes import in_one_line
from rlreason.cli.options import options_by_group
from rlreason.config.leaves import flat
from rlreason.config.rules import complaints
from rlreason.config.store import SCHEMAS, as_config, typed
from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG
from rlreason.records.reader import RunFolder, runs_in
from rlreason.runtime.text import HIDDEN
from rlreason.sweeps.design import key_of, parsed
from rlreason.sweeps.state import FILE, read_state

RESUME, RUN_DIR = "resume", "hydra.run.dir"
SHARED = ("dtype", "weights", "attention")  # settings that every model has


def composed(overrides: Sequence[str], name: str) -> DictConfig:
    """Return the config of one run, unchecked and with Hydra's own settings. Hydra must be ready to compose."""
    with in_one_line(overrides, name, composing=True):
        return compose(name, list(overrides), return_hydra_config=True)


def composed_run(
    overrides: Sequence[str], name: str, of_sweep: bool = False, absent: list[str] | None = None
) -> OneRun:
    """Return the run of these overrides, checked by its rules; `absent` as in `typed`.

    `of_sweep`: one of several runs, each of which may leave typed settings unread that another reads.
    """
    cfg = composed(overrides, name)
    place, hydra = _place_of(cfg), OmegaConf.masked_copy(cfg, "hydra")
    OmegaConf.set_struct(cfg, False)
    del cfg["hydra"]
    OmegaConf.set_struct(cfg, True)
    with in_one_line(overrides, name, composing=True):
        OmegaConf.resolve(cfg)
    run = typed(cfg, map(key_of, overrides), absent)
    if not of_sweep and (bad := complaints(run)):
        raise ConfigError("\n".join(bad.values()))
    return OneRun(run, cfg, place, hydra)


def _place_of(cfg: DictConfig) -> Path:
    if not cfg.hydra.run.dir:
        raise ConfigError(f"{RUN_DIR}= names no folder: give one, or leave it out")
    place = Path(cfg.hydra.run.dir)
    return place if place.parent.exists() else Path(os.path.normpath(place))  # a/.. would make the folder a


def changed_run(settings: Mapping[str, Any], overrides: Sequence[str], folder: Path | None = None) -> OneRun:
    """Return the run of these settings with overrides merged into them, in `folder` or where hydra.run.dir says.

    An override that chooses an option replaces the whole group. Only settings that the overrides name are held to be
    read by the run: the others were checked when the earlier run began. Hydra must be ready to compose.
    """
    algorithm = str(settings.get("algorithm"))
    if algorithm not in SCHEMAS["schema"]:
        raise ConfigError("config= holds no settings of a run: give what rlreason.compose(...) returned")
    name, groups = OWN_CONFIGS.get(algorithm, "config"), options_by_group()
    words = [one for one in parsed(overrides) if (one.key_or_group, str(one.value())) != ("algorithm", algorithm)]
    if several := next((one for one in words if one.is_sweep_override()), None):
        raise ConfigError(f"{several.input_line} names several values, and this is one run: give one of them")
    options = [one for one in words if one.key_or_group in groups]
    of_hydra = [str(one.input_line) for one in words if one.is_hydra_override()]
    base = composed([f"algorithm={algorithm}", *(str(one.input_line) for one in options), *of_hydra], name)
    with in_one_line([f"algorithm={algorithm}", *overrides], name, composing=True):
        config = as_config(settings, {key_of(str(one.input_line)) for one in options})
        for one in options:
            place = key_of(str(one.input_line))
            node = None if one.is_delete() else OmegaConf.select(base, place)
            if place == "algorithm" or (node is None and not one.is_delete()):
                raise ConfigError(
                    f"{one.input_line} chooses more than one setting of a run that has all of its own: give them one "
                    f"by one (python -m rlreason --cfg job {one.input_line} shows them)"
                )
            OmegaConf.update(config, place, node, merge=False)
        for one in words:
            if one not in options and not one.is_hydra_override():
                OmegaConf.update(config, one.key_or_group, one.value(), merge=False)
        left = "train_batch_size" in config and not OmegaConf.is_interpolation(config, "train_batch_size")
        OmegaConf.resolve(config)
    given = set(map(key_of, overrides))
    run = typed(config, given)
    if "rollout_batch_size" in given and "train_batch_size" not in given and left:
        raise ConfigError(
            f"rollout_batch_size={config.rollout_batch_size} leaves train_batch_size={config.train_batch_size} as the "
            "run had it, which may be off-policy: give train_batch_size= too"
        )
    if bad := complaints(run):
        raise ConfigError("\n".join(bad.values()))
    return OneRun(run, config, folder or _place_of(base), OmegaConf.masked_copy(base, "hydra"))


def plain(config: Any, resolve: bool = True) -> dict[str, Any]:
    """Return settings as nested dicts, without Hydra's own; `resolve=False` leaves what follows from others a text."""
    node = config if isinstance(config, DictConfig) else OmegaConf.structured(config)
    found = OmegaConf.to_container(node, resolve=resolve)
    if not isinstance(found, dict) or "algorithm" not in found:
        raise ConfigError("config= holds no settings of a run: give what rlreason.compose(...) returned")
    return {str(key): value for key, value in found.items() if key != "hydra"}


# Runs again


def algorithm_of(folder: Path) -> str:
    """Return the algorithm of the run in a folder; "" where there is none."""
    return str(RunFolder(folder).settings.get("algorithm")) if (folder / CONFIG).is_file() else ""


def free_folder(folder: Path) -> Path:
    """Return the folder, with a number behind its name if something of that name is there."""
    free, number = folder, 1
    while free.exists():
        number += 1
        free = folder.with_name(f"{folder.name}_{number}")
    return free


def repeated(
    folder: Path, overrides: Sequence[str], note: Callable[[str], object], place: Path | None = None, name: str = RESUME
) -> OneRun:
    """Return the run in a folder with overrides merged into its settings, to resume there or to begin in `place`.

    `name`: what the folder is called where it is typed. `ConfigError` where it is no folder of one run.
    """
    if not folder.is_dir():
        raise ConfigError(f"{name}={folder} is no folder: give the folder of a run, as printed at its start")
    if inner := runs_in(folder):
        command = f" ({read_state(folder).command})" if (folder / FILE).exists() else ""
        raise ConfigError(
            f"{name}={folder} is a sweep with {len(inner)} runs: type its command again{command}, or give one run, "
            f"such as {inner[-1]}"
        )
    before, given = RunFolder(folder), set(map(key_of, overrides))
    began_in, sweep = before.provenance.get("directory"), before.provenance.get("sweep")
    if began_in and str(began_in) != str(Path.cwd()):
        note(f"note: {folder} was started in {began_in}: what its settings name by a relative path is looked up here")
    for key, value in flat(before.settings).items():
        if HIDDEN in str(value) and not any(f"{key}.".startswith(f"{one}.") for one in given):
            raise ConfigError(f"the value of {key} was a secret, which {folder} does not hold: give it: {key}=VALUE")
    one = changed_run(before.settings, overrides, place or folder)
    return replace(one, sweep=str(sweep) if sweep else None)


def resumed_folder(words: Sequence[str], multirun: bool) -> Path | None:
    """Return RUN of `resume=RUN`; None where there is no such word. `ConfigError` where others contradict it."""
    resumes = [word for word in words if word.lstrip("+").startswith(f"{RESUME}=")]
    if not resumes:
        return None
    if len(resumes) > 1:
        both = " and ".join(resumes)
        raise ConfigError(f"{both} ask for {len(resumes)} runs to go on: give one, and start the other")
    if multirun:
        raise ConfigError(
            f"{resumes[0]} goes on with one run, and -m starts many: leave -m out; a sweep goes on when its own "
            "command is typed again"
        )
    if place := next((word for word in words if key_of(word) in (RUN_DIR, "hydra.sweep.dir")), None):
        raise ConfigError(f"{resumes[0]} goes on in that folder, and {place} names one too: leave {place} out")
    folder = resumes[0].partition("=")[2].strip().strip("'\"")
    if not folder:
        raise ConfigError(f"{RESUME}= names no run: give the folder of one, as {RESUME}=runs/grpo/2026-01-31_12-00-00")
    return Path(os.path.expanduser(folder))


def evaluation_settings(settings: Mapping[str, Any], model: Path, anew: Collection[str]) -> dict[str, Any]:
    """Return the settings of `algorithm=evaluate` on a model folder, as the run with these settings was evaluated.

    `anew`: what overrides will choose again. Other data are asked in full, whichever part the run used. Hydra must be
    ready to compose.
    """
    base = composed(["algorithm=evaluate", "model=local"], "config")
    base.model.path = str(model)
    usual = plain(OmegaConf.masked_copy(base, [str(key) for key in base if key != "hydra"]))
    found = usual | {key: settings[key] for key in usual.keys() & settings.keys() - {"algorithm", "model", *anew}}
    trained = settings.get("model") or {}
    found["model"] |= {key: trained[key] for key in SHARED if key in trained}
    evaluated = dict(found["eval"])
    if "data" in anew:
        evaluated["data"] = None
    if {"data", "eval.data"} & set(anew):
        found["eval_problems"], evaluated["problems"] = usual["eval_problems"], None
    if {"prompt.reward", "eval.prompt.reward"} & set(anew):
        evaluated["reward"] = None
    return found | {"eval": evaluated}
