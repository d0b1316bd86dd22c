"""GRPO: sample a group of responses per question and compare each with its group."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlreason.algorithms.base import Collected, cut_into_batches
from rlreason.algorithms.problem_sampler import ProblemSampler
from rlreason.algorithms.rollouts import LogProbScorer, Rollouts, score_samples
from rlreason.engines.base import Sampling
from rlreason.errors import ConfigError
from rlreason.objectives.advantages import assign_advantages
from rlreason.objectives.kl import kl_per_token
from rlreason.objectives.objective import Objective
from rlreason.types import Sample


@dataclass(frozen=True, slots=True)
class GRPO:
    """`collect(step)` -> graded samples with advantages, cut into optimizer steps."""

    rollouts: Rollouts
    questions: ProblemSampler
    sampling: Sampling
    n_steps: int
    per_step: int  # questions
    group_size: int
    epochs: int
    batch_size: int
    objective: Objective
    reference: LogProbScorer | None = None  # given when a KL term needs it
    behaviour: LogProbScorer | None = None  # given where the policy that sampled must be scored before it learns
    old_log_probs: str = "none"  # what a ratio divides by: none (today's) | measured (by behaviour) | engine

    def collect(self, step: int) -> Collected:
        problems = self.questions.take(self.per_step)
        samples = self.rollouts.sample(problems, self.sampling, self.group_size, purpose=f"train/{step}")
        notices = {}
        if len(problems) < self.per_step:
            notices["few_questions"] = f"only {len(problems)} of {self.per_step} questions are left unsolved"
        learned, discarded, rounds = samples, list[Sample](), 0
        if self.objective.max_resampling_rounds:
            learned, discarded, rounds = self._refilled(step, samples)
            live = len(live_groups(learned))
            if live < self.per_step:
                notices["refill_bound"] = (
                    f"{rounds} rounds of refilling found {live} of {self.per_step} groups with better "
                    "and worse responses (before any length penalty): the others stay without advantages; raise "
                    "max_resampling_rounds, or change the questions"
                )
        everything = [*learned, *discarded]
        self.questions.note(everything)
        if learned:
            self._compare(learned)
        for sample in discarded:
            sample.kept = False
        metrics: dict[str, float] = {"rollout/kept": sum(s.kept for s in everything) / len(everything or [0])}
        if self.objective.max_resampling_rounds:
            metrics |= {"rollout/refill_rounds": rounds, "rollout/discarded": len(discarded)}
        if self.questions.skip_solved:
            metrics["rollout/solved_questions"] = self.questions.n_solved
        orders = [f"{self.rollouts.seed}/batches/{step}/{epoch}" for epoch in range(self.epochs)]
        return Collected(everything, cut_into_batches(learned, self.batch_size, orders), metrics, notices)

    def _refilled(self, step: int, samples: list[Sample]) -> tuple[list[Sample], list[Sample], int]:
        """DAPO's dynamic sampling with a bound: (samples to learn from, those put aside, rounds it took).

        Groups of equal rewards are replaced by groups of further questions, as far as these are better.
        """
        asked, rounds = {s.group for s in samples}, 0
        most = self.objective.max_resampling_rounds
        while (missing := self.per_step - len(live_groups(samples))) > 0 and rounds < most:
            problems = self.questions.take(missing, besides=asked)
            if not problems:
                break
            rounds += 1
            asked |= {p.id for p in problems}
            purpose = f"train/{step}/refill/{rounds}"
            samples = samples + self.rollouts.sample(problems, self.sampling, self.group_size, purpose)
        live = live_groups(samples)
        groups = list(dict.fromkeys(s.group for s in samples))
        chosen = set(sorted(groups, key=lambda group: group not in live)[: self.per_step])  # a stable sort: live first
        return [s for s in samples if s.group in chosen], [s for s in samples if s.group not in chosen], rounds

    def _compare(self, samples: list[Sample]) -> None:
        """Give the samples their advantages, and first the log-probabilities that these and the loss read."""
        if self.reference is not None:  # both sides of a KL term are scored alike: equal models are exactly 0 apart
            pairs = [(s.response.prompt_ids, s.response.token_ids) for s in samples]
            for sample, (log_probs, _) in zip(samples, self.reference(pairs), strict=True):
                sample.reference_log_probs = log_probs
        if self.behaviour is not None:  # here, once per rollout batch, before any weight moves
            score_samples(samples, self.behaviour)
        for sample in samples:
            if self.old_log_probs == "engine":
                sample.old_log_probs = list(sample.response.log_probs)
            elif self.old_log_probs == "measured":
                sample.old_log_probs = sample.log_probs
        give_advantages(samples, self.objective)


def live_groups(samples: Sequence[Sample]) -> set[str]:
    """Ids of the groups that hold better and worse responses."""
    rewards: dict[str, set[float]] = {}
    for s in samples:
        rewards.setdefault(s.group, set()).add(s.grade.reward)
    return {group for group, values in rewards.items() if len(values) > 1}


def give_advantages(samples: list[Sample], objective: Objective) -> list[Sample]:
    """The samples with their advantages, by problem id: their order and what was left out do not matter."""
    lowest = min((s.grade.reward for s in samples), default=0.0)
    if objective.std_norm == "group_mean" and lowest < 0:
        raise ConfigError(
            f"std_norm=group_mean divides by the mean reward, and the reward function gave {lowest}: use "
            "rewards of 0 and above, or std_norm=group_std"
        )
    number = {problem_id: k for k, problem_id in enumerate(dict.fromkeys(s.group for s in samples))}
    advantages, kept, live = assign_advantages(
        torch.tensor([s.grade.reward for s in samples], dtype=torch.float64),
        torch.tensor([number[s.group] for s in samples]),
        torch.tensor([len(s.response.token_ids) for s in samples]),
        torch.tensor([s.response.truncated for s in samples]),
        objective,
        _kl_of_sampler(samples, objective.kl_estimator) if objective.kl_placement == "reward" else None,
    )
    for sample, *given in zip(samples, advantages.tolist(), kept.tolist(), live.tolist(), strict=True):
        sample.advantage, sample.kept, sample.live = given
    return samples


def _kl_of_sampler(samples: list[Sample], estimator: str) -> Tensor:
    """KL estimate per token (n, seq) of the policy that sampled, both sides under the trainer's own scorer."""
    sampled, reference, ones = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        for rows in (
            [s.log_probs for s in samples],
            [s.reference_log_probs for s in samples],
            [[True] * len(s.response.token_ids) for s in samples],
        )
    )
    return kl_per_token(sampled, reference, ones, estimator)
