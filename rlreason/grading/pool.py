"""Worker processes that can be killed: a reply to every request, within limits on time and memory.

They run what may hang or use much memory: the symbolic library, and users' reward functions.

    Pool, in this process  ->  a server process (`serve`)  ->  workers, forked from it, which load the function

Workers are never forked from this process, which has threads and perhaps CUDA. When this process ends, in whatever
way, its server sees the end of their pipe, and ends with its workers.
"""

import gc
import inspect
import logging
import math
import os
import resource
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe, connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlreason.config.groups import GradingConfig
from rlreason.errors import WaitError
from rlreason.runtime.files import alive
from rlreason.runtime.plugins import NotImportableError, describe_error, load
from rlreason.runtime.signals import killed_with_parent
from rlreason.types import Outcome

MAX_REASON = 500  # characters of an error that are sent
OUT_OF_MEMORY = 86  # the exit code of a worker that needed more
SERVER_ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0",
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip


class PoolReply(NamedTuple):
    """The result of one request: `value` is what the function returned when `status` is "ok", else why it did not."""

    status: Literal["ok", "timeout", "killed", "error"]
    value: Any = None

    def failure(self, path: str) -> tuple[Outcome, str]:
        """Return outcome and path of a grade without a value; "ok": what the function returned is no reward."""
        paths = {"killed": "killed", "ok": "plugin_value"}
        return "timeout" if self.status == "timeout" else "error", paths.get(self.status, path)


@dataclass(frozen=True, slots=True)
class Work:
    """The function that workers load, and their limits.

    `plugin`: a function's name, `pickled` where workers cannot import it; None: the symbolic library.
    """

    workers: int
    timeout_s: float
    start_timeout_s: float
    memory_mb: int
    plugin: str | None
    pickled: bytes | None

    def load(self) -> Callable[..., Any]:
        """Load the function in this process."""
        if self.plugin is None:
            from rlreason.grading import symbolic

            logging.disable(logging.CRITICAL)  # the library logs whole responses
            return symbolic.judge
        if self.pickled is None:
            function = load(self.plugin)
        else:
            import cloudpickle

            function = cloudpickle.loads(self.pickled)
        with suppress(ValueError):  # some functions in C have no signature
            try:
                inspect.signature(function).bind("response", "reference answer")
            except TypeError as error:
                takes = "a reward takes (response, reference answer), a scorer (question, response)"
                raise NotImportableError(f"it cannot be called with two texts ({error}): {takes}") from None
        return lambda *pair: rewards(function(*pair))

    def late(self) -> str:
        """Return one line on a worker that does not start in time."""
        limit = f"grading.start_timeout_s={self.start_timeout_s:g} s"
        return f"a worker did not start within {limit}: raise it where the machine is busy"


def rewards(value: Any) -> list[float] | str:
    """Return format, answer and reward from what a plug-in returned, or why it is no reward.

    A number is a reward; a dictionary must have `reward` and may have the two others. All else is an error, never a
    silent zero among the wrong answers.

    >>> import numpy
    >>> rewards(numpy.float32(0.5)), rewards({"reward": 1, "format_reward": numpy.bool_(False)})
    ([1.0, 0.5, 0.5], [0.0, 1.0, 1.0])
    >>> rewards("1.0")
    "returned '1.0', and must return a number, or a dictionary with a number as reward"
    """
    named = value if isinstance(value, dict) else {"reward": value, "format_reward": 1.0}
    numbers = []
    for key in ("format_reward", "answer_reward", "reward"):
        number: Any = named.get(key, named.get("reward"))
        with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # of an array with several numbers
            number = number.item()  # of numpy or torch
        if not isinstance(number, int | float) or not math.isfinite(number):
            return f"returned {repr(value)[:100]}, and must return a number, or a dictionary with a number as reward"
        numbers.append(float(number))
    return numbers


