"""Which job a run that does not train asks for."""

from pathlib import Path

from rlreason.config.jobs import BestOfNConfig, EvaluateConfig
from rlreason.config.run import RunConfig
from rlreason.jobs.best_of_n import best_of_n
from rlreason.jobs.evaluate import evaluate_model


def start(run: RunConfig, folder: Path, config: str) -> float:
    """Do the job, leave everything in `folder`, return the accuracy."""
    if isinstance(run, BestOfNConfig):
        return best_of_n(run, folder, config)
    assert isinstance(run, EvaluateConfig)
    return evaluate_model(run, folder, config)
