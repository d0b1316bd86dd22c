"""Build a run's algorithm and its learner from the settings, on one rank or several."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from rlreason.config.algorithms import EIConfig, GRPOConfig, SFTConfig
from rlreason.config.run import RunConfig
from rlreason.config.training import OnlineConfig, TrainingConfig
from rlreason.data.prompts import ProblemSampler, trace_text
from rlreason.errors import ConfigError
from rlreason.model.attention import NAMES
from rlreason.model.chat import end_of_turn
from rlreason.model.loading import from_config, one_layer_of, skeleton_of, with_one_layer
from rlreason.model.parameters import free_cached_memory, merged_weights
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.model.shapes import shape_from
from rlreason.records.console import Console
from rlreason.records.files import RANKS_LOG
from rlreason.records.reader import write_status
from rlreason.runtime.machine import place_of, world_of
from rlreason.training.algorithms import GRPO, SFT, Algorithm, ExpertIteration, sft_sample
from rlreason.training.build import Components, make_scorer, mode_of, room_of, set_threads, set_trained
from rlreason.training.distributed import RankedLearner, RankedScorer, ShardedLearner, ShardedPolicy, fill, mesh_of
from rlreason.training.learner import Learner
from rlreason.training.ranks import Group, Ranks
from rlreason.types import Problem, Sample


def make_traces(
    run: RunConfig, policy: Policy, problems: Sequence[Problem], prompt_ids: Callable[[Problem], list[int]]
) -> tuple[list[Sample], list[str]]:
    """Return (samples with advantage 1, notices); traces too long are refused, or left out (data.bad_rows)."""
    room, key = room_of(run, policy.max_context)
    end, traces, too_long = end_of_turn(run.prompt, policy.tokenizer), [], []
    for problem in problems:
        text = trace_text(problem, run.prompt.trace)
        ids = policy.encode_response(text, end)
        sample = sft_sample(prompt_ids(problem), ids, text, problem.id)
        if len(sample.response.prompt_ids) + len(ids) > room:
            too_long.append((problem.id, len(sample.response.prompt_ids) + len(ids)))
        else:
            traces.append(sample)
    if not too_long:
        return traces, []
    named = ", ".join(f"{name} ({size} tokens)" for name, size in too_long[:3]) + (" ..." if len(too_long) > 3 else "")
    problem_text = f"{len(too_long)} of {len(problems)} traces are longer than {key}={room} with their prompts: {named}"
    if run.data.bad_rows != "skip" or not traces:
        cure = "set data.bad_rows=skip to leave them out" if traces else "shorten them"
        raise ConfigError(f"{problem_text}; raise micro_batch_tokens as far as the model allows, or {cure}")
    return traces, [f"left out: {problem_text}"]


def make_algorithm(run: TrainingConfig, components: Components, console: Console) -> Algorithm:
    """Build the run's algorithm; the one place that knows which settings make which algorithm."""
    if why := run.too_few(len(components.train_problems)):  # every batch would silently be smaller
        raise ConfigError(why)
    match run:
        case SFTConfig():
            prompt_ids = components.rollouts.prompt_ids
            traces, notices = make_traces(run, components.policy, components.train_problems, prompt_ids)
            for notice in notices:
                console.say(f"! {notice}")
            sft = SFT(traces, run.train_batch_size, run.seed, run.n_steps, run.epochs)
            if bad := run.schedule_problems(sft.n_steps):  # the number of traces has decided what `epochs` means
                raise ConfigError("\n".join(bad))
            return sft
        case EIConfig():
            return ExpertIteration(
                **online_arguments(run, components),
                epochs=run.sft_epochs,
                max_per_question=run.max_per_question,
                deduplicate=run.deduplicate,
                restart=run.restart,
            )
        case GRPOConfig():
            return make_grpo(run, components)
    raise TypeError(f"{type(run).__name__} is the settings of no algorithm that trains")


def make_grpo(run: GRPOConfig, components: Components) -> GRPO:
    """Build GRPO, with a frozen copy of the current policy as reference model if a KL term needs it."""
    source = "measured" if run.updates_per_rollout > 1 and not run.rollout.async_level else "none"
    if run.old_from_engine:  # samples drawn ahead come from weights one update older, whose numbers only it has
        source = "engine"
    return GRPO(
        **online_arguments(run, components),
        epochs=run.epochs_per_rollout,
        objective=run.objective(),
        reference=None if run.kl_placement == "none" else make_scorer(run, run, frozen_copy(components.policy)),
        # Score the sampling policy where needed; not for samples drawn ahead, because the weights are moving by then.
        behaviour=components.scorer if run.kl_placement == "reward" or source == "measured" else None,
        old_log_probs=source,
    )


def online_arguments(run: OnlineConfig, components: Components) -> dict[str, Any]:
    """Return the arguments common to all algorithms that learn from their own samples."""
    return {
        "rollouts": components.rollouts,
        "questions": ProblemSampler(components.train_problems, run.seed, run.skip_solved),
        "sampling": components.sampling,
        "n_steps": run.n_steps,
        "per_step": run.questions,
        "group_size": run.group_size,
        "batch_size": run.train_batch_size,
    }


def frozen_copy(policy: Policy) -> Policy:
    """Copy the policy, never to be trained; what was checked of the original holds for the copy."""
    frozen = policy.copy()
    frozen.model.requires_grad_(False)
    return frozen


