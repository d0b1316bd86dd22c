"""The words of a sweep's command line that are no settings of its runs: how many run side by side, and the like.

Hydra never sees them.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from rlreason.errors import ConfigError

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NAME = re.compile(r"\w[\w.,=+-]*")


@dataclass(frozen=True, slots=True)
class SweepWords:
    """What they ask for."""

    jobs: int | None = None  # runs side by side; null: as many as GPUs suffice for; without GPUs one, of launchers more
    gpus_per_run: int | None = None  # that each run has to itself; auto (null): as many as its settings ask for
    dry: bool = False  # stop after the plan: nothing runs here, so that what the runs need may be elsewhere
    carry: tuple[str, ...] = ()  # finished sweeps, by name or folder, whose winners are taken over
    sweep_name: str | None = None  # of the sweep's folder below runs/sweeps


def without_sweep_words(overrides: Sequence[str], multirun: bool) -> tuple[list[str], SweepWords]:
    """The overrides without these words, and what they ask for. `ConfigError` for a wrong one, and outside a sweep.

    >>> rest, own = without_sweep_words(["seed=0,1", "jobs=2", "carry=[a,b]", "dry=yes"], multirun=True)
    >>> rest, own.jobs, own.dry, own.carry
    (['seed=0,1'], 2, True, ('a', 'b'))
    """
    given: dict[str, str] = {}
    rest = []
    for word in overrides:
        key, equals, value = word.lstrip("+").partition("=")
        if key not in _READ or not equals:
            rest.append(word)
        elif not multirun:
            raise ConfigError(f"{word} is for a sweep: add -m, or leave it out")
        elif key in given:
            raise ConfigError(f"{key}={given[key]} and {word} both set {key}: leave one of them out")
        else:
            given[key] = value
    return rest, SweepWords(**{key: _READ[key](_unquoted(value)) for key, value in given.items()})  # type: ignore[arg-type]


def _jobs(value: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,5}", value):
        raise ConfigError(f"jobs={value} must be a whole number, 1 or more: try jobs=2, for two runs side by side")
    return int(value)


def _gpus(value: str) -> int | None:
    if value.lower() in ("auto", "null"):
        return None
    if not re.fullmatch(r"\d{1,4}", value):
        raise ConfigError(
            f"gpus_per_run={value} must be a whole number or auto: 1 gives every run a GPU of its own, 0 lets every "
            "run see all of them"
        )
    return int(value)


def _dry(value: str) -> bool:
    if value.lower() not in YES + NO:
        raise ConfigError(f"dry={value} must be true or false: dry=true stops after the plan")
    return value.lower() in YES


def _carry(value: str) -> tuple[str, ...]:
    inside = value[1:-1] if value[:1] == "[" and value[-1:] == "]" else value
    names = tuple(_unquoted(name.strip()) for name in re.split(r",(?![^,]*=)", inside))
    if not all(names):
        raise ConfigError(f"carry={value} names no sweep: give one of runs/sweeps, as in carry=grpo_learning_rate")
    return names


def _name(value: str) -> str:
    if not NAME.fullmatch(value) or len(value) > 100:
        raise ConfigError(
            f"sweep_name={value} must be a plain name of at most 100 letters, digits and -_.,=+: it becomes the folder "
            "runs/sweeps/NAME; hydra.sweep.dir=DIR puts it elsewhere"
        )
    return value


def _unquoted(value: str) -> str:
    """
    >>> _unquoted("'a b'"), _unquoted("a")
    ('a b', 'a')
    """
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


_READ: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {"jobs": _jobs, "gpus_per_run": _gpus, "dry": _dry, "carry": _carry, "sweep_name": _name}
)
