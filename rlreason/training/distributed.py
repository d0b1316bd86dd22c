"""A learner on several ranks that each hold the whole model or a part of it; they score together, too."""

import copy
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlreason.config.training import TrainingConfig
from rlreason.errors import ConfigError
from rlreason.model.attention import NAMES
from rlreason.model.loading import from_config, materialize, one_layer_of, skeleton_of, with_one_layer
from rlreason.model.log_probs import use_fast_products
from rlreason.model.packing import PackedBatch
from rlreason.model.parameters import free_cached_memory, merged_weights
from rlreason.model.policy import LogProbScorer, Pairs, Policy, TokenScores, scored_rows
from rlreason.model.shapes import shape_from
from rlreason.objectives.terms import StepSums, StepValues
from rlreason.records.files import RANKS_LOG
from rlreason.records.reader import write_status
from rlreason.runtime.machine import Place
from rlreason.runtime.text import first_line
from rlreason.training.build import frozen_copy, learner_settings, mode_of, set_threads, set_trained
from rlreason.training.learner import Learner, not_finite, sampled_elements
from rlreason.training.ranks import ERROR, LeadingRank, PartedError, Ranks, is_gone, join, on_all_ranks
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
    """One rank's learner: each has the whole model, and gradients are summed over all ranks (`parallel=replicate`).

    The trainer has that of rank 0; what is marked `on_all_ranks` the others do with it, on its orders.
    """

    in_step = False  # whether all ranks must run the same number of passes

    def __init__(self, run: TrainingConfig, ranks: Ranks, policies: Mapping[str, Policy]) -> None:
        """`policies`: those of this rank by name, `policy` and maybe `reference`."""
        self.ranks, self.world, self.policies = ranks, ranks.world, policies
        super().__init__(policies["policy"], **learner_settings(run))

    @on_all_ranks
    def take_step(self, samples: Sequence[Sample], learning_rate: float | None, mismatch_from: int | None) -> Update:
        """Take one optimizer step on all ranks."""
        update = super().take_step(samples, learning_rate, mismatch_from)
        self.weights_moved()
        return update

    @on_all_ranks
    def restart(self) -> None:
        """Restore the initial weights on all ranks."""
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
        shapes = tree_map_only(Tensor, lambda value: value.to("meta"), list(moments))
        with self.ranks.together("receive", shapes):
            self.receive(moments)

    def receive(self, moments: Sequence[Plain]) -> None:
        """Receive rank 0's weights and moments; on other ranks `moments` have shapes and no values."""
        super().restore(with_memory(moments))
        states = [self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state]
        tensors = [value for state in states for value in state.values() if isinstance(value, Tensor)]
        self.ranks.broadcast_tensors([*self.policy.model.parameters(), *self.policy.model.buffers(), *tensors])
        self.weights_moved()

    def deal(self, name: str, scorer: LogProbScorer, pairs: Pairs, want_entropy: bool) -> list[TokenScores]:
        """Score on all ranks as the scorer alone would, under the policy of this name."""
        return self.score(name, pairs, scorer.token_budget, scorer.temperature, want_entropy) if pairs else []

    @on_all_ranks
    @torch.no_grad()
    def score(
        self, name: str, pairs: Pairs, token_budget: int, temperature: float, want_entropy: bool
    ) -> list[TokenScores]:
        """Score on all ranks, each its share of the rows."""
        policy, rank, world = self.policies[name], self.ranks.rank, self.ranks.world
        rows = policy.divide(pairs, token_budget)
        mine = rows[rank::world]
        scores = scored_rows(policy, pairs, mine, temperature, want_entropy)
        if self.in_step and len(mine) < -(-len(rows) // world):
            scored_rows(policy, pairs, [rows[0][:1]], temperature, False)
        by_place = {place: score for part in self.ranks.all_gather(scores) for place, score in part.items()}
        return [by_place[i] for i in range(len(pairs))]

    def close(self) -> None:
        """End the other ranks; if one is lost, kill those that are left."""
        assert isinstance(self.ranks, LeadingRank)
        self.ranks.close()


def with_memory(moments: Sequence[Plain]) -> list[Plain]:
    """Copy the moments, with uninitialised tensors in main memory for those that have a shape only."""
    empty = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="cpu") if t.is_meta else t, list(moments))
    states: list[Plain] = empty
    return states


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
    """One rank's learner, with its part of the model (`parallel=shard`)."""

    in_step = True

    def __init__(
        self, run: TrainingConfig, ranks: Ranks, policies: Mapping[str, Policy], whole: Mapping[str, Policy]
    ) -> None:
        """`whole`: the complete copies on rank 0, by name; none elsewhere."""
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        parts = {name: ShardedPolicy.of(policy, mesh) for name, policy in policies.items()}
        for name, part in parts.items():
            fill(ranks, part, whole.get(name))
        self.whole = whole.get("policy")
        super().__init__(run, ranks, parts)

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
        copies = (self.whole or self.policy).model.parameters()
        for part, copied in zip(self.policy.model.parameters(), copies, strict=True):
            if part.requires_grad:
                gathered = part.full_tensor() if isinstance(part, DTensor) else part
                if self.whole is not None:
                    copied.copy_(gathered)

    @torch.no_grad()
    def receive(self, moments: Sequence[Plain]) -> None:
        """Receive this rank's part of rank 0's weights and moments."""
        fill(self.ranks, self.policy, self.whole)
        states = with_memory(moments)
        for parameter, state in zip(self.parameters, states, strict=True):
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[key] = part_of(self.ranks, parameter, value)
                elif isinstance(value, Tensor):
                    self.ranks.broadcast_tensors([value])
        super(RankedLearner, self).restore(states)
        self.weights_moved()

    @on_all_ranks
    def write_moments(self, folder: Path) -> None:
        """Let every rank write its part of the moments; an error on one, such as a full disk, is raised on all."""
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

    @on_all_ranks
    def moments_not_finite(self) -> int:
        """Count the trained tensors whose moments are not finite, on any rank."""
        states = [self.optimizer.state[p] for p in self.parameters if p in self.optimizer.state]
        parts = [{key: _local(value) for key, value in state.items()} for state in states]
        return len(set().union(*self.ranks.all_gather(not_finite(parts))))


