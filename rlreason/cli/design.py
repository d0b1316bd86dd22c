"""Design a sweep from its overrides and its file: its runs, their names and their folder.

Every run is a command of its own: the settings of the file's blocks are among its overrides.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlreason.cli.flags import Request, config_content, config_exists, group_options
from rlreason.cli.multirun import MEANS, Grid, canonical, canonical_word, composed, fixed, grid_of, parsed
from rlreason.cli.resume import key_of
from rlreason.config.leaves import typed_word
from rlreason.config.store import FIRST, SweepFile, run_name, sweep_file
from rlreason.errors import ConfigError
from rlreason.runtime.text import few
from rlreason.sweeps.state import SWEEPS, Design, PlannedRun, Setting

BESIDE = ("algorithm", "data", "experiment", "model", "scale")  # if typed, they are part of the sweep's folder name
ONE_SCALE = ("experiment", "model", "scale")  # a block `embedded` is for one value of each


def named_sweep(overrides: Sequence[str]) -> str | None:
    """Return the sweep that the overrides choose.

    >>> named_sweep(["sweep=a", "seed=0,1"]), named_sweep(["seed=0,1"])
    ('a', None)
    """
    chosen = [word.partition("=")[2] for word in overrides if key_of(word) == "sweep"]
    return chosen[-1] if chosen else None


def file_of(overrides: Sequence[str]) -> SweepFile:
    """Return the file of the requested sweep, or an empty one. Hydra must be ready to compose."""
    name = named_sweep(overrides)
    if name is None:
        return SweepFile("")
    return sweep_file(name, _content)


def _content(name: str) -> dict[str, Any]:
    if not config_exists(f"sweep/{name}"):
        known = ", ".join(group_options("sweep"))
        raise ConfigError(f"sweep={name} is no option of sweep: choose one of {known}")
    return config_content(f"sweep/{name}")


def design_of(
    request: Request,
    note: Callable[[str], object] = print,
    carried: Sequence[str] = (),
    folder: Path | None = None,
    arms: Sequence[Setting] = (),
) -> Design:
    """Return the design of the requested sweep, its runs not yet checked. Hydra must be ready to compose.

    `carried`: overrides from finished sweeps, with lower precedence than typed ones and the sweep's own. `folder`: of
    the sweep, whatever the overrides say. `arms`: settings that replace its own, the reference first. `ConfigError` if
    its file or an override is wrong.
    """
    words, name = request.overrides, request.config_name
    whole = file_of(words)
    if whole.chain:
        raise ConfigError(f"sweep={whole.name} is a chain of sweeps, and no sweep of a chain: leave it out there")
    base = composed(fixed(words), name)
    file = with_params(at_scale(whole, base, words), whole, base)
    if arms:
        others = {key: value for key, value in file.axes.items() if not set(MEANS.get(key, ())) & arms[0].keys()}
        of_arms = [[f"{key}={value}" for key, value in arm.items()] for arm in arms]
        file = replace(file, axes=others, cells=of_arms, reference=of_arms[0])
    grid = grid_of(words, file, carried, note)
    place = folder or folder_of(request, grid.swept, base)
    runs = _runs(grid.beside(place), name, note)
    axes = list(runs[0].setting)
    _refuse_strange_reference(file, {*grid.swept, *(key_of(word) for word in words)})
    return Design(place.name, place, runs, axes, _reference(runs, _spelled(file.reference, grid, name)), whole.name)


def at_scale(file: SweepFile, base: DictConfig, words: Sequence[str]) -> SweepFile:
    """Return the sweep at the scale of its runs. `base`: their config, with Hydra's own settings."""
    if file.embedded is None:
        return file
    for override in parsed(words):
        if override.is_sweep_override() and override.key_or_group in ONE_SCALE:
            raise ConfigError(
                f"{override.input_line} with sweep={file.name}, whose file has a block embedded for one scale: run a "
                f"sweep for each {override.key_or_group}"
            )
    choices = base.hydra.runtime.choices
    return file.at(choices.get("scale") == "embedded" and choices.get("experiment") in (None, "null", "none"))


def with_params(file: SweepFile, whole: SweepFile, base: DictConfig) -> SweepFile:
    """Return the file with the axes that Hydra's sweeper got, which may come from elsewhere, and its embedded axes."""
    embedded = {key: value for key, value in file.axes.items() if whole.axes.get(key) != value}
    params = base.hydra.sweeper.get("params") or {}
    return replace(file, axes={str(key): plain_word(value) for key, value in params.items()} | embedded)


def folder_of(request: Request, swept: Sequence[str], base: DictConfig) -> Path:
    """Return where a sweep writes: hydra.sweep.dir if given, or else a folder below runs/sweeps.

    That is named by `sweep_name`, or by the sweep's name (without one the swept keys) and the typed overrides among
    `BESIDE`.
    """
    given = str(base.hydra.sweep.dir or "")
    typed = {key_of(word) for word in request.overrides}
    if "hydra.sweep.dir" in typed:
        if request.options.sweep_name:
            raise ConfigError(
                f"sweep_name={request.options.sweep_name} and hydra.sweep.dir={given} both name the sweep's folder: "
                "leave one of them out"
            )
        if not given:
            raise ConfigError("hydra.sweep.dir= names no folder: give one, or leave it out")
        return Path(given)
    if request.options.sweep_name:
        return SWEEPS / request.options.sweep_name
    name = named_sweep(request.overrides)
    if given != str(SWEEPS / (name or "sweep")):  # set by the file
        return Path(given)
    beside = sorted(word for word in fixed(request.overrides) if key_of(word) in BESIDE)
    first = name or ",".join(swept) or "seeds"
    return SWEEPS / run_name_of([first, *beside])


