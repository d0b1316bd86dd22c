"""Sample responses to problems, grade and score them, and compute their metrics, for training and evaluation."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from rlreason.engines.base import Engine, Prompt, Sampling, seed_for
from rlreason.grading import Grader
from rlreason.records.console import Console
from rlreason.records.rows import ResponseLog
from rlreason.runtime.clock import Clock, Work, group_work
from rlreason.types import Collected, Problem, Response, Sample, ScoredResponse

if TYPE_CHECKING:
    from rlreason.model.policy import LogProbScorer


TOGETHER = 4  # responses for each process of the grader; an evaluation that is broken off has lost at most these
LONG_ODDS = math.log(1e10)  # nats: a response this improbable is not drawn twice by chance


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Engine, grader and prompt encoder together: `sample` turns problems into graded samples."""

    engine: Engine
    grader: Grader
    prompt_ids: Callable[[Problem], list[int]]  # a `PromptEncoder`
    seed: int
    report: Callable[[str], None] = lambda text: None  # takes the progress of sampling and grading
    second_grader: Grader | None = None  # its grades are kept as `prompt_grade` and do not count
    clock: Clock = field(default_factory=Clock)
    phase: str = "rollout"  # the clock's phase for tokens per second

    def progress_text(self) -> str:
        """Return the number of tokens sampled so far, as text for the progress line."""
        return f", {self.engine.drawn} tokens"

    def sample(
        self,
        problems: Sequence[Problem],
        sampling: Sampling,
        n: int,
        purpose: object,
        finished: Callable[[int, Sample], None] | None = None,
    ) -> list[Sample]:
        """Sample n responses to each problem and grade those that have ended while others are still being sampled.

        The same `purpose` (such as a step) draws the same random numbers. `finished(number among the n, sample)` is
        called from the grading thread as soon as a response, and the few graded with it, have their grades.
        """
        prompts = [Prompt(p.id, self.prompt_ids(p), seed_for(self.seed, purpose, p.id)) for p in problems]
        waiting, graded = deque[tuple[int, Response]](), dict[int, Sample]()
        tasks, failures = list[Future[None]](), list[BaseException]()
        most = TOGETHER * self.grader.grading.workers
        grading = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading")
        began, ended = time.monotonic(), math.inf

        def grade() -> None:
            """Grade some that have ended, together: the grader shares them among its processes."""
            since, batch = time.monotonic(), [waiting.popleft() for _ in range(min(len(waiting), most))]
            texts, answers = [one.text for _, one in batch], [problems[place // n].answer for place, _ in batch]
            try:
                grades, second = self.grader.grade_batch(texts, answers), self.second_grader
                others = [None] * len(batch) if second is None else second.grade_batch(texts, answers)
                for (place, response), one, other in zip(batch, grades, others, strict=True):
                    graded[place] = Sample(response, one, other)
                    if finished is not None:
                        finished(place % n, graded[place])
            except BaseException as error:
                failures.append(error)
                raise
            finally:  # grading after the end of sampling is counted by the phase below
                self.clock.add("busy/grading", max(0.0, min(time.monotonic(), ended) - since))

        def submit(place: int, response: Response) -> None:
            if failures:  # such as a full disk: end now and not when all are sampled
                raise failures[0]
            waiting.append((place, response))
            tasks.append(grading.submit(grade))
            self.report(f"{len(tasks)}/{len(prompts) * n} responses")

        try:
            responses = self.engine.generate(prompts, sampling, n, submit)
            ended = time.monotonic()
            self.clock.worked(self.phase, sampling_work(responses, ended - began))
            self.report("grading")
            with self.clock.phase("grading"):
                for task in tasks:
                    task.result()
            return [graded[place] for place in range(len(prompts) * n)]
        finally:
            grading.shutdown(wait=False, cancel_futures=True)  # after an interruption the grades are not needed


FORWARD, WITH_BACKWARD = 1, 3  # passes


def sampling_work(responses: Sequence[Response], seconds: float) -> Work:
    """Return the work of sampling these: each prompt and every response token goes through the model once."""
    return _work([(response.problem_id, FORWARD, response) for response in responses], seconds)


def training_work(batch: Sequence[Sample], seconds: float, all_learn: bool = False) -> Work:
    """Return the work of an update on these samples, each prompt once a group; `tokens` are response tokens with loss.

    A sample with advantage 0 only goes forward, unless `all_learn`: a KL or entropy term gives it a gradient.
    """
    learned = [
        (tuple(s.response.prompt_ids), WITH_BACKWARD if s.advantage or all_learn else FORWARD, s.response)
        for s in batch
        if s.has_loss
    ]
    return _work(learned, seconds)


def _work(responses: Sequence[tuple[object, int, Response]], seconds: float) -> Work:
    """Return the work of (group, passes, response) each: a prompt counts once a group."""
    groups: dict[tuple[object, int], list[Response]] = {}
    for key, passes, response in responses:
        groups.setdefault((key, passes), []).append(response)
    work = Work(seconds)
    for (_, passes), group in groups.items():
        work = work.plus(group_work(len(group[-1].prompt_ids), [len(r.token_ids) for r in group], passes))
    return work


def token_ids(samples: Sequence[Sample]) -> list[tuple[list[int], list[int]]]:
    """Return (prompt ids, response ids) of each sample, as a `LogProbScorer` takes them."""
    return [(s.response.prompt_ids, s.response.token_ids) for s in samples]


def score_samples(samples: Sequence[Sample], scorer: "LogProbScorer") -> list[Sample]:
    """Return the samples with log-probabilities and mean entropies under the current weights."""
    return [
        replace(sample, log_probs=log_probs, entropy=sum(entropies) / len(entropies) if entropies else None)
        for sample, (log_probs, entropies) in zip(samples, scorer(token_ids(samples)), strict=True)
    ]


def with_missing_scores(collected: Collected, scorer: "LogProbScorer", by_learning: bool) -> Collected:
    """Score the samples that have no scores yet; `by_learning`: those with loss are scored by their update."""
    samples = list(collected.samples)
    unscored = [i for i, s in enumerate(samples) if s.entropy is None and not (by_learning and s.has_loss)]
    if unscored:
        for i, scored in zip(unscored, score_samples([samples[i] for i in unscored], scorer), strict=True):
            samples[i] = scored
    return replace(collected, samples=samples)


def rollout_metrics(samples: Sequence[ScoredResponse], prefix: str = "rollout") -> dict[str, float]:
    """Return rewards, lengths and signs of silent failures over a batch of samples, as flat metrics."""
    if not samples:
        return {}
    n, rewards = len(samples), [s.grade.reward for s in samples]
    groups: dict[str, list[ScoredResponse]] = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s)
    distinct, copies = 0.0, 0
    for group in groups.values():
        distinct += len({s.tokens_key for s in group}) / len(group)
        # The probability is the engine's: independent draws do not repeat such a response, shared seeds do.
        unlikely = [s.tokens_key for s in group if s.nll > LONG_ODDS]
        copies += len(unlikely) - len(set(unlikely))
    return {
        "reward/mean": sum(rewards) / n,
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "reward/format": sum(s.grade.format for s in samples) / n,
        "reward/answer": sum(s.grade.answer for s in samples) / n,
        f"{prefix}/length_max": max(s.length for s in samples),
        f"{prefix}/truncated": sum(s.truncated for s in samples) / n,
        f"{prefix}/distinct": distinct / len(groups),  # share of distinct responses within a group
        f"{prefix}/improbable_copies": copies / n,
        f"{prefix}/tokens": sum(s.length for s in samples),
        **metrics_by_outcome(samples, prefix),
    }


def metrics_by_outcome(samples: Sequence[ScoredResponse], prefix: str) -> dict[str, float]:
    """Return mean length and entropy of all, of the correct and of the other responses, where there are any.

    The entropy is that of the trainer's distribution, a mean over a response's tokens; `nll` is the mean of -log p
    of the sampled tokens under the engine, an estimate of the same that costs nothing.
    """
    out: dict[str, float] = {}
    for suffix, outcomes in (("", (True, False)), ("_correct", (True,)), ("_wrong", (False,))):
        if members := [s for s in samples if (s.grade.outcome == "correct") in outcomes]:
            out[f"{prefix}/length{suffix}"] = sum(s.length for s in members) / len(members)
        if entropies := [s.entropy for s in members if s.entropy is not None]:
            out[f"{prefix}/entropy{suffix}"] = sum(entropies) / len(entropies)
    if n_tokens := sum(s.n_log_probs for s in samples):
        out[f"{prefix}/nll"] = sum(s.nll for s in samples) / n_tokens
    return out


PRINT_EVERY_S = 60.0


class SamplingProgress:
    """Prints every minute how many responses are done, and their accuracy."""

    def __init__(self, console: Console, wanted: int, log: ResponseLog) -> None:
        """`wanted`: total number of responses, some of which are in the log."""
        self.console, self.wanted, self.printed = console, wanted, time.monotonic()
        outcomes = [s.grade.outcome for samples in log.samples.values() for s in samples]
        self.answered, self.correct = len(outcomes), outcomes.count("correct")

    def add(self, sample: Sample) -> None:
        """Count a graded response."""
        self.answered += 1
        self.correct += sample.grade.outcome == "correct"
        if time.monotonic() > self.printed + PRINT_EVERY_S:
            self.printed = time.monotonic()
            self.console.say(f"{self.answered}/{self.wanted} responses, accuracy {self.correct / self.answered:.3f}")
