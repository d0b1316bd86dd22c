"""SFT on given responses, and expert iteration: sample, keep the correct responses, SFT on them."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from random import Random
from typing import Any

from rlreason.training.algorithms.base import Online
from rlreason.types import Collected, Grade, Response, Sample

GIVEN = Grade(1.0, 1.0, 1.0, "correct", path="given")  # a trace to imitate is not graded


def sft_sample(prompt_ids: list[int], response_ids: list[int], text: str, problem_id: str = "given") -> Sample:
    """Wrap a given response as a sample with advantage 1; `response_ids` include the end token."""
    return Sample(Response(problem_id, prompt_ids, response_ids, [], text, "stop"), GIVEN, advantage=1.0)


@dataclass(frozen=True)
class SFT:
    """Supervised fine-tuning: `collect(step)` returns the next traces, in passes over all, each in its own order."""

    traces: Sequence[Sample]
    batch_size: int
    seed: int
    steps: int | None = None
    epochs: float | None = None  # one of the two is given
    _orders: dict[int, list[int]] = field(default_factory=dict)

    @cached_property
    def total(self) -> int:
        """Number of traces to learn from, repetitions included."""
        if self.steps is not None:
            return self.steps * self.batch_size
        assert self.epochs is not None
        return max(1, round(self.epochs * len(self.traces)))

    @property
    def n_steps(self) -> int:
        """Number of optimizer steps, the last of which may be smaller."""
        return math.ceil(self.total / self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Empty: a step's traces follow from its number."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: there is no state."""

    def collect(self, step: int) -> Collected:
        """Return the step's traces as one batch; nothing is sampled."""
        first = (step - 1) * self.batch_size
        last = min(first + self.batch_size, self.total)
        batch = [self._at(position) for position in range(first, last)]
        tokens = sum(len(s.response.token_ids) for s in batch)
        metrics = {"sft/epoch": last / len(self.traces), "sft/sequences": len(batch), "sft/response_tokens": tokens}
        return Collected([], [batch], metrics)

    def _at(self, position: int) -> Sample:
        epoch, place = divmod(position, len(self.traces))
        return self.traces[self._order(epoch)[place]]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            order = list(range(len(self.traces)))
            Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
            self._orders.clear()  # passes come in order: only the current one is needed again
            self._orders[epoch] = order
        return self._orders[epoch]


@dataclass(frozen=True, slots=True)
class ExpertIteration(Online):
    """Expert iteration: `collect(step)` returns graded samples, the correct ones as SFT batches with advantage 1."""

    max_per_question: int | None = None
    deduplicate: bool = False
    restart: bool = False

    def collect(self, step: int) -> Collected:
        """Sample, and keep the correct responses."""
        problems = self.questions.next_batch(self.per_step)
        sampled = self.rollouts.sample(problems, self.sampling, self.group_size, purpose=f"train/{step}")
        self.questions.update(sampled)
        chosen = chosen_responses(sampled, self.max_per_question, self.deduplicate)
        samples = [replace(s, has_loss=i in chosen, advantage=float(i in chosen)) for i, s in enumerate(sampled)]
        to_learn = [s for s in samples if s.has_loss]
        correct = sum(s.grade.outcome == "correct" for s in samples)
        metrics: dict[str, float] = {
            "ei/correct": correct,
            "ei/kept": len(to_learn),
            "ei/questions_with_kept": len({s.group for s in to_learn}) / max(len(problems), 1),
            "ei/solved_questions": self.questions.n_solved,
        }
        return Collected(
            samples,
            self.batches(step, to_learn),
            metrics,
            self._notices(len(problems), correct, len(to_learn)),
            restart=self.restart and bool(to_learn),
        )

    def _notices(self, questions: int, correct: int, to_learn: int) -> dict[str, str]:
        if not questions:
            return {"nothing_asked": "every question counts as solved (skip_solved): nothing is left to ask or learn"}
        if questions < self.per_step:
            return {"few_questions": f"only {questions} of {self.per_step} questions are left unsolved"}
        if not correct:
            finding = f"none of {questions * self.group_size} responses was correct"
            cure = "use easier questions, a larger group_size, or SFT first"
            return {"nothing_correct": f"{finding}: nothing to imitate, so this step does not train; {cure}"}
        if not to_learn:
            return {"nothing_kept": f"all {correct} correct responses were cut at sampling.max_tokens: raise it"}
        return {}


def chosen_responses(samples: Sequence[Sample], most: int | None, deduplicate: bool) -> set[int]:
    """Return the indices of responses to imitate: correct and not truncated, the first `most` per question.

    With `deduplicate`, only the first of responses to a question that differ in white space only.
    """
    per_question: Counter[str] = Counter()
    seen: set[tuple[str, str]] = set()
    chosen = set()
    for place, s in enumerate(samples):
        text = " ".join(s.response.text.split())
        repeated = deduplicate and (s.group, text) in seen
        full = most is not None and per_question[s.group] >= most
        if s.grade.outcome != "correct" or s.response.truncated or repeated or full:
            continue
        seen.add((s.group, text))
        per_question[s.group] += 1
        chosen.add(place)
    return chosen
