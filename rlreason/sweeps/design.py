"""Design a sweep: from its overrides and its file to its runs, their names, their folder and their reference.

    typed overrides, sweep file  ->  Grid: what the runs share, and how they differ  ->  runs by name  ->  SweepState

Every run is a command of its own: the settings of the file's blocks are among its overrides.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from rlreason.config.leaves import typed_word
from rlreason.config.store import FIRST, SweepFile, run_name
from rlreason.errors import ConfigError
from rlreason.records.files import Note
from rlreason.records.resume import is_below
from rlreason.sweeps.state import SWEEPS, WAITING, RunState, Setting, SweepState

Compose = Callable[[Sequence[str]], DictConfig]  # overrides of one run -> its config, with Hydra's own settings
BESIDE = "{sweeps}"  # in an override: the folder that holds the sweep's own
#: An option of the first sets what the others name.
MEANS = {
    "objective": ("loss", "length_norm", "baseline", "std_norm"),
    "off_policy": ("epochs_per_rollout", "train_batch_size"),
}
ONE_SCALE = ("experiment", "model", "scale")  # a block `embedded` is for one value of each
IN_NAME = ("algorithm", "data", "experiment", "model", "scale")  # if typed, they are part of the sweep's folder name


def key_of(word: str) -> str:
    """Return the setting that an override sets, or the place of the option that it chooses.

    >>> key_of("prompt@eval.prompt=r1_zero"), key_of("++data=gsm8k")
    ('eval.prompt', 'data')
    """
    return word.lstrip("+~").partition("=")[0].rpartition("@")[2]


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides as Hydra does, which must be ready to compose."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    return list(parser.parse_overrides(list(overrides)))


def fixed(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that name one value."""
    return [str(o.input_line) for o in parsed(overrides) if not o.is_sweep_override()]


def with_meant(keys: Iterable[str]) -> set[str]:
    """Return the keys, and those that options of them set."""
    named = set(keys)
    return named | {meant for key in named for meant in MEANS.get(key, ())}


def file_at(whole: SweepFile, words: Sequence[str], base: DictConfig, arms: Sequence[Sequence[str]] = ()) -> SweepFile:
    """Return a sweep's file at the scale of its runs, with its axes as Hydra's sweeper got them (in `base`).

    `arms`: cells that replace its own, the reference first.
    """
    if whole.chain:
        raise ConfigError(f"sweep={whole.name} is a chain of sweeps, and no sweep of a chain: leave it out there")
    if whole.embedded and (several := [o for o in parsed(words) if o.is_sweep_override() and _key(o) in ONE_SCALE]):
        raise ConfigError(
            f"{several[0].input_line} with sweep={whole.name}, whose file has a block embedded for one scale: run a "
            f"sweep for each {several[0].key_or_group}"
        )
    choices = base.hydra.runtime.choices
    embedded = choices.get("scale") == "embedded" and choices.get("experiment") in (None, "null", "none")
    file = whole.embedded if embedded and whole.embedded else whole
    axes = {str(key): _typed(value) for key, value in (base.hydra.sweeper.get("params") or {}).items()}
    axes |= {key: value for key, value in file.axes.items() if whole.axes.get(key) != value}
    if not arms:
        return replace(file, axes=axes)
    own = set(map(key_of, arms[0]))
    axes = {key: value for key, value in axes.items() if own.isdisjoint(MEANS.get(key, ()))}
    return replace(file, axes=axes, cells=list(map(list, arms)), reference=list(arms[0]))


def _typed(value: object) -> str:
    """Return a value of a config as it is typed."""
    return typed_word(OmegaConf.to_container(value) if OmegaConf.is_list(value) else value)


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


def grid_of(overrides: Sequence[str], file: SweepFile, carried: Sequence[str], note: Note) -> Grid:
    """Return the grid of the typed overrides, of a sweep's file, and of those carried on, in this order of precedence.

    A typed key replaces the file's axis, and single values of settings below it. An axis of options gives way to all
    the settings that its options would set. `ConfigError` for a typed override that a cell is there to differ in.
    """
    ours = [o for o in parsed(overrides) if not o.is_hydra_override()]
    typed = {_key(o): o for o in ours}
    given_way = typed.keys() | {key for key, meant in MEANS.items() if typed.keys() >= set(meant)}
    words = [f"{key}={value}" for key, value in file.axes.items() if key_of(key) not in given_way]
    of_file = [o for o in parsed(words) if o.is_sweep_override() or not is_below(_key(o), typed)]
    axes: dict[str, list[str]] = {}
    for override in (o for o in (*ours, *of_file) if o.is_sweep_override()):
        key = override.get_key_element()
        values = [_canonical_word(f"{key}={value}") for value in override.sweep_string_iterator()]
        if not values:
            raise ConfigError(f"{override.input_line} holds no value: give at least one")
        axes[key] = list(dict.fromkeys(values))
    for cell in file.cells:
        goes_on = any(BESIDE in word for word in cell)  # with a model, which may be typed
        for word in cell:
            given = typed.get(key := key_of(word))
            if given is not None and (given.is_sweep_override() or not goes_on):
                whose = f"the cells of sweep={file.name}, which are there to differ in it"
                raise ConfigError(f"{given.input_line} takes {word} away from {whose}: leave one of them out")
    shared = [str(o.input_line) for o in ours if not o.is_sweep_override()]
    own = file.settings | with_meant({*map(key_of, file.axes), *_keys_of(file.cells)})
    own |= (file.chosen & {"std_norm"}) | ({"loss"} if "objective" in file.chosen else set()) | with_meant(typed)
    for word in carried:
        if is_below(key_of(word), own):
            note(f"note: {word} is not carried on: it was typed, or this sweep sets it itself")
        else:
            shared.append(_canonical_word(word))
    shared += [str(o.input_line) for o in of_file if not o.is_sweep_override()]
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


