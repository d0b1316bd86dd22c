"""Expert iteration: sample, keep what is correct, SFT on it. RFT (arXiv 2308.01825) is one step with
`deduplicate`; STaR (arXiv 2203.14465) learns from the starting weights in each step (`restart`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlreason.algorithms.base import Online
from rlreason.types import Collected, Sample


@dataclass(frozen=True, slots=True)
class ExpertIteration(Online):
    """`collect(step)` -> graded samples; the kept ones, with advantage 1, cut into the optimizer steps of an SFT."""

    max_per_question: int | None = None
    deduplicate: bool = False
    restart: bool = False

    def collect(self, step: int) -> Collected:
        """Sample, and keep what is correct."""
        problems = self.questions.next_batch(self.per_step)
        sampled = self.rollouts.sample(problems, self.sampling, self.group_size, purpose=f"train/{step}")
        self.questions.update(sampled)
        chosen = chosen_responses(sampled, self.max_per_question, self.deduplicate)
        samples = [replace(s, has_loss=i in chosen, advantage=float(i in chosen)) for i, s in enumerate(sampled)]
        kept = [s for s in samples if s.has_loss]
        correct = sum(s.grade.outcome == "correct" for s in samples)
        metrics: dict[str, float] = {
            "ei/correct": correct,
            "ei/kept": len(kept),
            "ei/questions_with_kept": len({s.group for s in kept}) / max(len(problems), 1),
            "ei/solved_questions": self.questions.n_solved,
        }
        return Collected(
            samples,
            self.batches(step, kept),
            metrics,
            self._notices(len(problems), correct, len(kept)),
            restart=self.restart and bool(kept),
        )

    def _notices(self, asked: int, correct: int, kept: int) -> dict[str, str]:
        if not asked:
            return {"nothing_asked": "every question counts as solved (skip_solved): nothing is left to ask or learn"}
        if asked < self.per_step:
            return {"few_questions": f"only {asked} of {self.per_step} questions are left unsolved"}
        if not correct:
            asked_text = f"none of {asked * self.group_size} responses was correct"
            cure = "use easier questions, a larger group_size, or SFT first"
            return {"nothing_correct": f"{asked_text}: nothing to imitate, so this step does not train; {cure}"}
        if not kept:
            return {"nothing_kept": f"all {correct} correct responses were cut at sampling.max_tokens: raise it"}
        return {}


def chosen_responses(samples: Sequence[Sample], most: int | None, deduplicate: bool) -> set[int]:
    """Places of the responses to imitate: correct and ended by themselves, the first `most` of each question.

    With `deduplicate`, of several responses to a question that differ in white space only the first counts.
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
