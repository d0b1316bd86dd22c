"""Serve forks to a sweep: load the libraries of its runs, then fork a process per run. It has no threads.

    python -m rlreason.sweeps.fork_server SOCKET MODULE ...        started only by `forks.py`

It ends with the sweep: its socket closes, and the kernel kills it. Signals that a terminal sends to all processes of a
command are blocked here: they are for the sweep and the runs.
"""

import io
import json
import os
import runpy
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from importlib import import_module, invalidate_caches
from typing import Any

from rlreason.runtime.early_signals import heed_signals
from rlreason.runtime.machine import loading
from rlreason.runtime.signals import SIGNALS, killed_with_parent

READY = -1
ADOPTED_S = 10.0  # for a run to become a child of the sweep


def serve(connection: socket.socket) -> dict[str, Any] | None:
    """Fork a process for each request. Return in that process with its request, or None when the sweep has ended."""
    while True:
        head, streams, *_ = socket.recv_fds(connection, 8, 2)
        if len(head) < 8:
            return None
        length = struct.unpack("q", head)[0]
        message = connection.recv(length, socket.MSG_WAITALL)
        if len(message) < length:
            return None
        request: dict[str, Any] = json.loads(message)
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            for number, stream in zip((1, 2), streams, strict=True):
                os.dup2(stream, number)
                os.close(stream)
            answered(connection, adopted(request["parent"]))
            connection.close()
            return request
        os.waitpid(between, 0)
        for stream in streams:
            os.close(stream)


def adopted(parent: int) -> bool:
    """Wait until this process is a child of `parent`; return False if that does not happen."""
    end = time.monotonic() + ADOPTED_S
    while os.getppid() != parent:
        if time.monotonic() > end:
            return False
        time.sleep(0.0005)
    return True


def answered(connection: socket.socket, well: bool) -> None:
    """Send the id of this process to the sweep; send 0 and exit if it is not the sweep's child."""
    try:
        connection.sendall(struct.pack("q", os.getpid() if well else 0))
    except OSError:  # it took too long: the sweep has started the run normally
        well = False
    if not well:
        os._exit(1)


def become(request: dict[str, Any], signals_before: dict[int, Any]) -> None:
    """Give this process the environment, folder, processors, streams and arguments that the sweep sent."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    if request["processors"] is not None:
        os.sched_setaffinity(0, request["processors"])
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _anew(getattr(sys, f"__{name}__"), number)
        vars(sys).update({name: stream, f"__{name}__": stream})
    sys.argv = ["rlreason", *request["words"]]
    invalidate_caches()
    if seed := getattr(getattr(sys.modules.get("numpy"), "random", None), "seed", None):
        seed()  # Python's own generators reseed themselves after a fork
    for number, handler in signals_before.items():
        signal.signal(number, handler)
    heed_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def _anew(stream: Any, number: int) -> Any:
    """Reopen a stream on its file descriptor: buffered for a file, by lines for a terminal."""
    if stream is None:  # it was closed when the process began
        return None
    if number == 0:
        return open(0, encoding=stream.encoding, errors=stream.errors, closefd=False)
    anew = open(number, "w", encoding=stream.encoding, errors=stream.errors, closefd=False)  # noqa: SIM115
    assert isinstance(anew, io.TextIOWrapper)
    anew.reconfigure(line_buffering=number == 2 or os.isatty(1), write_through=stream.write_through)
    return anew


def main() -> None:
    """Load the modules, report that they are loaded, and serve."""
    killed_with_parent()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    connection = socket.socket(fileno=int(sys.argv[1]))
    with loading(for_good=True):
        for module in sys.argv[2:]:
            import_module(module)
    connection.sendall(struct.pack("q", READY))
    if (request := serve(connection)) is None:
        return
    become(request, before)
    run: Callable[..., Any] = runpy.run_module
    run("rlreason", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
