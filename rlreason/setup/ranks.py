"""Training on several ranks, put together from a run's settings: by rank 0, and by the others at its word."""

import copy
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.initialization import no_init_weights

from rlreason.config.training import TrainingConfig
from rlreason.distributed.learner import RankedLearner
from rlreason.distributed.ranks import Ranks
from rlreason.distributed.scores import DealtScores
from rlreason.distributed.sharding import ShardedLearner, ShardedPolicy, mesh_of
from rlreason.distributed.start import Group
from rlreason.errors import ConfigError
from rlreason.learner import Learner
from rlreason.memory.machine import Device, processor
from rlreason.memory.ranks import parallel_mode
from rlreason.memory.shapes import shape_from
from rlreason.model.alone import alone
from rlreason.model.policy import Policy
from rlreason.model.scoring import LogProbScorer
from rlreason.records.files import RANKS_LOG, STACKS
from rlreason.records.status import write_status
from rlreason.runtime.environment import STACKS_VARIABLE
from rlreason.runtime.stacks import listen
from rlreason.setup.algorithm import frozen_copy
from rlreason.setup.learner_settings import settings_of
from rlreason.setup.model import choose_threads, choose_trained

Order = Callable[..., Any]


def mode_of(run: TrainingConfig, policy: Policy, world: int) -> tuple[str, str]:
    """(replicate or shard, why), by the memory plan.

    `ConfigError` where the engine cannot sample from a model in parts.
    """
    here, shape = processor(), shape_from(policy.model.config.get_text_config().to_dict())
    if policy.device.type == "cuda":
        total = torch.cuda.mem_get_info()[1]  # of what is free now, vLLM has its part already, which the plan counts
        here = Device("cuda", torch.cuda.get_device_name(), total, total)
    mode, why = parallel_mode(run, shape, here, world)
    if mode == "shard" and run.rollout.engine == "hf" and policy.device.type == "cuda":
        raise ConfigError(
            f"rollout=hf with parallel={run.parallel}, which divides the model ({why}): the in-process engine samples "
            "from a whole one: choose rollout=vllm, or parallel=replicate"
        )
    if mode == "shard" and run.rollout.compile:
        raise ConfigError(
            f"rollout.compile=true with parallel={run.parallel}, which divides the model ({why}): its steps are "
            "compiled from a whole one: set it to false, or choose parallel=replicate"
        )
    return mode, why


def lead(run: TrainingConfig, policy: Policy, reference: LogProbScorer | None, world: int, folder: Path) -> Learner:
    """Rank 0's learner. The others are started, get the model from here, and wait for what it says.

    In the mode `shard`, `policy` becomes a whole copy in main memory.
    """
    mode, why = mode_of(run, policy, world)
    place = "GPUs" if policy.device.type == "cuda" else "processes"
    has = {"replicate": "each has the whole model", "shard": "each has a part of the model"}[mode]
    policy.remarks.append(f"{world} {place} train, {has} (parallel={mode}: {why})")
    group = Group(world, run.waits.run_s, folder / RANKS_LOG, partial(write_status, folder, "failed"))
    try:
        return _led(run, policy, reference, group, mode, folder)
    except BaseException:
        group.close(at_once=True)
        raise


def _led(
    run: TrainingConfig, policy: Policy, reference: LogProbScorer | None, group: Group, mode: str, folder: Path
) -> Learner:
    ranks = group.join(policy.device)
    with ranks.losses_named("the start"):
        share_threads(run, ranks)
        of_policy = {
            name: getattr(policy, name) for name in ("compute_dtype", "weights", "head_dtype", "attention")
        }  # what auto has come to here
        ranks.broadcast((run, mode, str(folder), policy.model.config, policy.tokenizer, of_policy))
        send_weights(ranks, policy)
        frozen = None if reference is None else reference.policy
        learner, scores = assembled(ranks, run, mode, policy, frozen, leads=True)
        learner.ended = lambda: group.close(at_once=bool(ranks.broken))
        policy.deal = lambda scorer, pairs, wanted: scores.of("policy", scorer, pairs, wanted)
        if frozen is not None:
            frozen.deal = lambda scorer, pairs, wanted: scores.of("reference", scorer, pairs, wanted)
        learner.restore([{} for _ in learner.parameters])
    return learner


