"""Waits for a run of a sweep, and ends it where it hangs so that it cannot end itself: stopped, or before its start."""

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

GRACE_S = 10.0  # beyond the limit at which a run ends itself
TICK_S = 1.0
TERM_S = 30.0  # for a run that hangs to end in order, with a checkpoint


def early_stacks(place: Path) -> Path:
    """A new file for the stacks of a run that has no folder yet."""
    number, path = tempfile.mkstemp(dir=place, prefix="stacks-")
    os.close(number)
    return Path(path)


def wait_for(process: subprocess.Popen[bytes], folder: Path, limit_s: float | None, early: Path) -> bool:
    """Wait until the run in `folder` has ended; where it shows no sign of life for `limit_s` seconds, end it.

    Returns whether it had to be ended; then its stacks are in its folder. `early`: see `early_stacks`.
    """
    silence = Silence()
    while True:
        with suppress(subprocess.TimeoutExpired):
            process.wait(TICK_S)
            return False
        if limit_s is not None and silence.look(sign_of_life(folder)) > limit_s + GRACE_S:
            break
    write_stacks(folder / STACKS, silent_for(limit_s), process.pid)
    with suppress(OSError), (folder / STACKS).open("ab") as file:
        file.write(early.read_bytes())
    _end(process)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
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
