"""Persistent worker processes that can be killed: for every request a reply or a failure comes back.

No signal handler is set in the calling process, any of its threads may call, and after a fork the child starts workers
of its own.
"""

import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rlreason.errors import WaitError
from rlreason.grading.workers.process import ENDING_S, START_TIMEOUT_S, Worker
from rlreason.runtime.lock import alive
from rlreason.runtime.stacks import dump

LOOK_EVERY_S = 0.5  # while a reply is awaited, whether the pool is being closed


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one request. `value` is the worker's dictionary when `status` is "ok"."""

    status: Literal["ok", "timeout", "killed", "error"]
    value: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Pool:
    """`run` hands requests to the workers and returns their replies in order; one caller at a time."""

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        memory_mb: int,
        plugin: str | None = None,
        sent: bytes | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`plugin`: a function by name; `sent`: itself, where a worker cannot import it. Times in seconds."""
        self.size, self.timeout_s, self.memory_mb = workers, timeout_s, memory_mb
        self.plugin, self.sent, self.start_timeout_s = plugin, sent, start_timeout_s
        self.broken = ""  # why no worker can start, once that is known
        self.unlimited = ""  # why the memory of a worker is not limited
        self._late = False  # because the first one took too long
        self._workers: list[Worker] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closing = False

    def start(self) -> None:
        """Start the processes now; they load their libraries while the caller goes on."""
        with self._lock:
            self._fill()

    def wait(self) -> str:
        """Until every worker is ready; returns why none can start, or an empty text."""
        with self._lock:
            self._fill()
            while not self.broken and not all(worker.ready for worker in self._workers):
                self._wait()
                for worker in list(self._workers):
                    self._step(worker, {}, [])
            return self.broken

    def run(self, requests: Sequence[Any]) -> list[Reply]:
        """The replies to these requests, in order.

        Raises `WaitError` where no worker starts in time, and `RuntimeError` where the pool is closed meanwhile.
        """
        if not requests:
            return []
        with self._lock:
            self._fill()
            return self._run(requests)

    def close(self) -> None:
        """End the processes now; a `run` that waits for them in another thread ends with an error."""
        self._closing = True
        if self._owner == os.getpid():
            for worker in list(self._workers):
                worker.process.kill()
        with self._lock:
            self._closing = False
            for worker in self._workers:
                worker.stop() if self._owner == os.getpid() else worker.release()
            self._workers = []

    def after_fork(self) -> None:
        """In a forked child: the lock may be held by a thread that is gone, the workers are the parent's."""
        self._lock = threading.Lock()
        for worker in self._workers:
            worker.process.returncode = 0  # a child of the parent: never wait for it, never signal it
            worker.release()
        self._workers, self._owner = [], os.getpid()

    def _fill(self) -> None:
        if self._owner != os.getpid():
            self.after_fork()
        for worker in [worker for worker in self._workers if worker.ready and worker.process.poll() is not None]:
            worker.stop()  # it ended between two requests, so none of them failed
            self._workers.remove(worker)
        while len(self._workers) < self.size and not self.broken:
            self._workers.append(self._worker())

    def _worker(self) -> Worker:
        return Worker(self.plugin, self.timeout_s, self.memory_mb, self.sent, self.start_timeout_s)

    def _run(self, requests: Sequence[Any]) -> list[Reply]:
        results: dict[int, Reply] = {}
        waiting = list(range(len(requests)))[::-1]
        while len(results) < len(requests):
            if self._late:
                raise WaitError(f"grading: {self.broken}")
            if self.broken:
                return [results.get(index, Reply("error", error=self.broken)) for index in range(len(requests))]
            for worker in self._workers:
                if worker.ready and worker.task is None and waiting:
                    task = waiting.pop()
                    worker.send(task, requests[task], self.timeout_s)
            self._wait()
            if self._closing:
                raise RuntimeError("the grader was closed while it graded")
            for worker in list(self._workers):
                self._step(worker, results, waiting)
        return [results[index] for index in range(len(requests))]

    def _wait(self) -> None:
        busy = [worker for worker in self._workers if worker.task is not None or not worker.ready]
        poll = select.poll()
        for worker in busy:
            poll.register(worker.replies, select.POLLIN)
            if worker.unsent:
                poll.register(worker.requests, select.POLLOUT)
        left = min(worker.deadline for worker in busy) - time.monotonic()
        poll.poll(min(max(0.0, left), LOOK_EVERY_S) * 1000 + 1)

    def _step(self, worker: Worker, results: dict[int, Reply], waiting: list[int]) -> None:
        """Handle one worker's message, its end or its time-out."""
        before = len(results)
        if worker.unsent:
            worker.flush()
        try:
            message = worker.receive()
        except EOFError:
            self._lost(worker, results, waiting)
            return
        if message is None:
            if time.monotonic() < worker.deadline or (worker.ready and worker.task is None):
                return
            if not worker.ready:
                limit = f"grading.start_timeout_s={self.start_timeout_s:g} s"
                said = dump(f"no grading worker within {limit}")
                self.broken = f"a worker did not start within {limit}: raise it where the machine is busy{said}"
                self._late = True
            elif worker.task is not None:
                results[worker.task] = Reply("timeout", error=f"no verdict within {self.timeout_s:g} s")
            self._replace(worker)
        elif not worker.ready:
            worker.ready = bool(message["ready"])
            self.broken = self.broken or message.get("error", "")
            if why := message.get("unlimited"):
                self.unlimited = f"grading.memory_mb={self.memory_mb} is not held to on this system ({why})"
        elif worker.task is not None:
            error = message.get("error", "")
            results[worker.task] = Reply("error", error=error) if error else Reply("ok", message)
            if error == "MemoryError":
                results[worker.task] = Reply("killed", error=f"over {self.memory_mb} MB")
                self._replace(worker)  # after a MemoryError its memory may hold broken objects
            worker.task = None
        if len(results) > before:
            alive()

    def _lost(self, worker: Worker, results: dict[int, Reply], waiting: list[int]) -> None:
        if not worker.ready:
            self.broken = self.broken or "a grading worker ended while starting"
        elif worker.task is not None:
            results[worker.task] = Reply("killed", error=f"worker ended with {worker.ended(ENDING_S)}")
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.stop()
        self._workers.remove(worker)
        self._fill()
