"""Which job a run that does not train asks for."""

from rlreason.config.jobs import BestOfNConfig, EvaluateConfig
from rlreason.config.run import RunConfig
from rlreason.jobs.best_of_n import best_of_n
from rlreason.jobs.evaluate import evaluate_model
from rlreason.records.console import Console
from rlreason.records.writer import RunWriter


def start(run: RunConfig, records: RunWriter, console: Console) -> float:
    """Do the job, leave everything in the folder of `records`, return the accuracy."""
    match run:
        case BestOfNConfig():
            return best_of_n(run, records, console)
        case EvaluateConfig():
            return evaluate_model(run, records, console)
    raise TypeError(f"{type(run).__name__} is the settings of no job")
