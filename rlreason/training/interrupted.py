"""Save what an interrupted run has: a checkpoint, and after a signal also rows, status, model and curves."""

from collections.abc import Callable
from concurrent.futures import TimeoutError as NotInTime
from contextlib import suppress

from rlreason.config.training import TrainingConfig
from rlreason.errors import ConfigError, EngineError
from rlreason.records.console import Console
from rlreason.records.curves import draw_curves
from rlreason.records.files import SUMMARY
from rlreason.records.reader import RunFolder
from rlreason.records.rows import Counters
from rlreason.records.status import write_status
from rlreason.records.writer import RunWriter
from rlreason.runtime import signals
from rlreason.training.build import Components
from rlreason.training.checkpoint import Checkpointer
from rlreason.training.summary import print_loggers

AHEAD_S = 8.0  # a stop waits for sampling ahead: without it, the run resumes from an earlier checkpoint


def handle_interruption(
    error: BaseException,
    run: TrainingConfig,
    components: Components,
    checkpointer: Checkpointer | None,
    records: RunWriter,
    counters: Counters,
    console: Console,
) -> None:
    """Save what a run that ends with this error has; raise KeyboardInterrupt after a signal."""
    if signals.stop_signal() is None and not isinstance(error, KeyboardInterrupt):
        trainer_intact = isinstance(error, EngineError)
        if trainer_intact and checkpointer and checkpointer.begun and checkpointer.settings.every != 0:
            try_to(console, checkpointer.write)
        return
    stop = error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()
    far = stop_in_order(run, components, checkpointer, records, counters, console, signals.why_stopped(stop))
    raise type(stop)(f"{stop} {far}".strip()) from None


def stop_in_order(
    run: TrainingConfig,
    components: Components,
    checkpointer: Checkpointer | None,
    records: RunWriter,
    counters: Counters,
    console: Console,
    why: str,
) -> str:
    """Stop sampling, write a checkpoint, finish the records, save the model; return how far the run got.

    The status is written first, to be right even if the rest fails. `checkpointer`: None before it was built.
    """
    signals.arrived()
    folder, learned = records.folder, counters.train_step
    if (folder / SUMMARY).exists():
        return "when everything was recorded"
    far = stopped_where(checkpointer, learned)
    saves = run.save_model and learned > 0 and not records.model.exists()
    draws, keeps = records.evaluated, checkpointer is not None and checkpointer.begun and run.checkpoint.every != 0

    def last_row() -> None:
        if learned > records.train_step:  # the newest update has no row yet
            records.metrics(counters.row() | counters.newest)

    left = " and ".join(["a checkpoint"] * keeps + ["model"] * saves + ["curves"] * draws) or "records"
    try_to(console, lambda: write_status(folder, "interrupted", f"{why} {far}"))
    try_to(console, lambda: console.say(f"stopping {far}; leaving {left} (a second signal leaves at once)"))
    if checkpointer is not None and keeps:
        try_to(console, lambda: write_checkpoint(checkpointer, console))
    try_to(console, components.close)  # ends sampling ahead, too
    if checkpointer is not None:
        try_to(console, checkpointer.prefetcher.close)
    try_to(console, last_row)
    if saves and checkpointer is not None:
        try_to(console, checkpointer.save_model)
    if draws:
        try_to(console, lambda: draw_curves(RunFolder(folder)))
    try_to(console, records.loggers.interrupted)
    try_to(console, lambda: print_loggers(console, records.loggers))
    return far


def write_checkpoint(checkpointer: Checkpointer, console: Console) -> None:
    """Write a checkpoint of the current position, after waiting for what is being sampled ahead."""
    with suppress(NotInTime):
        checkpointer.prefetcher.drain(AHEAD_S)
    if checkpointer.write() is None:
        console.say("! no checkpoint of this place: what was sampled ahead had not ended; the run goes on from before")


def stopped_where(checkpointer: Checkpointer | None, updates: int) -> str:
    """Describe the step and the updates so far: "in step 2 of 8, after 1 ..."."""
    if checkpointer is None or not (begun := max(checkpointer.prefetcher.begun, checkpointer.position.finished)):
        return "before the first step"
    made = f"{updates} optimizer update{'s' * (updates != 1)}"
    return f"in step {begun} of {checkpointer.prefetcher.n_steps}, after {made}"


def try_to(console: Console, act: Callable[[], object]) -> None:
    """Call `act`; print an error and continue, since the terminal may be gone or the disk full."""
    try:
        act()
    except Exception as error:
        with suppress(OSError):
            named = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            console.say(f"! while stopping: {named}")
