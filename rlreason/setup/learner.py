"""The learner of a run."""

from rlreason.config.grpo import GRPOConfig
from rlreason.config.run import TrainingConfig
from rlreason.config.sft import EIConfig
from rlreason.learner import Learner
from rlreason.model.policy import Policy


def make_learner(run: TrainingConfig, policy: Policy) -> Learner:
    """The learner that the run's objective and its settings of optimisation ask for."""
    return Learner(
        policy,
        run.objective(),
        run.learning_rate,
        temperature=learning_temperature(run),
        optimizer=run.optimizer,
        weight_decay=run.weight_decay,
        betas=(run.adam_betas[0], run.adam_betas[1]),
        max_grad_norm=run.max_grad_norm,
        micro_batch_tokens=run.micro_batch_tokens,
        micro_batch_size=run.sequences_per_micro_batch(),
        can_restart=isinstance(run, EIConfig) and run.restart,
    )


def learning_temperature(run: TrainingConfig) -> float:
    """Of the distribution that is learned: the sampled one where samples are compared, the plain one in SFT."""
    return run.sampling.temperature if isinstance(run, GRPOConfig) else 1.0