def folder_of(overrides: Sequence[str], swept: Sequence[str], base: DictConfig, sweep_name: str | None = None) -> Path:
    """Return where a sweep writes: hydra.sweep.dir, or a folder below runs/sweeps.

    That is `sweep_name`, or the sweep's name (without one the swept keys) and the typed overrides among `IN_NAME`.
    """
    given, name = str(base.hydra.sweep.dir or ""), named_sweep(overrides)
    is_typed = "hydra.sweep.dir" in map(key_of, overrides)
    if is_typed and sweep_name:
        raise ConfigError(f"sweep_name={sweep_name} and hydra.sweep.dir= both name the sweep's folder: give one")
    if not given:
        raise ConfigError("hydra.sweep.dir= names no folder: give one, or leave it out")
    if sweep_name:
        return SWEEPS / sweep_name
    if is_typed or given != str(SWEEPS / (name or "sweep")):  # or set by the sweep's file
        return Path(given)
    name = (name or ",".join(swept) or "seeds")[:100]
    beside = [word for word in fixed(overrides) if key_of(word) in IN_NAME]
    return SWEEPS / (f"{name},{run_name(beside)}" if beside else name)


def named_sweep(overrides: Sequence[str]) -> str | None:
    """Return the value of `sweep=`, None without it."""
    return next((word.partition("=")[2] for word in reversed(overrides) if key_of(word) == "sweep"), None)


def design_of(grid: Grid, file: SweepFile, folder: Path, compose: Compose, seed: str) -> SweepState:
    """Return the sweep of a grid in a folder, its runs not yet checked: every setting before the next seed."""
    axes = dict(grid.axes)
    seeds = [[word] for word in axes.pop("seed", [])] or [[]]
    filled, runs = list[Setting](), dict[str, RunState]()
    for cell in grid.cells:  # the keys that only other cells set, so that names and tables are complete
        keys, words = _keys_of(grid.cells) - set(map(key_of, cell)), [values[0] for values in axes.values()]
        filled.append(_values_in(compose([*grid.around(cell), *words]), keys) if keys else {})
    for of_seed, (cell, more) in itertools.product(seeds, zip(grid.cells, filled, strict=True)):
        for combination in itertools.product(*axes.values()):
            words = [word.replace(BESIDE, str(folder.parent)) for word in (*grid.around(cell), *combination, *of_seed)]
            if "seed" not in map(key_of, words):
                words.append(f"seed={seed}")
            values = more | {key_of(word): word.partition("=")[2] for word in words}
            if not re.fullmatch(r"-?\d+", values["seed"]):
                raise ConfigError(f"seed={values['seed']} must be of type Integer: give a whole number")
            setting = {key: values[key] for key in grid.swept if key in values}
            unquoted = [f"{key}={value.strip(chr(39) + chr(34))}" for key, value in setting.items()]
            name = run_name([*unquoted, f"seed={values['seed']}"])
            # A word of Hydra's escapes the colon of a function of one's own, and names of folders keep that.
            setting = {key: value.replace(r"\:", ":") for key, value in setting.items()}
            runs.setdefault(name, RunState(name, words, setting, int(values["seed"])))
    every = list(runs.values())
    reference = _reference(file, grid, every, compose)
    return SweepState(folder.name, "", list(every[0].setting), reference, WAITING, 1, "", every, sweep=file.name)


def _values_in(cfg: DictConfig, keys: Iterable[str]) -> Setting:
    """Return the values of some keys in a config, options by their names."""
    choices = {key.rpartition("@")[2]: option for key, option in cfg.hydra.runtime.choices.items()}
    found = {}
    for key in sorted(keys):
        if key in choices:
            found[key] = str(choices[key])
        elif (value := OmegaConf.select(cfg, key, default=BESIDE)) != BESIDE:  # which no config holds
            found[key] = canonical(_typed(value))
    return found


def _reference(file: SweepFile, grid: Grid, runs: Sequence[RunState], compose: Compose) -> Setting | None:
    """Return the setting that the file's reference describes, the first of several; None if no run has it.

    Options that no run has any more are looked up as the settings that they set.
    """
    if file.reference == [FIRST]:
        return runs[0].setting
    varied = {*map(key_of, file.axes), *_keys_of(file.cells), *grid.swept}
    wanted: Setting = {}
    for word in map(_canonical_word, file.reference):
        key, value = key_of(word), word.partition("=")[2]
        if key not in varied:
            raise ConfigError(f"sweep/{file.name}.yaml: reference holds {word}, which no run of it varies: mend it")
        inner = [meant for meant in MEANS.get(key, ()) if meant in grid.swept and key not in grid.swept]
        inner = inner or [key] * ("${" in word)
        wanted |= (_values_in(compose([*grid.shared, word]), inner) if inner else {}) or {key: value}
    for run in runs:
        if wanted and run.setting and all(run.setting.get(key, value) == value for key, value in wanted.items()):
            return run.setting
    return None
