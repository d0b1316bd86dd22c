"""A pool of worker processes that can be killed: a reply to every request, within limits on time and memory."""

import contextlib
import json
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlreason.errors import WaitError
from rlreason.runtime.files import alive

LENGTH = struct.Struct(">I")


def pack(message: Any) -> bytes:
    """Encode the message as JSON with its length in front."""
    return framed(json.dumps(message).encode("ascii"))


def framed(body: bytes) -> bytes:
    """Put the length in front of the bytes."""
    return LENGTH.pack(len(body)) + body


START_TIMEOUT_S = 60.0  # to import the plug-in or the symbolic library, on a busy machine
ENDING_S = 5.0  # for a killed process, or one that closed its pipe, to end; it may wait for a disk in the kernel


class Worker:
    """One process and its two pipes."""

    def __init__(
        self,
        plugin: str | None,
        timeout_s: float,
        memory_mb: int,
        sent: bytes | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`sent`: the plug-in pickled by cloudpickle, where the process cannot import it."""
        package_root = str(Path(__file__).resolve().parents[2])
        options = {
            "parent": os.getpid(),
            "main_thread": threading.current_thread() is threading.main_thread(),
            "path": [package_root, *[entry or os.getcwd() for entry in sys.path]],
            "plugin": plugin,
            "sent": sent is not None,
            "timeout_s": timeout_s,
            "start_timeout_s": start_timeout_s,
            "memory_mb": memory_mb,
        }
        environment = {
            **os.environ,
            "PYTHONPATH": package_root,
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        environment |= {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rlreason.grading.worker", json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.requests, self.replies = self.process.stdin.fileno(), self.process.stdout.fileno()
        os.set_blocking(self.replies, False)
        os.set_blocking(self.requests, False)
        self.ready = False
        self.deadline = time.monotonic() + start_timeout_s
        self.task: int | None = None
        self.unsent = b"" if sent is None else framed(sent)
        self.received = bytearray()
        self.flush()

    def send(self, task: int, request: Any, timeout_s: float) -> None:
        """Send request number `task`; its reply is due within `timeout_s` seconds."""
        self.task, self.unsent = task, pack(request)
        self.deadline = time.monotonic() + timeout_s
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes now; a dead reader causes an end of file on the other pipe."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self.unsent:
                self.unsent = self.unsent[os.write(self.requests, self.unsent) :]

    def receive(self) -> dict[str, Any] | None:
        """Return the next whole message, or None while it is incomplete; EOFError when the process is gone."""
        try:
            while part := os.read(self.replies, 1 << 16):
                self.received += part
            raise EOFError
        except BlockingIOError:
            pass
        if len(self.received) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self.received)[0]
        if len(self.received) < end:
            return None
        message: dict[str, Any] = json.loads(bytes(self.received[LENGTH.size : end]))
        del self.received[:end]
        return message

    def stop(self) -> None:
        """End the process now and close its pipes."""
        self.process.kill()
        self.ended(ENDING_S)
        self.release()

    def ended(self, limit_s: float) -> int | None:
        """Wait at most this long for its exit code; None where it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit_s)
        return None

    def release(self) -> None:
        """Close this process's ends of the pipes; used without `stop` on workers inherited by a fork."""
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()


LOOK_EVERY_S = 0.5  # how often a wait for replies checks whether the pool is being closed


@dataclass(frozen=True, slots=True)
class PoolReply:
    """The result of one request. `value` is the worker's dictionary when `status` is "ok"."""

    status: Literal["ok", "timeout", "killed", "error"]
    value: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Pool:
    """A pool of workers: `run` sends requests to them and returns the replies in order; one caller at a time."""

    def __init__(
        self,
        workers: int,
        timeout_s: float,
        memory_mb: int,
        plugin: str | None = None,
        sent: bytes | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`plugin`: a function by name; `sent`: pickled, where a worker cannot import it. Times in seconds."""
        self.size, self.timeout_s, self.memory_mb = workers, timeout_s, memory_mb
        self.plugin, self.sent, self.start_timeout_s = plugin, sent, start_timeout_s
        self.broken = ""  # why no worker can start, once that is known
        self.unlimited = ""  # why the memory of a worker is not limited
        self._late = False  # whether that is because one took too long to start
        self._workers: list[Worker] = []
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._closing = False

    def start(self) -> None:
        """Start the processes now; they load their libraries while the caller goes on."""
        with self._lock:
            self._fill()

    def wait(self) -> str:
        """Wait until every worker is ready; return why none can start, or an empty text."""
        with self._lock:
            self._fill()
            while not self.broken and not all(worker.ready for worker in self._workers):
                self._wait()
                for worker in list(self._workers):
                    self._step(worker, {}, [])
            return self.broken

    def run(self, requests: Sequence[Any]) -> list[PoolReply]:
        """Return the replies to these requests, in order.

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
        """In a forked child, renew the lock, which a thread that is gone may hold, and release the parent's workers."""
        self._lock = threading.Lock()
        for worker in self._workers:
            worker.process.returncode = 0  # the parent's child: never wait for it or signal it
            worker.release()
        self._workers, self._owner = [], os.getpid()

    def _fill(self) -> None:
        if self._owner != os.getpid():
            self.after_fork()
        for worker in [worker for worker in self._workers if worker.ready and worker.process.poll() is not None]:
            worker.stop()  # it ended between two requests, so no request failed
            self._workers.remove(worker)
        while len(self._workers) < self.size and not self.broken:
            limits = self.timeout_s, self.memory_mb
            self._workers.append(Worker(self.plugin, *limits, self.sent, self.start_timeout_s))

    def _run(self, requests: Sequence[Any]) -> list[PoolReply]:
        results: dict[int, PoolReply] = {}
        waiting = list(range(len(requests)))[::-1]
        while len(results) < len(requests):
            if self._late:
                raise WaitError(f"grading: {self.broken}")
            if self.broken:
                return [results.get(index, PoolReply("error", error=self.broken)) for index in range(len(requests))]
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

    def _step(self, worker: Worker, results: dict[int, PoolReply], waiting: list[int]) -> None:
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
                self.broken = f"a worker did not start within {limit}: raise it where the machine is busy"
                self._late = True
            elif worker.task is not None:
                results[worker.task] = PoolReply("timeout", error=f"no verdict within {self.timeout_s:g} s")
            self._replace(worker)
        elif not worker.ready:
            worker.ready = bool(message["ready"])
            self.broken = self.broken or message.get("error", "")
            if why := message.get("unlimited"):
                self.unlimited = f"grading.memory_mb={self.memory_mb} is not held to on this system ({why})"
        elif worker.task is not None:
            error = message.get("error", "")
            results[worker.task] = PoolReply("error", error=error) if error else PoolReply("ok", message)
            if error == "MemoryError":
                results[worker.task] = PoolReply("killed", error=f"over {self.memory_mb} MB")
                self._replace(worker)  # a MemoryError may leave broken objects
            worker.task = None
        if len(results) > before:
            alive()

    def _lost(self, worker: Worker, results: dict[int, PoolReply], waiting: list[int]) -> None:
        if not worker.ready:
            self.broken = self.broken or "a grading worker ended while starting"
        elif worker.task is not None:
            results[worker.task] = PoolReply("killed", error=f"worker ended with {worker.ended(ENDING_S)}")
        self._replace(worker)

    def _replace(self, worker: Worker) -> None:
        worker.stop()
        self._workers.remove(worker)
        self._fill()
