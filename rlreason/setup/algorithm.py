"""The algorithm of a run, from its settings: which sequences are learned from, and with what advantages."""

from typing import Any

from rlreason.algorithms.base import Algorithm
from rlreason.algorithms.expert_iteration import ExpertIteration
from rlreason.algorithms.grpo import GRPO
from rlreason.algorithms.problem_sampler import ProblemSampler
from rlreason.algorithms.sft import SFT
from rlreason.config.grpo import GRPOConfig
from rlreason.config.sft import EIConfig, SFTConfig
from rlreason.config.training import OnlineConfig, TrainingConfig
from rlreason.errors import ConfigError
from rlreason.model.policy import Policy
from rlreason.model.scoring import LogProbScorer
from rlreason.records.console import Console
from rlreason.setup.components import Components, scorer
from rlreason.setup.traces import make_traces


def make_algorithm(run: TrainingConfig, components: Components, console: Console) -> Algorithm:
    """The one place that asks which algorithm a run is: here a new one finds its place."""
    if why := run.too_few(len(components.train_problems)):  # every batch would silently be smaller
        raise ConfigError(why)
    match run:
        case SFTConfig():
            return make_sft(run, components, console)
        case EIConfig():
            return ExpertIteration(
                **sampled_shares(run, components),
                epochs=run.sft_epochs,
                max_per_question=run.max_per_question,
                deduplicate=run.deduplicate,
                restart=run.restart,
            )
        case GRPOConfig():
            return make_grpo(run, components)
    raise TypeError(f"{type(run).__name__} is the settings of no algorithm that trains")


def make_sft(run: SFTConfig, components: Components, console: Console) -> SFT:
    """SFT on the traces of the training data, which decide how many steps `epochs` are."""
    traces, notices = make_traces(run, components.policy, components.train_problems, components.rollouts.prompt_ids)
    for notice in notices:
        console.say(f"! {notice}")
    sft = SFT(traces, run.train_batch_size, run.seed, run.n_steps, run.epochs)
    if bad := run.schedule_problems(sft.n_steps):  # which `epochs` of the traces have decided
        raise ConfigError("\n".join(bad))
    return sft


def make_grpo(run: GRPOConfig, components: Components) -> GRPO:
    """GRPO, with a reference model where a KL term asks for one."""
    divisor = ratio_divisor(run)
    return GRPO(
        **sampled_shares(run, components),
        epochs=run.epochs_per_rollout,
        objective=run.objective(),
        reference=make_reference(run, components.policy),
        # The policy that sampled is scored where it must be. Sampled ahead, it cannot be: the weights are moving.
        behaviour=components.scorer if run.kl_placement == "reward" or divisor == "measured" else None,
        old_log_probs=divisor,
    )


def sampled_shares(run: OnlineConfig, components: Components) -> dict[str, Any]:
    """What every algorithm takes that learns from samples of its own."""
    return {
        "rollouts": components.rollouts,
        "questions": ProblemSampler(components.train_problems, run.seed, run.skip_solved),
        "sampling": components.sampling,
        "n_steps": run.n_steps,
        "per_step": run.questions,
        "group_size": run.group_size,
        "batch_size": run.train_batch_size,
    }


def ratio_divisor(run: GRPOConfig) -> str:
    """Where the log-probabilities that the loss's ratio divides by come from.

    Samples drawn ahead are of weights one update older, whose log-probabilities only the engine has.
    """
    if run.old_from_engine:
        return "engine"
    return "measured" if run.updates_per_rollout > 1 and not run.rollout.async_level else "none"


def make_reference(run: GRPOConfig, policy: Policy) -> LogProbScorer | None:
    """A frozen copy of the policy as it is now, only where a KL term asks for it: it costs the model's memory again."""
    return None if run.kl_placement == "none" else scorer(run, run, frozen_copy(policy))


def frozen_copy(policy: Policy) -> Policy:
    """The policy as it is now, apart from it and never trained; what was checked of the one holds for the other."""
    found = policy.apart()
    found.model.requires_grad_(False)
    return found
