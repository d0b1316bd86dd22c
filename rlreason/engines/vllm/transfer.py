"""Start vLLM in this process or in one of its own, send weights to it, and check after every sync that it has them.

The check has two parts:

1. Tensors: every weight that the engine keeps in the trainer's layout must equal the trainer's bit by bit after
   the cast. This finds a lost or stale tensor however little training changed it.
2. A probe: the engine continues a fixed prompt, and both sides compute the log-probabilities of those tokens. This
   finds what tensors do not show: a stale packed copy, a cache of old keys and values, another temperature.
"""

import contextlib
import importlib
import multiprocessing
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.vllm.start import TRAINER, repack_tied_head, row_digests
from rlreason.model.policy import Policy

PROBE_PROMPT = 160  # tokens: longer than any engine's prefix-cache block (16 to 128), so a stale cache would be used
PROBE_TOKENS = 8
PROBE = Sampling(max_tokens=PROBE_TOKENS)  # temperature 1, a scorer's default


@dataclass(frozen=True, slots=True)
class WeightCheck:
    """The result of one check. `mismatch` and `bound` are in nats per token."""

    mismatch: float  # |log p_engine - log p_trainer|, the largest over the probe's tokens
    bound: float
    compared: int  # tensors that could be compared
    differing: tuple[str, ...]  # names of those that differ from the trainer's

    @property
    def holds(self) -> bool:
        """Whether the engine has the trainer's weights. A mismatch of nan or a check without tensors does not hold."""
        return self.mismatch <= self.bound and self.compared > 0 and not self.differing

    def __str__(self) -> str:
        names = ", ".join(self.differing[:3]) + (" ..." if len(self.differing) > 3 else "")
        return (
            f"the probe's log-probabilities differ by {self.mismatch:.3g} nats (bound {self.bound:g}), "
            f"{len(self.differing)} of {self.compared} compared tensors differ" + (f" ({names})" if names else "")
        )


def mismatch_bound(dtype: torch.dtype) -> float:
    """The largest train-inference mismatch of a token that rounding alone explains, in nats.

    float32: 2e-5 is measured between kernels, 2e-4 at worst, and the bound is 1e-3. bfloat16 keeps 8 bits, so hidden
    states differ by some 2^-8 of themselves and logits of size 20 by tenths. Measured over twelve such probes: at most
    0.12 for a pretrained model, 0.36 for one with large random weights; the bound is 0.5.
    """
    return 1e-3 if dtype == torch.float32 else 0.5


def probe_prompt(vocab: int, context: int) -> Prompt:
    """Return the probe's prompt: the same tokens for every weight sync, spread over the whole vocabulary."""
    length = max(1, min(PROBE_PROMPT, context - PROBE_TOKENS))
    generator = torch.Generator().manual_seed(0)
    return Prompt("probe", torch.randint(vocab, (length,), generator=generator).tolist(), seed=0)


def largest_mismatch(engine: Sequence[float], trainer: Sequence[float]) -> float:
    """Return max |a - b| over the probe's tokens; infinite when a number is missing or not finite.

    >>> largest_mismatch([-1.0, -2.0], [-1.0, -2.5]), largest_mismatch([float("nan")], [0.0]), largest_mismatch([], [])
    (0.5, inf, inf)
    """
    if len(engine) != len(trainer) or not engine:
        return float("inf")
    mismatches = [abs(a - b) for a, b in zip(engine, trainer, strict=True)]
    return max(mismatches) if all(m < float("inf") for m in mismatches) else float("inf")


def differing_tensors(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], fused: Mapping[str, Sequence[str]]
) -> tuple[int, tuple[str, ...]]:
    """Compare the trainer's weights with the engine's: return how many could be compared, and the names that differ.

    `fused` maps the layers that the engine stacks from several of the trainer's along the first axis (qkv_proj of
    q_proj, k_proj, v_proj). Weights in a packed layout are left out: the probe covers them. Rows after the trainer's
    last one are the engine's padding.
    """
    own = dict(model.named_parameters())
    part_of = {part: (whole, parts) for whole, parts in fused.items() for part in parts}
    used: dict[str, int] = {}  # rows of a fused layer compared so far
    compared, differing = 0, []
    for name, weight in weights:
        module, _, kind = name.rpartition(".")
        path, dot, layer = module.rpartition(".")
        whole, parts = part_of.get(layer, (layer, (layer,)))
        key = f"{path}{dot}{whole}.{kind}"
        held, start = own.get(key), used.get(key, 0)
        if held is None or held.shape[1:] != weight.shape[1:] or held.shape[0] < start + len(weight):
            continue
        used[key] = start + len(weight) if len(parts) > 1 else 0
        rows = held.detach()[start : start + len(weight)]
        compared += 1
        if not torch.equal(rows, weight.to(dtype=rows.dtype, device=rows.device)):
            differing.append(name)
    return compared, tuple(differing)


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


class ProcessTransfer(WeightTransfer):
    """Weight transfer to a vLLM in another process. Subclasses name the transport: vLLM's own, or a registered one.

    `gpu`: the number of its GPU among those that are visible here; None: the processor. `shared`: a rank of the trainer
    runs there too.
    """

    oldest_vllm = (0, 28)  # the first with the sending side of its weight transfer
    backend: str  # the transport's name in both of vLLM's factories
    #: A class of methods for vLLM's worker; importing its module, on both sides, registers the transport.
    worker_extension = "rlreason.engines.vllm.transport.WorkerExtension"

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
