"""Run vLLM in a process of its own and send weights by vLLM's own weight transfer, through NCCL or main memory."""

import importlib
import multiprocessing
import os
import socket
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlreason.engines.vllm.transfer import TRAINER, WeightTransfer, WorkerExtension, row_digests
from rlreason.engines.weight_check import differing_tensors
from rlreason.model.policy import Policy


class ProcessTransfer(WeightTransfer):
    """Weight transfer to a vLLM in another process. Subclasses name the transport: vLLM's own, or a registered one.

    `gpu`: the number of its GPU among those that are visible here; None: the processor. `shared`: a rank of the trainer
    runs there too.
    """

    oldest_vllm = (0, 28)  # the first with the sending side of its weight transfer
    backend: str  # the transport's name in both of vLLM's factories
    #: A class of methods for vLLM's worker; importing its module, on both sides, registers the transport.
    worker_extension = f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}"

    def __init__(self, gpu: int | None = None, shared: bool = False) -> None:
        self.gpu, self.shared = gpu, shared
        self._before: frozenset[int | None] | None = None  # other engines' processes when this start began
        self.processes: list[BaseProcess] = []  # vLLM's own
        self._closed = False

    @abstractmethod
    def init_info(self) -> Any:
        """Return the sending side's arguments, a `TrainerInitInfo` of vLLM."""

    def device(self, policy: Policy) -> torch.device:
        return torch.device("cpu") if self.gpu is None else torch.device("cuda", self.gpu)

    def shares_gpu(self, policy: Policy) -> bool:
        return self.shared

    def environment(self) -> dict[str, str]:
        """Return environment variables of vLLM's process, which sees only its own GPU."""
        own = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            TRAINER: str(os.getpid()),
        }
        if self.gpu is not None:
            own["CUDA_VISIBLE_DEVICES"] = visible_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"), self.gpu)
        return own

    def start(self, policy: Policy, folder: str, arguments: dict[str, Any]) -> Any:
        import vllm
        import vllm.envs
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from rlreason.engines.vllm.transport import PolicyWeights, WeightClient

        importlib.import_module(self.worker_extension.rpartition(".")[0])
        self._before = frozenset(process.pid for process in engine_processes())
        # vLLM caches the environment when an engine starts in this process.
        getattr(vllm.envs, "disable_envs_cache", lambda: None)()
        llm = vllm.LLM(
            folder,
            weight_transfer_config=WeightTransferConfig(backend=self.backend),
            worker_extension_cls=self.worker_extension,
            **arguments,
        )
        if not self.spawned():
            raise RuntimeError("vLLM started no process of its own")
        self._weights = PolicyWeights(policy)
        self._sender = WeightTransferTrainerFactory.trainer_init(
            self.init_info(), client=WeightClient(llm), source=self._weights
        )
        return llm

    def spawned(self) -> bool:
        """Find this engine's processes: while `STARTING` is held, every new one is its own."""
        if not self.processes and self._before is not None:
            self.processes = [p for p in engine_processes() if p.pid not in self._before]
        return bool(self.processes)

    def settled(self) -> None:
        self.spawned()
        self._before = None  # later processes belong to other engines

    def send_weights(self, llm: Any, policy: Policy) -> None:
        self._weights.policy = policy
        self._sender.send_weights()

    def differing_tensors(self, llm: Any, policy: Policy) -> tuple[int, tuple[str, ...]]:
        """Compare the tensors by digests of their rows, so that no weights are sent."""
        digests, fused = llm.collective_rpc("row_digests")[0]
        theirs = {name: torch.from_numpy(np.frombuffer(rows, np.int64).copy()) for name, rows in digests.items()}
        model: Any = SimpleNamespace(named_parameters=theirs.items)
        self._weights.policy = policy
        ours = ((name, row_digests(weight)) for name, weight in self._weights)
        return differing_tensors(model, ours, fused)

    def check_alive(self) -> None:
        for process in () if self._closed else self.processes:
            if not process.is_alive():
                raise RuntimeError(f"vLLM's process has ended (exit code {process.exitcode})")

    def shut_down(self, llm: Any) -> None:
        llm.llm_engine.engine_core.shutdown()

    def close(self, failed: bool, shut_down: Callable[[], None]) -> None:
        """Shut vLLM down and kill its process; one that died or hangs is killed without the shutdown."""
        self._closed = True  # from now on it may end
        self.spawned()
        if not failed:
            shut_down()
        for process in self.processes:
            process.kill()
            process.join(10)


class NCCLTransfer(ProcessTransfer):
    """Transfer to another GPU of this machine; NCCL does not connect two processes on one GPU."""

    backend = "nccl"

    def __init__(self, gpu: int = 1, shared: bool = False) -> None:
        super().__init__(gpu, shared)

    def init_info(self) -> Any:
        """Return NCCL's arguments: the trainer is rank 0 of two and opens a port on this machine."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=free_port(), world_size=2, rank=0)


class HostTransfer(ProcessTransfer):
    """Transfer through a file in main memory to any device, the policy's own GPU and the processor included."""

    backend = "host_memory"
    worker_extension = "rlreason.engines.vllm.transport.HostWorker"

    def init_info(self) -> Any:
        from rlreason.engines.vllm.transport import HostInit

        return HostInit(rank=0)


def engine_processes() -> list[BaseProcess]:
    """Return vLLM's child processes of this one, by name, since vLLM has no list of them."""
    return [process for process in multiprocessing.active_children() if process.name.startswith("EngineCore")]


_ports: list[int] = []  # already given to an engine


def free_port() -> int:
    """Return a free port of this machine, a different one for each engine, since several start at once.

    >>> free_port() != free_port()
    True
    """
    with ExitStack() as probes:
        while True:
            probe = probes.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            if (port := int(probe.getsockname()[1])) not in _ports:
                _ports.append(port)
                return port


def visible_gpu(visible: str | None, number: int) -> str:
    """Return CUDA_VISIBLE_DEVICES for a process with this one of the GPUs that are `visible` here.

    >>> visible_gpu(None, 1), visible_gpu("2, 5", 1), visible_gpu("GPU-8f2a,GPU-5e1c,MIG-3b", 2)
    ('1', '5', 'MIG-3b')
    """
    return visible.split(",")[number].strip() if visible else str(number)