@torch.no_grad()
def fill(ranks: Ranks, policy: Policy, whole: Policy | None) -> None:
    """Give every rank its part of rank 0's weights and buffers; `whole` is None on the others."""
    parts = [*policy.model.parameters(), *policy.model.buffers()]
    copies = [None] * len(parts) if whole is None else [*whole.model.parameters(), *whole.model.buffers()]
    for part, copied in zip(parts, copies, strict=True):
        _local(part).copy_(_local(part_of(ranks, part, copied)))


def part_of(ranks: Ranks, part: Tensor, whole: Tensor | None) -> Tensor:
    """Return this rank's part of rank 0's whole tensor, sharded like `part`, on this rank's device."""
    if ranks.rank or whole is None:
        full = torch.empty(part.shape, dtype=part.dtype, device=ranks.device)
    else:
        full = whole.detach().clone().to(ranks.device)
    ranks.broadcast_tensors([full])
    if not isinstance(part, DTensor):
        return full
    return distribute_tensor(full, part.device_mesh, part.placements, src_data_rank=None)


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def make_ranked_learner(
    run: TrainingConfig, policy: Policy, reference: LogProbScorer | None, world: int, folder: Path
) -> RankedLearner:
    """Build rank 0's learner: start the other ranks, send them the model, and let them wait for its orders.

    In the mode `shard`, `policy` becomes a whole copy in main memory, unless it was loaded there.
    """
    mode, why = mode_of(run, shape_from(policy.model.config.get_text_config().to_dict()), policy.device, world)
    mode = "shard" if policy.in_main_memory else mode  # as decided before loading
    processes = "GPUs" if policy.device.type == "cuda" else "processes"
    share = "a part of the model" if mode == "shard" else "the whole model"
    policy.remarks.append(f"{world} {processes} train, each has {share} (parallel={mode}: {why})")
    note = partial(write_status, folder, "failed")
    ranks = LeadingRank(world, policy.device, run.waits.run_s or LIMIT_S, folder / RANKS_LOG, note)
    try:
        with ranks.naming_lost_ranks("the start"):
            return _send_model(run, ranks, mode, policy, reference)
    except BaseException:
        ranks.close(at_once=True)
        raise


LIMIT_S = 3600.0  # to wait for a rank in a collective call, if waits.run_s sets none


