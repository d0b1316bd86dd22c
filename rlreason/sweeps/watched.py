"""Looks after a run of a sweep; ends it where it hangs so that it cannot end itself: stopped, or before its start."""

import os
import signal
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from rlreason.records.files import STACKS
from rlreason.runtime import signals
from rlreason.runtime.lock import sign_of_life
from rlreason.runtime.stacks import write_stacks
from rlreason.runtime.watchdog import Silence, silent_for
from rlreason.sweeps.forks import Process

GRACE_S = 10.0  # beyond the limit at which a run ends itself
TICK_S = 1.0  # between two looks at its signs of life
TERM_S = 30.0  # for a run that hangs to end in order, with a checkpoint


def early_stacks(place: Path) -> Path:
    """A new file for the stacks of a run that has no folder yet."""
    number, path = tempfile.mkstemp(dir=place, prefix="stacks-")
    os.close(number)
    return Path(path)


class Watch:
    """Over the run in `folder`, which may show no sign of life for `limit_s` seconds; None: for any time.

    `early`: see `early_stacks`.
    """

    def __init__(self, process: Process, folder: Path, limit_s: float | None, early: Path) -> None:
        self.process, self.folder, self.limit_s, self.early = process, folder, limit_s, early
        self._silence = Silence()

    def hangs(self) -> bool:
        """Whether the run has been silent for too long; to be asked every `TICK_S` seconds or so."""
        return self.limit_s is not None and self._silence.look(sign_of_life(self.folder)) > self.limit_s + GRACE_S

    def end(self) -> None:
        """End a run that hangs; its stacks are in its folder then."""
        assert self.limit_s is not None
        write_stacks(self.folder / STACKS, silent_for(self.limit_s), self.process.pid)
        with suppress(OSError), (self.folder / STACKS).open("ab") as file:
            file.write(self.early.read_bytes())
        _end(self.process)


def _end(process: Process) -> None:
    """SIGTERM, and if that does not help SIGKILL, for it and for all below it."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(TERM_S)
        return
    below = signals.below(process.pid)
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # one that waits in the kernel for a disk
        process.wait(TERM_S)
    for one in below:
        with suppress(OSError):
            os.kill(one, signal.SIGKILL)
