"""What the learner of a run is made with, on whichever rank."""

from typing import Any

from rlreason.config.training import TrainingConfig


def settings_of(run: TrainingConfig) -> dict[str, Any]:
    """What a learner is made with, besides its policy."""
    return {
        "objective": run.objective(),
        "optimization": run,
        "temperature": run.learning_temperature,
        "micro_batch_tokens": run.micro_batch_tokens,
        "can_restart": run.restarts,
    }
