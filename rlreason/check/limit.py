"""The time limit of a function that runs in this process."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


class TimeUpError(BaseException):
    """The time limit of a function has passed. Not an `Exception`, so that the user's own `except` lets it through."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TimeUpError` in what is inside once so many seconds of the processor, or twice as many, have passed.

    On a machine that is busy with other things a right function is not taken for one that hangs.
    """

    def up(number: int, frame: object) -> NoReturn:
        raise TimeUpError

    before = [signal.signal(number, up) for number in (signal.SIGALRM, signal.SIGPROF)]
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds, 0.2)  # again and again, for code that catches everything
        signal.setitimer(signal.ITIMER_REAL, 2 * seconds, 0.2)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in zip((signal.SIGALRM, signal.SIGPROF), before, strict=True):
            signal.signal(number, handler)
