"""Training on ranks that each hold a part of every weight, gradient and moment: FSDP2.

Each layer is a group, and the rest (embedding, last norm, head) another; a group's weights are whole on a GPU only
while it computes. Rank 0 also has a whole copy in main memory, from which engines get their weights and models are
saved.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rlreason.config.training import OptimizationConfig
from rlreason.errors import ConfigError
from rlreason.model.checks import not_finite
from rlreason.model.loading import materialize
from rlreason.model.log_probs import use_fast_products
from rlreason.model.packing import PackedBatch
from rlreason.model.policy import Policy
from rlreason.objectives.objective import Objective
from rlreason.training.distributed import Plain, RankedLearner, empty_like, write_parts
from rlreason.training.ranks import Ranks
from rlreason.types import Sample


def mesh_of(ranks: Ranks) -> DeviceMesh:
    """Return the ranks as a device mesh on torch's default group; all ranks call it at once.

    `ConfigError` if this process already uses that group.
    """
    if dist.is_initialized():
        raise ConfigError(
            "parallel=shard needs torch's default process group, and something in this process has made one: set "
            "parallel=replicate, or start the run by the command line"
        )
    backend = "gloo" if ranks.device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store = PrefixStore("default", ranks.store)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.world, timeout=ranks.limit)
    return init_device_mesh(ranks.device.type, (ranks.world,))


class _Root(nn.Module):
    """Module whose forward pass is all that training computes, so that its hooks gather what is in no layer."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.model = policy.model
        self._policy = (policy,)

    def forward(self, batch: PackedBatch, temperature: float, want_entropy: bool) -> tuple[Tensor, Tensor]:
        """See `Policy.log_probs`."""
        return Policy.log_probs(self._policy[0], batch, temperature, want_entropy)


