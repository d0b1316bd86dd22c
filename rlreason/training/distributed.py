"""A learner on several ranks that each hold the whole model or a part of it; they score together, too."""

import copy
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from rlreason.config.training import TrainingConfig
from rlreason.errors import ConfigError, EngineError
from rlreason.model.attention import NAMES
from rlreason.model.log_probs import use_fast_products
from rlreason.model.memory import shape_from
from rlreason.model.parameters import from_config, materialize, round_weights, skeleton_of
from rlreason.model.policy import LogProbScorer, Pairs, Policy, TokenScores, scored_rows
from rlreason.objectives.terms import StepSums, StepValues
from rlreason.runtime.machine import Place
from rlreason.runtime.text import first_line
from rlreason.training.build import frozen_copy, learner_settings, mode_of, set_threads, set_trained
from rlreason.training.learner import Learner, is_finite, local, sampled_elements
from rlreason.training.ranks import ERROR, LeadingRank, Ranks, join, on_all_ranks
from rlreason.types import Sample, Update

State = dict[str, Any]  # of an optimizer, for one parameter


class RankedLearner(Learner):
    """One rank's learner: each has the whole model, and gradients are summed over all ranks (`parallel=replicate`).

    The trainer has that of rank 0; what is marked `on_all_ranks` the others do with it, on its orders.
    """

    in_step = False  # whether all ranks must run the same number of passes, since each gathers the others' weights

    def __init__(
        self, run: TrainingConfig, ranks: Ranks, policies: Mapping[str, Policy], whole: Mapping[str, Policy]
    ) -> None:
        """Give `policies`, this rank's by name, the weights of `whole`, the complete ones on rank 0; none elsewhere."""
        self.ranks, self.policies, self.whole = ranks, policies, whole.get("policy")
        for name, policy in policies.items():
            fill(ranks, policy, whole.get(name))
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

    def read(self, done: StepSums, samples: Sequence[Sample], *more: Tensor) -> StepValues:
        """Add the sums of all ranks, each over its own samples; `more` is the same on all of them."""
        counts, parts = zip(*self.ranks.all_gather((done.n_micro, done.read(samples, *more))), strict=True)
        done.n_micro = sum(counts)
        names = dict.fromkeys(name for part in parts for name in part.sums)
        each = zip(*(part.entropies for part in parts), strict=True)
        return StepValues(
            {name: sum(part.sums.get(name, 0.0) for part in parts) for name in names},
            parts[0].more,
            [next((entropy for entropy in same if entropy is not None), None) for same in each],
            [value for part in parts for value in part.mismatches],
        )

    def step_micro_batches(self, samples: Sequence[Sample]) -> Iterator[tuple[bool, list[int]]]:
        """Yield rank r's micro-batches of the step: r, r + world, ..."""
        rank, world = self.ranks.rank, self.ranks.world
        for with_gradient, group in groupby(super().step_micro_batches(samples), key=itemgetter(0)):
            batches = list(group)
            mine = batches[rank::world]
            yield from mine
            if self.in_step and len(mine) < -(-len(batches) // world):  # a pass that counts nothing
                s = samples[batches[0][1][0]].response
                with torch.set_grad_enabled(with_gradient):
                    flat, _ = self.policy.log_probs(self.policy.pack([(s.prompt_ids, s.token_ids)]), self.temperature)
                    if with_gradient:
                        (0 * flat.sum()).backward()

    def clip(self) -> Tensor:
        """Sum the gradients of all ranks, then clip."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                total = parameter.grad.float().contiguous()
                dist.all_reduce(total)
                parameter.grad.copy_(total)
        return super().clip()

    def weights_moved(self) -> None:
        """Check that all ranks have the same weights, by some elements of each tensor."""
        marks = torch.cat([part.float().reshape(-1).cpu() for part in sampled_elements(self.parameters)])
        digests = self.ranks.all_gather(hashlib.sha256(marks.numpy().tobytes()).hexdigest()[:16])
        if len(set(digests)) > 1:
            raise EngineError(
                f"training on {self.ranks.world} ranks: their weights have parted ({', '.join(digests)}): resume from "
                "the last checkpoint, on GPUs of one kind"
            )

    def restore(self, moments: Iterable[State]) -> None:
        """Load rank 0's weights and these moments on all ranks."""
        with self.ranks.together("receive"):
            self.receive(moments)

    @torch.no_grad()
    def receive(self, moments: Iterable[State] = ()) -> None:
        """Receive this rank's part of rank 0's weights and moments, or all of them; other ranks have none to give."""
        fill(self.ranks, self.policy, self.whole)
        super().restore(self.received(moments))
        self.weights_moved()

    def received(self, moments: Iterable[State]) -> Iterator[State]:
        """Yield this rank's part of rank 0's moments, each whole in main memory until the next one comes."""
        own = iter(moments)
        for parameter in self.parameters:
            state = self.ranks.broadcast(next(own, None))
            for name, value in state.items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    state[name] = sharded_like(parameter, value.to(self.ranks.device))
            yield state

    def deal(self, name: str, scorer: LogProbScorer, pairs: Pairs) -> list[TokenScores]:
        """Score on all ranks as the scorer alone would, under the policy of this name."""
        return self.score(name, pairs, scorer.token_budget, scorer.temperature) if pairs else []

    @on_all_ranks
    @torch.no_grad()
    def score(self, name: str, pairs: Pairs, token_budget: int, temperature: float) -> list[TokenScores]:
        """Score on all ranks, each its share of the rows."""
        policy, rank, world = self.policies[name], self.ranks.rank, self.ranks.world
        rows = policy.divide(pairs, token_budget)
        mine = rows[rank::world]
        scores = scored_rows(policy, pairs, mine, temperature)
        if self.in_step and len(mine) < -(-len(rows) // world):
            scored_rows(policy, pairs, [rows[0][:1]], temperature)
        by_place = {place: score for part in self.ranks.all_gather(scores) for place, score in part.items()}
        return [by_place[i] for i in range(len(pairs))]

    def close(self) -> None:
        """End the other ranks; if one is lost, kill those that are left."""
        assert isinstance(self.ranks, LeadingRank)
        self.ranks.close()


def sharded(policy: Policy, mesh: DeviceMesh) -> Policy:
    """Shard this policy's model over ranks, in place, which from then on run the same number of passes together.

    A model without weights gets memory for this rank's part, to be filled.
    """
    model, part = policy.model, copy.copy(policy)
    part.keeps_casts = False  # else a rank would keep all layers in half precision until a pass ends
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"parallel=shard: {type(model).__name__} does not mark its layers, by which weights are spread: set "
            "parallel=replicate"
        )
    for module in (*layers, model):
        materialize(module, policy.device)  # one layer at a time: all of them may not fit on the GPU
        use_fast_products(module)
        # Free gathered weights after each pass: the root's would otherwise be stale after the next step.
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):  # gradients are sums over ranks, not means, on every backend
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    model.log_probs = partial(Policy.log_probs, part)
    register_fsdp_forward_method(model, "log_probs")  # its hooks gather the weights that are in no layer
    part.log_probs = model.log_probs  # type: ignore[method-assign]
    return part


