"""What a step learns from: the interface of an algorithm, sampling ahead; GRPO, expert iteration, SFT."""

import math
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any, ClassVar

import torch
from torch.nn.utils.rnn import pad_sequence

from rlreason.config.algorithms import EIConfig, GRPOConfig
from rlreason.data.prompts import ProblemSampler
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts, score_samples, token_ids
from rlreason.errors import ConfigError
from rlreason.model.policy import LogProbScorer
from rlreason.objectives.advantages import assign_advantages
from rlreason.objectives.objective import Objective
from rlreason.objectives.terms import kl_per_token
from rlreason.records.rows import collected_from, plain_collected
from rlreason.runtime.clock import Clock
from rlreason.types import Collected, Grade, Response, Sample


@dataclass(frozen=True, slots=True)
class Online:
    """What algorithms that learn from their own samples have in common."""

    settings: EIConfig | GRPOConfig
    rollouts: Rollouts
    questions: ProblemSampler
    sampling: Sampling

    @property
    def n_steps(self) -> int:
        """Number of training steps: `collect` is called once for each."""
        return self.settings.n_steps

    def batches(self, step: int, samples: Sequence[Sample], epochs: int) -> list[list[Sample]]:
        """Cut the samples into optimizer steps, once for each epoch, shuffled if there is more than one step.

        The last step of a pass takes what is left; its divisor is its own.
        """
        size = self.settings.train_batch_size
        if len(samples) <= size:
            return [list(samples) for _ in range(epochs)] if samples else []
        batches = []
        for epoch in range(epochs):
            order = list(samples)
            Random(f"{self.rollouts.seed}/batches/{step}/{epoch}").shuffle(order)
            batches += [order[i : i + size] for i in range(0, len(order), size)]
        return batches


@dataclass(frozen=True, slots=True)
class GRPO(Online):
    """GRPO: `collect(step)` returns graded samples with advantages, cut into optimizer steps."""

    settings: GRPOConfig
    scorer: LogProbScorer  # of the sampling policy, where it must be scored before it learns
    reference: LogProbScorer | None  # set if a KL term needs it

    def collect(self, step: int) -> Collected:
        """Sample groups, score what the objective compares, compute advantages."""
        problems = self.questions.next_batch(self.settings.questions)
        samples = self.rollouts.sample(problems, self.sampling, self.settings.group_size, purpose=f"train/{step}")
        chosen, discarded, rounds = self._refill(step, samples)
        self.questions.update([*chosen, *discarded])
        chosen, signalling = with_advantages(self._score(chosen), self.settings)
        everything = [*chosen, *(replace(s, has_loss=False) for s in discarded)]
        metrics: dict[str, float] = {"rollout/kept": sum(s.has_loss for s in everything) / max(len(everything), 1)}
        if groups := {s.group for s in everything}:
            metrics["reward/frac_reward_zero_std"] = (len(groups) - len(signalling)) / len(groups)
        if self.settings.max_resampling_rounds:
            metrics |= {"rollout/refill_rounds": rounds, "rollout/discarded": len(discarded)}
        if self.questions.skip_solved:
            metrics["rollout/solved_questions"] = self.questions.n_solved
        batches = self.batches(step, chosen, self.settings.epochs_per_rollout)
        return Collected(everything, batches, metrics, few_questions(len(problems), self.settings.questions))

    def _refill(self, step: int, samples: list[Sample]) -> tuple[list[Sample], list[Sample], int]:
        """Apply DAPO's dynamic sampling, with a bound: return (samples to learn from, those discarded, rounds).

        Groups of equal rewards are replaced by groups of further questions, as far as these have unequal ones; with
        max_resampling_rounds=0 all samples stay.
        """
        drawn, rounds, most = {s.group for s in samples}, 0, self.settings.max_resampling_rounds
        while rounds < most and (missing := self.settings.questions - len(mixed_groups(samples))) > 0:
            problems = self.questions.next_batch(missing, excluded=drawn)
            if not problems:
                break
            rounds += 1
            drawn |= {p.id for p in problems}
            purpose = f"train/{step}/refill/{rounds}"
            samples = samples + self.rollouts.sample(problems, self.sampling, self.settings.group_size, purpose)
        mixed = mixed_groups(samples)
        groups = list(dict.fromkeys(s.group for s in samples))
        chosen = set(sorted(groups, key=lambda group: group not in mixed)[: self.settings.questions])  # a stable sort
        return [s for s in samples if s.group in chosen], [s for s in samples if s.group not in chosen], rounds

    def _score(self, samples: list[Sample]) -> list[Sample]:
        """Add the log-probabilities that the objective needs, before any weight moves."""
        settings = self.settings
        # Samples drawn ahead are not scored, because the weights are moving by then: only the engine has their numbers.
        with self.rollouts.clock.phase("score"):
            if self.reference:  # both sides of a KL term are scored alike: equal models are exactly 0 apart
                scores = self.reference.log_probs(token_ids(samples))
                samples = [replace(s, reference_log_probs=score) for s, score in zip(samples, scores, strict=True)]
            if settings.scores_old or settings.kl_placement == "reward":
                samples = score_samples(samples, self.scorer)
        if settings.old_from_engine:
            return [replace(s, old_log_probs=s.response.log_probs) for s in samples]
        return [replace(s, old_log_probs=s.log_probs) for s in samples] if settings.scores_old else samples


