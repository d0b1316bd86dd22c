"""The algorithm of a run, from its settings: which sequences are learned from, and with what credit."""

import copy
from collections.abc import Sequence
from typing import Any

from rlreason.algorithms.base import Algorithm
from rlreason.algorithms.expert_iteration import ExpertIteration
from rlreason.algorithms.grpo import GRPO
from rlreason.algorithms.problem_sampler import ProblemSampler
from rlreason.algorithms.sft import SFT
from rlreason.config.grpo import GRPOConfig
from rlreason.config.run import RunConfig, TrainingConfig
from rlreason.config.sft import EIConfig, SFTConfig
from rlreason.errors import ConfigError
from rlreason.model.policy import Policy
from rlreason.model.scoring import LogProbScorer
from rlreason.records.console import Console
from rlreason.setup.components import Components
from rlreason.setup.learner import credit_rule
from rlreason.setup.traces import make_traces
from rlreason.types import Problem


def make_algorithm(run: TrainingConfig, components: Components, console: Console) -> Algorithm:
    policy, rollouts, train = components.policy, components.rollouts, components.train_problems
    check_amount(run, train)
    if isinstance(run, SFTConfig):
        traces, notices = make_traces(run, policy, train, rollouts.prompt_ids)
        for notice in notices:
            console.say(f"! {notice}")
        imitation = SFT(traces, run.train_batch_size, run.seed, run.n_steps, run.epochs)
        check_schedule(run, imitation.n_steps)
        return imitation
    assert isinstance(run, EIConfig | GRPOConfig)
    shared: dict[str, Any] = {
        "rollouts": rollouts,
        "questions": ProblemSampler(train, run.seed, run.skip_solved),
        "sampling": components.sampling,
        "n_steps": run.n_steps,
        "per_step": run.questions,
        "group_size": run.group_size,
        "batch_size": run.train_batch_size,
    }
    if isinstance(run, EIConfig):
        return ExpertIteration(
            **shared,
            epochs=run.sft_epochs,
            max_per_question=run.max_per_question,
            deduplicate=run.deduplicate,
            restart=run.restart,
        )
    if run.kl_placement == "reward":
        shared["kl_estimator"] = run.kl_estimator
    return GRPO(
        **shared,
        epochs=run.epochs_per_rollout,
        rule=credit_rule(run),
        refill_rounds=run.refill_rounds,
        reference=make_reference(run, policy),
        behaviour=components.scorer if scored_before_learning(run) else None,
        old_log_probs=ratio_divisor(run),
    )


def ratio_divisor(run: GRPOConfig) -> str:
    """What the loss's ratio divides by. Sampled ahead, by weights one hand-over old, only the engine knows it."""
    if run.old_from_engine:
        return "engine"
    return "measured" if run.updates_per_rollout > 1 and not run.rollout.async_steps else "none"


def scored_before_learning(run: GRPOConfig) -> bool:
    """Whether the policy that sampled must be scored. Sampled ahead, that cannot be: the weights are moving."""
    return run.kl_placement == "reward" or ratio_divisor(run) == "measured"


def make_reference(run: GRPOConfig, policy: Policy) -> LogProbScorer | None:
    """A frozen copy of the policy as it is now, only where a KL term asks for it: it costs the model's memory again."""
    if run.kl_placement == "none":
        return None
    model = copy.deepcopy(policy.model).requires_grad_(False)
    frozen = Policy(model, policy.tokenizer, policy.compute_dtype, policy.device, policy.weights, policy.attention)
    return LogProbScorer(frozen, run.sampling.temperature, run.micro_batch_tokens)


def check_schedule(run: TrainingConfig, n_steps: int) -> None:
    """The rules of the learning rate, once the traces have decided how many steps `epochs` are."""
    if bad := run.schedule_problems(n_steps):
        raise ConfigError("\n".join(bad))


def check_amount(run: RunConfig, train: Sequence[Problem]) -> None:
    """A step asks different questions; with fewer than it needs, every batch would silently be smaller."""
    if isinstance(run, GRPOConfig) and len(train) < run.questions:
        raise ConfigError(
            f"rollout_batch_size={run.rollout_batch_size} with group_size={run.group_size} asks {run.questions} "
            f"different questions a step, and there are {len(train)}: lower rollout_batch_size, or give more data"
        )
    if isinstance(run, EIConfig) and len(train) < run.questions:
        raise ConfigError(
            f"question_batch_size={run.question_batch_size} asks for more different questions a step than the "
            f"{len(train)} there are: lower it, or give more data"
        )
