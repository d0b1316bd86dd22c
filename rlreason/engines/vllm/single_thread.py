"""A thread that does one call after the other, for a library that has to be called from one thread."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
CHECK_EVERY_S = 0.5


class SingleThread:
    """Calls can be given up after a while. It belongs to no pool, so a process may end while a call hangs."""

    def __init__(self, name: str, check: Callable[[], None]) -> None:
        self._check = check
        self._stopped = False
        self._last: Future[Any] | None = None
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def run(self, function: Callable[[], T], timeout_s: float) -> T:
        """What `function` returns or raises.

        `TimeoutError` when it takes longer, and then it still runs. What `check` raises, which is asked while waiting,
        ends the wait, too.
        """
        future: Future[T] = Future()
        if self._stopped:
            raise RuntimeError("the thread was stopped")
        self._last = future
        self._calls.put((future, function))
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(min(CHECK_EVERY_S, max(deadline - time.monotonic(), 0.0)))
            if future.done():
                return future.result()
            self._check()
            if time.monotonic() >= deadline:
                raise TimeoutError

    @property
    def busy(self) -> bool:
        """Whether a call that was given up still runs."""
        return self._last is not None and not self._last.done()

    def stop(self) -> None:
        """End the thread after the calls that were made."""
        self._stopped = True
        self._calls.put(None)
