"""vLLM in a process of its own, which gets weights through vLLM's own weight transfer; with NCCL, on a second GPU."""

import multiprocessing
import os
import socket
from abc import abstractmethod
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from rlreason.engines.vllm.isolation import environment
from rlreason.engines.vllm.weight_transfer import WeightTransfer
from rlreason.engines.vllm.worker import TRAINER, WorkerExtension, row_digests
from rlreason.engines.weight_check import differing_tensors
from rlreason.model.policy import Policy


class ProcessTransfer(WeightTransfer):
    """A vLLM in another process. Subclasses name the transport: one of vLLM's, or one that they register with it."""

    oldest_vllm = (0, 28)  # the first with the sending side of its weight transfer
    backend: str  # the transport's name in both of vLLM's factories
    worker_extension: type[WorkerExtension] = WorkerExtension  # its module is imported in vLLM's process

    def __init__(self) -> None:
        self._watched: list[BaseProcess] = []

    @abstractmethod
    def init_info(self) -> Any:
        """The sending side's arguments, a `TrainerInitInfo` of vLLM."""

    def environment(self) -> dict[str, str]:
        """Environment variables of vLLM's process."""
        return {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            TRAINER: str(os.getpid()),
        }

    def start(self, policy: Policy, folder: str, arguments: dict[str, Any]) -> Any:
        import vllm
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from rlreason.engines.vllm.sender import Client, PolicyWeights

        extension = self.worker_extension
        with environment(self.environment()):
            llm = vllm.LLM(
                folder,
                weight_transfer_config=WeightTransferConfig(backend=self.backend),
                worker_extension_cls=f"{extension.__module__}.{extension.__qualname__}",
                **arguments,
            )
        self._watched += engine_processes()
        self._weights = PolicyWeights(policy)
        self._sender = WeightTransferTrainerFactory.trainer_init(
            self.init_info(), client=Client(llm), source=self._weights
        )
        return llm

    def send_weights(self, llm: Any, policy: Policy) -> None:
        self._weights.policy = policy
        self._sender.send_weights()

    def differing_tensors(self, llm: Any, policy: Policy) -> tuple[int, tuple[str, ...]]:
        """Rows are compared by their digests, so that no weights travel."""
        digests, fused = llm.collective_rpc("row_digests")[0]
        theirs = {name: torch.from_numpy(np.frombuffer(rows, np.int64).copy()) for name, rows in digests.items()}
        model: Any = SimpleNamespace(named_parameters=theirs.items)
        dtype = policy.compute_dtype
        ours = ((name, row_digests(weight.detach().to(dtype))) for name, weight in policy.named_weights())
        return differing_tensors(model, ours, fused)

    def check_alive(self) -> None:
        for process in self._watched:
            if not process.is_alive():
                raise RuntimeError(f"vLLM's process has ended (exit code {process.exitcode})")

    def close(self, failed: bool, shut_down: Callable[[], None]) -> None:
        """A process that died or hangs is killed at once, and one in good order is asked first."""
        self._watched.clear()  # from here on they may end
        if not failed:
            shut_down()
        for process in engine_processes():
            process.kill()
            process.join(10)


class NCCLTransfer(ProcessTransfer):
    """From the policy's GPU to a second one on this machine, where vLLM runs."""

    backend = "nccl"

    def device(self, policy: Policy) -> torch.device:
        return torch.device("cuda", 1)

    def environment(self) -> dict[str, str]:
        """As for every process, and the second of the GPUs that are visible here as its only one."""
        return super().environment() | {"CUDA_VISIBLE_DEVICES": second_gpu(os.environ.get("CUDA_VISIBLE_DEVICES"))}

    def init_info(self) -> Any:
        """The trainer is rank 0 of two, and opens a port on this machine for the other."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        return NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=port, world_size=2, rank=0)

    def send_weights(self, llm: Any, policy: Policy) -> None:
        torch.cuda.synchronize()  # NCCL copies on streams of its own, which do not wait for the optimizer's
        super().send_weights(llm, policy)


def engine_processes() -> list[BaseProcess]:
    """vLLM's processes below this one; it does not hand them out, but it names them."""
    return [process for process in multiprocessing.active_children() if process.name.startswith("EngineCore")]


def second_gpu(visible: str | None) -> str:
    """What CUDA_VISIBLE_DEVICES must be for the second of the GPUs that are visible here.

    >>> second_gpu(None), second_gpu("2,5")
    ('1', '5')
    """
    return visible.split(",")[1].strip() if visible else "1"