def learner_settings(run: TrainingConfig) -> dict[str, Any]:
    """Return the learner's arguments besides its policy."""
    return {
        "objective": run.objective(),
        "optimization": run,
        "temperature": run.learning_temperature,
        "micro_batch_tokens": run.micro_batch_tokens,
        "can_restart": run.restarts,
    }


def make_learner(run: TrainingConfig, policy: Policy, folder: Path | None = None, algorithm: Any = None) -> Learner:
    """Build the learner from the run's objective and optimisation settings.

    With `folder` and gpus > 1 it trains on several ranks, which then also compute the `algorithm`'s reference scores;
    without `folder` it stays in this process.
    """
    visible = torch.cuda.device_count()
    if folder is not None and (world := world_of(run.gpus, place_of(), visible)) > 1:
        return make_ranked_learner(run, policy, getattr(algorithm, "reference", None), world, folder)
    engines, placement = (run.rollout.gpus, run.rollout.placement) if run.rollout.engine == "vllm" else (1, "auto")
    if idle := idle_gpus(visible, engines, placement):
        policy.remarks.append(f"{idle} more here (gpus=N trains on several, docs/scale.md)")
    return Learner(policy, **learner_settings(run))


def idle_gpus(visible: int, engines: int, placement: str) -> str:
    """Describe the visible GPUs that a run on one rank leaves idle; "" if there are none.

    >>> idle_gpus(8, 1, "auto"), idle_gpus(2, 1, "second_gpu"), idle_gpus(2, 1, "colocate")
    ('7 GPUs', '', '1 GPU')
    """
    count = visible - (1 + engines if placement == "second_gpu" else max(1, engines))
    return f"{count} GPU{'s' * (count > 1)}" if count > 0 else ""


RankFunction = Callable[..., Any]


def make_ranked_learner(
    run: TrainingConfig, policy: Policy, reference: LogProbScorer | None, world: int, folder: Path
) -> Learner:
    """Build rank 0's learner: start the other ranks, send them the model, and let them wait for its orders.

    In the mode `shard`, `policy` becomes a whole copy in main memory, unless it was loaded there.
    """
    mode, why = mode_of(run, shape_from(policy.model.config.get_text_config().to_dict()), policy.device, world)
    mode = "shard" if policy.in_main_memory else mode  # as decided before loading
    processes = "GPUs" if policy.device.type == "cuda" else "processes"
    share = "a part of the model" if mode == "shard" else "the whole model"
    policy.remarks.append(f"{world} {processes} train, each has {share} (parallel={mode}: {why})")
    group = Group(world, run.waits.run_s, folder / RANKS_LOG, partial(write_status, folder, "failed"))
    try:
        return _make_ranked_learner(run, policy, reference, group, mode)
    except BaseException:
        group.close(at_once=True)
        raise


def _make_ranked_learner(
    run: TrainingConfig, policy: Policy, reference: LogProbScorer | None, group: Group, mode: str
) -> Learner:
    ranks = group.join(policy.device)
    with ranks.naming_lost_ranks("the start"):
        share_threads(run, ranks)
        names = ("compute_dtype", "weights", "head_dtype", "attention")
        resolved = {name: getattr(policy, name) for name in names}  # what `auto` has become here
        ranks.broadcast((run, mode, policy.model.config, policy.tokenizer, resolved))
        whole = {"policy": policy} | ({} if reference is None else {"reference": reference.policy})
        if mode == "replicate":
            send_weights(ranks, policy.model)
            agree_on_sharing(ranks, whole.values())
            policies = whole
        else:
            for copied in whole.values():
                copied.in_main_memory = True
                copied.model.to("cpu")  # type: ignore[arg-type]  # the wrapper hides torch's signature
                free_cached_memory(copied.device)
            send_weights(ranks, with_one_layer(policy.model))
            agree_on_sharing(ranks, whole.values())
            policies = trained_policies(run, without_weights(policy, policy.model.config))
        learner, scores = learner_and_scores(run, ranks, mode, policies, whole)
        learner.ended = lambda: group.close(at_once=bool(ranks.broken))
        for name, scored in whole.items():
            scored.deal = partial(scores.of, name)
        learner.restore([{} for _ in learner.parameters])
    return learner


def follow(ranks: Ranks) -> dict[str, RankFunction]:
    """Set up a rank other than 0 and return the functions that rank 0 may call on it, by name."""
    run, mode, config, tokenizer, resolved = ranks.broadcast()
    model = from_config(config if mode == "replicate" else one_layer_of(config))
    receive_weights(ranks, model)
    policy = Policy(model, tokenizer, device=ranks.device, **resolved)  # checks that this device computes alike
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
    if not engine_sleeps or ranks.device.type != "cuda":
        return orders

    def freeing(order: RankFunction) -> RankFunction:
        def call(*arguments: Any) -> None:
            order(*arguments)
            free_cached_memory(ranks.device)  # for a sleeping engine that wakes up on this GPU

        return call

    return {name: freeing(order) for name, order in orders.items()}


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
    empty = copy.copy(policy)
    empty.model, empty.in_main_memory, empty.remarks = skeleton_of(config), False, []
    empty.model.set_attn_implementation(NAMES[empty.attention])
    return empty


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
        weight = torch.empty(own[name].shape, dtype=torch.float32, device=ranks.device)
        ranks.broadcast_tensors([weight])
        with torch.no_grad():
            own[name].copy_(weight)
