"""GRPO: sample a group of responses per question; a response's advantage compares it with its group."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlreason.engines.rollouts import score_samples, token_ids
from rlreason.errors import ConfigError
from rlreason.objectives.advantages import assign_advantages
from rlreason.objectives.objective import Objective
from rlreason.objectives.terms import kl_per_token
from rlreason.runtime.text import question_keys
from rlreason.training.algorithms.base import Online
from rlreason.types import Collected, Problem, Sample

if TYPE_CHECKING:
    from rlreason.model.policy import LogProbScorer


@dataclass(frozen=True, slots=True)
class GRPO(Online):
    """GRPO: `collect(step)` returns graded samples with advantages, cut into optimizer steps."""

    objective: Objective
    reference: "LogProbScorer | None" = None  # set if a KL term needs it
    behaviour: "LogProbScorer | None" = None  # set if the sampling policy must be scored before it learns
    old_log_probs: str = "none"  # where those of the sampling policy come from: none | measured (by behaviour) | engine

    def collect(self, step: int) -> Collected:
        """Sample groups, score what the objective compares, compute advantages."""
        problems = self.questions.next_batch(self.per_step)
        samples = self.rollouts.sample(problems, self.sampling, self.group_size, purpose=f"train/{step}")
        chosen, discarded, rounds = self._refill(step, samples)
        notices = self._notices(problems, chosen, rounds)
        self.questions.update([*chosen, *discarded])
        chosen, signalling = with_advantages(self._score(chosen), self.objective)
        everything = [*chosen, *(replace(s, has_loss=False) for s in discarded)]
        metrics: dict[str, float] = {"rollout/kept": sum(s.has_loss for s in everything) / max(len(everything), 1)}
        if groups := {s.group for s in everything}:
            metrics["reward/frac_reward_zero_std"] = (len(groups) - len(signalling)) / len(groups)
        if self.objective.max_resampling_rounds:
            metrics |= {"rollout/refill_rounds": rounds, "rollout/discarded": len(discarded)}
        if self.questions.skip_solved:
            metrics["rollout/solved_questions"] = self.questions.n_solved
        return Collected(everything, self.batches(step, chosen), metrics, notices)

    def _refill(self, step: int, samples: list[Sample]) -> tuple[list[Sample], list[Sample], int]:
        """Apply DAPO's dynamic sampling, with a bound: return (samples to learn from, those discarded, rounds).

        Groups of equal rewards are replaced by groups of further questions, as far as these have unequal ones; with
        max_resampling_rounds=0 all samples stay.
        """
        drawn, rounds = {s.group for s in samples}, 0
        while (missing := self.per_step - len(mixed_groups(samples))) > 0:
            if rounds == self.objective.max_resampling_rounds:
                break
            problems = self.questions.next_batch(missing, excluded=drawn)
            if not problems:
                break
            rounds += 1
            drawn |= {p.id for p in problems}
            purpose = f"train/{step}/refill/{rounds}"
            samples = samples + self.rollouts.sample(problems, self.sampling, self.group_size, purpose)
        mixed = mixed_groups(samples)
        groups = list(dict.fromkeys(s.group for s in samples))
        chosen = set(sorted(groups, key=lambda group: group not in mixed)[: self.per_step])  # a stable sort
        return [s for s in samples if s.group in chosen], [s for s in samples if s.group not in chosen], rounds

    def _notices(self, problems: Sequence[Problem], chosen: Sequence[Sample], rounds: int) -> dict[str, str]:
        """Return what a reader of the run should know about the step's questions."""
        notices = {}
        if len(problems) < self.per_step:
            notices["few_questions"] = f"only {len(problems)} of {self.per_step} questions are left unsolved"
        if repeated := len(problems) - len(set(question_keys((p.id, p.question) for p in problems).values())):
            notices["repeated_questions"] = (
                f"{repeated} of {len(problems)} groups answer a question that another group of the step answers too: "
                "its responses are compared within each group, and it weighs more"
            )
        mixed = len(mixed_groups(chosen))
        if self.objective.max_resampling_rounds and mixed < self.per_step:
            notices["refill_bound"] = (
                f"{rounds} rounds of refilling found {mixed} of {self.per_step} groups with better "
                "and worse responses (before any length penalty): the others stay without advantages; raise "
                "max_resampling_rounds, or change the questions"
            )
        return notices

    def _score(self, samples: list[Sample]) -> list[Sample]:
        """Add the log-probabilities that the objective needs, before any weight moves."""
        if self.reference is not None:  # both sides of a KL term are scored alike: equal models are exactly 0 apart
            with self.rollouts.clock.phase("score"):
                scores = self.reference.log_probs(token_ids(samples))
            samples = [replace(s, reference_log_probs=score) for s, score in zip(samples, scores, strict=True)]
        if self.behaviour is not None:
            with self.rollouts.clock.phase("score"):
                samples = score_samples(samples, self.behaviour)
        match self.old_log_probs:
            case "engine":
                return [replace(s, old_log_probs=s.response.log_probs) for s in samples]
            case "measured":
                return [replace(s, old_log_probs=s.log_probs) for s in samples]
        return samples


def mixed_groups(samples: Sequence[Sample]) -> set[str]:
    """Return the ids of groups with unequal rewards."""
    rewards: dict[str, set[float]] = {}
    for s in samples:
        rewards.setdefault(s.group, set()).add(s.grade.reward)
    return {group for group, values in rewards.items() if len(values) > 1}


def with_advantages(samples: Sequence[Sample], objective: Objective) -> tuple[list[Sample], set[str]]:
    """Return the samples with advantages, and the groups where rewards alone (no KL term) make one non-zero.

    Groups are formed by problem id, so the order of the samples and what was left out do not matter.
    """
    if not samples:
        return [], set()
    lowest = min((s.grade.reward for s in samples), default=0.0)
    if objective.std_norm == "group_mean" and lowest < 0:
        raise ConfigError(
            f"std_norm=group_mean divides by the mean reward, and the reward function gave {lowest}: use "
            "rewards of 0 and above, or std_norm=group_std"
        )
    number = {problem_id: k for k, problem_id in enumerate(dict.fromkeys(s.group for s in samples))}
    advantages, has_loss, live = assign_advantages(
        torch.tensor([s.grade.reward for s in samples], dtype=torch.float64),
        torch.tensor([number[s.group] for s in samples]),
        torch.tensor([len(s.response.token_ids) for s in samples]),
        torch.tensor([s.response.truncated for s in samples]),
        objective,
        _kl_of_sampler(samples, objective.kl_estimator) if objective.kl_placement == "reward" else None,
    )
    rows = zip(samples, advantages.tolist(), has_loss.tolist(), strict=True)
    signalling = {s.group for s, signals in zip(samples, live.tolist(), strict=True) if signals}
    return [replace(s, advantage=a, has_loss=learned) for s, a, learned in rows], signalling


def _kl_of_sampler(samples: Sequence[Sample], estimator: str) -> Tensor:
    """Return the sampling policy's KL estimate per token (n, seq), both sides scored by the trainer."""
    sampled, reference, ones = (
        pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
        for rows in (
            [s.log_probs or [] for s in samples],
            [s.reference_log_probs or [] for s in samples],
            [[True] * len(s.response.token_ids) for s in samples],
        )
    )
    return kl_per_token(sampled, reference, ones, estimator)
