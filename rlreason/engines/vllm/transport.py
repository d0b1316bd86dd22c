"""Both sides of vLLM's own weight transfer: what the trainer sends, and what runs in vLLM's worker.

Imports vLLM, so it is imported only when an engine in a process of its own starts.
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

from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.distributed.weight_transfer import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from rlreason.engines.vllm.start import FILES, TRAINER, repack_tied_head, row_digests
from rlreason.model.policy import Policy
from rlreason.runtime.signals import temporary_folder

ENDING_S = 5.0


class WorkerExtension:
    """Methods that vLLM adds to its worker."""

    def row_digests(self) -> tuple[dict[str, bytes], dict[str, list[str]]]:
        """Return row digests of every weight in the model's number format, and which layers are stacked of which."""
        worker: Any = self
        model = worker.get_model()
        kept = {n: p for n, p in model.named_parameters() if p.dtype == worker.model_config.dtype and p.numel()}
        fused = getattr(model, "packed_modules_mapping", {})
        return {name: row_digests(p).cpu().numpy().tobytes() for name, p in kept.items()}, dict(fused)


def end_with(trainer: int) -> None:
    """End the engine when the trainer's process is gone, however it ended, since vLLM does not watch it.

    This runs in vLLM's worker: a child of the engine's process, or the engine's process itself.
    """
    engine, files = os.getpid() if os.getppid() == trainer else os.getppid(), tempfile.gettempdir()

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(trainer)], [], [])
        if Path(files).name.startswith(FILES):
            shutil.rmtree(files, ignore_errors=True)
        for number in (signal.SIGTERM, signal.SIGKILL):  # on the first it frees its shared memory
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, number)
            time.sleep(ENDING_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if TRAINER in os.environ and os.environ[TRAINER] != str(os.getpid()):
    end_with(int(os.environ[TRAINER]))


class PolicyWeights(WeightSource):
    """The policy's current weights at each pass, in the engine's number format and on the policy's device.

    Where several ranks train parts of a model, its whole weights are in main memory.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def metadata(self) -> list[ParamMeta]:
        """Return name, number format and shape of every weight, in the order of a pass."""
        return [ParamMeta(name, weight.dtype, tuple(weight.shape)) for name, weight in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        dtype, device = self.policy.compute_dtype, self.policy.device
        return ((name, weight.detach().to(dtype).to(device)) for name, weight in self.policy.engine_weights())


class WeightClient:
    """vLLM's `VLLMWeightSyncClient` over a `vllm.LLM`: each call runs in every worker."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Create the receiving side in the workers."""
        self.llm.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": init_info})

    def start_weight_update(self) -> None:
        """Announce the first weight."""
        self.llm.collective_rpc("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Receive weights as described by `update_info`, the transport's own record."""
        self.llm.collective_rpc("update_weights", kwargs={"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Announce the end. vLLM's own version counter is not used: responses carry the engine's."""
        self.llm.collective_rpc("finish_weight_update")


BACKEND = "host_memory"
WEIGHT_FILES = "rlreason-weights-"
MEMORY = Path("/dev/shm")  # a file system in main memory; a container's often holds 64 MB


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
        with temporary_folder(WEIGHT_FILES, place_for(sum(weight.nbytes for weight in weights.values()))) as folder:
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
