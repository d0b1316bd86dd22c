"""The config group `eval`, and what evaluations of a run are by it: how they prompt, sample and grade."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rlreason.config.conflicts import as_eval
from rlreason.config.data import DataConfig
from rlreason.config.groups import GradingConfig, PromptConfig, SamplingConfig
from rlreason.errors import ConfigError
from rlreason.settings import LARGE, MADE, choice, group, number, text


@dataclass
class EvalSamplingConfig:
    """Sampling settings that differ in evaluations."""

    temperature: float | None = number(None, high=LARGE, doc="0: the likeliest token; null: sampling.temperature")
    min_tokens: int | None = number(None, doc="null: sampling.min_tokens")
    max_tokens: int | None = number(None, low=1, doc="null: sampling.max_tokens")


@dataclass
class EvalConfig:
    """How a model is prompted and graded, apart from how it is trained; null: as in training."""

    prompt: PromptConfig | None = text(None, doc="an option of `prompt`, whose settings are then below eval.prompt")
    reward: str | None = text(
        None, doc="what counts: r1_zero, question_only or module:function; null: the prompt's, reported in any case"
    )
    sampling: EvalSamplingConfig = group(EvalSamplingConfig)
    data: DataConfig | None = text(
        None, doc="an option of `data`, whose validation problems are asked; its settings are below eval.data"
    )
    problems: int | None = number(None, low=1, doc="validation problems asked; null: eval_problems")
    final_problems: int | None = number(
        None, low=1, doc="those of a training's last evaluation; null: eval.problems, or else all", only_if="trains"
    )
    samples: int | None = number(None, low=1, high=MADE, doc="per problem; null: 1", only_if="reads_eval_samples")
    card: str | None = choice("leaderboard", None, doc="compliance.md checks a training by its rules", only_if="trains")


@dataclass(frozen=True, slots=True)
class EvalProtocolConfig:
    """How a run's evaluations prompt, sample and grade, fully resolved: the basis of their protocol."""

    prompt: PromptConfig
    reward: str  # decides what is correct
    prompt_reward: str | None  # grades as well, if it is another one
    grading: GradingConfig
    sampling: SamplingConfig
    data: DataConfig
    problems: int | None  # of the evaluations on the way; None: all
    final_problems: int | None  # of the last one, or of a job that does not train
    samples: int  # responses per problem


@contextmanager
def naming_eval_settings(run: Any, group: str) -> Iterator[None]:
    """Attribute errors in `prompt` or `data` of evaluations to the settings that gave them."""
    try:
        yield
    except ConfigError as error:
        own = getattr(run.eval, group)
        if own is None:
            raise
        raise type(error)(as_eval(group, str(error), own)) from error
