"""Design a sweep from its overrides and its file: its runs, their names and their folder.

    typed overrides, sweep file  ->  Grid: what the runs share, and how they differ  ->  runs by name  ->  Design

Every run is a command of its own: the settings of the file's blocks are among its overrides.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.compose import composed, key_of, parsed
from rlreason.cli.flags import Request
from rlreason.cli.mistakes import refuse_wrong_words
from rlreason.cli.names import PLACED, translated
from rlreason.cli.options import config_content, config_exists, group_options
from rlreason.config.leaves import typed_word
from rlreason.config.store import FIRST, SweepFile, run_name, sweep_file
from rlreason.errors import ConfigError
from rlreason.runtime.text import few
from rlreason.sweeps.state import SWEEPS, Design, RunState, Setting

Note = Callable[[str], object]
BESIDE = "{sweeps}"  # in an override: the folder that holds the sweep's own
#: An option of the first sets what the others name.
MEANS = {
    "objective": ("loss", "length_norm", "baseline", "std_norm"),
    "off_policy": ("epochs_per_rollout", "train_batch_size"),
}
IN_NAME = ("algorithm", "data", "experiment", "model", "scale")  # if typed, they are part of the sweep's folder name
ONE_SCALE = ("experiment", "model", "scale")  # a block `embedded` is for one value of each


def design_of(
    request: Request,
    note: Note = print,
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
    base = composed(fixed(words), name)
    file = _file_here(words, base, arms, note)
    grid = _grid(words, file, carried, note)
    place = folder or folder_of(request, grid.swept, base)
    runs = _runs(grid, place, str(base.seed), name, note)
    reference = _reference(file, grid, runs, {key_of(word) for word in words}, name)
    return Design(place.name, place, runs, list(runs[0].setting), reference, file.name)


# The file of a sweep


def file_of(overrides: Sequence[str]) -> SweepFile:
    """Return the file of the requested sweep, or an empty one. Hydra must be ready to compose."""
    name = _named_sweep(overrides)
    return SweepFile("") if name is None else sweep_file(name, _content)


def _named_sweep(overrides: Sequence[str]) -> str | None:
    return next((word.partition("=")[2] for word in reversed(overrides) if key_of(word) == "sweep"), None)


def _content(name: str) -> dict[str, Any]:
    if not config_exists(f"sweep/{name}"):
        known = ", ".join(group_options("sweep"))
        raise ConfigError(f"sweep={name} is no option of sweep: choose one of {known}")
    return config_content(f"sweep/{name}")


def _file_here(words: Sequence[str], base: DictConfig, arms: Sequence[Setting], note: Note) -> SweepFile:
    """Return the sweep's file at the scale of its runs, with its axes as Hydra's sweeper got them, in our names.

    `base`: the config of the words, with Hydra's own settings. `arms` as in `design_of`.
    """
    whole = file_of(words)
    if whole.chain:
        raise ConfigError(f"sweep={whole.name} is a chain of sweeps, and no sweep of a chain: leave it out there")
    file = whole
    if whole.embedded is not None:
        for override in parsed(words):
            if override.is_sweep_override() and override.key_or_group in ONE_SCALE:
                raise ConfigError(
                    f"{override.input_line} with sweep={file.name}, whose file has a block embedded for one scale: run "
                    f"a sweep for each {override.key_or_group}"
                )
        choices = base.hydra.runtime.choices
        file = file.at(choices.get("scale") == "embedded" and choices.get("experiment") in (None, "null", "none"))
    axes = {str(key): _plain_word(value) for key, value in (base.hydra.sweeper.get("params") or {}).items()}
    axes |= {key: value for key, value in file.axes.items() if whole.axes.get(key) != value}
    cells, reference = file.cells, file.reference
    if arms:
        axes = {key: value for key, value in axes.items() if not set(MEANS.get(key, ())) & arms[0].keys()}
        cells = [[f"{key}={value}" for key, value in arm.items()] for arm in arms]
        reference = cells[0]
    for key in axes:
        if key in PLACED:  # Hydra takes the keys of axes literally
            raise ConfigError(f"{key} in the file of a sweep holds an option: write {PLACED[key]}@{key} there")

    def ours(some: Sequence[str]) -> list[str]:
        found = translated(some, note)
        refuse_wrong_words(found)
        return found

    return replace(
        file,
        axes=dict(word.partition("=")[::2] for word in ours([f"{key}={value}" for key, value in axes.items()])),
        cells=[ours(cell) for cell in cells],
        reference=reference if reference == [FIRST] else ours(reference),
    )


# From the words and the file to the grid of the runs


def fixed(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that name one value."""
    return [str(o.input_line) for o in parsed(overrides) if not o.is_sweep_override()]


