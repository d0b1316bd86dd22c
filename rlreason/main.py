"""Run one run, from its settings to its folder: training, a job that does not train, or discovery.

A training run is built by `training/build.py`, around one rollout engine and one grader.
"""

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rlreason.config.run import AnyRunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import LOG, STACKS
from rlreason.records.reader import RunFolder, known_status, read_status, write_status, written_at
from rlreason.records.writer import RunWriter, finish_provenance
from rlreason.runtime import signals
from rlreason.runtime.clock import Clock
from rlreason.runtime.files import ended_when_it_hangs, run_lock
from rlreason.runtime.machine import seed_generators
from rlreason.runtime.text import redacted


def run_job(
    run: AnyRunConfig, folder: Path, config: str, words: Sequence[str], console: Console, own_process: bool = False
) -> float:
    """Run what the settings say, leave everything in `folder`, return the accuracy.

    `config`: the settings as text for the folder; `words`: the command line that starts this run. An early end is
    written to its status and raised. `own_process`: this process exists only for the run, and ends if that hangs.
    """
    with run_lock(folder, console.say):  # errors are handled inside: nothing may be written to another run's folder
        before = written_at(folder)
        try:
            limit_s = run.waits.run_s if own_process else None
            leaving = signals.before_leaving(lambda: mark_ended(folder, KeyboardInterrupt()))
            with ended_when_it_hangs(folder / STACKS, limit_s), leaving:
                clock, start, sources = Clock(), loaded(run, console), dict[str, str]()
                if works_on_a_model(run):
                    from rlreason.training.preflight import own_sources

                    seed_generators(run.seed)
                    sources = own_sources(run)
                records = RunWriter(folder, config, words, sources, trains=run.trains, say=console.say, clock=clock)
                accuracy = start(run, records, console)
                finish_provenance(folder)
                return accuracy
        except BaseException as error:
            if signals.stop_signal() and not isinstance(error, KeyboardInterrupt):
                error = KeyboardInterrupt()
            elif works_on_a_model(run) and isinstance(error, Exception):
                from rlreason.training.preflight import lacking

                if (known := lacking(run, error)) is not None:
                    with suppress(OSError), (folder / LOG).open("a", encoding="utf-8") as log:
                        log.write(redacted("".join(traceback.format_exception(error))))
                    known.__cause__ = error
                    error = known
            if written_at(folder) != before:  # the folder became this run's own
                with suppress(OSError):  # a full disk must not hide the error
                    mark_ended(folder, error)
                    finish_provenance(folder)
            raise error


def loaded(run: AnyRunConfig, console: Console) -> Callable[..., float]:
    """Load the libraries that the run needs; return the function that runs it."""
    start: Callable[..., float]
    with console.wait("loading what the run needs"):
        if not works_on_a_model(run):
            from rlreason.discovery.loop import discover as start
        elif run.trains:
            from rlreason.training.train import train as start
        else:
            from rlreason.training.jobs import start
    return start


def mark_ended(folder: Path, error: BaseException) -> None:
    """Record in the folder of a run that was in progress what ended it."""
    if read_status(folder) != "running":
        return
    if (summary := RunFolder(folder).summary) is not None:  # a finished run that was given more steps
        write_status(folder, known_status(str(summary.get("status"))), str(summary.get("reason", "")))
    elif isinstance(error, KeyboardInterrupt):
        write_status(folder, "interrupted", signals.why_stopped(error))
    else:
        text = str(error).partition("\n")[0]
        named = f"{type(error).__name__}: {text}".rstrip(": ")
        write_status(folder, "failed", text if isinstance(error, ConfigError) else named)
