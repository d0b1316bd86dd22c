"""Check a command line before Hydra acts on it: the run that it requests, or what the runs of a sweep share."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

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
from rlreason.cli.mistakes import in_one_line, refuse_wrong_words
from rlreason.cli.names import sweep_options_spelt, translated
from rlreason.errors import ConfigError
from rlreason.records.reader import settings_in
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.sweeps.design import fixed, key_of, named_sweep


def check_command_line(words: Sequence[str], note: Note | None = None) -> Request:
    """Check a command line before anything runs and return it under our names; `ConfigError` in one line for a mistake.

    A question must compose, and so must what the runs of a sweep share: our sweeper checks the runs. A single run must
    obey the rules and have a folder to write to. Notes are printed, beside an answer on standard error.
    """
    request = read(words)
    if not request.composes:
        return request
    note = note or partial(print, file=sys.stdout if request.starts else sys.stderr)
    folder = resumed_folder(request.overrides, request.multirun)
    if folder is not None:
        request = replace(request, overrides=[word for word in request.overrides if key_of(word) != RESUME])
    with reading(request, note, settings_in(folder).get("algorithm", "") if folder else "") as request:
        one = None
        if folder is not None:
            if "cfg" not in request.flags and not request.starts:
                raise ConfigError(f"{RESUME}={folder} has its settings from there: --cfg job shows them")
            one = repeated(folder, request.overrides, note)
        elif request.starts and not request.multirun:
            in_sweep = SWEEP_VARIABLE in os.environ
            if (sweep := named_sweep(request.overrides)) and not in_sweep:
                raise ConfigError(f"sweep={sweep} is a grid of runs: add -m (python -m rlreason -m sweep={sweep})")
            one = composed_run(request.overrides, request.config_name, of_sweep=in_sweep)
            if in_sweep:
                refuse_unread([one.run], note)
        else:
            composed(fixed(request.overrides) if request.multirun else request.overrides, request.config_name)
        if one is not None and request.starts:
            check_start([one.run], one.folder, note)
        return replace(request, one=one)


@contextmanager
def reading(request: Request, note: Note, algorithm: str = "") -> Iterator[Request]:
    """Yield the request under our names, every option of which is there.

    Hydra is ready to compose it, and a mistake is one line. `algorithm`: of the run whose settings are changed.
    """
    with composing(request), in_one_line(request.overrides, request.config_name):
        spelt = sweep_options_spelt(request.overrides, request.multirun)
        overrides = quoted(translated(spelt, note, algorithm), request.multirun)
        refuse_wrong_words(overrides)
        yield replace(request, overrides=overrides)


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
