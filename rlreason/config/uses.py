"""By which rewards a run grades and what it checks with them: what the table of conditions and the setup both ask."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlreason.config.data import DataConfig
from rlreason.config.groups import PromptConfig
from rlreason.config.model import SHARED_WARM_START
from rlreason.config.run import RunConfig


@dataclass(frozen=True, slots=True)
class Condition:
    """Where settings are read. `where` and `cure` complete "KEY=VALUE has no effect: it is read WHERE: CURE"."""

    keys: tuple[str, ...]
    read: Callable[[Any], bool]  # of a run that has one of the keys
    where: str
    cure: str = "leave it out"


def on_several_ranks(run: RunConfig) -> bool:
    """Whether it trains on several ranks: so many are asked for, or torchrun has started them."""
    asked = getattr(run, "gpus", "1")
    return asked != "1" if asked != "auto" else int(os.environ.get("WORLD_SIZE") or 1) > 1


def judges(run: RunConfig) -> list[tuple[str, DataConfig]]:
    """Every reward that grades in this run, with the data it grades: first the one that an evaluation counts by."""
    evaluation = run.evaluation
    named = [(evaluation.reward, evaluation.data)]
    named += [(evaluation.prompt_reward, evaluation.data)] if evaluation.prompt_reward else []
    return named + ([(run.prompt.reward, run.data)] if run.judges_to_learn else [])


def is_own(reward: str, data: DataConfig) -> bool:
    """A function `module:function` of the user's or of the data judges responses."""
    return ":" in reward or data.verifier is not None


def checks_ground_truths(run: RunConfig) -> bool:
    """Whether the built-in comparison grades the ground truths of `data` before they are asked or learned from."""
    named = judges(run)
    asked = not is_own(*named[0])
    if run.eval.data is None and asked:
        return True
    if not run.asks_training_data:
        return False
    return not is_own(*named[-1]) if run.trains else asked


def warms_up_alone(run: RunConfig, prompt: PromptConfig | None = None) -> bool:
    """A model made on the spot learns the format of this prompt as the run has it."""
    return run.model.made_on_the_spot and Path((prompt or run.prompt).file).stem not in SHARED_WARM_START