def few_questions(drawn: int, wanted: int) -> dict[str, str]:
    """Return a notice if a step has fewer questions than it should."""
    return {} if drawn == wanted else {"few_questions": f"only {drawn} of {wanted} questions are left unsolved"}


def mixed_groups(samples: Sequence[Sample]) -> set[str]:
    """Return the ids of groups with unequal rewards."""
    rewards = Counter(group for group, _ in {(s.group, s.grade.reward) for s in samples})
    return {group for group, count in rewards.items() if count > 1}


def with_advantages(samples: Sequence[Sample], objective: Objective) -> tuple[list[Sample], set[str]]:
    """Return the samples with advantages, and the groups where rewards alone (no KL term) make one non-zero.

    Groups are formed by problem id, so the order of the samples and what was left out do not matter.
    """
    if not samples:
        return [], set()
    rewards = [s.grade.reward for s in samples]
    if objective.std_norm == "group_mean" and (lowest := min(rewards)) < 0:
        raise ConfigError(
            f"std_norm=group_mean divides by the mean reward, and the reward function gave {lowest}: use "
            "rewards of 0 and above, or std_norm=group_std"
        )
    number = {problem_id: k for k, problem_id in enumerate(dict.fromkeys(s.group for s in samples))}
    lengths = torch.tensor([s.length for s in samples])
    kl = None
    if objective.kl_placement == "reward":  # of the sampling policy, both sides scored by the trainer
        sampled, reference = (
            pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
            for rows in ([s.log_probs or [] for s in samples], [s.reference_log_probs or [] for s in samples])
        )
        kl = kl_per_token(sampled, reference, torch.arange(sampled.shape[1]) < lengths[:, None], objective.kl_estimator)
    advantages, has_loss, live = assign_advantages(
        torch.tensor(rewards, dtype=torch.float64),
        torch.tensor([number[s.group] for s in samples]),
        lengths,
        torch.tensor([s.truncated for s in samples]),
        objective,
        kl,
    )
    rows = zip(samples, advantages.tolist(), has_loss.tolist(), strict=True)
    signalling = {s.group for s, signals in zip(samples, live.tolist(), strict=True) if signals}
    return [replace(s, advantage=a, has_loss=learned) for s, a, learned in rows], signalling


GIVEN = Grade(1.0, 1.0, 1.0, "correct", path="given")  # a trace to imitate is not graded


def sft_sample(prompt_ids: list[int], response_ids: list[int], text: str, problem_id: str = "given") -> Sample:
    """Wrap a given response as a sample with advantage 1; `response_ids` include the end token."""
    given = Response(problem_id, prompt_ids, response_ids, log_probs=[], text=text, finish_reason="stop")
    return Sample(given, GIVEN, advantage=1.0)


