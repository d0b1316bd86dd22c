"""Build training on several ranks from a run's settings: rank 0's learner, and what the other ranks do."""

import copy
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlreason.config.training import TrainingConfig
from rlreason.model.attention import NAMES
from rlreason.model.devices import free_cached_memory
from rlreason.model.loading import from_config, one_layer_of, skeleton_of, with_one_layer
from rlreason.model.parameters import merged_weights
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.model.shapes import shape_from
from rlreason.records.files import RANKS_LOG, STACKS
from rlreason.records.status import write_status
from rlreason.runtime.hang import listen
from rlreason.runtime.machine import STACKS_VARIABLE
from rlreason.training.build_algorithm import frozen_copy, learner_settings
from rlreason.training.distributed import RankedLearner, RankedScorer
from rlreason.training.learner import Learner
from rlreason.training.parts import mode_of, set_threads, set_trained
from rlreason.training.ranks import Group, Ranks
from rlreason.training.sharding import ShardedLearner, ShardedPolicy, fill, mesh_of

RankFunction = Callable[..., Any]


def make_ranked_learner(
    run: TrainingConfig, policy: Policy, reference: LogProbScorer | None, world: int, folder: Path
) -> Learner:
    """Build rank 0's learner: start the other ranks, send them the model, and let them wait for its orders.

    In the mode `shard`, `policy` becomes a whole copy in main memory, unless it was loaded there.
    """
    mode, why = mode_of(run, shape_from(policy.model.config.get_text_config().to_dict()), policy.device, world)
    mode = "shard" if policy.in_main_memory else mode  # as decided before loading
    place = "GPUs" if policy.device.type == "cuda" else "processes"
    has = {"replicate": "each has the whole model", "shard": "each has a part of the model"}[mode]
    policy.remarks.append(f"{world} {place} train, {has} (parallel={mode}: {why})")
    group = Group(world, run.waits.run_s, folder / RANKS_LOG, partial(write_status, folder, "failed"))
    try:
        return _make_ranked_learner(run, policy, reference, group, mode, folder)
    except BaseException:
        group.close(at_once=True)
        raise


def _make_ranked_learner(
    run: TrainingConfig, policy: Policy, reference: LogProbScorer | None, group: Group, mode: str, folder: Path
) -> Learner:
    ranks = group.join(policy.device)
    with ranks.naming_lost_ranks("the start"):
        share_threads(run, ranks)
        of_policy = {
            name: getattr(policy, name) for name in ("compute_dtype", "weights", "head_dtype", "attention")
        }  # what `auto` resolved to
        ranks.broadcast((run, mode, str(folder), policy.model.config, policy.tokenizer, of_policy))
        whole = {"policy": policy} | ({} if reference is None else {"reference": reference.policy})
        if mode == "replicate":
            send_weights(ranks, policy.model)
            agree_on_sharing(ranks, whole.values())
            policies = whole
        else:
            for one in whole.values():
                one.in_main_memory = True
                one.model.to("cpu")  # type: ignore[arg-type]  # the wrapper hides torch's signature
                free_cached_memory(one.device)
            send_weights(ranks, with_one_layer(policy.model))
            agree_on_sharing(ranks, whole.values())
            policies = trained_policies(run, without_weights(policy, policy.model.config))
        learner, scores = learner_and_scores(run, ranks, mode, policies, whole)
        learner.ended = lambda: group.close(at_once=bool(ranks.broken))
        for name, one in whole.items():
            one.deal = partial(scores.of, name)
        learner.restore([{} for _ in learner.parameters])
    return learner


