"""Design a sweep from its overrides and its file: its runs, their names and their folder.

Every run is a command of its own: the settings of the file's blocks are among its overrides.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.compose import composed, key_of, parsed
from rlreason.cli.flags import Request
from rlreason.cli.mistakes import in_one_line, refuse_wrong_words
from rlreason.cli.names import PLACED, translated
from rlreason.cli.options import config_content, config_exists, group_options
from rlreason.config.leaves import typed_word
from rlreason.config.store import FIRST, SweepFile, run_name, sweep_file
from rlreason.errors import ConfigError
from rlreason.runtime.text import few
from rlreason.sweeps.state import SWEEPS, Design, PlannedRun, Setting


def fixed(overrides: list[str]) -> list[str]:
    """Return the overrides that name one value."""
    return [str(o.input_line) for o in parsed(overrides) if not o.is_sweep_override()]


def values_of(override: Override) -> list[str]:
    """Return the overrides that a sweep over one key stands for."""
    if isinstance(override.value(), IntervalSweep):
        raise ConfigError(
            f"{override.input_line}: a sweep cannot draw from an interval: list the values, or choose a sweeper that "
            "can (hydra/sweeper=optuna, after pip install hydra-optuna-sweeper)"
        )
    with in_one_line([str(override.input_line)], composing=True):  # a range of step 0
        values = list(override.sweep_string_iterator())
    if not values:
        raise ConfigError(f"{override.input_line} holds no value: give at least one")
    return [f"{override.get_key_element()}={value}" for value in values]


Axes = dict[str, list[str]]  # key as Hydra takes it -> its values as words, key=value
BESIDE = "{sweeps}"
#: An option of the first sets what the others name.
MEANS = {
    "objective": ("loss", "length_norm", "baseline", "std_norm"),
    "off_policy": ("epochs_per_rollout", "train_batch_size"),
}


@dataclass(frozen=True, slots=True)
class Grid:
    """What the runs of a sweep share, and how they differ."""

    shared: list[str]
    axes: Axes
    cells: list[list[str]]  # at least one, which may be empty

    @property
    def swept(self) -> list[str]:
        """Return the keys in which runs differ, without the seed, as they are typed, in alphabetical order."""
        keys = {key_of(key) for key in self.axes} | {key_of(word) for cell in self.cells for word in cell}
        return sorted(keys - {"seed"})

    def combinations(self) -> Iterator[tuple[int, list[str]]]:
        """Return for each run the number of its cell and its overrides; every setting before the next seed."""
        axes = dict(sorted(self.axes.items(), key=lambda axis: axis[0] != "seed"))
        seeds = [[word] for word in axes.pop("seed", [])] or [[]]
        for seed, (number, cell) in itertools.product(seeds, enumerate(self.cells)):
            for combination in itertools.product(*axes.values()):
                yield number, [*self.around(cell), *combination, *seed]

    def beside(self, folder: Path) -> "Grid":
        """Return the grid with `{sweeps}` replaced by the folder that holds the sweep's own."""

        def there(words: Sequence[str]) -> list[str]:
            return [word.replace(BESIDE, str(folder.parent)) for word in words]

        axes = {key: there(words) for key, words in self.axes.items()}
        return Grid(there(self.shared), axes, [there(cell) for cell in self.cells])

    def around(self, cell: Sequence[str]) -> list[str]:
        """Return what the runs of a cell share; the cell's own values take precedence."""
        own = {key_of(word) for word in cell}
        return [*(word for word in self.shared if key_of(word) not in own), *cell]


def grid_of(overrides: Sequence[str], file: SweepFile, carried: Sequence[str], note: Callable[[str], object]) -> Grid:
    """Return the grid of the typed overrides, of those carried from other sweeps, and of a sweep's file, in this rank.

    `file`: as it is at the scale of the runs. A key that was typed leaves out what the file has for it, and one value
    that it has for a setting below it; an option of an axis gives way to all the settings that it would set.
    `ConfigError` where the file is not sound, or where a typed word would take away what a cell is for.
    """
    ours = [o for o in parsed(overrides) if not o.is_hydra_override()]
    file = _translated(file, note)
    typed = {key_of(str(o.input_line)) for o in ours}
    _refuse_taken(file, {key_of(str(o.input_line)): o for o in ours})
    left = typed | {key for key, meant in MEANS.items() if typed.issuperset(meant)}
    of_file = [
        o
        for o in parsed([word for word in axis_overrides(file.axes) if key_of(word) not in left])
        if o.is_sweep_override() or not covered(key_of(str(o.input_line)), typed)
    ]
    _refuse_both(file, {key_of(str(o.input_line)) for o in of_file if o.is_sweep_override()})
    kept = _not_set(carried, typed, file, note)
    cells = [[canonical_word(word) for word in cell] for cell in file.cells]
    shared = [
        *(str(o.input_line) for o in ours if not o.is_sweep_override()),
        *kept,
        *(str(o.input_line) for o in of_file if not o.is_sweep_override()),
    ]
    axes = {o.get_key_element(): _values(o) for o in (*ours, *of_file) if o.is_sweep_override()}
    for key in [key for key, words in axes.items() if len(words) == 1 and key != "seed"]:
        shared += axes.pop(key)
    cells = [list(cell) for cell in dict.fromkeys(map(tuple, cells))] or [[]]
    if len(cells) == 1:  # nothing differs
        shared, cells = [*shared, *cells[0]], [[]]
    return Grid(shared, axes, cells)


