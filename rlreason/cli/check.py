"""Check the words of a command line before Hydra acts on them: every run that they ask for, in one line per mistake.

Hydra says what is wrong over several lines and, in a sweep, only when the wrong job's turn comes. Here every
job is composed and checked first.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import OmegaConf

from rlreason.cli.aliases import translated
from rlreason.cli.check_runs import check_runs, checked, place_of
from rlreason.cli.check_sweep import checked_sweep
from rlreason.cli.choices import refuse_wrong_choices
from rlreason.cli.discover_words import own_names
from rlreason.cli.flags import Asked, composing, read
from rlreason.cli.mistakes import in_one_line, mistakes_in
from rlreason.cli.multirun import composed, fixed
from rlreason.cli.sweep_words import without_sweep_words
from rlreason.errors import ConfigError
from rlreason.runtime.environment import SWEEP_VARIABLE


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
            rest, own = without_sweep_words(asked.overrides, asked.multirun)
            rest = own_names(rest, note)
            words = [_without_detour(word) for word in quoted(rest, asked.multirun)]
            asked = replace(asked, overrides=translated(words, note), own=own)
            refuse_wrong_choices(asked.overrides)
            if asked.starts and asked.multirun:
                asked = checked_sweep(asked, note)
            elif asked.starts:
                _refuse_sweep_alone(asked)
                folder = place_of(asked.overrides, asked.config_name, "run")
                check_runs(asked, [asked.overrides], folder, note)
                asked = replace(asked, folder=folder)
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


def _refuse_sweep_alone(asked: Asked) -> None:
    sweep = composed(asked.overrides, asked.config_name).hydra.runtime.choices.get("sweep")
    if sweep and SWEEP_VARIABLE not in os.environ:
        raise ConfigError(f"sweep={sweep} is a grid of runs: add -m (python -m rlreason -m sweep={sweep})")


def check_rules(asked: Asked) -> None:
    """Refuse what was asked when it composes and breaks a rule. Hydra must be ready to compose."""
    checked(asked.overrides, asked.config_name)


def _check_question(asked: Asked) -> None:
    part = asked.flags.get("package")
    if not asked.overrides and not part:
        return
    cfg = composed(asked.overrides, asked.config_name)
    if part and part != "_global_" and OmegaConf.select(cfg, part) is None:
        raise ConfigError(f"--package={part} is no part of the config: python -m rlreason --cfg job shows it whole")
