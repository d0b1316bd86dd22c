"""Compose one run, from overrides or from the settings of an earlier run; check that it could begin here."""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from rlreason.cli.flags import OWN_CONFIGS, OneRun, chooses, of_options, options_by_group
from rlreason.cli.mistakes import in_one_line
from rlreason.cli.names import SETS
from rlreason.config.algorithms import DiscoverConfig
from rlreason.config.groups import OF_SWEEPS, finds_gpus
from rlreason.config.leaves import flat
from rlreason.config.rules import complaints, unread_keys
from rlreason.config.run import AnyRunConfig, EvalSetConfig, works_on_a_model
from rlreason.config.store import SCHEMAS, as_config, typed
from rlreason.errors import ConfigError
from rlreason.records.reader import RunFolder, runs_in, setting_in
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.plugins import GIVEN
from rlreason.runtime.text import HIDDEN
from rlreason.sweeps.design import key_of, parsed

Note = Callable[[str], object]
RESUME, RUN_DIR = "resume", "hydra.run.dir"


def composed(overrides: Sequence[str], name: str, with_hydra: bool = True) -> DictConfig:
    """Return the config of one run, unchecked, by default with Hydra's own settings. Hydra must be ready to compose."""
    with in_one_line(overrides, name):
        return compose(name, list(overrides), return_hydra_config=with_hydra)


def composed_alike(overrides: Sequence[str], name: str) -> DictConfig:
    """Return the config of one of several runs as `composed` does, in a tenth of its time.

    Most runs of a sweep differ in single settings: their options are composed once, and settings are set in a copy.
    """
    with in_one_line(overrides, name):
        words = parsed(overrides)
        options = [word for word in words if chooses(word)]
        place = str(GlobalHydra.instance().config_loader().get_search_path())
        config = copy.deepcopy(of_options(place, name, *(str(word.input_line) for word in options)))
        try:
            for word in words:
                if word not in options:
                    OmegaConf.update(config, word.key_or_group, word.value())
        except OmegaConfBaseException:
            return composed(overrides, name)  # which says what is wrong
    return config


