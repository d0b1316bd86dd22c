"""Check the words of a command line before Hydra acts on them: every run that they ask for, in one line per mistake.

Hydra says what is wrong over several lines and, in a sweep, only when the wrong job's turn comes. Here every
job is composed and checked first.
"""

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from hydra import compose
from omegaconf import OmegaConf

from rlreason.cli.aliases import translated
from rlreason.cli.choices import refuse_wrong_choices
from rlreason.cli.flags import Asked, composing, read
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.cli.multirun import composed, fixed, runs_of, with_own_names
from rlreason.config.rules import lowered
from rlreason.config.run import RunConfig
from rlreason.config.store import resource_dir, typed
from rlreason.config.unread import complaints, unread_keys
from rlreason.errors import ConfigError
from rlreason.records.status import RESOURCES, exit_code
from rlreason.runtime.environment import SWEEP_VARIABLE

MOST_RUNS_CHECKED = 64  # composing one run takes about 0.1 s


def quoted(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Quote a value that Hydra cannot read bare: with an equals sign, as the folders of sweeps, or letters like ü.

    In a sweep a comma separates values, so a value that holds one is left alone.

    >>> quoted(["model.path=runs/sweeps/x/seed=0", "seed=0,1", "a='b=c'"], multirun=True)
    ["model.path='runs/sweeps/x/seed=0'", 'seed=0,1', "a='b=c'"]
    """

    def one(word: str) -> str:
        key, _, value = word.partition("=")
        odd = "=" in value or not value.isascii()
        plain = not any(c in value for c in "'\"[]{}()\\" + "," * multirun)
        return f"{key}='{value}'" if odd and plain else word

    return [one(word) for word in overrides]


def check_words(words: Sequence[str], note: Callable[[str], object] = print) -> Asked:
    """Check a command line before anything runs, and return it under our names; `ConfigError` in one line a mistake.

    A question must compose; runs must also keep the rules and have a folder to write to.
    """
    with mistakes_in(words):
        asked = read(words)
        if not asked.composes:
            return asked
        with composing(asked), in_one_line(asked.overrides, asked.config_name):
            words = [_without_detour(word) for word in quoted(asked.overrides, asked.multirun)]
            asked = replace(asked, overrides=translated(words, note))
            refuse_wrong_choices(asked.overrides)
            if asked.starts:
                if asked.multirun:
                    asked = replace(asked, overrides=with_own_names(asked.overrides, asked.config_name, note))
                asked = replace(asked, folder=_check_runs(asked, note))
            else:
                if asked.multirun:  # about what all the runs of the sweep share
                    asked = replace(asked, overrides=fixed(asked.overrides))
                _check_question(asked)
    return asked


def _without_detour(word: str) -> str:
    """The run's folder without any a/.. where there is no a: it would be made on the way there, and stay.

    >>> _without_detour("hydra.run.dir=/nowhere/../q"), _without_detour("hydra.run.dir='nowhere/../a=b'")
    ('hydra.run.dir=/q', "hydra.run.dir='a=b'")
    """
    key, _, value = word.partition("=")
    place = value.strip("'\"")
    if key not in ("hydra.run.dir", "hydra.sweep.dir") or ".." not in Path(place).parts or Path(place).parent.exists():
        return word
    return f"{key}={value.replace(place, os.path.normpath(place))}"


def check_rules(asked: Asked) -> None:
    """Refuse what was asked when it composes and breaks a rule. Hydra must be ready to compose."""
    _checked(asked.overrides, asked.config_name)


def _check_question(asked: Asked) -> None:
    part = asked.flags.get("package")
    if not asked.overrides and not part:
        return
    cfg = composed(asked.overrides, asked.config_name)
    if part and part != "_global_" and OmegaConf.select(cfg, part) is None:
        raise ConfigError(f"--package={part} is no part of the config: python -m rlreason --cfg job shows it whole")


def _check_runs(asked: Asked, note: Callable[[str], object]) -> Path:
    """Refuse runs that could not begin; returns the folder that they will write to."""
    name, multirun, in_sweep = asked.config_name, asked.multirun, SWEEP_VARIABLE in os.environ
    said: dict[str, str] = {}  # of each setting that some run would not read, what is to be said of it
    nobody: dict[str, str] = {}  # what none of them would read
    words = {word.partition("=")[0] for word in asked.overrides}
    runs = []
    for number, combination in enumerate(itertools.islice(runs_of(asked.overrides, multirun, name), MOST_RUNS_CHECKED)):
        run = _checked(combination, name, of_sweep=multirun or in_sweep)
        runs.append(run)
        said |= complaints(run, resource_dir("conf"))
        unread = unread_keys(run)
        nobody = {key: where for key, where in unread.items() if not number or key in nobody}
    useless = [line for key, line in said.items() if key in nobody]
    if useless and not in_sweep:  # of a sweep's own run, another one reads it
        raise ConfigError("\n".join(useless))
    for line in said.values():
        note(f"note: in some runs of this sweep, {line}")
    for key in sorted(words & nobody.keys() - said.keys()):  # given as they are anyway: no harm, but no effect either
        note(f"note: {key} has no effect: it is read {nobody[key]}")
    plain = [word for word in asked.overrides if not multirun or word.startswith(("sweep=", "hydra.", "hydra/"))]
    job = composed(plain, name).hydra
    key, place = ("hydra.sweep.dir", job.sweep.dir) if multirun else ("hydra.run.dir", job.run.dir)
    if not place:
        raise ConfigError(f"{key}={place or ''} names no folder: give one, or leave it out")
    folder = Path(place)
    _check_writable(folder)
    from rlreason.setup.preflight import preflight  # it loads the grader: only where runs are to start

    for line in preflight(runs, folder):
        note(f"note: {line}")
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


def _checked(overrides: Sequence[str], name: str, of_sweep: bool = False) -> RunConfig:
    """The settings of one run, checked by its rules."""
    with in_one_line(overrides, name, composing=True):
        cfg = compose(name, list(overrides))
        OmegaConf.resolve(cfg)
    run = typed(cfg, of_sweep)
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    if "interim_eval_problems" in given and (bad := lowered(run)):
        raise ConfigError("\n".join(bad))
    return run
