"""Ends a process whose run shows no sign of life: also where it hangs in a library that no time limit reaches."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rlreason.runtime import lock, signals
from rlreason.runtime.stacks import dump

CODE = 1  # exit code, that of a run that failed
TICK_S = 1.0


class Silence:
    """How long something has not changed, in seconds that this process has lived through.

    A suspended machine, a stopped process (Ctrl-Z) and a set clock add nothing: between two looks, `most_s` count.
    """

    def __init__(self, most_s: float = 3 * TICK_S) -> None:
        self.most_s, self.seconds = most_s, 0.0
        self._seen: object = None
        self._at = time.monotonic()

    def look(self, now: object) -> float:
        """The silence so far, 0 where `now` is another value than at the last look."""
        before, self._at = self._at, time.monotonic()
        self.seconds = self.seconds + min(self._at - before, self.most_s) if now == self._seen else 0.0
        self._seen = now
        return self.seconds


def silent_for(limit_s: float) -> str:
    """What is wrong with a run that has been silent so long.

    >>> silent_for(60)
    'no sign of life (a token, a response, an update, a new phase) within waits.run_s=60 s'
    """
    return f"no sign of life (a token, a response, an update, a new phase) within waits.run_s={limit_s:g} s"


@contextmanager
def ended_when_silent(limit_s: float | None, note: Callable[[str], object]) -> Iterator[None]:
    """In this block the process ends, with exit code 1, where `lock.alive` was not called for so long; None: never.

    Its stacks are written first, then `note` is called with what happened. Its children are killed. A process that is
    being stopped by a signal is left to the limit of that stop.
    """
    if limit_s is None:
        yield
        return
    over = threading.Event()
    threading.Thread(target=_watch, args=(limit_s, note, over), name="watchdog", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _watch(limit_s: float, note: Callable[[str], object], over: threading.Event) -> None:
    silence, process = Silence(), os.getpid()
    while not over.wait(min(TICK_S, limit_s / 4)):
        if silence.look(lock.shown_at()) <= limit_s or signals.asked() or os.getpid() != process:
            continue
        why = silent_for(limit_s)
        text = f"{why}: it hangs, or needs more{dump(why)}"
        if over.is_set():
            return
        with suppress(Exception):  # such as a full disk, which must not keep it from ending
            note(text)
        signals.leave_at_once(f"ended: {text}", CODE)
