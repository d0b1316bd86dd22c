"""Code that runs in vLLM's own process; vLLM's worker there imports this module."""

import contextlib
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlreason.engines.vllm.start import FILES
from rlreason.engines.weight_check import differing_tensors
from rlreason.model.policy import Policy

TRAINER = "RLREASON_TRAINER"  # environment variable: the process id of the trainer, with which the engine ends
ENDING_S = 5.0


def row_digests(weight: Tensor) -> Tensor:
    """Digest each row, (rows, ...) -> (rows,): the sum over a row's indices j of bits_j * odd_j, modulo 2^64.

    An odd factor is invertible modulo 2^64, so one changed number always changes the digest; the factors differ, so
    exchanged numbers do too.

    >>> row_digests(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).unique().numel()
    2
    """
    bits = weight.detach().contiguous().view({2: torch.int16, 4: torch.int32}[weight.dtype.itemsize])
    bits = bits.reshape(len(weight), -1)
    odd = torch.arange(bits.shape[1], device=bits.device) * -7046029254386353131 | 1  # int64 wraps around
    return torch.cat([(part.long() * odd).sum(1) for part in bits.split(1024)])  # a slice at a time: 8 bytes a number


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


class WeightTransfer(ABC):
    """Starts one vLLM engine, sends weights to it, compares them, and ends it.

    `llm` is the engine, a `vllm.LLM`. Every method that takes one is called on vLLM's thread, as is `start`.
    """

    oldest_vllm: tuple[int, int]  # the first version that this transfer works with
    here = False  # whether vLLM computes in this process, and so draws from its random generators

    @abstractmethod
    def device(self, policy: Policy) -> torch.device:
        """Return the device on which vLLM computes."""

    def environment(self) -> dict[str, str]:
        """Return the environment variables for vLLM's start."""
        return {}

    @abstractmethod
    def start(self, policy: Policy, folder: str, arguments: dict[str, Any]) -> Any:
        """Return a `vllm.LLM` for the model in `folder`, ready to receive weights."""

    def spawned(self) -> bool:
        """Whether vLLM's process runs, so that its environment is no longer needed here. Called during `start`."""
        return False

    def settled(self) -> None:  # noqa: B027 - without a process there is nothing to do
        """Called when `STARTING` is released, however the start ends: other engines may start now."""

    @abstractmethod
    def send_weights(self, llm: Any, policy: Policy) -> None:
        """Replace the engine's weights by the policy's."""

    @abstractmethod
    def differing_tensors(self, llm: Any, policy: Policy) -> tuple[int, tuple[str, ...]]:
        """Return how many tensors could be compared, and the names of those that differ from the policy's."""

    def shares_gpu(self, policy: Policy) -> bool:
        """Whether vLLM takes memory from the policy's GPU, so that it should free it while the trainer works."""
        return self.device(policy) == policy.device and policy.device.type == "cuda"

    @abstractmethod
    def check_alive(self) -> None:
        """`RuntimeError` if vLLM's process has ended; called while waiting for a reply."""

    @abstractmethod
    def shut_down(self, llm: Any) -> None:
        """Shut vLLM down cleanly and free its memory."""

    @abstractmethod
    def close(self, failed: bool, shut_down: Callable[[], None]) -> None:
        """End the engine; `shut_down` calls the method of that name. `failed`: the engine has died or hangs."""


class InProcessTransfer(WeightTransfer):
    """vLLM in the trainer's process and on the policy's device; weights are reloaded in place, without a copy."""

    oldest_vllm, here = (0, 26), True

    def __init__(self) -> None:
        self._group_was_there = False

    def device(self, policy: Policy) -> torch.device:
        return policy.device

    def start(self, policy: Policy, folder: str, arguments: dict[str, Any]) -> Any:
        import vllm

        # vLLM creates a process group of one where there is none. To an existing one it adds its own groups, and every
        # rank of it has to start an engine at this point.
        self._group_was_there = dist.is_initialized()
        return vllm.LLM(folder, **arguments)

    def send_weights(self, llm: Any, policy: Policy) -> None:
        llm.collective_rpc("reload_weights", kwargs={"weights_iterator": policy.engine_weights()})
        llm.apply_model(repack_tied_head)

    def differing_tensors(self, llm: Any, policy: Policy) -> tuple[int, tuple[str, ...]]:
        def compare(model: nn.Module) -> tuple[int, tuple[str, ...]]:
            return differing_tensors(model, policy.engine_weights(), getattr(model, "packed_modules_mapping", {}))

        return tuple(llm.apply_model(compare)[0])

    def check_alive(self) -> None:
        """Do nothing: it lives as long as this process."""

    def shut_down(self, llm: Any) -> None:
        from vllm.distributed import parallel_state

        with others_group_kept() if self._group_was_there else contextlib.nullcontext():
            llm.llm_engine.engine_core.shutdown()  # from 0.32, or before, it ends process groups by itself
            parallel_state.cleanup_dist_env_and_memory()

    def close(self, failed: bool, shut_down: Callable[[], None]) -> None:
        shut_down()


@contextlib.contextmanager
def others_group_kept() -> Iterator[None]:
    """Keep torch's process group while vLLM shuts down, so that it ends only the groups that it has added itself."""
    from vllm.distributed import parallel_state

    def own_groups() -> None:
        if parallel_state._WORLD:
            parallel_state._WORLD.destroy()
        parallel_state._WORLD = parallel_state._NODE_COUNT = None

    whole, parallel_state.destroy_distributed_environment = parallel_state.destroy_distributed_environment, own_groups
    try:
        yield
    finally:
        parallel_state.destroy_distributed_environment = whole


def repack_tied_head(model: nn.Module) -> None:
    """Renew the packed copy of a tied output head that vLLM uses on the processor; a reload leaves it stale."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight and not head.weight.is_cuda:
        head.quant_method.process_weights_after_loading(head)