def follow(ranks: Ranks) -> dict[str, Order]:
    """What this rank, any but the first, does at the word of rank 0, by name."""
    run, mode, folder, config, tokenizer, of_policy = ranks.broadcast()
    os.environ[STACKS_VARIABLE] = str(Path(folder).absolute() / STACKS)
    listen()
    with alone(), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="sdpa"
        )
    model.tie_weights()
    receive_weights(ranks, model)
    policy = Policy(model, tokenizer, device=ranks.device, **of_policy)
    choose_threads(run, policy)
    share_threads(run, ranks)
    choose_trained(run.model, policy, run.seed)
    frozen = frozen_copy(policy) if getattr(run, "kl_placement", "none") != "none" else None
    learner, scores = assembled(ranks, run, mode, policy, frozen)
    orders = learner.orders() | {"score": scores.score}
    lends = run.rollout.engine == "vllm" and run.rollout.sleep and run.rollout.shares_gpu
    return {name: lending(do) for name, do in orders.items()} if lends and ranks.device.type == "cuda" else orders


def lending(order: Order) -> Order:
    """Does it, then gives back what torch has kept for itself: an engine that slept meanwhile wakes on this GPU."""

    def then_give_back(*arguments: Any) -> None:
        order(*arguments)
        torch.cuda.empty_cache()

    return then_give_back


def assembled(
    ranks: Ranks, run: TrainingConfig, mode: str, policy: Policy, reference: Policy | None, leads: bool = False
) -> tuple[RankedLearner, DealtScores]:
    """The learner and the scorer of a rank. `leads`: of rank 0, whose policy stays whole."""
    settings = settings_of(run)
    policies = {"policy": policy} | ({} if reference is None else {"reference": reference})
    agree(ranks, policies.values())
    if mode == "replicate":
        return RankedLearner(ranks, policy, **settings), DealtScores(ranks, policies, in_step=False)
    mesh = mesh_of(ranks)
    whole = in_main_memory(policy)
    own = ShardedPolicy.of(apart(whole) if leads else whole, mesh)
    policies = {
        name: own if one is policy else ShardedPolicy.of(in_main_memory(one), mesh) for name, one in policies.items()
    }
    learner = ShardedLearner(ranks, policy if leads else None, own, **settings)
    return learner, DealtScores(ranks, policies, in_step=True)


def share_threads(run: TrainingConfig, ranks: Ranks) -> None:
    """Ranks that compute on one processor divide its threads, unless the settings say how many."""
    if run.threads is None and ranks.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.world))


def in_main_memory(policy: Policy) -> Policy:
    """The policy, its model moved into main memory, from where sharding brings each rank its part, layer by layer."""
    policy.model.to("cpu")  # type: ignore[arg-type]  # the wrapper hides torch's signature
    if policy.device.type == "cuda":
        torch.cuda.empty_cache()
    return policy


def apart(policy: Policy) -> Policy:
    """The same policy with a model of its own."""
    found = copy.copy(policy)
    found.model = copy.deepcopy(policy.model)
    return found


def agree(ranks: Ranks, policies: Iterable[Policy]) -> None:
    """Let all ranks lay out prompts alike: the list of micro-batches that they deal depends on it."""
    for policy in policies:
        if policy.shares_prompts and not all(ranks.gathered(policy.shares_prompts)):
            policy.stop_sharing("another rank cannot share them")
        elif not policy.shares_prompts:
            ranks.gathered(False)


def send_weights(ranks: Ranks, policy: Policy) -> None:
    """The policy's weights, adapters added in, to all ranks."""
    weights = list(policy.named_weights())
    ranks.broadcast([name for name, _ in weights])
    for _, weight in weights:
        ranks.spread([weight.detach().float().to(ranks.device)])


def receive_weights(ranks: Ranks, model: PreTrainedModel) -> None:
    """Fill the model with the weights that rank 0 sends."""
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name in ranks.broadcast():
        taken = torch.empty(own[name].shape, dtype=torch.float32, device=ranks.device)
        ranks.spread([taken])
        with torch.no_grad():
            own[name].copy_(taken)
