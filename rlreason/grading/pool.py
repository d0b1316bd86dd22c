"""Worker processes that can be killed: a reply to every request, within limits on time and memory.

They run what may hang or use much memory: the symbolic library, and users' reward functions.

    Pool, in this process  ->  a server process (`serve`)  ->  workers, forked from it, which load the function

Workers are never forked from this process, which has threads and perhaps CUDA. When this process ends, in whatever
way, its server sees the end of their pipe, and ends with its workers.
"""

import gc
import json
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
from rlreason.runtime.text import redacted
from rlreason.types import Grade, Outcome

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
        """Return the outcome and the path of a grade that has no value; `path`: unless a worker was killed."""
        return "timeout" if self.status == "timeout" else "error", "killed" if self.status == "killed" else path


@dataclass(frozen=True, slots=True)
class Work:
    """The function that workers load, and their limits.

    `plugin`: a function's name, `pickled` where workers cannot import it; None: the symbolic library.
    """

    grading: GradingConfig
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
        return lambda *pair: as_plain(function(*pair))

    def late(self) -> str:
        """Return one line on a worker that does not start in time."""
        limit = f"grading.start_timeout_s={self.grading.start_timeout_s:g} s"
        return f"a worker did not start within {limit}: raise it where the machine is busy"


def as_plain(value: Any) -> Any:
    """Convert a reward: a number of numpy or torch to Python's, and anything but a number to its text.

    >>> import numpy
    >>> as_plain({"reward": numpy.float32(0.5), "format_reward": numpy.bool_(True)}), as_plain([1])
    ({'reward': 0.5, 'format_reward': True}, '[1]')
    """
    if isinstance(value, dict):
        return {str(key): as_plain(one) for key, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    with suppress(AttributeError, TypeError, ValueError, RuntimeError):  # of an array with several numbers
        if isinstance(number := value.item(), bool | int | float):
            return number
    return repr(value)[:MAX_REASON]


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
        workers.append(_Worker(work, caller))
        begun: PoolReply = workers[0].pipe.recv()
        workers[0].has_begun = True
        caller.send(begun)
        while begun.status == "ok":
            _answer(work, caller, caller.recv(), workers)
    for worker in workers:
        worker.process.kill()
    os._exit(0)  # without waiting for them


def _answer(work: Work, caller: Connection, requests: Sequence[Any], workers: "list[_Worker]") -> None:
    """Send (number, reply) for each request as it comes. `EOFError` where the caller has ended meanwhile."""
    waiting, busy = list(enumerate(requests)), dict[Connection, _Worker]()
    while waiting or busy:
        while waiting and len(busy) < work.grading.workers:
            workers[:] = [worker for worker in workers if worker.process.is_alive()]
            worker = next((one for one in workers if one.pipe not in busy), None)
            if worker is None:
                worker = _Worker(work, caller)
                workers.append(worker)
            worker.take(*waiting.pop(0))
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
                worker.has_begun, worker.until = True, time.monotonic() + work.grading.timeout_s
                continue
            del busy[worker.pipe]
            caller.send((worker.number, reply))


class _Worker:
    """A forked process, which loads the function and answers one request at a time: `number`, by the time `until`."""

    number, until = 0, 0.0
    has_begun = False  # whether the function has been loaded

    def __init__(self, work: Work, caller: Connection) -> None:
        fork = get_context("fork")
        self.work = work
        self.pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=_work, args=(work, theirs, (self.pipe, caller)))
        self.process.start()
        theirs.close()

    def take(self, number: int, request: Any) -> None:
        """Send it a request."""
        grading, self.number = self.work.grading, number
        self.until = time.monotonic() + (grading.timeout_s if self.has_begun else grading.start_timeout_s)
        with suppress(OSError):  # it has ended just now
            self.pipe.send(request)

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
            return PoolReply("timeout", f"no verdict within {self.work.grading.timeout_s:g} s")
        if self.process.exitcode == OUT_OF_MEMORY:
            return PoolReply("killed", f"over {self.work.grading.memory_mb} MB")
        return PoolReply("killed", f"worker ended with {self.process.exitcode}")