def run_name_of(parts: Sequence[str]) -> str:
    """Return a folder name from a first name and overrides; the rules for special characters are those of runs.

    >>> run_name_of(["grpo_baselines", "experiment=cs336_2025"])
    'grpo_baselines,experiment=cs336_2025'
    """
    rest = run_name(parts[1:]) if parts[1:] else ""
    return ",".join(part for part in (parts[0][:100], rest) if part)


def _runs(grid: Grid, name: str, note: Callable[[str], object]) -> list[PlannedRun]:
    """Return every run once, in order."""
    filled = [_filled(grid, cell, name) for cell in grid.cells]
    default = None if "seed" in grid.axes or _seed_in(grid.shared) else str(composed(grid.shared, name).seed)
    runs: dict[str, PlannedRun] = {}
    twice = 0
    for number, words in grid.combinations():
        if default is not None and not _seed_in(words):
            words = [*words, f"seed={default}"]
        values = filled[number] | {key_of(word): word.partition("=")[2] for word in words}
        setting = {key: values[key] for key in grid.swept if key in values}
        seed = values["seed"]
        if not re.fullmatch(r"-?\d+", seed):
            raise ConfigError(f"seed={seed} must be of type Integer: give a whole number")
        run = PlannedRun(run_name([*_parts(setting), f"seed={seed}"]), words, setting, int(seed))
        twice += run.name in runs
        runs.setdefault(run.name, run)
    if twice:
        note(f"note: {twice} runs of this sweep would repeat another one, and are left out")
    return list(runs.values())


def _parts(setting: Setting) -> list[str]:
    """Return the overrides of a setting, texts without their quotes."""
    return [f"{key}={value.strip(chr(39) + chr(34))}" for key, value in setting.items()]


def _seed_in(words: Sequence[str]) -> bool:
    return any(key_of(word) == "seed" for word in words)


def _filled(grid: Grid, cell: Sequence[str], name: str) -> Setting:
    """Fill in the keys that only other cells set, from the config, so that names and tables are complete."""
    keys = {key_of(word) for other in grid.cells for word in other} - {key_of(word) for word in cell}
    if not keys:
        return {}
    words = [*grid.around(cell), *(axis[0] for axis in grid.axes.values())]
    return _values_in(composed(words, name), keys)


def _values_in(cfg: DictConfig, keys: Iterable[str]) -> Setting:
    """Return the values of some keys in a config, options by their names."""
    choices = {key.rpartition("@")[2]: option for key, option in cfg.hydra.runtime.choices.items()}
    found = {}
    for key in sorted(keys):
        if key in choices:
            found[key] = str(choices[key])
        elif (value := OmegaConf.select(cfg, key)) is not None or OmegaConf.select(cfg, key, default=0) is None:
            found[key] = canonical(plain_word(value))
    return found


def plain_word(value: object) -> str:
    """Return a value of a config as it is typed."""
    return typed_word(OmegaConf.to_container(value) if OmegaConf.is_list(value) else value)


def _refuse_strange_reference(file: SweepFile, known: set[str]) -> None:
    """Refuse a reference key that neither varies nor was typed: it would match every run."""
    varied = {key_of(f"{key}=") for key in file.axes} | {key_of(word) for cell in file.cells for word in cell}
    for word in file.reference:
        if word != FIRST and key_of(word) not in known | varied:
            raise ConfigError(
                f"sweep/{file.name}.yaml: reference holds {word}, which no run of the sweep varies: it may name "
                f"{few(sorted(varied)) or 'nothing here'}"
            )


def _spelled(words: Sequence[str], grid: Grid, name: str) -> list[str]:
    """Return the overrides of a reference in numbers; an option that no run has any more, as the settings it sets."""
    found = []
    for word in words:
        inner = [key for key in MEANS.get(key_of(word), ()) if key in grid.swept and key_of(word) not in grid.swept]
        inner = inner or [key_of(word)] * ("${" in word)
        values = _values_in(composed([*grid.shared, word], name), inner) if inner else {}
        found += [f"{key}={value}" for key, value in values.items()] or [word]
    return found


def _reference(runs: Sequence[PlannedRun], words: Sequence[str]) -> Setting | None:
    """Return the setting that the overrides describe, the first of several; None if no run has it."""
    if words == [FIRST]:
        return runs[0].setting
    wanted = dict(canonical_word(word).partition("=")[::2] for word in words)
    if not wanted:
        return None
    for run in runs:
        if all(run.setting.get(key_of(f"{key}="), value) == value for key, value in wanted.items()) and run.setting:
            return run.setting
    return None
