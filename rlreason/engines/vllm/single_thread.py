"""A thread that does one call after the other, for a library that wants to be called from one place.

It must not know what it calls.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class SingleThread:
    """Whoever waits for it can give up after a while. It is not one of a pool: a process may end while it hangs."""

    def __init__(self, name: str) -> None:
        self._stopped = False
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """What `function` returns or raises; `TimeoutError` when it takes longer, and then it still runs."""
        future: Future[T] = Future()
        if self._stopped:
            raise RuntimeError("the thread was stopped")
        self._calls.put((future, function))
        return future.result(timeout_s)

    def stop(self) -> None:
        """End the thread after the calls that were made."""
        self._stopped = True
        self._calls.put(None)
