"""One worker process from the pool's side: how it starts, its two pipes, and how it ends."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from rlreason.grading.workers.framing import LENGTH, framed, pack

START_TIMEOUT_S = 60.0  # importing the plug-in or the symbolic library, on a busy machine
ENDING_S = 5.0  # for a process that was killed, or closed its pipe; it may wait in the kernel for a disk


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
        """`sent`: the plug-in itself as cloudpickle wrote it, where the process cannot import it."""
        package_root = str(Path(__file__).resolve().parents[3])
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
            [sys.executable, "-P", "-m", "rlreason.grading.workers.worker", json.dumps(options)],
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
        """Give it request number `task`; a reply is due within `timeout_s` seconds."""
        self.task, self.unsent = task, pack(request)
        self.deadline = time.monotonic() + timeout_s
        self.flush()

    def flush(self) -> None:
        """Write what the pipe takes now; a dead reader shows as an end of file on the other pipe."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self.unsent:
                self.unsent = self.unsent[os.write(self.requests, self.unsent) :]

    def receive(self) -> dict[str, Any] | None:
        """The next whole message, or None while it is incomplete; EOFError when the process is gone."""
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
        """Its exit code, waited for at most so long; None where it lives on."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(limit_s)
        return None

    def release(self) -> None:
        """Close this process's ends of the pipes; used alone on workers inherited by a fork."""
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