def composed_run(
    overrides: Sequence[str], name: str, of_sweep: bool = False, absent: list[str] | None = None
) -> OneRun:
    """Return the run of these overrides, checked by its rules; `absent` as in `typed`.

    `of_sweep`: one of several runs, each of which may leave typed settings unread that another reads.
    """
    cfg = composed_alike(overrides, name) if of_sweep else composed(overrides, name)
    place = _place_of(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    with in_one_line(overrides, name):
        OmegaConf.resolve(cfg)
    run = typed(cfg, map(key_of, overrides), absent)
    if not of_sweep and (bad := complaints(run)):
        raise ConfigError("\n".join(bad.values()))
    return OneRun(run, cfg, place)


def _place_of(cfg: DictConfig) -> Path:
    if not cfg.hydra.run.dir:
        raise ConfigError(f"{RUN_DIR}= names no folder: give one, or leave it out")
    return Path(cfg.hydra.run.dir)


def changed_run(settings: Mapping[str, Any], overrides: Sequence[str], folder: Path | None = None) -> OneRun:
    """Return the run of these settings with overrides merged into them, in `folder` or where hydra.run.dir says.

    An override that chooses an option replaces the whole group. Only settings that the overrides name are held to be
    read by the run: the others were checked when the earlier run began. Hydra must be ready to compose.
    """
    algorithm, groups = str(settings.get("algorithm")), options_by_group()
    if algorithm not in SCHEMAS["schema"]:
        raise ConfigError(f"algorithm={algorithm} is none of ours: these are no settings of a run")
    overrides = [word for word in overrides if not given_again(settings, word)]
    name = OWN_CONFIGS.get(algorithm, "config")
    words = [(str(one.input_line), one) for one in parsed(overrides) if one.input_line != f"algorithm={algorithm}"]
    options = [word for word, one in words if one.key_or_group in groups]
    of_hydra = [word for word, one in words if one.is_hydra_override()]
    base = composed([f"algorithm={algorithm}", *options, *of_hydra], name)
    with in_one_line([f"algorithm={algorithm}", *overrides], name):
        config = as_config(settings, set(map(key_of, options)))
        for word, one in words:
            if word in options:
                node = OmegaConf.select(base, key_of(word))
                if one.key_or_group == "algorithm" or (node is None and not one.is_delete()):
                    raise ConfigError(
                        f"{word} chooses more than one setting of a run that has all of its own: give them one by one"
                    )
                place = key_of(word).rpartition(".")[0]
                if place.startswith(f"{SETS}.") and OmegaConf.select(config, place) is None:  # it had no such set
                    OmegaConf.update(config, place, EvalSetConfig)
                OmegaConf.update(config, key_of(word), node, merge=False)
            elif word not in of_hydra:
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
    return OneRun(run, config, folder or _place_of(base))


def given_again(settings: Mapping[str, Any], word: str) -> bool:
    """Return whether an override names the very Python object of these settings, which no one else can load."""
    key, _, value = word.partition("=")
    own = {"data": "data.function", "loss": "loss.loss_type"}.get(key, key)
    return value.startswith(f"{GIVEN}:") and setting_in(settings, own) == value


def repeated(folder: Path, overrides: Sequence[str], note: Note, place: Path) -> OneRun:
    """Return the run in a folder with overrides merged into its settings, to resume there or to begin in `place`.

    `ConfigError` where it is no folder of one run.
    """
    if not folder.is_dir():
        raise ConfigError(f"{RESUME}={folder} is no folder: give the folder of a run, as printed at its start")
    if inner := runs_in(folder):
        raise ConfigError(
            f"{RESUME}={folder} is a sweep with {len(inner)} runs: type its command again, or give one of them"
        )
    before, given = RunFolder(folder), set(map(key_of, overrides))
    began_in, sweep = before.provenance.get("directory"), before.provenance.get("sweep")
    if began_in and str(began_in) != str(Path.cwd()):
        note(f"note: {folder} was started in {began_in}: what its settings name by a relative path is looked up here")
    for key, value in flat(before.settings).items():
        if HIDDEN in str(value) and not any(f"{key}.".startswith(f"{one}.") for one in given):
            raise ConfigError(f"the value of {key} was a secret, which {folder} does not hold: give it: {key}=VALUE")
    return replace(changed_run(before.settings, overrides, place), sweep=str(sweep) if sweep else None)


def resumed_folder(words: Sequence[str], multirun: bool) -> Path | None:
    """Return RUN of `resume=RUN`; None where there is no such word. `ConfigError` where others contradict it."""
    resumes = [word for word in words if key_of(word) == RESUME]
    if not resumes:
        return None
    others = [word for word in words if key_of(word) in (RUN_DIR, "hydra.sweep.dir")] + resumes[1:]
    others += ["-m"] if multirun else []
    if others:
        raise ConfigError(f"{resumes[0]} resumes one run in its own folder: leave {others[0]} out")
    folder = resumes[0].partition("=")[2].strip().strip("'\"")
    if not folder:
        raise ConfigError(f"{RESUME}= names no run: give the folder of one, as printed at its start")
    return Path(folder).expanduser()


# Whether it could begin


def refuse_unread(runs: Sequence[AnyRunConfig], note: Note) -> None:
    """Refuse typed settings that no run of a sweep reads, and note those that only some of them read.

    A sweep's own monitors are no mistake. One of its runs by itself refuses nothing.
    """
    own = [f"monitors.{monitor}" for monitor in OF_SWEEPS]
    said = {key: line for run in runs for key, line in complaints(run).items() if key not in own}
    useless = [line for key, line in said.items() if all(key in unread_keys(run) for run in runs)]
    if useless and SWEEP_VARIABLE not in os.environ:  # in a run of a sweep, another run may read it
        raise ConfigError("\n".join(useless))
    for line in said.values():
        note(f"note: in some runs of this sweep, {line}")


def check_start(runs: Sequence[AnyRunConfig], folder: Path, note: Note) -> None:
    """Refuse runs that could not begin on this machine, or could not write to the folder."""
    check_writable(folder)
    from rlreason.training.preflight import preflight

    for one in runs:
        if isinstance(one, DiscoverConfig):
            from rlreason.discovery.loop import parts_of  # slow to import

            parts_of(one)
    on_models = [run for run in runs if works_on_a_model(run)]
    if (ranks := max((run.ranks_requested for run in on_models), default=1)) > 1 and not finds_gpus():
        note(f"note: gpus={ranks}, and torch finds no GPU here: all ranks share the processor, which is slow")
    for line in preflight(on_models, folder):
        note(f"note: {line}")


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be made or written to."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"the run folder {folder} cannot be made: {there} is no folder to write in: choose another")
