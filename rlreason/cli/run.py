"""Run one run, from its checked settings to the end of its records; handle ranks."""

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
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import CONTENTS, LOG, STACKS
from rlreason.records.provenance import Origin
from rlreason.records.reader import RunFolder, known_status, read_status, write_status, written_at
from rlreason.records.writer import RunWriter, finish_provenance
from rlreason.runtime import signals
from rlreason.runtime.clock import Clock
from rlreason.runtime.files import ended_when_it_hangs, run_lock
from rlreason.runtime.machine import Place, divide_memory_finely, loading, seed_generators
from rlreason.runtime.signals import FOLLOWS, killed_with_parent
from rlreason.runtime.text import first_line, redacted

Start = Callable[[Any, RunWriter, Console], float]


def run_job(
    run: AnyRunConfig, folder: Path, config: str, words: Sequence[str], console: Console, own_process: bool = False
) -> float:
    """Run what the settings say, leave everything in `folder`, return the accuracy.

    `config`: the settings as text for the folder; `words`: the command line that starts this run. An early end is
    written to its status and raised. `own_process`: this process exists only for the run, and ends if that hangs.
    """
    refuse_own_input(run, folder, CONTENTS)
    with run_lock(folder, console.say):  # errors are handled inside: nothing may be written to another run's folder
        before = written_at(folder)
        try:
            limit_s = run.waits.run_s if own_process else None
            leaving = signals.before_leaving(lambda: mark_ended(folder, KeyboardInterrupt()))
            with ended_when_it_hangs(folder / STACKS, limit_s), leaving:
                clock = Clock()
                libraries = "torch and transformers" if works_on_a_model(run) else "the client and the sandbox"
                with console.wait(f"loading {libraries}"), loading(for_good=own_process):
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
                with suppress(OSError):  # a full disk must not hide the error
                    mark_ended(folder, error)
                    finish_provenance(folder)
            raise error


def _start_of(run: AnyRunConfig) -> Start:
    """Return the function that does the work, importing the libraries it needs."""
    if not works_on_a_model(run):
        from rlreason.discovery.loop import discover

        return discover
    if run.trains:
        from rlreason.training.trainer import train

        return train
    from rlreason.training.jobs import start

    return start


def _started(
    start: Start, run: AnyRunConfig, folder: Path, config: str, words: Sequence[str], console: Console, clock: Clock
) -> float:
    sources: dict[str, str] = {}
    if works_on_a_model(run):
        from rlreason.training.preflight import own_sources

        seed_generators(run.seed)
        sources = own_sources(run)
    origin = Origin(words, schemas_of(run), sources)
    records = RunWriter(folder, config, origin, trains=run.trains, say=console.say, clock=clock)
    accuracy = start(run, records, console)
    finish_provenance(folder)
    return accuracy


def _shortage_of(run: AnyRunConfig, error: BaseException) -> ConfigError | None:
    """Return in one line what ended a run whose GPU had too little memory; None for any other error."""
    if not works_on_a_model(run) or not isinstance(error, Exception):
        return None
    from rlreason.training.preflight import out_of_memory

    return out_of_memory(run, error)


def log_error(folder: Path, error: BaseException) -> None:
    """Write an error with its traceback into the folder's log."""
    with suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as log:
        log.write(redacted("".join(traceback.format_exception(error))))


def mark_ended(folder: Path, error: BaseException) -> None:
    """Record in the folder of a run that was in progress what ended it."""
    if read_status(folder) != "running":
        return
    if (summary := RunFolder(folder).summary) is not None:  # a finished run that was given more steps
        write_status(folder, known_status(str(summary.get("status"))), str(summary.get("reason", "")))
        return
    if isinstance(error, KeyboardInterrupt):
        write_status(folder, "interrupted", signals.why_stopped(error))
    else:
        text = next(iter(str(error).splitlines()), "")
        named = f"{type(error).__name__}: {text}".rstrip(": ")
        write_status(folder, "failed", text if isinstance(error, ConfigError) else named)


IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def serve(place: Place) -> int:
    """Follow rank 0 to the end of its run; return the exit code."""
    killed_with_parent()  # it has nothing to clean up
    for number in IGNORED:
        signal.signal(number, signal.SIG_IGN)
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
    """Do this rank's part of the run; an error is left for rank 0 to report."""
    from rlreason.model.parameters import pick_device
    from rlreason.training.build_algorithm import follow
    from rlreason.training.ranks import Ranks, is_gone

    ranks = Ranks(store, place.rank, place.world, pick_device(), limit_s)
    try:
        orders = follow(ranks)
        while (order := ranks.next_order())[0] != "end":
            name, arguments = order
            orders[name](*arguments)
    except Exception as error:
        if isinstance(error, RuntimeError) and is_gone(error):  # rank 0 ended, and reports why
            print(f"rank {place.rank}: rank 0 has gone", file=sys.stderr)
            return 1
        ranks.leave_error(f"{type(error).__name__}: {first_line(error)}")
        raise
    return 0


@contextmanager
def leading() -> Iterator[None]:
    """Wrap what rank 0 does: if it starts no training run, tell the other ranks, which then end.

    It ends in order, as by SIGTERM, when torchrun does.
    """
    os.environ[FOLLOWS] = str(os.getppid())
    try:
        yield
    finally:
        from rlreason.training.ranks import release_torchrun_ranks

        release_torchrun_ranks()
