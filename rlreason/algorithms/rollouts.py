"""Sample responses to problems and grade them: the part that training and evaluation share.

It knows problems, the engine and the grader; it must not know losses or the optimizer.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from rlreason.engines.base import Engine, Prompt, Sampling, seed_for
from rlreason.types import Grade, Problem, Response, Sample

#: (log-probabilities, entropies) of the response tokens of (prompt ids, response ids) pairs under some model.
LogProbScorer = Callable[[list[tuple[list[int], list[int]]]], list[tuple[list[float], list[float]]]]


class Grades(Protocol):
    """What the rest of the house knows of the grader: two lists of strings in, verdicts out, in order."""

    def grade_batch(self, responses: list[str], golds: list[str]) -> list[Grade]: ...


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Everything needed to answer problems; `prompt_ids` gives a problem's prompt as token ids."""

    engine: Engine
    grader: Grades
    prompt_ids: Callable[[Problem], list[int]]
    seed: int
    tell: Callable[[str], None] = lambda text: None  # how far sampling and grading have come, for a person
    beside: Grades | None = None  # a second grader, whose verdicts are kept and count for nothing

    def sample(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        n: int,
        purpose: object,
        finished: Callable[[int, Sample], None] | None = None,
    ) -> list[Sample]:
        """n responses to each problem, each graded while others are still being sampled.

        The same `purpose` (a step, say) draws the same random numbers. `finished(number among the n, sample)` is
        called beside sampling, as soon as a response has its grade.
        """
        prompts = [Prompt(p.id, self.prompt_ids(p), seed_for(self.seed, purpose, p.id)) for p in problems]
        samples: dict[int, Future[Sample]] = {}
        waiting: deque[Future[Sample]] = deque()
        beside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")

        def grade(place: int, response: Response) -> Sample:
            gold = problems[place // n].answer
            sample = Sample(response, self.grader.grade_batch([response.text], [gold])[0])
            if self.beside is not None:
                sample.prompt_grade = self.beside.grade_batch([response.text], [gold])[0]
            if finished is not None:
                finished(place % n, sample)
            return sample

        def take(place: int, response: Response) -> None:
            samples[place] = beside.submit(grade, place, response)
            self.tell(f"{len(samples)}/{len(prompts) * n} responses")
            waiting.append(samples[place])
            while waiting[0].done() and len(waiting) > 1:
                waiting.popleft().result()  # what failed there, such as a full disk, is said now and not at the end

        try:
            self.engine.generate(prompts, sampling, n, take)
            self.tell("grading")
            return [samples[place].result() for place in range(len(prompts) * n)]
        finally:
            beside.shutdown(wait=False, cancel_futures=True)  # after an interruption, nobody asks for the grades


def score_samples(samples: Sequence[Sample], of: LogProbScorer) -> None:
    """Give each sample its log-probabilities and its mean entropy under the model as it is now."""
    scores = of([(s.response.prompt_ids, s.response.token_ids) for s in samples])
    for sample, (log_probs, entropies) in zip(samples, scores, strict=True):
        sample.log_probs = log_probs
        sample.entropy = sum(entropies) / len(entropies) if entropies else None


def rollout_metrics(samples: Sequence[Sample], prefix: str = "rollout") -> dict[str, float]:
    """Rewards, lengths and what can go wrong quietly, as flat numbers over a batch of samples."""
    if not samples:
        return {}
    n = len(samples)
    groups: dict[str, list[Sample]] = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s)
    live = sum(any(s.live for s in group) for group in groups.values())
    distinct = sum(len({tuple(s.response.token_ids) for s in group}) / len(group) for group in groups.values())
    return {
        "reward/mean": sum(s.grade.reward for s in samples) / n,
        "reward/format": sum(s.grade.format for s in samples) / n,
        "reward/answer": sum(s.grade.answer for s in samples) / n,
        "reward/live_groups": live / len(groups),  # share of groups with credit other than 0, a KL term aside
        f"{prefix}/length_max": max((len(s.response.token_ids) for s in samples), default=0),
        f"{prefix}/truncated": sum(s.response.truncated for s in samples) / n,
        f"{prefix}/distinct": distinct / len(groups),  # share of different responses within a group
        f"{prefix}/tokens": sum(len(s.response.token_ids) for s in samples),
        **by_outcome(samples, prefix),
    }


def by_outcome(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """Mean length and entropy of all, of the correct and of the other responses, as far as there are any.

    The entropy is that of the trainer's distribution, a mean over a response's tokens; `surprise` is the mean of
    -log p of the sampled tokens under the engine, an estimate of the same that costs nothing.
    """
    out: dict[str, float] = {}
    correct = [s for s in samples if s.grade.outcome == "correct"]
    others = [s for s in samples if s.grade.outcome != "correct"]
    for suffix, members in (("", samples), ("_correct", correct), ("_wrong", others)):
        if members:
            out[f"{prefix}/length{suffix}"] = sum(len(s.response.token_ids) for s in members) / len(members)
        if entropies := [s.entropy for s in members if s.entropy is not None]:
            out[f"{prefix}/entropy{suffix}"] = sum(entropies) / len(entropies)
    if n_tokens := sum(len(s.response.log_probs) for s in samples):
        out[f"{prefix}/surprise"] = -sum(sum(s.response.log_probs) for s in samples) / n_tokens
    return out
