"""What a training run that did not come to its end leaves behind: a checkpoint, and after a signal everything else.

After a signal that is rows, status, model and curves as of the last update.
"""

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
from rlreason.training.checkpoint import Keeper
from rlreason.training.summary import show_loggers

AHEAD_S = 8.0  # that a stop waits for what is being sampled ahead: without it, the run goes on from further back


def leave_in_order(
    error: BaseException,
    run: TrainingConfig,
    components: Components,
    keeper: Keeper | None,
    records: RunWriter,
    counters: Counters,
    console: Console,
) -> None:
    """Leave what can be left of a run that ends with this error; raises KeyboardInterrupt after a signal."""
    if signals.asked() is None and not isinstance(error, KeyboardInterrupt):
        return keep_what_is_there(error, keeper, console)
    stop = error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt()
    far = wind_up(run, components, keeper, records, counters, console, signals.why_stopped(stop))
    raise type(stop)(f"{stop} {far}".strip()) from None


def wind_up(
    run: TrainingConfig,
    components: Components,
    keeper: Keeper | None,
    records: RunWriter,
    counters: Counters,
    console: Console,
    why: str,
) -> str:
    """Stop sampling, write a checkpoint, finish the records, save the model; returns how far the run got.

    The status is written first, so that it is right whatever becomes of the rest. `keeper`: None before the run had
    its parts.
    """
    signals.arrived()
    folder, learned = records.folder, counters.train_step
    if (folder / SUMMARY).exists():
        return "when everything was recorded"
    far = how_far(keeper, learned)
    saves = run.save_model and learned > 0 and not records.model.exists()
    draws, keeps = records.evaluated, keeper is not None and keeper.begun and run.checkpoint.every != 0

    def last_row() -> None:
        if learned > records.train_step:  # the newest update had no row yet
            records.metrics(counters.row() | counters.newest)

    left = " and ".join(["a checkpoint"] * keeps + ["model"] * saves + ["curves"] * draws) or "records"
    try_to(console, lambda: write_status(folder, "interrupted", f"{why} {far}"))
    try_to(console, lambda: console.say(f"stopping {far}; leaving {left} (a second signal leaves at once)"))
    if keeper is not None and keeps:
        try_to(console, lambda: keep(keeper, console))
    try_to(console, components.close)  # what is being sampled ahead ends with its engine
    if keeper is not None:
        try_to(console, keeper.prefetcher.close)
    try_to(console, last_row)
    if saves and keeper is not None:
        try_to(console, keeper.save_model)
    if draws:
        try_to(console, lambda: draw_curves(RunFolder(folder)))
    try_to(console, records.loggers.interrupted)
    try_to(console, lambda: show_loggers(console, records.loggers))
    return far


def keep(keeper: Keeper, console: Console) -> None:
    """Write a checkpoint of where the run is. What is being sampled ahead is waited for, because it belongs to it."""
    with suppress(NotInTime):
        keeper.prefetcher.drain(AHEAD_S)
    if keeper.write() is None:
        console.say("! no checkpoint of this place: what was sampled ahead had not ended; the run goes on from before")


def keep_what_is_there(error: BaseException, keeper: Keeper | None, console: Console) -> None:
    """After an error of the engine, which says nothing about the trainer: write a checkpoint of where that is."""
    if isinstance(error, EngineError) and keeper is not None and keeper.begun and keeper.settings.every != 0:
        try_to(console, keeper.write)


def how_far(keeper: Keeper | None, updates: int) -> str:
    """The step that a run stopped in, and the optimizer updates that it had made: "in step 2 of 8, after 1 ..."."""
    if keeper is None or not (begun := max(keeper.prefetcher.begun, keeper.position.finished)):
        return "before the first step"
    made = f"{updates} optimizer update{'s' * (updates != 1)}"
    return f"in step {begun} of {keeper.prefetcher.n_steps}, after {made}"


def try_to(console: Console, act: Callable[[], object]) -> None:
    """Do it; where that fails, say so and go on: the terminal may be gone and the disk full."""
    try:
        act()
    except Exception as error:
        with suppress(OSError):
            named = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            console.say(f"! while stopping: {named}")
