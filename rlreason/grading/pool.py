"""Worker processes that can be killed: a reply to every request, within limits on time and memory.

They run what may hang or use much memory: the symbolic library, and users' reward functions. The processes are
pebble's. They are forked from a server that has imported the symbolic library, never from this process, which has
threads and perhaps CUDA.
"""

import gc
import io
import json
import logging
import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import context, forkserver, popen_forkserver, process, reduction, spawn, util
from pathlib import Path
from typing import Any, Literal

from pebble import ProcessExpired, ProcessPool

from rlreason.errors import WaitError
from rlreason.runtime.files import alive
from rlreason.runtime.machine import place_sockets
from rlreason.runtime.plugins import NotImportableError, describe_error, judging, load
from rlreason.runtime.signals import killed_with_parent
from rlreason.runtime.text import redacted
from rlreason.types import Grade, Outcome

MAX_REASON = 500  # characters of an error that are sent
OUT_OF_MEMORY = 86  # the exit code of a worker that needed more
WORKER_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip

State = tuple[str, str]  # why a worker cannot answer, and why its memory is not limited; empty texts where all is well

_state: State = ("", "")
_handle: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker answers with: the symbolic comparison, or a plug-in by its name or its pickle."""

    memory_mb: int
    plugin: str | None = None
    pickled: bytes | None = None


def start_worker(options: WorkerOptions) -> None:
    """Prepare this process: tie it to its server, silence it, load the function and limit the memory."""
    global _handle, _state
    killed_with_parent()  # a worker that hangs ends with the run, also by kill -9
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # else the server waits for us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits for code in C to return
    os.environ.update(WORKER_ENVIRONMENT)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a library or a plug-in prints or reads must not reach the run's
        os.dup2(null, stream)
    try:
        _handle = _load(options.plugin, options.pickled)
    except BaseException as error:
        why = str(error) if isinstance(error, NotImportableError) else describe_error(error)
        _state = (why[:MAX_REASON], "")
        return
    gc.freeze()  # no collection walks through the libraries again
    _bounded(resource.RLIMIT_CORE, 0)
    _state = ("", _bounded(resource.RLIMIT_AS, options.memory_mb * 2**20))


def worker_state() -> State:
    """Return this worker's state."""
    return _state


def answer_request(request: Any) -> dict[str, Any]:
    """Return the reply to a request, or its error."""
    if _state[0]:
        return {"error": _state[0]}
    try:
        return _handle(request)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # it may have left broken objects
    except BaseException as error:
        return {"error": describe_error(error)[:MAX_REASON]}


def _bounded(which: int, limit: int) -> str:
    """Set a limit of this process, never above its present one; return why that failed (macOS), or ""."""
    try:
        hard = resource.getrlimit(which)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (value, value))
    except (ValueError, OSError) as error:
        return describe_error(error)
    return ""


def _load(plugin: str | None, pickled: bytes | None) -> Callable[[Any], dict[str, Any]]:
    if plugin is None:
        from rlreason.grading import symbolic

        logging.disable(logging.CRITICAL)  # the library logs whole responses
        return lambda request: symbolic.judge(*request)._asdict()
    if pickled is None:
        function = judging(load(plugin), plugin)
    else:
        import cloudpickle

        function = judging(cloudpickle.loads(pickled), plugin)
    return lambda request: {"value": as_plain(function(*request))}


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


POLL_S = 0.5  # how often a wait for a reply checks whether the pool is being closed
#: Of the server: where it finds this package (not in the current folder), and the order of sets.
SERVER_ENVIRONMENT = {
    "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
    "PYTHONSAFEPATH": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker",  # after a kill -9 it lists locks
}


class _Popen(popen_forkserver.Popen):
    """Fork a process from the pool's server, without the user's main module: a script needs no main guard."""

    def __init__(self, started: "_Process") -> None:
        self.server = started.server
        super().__init__(started)

    def _launch(self, started: Any) -> None:
        """Do what the base class does, with fewer preparations and the pool's server."""
        preparations = spawn.get_preparation_data(started.name)
        for name in ("init_main_from_name", "init_main_from_path"):
            preparations.pop(name, None)
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(preparations, buffer)
            reduction.dump(started, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, pipe = self.server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        ends = os.dup(pipe), self.sentinel
        self.finalizer = util.Finalize(self, util.close_fds, ends)  # type: ignore[attr-defined]
        with open(pipe, "wb") as file:
            file.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Process(context.ForkServerProcess):
    server: forkserver.ForkServer

    def start(self) -> None:
        """Start it, also from a daemon, such as a process of a multiprocessing pool, which may start none itself."""
        settings: dict[str, Any] = process.current_process()._config  # type: ignore[attr-defined]
        is_daemon = settings.pop("daemon", False)
        try:
            super().start()
        finally:
            if is_daemon:
                settings["daemon"] = True

    def _Popen(self, started: "_Process") -> _Popen:  # type: ignore[override]  # noqa: N802
        return _Popen(started)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "server"}


