"""GRPO: sample a group of responses per question and credit each by comparison with its group.

It knows problems, rollouts and the credit formula; it must not know the optimizer or the loss.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlreason.algorithms.rollouts import Rollouts, problems_for_step
from rlreason.engines.base import Sampling
from rlreason.errors import ConfigError
from rlreason.objectives.credit import CreditRule, assign_credit
from rlreason.objectives.kl import kl_per_token
from rlreason.types import Problem, Sample

#: Log-probabilities of (prompt ids, response ids) pairs under the model the run started from.
Reference = Callable[[list[tuple[list[int], list[int]]]], list[list[float]]]


@dataclass(frozen=True, slots=True)
class GroupRelative:
    """`collect(step)` -> graded samples with advantages, group by group."""

    rollouts: Rollouts
    problems: Sequence[Problem]
    sampling: Sampling
    questions: int  # per step
    group_size: int
    rule: CreditRule
    kl_estimator: str = "k3"
    reference: Reference | None = None  # given when a KL term needs it

    def collect(self, step: int) -> list[Sample]:
        problems = problems_for_step(self.problems, step, self.questions, self.rollouts.seed)
        samples = self.rollouts.sample(problems, self.sampling, self.group_size, purpose=f"train/{step}")
        if self.reference is not None:
            scores = self.reference([(s.response.prompt_ids, s.response.token_ids) for s in samples])
            for sample, score in zip(samples, scores, strict=True):
                sample.reference_log_probs = score
        return credit(samples, self.rule, self.kl_estimator)


def credit(samples: list[Sample], rule: CreditRule, kl_estimator: str = "k3") -> list[Sample]:
    """The samples with their advantages, by problem id: their order and what was left out do not matter."""
    lowest = min((s.grade.reward for s in samples), default=0.0)
    if rule.std_norm == "group_mean" and lowest < 0:
        raise ConfigError(
            f"std_norm=group_mean divides by the mean reward, and the reward function gave {lowest}: use "
            "rewards of 0 and above, or std_norm=group_std"
        )
    number = {problem_id: k for k, problem_id in enumerate(dict.fromkeys(s.group for s in samples))}
    advantages, kept = assign_credit(
        torch.tensor([s.grade.reward for s in samples], dtype=torch.float64),
        torch.tensor([number[s.group] for s in samples]),
        torch.tensor([len(s.response.token_ids) for s in samples]),
        torch.tensor([s.response.truncated for s in samples]),
        rule,
        _kl_of_sampler(samples, kl_estimator) if rule.kl_coef else None,
    )
    for sample, advantage, keep in zip(samples, advantages.tolist(), kept.tolist(), strict=True):
        sample.advantage, sample.kept = advantage, keep
    return samples


def _kl_of_sampler(samples: list[Sample], estimator: str) -> Tensor:
    """KL estimate per token (n, seq) of the policy that sampled, whose log-probabilities the engine reported."""
    sampled, reference, ones = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        for rows in (
            [s.response.log_probs for s in samples],
            [s.reference_log_probs for s in samples],
            [[True] * len(s.response.token_ids) for s in samples],
        )
    )
    return kl_per_token(sampled, reference, ones, estimator)
