"""What a training run that a signal stopped leaves behind: rows, status, model and curves as of its last update."""

from collections.abc import Callable
from contextlib import suppress

from rlreason.algorithms.prefetch import RolloutPrefetcher
from rlreason.config.training import TrainingConfig
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.counters import Counters
from rlreason.records.curves import draw_curves
from rlreason.records.files import SUMMARY
from rlreason.records.reader import RunFolder
from rlreason.records.status import write_status
from rlreason.records.writer import RunWriter
from rlreason.runtime import signals
from rlreason.setup.components import Components
from rlreason.setup.run_summary import show_loggers


def wind_up(
    run: TrainingConfig,
    components: Components,
    prefetcher: RolloutPrefetcher | None,
    records: RunWriter,
    counters: Counters,
    console: Console,
    why: str,
) -> str:
    """Stop sampling, finish the records, save the model; returns how far the run got.

    The status is written first, so that it is right whatever becomes of the rest. `prefetcher`: None before step 1.
    """
    signals.arrived()
    folder, learned = records.folder, counters.train_step
    if (folder / SUMMARY).exists():
        return "when everything was recorded"
    far = how_far(prefetcher, learned)
    saves = run.save_model and learned > 0 and not records.model.exists()
    draws = records.evaluated

    def last_row() -> None:
        if learned > records.train_step:  # the newest update had no row yet
            records.metrics(counters.row() | counters.newest)

    leaves = " and ".join(["model"] * saves + ["curves"] * draws) or "records"
    try_to(console, lambda: write_status(folder, "interrupted", f"{why} {far}"))
    try_to(console, lambda: console.say(f"stopping {far}; leaving {leaves} (a second signal leaves at once)"))
    try_to(console, components.close)  # what is being sampled ahead ends with its engine
    if prefetcher is not None:
        try_to(console, prefetcher.close)
    try_to(console, last_row)
    if saves:
        try_to(console, lambda: components.policy.save(records.model))
    if draws:
        try_to(console, lambda: draw_curves(RunFolder(folder)))
    try_to(console, records.loggers.interrupted)
    try_to(console, lambda: show_loggers(console, records.loggers))
    return far


def how_far(prefetcher: RolloutPrefetcher | None, updates: int) -> str:
    """The step that a run stopped in, and the optimizer updates that it had made: "in step 2 of 8, after 1 ..."."""
    if prefetcher is None or not prefetcher.begun:
        return "before the first step"
    made = f"{updates} optimizer update{'s' * (updates != 1)}"
    return f"in step {prefetcher.begun} of {prefetcher.n_steps}, after {made}"


def try_to(console: Console, act: Callable[[], object]) -> None:
    """Do it; where that fails, say so and go on: the terminal may be gone and the disk full."""
    try:
        act()
    except Exception as error:
        with suppress(OSError):
            named = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            console.say(f"! while stopping: {named}")
