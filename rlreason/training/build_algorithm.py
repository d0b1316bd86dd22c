"""Build a run's algorithm from its settings, the traces of SFT, and the settings of the learner."""

from collections.abc import Callable, Sequence
from typing import Any

from rlreason.config.algorithms import EIConfig, GRPOConfig, SFTConfig
from rlreason.config.run import RunConfig
from rlreason.config.training import OnlineConfig, TrainingConfig
from rlreason.data.prompts import trace_text
from rlreason.data.sampler import ProblemSampler
from rlreason.errors import ConfigError
from rlreason.model.chat import end_of_turn
from rlreason.model.policy import Policy
from rlreason.records.console import Console
from rlreason.training.algorithms.base import Algorithm
from rlreason.training.algorithms.grpo import GRPO
from rlreason.training.algorithms.sft import SFT, ExpertIteration, sft_sample
from rlreason.training.build import Components, make_scorer
from rlreason.training.fits import room_of
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
            return make_sft(run, components, console)
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


def make_sft(run: SFTConfig, components: Components, console: Console) -> SFT:
    """Build SFT on the traces of the training data, whose number decides how many steps `epochs` are."""
    traces, notices = make_traces(run, components.policy, components.train_problems, components.rollouts.prompt_ids)
    for notice in notices:
        console.say(f"! {notice}")
    sft = SFT(traces, run.train_batch_size, run.seed, run.n_steps, run.epochs)
    if bad := run.schedule_problems(sft.n_steps):  # which `epochs` of the traces have decided
        raise ConfigError("\n".join(bad))
    return sft


def make_grpo(run: GRPOConfig, components: Components) -> GRPO:
    """Build GRPO, with a frozen copy of the current policy as reference model if a KL term needs it."""
    divisor = old_log_probs_from(run)
    return GRPO(
        **online_arguments(run, components),
        epochs=run.epochs_per_rollout,
        objective=run.objective(),
        reference=None if run.kl_placement == "none" else make_scorer(run, run, frozen_copy(components.policy)),
        # Score the sampling policy where needed; not for samples drawn ahead, because the weights are moving by then.
        behaviour=components.scorer if run.kl_placement == "reward" or divisor == "measured" else None,
        old_log_probs=divisor,
    )


def online_arguments(run: OnlineConfig, components: Components) -> dict[str, Any]:
    """The arguments common to all algorithms that learn from their own samples."""
    return {
        "rollouts": components.rollouts,
        "questions": ProblemSampler(components.train_problems, run.seed, run.skip_solved),
        "sampling": components.sampling,
        "n_steps": run.n_steps,
        "per_step": run.questions,
        "group_size": run.group_size,
        "batch_size": run.train_batch_size,
    }


def old_log_probs_from(run: GRPOConfig) -> str:
    """Where the old log-probabilities of the loss's ratio come from: engine, measured or none.

    Samples drawn ahead come from weights one update older, whose log-probabilities only the engine has.
    """
    if run.old_from_engine:
        return "engine"
    return "measured" if run.updates_per_rollout > 1 and not run.rollout.async_level else "none"


def frozen_copy(policy: Policy) -> Policy:
    """Copy the policy, never to be trained; what was checked of the original holds for the copy."""
    found = policy.copy()
    found.model.requires_grad_(False)
    return found


def learner_settings(run: TrainingConfig) -> dict[str, Any]:
    """The learner's arguments besides its policy."""
    return {
        "objective": run.objective(),
        "optimization": run,
        "temperature": run.learning_temperature,
        "micro_batch_tokens": run.micro_batch_tokens,
        "can_restart": run.restarts,
    }
