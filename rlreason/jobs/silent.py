"""A run that hangs is ended, and says so in its folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlreason.config.any_run import AnyRunConfig
from rlreason.errors import WaitError
from rlreason.jobs.run import mark_ended
from rlreason.records.writer import finish_provenance
from rlreason.runtime.watchdog import ended_when_silent


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
