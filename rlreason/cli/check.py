"""Check a command line before Hydra acts on it: the run that it requests, or what the runs of a sweep share."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from rlreason.cli.compose import (
    RESUME,
    Note,
    check_start,
    composed,
    composed_run,
    refuse_unread,
    repeated,
    resumed_folder,
)
from rlreason.cli.flags import Request, composing, read
from rlreason.cli.mistakes import refuse_wrong_words
from rlreason.cli.names import sweep_options_spelt, translated
from rlreason.config.run import RunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.records.reader import settings_in
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.sweeps.design import fixed, key_of, named_sweep


def check_command_line(words: Sequence[str], note: Note | None = None, place: Path | None = None) -> Request:
    """Check a command line before anything runs and return it under our names; `ConfigError` in one line for a mistake.

    A question must compose, and so must what the runs of a sweep share: our sweeper checks the runs. A single run must
    obey the rules and have a folder to write to; one that resumes writes to `place`, where that is given. Notes are
    printed, beside an answer on standard error.
    """
    request = read(words)
    if not request.composes:
        return request
    note = note or partial(print, file=sys.stdout if request.starts else sys.stderr)
    folder, algorithm = resumed_folder(request.overrides, request.multirun), ""
    if folder is not None:
        request = replace(request, overrides=[word for word in request.overrides if key_of(word) != RESUME])
        algorithm = settings_in(folder).get("algorithm", "")
    with reading(request, note, algorithm) as request:
        overrides, one, in_sweep = request.overrides, None, SWEEP_VARIABLE in os.environ
        if folder is not None:
            one = repeated(folder, overrides, note, place or folder)
        elif request.starts and not request.multirun:
            if (sweep := named_sweep(overrides)) and not in_sweep:
                raise ConfigError(f"sweep={sweep} is a grid of runs: add -m (python -m rlreason -m sweep={sweep})")
            one = composed_run(overrides, request.config_name, of_sweep=in_sweep)
            if in_sweep:
                refuse_unread([one.run], note)
        else:
            composed(fixed(overrides) if request.multirun else overrides, request.config_name)
        if one is not None and request.starts:
            check_start([one.run], one.folder, note)
        return replace(request, one=one)


@contextmanager
def reading(request: Request, note: Note, algorithm: str = "") -> Iterator[Request]:
    """Yield the request under our names, every option of which is there; Hydra is ready to compose it.

    `algorithm`: of the run whose settings are changed.
    """
    with composing(request):
        spelt = sweep_options_spelt(request.overrides, request.multirun)
        overrides = quoted(translated(spelt, note, algorithm), request.multirun)
        refuse_wrong_words(overrides)
        yield replace(request, overrides=overrides)


def requested_run(words: Sequence[str], subcommand: str, note: Note) -> tuple[RunConfig, Path]:
    """Compose and check the run as a start would, and return it with its folder; `ConfigError` for a mistake.

    What only a start refuses (a missing package, a full disk) is not looked at. `subcommand`: named in messages.
    """
    with reading(read(words), note) as request:
        if request.multirun or request.flags:
            raise ConfigError(f"rlreason {subcommand} is about one run: leave the flags out, and give single values")
        one = composed_run(request.overrides, request.config_name)
    if not works_on_a_model(one.run):
        raise ConfigError(f"algorithm={one.run.algorithm} loads no model here, which rlreason {subcommand} is about")
    return one.run, one.folder


def quoted(overrides: Sequence[str], multirun: bool) -> list[str]:
    """Quote values that Hydra cannot read bare: with an equals sign, such as folders of sweeps, or letters such as ü.

    In a sweep a comma separates values, so a value that contains one is left alone.

    >>> quoted(["model.path=runs/sweeps/x/seed=0", "seed=0,1", "a='b=c'"], multirun=True)
    ["model.path='runs/sweeps/x/seed=0'", 'seed=0,1', "a='b=c'"]
    """
    words = []
    for word in overrides:
        key, _, value = word.partition("=")
        odd = "=" in value or not value.isascii()
        bare = not any(c in value for c in "'\"[]{}()\\" + "," * multirun)
        words.append(f"{key}='{value}'" if odd and bare else word)
    return words