class ShardedLearner(RankedLearner):
    """One rank's learner, with its part of the model (`parallel=shard`)."""

    in_step = True

    def __init__(
        self, run: TrainingConfig, ranks: Ranks, policies: Mapping[str, Policy], whole: Mapping[str, Policy]
    ) -> None:
        """Divide the policies' models, in place."""
        mesh = init_device_mesh(ranks.device.type, (ranks.world,))
        super().__init__(run, ranks, {name: sharded(policy, mesh) for name, policy in policies.items()}, whole)

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

    @on_all_ranks
    def moments(self) -> list[State]:
        """Gather the moments on rank 0 in main memory, one tensor at a time; other ranks keep none."""
        gathered: list[State] = []
        for state in super().moments():
            whole = {name: v.full_tensor() if isinstance(v, DTensor) else v for name, v in state.items()}
            gathered.append({} if self.ranks.rank else {name: value.cpu() for name, value in whole.items()})
        return gathered

    def weights_are_finite(self) -> bool:
        """Return whether every trained weight is finite, by rank 0's copy."""
        assert self.whole is not None
        return all(is_finite(p) for p in self.whole.model.parameters() if p.requires_grad)

    @on_all_ranks
    def broken_moments(self) -> set[int]:
        """Return the indices of the trained tensors with a moment that is not finite, on any rank."""
        return set().union(*self.ranks.all_gather(super().broken_moments()))


