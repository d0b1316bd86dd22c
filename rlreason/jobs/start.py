"""Which job a run that does not train asks for."""

from pathlib import Path

from rlreason.config.jobs import BestOfNConfig, EvaluateConfig
from rlreason.config.run import RunConfig
from rlreason.jobs.best_of_n import best_of_n
from rlreason.jobs.evaluate import evaluate_model


def start(run: RunConfig, folder: Path, config: str) -> float:
    """Do the job, leave everything in `folder`, return the accuracy."""
    match run:
        case BestOfNConfig():
            return best_of_n(run, folder, config)
        case EvaluateConfig():
            return evaluate_model(run, folder, config)
    raise TypeError(f"{type(run).__name__} is the settings of no job")
