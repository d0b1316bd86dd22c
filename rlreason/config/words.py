"""Check the words of a command line before Hydra acts on them: every run that they ask for, in one line per mistake.

Hydra says what is wrong over several lines and, in a sweep, only when the wrong job's turn comes. Here every
job is composed and checked first. It knows Hydra's public compose call and override parser.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlreason.config.aliases import translated
from rlreason.config.flags import Asked, composing, read
from rlreason.config.mistakes import one_line
from rlreason.config.run import Run
from rlreason.config.store import resource_dir, typed
from rlreason.config.unread import complaints, unread_keys
from rlreason.errors import ConfigError
from rlreason.status import RESOURCES, exit_code

MOST_RUNS_CHECKED = 64  # composing one run takes about 0.1 s


def quoted(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Quote a value that holds an equals sign, as the folders of sweeps do: Hydra cannot read it bare.

    In a sweep a comma separates values, so a value that holds one is left alone.

    >>> quoted(["model.path=runs/sweeps/x/seed=0", "seed=0,1", "a='b=c'"], multirun=True)
    ["model.path='runs/sweeps/x/seed=0'", 'seed=0,1', "a='b=c'"]
    """

    def one(word: str) -> str:
        key, _, value = word.partition("=")
        plain = "=" in value and not any(c in value for c in "'\"[]{}()\\" + "," * multirun)
        return f"{key}='{value}'" if plain else word

    return [one(word) for word in overrides]


def check_words(words: Sequence[str], note: Callable[[str], object] = print) -> Asked:
    """Check a command line before anything runs, and return it under our names; `ConfigError` in one line a mistake.

    A question must compose; runs must also keep the rules and have a folder to write to.
    """
    asked = read(words)
    if not asked.composes:
        return asked
    with composing(asked):
        asked = replace(asked, overrides=translated(quoted(asked.overrides, asked.multirun), note))
        if asked.starts:
            return replace(asked, folder=_check_runs(asked))
        _check_question(asked)
    return asked


def check_rules(asked: Asked) -> None:
    """Refuse what was asked when it composes and breaks a rule."""
    with composing(asked):
        _checked(asked.overrides, asked.config_name)


def _check_question(asked: Asked) -> None:
    part = asked.flags.get("package")
    if not asked.overrides and not part:
        return
    cfg = _composed(asked.overrides, asked.config_name)
    if part and part != "_global_" and OmegaConf.select(cfg, part) is None:
        raise ConfigError(f"--package={part} is no part of the config: python -m rlreason --cfg job shows it whole")


def _check_runs(asked: Asked) -> Path:
    """Refuse runs that could not begin; returns the folder that they will write to."""
    name, multirun = asked.config_name, asked.multirun
    said: dict[str, str] = {}  # of each setting that some run would not read, what is to be said of it
    nobody: dict[str, str] = {}  # what none of them would read
    words = {word.partition("=")[0] for word in asked.overrides}
    runs = []
    for number, combination in enumerate(itertools.islice(_runs(asked.overrides, multirun, name), MOST_RUNS_CHECKED)):
        run = _checked(combination, name, of_sweep=multirun)
        runs.append(run)
        said |= complaints(run, resource_dir("conf"))
        unread = unread_keys(run)
        nobody = {key: where for key, where in unread.items() if not number or key in nobody}
    if useless := [line for key, line in said.items() if key in nobody]:
        raise ConfigError("\n".join(useless))
    for line in said.values():
        print(f"note: in some runs of this sweep, {line}")
    for key in sorted(words & nobody.keys() - said.keys()):  # given as they are anyway: no harm, but no effect either
        print(f"note: {key} has no effect: it is read {nobody[key]}")
    plain = [word for word in asked.overrides if not multirun or word.startswith(("sweep=", "hydra.", "hydra/"))]
    job = _composed(plain, name).hydra
    folder = Path(job.sweep.dir if multirun else job.run.dir)
    _check_writable(folder)
    from rlreason.setup.preflight import preflight  # the grader's rooms: only where runs are to start

    for line in preflight(runs, folder):
        print(f"note: {line}")
    return folder


def _check_writable(folder: Path) -> None:
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    missing = [p for p in (folder, *folder.absolute().parents) if not p.exists()]
    try:
        if not place.is_dir() or not os.access(place, os.W_OK):
            raise PermissionError(f"{place} is no writable folder")
        for path in reversed(missing):  # only trying tells, where the file system has rules of its own
            path.mkdir()
        for path in missing:
            path.rmdir()
    except OSError as error:
        if exit_code(error) == RESOURCES:
            raise
        raise ConfigError(
            f"the run folder {folder} cannot be made: {error.strerror or error}: choose another"
        ) from None


def _runs(overrides: list[str], multirun: bool, name: str = "config") -> Iterable[list[str]]:
    """The overrides of each run of a sweep (one list for a single run), each value early in at least one of them."""
    if not multirun:
        return [overrides]
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    parsed = _parsed(parser, overrides)
    plain = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    hydra = _composed(plain, name).hydra
    params = hydra.sweeper.get("params") or {}
    named = {o.key_or_group for o in parsed}
    of_sweep = _parsed(parser, [f"{key}={value}" for key, value in params.items() if key not in named])
    basic = hydra.runtime.choices["hydra/sweeper"] == "basic"
    axes = [_values(o, basic) for o in (*parsed, *of_sweep) if o.is_sweep_override()]
    fixed = [str(o.input_line) for o in of_sweep if not o.is_sweep_override()]
    return ([*plain, *fixed, *combination] for combination in _spread(axes))


def _parsed(parser: OverridesParser, overrides: list[str]) -> list[Override]:
    try:
        return parser.parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(one_line(error)) from error


def _values(override: Override, basic: bool) -> list[str]:
    """The overrides that a sweep over one key stands for; of an interval, which a plug-in draws from, both ends."""
    interval = override.value()
    if not isinstance(interval, IntervalSweep):
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
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


def _composed(overrides: Sequence[str], name: str) -> DictConfig:
    """The config of one run, unchecked and with Hydra's own settings beside it."""
    with _one_line_errors():
        return compose(name, list(overrides), return_hydra_config=True)


def _checked(overrides: Sequence[str], name: str, of_sweep: bool = False) -> Run:
    """The settings of one run, checked by its rules."""
    with _one_line_errors():
        cfg = compose(name, list(overrides))
        OmegaConf.resolve(cfg)
        return typed(cfg, of_sweep)


@contextmanager
def _one_line_errors() -> Iterator[None]:
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from error
