"""The runs of a sweep, as lists of overrides: from the command line, and from what a sweep's file gives its sweeper."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig

from rlreason.cli.aliases import PLACED, translated
from rlreason.cli.choices import refuse_wrong_choices
from rlreason.cli.mistakes import in_one_line
from rlreason.errors import ConfigError


def with_own_names(overrides: list[str], name: str, note: Callable[[str], object]) -> list[str]:
    """The overrides, with what a sweep's file gives the sweeper under another's names or spellings moved among them."""
    params = composed(fixed(overrides), name).hydra.sweeper.get("params") or {}
    words = {f"{_of_file(str(key))}={value}": str(key) for key, value in params.items()}
    ours = translated(list(words), note)
    refuse_wrong_choices(ours)
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    moved = [(key, word) for (before, key), word in zip(words.items(), ours, strict=False) if word != before]
    taken = [f"~hydra.sweeper.params.{key}" for key, _ in moved]
    return [*overrides, *taken, *(word for _, word in moved if word.partition("=")[0] not in given)]


def _of_file(key: str) -> str:
    """A key of a sweep's file, which Hydra takes word for word."""
    if key in PLACED:
        raise ConfigError(f"{key} in the file of a sweep holds an option: write {PLACED[key]}@{key} there")
    return key


def runs_of(overrides: list[str], multirun: bool, name: str = "config") -> Iterable[list[str]]:
    """The overrides of each run of a sweep (one list for a single run), each value early in at least one of them."""
    if not multirun:
        return [overrides]
    typed = parsed(overrides)
    hydra = composed(fixed(overrides), name).hydra
    params = hydra.sweeper.get("params") or {}
    named = {o.get_key_element().lstrip("+~") for o in typed}
    of_sweep = parsed([f"{key}={value}" for key, value in params.items() if key not in named])
    basic = hydra.runtime.choices["hydra/sweeper"] == "basic"
    axes = [values_of(o, basic) for o in (*typed, *of_sweep) if o.is_sweep_override()]
    plain = [str(o.input_line) for o in (*typed, *of_sweep) if not o.is_sweep_override()]
    return ([*plain, *combination] for combination in _spread(axes))


def fixed(overrides: list[str]) -> list[str]:
    """Those that name one value."""
    return [str(o.input_line) for o in parsed(overrides) if not o.is_sweep_override()]


def composed(overrides: Sequence[str], name: str) -> DictConfig:
    """The config of one run, unchecked and with Hydra's own settings."""
    with in_one_line(overrides, name, composing=True):
        return compose(name, list(overrides), return_hydra_config=True)


def parsed(overrides: Sequence[str]) -> list[Override]:
    """The overrides as Hydra reads them; `ConfigError` for one that it cannot read."""
    parser, found = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader()), []
    for word in overrides:
        with in_one_line([word], composing=True):
            found += parser.parse_overrides([word])
    return found


def values_of(override: Override, basic: bool) -> list[str]:
    """The overrides that a sweep over one key stands for; of an interval, which a plug-in draws from, both ends."""
    interval = override.value()
    if not isinstance(interval, IntervalSweep):
        with in_one_line([str(override.input_line)], composing=True):  # a range of step 0
            values = list(override.sweep_string_iterator())
        if not values:
            raise ConfigError(f"{override.input_line} holds no value: give at least one")
        return [f"{override.get_key_element()}={value}" for value in values]
    if basic:
        raise ConfigError(
            f"{override.input_line}: the basic sweeper cannot draw from an interval: list the values, or choose a "
            "sweeper that can (hydra/sweeper=optuna, after pip install hydra-optuna-sweeper)"
        )
    return [f"{override.get_key_element()}={end}" for end in (interval.start, interval.end)]


def _spread(axes: list[list[str]]) -> Iterator[tuple[str, ...]]:
    """Every combination once; those that show each value of each axis come first, so that a check may stop early.

    >>> list(_spread([["a", "b"], ["x", "y", "z"]]))[:3]
    [('a', 'x'), ('b', 'y'), ('a', 'z')]
    """
    longest = max(map(len, axes), default=1)
    first = [tuple(axis[i % len(axis)] for axis in axes) for i in range(longest)] if all(axes) else []
    yield from dict.fromkeys(first)
    yield from (combination for combination in itertools.product(*axes) if combination not in set(first))