def _work(work: Work, pipe: Connection, inherited: Sequence[Connection]) -> None:
    """Load the function, say so, and answer requests within the memory limit, where the system has one."""
    killed_with_parent()
    for one in inherited:
        one.close()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # else all workers draw the same numbers
    try:
        function = work.load()
    except BaseException as error:
        why = str(error) if isinstance(error, NotImportableError) else describe_error(error)
        pipe.send(PoolReply("error", why[:MAX_REASON]))
        return
    with suppress(ValueError, OSError):  # macOS
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit, hard = work.grading.memory_mb * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    pipe.send(PoolReply("ok"))
    with suppress(EOFError):
        while True:
            request = pipe.recv()
            try:
                reply = PoolReply("ok", function(*request))
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

    def __init__(self, grading: GradingConfig, plugin: str | None = None, pickled: bytes | None = None) -> None:
        """Start nothing yet. `plugin`, `pickled`: see `Work`."""
        names = ("workers", "timeout_s", "start_timeout_s", "memory_mb")
        limits = GradingConfig(**{name: getattr(grading, name) for name in names})  # plain, and no other: it is sent
        self.work = Work(limits, plugin, pickled)
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
            replies = {} if self.broken or self._closed else self._replies(requests)
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

    def _end(self) -> None:
        if self._server is not None:
            self._finalizer()
        self._server = None

    def _wait(self) -> None:
        """Start, and wait until the function has been loaded; where it cannot be, say why in `broken`."""
        self._start()
        if self._ready or self._server is None:
            return
        reply = PoolReply("error", "a grading worker ended while starting")
        with suppress(EOFError, OSError):
            has_come = self._pipe.poll(self.work.grading.start_timeout_s)
            reply = self._pipe.recv() if has_come else PoolReply("error", self.work.late())
        self._ready = reply.status == "ok"
        if not self._ready:
            self._end()
            self.broken = reply.value

    def _replies(self, requests: Sequence[Any]) -> dict[int, PoolReply]:
        """Return the replies by the numbers of their requests; end the server where it does not send them all."""
        replies: dict[int, PoolReply] = {}
        grading = self.work.grading
        with suppress(EOFError, OSError):
            self._pipe.send(requests)
            while len(replies) < len(requests) and self._pipe.poll(grading.start_timeout_s + grading.timeout_s):
                number, reply = self._pipe.recv()
                replies[number] = reply
                alive()
        if len(replies) < len(requests):
            self._end()
        return replies


KEYS = ("format_reward", "answer_reward", "reward")
ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1


def plugin_grade(reply: PoolReply, correct_at: float | None = None) -> tuple[Grade, PoolReply | None]:
    """Return the grade of a plug-in's reply and, where it gave no reward, the failed reply with its reason.

    A number is a reward; a dictionary must have `reward` and may have the two others. All else is an error, never a
    silent zero among the wrong answers. The response is correct where its answer reward (by default the reward) is at
    least `correct_at`, or 1 where that is None: partial credit is a reward to learn from, but no right answer.

    >>> [plugin_grade(PoolReply("ok", value))[0].outcome for value in (1.0, 0.1)]
    ['correct', 'wrong']
    >>> plugin_grade(PoolReply("ok", "1.0"))[1].value
    "returned '1.0', and must return a number, or a dictionary with a number as reward"
    """
    if reply.status != "ok":
        return Grade(0.0, 0.0, 0.0, *reply.failure("plugin")), reply
    value = reply.value
    if isinstance(value, int | float):
        value = {"reward": value, "format_reward": 1.0}
    numbers: list[Any] = []
    if isinstance(value, dict) and "reward" in value:
        numbers = [value.get(name, value["reward"]) for name in KEYS]
    if not numbers or not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        why = f"returned {repr(reply.value)[:100]}, and must return a number, or a dictionary with a number as reward"
        return Grade(0.0, 0.0, 0.0, "error", "plugin_value"), PoolReply("error", why)
    formatted, answer, reward = map(float, numbers)
    outcome: Outcome = "wrong" if formatted > 0 else "unformatted"
    whole = 1.0 if correct_at is None else correct_at
    return Grade(formatted, answer, reward, "correct" if answer >= whole - ROUNDING else outcome, "plugin"), None


MAX_LINES = 1000
MAX_CHARS = 400


class IncidentLog:
    """Append incidents to a file, up to a limit."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path else None
        self.left = MAX_LINES

    def add(self, answer: str, ground_truth: str, reply: PoolReply) -> None:
        """Append a line for the pair and its result; nothing beyond the limit or without a file."""
        if self.path is None or not self.left:
            return
        self.left -= 1
        record = {
            "time": round(time.time(), 1),
            "status": reply.status,
            "error": redacted(reply.value),
            "answer": answer[:MAX_CHARS],
            "answer_chars": len(answer),
            "gold": ground_truth[:MAX_CHARS],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")