@dataclass(frozen=True, slots=True)
class Grid:
    """What the runs of a sweep share, and how they differ."""

    shared: list[str]
    axes: dict[str, list[str]]  # key as Hydra takes it -> its values as words, key=value
    cells: list[list[str]]  # at least one, which may be empty

    @property
    def swept(self) -> list[str]:
        """Return the keys in which runs differ, without the seed, as they are typed, in alphabetical order."""
        return sorted({*map(key_of, self.axes), *_keys_of(self.cells)} - {"seed"})

    def around(self, cell: Sequence[str]) -> list[str]:
        """Return what the runs of a cell share; the cell's own values take precedence."""
        own = set(map(key_of, cell))
        return [*(word for word in self.shared if key_of(word) not in own), *cell]


def _grid(overrides: Sequence[str], file: SweepFile, carried: Sequence[str], note: Note) -> Grid:
    """Return the grid of the typed overrides, of those carried from other sweeps, and of a sweep's file, in this rank.

    A key that was typed leaves out what the file has for it, and one value that it has for a setting below it; an
    option of an axis gives way to all the settings that it would set. `ConfigError` where the file is not sound, or
    where a typed word would take away what a cell is for.
    """
    ours = [o for o in parsed(overrides) if not o.is_hydra_override()]
    typed = {_key(o): o for o in ours}
    given_way = typed.keys() | {key for key, meant in MEANS.items() if typed.keys() >= set(meant)}
    words = [f"{key}={value}" for key, value in file.axes.items() if key_of(key) not in given_way]
    of_file = [o for o in parsed(words) if o.is_sweep_override() or not _covered(_key(o), typed)]
    _refuse_unsound_cells(file, typed, {_key(o) for o in of_file if o.is_sweep_override()})
    shared = [str(o.input_line) for o in ours if not o.is_sweep_override()]
    shared += _not_set(carried, typed, file, note)
    shared += [str(o.input_line) for o in of_file if not o.is_sweep_override()]
    axes = {o.get_key_element(): _values(o) for o in (*ours, *of_file) if o.is_sweep_override()}
    for key in [key for key, values in axes.items() if len(values) == 1 and key != "seed"]:
        shared += axes.pop(key)
    cells = [list(cell) for cell in dict.fromkeys(tuple(map(_canonical_word, cell)) for cell in file.cells)]
    if len(cells) > 1:
        return Grid(shared, axes, cells)
    return Grid([*shared, *itertools.chain(*cells)], axes, [[]])  # nothing differs


def _key(override: Override) -> str:
    return key_of(str(override.input_line))


def _keys_of(cells: Iterable[Iterable[str]]) -> set[str]:
    return {key_of(word) for cell in cells for word in cell}


def _covered(key: str, typed: Iterable[str]) -> bool:
    """Return whether a key, or the group that contains it, was typed.

    >>> _covered("data.max_events", ["data"]), _covered("data", ["data.max_events"])
    (True, False)
    """
    return any(f"{key}.".startswith(f"{one}.") for one in typed)


def with_meant(keys: Iterable[str]) -> set[str]:
    """Return the keys, and those that options of them set.

    >>> sorted(with_meant({"off_policy", "seed"}))
    ['epochs_per_rollout', 'off_policy', 'seed', 'train_batch_size']
    """
    named = set(keys)
    return named | {meant for key in named for meant in MEANS.get(key, ())}


