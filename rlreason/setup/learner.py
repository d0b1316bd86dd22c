"""The learner and the credit rule of a run, from its objective's settings."""

from functools import partial
from typing import Any

from rlreason.config.grpo import GRPOConfig
from rlreason.config.training import TrainingConfig
from rlreason.learner import Learner, TokenObjective
from rlreason.model.policy import Policy
from rlreason.objectives.credit import CreditRule


def credit_rule(run: GRPOConfig) -> CreditRule:
    """How rewards become advantages; numbers of parts that the objective leaves out are not read."""
    numbers: dict[str, Any] = {}
    if run.std_norm.kind != "none":
        numbers["advantage_eps"] = run.advantage_eps
    if run.overlong == "penalty":
        longest, cache = run.sampling.max_tokens, run.overlong_cache
        numbers |= {"max_length": longest, "cache_length": max(1, longest // 5) if cache is None else cache}
    if run.kl_placement == "reward":
        numbers["kl_coef"] = run.kl_coef
    return CreditRule(
        baseline=run.baseline.kind,
        std_norm=run.std_norm.kind,
        zero_variance=run.zero_variance,
        overlong=run.overlong,
        **numbers,
    )


def token_objective(run: TrainingConfig) -> TokenObjective:
    """What is averaged, and over what. SFT and expert iteration: -A log p with A = 1, so the GRPO terms are off."""
    given = run.length_norm.divisor
    constant = float(run.sampling.max_tokens) if given is None else given
    shared = partial(TokenObjective, length_norm=run.length_norm.kind, constant=constant)
    if not isinstance(run, GRPOConfig):
        return shared()
    terms: dict[str, Any] = {}
    if run.kl_placement != "none":
        terms["kl_estimator"] = run.kl_estimator  # also of what is recorded where the penalty stands in the reward
    if run.kl_placement == "loss":
        terms["kl_coef"] = run.kl_coef
    if not run.old_from_engine and run.mismatch != "none":
        terms |= {"mismatch": run.mismatch, "mismatch_cap": run.mismatch_cap}
    return shared(loss_type=run.loss.loss_type, numbers=run.loss.numbers(), entropy_coef=run.entropy_coef, **terms)


def make_learner(run: TrainingConfig, policy: Policy) -> Learner:
    return Learner(
        policy,
        token_objective(run),
        run,
        temperature=run.learning_temperature,
        micro_batch_tokens=run.micro_batch_tokens,
        can_restart=run.restarts,
    )
