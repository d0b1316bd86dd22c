"""Fork the runs of a sweep from a process that has loaded their libraries once for all, which takes seconds.

    sweep ── server (`fork_server.py`) ── an instant's process ── run
      └──────────────────────────────────────────────────────────┘ adopted: the run is a child of the sweep itself

A forked run is waited for and signalled like one that was started normally. It has its own environment, folder,
streams, signal handlers, processors and interpreter state; it shares the loaded modules and the seed of Python's hashes
with the other runs. `ps` shows the server's command line for it. If this package's code has changed meanwhile, a run
starts normally. Linux only, and not where there is a GPU, whose driver a fork must not inherit.
"""

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from rlreason.runtime import signals
from rlreason.runtime.machine import FORKS_VARIABLE

SERVER = "rlreason.sweeps.fork_server"
#: Modules that every run needs.
PRELOADED = (
    "rlreason.cli.command", "rlreason.training.trainer", "rlreason.training.jobs", "rlreason.training.preflight",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
)  # fmt: skip
READY = -1  # sent by the server when it has loaded them
ANSWER_S = 30.0  # for a fork to send its process id
WAIT_S = 0.01  # between two polls of a process
THREADS = "OMP_NUM_THREADS"  # libraries read it as they are loaded
GPUS = ("/proc/driver/nvidia", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")


class Process(Protocol):
    """The process of a run: a part of `subprocess.Popen`."""

    pid: int
    returncode: Any  # None while it runs; below 0: by a signal

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its exit code; `TimeoutExpired` after `timeout` seconds."""

    def send_signal(self, sig: int) -> None:
        """Send it a signal, unless it has ended."""

    def terminate(self) -> None:
        """Send SIGTERM."""

    def kill(self) -> None:
        """Send SIGKILL."""


class Forked:
    """A child of this process that `subprocess` did not start."""

    def __init__(self, pid: int) -> None:
        self.pid, self.returncode = pid, None

    returncode: int | None

    def poll(self) -> int | None:
        """See `Process`."""
        if self.returncode is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # it was already waited for
                self.returncode = 1
            else:
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `Process`."""
        end = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if end is not None and time.monotonic() > end:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(WAIT_S)
        return code

    def send_signal(self, sig: int) -> None:
        """See `Process`."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, sig)

    def terminate(self) -> None:
        """See `Process`."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """See `Process`."""
        self.send_signal(signal.SIGKILL)


def can_fork() -> bool:
    """Return whether runs can be forked here, without loading what would open a GPU."""
    return (
        sys.platform == "linux"
        and os.environ.get(FORKS_VARIABLE) != "0"
        and threading.current_thread() is threading.main_thread()
        and not any(map(os.path.exists, GPUS))
    )


class Forks:
    """A server process from which runs are forked. `threads`: their OMP_NUM_THREADS; None: not set.

    `modules`: loaded first. Must be closed at the end; runs in progress are not affected by that.
    """

    def __init__(self, threads: str | None, modules: Sequence[str] = PRELOADED) -> None:
        self.threads = threads
        env = {name: value for name, value in os.environ.items() if name != THREADS}
        env |= {} if threads is None else {THREADS: threads}
        self._socket, others = socket.socketpair()
        argv = [sys.executable, "-m", SERVER, str(others.fileno()), *modules]
        with others:
            quiet = subprocess.DEVNULL  # else messages of loading libraries would go into the log of a run
            self._server = subprocess.Popen(argv, env=env, pass_fds=[others.fileno()], stdout=quiet, stderr=quiet)
        self._usable: bool | None = None  # None: it is still loading
        self._code = _code()

    def ready(self) -> bool:
        """Wait until the server has loaded its modules; return False if it failed or ended."""
        if self._usable is None:
            self._usable = self._receive(None) == READY
        return self._usable

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        out: IO[bytes] | None,
        processors: Sequence[int] | None,
    ) -> Forked | None:
        """Fork `python -m rlreason WORDS` as a child of this process; return None if that is not possible.

        `out`: where it prints; None: where this process does. `processors`: those it may use; None: all.
        """
        if not self._usable or env.get(THREADS) != self.threads or _code() != self._code:
            return None
        given = {"words": list(words), "env": dict(env), "folder": str(Path.cwd()), "parent": os.getpid()}
        message = json.dumps(given | {"processors": None if processors is None else list(processors)}).encode()
        streams = [1, 2] if out is None else [out.fileno()] * 2
        try:
            with signals.adopting():
                socket.send_fds(self._socket, [struct.pack("q", len(message))], streams)
                self._socket.sendall(message)
                pid = self._receive(ANSWER_S)
        except OSError:
            pid = 0
        if pid <= 0:  # a fork that answers too late finds the socket closed, and ends
            self._usable = False
            self._socket.close()
        return Forked(pid) if pid > 0 else None

    def _receive(self, seconds: float | None) -> int:
        """Return the server's next number; 0 if none arrives within `seconds`."""
        self._socket.settimeout(seconds)
        with suppress(OSError):
            word = self._socket.recv(8, socket.MSG_WAITALL)
            return int(struct.unpack("q", word)[0]) if len(word) == 8 else 0
        return 0

    def close(self) -> None:
        """End the server."""
        self._socket.close()
        self._server.kill()
        self._server.wait()


def _code() -> dict[str, tuple[int, int]]:
    """Return the state of this package's files: a run uses the code as it is at its start, and records which it was."""
    found = {}
    for path in Path(__file__).parents[1].rglob("*.py"):
        with suppress(OSError):
            state = path.stat()
            found[str(path)] = state.st_mtime_ns, state.st_size
    return found
