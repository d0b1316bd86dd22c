"""What of its settings a run makes use of: questions that the table of conditions and the setup both ask.

It knows the settings, and no torch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlreason.config.data import DataConfig
from rlreason.config.evaluation import evaluation_of
from rlreason.config.groups import PromptConfig
from rlreason.config.jobs import EvalJobConfig
from rlreason.config.model import SHARED_WARM_START, TinyModelConfig
from rlreason.config.run import RunConfig, TrainingConfig
from rlreason.config.sft import SFTConfig


@dataclass(frozen=True, slots=True)
class Condition:
    """Where settings are read. `where` and `cure` complete "KEY=VALUE has no effect: it is read WHERE: CURE"."""

    keys: tuple[str, ...]
    read: Callable[[Any], bool]  # of a run that has one of the keys
    where: str
    cure: str = "leave it out"


def uses_training_data(run: RunConfig) -> bool:
    return not isinstance(run, EvalJobConfig) or run.split == "train"


def data_read(run: RunConfig) -> dict[str, DataConfig]:
    """Every data set that the run reads, by the setting that it stands under."""
    own = run.eval.data
    trained = {"data": run.data} if own is None or uses_training_data(run) else {}
    return trained if own is None else trained | {"eval.data": own}


def judges_to_learn(run: RunConfig) -> bool:
    """The prompt's reward decides what is learned from, beside what evaluations do with it."""
    learns = isinstance(run, TrainingConfig) and not isinstance(run, SFTConfig)
    return learns or (uses_training_data(run) and run.data.filter == "correct")


def judges(run: RunConfig) -> list[tuple[str, DataConfig]]:
    """Every reward that grades in this run, with the data it grades: first the one that an evaluation counts by."""
    evaluation = evaluation_of(run)
    named = [(evaluation.reward, evaluation.data)]
    named += [(evaluation.prompt_reward, evaluation.data)] if evaluation.prompt_reward else []
    return named + ([(run.prompt.reward, run.data)] if judges_to_learn(run) else [])


def is_own(reward: str, data: DataConfig) -> bool:
    """A function `module:function` of the user's or of the data judges responses."""
    return ":" in reward or data.verifier is not None


def checks_golds(run: RunConfig) -> bool:
    """Gold answers of `data` are graded by the built-in comparison, before they are asked or learned from."""
    named = judges(run)
    asked = not is_own(*named[0])
    if run.eval.data is None and asked:
        return True
    if isinstance(run, SFTConfig) or not uses_training_data(run):
        return False
    return asked if isinstance(run, EvalJobConfig) else not is_own(*named[-1])


def handles_traces(run: RunConfig) -> bool:
    """Responses that came with the data are imitated, or judged."""
    return isinstance(run, SFTConfig) or (uses_training_data(run) and run.data.filter == "correct")


def warms_up_alone(run: RunConfig, prompt: PromptConfig | None = None) -> bool:
    """A model made on the spot learns the format of this prompt as the run has it."""
    return isinstance(run.model, TinyModelConfig) and Path((prompt or run.prompt).file).stem not in SHARED_WARM_START