@dataclass(frozen=True)
class SFT:
    """Supervised fine-tuning: `collect(step)` returns the next traces, in passes over all, each in its own order."""

    traces: Sequence[Sample]
    batch_size: int
    seed: int
    total: int  # traces to learn from, repetitions included
    questions: ClassVar[None] = None

    @property
    def n_steps(self) -> int:
        """Number of optimizer steps, the last of which may be smaller."""
        return math.ceil(self.total / self.batch_size)

    def collect(self, step: int) -> Collected:
        """Return the step's traces as one batch; nothing is sampled."""
        first, count, order = (step - 1) * self.batch_size, len(self.traces), list[int]()
        last = min(first + self.batch_size, self.total)
        for epoch in range(first // count, math.ceil(last / count)):  # in which the step is
            order += order_of_epoch(count, self.seed, epoch)
        batch = [self.traces[place] for place in order[first % count :][: last - first]]
        tokens = sum(s.length for s in batch)
        metrics = {"sft/epoch": last / count, "sft/sequences": len(batch), "sft/response_tokens": tokens}
        return Collected([], [batch], metrics)


@lru_cache(2)  # asked in every step, and in one between two epochs for both
def order_of_epoch(count: int, seed: int, epoch: int) -> list[int]:
    """Return the places of all traces in the order of an epoch."""
    order = list(range(count))
    Random(f"{seed}/epoch/{epoch}").shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class ExpertIteration(Online):
    """Expert iteration: `collect(step)` returns graded samples, the correct ones as SFT batches with advantage 1."""

    settings: EIConfig

    def collect(self, step: int) -> Collected:
        """Sample, and keep the correct responses."""
        settings = self.settings
        problems = self.questions.next_batch(settings.questions)
        sampled = self.rollouts.sample(problems, self.sampling, settings.group_size, purpose=f"train/{step}")
        self.questions.update(sampled)
        chosen = chosen_responses(sampled, settings.max_per_question, settings.deduplicate)
        samples = [replace(s, has_loss=i in chosen, advantage=float(i in chosen)) for i, s in enumerate(sampled)]
        to_learn = [s for s in samples if s.has_loss]
        correct = sum(s.grade.outcome == "correct" for s in samples)
        metrics: dict[str, float] = {
            "ei/correct": correct,
            "ei/kept": len(to_learn),
            "ei/questions_with_kept": len({s.group for s in to_learn}) / max(len(problems), 1),
            "ei/solved_questions": self.questions.n_solved,
        }
        notices = few_questions(len(problems), settings.questions)
        if not (notices or to_learn):
            notices["nothing_to_imitate"] = (
                f"{correct} of {len(sampled)} responses were correct, none that ended before sampling.max_tokens: this "
                "step does not train; use easier questions, a larger group_size, or SFT first"
            )
        batches = self.batches(step, to_learn, settings.sft_epochs)
        return Collected(samples, batches, metrics, notices, settings.restart and bool(to_learn))


def chosen_responses(samples: Sequence[Sample], most: int | None, deduplicate: bool) -> set[int]:
    """Return the indices of responses to imitate: correct and not truncated, the first `most` per question.

    With `deduplicate`, only the first of responses to a question that differ in white space only.
    """
    per_question: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    chosen = set()
    for place, s in enumerate(samples):
        text = s.group, " ".join(s.response.text.split())
        full = most is not None and per_question[s.group] >= most
        good = s.grade.outcome == "correct" and not s.response.truncated
        if good and not full and not (deduplicate and text in seen):
            seen.add(text)
            per_question[s.group] += 1
            chosen.add(place)
    return chosen


Algorithm = GRPO | ExpertIteration | SFT  # chooses the sequences that a step learns from, and their advantages
CLOSING_S = 10.0  # for the last decoding step and the last score


class Batches:
    """The batches of an algorithm, step by step; with `ahead`, a thread samples the next one while this one learns.

    What is sampled ahead comes from weights that are one update older: call `finish_ahead` before the engine gets new
    ones. After that the next batch is complete, and part of `state_dict`.
    """

    def __init__(self, algorithm: Algorithm, ahead: bool, clock: Clock) -> None:
        self.algorithm, self.ahead, self.clock = algorithm, ahead, clock
        self.n_steps = algorithm.n_steps
        self._next: Future[Collected] | None = None
        self._executor = ThreadPoolExecutor(1, "sampling ahead")

    def collect(self, step: int) -> Collected:
        """Return the samples of this step and its batches, waiting for them if they are being sampled ahead."""
        return self._next.result() if self._next else self.algorithm.collect(step)

    def sample_ahead(self, step: int) -> None:
        """With `ahead`, begin to sample the step after this one."""
        self._next = None
        if self.ahead and step < self.n_steps:
            threads = torch.get_num_threads()  # which torch sets for each thread by itself

            def collect() -> Collected:
                torch.set_num_threads(threads)
                with self.clock.phase("rollout"):  # work in this thread, waiting in the loop's
                    return self.algorithm.collect(step + 1)

            self._next = self._executor.submit(collect)

    def finish_ahead(self) -> None:
        """Wait until nothing is being sampled; an error of sampling ahead is raised here."""
        if self._next:
            self._next.result()

    def state_dict(self) -> dict[str, Any]:
        """Return which problems come next, and the batch that was sampled ahead."""
        questions = self.algorithm.questions
        ready = plain_collected(self._next.result()) if self._next else None
        return {"algorithm": questions.state if questions else {}, "next": ready}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from this state."""
        if self.algorithm.questions:
            self.algorithm.questions.state = state["algorithm"]
        if state["next"]:
            self._next = Future()
            self._next.set_result(collected_from(state["next"]))

    def close(self) -> None:
        """Wait for sampling ahead to end; close its engine and grader before."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        if self._next:
            wait([self._next], CLOSING_S)