def serve(descriptor: int) -> None:
    """Answer lists of requests that come over the pipe with this descriptor until its end, by workers.

    Workers share the symbolic library. Each loads a plug-in by itself: threads and locks do not survive a fork, and
    workers that share a random generator draw the same numbers.
    """
    caller = Connection(descriptor)
    work, sys.path[:] = caller.recv()
    workers: list[_Worker] = []
    with suppress(BaseException):  # the end of the pipe
        if work.plugin is None:
            with suppress(ImportError):  # of which a worker says why
                from rlreason.grading import symbolic  # noqa: F401
            gc.freeze()  # no collection walks through the libraries again
        while True:
            _answer(work, caller, caller.recv(), workers)
    for worker in workers:
        worker.process.kill()
    os._exit(0)  # without waiting for them


def _answer(work: Work, caller: Connection, requests: Sequence[Any], workers: "list[_Worker]") -> None:
    """Send (number, reply) for each request as it comes. `EOFError` where the caller has ended meanwhile."""
    waiting, busy = list(enumerate(requests)), dict[Connection, _Worker]()
    while waiting or busy:
        while waiting and len(busy) < work.workers:
            workers[:] = [worker for worker in workers if worker.process.is_alive()]
            worker = next((one for one in workers if one.pipe not in busy), None)
            if worker is None:
                worker = _Worker(work, caller)
                workers.append(worker)
            worker.number, request = waiting.pop(0)
            limit = work.timeout_s if worker.has_begun else work.start_timeout_s
            worker.until = time.monotonic() + limit
            with suppress(OSError):  # it has ended just now
                worker.pipe.send(request)
            busy[worker.pipe] = worker
        first = min(worker.until for worker in busy.values())
        ready = connection.wait([caller, *busy], max(0.0, first - time.monotonic()))
        if caller in ready:
            raise EOFError
        for worker in list(busy.values()):
            if worker.pipe not in ready and time.monotonic() < worker.until:
                continue
            reply = worker.reply(worker.pipe in ready)
            if not worker.has_begun and reply.status == "ok":  # its request comes next
                worker.has_begun, worker.until = True, time.monotonic() + work.timeout_s
                continue
            del busy[worker.pipe]
            caller.send((worker.number, reply))


class _Worker:
    """A forked process, which loads the function and answers one request at a time: `number`, by the time `until`."""

    number, until = 0, 0.0
    has_begun = False  # whether the function has been loaded

    def __init__(self, work: Work, caller: Connection) -> None:
        self.work = work
        self.pipe, theirs = Pipe()
        self.process = get_context("fork").Process(target=_work, args=(work, theirs, (self.pipe, caller)))
        self.process.start()
        theirs.close()

    def reply(self, has_come: bool) -> PoolReply:
        """Return the reply that has come, or why none comes; the worker is killed then."""
        if has_come:
            with suppress(EOFError, OSError):
                reply: PoolReply = self.pipe.recv()
                return reply
            connection.wait([self.process.sentinel], 1.0)
        self.process.kill()
        self.process.join()
        if not has_come and not self.has_begun:
            return PoolReply("error", self.work.late())
        if not has_come:
            return PoolReply("timeout", f"no verdict within {self.work.timeout_s:g} s")
        if self.process.exitcode == OUT_OF_MEMORY:
            return PoolReply("killed", f"over {self.work.memory_mb} MB")
        return PoolReply("killed", f"worker ended with {self.process.exitcode}")


