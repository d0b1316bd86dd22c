"""GRPO: sample a group of responses per question and credit each by comparison with its group.

It knows problems, rollouts and the credit formula; it must not know the optimizer or the loss.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlreason.algorithms.rollouts import Rollouts, problems_for_step
from rlreason.engines.base import Sampling
from rlreason.objectives.advantages import compute_group_advantages
from rlreason.types import Problem, Sample


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """`collect(step)` -> graded samples with advantages, group by group."""

    rollouts: Rollouts
    problems: Sequence[Problem]
    sampling: Sampling
    questions: int  # per step
    group_size: int
    baseline: str  # "mean", or "none" for raw rewards
    std_norm: str
    advantage_eps: float

    def collect(self, step: int) -> list[Sample]:
        problems = problems_for_step(self.problems, step, self.questions, self.rollouts.seed)
        samples = self.rollouts.sample(problems, self.sampling, self.group_size, purpose=f"train/{step}")
        return self.credit(samples)

    def credit(self, samples: list[Sample]) -> list[Sample]:
        """Advantages by problem id: the order of the samples and what was left out do not matter."""
        number = {problem_id: k for k, problem_id in enumerate(dict.fromkeys(s.group for s in samples))}
        advantages = compute_group_advantages(
            torch.tensor([s.grade.reward for s in samples], dtype=torch.float64),
            torch.tensor([number[s.group] for s in samples]),
            baseline=self.baseline,
            std_norm=self.std_norm,
            advantage_eps=self.advantage_eps,
        )
        for sample, advantage in zip(samples, advantages.tolist(), strict=True):
            sample.advantage = advantage
        return samples
