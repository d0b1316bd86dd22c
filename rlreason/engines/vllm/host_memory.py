"""Send weights through a file in main memory, by vLLM's own weight transfer: both sides of `process.HostTransfer`.

Imports vLLM: in the trainer's process when such an engine starts, and in vLLM's by the name of `HostWorker`.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer import (
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlreason.engines.vllm.weight_transfer import repack_tied_head
from rlreason.engines.vllm.worker import WorkerExtension
from rlreason.runtime.signals import temporary_folder

BACKEND = "host_memory"
FILES = "rlreason-weights-"
MEMORY = Path("/dev/shm")  # a file system in main memory; a container's often holds 64 MB


class HostWorker(WorkerExtension):
    """Named to vLLM, so that its process imports this module, the receiving side."""


@dataclass
class HostInit(TrainerInitInfo):
    """The sending side's arguments: its rank only."""

    backend: ClassVar[str] = BACKEND


class HostSender(TrainerWeightTransferEngine[HostInit]):
    """Writes all weights into one file and names it to the worker."""

    init_info_cls = HostInit

    @classmethod
    def trainer_init(cls, init_info: HostInit, *, client: Any, source: WeightSource | None = None) -> Self:
        """Return the sender; no connection is needed."""
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        """Write the weights to a file, have the worker read it, and remove it."""
        weights = {name: weight.contiguous().cpu() for name, weight in self.source or ()}
        with temporary_folder(FILES, place_for(sum(weight.nbytes for weight in weights.values()))) as folder:
            path = str(Path(folder) / "weights.safetensors")
            save_file(weights, path)
            self.client.start_weight_update()
            self.client.update_weights({"path": path})
            self.client.finish_weight_update()


def place_for(size: int, memory: Path = MEMORY) -> Path | None:
    """Return the file system in main memory if it has room for so many bytes; else None: the temporary folder."""
    return memory if memory.is_dir() and shutil.disk_usage(memory).free > 1.01 * size + 2**20 else None


@dataclass
class HostUpdate(WeightTransferUpdateInfo):
    """The path of the file with the weights."""

    path: str


class HostReceiver(WeightTransferEngine[WeightTransferInitInfo, HostUpdate]):
    """Loads the file into the worker's model, layer by layer, as vLLM's NCCL receiver does with what it is sent."""

    init_info_cls, update_info_cls = WeightTransferInitInfo, HostUpdate

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Do nothing: no connection is needed."""

    def start_weight_update(self) -> None:
        """Prepare for the first weight."""
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Parse the update and receive it; called by vLLM's worker."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: HostUpdate) -> None:
        """Load the file."""
        model: Any = self.model
        model.load_weights(load_file(update_info.path, str(self.device)).items())

    def finish_weight_update(self) -> None:
        """Finish after the last weight."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model)

    def shutdown(self) -> None:
        """Do nothing: there is nothing to close."""


WeightTransferEngineFactory.register_engine(BACKEND, HostReceiver)
WeightTransferTrainerFactory.register_engine(BACKEND, HostSender)