def _work(work: Work, pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Load the function, say so, and answer requests within the memory limit, where the system has one."""
    killed_with_parent()
    for one in inherited:
        one.close()
    try:
        function = work.load()
    except BaseException as error:
        why = str(error) if isinstance(error, NotImportableError) else describe_error(error)
        pipe.send(PoolReply("error", why[:MAX_REASON]))
        return
    with suppress(ValueError, OSError):  # macOS
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit, hard = work.memory_mb * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    pipe.send(PoolReply("ok"))
    with suppress(EOFError):
        while True:
            request = pipe.recv()
            try:
                reply = PoolReply("ok", function(*request) if request else None)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)  # it may have left broken objects
            except BaseException as error:
                reply = PoolReply("error", describe_error(error)[:MAX_REASON])
            pipe.send(reply)


def _end(server: "subprocess.Popen[bytes]", pipe: Connection) -> None:
    server.kill()
    server.wait()
    pipe.close()


class Pool:
    """A pool of workers: `run` sends requests to them and returns the replies in order; one caller at a time."""

    def __init__(self, grading: GradingConfig, plugin: str | None, pickled: bytes | None) -> None:
        """Start nothing yet. `plugin`, `pickled`: see `Work`."""
        limits = (grading.workers, grading.timeout_s, grading.start_timeout_s, grading.memory_mb)
        self.work = Work(*limits, plugin, pickled)
        self.broken = ""  # why no worker can start, once that is known
        self._server: subprocess.Popen[bytes] | None = None
        self._pipe: Connection
        self._ready = False  # whether the function has been loaded
        self._finalizer: Any = None  # ends the processes, also when this object goes or Python ends
        self._lock = threading.Lock()
        self._closed = False

    def start(self) -> None:
        """Start the server now; it loads its libraries while the caller goes on."""
        with self._lock:
            self._start()

    def wait(self) -> str:
        """Wait until requests can be answered; return why none can be, or an empty text."""
        with self._lock:
            self._wait()
            return self.broken

    def run(self, requests: Sequence[Any]) -> list[PoolReply]:
        """Return the replies to these requests, in order.

        Raises `WaitError` where no worker starts in time, and `RuntimeError` once the pool is closed.
        """
        if not requests:
            return []
        with self._lock:
            self._wait()
            replies: dict[int, PoolReply] = {}
            if not self.broken and not self._closed:
                limit = self.work.start_timeout_s + self.work.timeout_s
                with suppress(EOFError, OSError):  # it has ended, and its pipe too
                    self._pipe.send(requests)
                    while len(replies) < len(requests) and self._pipe.poll(limit):
                        number, reply = self._pipe.recv()
                        replies[number] = reply
                        alive()
                if len(replies) < len(requests):
                    self._end()
            if self._closed:
                raise RuntimeError("the grader is closed")
            if self.broken == self.work.late():
                raise WaitError(f"grading: {self.broken}")
            lost = PoolReply("error", self.broken or "the server of the workers ended")
            return [replies.get(number, lost) for number in range(len(requests))]

    def close(self) -> None:
        """End the processes, for good; a `run` that waits for them in another thread ends with an error."""
        self._closed = True
        if server := self._server:
            server.kill()
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._server is not None and self._server.poll() is not None:
            self._end()  # it was killed between two requests, or is the parent's of a forked process
        if self._server is not None or self.broken or self._closed:
            return
        self._pipe, theirs = Pipe()
        program = f"from rlreason.grading.pool import serve; serve({theirs.fileno()})"
        self._server = subprocess.Popen(
            [sys.executable, "-c", program], pass_fds=[theirs.fileno()], env=os.environ | SERVER_ENVIRONMENT,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        theirs.close()
        self._finalizer = weakref.finalize(self, _end, self._server, self._pipe)
        self._ready = False
        with suppress(OSError):  # it has ended, which `_wait` finds
            self._pipe.send((self.work, sys.path))
            self._pipe.send([()])

    def _end(self) -> None:
        if self._server is not None:
            self._finalizer()
        self._server = None

    def _wait(self) -> None:
        """Start, and wait until the empty request is answered; where it cannot be, say why in `broken`."""
        self._start()
        if not self._ready and self._server is not None:
            reply = PoolReply("error", "the server of the workers ended while starting")
            with suppress(EOFError, OSError):
                in_time = self._pipe.poll(self.work.start_timeout_s)
                reply = self._pipe.recv()[1] if in_time else PoolReply("error", self.work.late())
            self._ready = reply.status == "ok"
            if not self._ready:
                self._end()
                self.broken = reply.value
