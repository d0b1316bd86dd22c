"""A weight transport without GPUs: `NCCLTransfer` with a file on a memory disk as the wire, for tests and benchmarks.

vLLM's process imports this module by the name of `HostWorker`, and so knows the receiving side.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlreason.engines.vllm.process import ProcessTransfer
from rlreason.engines.vllm.weight_transfer import repack_tied_head
from rlreason.engines.vllm.worker import WorkerExtension
from rlreason.runtime.signals import temporary_folder

MEMORY_DISK = Path("/dev/shm")


class HostWorker(WorkerExtension):
    """Named so that the module of the receiving side is imported in vLLM's process."""


class HostTransfer(ProcessTransfer):
    """vLLM on the processor, in a process of its own."""

    backend = "host"
    worker_extension = HostWorker

    def device(self, policy) -> torch.device:
        return torch.device("cpu")

    def init_info(self) -> "HostInit":
        return HostInit(rank=0)


@dataclass
class HostInit(TrainerInitInfo):
    """The sending side has nothing to say but its rank."""

    backend: ClassVar[str] = "host"


class HostSender(TrainerWeightTransferEngine[HostInit]):
    """Writes all weights into one file and names it to the workers."""

    init_info_cls = HostInit

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
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
    """Where the weights lie."""

    path: str


class HostReceiver(WeightTransferEngine[WeightTransferInitInfo, HostUpdate]):
    """Loads the file into the worker's model, layer by layer, as vLLM's NCCL receiver does."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, HostUpdate

    def init_transfer_engine(self, init_info) -> None: ...

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: HostUpdate) -> None:
        self.model.load_weights(load_file(update_info.path).items())

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)

    def shutdown(self) -> None: ...


WeightTransferEngineFactory.register_engine("host", HostReceiver)
WeightTransferTrainerFactory.register_engine("host", HostSender)