def _values(override: Override) -> list[str]:
    """Return the overrides that a sweep over one key stands for, each once."""
    key = override.get_key_element()
    values = [_canonical_word(f"{key}={value}") for value in override.sweep_string_iterator()]
    if not values:
        raise ConfigError(f"{override.input_line} holds no value: give at least one")
    return list(dict.fromkeys(values))


def canonical(value: str) -> str:
    """Return a number in its shortest spelling, so that it is the same in every name; other text unchanged.

    >>> [canonical(text) for text in ("0.0001", "1e-04", "3e-05", "0.50", "1024", "true", "'a b'", "1e5", "2.0")]
    ['1e-4', '1e-4', '3e-5', '0.5', '1024', 'true', "'a b'", '1e5', '2.0']
    """
    if not re.fullmatch(r"-?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][+-]?\d+)?", value) or not 0 < abs(float(value)) < 1:
        return value
    plain = repr(float(value))
    digits, exponent = f"{float(value):.15e}".split("e")
    short = f"{digits.rstrip('0').rstrip('.')}e{int(exponent)}"
    return short if float(short) == float(plain) and len(short) < len(plain) else plain


def _canonical_word(word: str) -> str:
    key, equals, value = word.partition("=")
    return f"{key}{equals}{canonical(value)}"


def _refuse_unsound_cells(file: SweepFile, typed: Mapping[str, Override], axes: set[str]) -> None:
    """Refuse a cell of several values, one that sets an axis, and typed overrides of a cell's own settings."""
    for cell in file.cells:
        of_stage = any(BESIDE in word for word in cell)
        for override in parsed(cell):
            word, key = override.input_line, _key(override)
            if override.is_sweep_override():
                raise ConfigError(
                    f"sweep/{file.name}.yaml: cells holds {word}, which is several values: write a cell for each, or "
                    "an axis below hydra.sweeper.params"
                )
            given = typed.get(key)
            if given is not None and (given.is_sweep_override() or not of_stage):
                raise ConfigError(
                    f"{given.input_line} takes {word} away from the cells of sweep={file.name}, which are there to "
                    f"differ in it: leave {key} out, or type the sweep that you mean without sweep={file.name}"
                )
            if key in axes:
                raise ConfigError(
                    f"sweep/{file.name}.yaml: {key} is set by cells and is an axis too: leave it out of one"
                )


def _not_set(carried: Sequence[str], typed: Iterable[str], file: SweepFile, note: Note) -> list[str]:
    """Return the carried overrides that were neither typed nor set by the sweep itself; report the others."""
    own = file.settings | with_meant({*map(key_of, file.axes), *_keys_of(file.cells)})
    own |= (file.chosen & {"std_norm"}) | ({"loss"} if "objective" in file.chosen else set())
    typed, kept = with_meant(typed), []
    for word in carried:
        if _covered(key_of(word), typed):
            note(f"note: {word} is not carried on: {key_of(word)} was given")
        elif _covered(key_of(word), own):
            note(f"note: {word} is not carried on: sweep={file.name} sets {key_of(word)} itself")
        else:
            kept.append(_canonical_word(word))
    return kept


# From the grid to runs with names, a folder and a reference


def folder_of(request: Request, swept: Sequence[str], base: DictConfig) -> Path:
    """Return where a sweep writes: hydra.sweep.dir if given, or else a folder below runs/sweeps.

    That is named by `sweep_name`, or by the sweep's name (without one the swept keys) and the typed overrides among
    `IN_NAME`.
    """
    given, typed_name = str(base.hydra.sweep.dir or ""), request.options.sweep_name
    if "hydra.sweep.dir" in map(key_of, request.overrides):
        if typed_name:
            raise ConfigError(
                f"sweep_name={typed_name} and hydra.sweep.dir={given} both name the sweep's folder: leave one of them "
                "out"
            )
        if not given:
            raise ConfigError("hydra.sweep.dir= names no folder: give one, or leave it out")
        return Path(given)
    if typed_name:
        return SWEEPS / typed_name
    name = _named_sweep(request.overrides)
    if given != str(SWEEPS / (name or "sweep")):  # set by the file
        return Path(given)
    first = (name or ",".join(swept) or "seeds")[:100]
    beside = [word for word in fixed(request.overrides) if key_of(word) in IN_NAME]
    rest = run_name(beside) if beside else ""
    return SWEEPS / ",".join(part for part in (first, rest) if part)