@torch.no_grad()
def fill(ranks: Ranks, policy: Policy, whole: Policy | None) -> None:
    """Give every rank its part of rank 0's weights and buffers; `whole` is None on the others."""
    own = [] if whole is None else [*whole.model.parameters(), *whole.model.buffers()]
    for place, part in enumerate([*policy.model.parameters(), *policy.model.buffers()]):
        full = torch.empty(part.shape, dtype=part.dtype, device=ranks.device)
        if own:
            full.copy_(own[place])
        dist.broadcast(full, src=0)
        local(part).copy_(local(sharded_like(part, full)))


def sharded_like(part: Tensor, full: Tensor) -> Tensor:
    """Return this rank's part of a whole tensor, or all of it if `part` is not sharded."""
    if not isinstance(part, DTensor):
        return full
    return distribute_tensor(full, part.device_mesh, part.placements, src_data_rank=None)


LIMIT_S = 3600.0  # to wait for a rank in a collective call, if waits.run_s sets none


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
    whole = {"policy": policy} | ({} if reference is None else {"reference": reference.policy})
    ranks = LeadingRank(world, policy.device, run.waits.run_s or LIMIT_S, folder)
    try:
        checked, config = copy.copy(policy), policy.model.config  # what `auto` has become here holds everywhere
        checked.model, checked.in_main_memory, checked.remarks = None, False, []  # type: ignore[assignment]
        with ranks.together("start", run, mode, checked, config):
            policies: Mapping[str, Policy] = whole
            if mode == "shard":
                for copied in whole.values():
                    copied.in_main_memory = True
                    copied.model.to("cpu")  # type: ignore[arg-type]  # the wrapper hides torch's signature
                    torch.cuda.empty_cache()
                policies = trained_policies(run, mode, checked, config)
            learner = ranked_learner(run, ranks, mode, policies, whole)
            for name, scored in whole.items():
                scored.deal = partial(learner.deal, name)
            return learner
    except BaseException:
        ranks.close(at_once=True)
        raise


def follow(place: Place) -> int:
    """Do this rank's part of a run, on the orders of rank 0; return the exit code. An error is left for rank 0."""
    if (ranks := join(place)) is None:
        return 0
    try:
        orders = ranks.orders()
        _, (run, mode, policy, config) = next(orders)
        learner = ranked_learner(run, ranks, mode, trained_policies(run, mode, policy, config), {})
        engine_sleeps = run.rollout.engine == "vllm" and run.rollout.sleep and run.rollout.shares_gpu
        for name, arguments in orders:
            getattr(learner, name)(*arguments)
            if engine_sleeps:  # it wakes up on this GPU
                torch.cuda.empty_cache()
    except Exception as error:
        with suppress(RuntimeError):  # rank 0 has gone, and the store with it
            ranks.store.set(f"{ERROR}{ranks.rank}", f"{type(error).__name__}: {first_line(error)}")
        raise
    return 0


def ranked_learner(
    run: TrainingConfig, ranks: Ranks, mode: str, policies: Mapping[str, Policy], whole: Mapping[str, Policy]
) -> RankedLearner:
    """Build this rank's learner. `whole`: rank 0's complete policies by name; none elsewhere."""
    if run.threads is None and ranks.device.type == "cpu":  # they divide the processor
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.world))
    return (RankedLearner if mode == "replicate" else ShardedLearner)(run, ranks, policies, whole)


def trained_policies(run: TrainingConfig, mode: str, policy: Policy, config: PretrainedConfig) -> dict[str, Policy]:
    """Give rank 0's policy a model of this rank, whose weights come later (`fill`), and prepare it for training.

    With it goes a frozen copy as the reference model, if a KL term needs it.
    """
    if mode == "shard":
        policy.model = skeleton_of(config)
    else:
        policy.model = from_config(config)
        if policy.weights != torch.float32:
            round_weights(policy.model, policy.weights)
        policy.model.to(policy.device)  # type: ignore[arg-type]
        use_fast_products(policy.model)
    policy.model.set_attn_implementation(NAMES[policy.attention] if policy.packs else policy.attention)
    set_threads(run, policy)
    set_trained(run.model, policy, run.seed)
    if getattr(run, "kl_placement", "none") == "none":
        return {"policy": policy}
    return {"policy": policy, "reference": frozen_copy(policy)}
