"""The learner of a run."""

from rlreason.config.training import TrainingConfig
from rlreason.learner import Learner
from rlreason.model.policy import Policy


def make_learner(run: TrainingConfig, policy: Policy) -> Learner:
    """The learner that the run's objective and its settings of optimisation ask for."""
    return Learner(
        policy,
        run.objective(),
        run,
        temperature=run.learning_temperature,
        micro_batch_tokens=run.micro_batch_tokens,
        can_restart=run.restarts,
    )
