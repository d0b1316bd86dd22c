"""vLLM's process, as the trainer sees it: start it, ask it within a time limit, send weights to it, end it."""

import logging
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch._inductor.runtime.cache_dir_utils import cache_dir

from rlreason.engines.vllm_server import FILES
from rlreason.errors import EngineError
from rlreason.model.policy import Policy
from rlreason.runtime.files import alive
from rlreason.runtime.machine import VISIBLE
from rlreason.runtime.signals import temporary_folder
from rlreason.runtime.text import redacted

LOOK_S = 0.5
ENDING_S = 10.0  # for a killed process to end
#: The variables by which torchrun tells a process its rank. vLLM would take the trainer's rank for its own (the GPU of
#: LOCAL_RANK), or wait for a port that torchrun has.
OF_RANKS = re.compile("MASTER_(ADDR|PORT)|TORCHELASTIC_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME")


@dataclass(frozen=True, slots=True)
class Place:
    """Where an engine runs. `gpu`: its number among the GPUs visible here; None: the processor."""

    name: str  # for messages
    gpu: int | None = None
    sleeps: bool = False  # it frees its memory while the policy trains on its GPU
    transfer: str | None = None  # ipc or nccl, vLLM's own ways by which weights get there; None: a file


def environment(variables: Mapping[str, str], place: Place, files: str, threads: int, exact: bool) -> dict[str, str]:
    """Return the environment of vLLM's process, made of this one's `variables`.

    `files`: the folder for its temporary files. `exact`: the model computes in float32. Attention on a GPU is then a
    Triton kernel, which would round its factors to TF32: by up to 2e-2 nats of a token's log-probability, emulated for
    16 layers.
    """
    kept = {k: v for k, v in variables.items() if not OF_RANKS.fullmatch(k)}
    kept.setdefault("VLLM_NO_USAGE_STATS", "1")
    if exact:
        kept.setdefault("TRITON_F32_DEFAULT", "ieee")
    if place.gpu is not None:
        visible = variables.get(VISIBLE)
        kept[VISIBLE] = visible.split(",")[place.gpu].strip() if visible else str(place.gpu)
    return kept | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine is in the process that we start, and in no further one
        "VLLM_CONFIGURE_LOGGING": "1",
        "OMP_NUM_THREADS": str(threads),  # without it vLLM turns torch down to one thread
        "TMPDIR": files,
        "TORCHINDUCTOR_CACHE_DIR": cache_dir(),  # compiled code outlives a run
    }


class EngineProcess:
    """One vLLM in a process of its own. After the first failure it counts as dead, and every later call says why."""

    def __init__(self, place: Place, log: Path, timeout_s: float, exact: bool) -> None:
        self.place, self.log, self.timeout_s = place, log, timeout_s
        self.failure: str | None = None
        self._transfer: DirectTransfer | None = None
        self._stack = ExitStack()
        self.files = self._stack.enter_context(temporary_folder(FILES))
        self.connection, theirs = multiprocessing.Pipe()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rlreason.engines.vllm_server", str(theirs.fileno()), str(os.getpid())],
                env=environment(os.environ, place, self.files, torch.get_num_threads(), exact),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer
            )
        theirs.close()
        self.heard = time.monotonic()

    def send(self, method: str, *arguments: Any) -> None:
        """Ask for a call of this method of `Server`."""
        if self.failure is not None:
            raise EngineError(f"vLLM on {self.place.name} is dead since: {self.failure}")
        try:
            self.connection.send((method, arguments))
        except OSError as error:
            raise self._ended() from error
        self.heard = time.monotonic()

    def message(self) -> tuple[Any, ...]:
        """Wait for its next message: ("done", result), or ("step", ...) while it samples."""
        spoken([self])
        try:
            message: tuple[Any, ...] = self.connection.recv()
        except (EOFError, OSError) as error:
            raise self._ended() from error
        self.heard = time.monotonic()
        if message[0] == "failed":
            raise self.failed(message[1])
        return message

    def _ended(self) -> EngineError:
        return self.failed(f"vLLM's process has ended (exit code {self.process.wait(ENDING_S)})")

    def failed(self, reason: str) -> EngineError:
        """Record the failure and return the error to raise, with the end of the log."""
        self.failure = self.failure or reason
        return EngineError(f"vLLM on {self.place.name} failed: {self.failure}{last_lines(self.log)}")

    def load(self, policy: Policy) -> None:
        """Send the policy's weights by vLLM's own weight transfer: to another GPU, or on the policy's.

        NCCL waits for a process that has gone until the run's watchdog ends the run (`waits.run_s`).
        """
        try:
            self._transfer = self._transfer or DirectTransfer(self, policy)
            self._transfer.policy = policy
            self._transfer.sender.send_weights()
        except Exception as error:
            refused = "pidfd" in str(error)  # in some containers, and by some kernels to who is not root
            cure = ": set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" * refused
            raise self.failed(f"{type(error).__name__}: {error}{cure}") from error

    def close(self) -> None:
        """Kill the process, which ends a call that waits for it in another thread, and remove its files."""
        self.failure = self.failure or "it was closed"
        self.process.kill()
        self.process.wait(ENDING_S)
        self._stack.close()
        hide_secrets(self.log)


