"""The worker process of the pool, for code that may hang or use much memory: `python -m rlreason.grading.worker`.

It reads one request at a time from standard input and replies on standard output, both as JSON with a 4-byte length
in front. It never imports the user's main module. It ends when its input closes, when its parent dies, or when its
start or one request exceeds its limit (by the kernel's alarm, which also ends C code that ignores Python's signals).
"""

import contextlib
import ctypes
import json
import logging
import os
import resource
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from rlreason.grading.pool import LENGTH, pack
from rlreason.runtime.plugins import NotImportableError, described, judging, load

PR_SET_PDEATHSIG = 1
MAX_REASON = 500  # characters of an error that are sent
ALARM_SLACK_S = 1.0  # the parent kills earlier; the alarm is for a worker whose parent is gone


def main() -> None:
    """Reply to requests until the input closes. The options are JSON in the first argument."""
    if len(sys.argv) != 2:
        print(
            "rlreason: rlreason.grading.worker is started by the grader: type python -m rlreason",
            file=sys.stderr,
        )
        sys.exit(2)
    options = json.loads(sys.argv[1])
    _tie_to_parent(options["parent"], options["main_thread"])
    signal.setitimer(signal.ITIMER_REAL, options["start_timeout_s"] + ALARM_SLACK_S)
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)  # what a library or a plug-in prints or reads must not reach the pipes
    os.dup2(null, 1)
    sys.path[:] = [*options["path"], *[entry for entry in sys.path if entry not in options["path"]]]
    try:
        pickled = _read_bytes(requests, options["parent"]) if options["sent"] else None
        handle = _load(options["plugin"], pickled)
    except BaseException as error:
        why = str(error) if isinstance(error, NotImportableError) else described(error)
        os.write(replies, pack({"ready": False, "error": why[:MAX_REASON]}))
        return
    unlimited = _bounded(resource.RLIMIT_AS, options["memory_mb"] * 2**20)
    _bounded(resource.RLIMIT_CORE, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    os.write(replies, pack({"ready": True, "unlimited": unlimited}))
    while (request := _read(requests, options["parent"])) is not None:
        signal.setitimer(signal.ITIMER_REAL, options["timeout_s"] + ALARM_SLACK_S)
        reply = _answer(handle, request)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(replies, pack(reply))


def _tie_to_parent(parent: int, main_thread: bool) -> None:
    # The kernel sends this signal when the THREAD that started us ends, so it is set only for a main thread.
    if main_thread:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which closes its workers


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
    return lambda request: {"value": as_json(function(*request))}


def as_json(value: Any) -> Any:
    """Convert a reward for JSON: a number of numpy or torch to Python's, and anything but a number to its text.

    >>> import numpy
    >>> as_json({"reward": numpy.float32(0.5), "format_reward": numpy.bool_(True)}), as_json([1])
    ({'reward': 0.5, 'format_reward': True}, '[1]')
    """
    if isinstance(value, dict):
        return {str(key): as_json(one) for key, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    with contextlib.suppress(AttributeError, TypeError, ValueError, RuntimeError):  # of an array with several numbers
        if isinstance(found := value.item(), bool | int | float):
            return found
    return repr(value)[:MAX_REASON]


def _answer(handle: Callable[[Any], dict[str, Any]], request: Any) -> dict[str, Any]:
    try:
        reply = handle(request)
        json.dumps(reply)
    except MemoryError:
        return {"error": "MemoryError"}
    except BaseException as error:
        return {"error": described(error)[:MAX_REASON]}
    return reply


def _read(source: int, parent: int) -> Any:
    body = _read_bytes(source, parent)
    return json.loads(body) if body else None


def _read_bytes(source: int, parent: int) -> bytes | None:
    header = _read_exactly(source, LENGTH.size, parent)
    return header and _read_exactly(source, LENGTH.unpack(header)[0], parent)


def _read_exactly(source: int, size: int, parent: int) -> bytes | None:
    """Return the bytes; None at the end of the input, or when the parent died and a sibling keeps the pipe open."""
    parts = []
    poll = select.poll()
    poll.register(source, select.POLLIN)
    while size:
        if not poll.poll(1000):
            if os.getppid() != parent:
                return None
            continue
        part = os.read(source, min(size, 1 << 16))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(target: int, data: bytes) -> None:
    while data:
        data = data[os.write(target, data) :]


if __name__ == "__main__":
    main()
