"""What a worker process of the pool runs: code that may hang or use much memory."""

import contextlib
import ctypes
import gc
import logging
import os
import resource
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import Any

from rlreason.runtime.plugins import NotImportableError, described, judging, load

PR_SET_PDEATHSIG = 1
MAX_REASON = 500  # characters of an error that are sent
OUT_OF_MEMORY = 86  # the exit code of a worker that needed more
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

State = tuple[str, str]  # why a worker cannot answer, and why its memory is not limited; empty texts where all is well

_state: State = ("", "")
_handle: Callable[[Any], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What a worker answers with: the symbolic comparison, or a plug-in by its name or its pickle."""

    memory_mb: int
    plugin: str | None = None
    pickled: bytes | None = None


def start(options: WorkerOptions) -> None:
    """Prepare this process: tie it to its server, silence it, load the function and limit the memory."""
    global _handle, _state
    with contextlib.suppress(OSError, AttributeError):  # Linux: a worker that hangs ends with the run, also by kill -9
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # else the server waits for us
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits for code in C to return
    os.environ.update(ENVIRONMENT)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # what a library or a plug-in prints or reads must not reach the run's
        os.dup2(null, stream)
    try:
        _handle = _load(options.plugin, options.pickled)
    except BaseException as error:
        why = str(error) if isinstance(error, NotImportableError) else described(error)
        _state = (why[:MAX_REASON], "")
        return
    gc.freeze()  # no collection walks through the libraries again
    _bounded(resource.RLIMIT_CORE, 0)
    _state = ("", _bounded(resource.RLIMIT_AS, options.memory_mb * 2**20))


def state() -> State:
    """Return this worker's state."""
    return _state


def answer(request: Any) -> dict[str, Any]:
    """Return the reply to a request, or its error."""
    if _state[0]:
        return {"error": _state[0]}
    try:
        return _handle(request)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)  # it may have left broken objects
    except BaseException as error:
        return {"error": described(error)[:MAX_REASON]}


def _bounded(which: int, limit: int) -> str:
    """Set a limit of this process, never above its present one; return why that failed (macOS), or ""."""
    try:
        hard = resource.getrlimit(which)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (value, value))
    except (ValueError, OSError) as error:
        return described(error)
    return ""


def _load(plugin: str | None, pickled: bytes | None) -> Callable[[Any], dict[str, Any]]:
    if plugin is None:
        from rlreason.grading import symbolic

        logging.disable(logging.CRITICAL)  # the library logs whole responses
        return lambda request: symbolic.judge(*request).as_dict()
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
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):  # of an array with several numbers
        if isinstance(number := value.item(), bool | int | float):
            return number
    return repr(value)[:MAX_REASON]
