"""The graders of a run, from its settings: of what is learned from, and of what an evaluation counts."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rlreason.config.data import DataConfig
from rlreason.config.groups import GradingConfig
from rlreason.config.run import RunConfig
from rlreason.grading import verifiers
from rlreason.grading.grader import Grader
from rlreason.records.files import INCIDENTS


@dataclass(frozen=True, slots=True)
class Graders:
    """Their workers run. Two of one reward are one grader."""

    training: Grader
    evaluation: Grader
    second: Grader | None  # of the evaluation prompt's reward, where another one counts

    def all(self) -> list[Grader]:
        """Each grader once."""
        named = (self.training, self.evaluation, self.second)
        return list({id(grader): grader for grader in named if grader is not None}.values())

    def close(self) -> None:
        """End their workers."""
        for grader in self.all():
            grader.close()


def make_graders(run: RunConfig, folder: Path) -> Graders:
    """Data with a verifier of its own brings the reward along. A run that learns from no grades has no grader more."""
    evaluation = run.evaluation
    counts = reward_name(evaluation.reward, evaluation.data)
    second = evaluation.prompt_reward and reward_name(evaluation.prompt_reward, evaluation.data)
    training = reward_name(run.prompt.reward, run.data) if run.judges_to_learn else counts
    made: dict[str, Grader] = {}
    try:
        for reward in dict.fromkeys(filter(None, (training, counts, second))):
            made[reward] = Grader(run.grading, reward, log_path=folder / INCIDENTS)
            made[reward].start()
    except BaseException:
        for grader in made.values():
            grader.close()
        raise
    return Graders(made[training], made[counts], made[second] if second else None)


def grading_settings(grading: GradingConfig, reward: str) -> dict[str, Any]:
    """The settings of a grader that act: a reward of one's own compares answers by rules of its own."""
    unread = ("extract", "percent", "rel_tol") if ":" in reward else ("correct_at",)
    return {f.name: getattr(grading, f.name) for f in fields(grading) if f.name not in unread}


def reward_name(reward: str, data: DataConfig) -> str:
    """A prompt's reward, or the data's own verifier of answers in that prompt's form."""
    return reward if ":" in reward else verifiers.reward_name(reward, data.verifier)
