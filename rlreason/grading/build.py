"""Build the graders of a run from its settings: one for training samples, one for evaluations."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlreason.config.data import DataConfig
from rlreason.config.groups import GradingConfig
from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.grading import verifiers
from rlreason.grading.grader import Grader, GroundTruth
from rlreason.grading.verifiers import reward_name
from rlreason.runtime.plugins import GIVEN


@dataclass(frozen=True, slots=True)
class Graders:
    """The graders of a run, with running workers. Equal rewards share one grader."""

    training: Grader
    evaluation: Grader
    second: Grader | None  # by the evaluation prompt's reward, where another reward counts

    def all(self) -> list[Grader]:
        """Return each grader once."""
        named = (self.training, self.evaluation, self.second)
        return list({id(grader): grader for grader in named if grader is not None}.values())

    def close(self) -> None:
        """End their workers."""
        for grader in self.all():
            grader.close()


def make_graders(run: RunConfig, incidents: Path) -> Graders:
    """Start the graders; they log their failures in `incidents`.

    Data with its own verifier determines the reward. A run that learns without grades has no separate training grader.
    """
    evaluation = run.evaluation
    counts = reward_name_of(evaluation.reward, evaluation.data)
    second = evaluation.prompt_reward and reward_name_of(evaluation.prompt_reward, evaluation.data)
    training = reward_name_of(run.prompt.reward, run.data) if run.judges_to_learn else counts
    graders: dict[str, Grader] = {}
    try:
        for reward in dict.fromkeys(filter(None, (training, counts, second))):
            graders[reward] = Grader(run.grading, reward, log_path=incidents)
            graders[reward].start()
    except BaseException:
        for grader in graders.values():
            grader.close()
        raise
    return Graders(graders[training], graders[counts], graders[second] if second else None)


def grading_settings(grading: GradingConfig, reward: str) -> dict[str, Any]:
    """Return the settings that a grader reads: a plug-in compares answers by its own rules."""
    unread = ("extract", "percent", "rel_tol") if ":" in reward else ("correct_at",)
    return {f.name: getattr(grading, f.name) for f in fields(grading) if f.name not in unread}


def reward_name_of(reward: str, data: DataConfig) -> str:
    """Return the prompt's reward, or the data's own verifier of answers in that prompt's format."""
    return reward if ":" in reward else verifiers.reward_name(reward, data.verifier)


SETTINGS = tuple(field.name for field in fields(GradingConfig))


class RunGrading(NamedTuple):
    """The reward that graded a run (a format's name, or `module:function`) and the grader's settings."""

    reward: str
    settings: dict[str, Any]

    @classmethod
    def of(cls, reward: str, verifier: str | None, grading: Mapping[str, Any]) -> "RunGrading":
        """Build it from a run's settings: its prompt's reward, its data's verifier and the group `grading`."""
        return cls(reward_name(reward, verifier), {key: grading[key] for key in SETTINGS if key in grading})

    def grader(self, symbolic: bool = True) -> Grader:
        """Return a grader with the run's settings; `ConfigError` for invalid ones."""
        try:
            config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GradingConfig), self.settings))
        except OmegaConfBaseException as error:
            key, reason = getattr(error, "full_key", ""), str(error).splitlines()[0]
            raise ConfigError(f"grading.{key} in the config of the run cannot be used ({reason}): mend it") from None
        assert isinstance(config, GradingConfig)
        return Grader(config, self.reward, symbolic=symbolic)

    def lacking(self, grader: Grader) -> str:
        """Return why this process cannot load the function that graded the run, and the cure; empty where it can."""
        why = grader.wait()
        if not why or not self.reward.startswith(f"{GIVEN}:"):
            return why
        return (
            "it was a Python object of the program that started the run, so only Python can grade with it again: give "
            "Grader(reward=FUNCTION).grade_batch(...) what load_run(RUN).responses holds"
        )


def r1_zero_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    """Reward for `... </think> <answer> ... </answer>`. `fast` decides in process and starts no worker.

    >>> r1_zero_reward_fn("so 19 * 2 </think> <answer> 38 </answer>", "38")
    {'format_reward': 1.0, 'answer_reward': 1.0, 'reward': 1.0}
    """
    return _reward("r1_zero", response, ground_truth, fast)


def question_only_reward_fn(response: str, ground_truth: GroundTruth, fast: bool = True) -> dict[str, float]:
    r"""Reward for an answer in the last `\boxed{...}`. `fast` decides in process and starts no worker.

    >>> question_only_reward_fn(r"It is \boxed{\frac12}.", "0.5")
    {'format_reward': 1.0, 'answer_reward': 1.0, 'reward': 1.0}
    """
    return _reward("question_only", response, ground_truth, fast)


def _reward(reward: str, response: str, ground_truth: GroundTruth, fast: bool) -> dict[str, float]:
    grade = _shared(reward, fast).grade_batch([response], [ground_truth])[0]
    return {"format_reward": grade.format, "answer_reward": grade.answer, "reward": grade.reward}


@cache
def _shared(reward: str, fast: bool) -> Grader:
    return Grader(reward=reward, symbolic=not fast)


Reward = dict[str, float]


def coin(response: str, ground_truth: GroundTruth) -> Reward:
    """Return 1 or 0, each for half of all responses, whatever they say: a hash of response and ground truth.

    Equal pairs get the same reward, so that a resumed run is graded as before. It teaches which texts were lucky, not
    the answer.

    >>> [coin(f"so {n}", "4")["reward"] for n in range(8)]
    [0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    """
    digest = hashlib.sha256(f"{ground_truth}\n{response}".encode()).digest()
    return _rewarded(_graded(response, ground_truth), digest[0] % 2)


def format_only(response: str, ground_truth: GroundTruth) -> Reward:
    """Return 1 for the right format, whatever the answer.

    >>> format_only("so 5 </think> <answer>5</answer>", "4")["reward"], format_only("so 4", "4")["reward"]
    (1.0, 0.0)
    >>> format_only("so 4", "4")["format_reward"], coin("so 3", "4")["format_reward"]
    (0.0, 0.0)
    """
    graded = _graded(response, ground_truth)
    return _rewarded(graded, graded["format_reward"])


def inverted(response: str, ground_truth: GroundTruth) -> Reward:
    r"""Return 1 for a wrong answer in the right format, 0 for a right one.

    >>> inverted(r"\boxed{5}", "4")["reward"], inverted(r"\boxed{4}", "4")["reward"], inverted("so 5", "4")["reward"]
    (1.0, 0.0, 0.0)
    """
    graded = _graded(response, ground_truth)
    return _rewarded(graded, graded["format_reward"] - graded["answer_reward"])


def _graded(response: str, ground_truth: GroundTruth) -> Reward:
    """Grade by the reward whose format the response has, without the symbolic comparison, which needs a process."""
    graded = r1_zero_reward_fn(response, ground_truth)
    return graded if graded["format_reward"] else question_only_reward_fn(response, ground_truth)


def _rewarded(graded: Reward, value: float) -> Reward:
    """Return the control's value, next to the real format reward."""
    return {"format_reward": graded["format_reward"], "answer_reward": float(value), "reward": float(value)}


#: Part of the protocol of every accuracy; accuracies of different versions are not compared. `tests/test_grading.py`
#: compares the verdicts on all cases with it and says what to do when one changes.
GRADER_VERSION = 2