def _runs(grid: Grid, folder: Path, usual_seed: str, name: str, note: Note) -> list[RunState]:
    """Return every run once, in order: every setting before the next seed. `usual_seed`: where none was given."""
    axes = dict(grid.axes)
    seeds = [[word] for word in axes.pop("seed", [])] or [[]]
    usual = [_filled(grid, cell, name) for cell in grid.cells]
    runs: dict[str, RunState] = {}
    twice = 0
    for seed, (cell, filled) in itertools.product(seeds, zip(grid.cells, usual, strict=True)):
        for combination in itertools.product(*axes.values()):
            words = [word.replace(BESIDE, str(folder.parent)) for word in (*grid.around(cell), *combination, *seed)]
            if "seed" not in map(key_of, words):
                words.append(f"seed={usual_seed}")
            values = filled | {key_of(word): word.partition("=")[2] for word in words}
            if not re.fullmatch(r"-?\d+", values["seed"]):
                raise ConfigError(f"seed={values['seed']} must be of type Integer: give a whole number")
            setting = {key: values[key] for key in grid.swept if key in values}
            unquoted = [f"{key}={value.strip(chr(39) + chr(34))}" for key, value in setting.items()]
            run = RunState(run_name([*unquoted, f"seed={values['seed']}"]), words, setting, int(values["seed"]))
            twice += run.name in runs
            runs.setdefault(run.name, run)
    if twice:
        note(f"note: {twice} runs of this sweep would repeat another one, and are left out")
    return list(runs.values())


def _filled(grid: Grid, cell: Sequence[str], name: str) -> Setting:
    """Return the keys that only other cells set, from the config, so that names and tables are complete."""
    keys = _keys_of(grid.cells) - set(map(key_of, cell))
    if not keys:
        return {}
    return _values_in(composed([*grid.around(cell), *(values[0] for values in grid.axes.values())], name), keys)


def _values_in(cfg: DictConfig, keys: Iterable[str]) -> Setting:
    """Return the values of some keys in a config, options by their names."""
    choices = {key.rpartition("@")[2]: option for key, option in cfg.hydra.runtime.choices.items()}
    found = {}
    for key in sorted(keys):
        if key in choices:
            found[key] = str(choices[key])
        elif (value := OmegaConf.select(cfg, key)) is not None or OmegaConf.select(cfg, key, default=0) is None:
            found[key] = canonical(_plain_word(value))
    return found


def _plain_word(value: object) -> str:
    """Return a value of a config as it is typed."""
    return typed_word(OmegaConf.to_container(value) if OmegaConf.is_list(value) else value)


def _reference(file: SweepFile, grid: Grid, runs: Sequence[RunState], typed: set[str], name: str) -> Setting | None:
    """Return the setting that the file's reference describes, the first of several; None if no run has it.

    `ConfigError` for a key that neither varies nor was typed: it would match every run. Options that no run has any
    more are looked up as the settings that they set.
    """
    if file.reference == [FIRST]:
        return runs[0].setting
    varied = {*map(key_of, file.axes), *_keys_of(file.cells)}
    wanted: Setting = {}
    for word in file.reference:
        key, _, value = _canonical_word(word).partition("=")
        key = key_of(key)
        if key not in varied | typed | set(grid.swept):
            raise ConfigError(
                f"sweep/{file.name}.yaml: reference holds {word}, which no run of the sweep varies: it may name "
                f"{few(sorted(varied)) or 'nothing here'}"
            )
        inner = [meant for meant in MEANS.get(key, ()) if meant in grid.swept and key not in grid.swept]
        inner = inner or [key] * ("${" in word)
        wanted |= (_values_in(composed([*grid.shared, word], name), inner) if inner else {}) or {key: value}
    for run in runs:
        if wanted and run.setting and all(run.setting.get(key, value) == value for key, value in wanted.items()):
            return run.setting
    return None