class ShardedPolicy(Policy):
    """A policy with weights sharded over ranks: all of them must run the same number of passes, at the same time."""

    root: nn.Module
    keeps_casts = False  # else a rank would keep all layers in half precision until a pass ends

    @classmethod
    def of(cls, policy: Policy, mesh: DeviceMesh) -> "ShardedPolicy":
        """Shard this policy's model, in place. One without weights gets memory for this rank's part, to be filled."""
        found = cls.__new__(cls)
        found.__dict__.update(policy.__dict__)
        layers = [module for module in policy.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ConfigError(
                f"parallel=shard: {type(policy.model).__name__} does not mark its layers, by which weights are spread: "
                "set parallel=replicate"
            )
        root = _Root(found)
        for module in (*layers, root):
            materialize(module, policy.device)  # one layer at a time: all of them may not fit on the GPU
            use_fast_products(module)
            # Free gathered weights after each pass: the root's would otherwise be stale after the next step.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        for module in root.modules():
            if isinstance(module, FSDPModule):  # gradients are sums over ranks, not means, on every backend
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        found.root = root
        return found

    def log_probs(
        self, batch: PackedBatch, temperature: float = 1.0, want_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """See `Policy.log_probs`."""
        found: tuple[Tensor, Tensor] = self.root(batch, temperature, want_entropy)
        return found


class ShardedLearner(RankedLearner):
    """One rank's learner, with its part of the model. `whole`: the complete copy on rank 0; None elsewhere."""

    def __init__(
        self,
        ranks: Ranks,
        whole: Policy | None,
        policy: ShardedPolicy,
        objective: Objective,
        optimization: OptimizationConfig,
        **settings: Any,
    ) -> None:
        self.whole = whole
        super().__init__(ranks, policy, objective, optimization, **settings)

    def rank_share(
        self, samples: Sequence[Sample], with_gradient: bool, batches: list[list[int]]
    ) -> Iterator[tuple[bool, list[int]]]:
        """Yield this rank's share; if it is short of one, add a pass that counts nothing: all ranks gather together."""
        mine = list(super().rank_share(samples, with_gradient, batches))
        yield from mine
        if len(mine) < -(-len(batches) // self.ranks.world):
            s = samples[batches[0][0]].response
            with torch.set_grad_enabled(with_gradient):
                flat, _ = self.policy.log_probs(self.policy.pack([(s.prompt_ids, s.token_ids)]), self.temperature)
                if with_gradient:
                    (0 * flat.sum()).backward()

    def clip(self) -> Tensor:
        """Clip only: gradients are already summed over all ranks; the norm is one over all parts."""
        norm = super(RankedLearner, self).clip()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    @torch.no_grad()
    def weights_moved(self) -> None:
        """Update rank 0's whole copy."""
        copies = self.whole.model.parameters() if self.whole is not None else self.policy.model.parameters()
        for part, copy in zip(self.policy.model.parameters(), copies, strict=True):
            if part.requires_grad:
                gathered = part.full_tensor() if isinstance(part, DTensor) else part
                if self.whole is not None:
                    copy.copy_(gathered)

    @torch.no_grad()
    def receive(self, moments: Sequence[Plain]) -> None:
        """Receive this rank's part of rank 0's weights and moments."""
        here = [{key: empty_like(value) for key, value in kept.items()} for kept in moments]
        fill(self.ranks, self.policy, self.whole)
        for parameter, kept in zip(self.parameters, here, strict=True):
            for key, value in kept.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    kept[key] = distributed_like(from_rank_0(self.ranks, parameter, value), parameter)
                elif isinstance(value, Tensor):
                    self.ranks.broadcast_tensors([value])
        super(RankedLearner, self).restore(here)
        self.weights_moved()

    def write_moments(self, folder: Path) -> None:
        """Let every rank write its part of the moments."""
        with self.ranks.together("write_moments", folder):
            kept = [self.optimizer.state.get(p, {}) for p in self.parameters]
            named = {f"{i}.{name}": value for i, state in enumerate(kept) for name, value in state.items()}
            write_parts(folder, {name: value for name, value in named.items() if isinstance(value, DTensor)})

    def weights_are_finite(self) -> bool:
        """Whether every trained weight is finite, by rank 0's copy."""
        assert self.whole is not None
        return all(bool(torch.isfinite(p).all()) for p in self.whole.model.parameters() if p.requires_grad)

    def moments_not_finite(self) -> int:
        """Count the trained tensors whose moments are not finite, on any rank."""
        with self.ranks.together("moments_not_finite"):
            states = [self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state]
            here = [{key: _local(value) for key, value in state.items()} for state in states]
            found = self.ranks.all_gather(not_finite(here))
        return len(set().union(*found))

    def close(self) -> None:
        """End the other ranks, and torch's default group."""
        super().close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def orders(self) -> dict[str, Any]:
        """Those of a learner with a whole model, and `moments_not_finite`."""
        return super().orders() | {"moments_not_finite": self.moments_not_finite}


@torch.no_grad()
def fill(ranks: Ranks, policy: Policy, whole: Policy | None) -> None:
    """Give every rank its part of rank 0's weights and buffers; `whole` is None on the others."""
    parts = [*policy.model.parameters(), *policy.model.buffers()]
    copies = [None] * len(parts) if whole is None else [*whole.model.parameters(), *whole.model.buffers()]
    for part, copy in zip(parts, copies, strict=True):
        _put(part, from_rank_0(ranks, part, copy))


def from_rank_0(ranks: Ranks, part: Tensor, whole: Tensor | None) -> Tensor:
    """Return rank 0's whole tensor, on this rank's device."""
    known = None if ranks.rank else whole
    full = torch.empty(part.shape, dtype=part.dtype) if known is None else known.detach().clone()
    full = full.to(ranks.device)
    ranks.broadcast_tensors([full])
    return full


def distributed_like(whole: Tensor, part: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank has whole, sharded like another tensor."""
    if not isinstance(part, DTensor):
        return whole
    return distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)


def _put(part: Tensor, whole: Tensor) -> None:
    """Overwrite this rank's part of a weight from a whole tensor."""
    _local(part).copy_(_local(distributed_like(whole, part)))


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