def _send_model(
    run: TrainingConfig, ranks: Ranks, mode: str, policy: Policy, reference: LogProbScorer | None
) -> RankedLearner:
    share_threads(run, ranks)
    names = ("compute_dtype", "weights", "head_dtype", "attention")
    resolved = {name: getattr(policy, name) for name in names}  # what `auto` has become here
    ranks.broadcast((run, mode, policy.model.config, policy.tokenizer, resolved))
    whole = {"policy": policy} | ({} if reference is None else {"reference": reference.policy})
    if mode == "shard":
        for copied in whole.values():
            copied.in_main_memory = True
            copied.model.to("cpu")  # type: ignore[arg-type]  # the wrapper hides torch's signature
            free_cached_memory(copied.device)
    share_weights(ranks, policy.model if mode == "replicate" else with_one_layer(policy.model))
    agree_on_sharing(ranks, whole)
    if mode == "replicate":
        learner = RankedLearner(run, ranks, whole)
    else:
        policies = trained_policies(run, without_weights(policy, policy.model.config))
        learner = ShardedLearner(run, ranks, policies, whole)
    for name, scored in whole.items():
        scored.deal = partial(learner.deal, name)
    learner.restore([{} for _ in learner.parameters])
    return learner


def follow(place: Place) -> int:
    """Do this rank's part of a run, on the orders of rank 0; return the exit code. An error is left for rank 0."""
    if (ranks := join(place)) is None:
        return 0
    try:
        run, learner = _receive_model(ranks)
        engine_sleeps = run.rollout.engine == "vllm" and run.rollout.sleep and run.rollout.shares_gpu
        for name, arguments in ranks.orders():
            getattr(learner, name)(*arguments)
            if engine_sleeps:  # it wakes up on this GPU
                free_cached_memory(ranks.device)
    except Exception as error:
        if isinstance(error, RuntimeError) and is_gone(error):  # rank 0 ended, and reports why
            print(f"rank {place.rank}: rank 0 has gone", file=sys.stderr)
            return 1
        ranks.store.set(f"{ERROR}{ranks.rank}", f"{type(error).__name__}: {first_line(error)}")
        raise
    return 0


def _receive_model(ranks: Ranks) -> tuple[TrainingConfig, RankedLearner]:
    run, mode, config, tokenizer, resolved = ranks.broadcast()
    model = from_config(config if mode == "replicate" else one_layer_of(config))
    share_weights(ranks, model)
    policy = Policy(model, tokenizer, device=ranks.device, **resolved)  # checks that this device computes alike
    if mode == "shard":
        policy = without_weights(policy, config)
        del model  # else its single layer stays on the GPU
        free_cached_memory(policy.device)
    set_threads(run, policy)
    share_threads(run, ranks)
    policies = trained_policies(run, policy)
    agree_on_sharing(ranks, policies)
    if mode == "replicate":
        return run, RankedLearner(run, ranks, policies)
    return run, ShardedLearner(run, ranks, policies, {})


def trained_policies(run: TrainingConfig, policy: Policy) -> dict[str, Policy]:
    """Return the policy ready for training, and a frozen copy as the reference model if a KL term needs it."""
    set_trained(run.model, policy, run.seed)
    if getattr(run, "kl_placement", "none") == "none":
        return {"policy": policy}
    return {"policy": policy, "reference": frozen_copy(policy)}


def without_weights(policy: Policy, config: PretrainedConfig) -> Policy:
    """Copy the policy with a model that has no memory yet, whose weights a rank gets by `fill`."""
    empty = copy.copy(policy)
    empty.model, empty.in_main_memory, empty.remarks = skeleton_of(config), False, []
    empty.model.set_attn_implementation(NAMES[empty.attention])
    return empty


def share_threads(run: TrainingConfig, ranks: Ranks) -> None:
    """Divide the processor's threads among the ranks, unless the settings fix them."""
    if run.threads is None and ranks.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.world))


def agree_on_sharing(ranks: Ranks, policies: Mapping[str, Policy]) -> None:
    """Make all ranks lay out prompts alike, since the micro-batches they share depend on it."""
    for policy in policies.values():
        if not all(ranks.all_gather(policy.shares_prompts)) and policy.shares_prompts:
            policy.stop_sharing("another rank cannot share them")


@torch.no_grad()
def share_weights(ranks: Ranks, model: PreTrainedModel) -> None:
    """Overwrite every rank's model with the weights of rank 0, whose adapters are merged."""
    own: dict[str, Tensor] = model.state_dict(keep_vars=True) if ranks.rank else dict(merged_weights(model))
    for name in ranks.broadcast(list(own)):
        sent = own[name].detach().float().to(ranks.device)
        ranks.broadcast_tensors([sent])
        if ranks.rank:
            own[name].copy_(sent)
