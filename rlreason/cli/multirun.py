"""Expand a sweep into the overrides of its runs: its axes and cells, from the command line and its file."""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig

from rlreason.cli.aliases import PLACED, translated
from rlreason.cli.mistakes import in_one_line
from rlreason.cli.options import refuse_wrong_choices
from rlreason.cli.resume import key_of
from rlreason.config.store import SweepFile
from rlreason.errors import ConfigError


def fixed(overrides: list[str]) -> list[str]:
    """Return the overrides that name one value."""
    return [str(o.input_line) for o in parsed(overrides) if not o.is_sweep_override()]


def composed(overrides: Sequence[str], name: str) -> DictConfig:
    """Return the config of one run, unchecked and with Hydra's own settings."""
    with in_one_line(overrides, name, composing=True):
        return compose(name, list(overrides), return_hydra_config=True)


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse overrides as Hydra does; `ConfigError` for one that it cannot read."""
    parser, found = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()), []
    for word in overrides:
        with in_one_line([word], composing=True):
            found += parser.parse_overrides([word])
    return found


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
        refuse_wrong_choices(found)
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
    return replace(file, axes=axes, cells=cells, reference=ours(file.reference))


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
