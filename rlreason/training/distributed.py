"""A learner on several ranks that each hold the whole model, and scoring divided among ranks."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from rlreason.config.training import OptimizationConfig
from rlreason.errors import ConfigError
from rlreason.model.loading import materialize
from rlreason.model.log_probs import use_fast_products
from rlreason.model.packing import PackedBatch
from rlreason.model.policy import LogProbScorer, Pairs, Policy, TokenScores, scored_rows
from rlreason.objectives.objective import Objective
from rlreason.objectives.terms import StepSums, StepValues
from rlreason.training.learner import Learner, not_finite, sampled_elements
from rlreason.training.ranks import PartedError, Ranks
from rlreason.types import Sample, Update


@dataclass(slots=True)
class RankedSums(StepSums):
    """Sums of this rank's micro-batches; `read` adds those of all ranks, on each of them."""

    ranks: Ranks = field(kw_only=True)

    def read(self, samples: Sequence[Sample], *more: Tensor) -> StepValues:
        """Return all values over all ranks, except `more`, which is the same on all of them."""
        mine = StepSums.read(self, samples, *more)
        counts, values = zip(*self.ranks.all_gather((self.n_micro, mine)), strict=True)
        self.n_micro = sum(counts)
        return sum_values(values)


def sum_values(parts: Sequence[StepValues]) -> StepValues:
    """Add the values of one step measured by several ranks, each on its own samples.

    >>> one = StepValues({"loss": 1.0}, [2.0], [0.5, None], [0.1])
    >>> sum_values([one, StepValues({"loss": 0.5}, [2.0], [None, 0.25], [])])
    StepValues(sums={'loss': 1.5}, more=[2.0], entropies=[0.5, 0.25], mismatches=[0.1])
    """
    names = dict.fromkeys(name for part in parts for name in part.sums)
    return StepValues(
        {name: sum(part.sums.get(name, 0.0) for part in parts) for name in names},
        parts[0].more,
        [next((e for e in same if e is not None), None) for same in zip(*(p.entropies for p in parts), strict=True)],
        [value for part in parts for value in part.mismatches],
    )


Plain = dict[str, Any]


