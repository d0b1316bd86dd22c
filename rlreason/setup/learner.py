"""The learner and the credit rule of a run, from its objective's settings."""

from rlreason.config.grpo import GRPO
from rlreason.learner import Learner, TokenObjective
from rlreason.objectives.credit import CreditRule
from rlreason.policy import Policy


def credit_rule(run: GRPO) -> CreditRule:
    longest = run.sampling.max_tokens
    return CreditRule(
        baseline=run.baseline.kind,
        std_norm=run.std_norm.kind,
        advantage_eps=run.advantage_eps,
        zero_variance=run.zero_variance,
        overlong=run.overlong,
        max_length=longest,
        cache_length=run.overlong_cache or max(1, longest // 5),
        kl_coef=run.kl_coef if run.kl_placement == "reward" else 0.0,
    )


def make_learner(run: GRPO, policy: Policy) -> Learner:
    objective = TokenObjective(
        loss_type=run.loss.loss_type,
        numbers=run.loss.numbers(),
        length_norm=run.length_norm.kind,
        constant=run.length_norm.constant or float(run.sampling.max_tokens),
        kl_estimator=run.kl_estimator,
        kl_coef=run.kl_coef if run.kl_placement == "loss" else 0.0,
        entropy_coef=run.entropy_coef,
        mismatch=run.mismatch,
        mismatch_cap=run.mismatch_cap,
    )
    return Learner(
        policy,
        objective,
        run.learning_rate,
        temperature=run.sampling.temperature,
        weight_decay=run.weight_decay,
        betas=(run.adam_betas[0], run.adam_betas[1]),
        max_grad_norm=run.max_grad_norm,
        micro_batch_tokens=run.micro_batch_tokens,
        micro_batch_size=run.sequences_per_micro_batch(),
    )