def spoken(processes: Sequence[EngineProcess]) -> list[EngineProcess]:
    """Wait until one of these has sent something or has ended; return those that have.

    `EngineError` where none does, and one has been silent for its `timeout_s` seconds.
    """
    while not (ready := wait([process.connection for process in processes], LOOK_S)):
        for process in processes:
            if time.monotonic() - process.heard > process.timeout_s:
                limit = f"rollout.timeout_s={process.timeout_s:g}"
                raise process.failed(f"no answer within {limit}: it hangs, or needs more")
    alive()
    return [process for process in processes if process.connection in ready]


def last_lines(log: Path) -> str:
    """Return the end of vLLM's log for an error message; secrets are hidden."""
    lines = redacted(log.read_text(encoding="utf-8", errors="replace")).splitlines()[-5:]
    return "".join(f"\n  {line[:300]}" for line in [f"last lines of {log}:", *lines])


def hide_secrets(log: Path) -> None:
    """Rewrite the log without secrets, once vLLM's process, which writes into it, has ended."""
    log.write_text(redacted(log.read_text(encoding="utf-8", errors="replace")), encoding="utf-8")


# How weights travel.

MEMORY = Path("/dev/shm")  # a file system in main memory; a container's often holds 64 MB


def load_by_file(processes: Sequence[EngineProcess], policy: Policy) -> None:
    """Give these processes the policy's weights by one file, in main memory if it has room there."""
    weights = {name: weight.cpu().contiguous() for name, weight in policy.engine_weights()}
    size = sum(weight.nbytes for weight in weights.values())
    has_room = MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 1.01 * size + 2**20
    with temporary_folder("rlreason-weights-", MEMORY if has_room else None) as folder:
        path = str(Path(folder) / "weights.safetensors")
        save_file(weights, path)
        call_all(processes, "load_file", path)


def call_all(processes: Sequence[EngineProcess], method: str, *arguments: Any) -> list[Any]:
    """Call this method of `Server` in all processes at once; return the results."""
    for process in processes:
        process.send(method, *arguments)
    return [process.message()[1] for process in processes]


BUFFER = 256 << 20  # bytes of weights that are shared between two processes at a time, or of the largest weight
#: What the sending side of vLLM's weight transfer has its workers do.
ORDERS = ("init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update")


class DirectTransfer:
    """The sending side of vLLM's own weight transfer to one process: NCCL to another GPU, CUDA IPC on the same one.

    It is vLLM's `WeightSource`, by `metadata` and iteration.
    """

    def __init__(self, process: EngineProcess, policy: Policy) -> None:
        os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # of this process, which only imports it
        logging.getLogger("vllm").propagate = False
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        self.process, self.policy = process, policy
        if process.place.transfer == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            largest = max(weight.nbytes for _, weight in policy.engine_weights())
            info: Any = IPCTrainerInitInfo(rank=0, packed=True, packed_buffer_size_bytes=max(BUFFER, largest))
        else:  # the trainer is rank 0 of two and opens a port on this machine
            from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            info = NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=port, world_size=2, rank=0)
        source: Any = self
        client: Any = SimpleNamespace(**{method: partial(self._tell, method) for method in ORDERS})
        self.sender = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)

    def metadata(self) -> list[Any]:
        """Return name, number format and shape of every weight, in the order of a pass."""
        from vllm.distributed.weight_transfer import ParamMeta

        dtype = self.policy.compute_dtype
        return [ParamMeta(name, dtype, tuple(weight.shape)) for name, weight in self.policy.engine_weights()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, weight.to(self.policy.device)) for name, weight in self.policy.engine_weights())

    def _tell(self, method: str, *arguments: Any) -> None:
        call_all([self.process], "ask", "collective_rpc", method, None, arguments)