class RankedLearner(Learner):
    """One rank's learner. All ranks change weights together, when rank 0's learner does."""

    def __init__(
        self, ranks: Ranks, policy: Policy, objective: Objective, optimization: OptimizationConfig, **settings: Any
    ) -> None:
        """`settings`: as for `Learner`."""
        self.ranks, self.world = ranks, ranks.world
        self.ended: Callable[[], object] = lambda: None  # called once the other ranks have been ordered to end
        super().__init__(policy, objective, optimization, **settings)

    def take_step(self, samples: Sequence[Sample], learning_rate: float | None, mismatch_from: int | None) -> Update:
        """Take one optimizer step on all ranks."""
        with self.ranks.together("update", samples, learning_rate, mismatch_from):
            update = super().take_step(samples, learning_rate, mismatch_from)
            self.weights_moved()
        return update

    def restart(self) -> None:
        """Restore the initial weights on all ranks."""
        with self.ranks.together("restart"):
            super().restart()
            self.weights_moved()

    def new_sums(self) -> RankedSums:
        """Create sums that are read over all ranks."""
        return RankedSums(ranks=self.ranks)

    def step_micro_batches(self, samples: Sequence[Sample]) -> Iterator[tuple[bool, list[int]]]:
        """Yield rank r's micro-batches of the step: r, r + world, ..."""
        for with_gradient, batches in groupby(super().step_micro_batches(samples), key=itemgetter(0)):
            yield from self.rank_share(samples, with_gradient, [places for _, places in batches])

    def rank_share(
        self, samples: Sequence[Sample], with_gradient: bool, batches: list[list[int]]
    ) -> Iterator[tuple[bool, list[int]]]:
        """Yield this rank's share of these micro-batches."""
        for places in batches[self.ranks.rank :: self.ranks.world]:
            yield with_gradient, places

    def clip(self) -> Tensor:
        """Sum the gradients of all ranks, then clip."""
        self.ranks.all_reduce([p.grad for p in self.parameters if p.grad is not None])
        return super().clip()

    def weights_moved(self) -> None:
        """Check that all ranks have the same weights, by some elements of each tensor."""
        marks = torch.cat([part.float().reshape(-1).cpu() for part in sampled_elements(self.parameters)])
        digests = self.ranks.all_gather(hashlib.sha256(marks.numpy().tobytes()).hexdigest()[:16])
        if len(set(digests)) > 1:
            raise PartedError(
                f"training on {self.ranks.world} ranks: their weights have parted ({', '.join(digests)}): resume from "
                "the last checkpoint, on GPUs of one kind"
            )

    def restore(self, moments: Sequence[Plain]) -> None:
        """Load rank 0's weights and these moments on all ranks."""
        with self.ranks.together("restore", without_values(moments)):
            self.receive(moments)

    def receive(self, moments: Sequence[Plain]) -> None:
        """Receive rank 0's weights and moments; on other ranks `moments` are what `without_values` returned."""
        super().restore([{key: empty_like(value) for key, value in state.items()} for state in moments])
        states = [self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        self.ranks.broadcast_tensors([*self.policy.model.parameters(), *self.policy.model.buffers(), *tensors])
        self.weights_moved()

    def close(self) -> None:
        """End the other ranks, and torch's default group; if one is lost, kill those that are left."""
        with suppress(RuntimeError):
            self.ranks.end()
        self.ended()
        if dist.is_initialized():
            dist.destroy_process_group()

    def orders(self) -> dict[str, Any]:
        """Return the functions that rank 0 may call on the others, by name."""

        def update(samples: Sequence[Sample], learning_rate: float | None, mismatch_from: int | None) -> None:
            self.take_step(samples, learning_rate, mismatch_from)

        return {"update": update, "restart": self.restart, "restore": self.receive, "write_moments": self.write_moments}

    def write_moments(self, folder: Path) -> None:
        """Do nothing: rank 0 has all moments."""


def without_values(moments: Sequence[Plain]) -> list[Plain]:
    """Replace every tensor by its shape and type."""
    return [
        {key: (value.shape, value.dtype) if isinstance(value, Tensor) else value for key, value in state.items()}
        for state in moments
    ]


def empty_like(value: Any) -> Any:
    """Create an empty tensor from a shape and type of `without_values`; return anything else unchanged."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype):
        return torch.empty(value[0], dtype=value[1])
    return value


@dataclass(frozen=True, slots=True)
class RankedScorer:
    """Computes log-probabilities on all ranks, under the policies that all hold: `policy`, and maybe `reference`."""

    ranks: Ranks
    policies: Mapping[str, Policy]
    in_step: bool  # whether all ranks must run the same number of passes

    def of(self, name: str, scorer: LogProbScorer, pairs: Pairs, want_entropy: bool) -> list[TokenScores]:
        """Score as the scorer alone would."""
        return self.score(name, pairs, scorer.token_budget, scorer.temperature, want_entropy) if pairs else []

    @torch.no_grad()
    def score(
        self, name: str, pairs: Pairs, token_budget: int, temperature: float, want_entropy: bool
    ) -> list[TokenScores]:
        """Score on all ranks, each its share of the rows; the others call it on rank 0's order."""
        with self.ranks.together("score", name, pairs, token_budget, temperature, want_entropy):
            policy, rank, world = self.policies[name], self.ranks.rank, self.ranks.world
            rows = policy.divide(pairs, token_budget)
            mine = rows[rank::world]
            scores = scored_rows(policy, pairs, mine, temperature, want_entropy)
            if self.in_step and len(mine) < -(-len(rows) // world):
                scored_rows(policy, pairs, [rows[0][:1]], temperature, False)
            parts = self.ranks.all_gather(scores)
        by_place = {place: score for part in parts for place, score in part.items()}
        return [by_place[i] for i in range(len(pairs))]


def mesh_of(ranks: Ranks) -> DeviceMesh:
    """Return the ranks as a device mesh; all ranks call it at once."""
    return init_device_mesh(ranks.device.type, (ranks.world,))


class _Root(nn.Module):
    """A module around the whole forward pass, whose hooks gather the weights that are in no layer."""

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
        sharded = cls.__new__(cls)
        sharded.__dict__.update(policy.__dict__)
        layers = [module for module in policy.model.modules() if isinstance(module, GradientCheckpointingLayer)]
        if not layers:
            raise ConfigError(
                f"parallel=shard: {type(policy.model).__name__} does not mark its layers, by which weights are spread: "
                "set parallel=replicate"
            )
        root = _Root(sharded)
        for module in (*layers, root):
            materialize(module, policy.device)  # one layer at a time: all of them may not fit on the GPU
            use_fast_products(module)
            # Free gathered weights after each pass: the root's would otherwise be stale after the next step.
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        for module in root.modules():
            if isinstance(module, FSDPModule):  # gradients are sums over ranks, not means, on every backend
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        sharded.root = root
        return sharded

    def log_probs(
        self, batch: PackedBatch, temperature: float = 1.0, want_entropy: bool = True
    ) -> tuple[Tensor, Tensor]:
        """See `Policy.log_probs`."""
        scores: tuple[Tensor, Tensor] = self.root(batch, temperature, want_entropy)
        return scores


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
        states = [{key: empty_like(value) for key, value in state.items()} for state in moments]
        fill(self.ranks, self.policy, self.whole)
        for parameter, state in zip(self.parameters, states, strict=True):
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = distributed_like(from_rank_0(self.ranks, parameter, value), parameter)
                elif isinstance(value, Tensor):
                    self.ranks.broadcast_tensors([value])
        super(RankedLearner, self).restore(states)
        self.weights_moved()

    def write_moments(self, folder: Path) -> None:
        """Let every rank write its part of the moments; an error on one, such as a full disk, is raised on all."""
        with self.ranks.together("write_moments", folder):
            states = [self.optimizer.state.get(p, {}) for p in self.parameters]
            named = {f"{i}.{name}": value for i, state in enumerate(states) for name, value in state.items()}
            try:
                save({name: v for name, v in named.items() if isinstance(v, DTensor)}, checkpoint_id=folder)
            except CheckpointException as error:  # not an `Exception`
                reasons = [failure[0] for failure in error.failures.values()]
                system = next((reason for reason in reasons if isinstance(reason, OSError)), None)
                raise system or RuntimeError(f"moments cannot be written: {reasons[0]}") from None

    def weights_are_finite(self) -> bool:
        """Return whether every trained weight is finite, by rank 0's copy."""
        assert self.whole is not None
        return all(bool(torch.isfinite(p).all()) for p in self.whole.model.parameters() if p.requires_grad)

    def moments_not_finite(self) -> int:
        """Count the trained tensors whose moments are not finite, on any rank."""
        with self.ranks.together("moments_not_finite"):
            states = [self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state]
            parts = [{key: _local(value) for key, value in state.items()} for state in states]
            broken = self.ranks.all_gather(not_finite(parts))
        return len(set().union(*broken))

    def orders(self) -> dict[str, Any]:
        """Return the functions that rank 0 may call: `moments_not_finite` too."""
        return super().orders() | {"moments_not_finite": self.moments_not_finite}


@torch.no_grad()
def fill(ranks: Ranks, policy: Policy, whole: Policy | None) -> None:
    """Give every rank its part of rank 0's weights and buffers; `whole` is None on the others."""
    parts = [*policy.model.parameters(), *policy.model.buffers()]
    copies = [None] * len(parts) if whole is None else [*whole.model.parameters(), *whole.model.buffers()]
    for part, copy in zip(parts, copies, strict=True):
        _local(part).copy_(_local(distributed_like(from_rank_0(ranks, part, copy), part)))


def from_rank_0(ranks: Ranks, part: Tensor, whole: Tensor | None) -> Tensor:
    """Return rank 0's whole tensor, on this rank's device."""
    if ranks.rank or whole is None:
        full = torch.empty(part.shape, dtype=part.dtype, device=ranks.device)
    else:
        full = whole.detach().clone().to(ranks.device)
    ranks.broadcast_tensors([full])
    return full


def distributed_like(whole: Tensor, part: Tensor) -> Tensor:
    """Return this rank's part of a tensor that every rank has whole, sharded like another tensor."""
    if not isinstance(part, DTensor):
        return whole
    return distribute_tensor(whole, part.device_mesh, part.placements, src_data_rank=None)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value