class _Context(context.ForkServerContext):
    """The context of processes that are forked from a server of their own, which has imported some modules."""

    def __init__(self, preload: list[str]) -> None:
        super().__init__()
        self.server = forkserver.ForkServer()
        self.server.set_forkserver_preload(preload)
        before = {name: os.environ.get(name) for name in SERVER_ENVIRONMENT}
        os.environ.update(SERVER_ENVIRONMENT)
        place_sockets()
        try:
            self.server.ensure_running()
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def Process(self, *args: Any, **settings: Any) -> _Process:  # type: ignore[override]  # noqa: N802
        started = _Process(*args, **settings)
        started.server = self.server
        return started


def _end(pool: ProcessPool, server: Any) -> None:
    """Kill the server, and with it the workers, and end the pool's threads."""
    pool.stop()
    with suppress(ProcessLookupError):
        os.kill(server._forkserver_pid, signal.SIGKILL)
    pool.join()
    server._stop()


@dataclass(frozen=True, slots=True)
class PoolReply:
    """The result of one request. `value` is the worker's dictionary when `status` is "ok"."""

    status: Literal["ok", "timeout", "killed", "error"]
    value: dict[str, Any] = field(default_factory=dict)
    error: str = ""


class Pool:
    """A pool of workers: `run` sends requests to them and returns the replies in order; one caller at a time."""

    def __init__(self, workers: int, timeout_s: float, start_timeout_s: float, options: WorkerOptions) -> None:
        """`timeout_s`: seconds for one request; `start_timeout_s`: seconds for a worker to start."""
        self.size, self.timeout_s, self.start_timeout_s, self.options = workers, timeout_s, start_timeout_s, options
        self.broken = ""  # why no worker can start, once that is known
        self.unlimited = ""  # why the memory of a worker is not limited
        self._late = False  # whether a worker took too long to start
        self._context: _Context | None = None
        self._pool: ProcessPool | None = None
        self._ready: Future[State] | None = None  # until a worker has started
        self._finalizer: Any = None  # ends the processes, also when this object goes or Python ends
        self._lock = threading.Lock()
        self._closing = False

    def start(self) -> None:
        """Start the processes now; they load their libraries while the caller goes on."""
        with self._lock:
            self._start()

    def wait(self) -> str:
        """Wait until a worker is ready; return why none can start, or an empty text."""
        with self._lock:
            self._started()
            return self.broken

    def run(self, requests: Sequence[Any]) -> list[PoolReply]:
        """Return the replies to these requests, in order.

        Raises `WaitError` where no worker starts in time, and `RuntimeError` where the pool is closed meanwhile.
        """
        replies: list[PoolReply] = []
        with self._lock:
            while len(replies) < len(requests):
                before = len(replies)
                new = self._ready is not None or self._pool is None
                if pool := self._started():
                    self._collect(pool, requests, replies)
                if self._closing:
                    raise RuntimeError("the grader was closed while it graded")
                if new and len(replies) == before and not self.broken:
                    self.broken = "the grading workers end before they reply"
                if self._late:
                    raise WaitError(f"grading: {self.broken}")
                if self.broken:
                    replies += [PoolReply("error", error=self.broken)] * (len(requests) - len(replies))
        return replies

    def close(self) -> None:
        """End the processes now; a `run` that waits for them in another thread ends with an error."""
        self._closing = True
        with self._lock:
            self._closing = False
            self._end()

    def after_fork(self) -> None:
        """In a forked child, renew the lock, which a thread that is gone may hold, and forget the parent's workers."""
        self._lock = threading.Lock()
        if self._context is not None:
            os.close(self._context.server._forkserver_alive_fd)  # type: ignore[attr-defined]
        self._context = self._pool = self._ready = self._finalizer = None

    def _start(self) -> None:
        if self._pool is not None and not self._pool.active:  # a worker was killed between two requests
            self._end()
        if self._pool is None and not self.broken:
            library = [] if self.options.plugin else ["rlreason.grading.symbolic"]
            self._context = _Context([__name__, *library])
            self._pool = ProcessPool(self.size, 0, start_worker, (self.options,), self._context)
            self._finalizer = util.Finalize(self, _end, (self._pool, self._context.server), exitpriority=10)
            self._ready = self._pool.schedule(worker_state)

    def _end(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._context = self._pool = self._ready = self._finalizer = None

    def _started(self) -> ProcessPool | None:
        """Return the pool once a worker has started; None where none can, and `broken` says why."""
        self._start()
        if self._ready is None:
            return self._pool
        if not self._wait_for(self._ready, self.start_timeout_s):
            limit = f"grading.start_timeout_s={self.start_timeout_s:g} s"
            self._late = not self._closing
            if self._late:
                self.broken = f"a worker did not start within {limit}: raise it where the machine is busy"
        elif self._ready.exception():
            self.broken = "a grading worker ended while starting"
        else:
            self.broken, unlimited = self._ready.result()
            if unlimited:
                limit = f"grading.memory_mb={self.options.memory_mb}"
                self.unlimited = f"{limit} is not held to on this system ({unlimited})"
        self._ready = None
        if self.broken or self._closing:
            self._end()
        return self._pool

    def _collect(self, pool: ProcessPool, requests: Sequence[Any], replies: list[PoolReply]) -> None:
        """Append the replies that come; end the pool where one does not, as after the end of an idle worker."""
        futures = []
        try:
            with suppress(RuntimeError):  # the pool broke
                for request in requests[len(replies) :]:
                    futures.append(pool.schedule(answer_request, (request,), timeout=self.timeout_s))
            for future in futures:
                # Of those before it, all are done: it is with a worker, or next in turn.
                in_time = self._wait_for(future, self.start_timeout_s + 2 * self.timeout_s)
                if not in_time or isinstance(future.exception(), BrokenProcessPool):
                    break
                replies.append(self._reply(future))
                alive()
        finally:
            if len(replies) < len(requests):
                self._end()

    def _wait_for(self, future: Future[Any], limit_s: float) -> bool:
        """Wait until it is done; return False where it is not in time, or the pool is being closed."""
        end = time.monotonic() + limit_s
        while not wait([future], POLL_S).done:
            if self._closing or time.monotonic() > end:
                return False
        return True

    def _reply(self, future: Future[Any]) -> PoolReply:
        error = future.exception()
        if isinstance(error, TimeoutError):
            return PoolReply("timeout", error=f"no verdict within {self.timeout_s:g} s")
        if isinstance(error, ProcessExpired):
            if error.exitcode == OUT_OF_MEMORY:
                return PoolReply("killed", error=f"over {self.options.memory_mb} MB")
            return PoolReply("killed", error=f"worker ended with {error.exitcode}")
        if error is not None:
            return PoolReply("error", error=describe_error(error))
        value: dict[str, Any] = future.result()
        return PoolReply("error", error=value["error"]) if "error" in value else PoolReply("ok", value)


KEYS = ("format_reward", "answer_reward", "reward")
ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1


def plugin_grade(reply: PoolReply, correct_at: float | None = None) -> tuple[Grade, PoolReply | None]:
    """Return the grade of a plug-in's reply and, where it gave no reward, the failed reply with its reason.

    A number is a reward; a dictionary must have `reward` and may have the two others. All else is an error, never a
    silent zero among the wrong answers. The response is correct where its answer reward (by default the reward) is at
    least `correct_at`, or 1 where that is None: partial credit is a reward to learn from, but no right answer.

    >>> [plugin_grade(PoolReply("ok", {"value": value}))[0].outcome for value in (1.0, 0.1)]
    ['correct', 'wrong']
    >>> plugin_grade(PoolReply("ok", {"value": "1.0"}))[1].error
    "returned '1.0', and must return a number, or a dictionary with a number as reward"
    """
    if reply.status == "timeout":
        return Grade(0.0, 0.0, 0.0, "timeout", "plugin"), reply
    if reply.status != "ok":
        return Grade(0.0, 0.0, 0.0, "error", "killed" if reply.status == "killed" else "plugin"), reply
    value = reply.value.get("value")
    if isinstance(value, int | float):
        value = {"reward": value, "format_reward": 1.0, "answer_reward": value}
    numbers: list[Any] = [None]
    if isinstance(value, dict) and "reward" in value:
        numbers = [value.get(name, value["reward"]) for name in KEYS]
    if not all(isinstance(number, int | float) and math.isfinite(number) for number in numbers):
        returned = f"returned {repr(reply.value.get('value'))[:100]}"
        why = f"{returned}, and must return a number, or a dictionary with a number as reward"
        return Grade(0.0, 0.0, 0.0, "error", "plugin_value"), PoolReply("error", error=why)
    formatted, answer, reward = (float(number) for number in numbers)
    outcome: Outcome = "wrong" if formatted > 0 else "unformatted"
    whole = 1.0 if correct_at is None else correct_at
    return Grade(formatted, answer, reward, "correct" if answer >= whole - ROUNDING else outcome, "plugin"), None


MAX_LINES = 1000
MAX_CHARS = 400


class IncidentLog:
    """Append incidents to a file up to a limit. A file that cannot be written does not stop a run; see `failed`."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path else None
        self.left = MAX_LINES
        self.failed = ""

    def add(self, answer: str, ground_truth: str, reply: PoolReply) -> None:
        """Append a line for the pair and its result; nothing beyond the limit or without a file."""
        if self.path is None or not self.left:
            return
        self.left -= 1
        record = {
            "time": round(time.time(), 1),
            "status": reply.status,
            "error": redacted(reply.error),
            "answer": answer[:MAX_CHARS],
            "answer_chars": len(answer),
            "gold": ground_truth[:MAX_CHARS],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            self.left, self.failed = 0, str(error)
