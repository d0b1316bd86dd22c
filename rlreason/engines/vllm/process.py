"""vLLM in a process and on a GPU of its own: only where it is made, how it gets weights and how it ends differ.

Weights go through vLLM's own weight transfer (vllm_host.py). It must not know rewards, answers or steps.
"""

import contextlib
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import torch

from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.single_thread import SingleThread
from rlreason.engines.weight_check import differing_tensors

T = TypeVar("T")


class VLLMProcess(VLLMEngine):
    """`transport` is how weights travel: "nccl" from the policy's GPU to the second one, "host" without GPUs."""

    oldest = (0, 28)  # the first with the sending side of its weight transfer

    def __init__(self, *arguments: Any, transport: str = "nccl", **settings: Any) -> None:
        self.transport = transport
        self._processes: list[BaseProcess] = []
        super().__init__(*arguments, **settings)

    def _start(self, kv_cache_gb: float | None) -> None:
        self._owner.stop()
        self._owner = WatchingThread("vllm", self._processes)
        super()._start(kv_cache_gb)

    def _place(self) -> torch.device:
        return torch.device("cuda", 1) if self.transport == "nccl" else torch.device("cpu")

    def _make(self, folder: str, settings: dict[str, Any]) -> Any:
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

        from rlreason.engines.vllm.weight_transfer import TRAINER, Client, HostInit, Source

        settings |= {
            "weight_transfer_config": WeightTransferConfig(backend=self.transport),
            "worker_extension_cls": "rlreason.engines.vllm.weight_transfer.WorkerExtension",
        }
        own, before = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, dict(os.environ)
        own[TRAINER] = str(os.getpid())
        if self.transport == "nccl":
            own["CUDA_VISIBLE_DEVICES"] = second_gpu(before.get("CUDA_VISIBLE_DEVICES"))
        os.environ |= own  # what a process that starts now will see
        try:
            llm = super()._make(folder, settings)
        finally:
            for key in own:
                del os.environ[key]
            os.environ |= {key: before[key] for key in own if key in before}
        self._processes += engine_processes()
        self._sender = WeightTransferTrainerFactory.trainer_init(
            nccl_init() if self.transport == "nccl" else HostInit(rank=0), client=Client(llm), source=Source(self)
        )
        return llm

    def _send(self) -> None:
        if self.transport == "nccl":
            torch.cuda.synchronize()  # it copies on streams of its own, which do not wait for the optimizer's
        self._sender.send_weights()

    def _differing(self) -> tuple[int, tuple[str, ...]]:
        """Rows are compared by their digests, so that no weights travel."""
        from rlreason.engines.vllm.weight_transfer import Source, row_digests

        digests, fused = self.llm.collective_rpc("row_digests")[0]
        theirs = {name: torch.from_numpy(np.frombuffer(rows, np.int64).copy()) for name, rows in digests.items()}
        model: Any = SimpleNamespace(named_parameters=theirs.items)
        return differing_tensors(model, ((name, row_digests(weight)) for name, weight in Source(self)), fused)

    def close(self) -> None:
        """A process that died or hangs is killed at once, and one in good order is asked first."""
        self._processes.clear()  # from here on they may end
        if self._failure is not None:
            kill(engine_processes())
            self.__dict__.pop("llm", None)  # nobody is left to be asked
        super().close()
        kill(engine_processes())


class WatchingThread(SingleThread):
    """Whoever waits is told at once when one of `processes` has ended: its answer would never come."""

    def __init__(self, name: str, processes: list[BaseProcess]) -> None:
        super().__init__(name)
        self._processes = processes

    def call(self, function: Callable[[], T], timeout_s: float) -> T:
        future: Future[T] = Future()
        self._calls.put((future, function))
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(min(0.5, max(deadline - time.monotonic(), 0.0)))
            if future.done():
                return future.result()
            for process in self._processes:
                if not process.is_alive():
                    raise RuntimeError(f"vLLM's process has ended (exit code {process.exitcode})")
            if time.monotonic() >= deadline:
                raise TimeoutError


def engine_processes() -> list[BaseProcess]:
    """vLLM's processes below this one; it does not hand them out, but it names them."""
    return [process for process in multiprocessing.active_children() if process.name.startswith("EngineCore")]


def kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join(10)


def second_gpu(visible: str | None) -> str:
    """What CUDA_VISIBLE_DEVICES must be for the second of the GPUs that are visible here.

    >>> second_gpu(None), second_gpu("2,5")
    ('1', '5')
    """
    return visible.split(",")[1].strip() if visible else "1"


def nccl_init() -> Any:
    """The trainer is rank 0 of two, and opens a port on this machine for the other."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return NCCLTrainerInitInfo(master_address="127.0.0.1", master_port=port, world_size=2, rank=0)
