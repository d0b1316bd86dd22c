"""One run, from its checked settings to the end of its records; ranks, and runs that hang."""

import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rlreason.config.leaves import refuse_own_input
from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.config.store import schemas_of
from rlreason.errors import ConfigError, WaitError
from rlreason.records.console import Console
from rlreason.records.files import CONTENTS, LOG
from rlreason.records.reader import RunFolder
from rlreason.records.status import known, read_status, write_status, written_at
from rlreason.records.writer import RunWriter, finish_provenance
from rlreason.runtime import signals
from rlreason.runtime.clock import Clock
from rlreason.runtime.files import run_lock
from rlreason.runtime.hang import ended_when_silent, listen, stacks_in
from rlreason.runtime.machine import divide_memory_finely
from rlreason.runtime.process import Place, loading, seed_generators
from rlreason.runtime.signals import FOLLOWS, killed_with_parent
from rlreason.runtime.text import first_line, redacted

Start = Callable[[Any, RunWriter, Console], float]


def run_job(
    run: AnyRunConfig, folder: Path, config: str, words: Sequence[str], console: Console, own_process: bool = False
) -> float:
    """Do what the settings say, leave everything in `folder`, return the accuracy.

    `config` is the settings' text for the folder, and `words` those of the command line that starts this run. What
    ends it early is written to its status and raised. `own_process`: this process is there for the run alone.
    """
    refuse_own_input(run, folder, CONTENTS)
    with run_lock(folder, console.say):  # and what follows it, so that nothing is said in the folder of another's run
        before = written_at(folder)
        try:
            with stacks_in(folder), signals.before_leaving(lambda: mark_ended(folder, KeyboardInterrupt())):
                clock = Clock()
                with console.wait(f"loading {_loaded_for(run)}"), loading(for_good=own_process):
                    start = _start_of(run)
                return _started(start, run, folder, config, words, console, clock)
        except BaseException as error:
            if signals.stop_signal() and not isinstance(error, KeyboardInterrupt):
                error = KeyboardInterrupt()
            elif (shortage := _shortage_of(run, error)) is not None:
                log_error(folder, error)
                shortage.__cause__ = error
                error = shortage
            if written_at(folder) != before:  # the folder became this run's own
                with suppress(OSError):  # a full disk has no room for this either, and must not hide what happened
                    mark_ended(folder, error)
                    finish_provenance(folder)
            raise error


def _start_of(run: AnyRunConfig) -> Start:
    """What does the work, with the libraries that it needs."""
    if not works_on_a_model(run):
        from rlreason.discovery.loop import discover

        return discover
    if run.trains:
        from rlreason.training.trainer import train

        return train
    from rlreason.training.jobs import start

    return start


def _loaded_for(run: AnyRunConfig) -> str:
    return "torch and transformers" if works_on_a_model(run) else "the client and the sandbox"


def _started(
    start: Start, run: AnyRunConfig, folder: Path, config: str, words: Sequence[str], console: Console, clock: Clock
) -> float:
    sources: dict[str, str] = {}
    if works_on_a_model(run):
        from rlreason.training.preflight import own_sources

        seed_generators(run.seed)
        sources = own_sources(run)
    schemas = schemas_of(run)
    records = RunWriter(
        folder, config, words, schemas=schemas, sources=sources, trains=run.trains, say=console.say, clock=clock
    )
    accuracy = start(run, records, console)
    finish_provenance(folder)
    return accuracy


def _shortage_of(run: AnyRunConfig, error: BaseException) -> ConfigError | None:
    """What ends a run whose GPU had too little memory, in one line; None for any other error."""
    if not works_on_a_model(run) or not isinstance(error, Exception):
        return None
    from rlreason.training.fits import out_of_memory

    return out_of_memory(run, error)


def log_error(folder: Path, error: BaseException) -> None:
    """Write an error with its traceback into the folder's log, for whoever looks closer than its one line."""
    with suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(redacted("".join(traceback.format_exception(error))))


def mark_ended(folder: Path, error: BaseException) -> None:
    """Say in the folder of a run that was under way what ended it."""
    if read_status(folder) != "running":
        return
    if (summary := RunFolder(folder).summary) is not None:  # a finished run, before it was given more steps
        write_status(folder, known(str(summary.get("status"))), str(summary.get("reason", "")))
        return
    if isinstance(error, KeyboardInterrupt):
        write_status(folder, "interrupted", signals.why_stopped(error))
    else:
        text = next(iter(str(error).splitlines()), "")
        named = f"{type(error).__name__}: {text}".rstrip(": ")
        write_status(folder, "failed", text if isinstance(error, ConfigError) else named)


IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(place: Place) -> int:
    """Follow rank 0 to the end of its run; returns the exit code."""
    killed_with_parent()  # it has nothing to tidy up
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
    listen()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from rlreason.cli.entry import find_modules_here
    from rlreason.training.ranks import own_gpu_only, store_of, wait_for_limit

    find_modules_here()
    divide_memory_finely()
    own_gpu_only(place)
    store = store_of(place)
    limit_s = wait_for_limit(store)
    return 0 if limit_s is None else _follow(place, store, limit_s)


def _follow(place: Place, store: object, limit_s: float) -> int:
    """The run's work; an error is left for rank 0 to say."""
    from rlreason.model.devices import pick_device
    from rlreason.training.build_ranks import follow
    from rlreason.training.ranks import Ranks, is_gone

    ranks = Ranks(store, place.rank, place.world, pick_device(), limit_s)
    try:
        orders = follow(ranks)
        while (order := ranks.next_order())[0] != "end":
            name, arguments = order
            orders[name](*arguments)
    except Exception as error:
        if isinstance(error, RuntimeError) and is_gone(error):  # rank 0 ended, and says why
            print(f"rank {place.rank}: rank 0 has gone", file=sys.stderr)
            return 1
        ranks.leave_error(f"{type(error).__name__}: {first_line(error)}")
        raise
    return 0


@contextmanager
def leading() -> Iterator[None]:
    """Around what rank 0 does: where it has begun no run that trains, the others are told so, and end.

    It ends in order, as by SIGTERM, when torchrun does.
    """
    os.environ[FOLLOWS] = str(os.getppid())
    try:
        yield
    finally:
        from rlreason.training.ranks import release_torchrun_ranks

        release_torchrun_ranks()


@contextmanager
def ended_when_it_hangs(run: AnyRunConfig, folder: Path) -> Iterator[None]:
    """In this block the process ends where its run shows no sign of life for `waits.run_s`; it can go on later.

    For processes that do nothing else than this run.
    """

    def note(text: str) -> None:
        mark_ended(folder, WaitError(text))
        finish_provenance(folder)

    with ended_when_silent(run.waits.run_s, note):
        yield
