"""How weights reach a vLLM in another process: what to send, the worker's part, and a transport through memory files.

vLLM's own transport between GPUs is NCCL. `host` is its stand-in for machines without two of them: the same calls, with
a file on a memory disk as the wire. The engine's process imports this module too. It must not know runs or samples.
"""

import contextlib
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlreason.engines.vllm.engine import VLLMEngine, repack_tied_head
from rlreason.engines.vllm.startup import FILES
from rlreason.runtime.signals import temporary_folder

MEMORY_DISK = Path("/dev/shm")
TRAINER = "RLREASON_TRAINER"  # environment: the process with which the engine's is to end
ENDING_S = 5.0


def row_digests(weight: Tensor) -> Tensor:
    """(rows, ...) -> (rows,): sum over a row's places j of bits_j * odd_j, modulo 2^64.

    An odd factor can be divided out modulo 2^64, so a row in which one number changed always gets another digest, and
    the factors differ, so exchanged numbers do too.

    >>> row_digests(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).unique().numel()
    2
    """
    bits = weight.detach().contiguous().view({2: torch.int16, 4: torch.int32}[weight.dtype.itemsize])
    bits = bits.reshape(len(weight), -1)
    odd = torch.arange(bits.shape[1], device=bits.device) * -7046029254386353131 | 1  # int64 wraps around
    return torch.cat([(part.long() * odd).sum(1) for part in bits.split(1024)])  # a slice at a time: 8 bytes a number


def end_with(trainer: int) -> None:
    """See to it that the engine ends when the trainer's process is gone, however that ended: vLLM does not look.

    This is vLLM's worker: a process below the engine's, or the engine's itself.
    """
    engine, files = os.getpid() if os.getppid() == trainer else os.getppid(), tempfile.gettempdir()

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(trainer)], [], [])
        if Path(files).name.startswith(FILES):
            shutil.rmtree(files, ignore_errors=True)
        for number in (signal.SIGTERM, signal.SIGKILL):  # asked first, it gives its shared memory back
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, number)
            time.sleep(ENDING_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if TRAINER in os.environ and os.environ[TRAINER] != str(os.getpid()):
    end_with(int(os.environ[TRAINER]))


class WorkerExtension:
    """vLLM adds these methods to its worker."""

    def row_digests(self) -> tuple[dict[str, bytes], dict[str, list[str]]]:
        """Of every weight that is kept in the model's number format, and which layers are stacked of which."""
        worker: Any = self
        model = worker.get_model()
        kept = {n: p for n, p in model.named_parameters() if p.dtype == worker.model_config.dtype and p.numel()}
        fused = getattr(model, "packed_modules_mapping", {})
        return {name: row_digests(p).cpu().numpy().tobytes() for name, p in kept.items()}, dict(fused)


class Source(WeightSource):
    """The weights of the engine's policy at the time of each pass, in the engine's number format."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.engine = engine

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        dtype = self.engine.policy.compute_dtype
        return ((name, weight.detach().to(dtype)) for name, weight in self.engine.policy.named_weights())


class Client:
    """The calls by which the sending side steers the workers."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self.llm.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.collective_rpc("finish_weight_update")


@dataclass
class HostInit(TrainerInitInfo):
    backend: ClassVar[str] = "host"


class HostSender(TrainerWeightTransferEngine[HostInit]):
    init_info_cls = HostInit

    @classmethod
    def trainer_init(
        cls, init_info: HostInit, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        with temporary_folder("rlreason-weights-", MEMORY_DISK if MEMORY_DISK.is_dir() else None) as folder:
            path = str(Path(folder) / "weights.safetensors")
            save_file({name: weight.contiguous().cpu() for name, weight in self.source or ()}, path)
            self.client.start_weight_update()
            self.client.update_weights({"path": path})
            self.client.finish_weight_update()


@dataclass
class HostUpdate(WeightTransferUpdateInfo):
    path: str


class HostReceiver(WeightTransferEngine[WeightTransferInitInfo, HostUpdate]):
    init_info_cls, update_info_cls = WeightTransferInitInfo, HostUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: HostUpdate) -> None:
        load: Any = self.model.load_weights
        load(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)

    def shutdown(self) -> None: ...


WeightTransferEngineFactory.register_engine("host", HostReceiver)
WeightTransferTrainerFactory.register_engine("host", HostSender)