def follow(ranks: Ranks) -> dict[str, RankFunction]:
    """Set up a rank other than 0 and return the functions that rank 0 may call on it, by name."""
    run, mode, folder, config, tokenizer, of_policy = ranks.broadcast()
    os.environ[STACKS_VARIABLE] = str(Path(folder).absolute() / STACKS)
    listen()
    model = from_config(config if mode == "replicate" else one_layer_of(config))
    receive_weights(ranks, model)
    policy = Policy(model, tokenizer, device=ranks.device, **of_policy)  # checks that this device computes alike
    if mode == "shard":
        policy = without_weights(policy, config)
        del model  # else its single layer stays on the GPU
        free_cached_memory(policy.device)
    set_threads(run, policy)
    share_threads(run, ranks)
    policies = trained_policies(run, policy)
    agree_on_sharing(ranks, policies.values())
    learner, scores = learner_and_scores(run, ranks, mode, policies)
    orders = learner.orders() | {"score": scores.score}
    engine_sleeps = run.rollout.engine == "vllm" and run.rollout.sleep and run.rollout.shares_gpu
    lends = engine_sleeps and ranks.device.type == "cuda"
    return {name: freeing_memory(do) for name, do in orders.items()} if lends else orders


def freeing_memory(order: RankFunction) -> RankFunction:
    """Wrap an order to free torch's cached memory after it: a sleeping engine wakes up on this GPU."""

    def then_give_back(*arguments: Any) -> None:
        order(*arguments)
        free_cached_memory(torch.device("cuda"))

    return then_give_back


def learner_and_scores(
    run: TrainingConfig,
    ranks: Ranks,
    mode: str,
    policies: Mapping[str, Policy],
    whole: Mapping[str, Policy] = MappingProxyType({}),
) -> tuple[RankedLearner, RankedScorer]:
    """Build a rank's learner and scorer from its policies by name; `whole`: the complete ones, on rank 0."""
    settings = learner_settings(run)
    if mode == "replicate":
        return RankedLearner(ranks, policies["policy"], **settings), RankedScorer(ranks, policies, in_step=False)
    mesh = mesh_of(ranks)
    parts = {name: ShardedPolicy.of(policy, mesh) for name, policy in policies.items()}
    for name, part in parts.items():
        fill(ranks, part, whole.get(name))
    learner = ShardedLearner(ranks, whole.get("policy"), parts["policy"], **settings)
    return learner, RankedScorer(ranks, parts, in_step=True)


def trained_policies(run: TrainingConfig, policy: Policy) -> dict[str, Policy]:
    """Return the policy ready for training, and a frozen copy as the reference model if a KL term needs it."""
    set_trained(run.model, policy, run.seed)
    if getattr(run, "kl_placement", "none") == "none":
        return {"policy": policy}
    return {"policy": policy, "reference": frozen_copy(policy)}


def without_weights(policy: Policy, config: PretrainedConfig) -> Policy:
    """Copy the policy with a model that has no memory yet, whose weights a rank gets by `fill`."""
    found = copy.copy(policy)
    found.model, found.in_main_memory, found.remarks = skeleton_of(config), False, []
    found.model.set_attn_implementation(NAMES[found.attention])
    return found


def share_threads(run: TrainingConfig, ranks: Ranks) -> None:
    """Divide the processor's threads among the ranks, unless the settings fix them."""
    if run.threads is None and ranks.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks.world))


def agree_on_sharing(ranks: Ranks, policies: Iterable[Policy]) -> None:
    """Make all ranks lay out prompts alike, since the micro-batches they share depend on it."""
    for policy in policies:
        if policy.shares_prompts and not all(ranks.all_gather(policy.shares_prompts)):
            policy.stop_sharing("another rank cannot share them")
        elif not policy.shares_prompts:
            ranks.all_gather(False)


def send_weights(ranks: Ranks, model: PreTrainedModel) -> None:
    """Send the model's weights, with adapters merged, to all ranks."""
    weights = list(merged_weights(model))
    ranks.broadcast([name for name, _ in weights])
    for _, weight in weights:
        ranks.broadcast_tensors([weight.detach().float().to(ranks.device)])


def receive_weights(ranks: Ranks, model: PreTrainedModel) -> None:
    """Fill the model with the weights from rank 0."""
    own: dict[str, Tensor] = model.state_dict(keep_vars=True)
    for name in ranks.broadcast():
        taken = torch.empty(own[name].shape, dtype=torch.float32, device=ranks.device)
        ranks.broadcast_tensors([taken])
        with torch.no_grad():
            own[name].copy_(taken)