def axis_overrides(axes: Mapping[str, str]) -> list[str]:
    """
    >>> axis_overrides({"seed": "0,1"})
    ['seed=0,1']
    """
    return [f"{key}={value}" for key, value in axes.items()]


def covered(key: str, typed: set[str]) -> bool:
    """Return whether a key, or the group that contains it, was typed.

    >>> covered("data.max_events", {"data"}), covered("data", {"data.max_events"})
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


def canonical_word(word: str) -> str:
    """
    >>> canonical_word("learning_rate=0.0003")
    'learning_rate=3e-4'
    """
    key, equals, value = word.partition("=")
    return f"{key}{equals}{canonical(value)}"


def _values(override: Override) -> list[str]:
    return list(dict.fromkeys(map(canonical_word, values_of(override))))


def _translated(file: SweepFile, note: Callable[[str], object]) -> SweepFile:
    """Return the file under our names and options; Hydra takes the keys of axes literally."""
    for key in file.axes:
        if key in PLACED:
            raise ConfigError(f"{key} in the file of a sweep holds an option: write {PLACED[key]}@{key} there")

    def ours(words: list[str]) -> list[str]:
        found = translated(words, note)
        refuse_wrong_words(found)
        return found

    axes = dict(word.partition("=")[::2] for word in ours(axis_overrides(file.axes)))
    cells = [ours(cell) for cell in file.cells]
    for cell in cells:
        for override in parsed(cell):
            if override.is_sweep_override():
                raise ConfigError(
                    f"sweep/{file.name}.yaml: cells holds {override.input_line}, which is several values: write a cell "
                    "for each, or an axis below hydra.sweeper.params"
                )
    return replace(
        file, axes=axes, cells=cells, reference=file.reference if file.reference == [FIRST] else ours(file.reference)
    )


def _refuse_both(file: SweepFile, axes: set[str]) -> None:
    for word in itertools.chain.from_iterable(file.cells):
        if key_of(word) in axes:
            raise ConfigError(
                f"sweep/{file.name}.yaml: {key_of(word)} is set by cells and is an axis too: leave it out of one"
            )


def _refuse_taken(file: SweepFile, typed: Mapping[str, Override]) -> None:
    """Refuse overrides of a cell's own settings."""
    for cell in file.cells:
        of_stage = any(BESIDE in word for word in cell)
        for word in cell:
            given = typed.get(key_of(word))
            if given is not None and (given.is_sweep_override() or not of_stage):
                raise ConfigError(
                    f"{given.input_line} takes {word} away from the cells of sweep={file.name}, which are there to "
                    f"differ in it: leave {key_of(word)} out, or type the sweep that you mean without sweep={file.name}"
                )


def _not_set(words: Sequence[str], typed: set[str], file: SweepFile, note: Callable[[str], object]) -> list[str]:
    """Return the carried overrides that were neither typed nor set by the sweep itself; report the others."""
    varied = {key_of(key) for key in file.axes} | {key_of(word) for cell in file.cells for word in cell}
    own = file.settings | with_meant(varied) | (file.chosen.keys() & {"std_norm"})
    own |= {"loss"} if "objective" in file.chosen else set()
    typed = with_meant(typed)
    kept = []
    for word in words:
        if covered(key_of(word), typed):
            note(f"note: {word} is not carried on: {key_of(word)} was given")
        elif covered(key_of(word), set(own)):
            note(f"note: {word} is not carried on: sweep={file.name} sets {key_of(word)} itself")
        else:
            kept.append(canonical_word(word))
    return kept


IN_NAME = ("algorithm", "data", "experiment", "model", "scale")  # if typed, they are part of the sweep's folder name
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
    `IN_NAME`.
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
    beside = sorted(word for word in fixed(request.overrides) if key_of(word) in IN_NAME)
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
