"""Sample and record the responses to a run's problems: the common part of all jobs that do not train.

Finished problems are on disk at once; an interrupted job resumes with the others. Each problem has its own random
numbers, and entropies and log-probabilities are measured at the end in the order of the problems: the file does
not depend on where the job was interrupted, as far as the engine rounds alike in batches of other rows. It does with
the tiny model; with a real one some responses take another turn, in bfloat16 many, all drawn with the same
probabilities.
"""

import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from rlreason.config.algorithms import EvalJobConfig
from rlreason.config.evaluation import sampling_key
from rlreason.data.sources import question_hash
from rlreason.engines.rollouts import score_samples
from rlreason.errors import DataError
from rlreason.evaluation.accuracy import PURPOSE, SampleFigures, figures_of, is_correct, mismatches_of, more_accuracies
from rlreason.evaluation.cases import by_facts
from rlreason.evaluation.evaluator import protocol_of
from rlreason.evaluation.protocol import Protocol
from rlreason.health.watch import Monitors
from rlreason.model.policy import weights_hash
from rlreason.records.console import Console, clock
from rlreason.records.files import PASS_RATES, RESPONSES
from rlreason.records.reader import time_summary
from rlreason.records.rows import Counters, ResponseLog, Row, numbered_row
from rlreason.records.writer import RunWriter
from rlreason.runtime.text import few
from rlreason.training.build import Components
from rlreason.types import Problem, Sample

BLOCK, BLOCK_TOKENS = 4096, 2**22  # responses and tokens sampled before they are scored and written: 0.7 GB
PRINT_EVERY_S = 5.0  # between lines of a log file, at least


@dataclass(frozen=True, slots=True)
class Responses:
    """All responses of a job, problem by problem, with grades and log-probabilities."""

    problems: list[Problem]
    samples: list[SampleFigures]
    examples: list[Sample]  # the first response to each of the first problems, to be printed
    metrics: dict[str, float]  # eval/...
    protocol: Protocol
    weights: str
    finished_before: int  # problems, by an interrupted job
    seconds: float  # of sampling, in this process
    tokens_per_second: float
    notices: dict[str, int]  # warnings of the monitors, and how often
    verdict: tuple[str, str]  # (status, reason)


@dataclass(slots=True)
class ResponseTotals:
    """Running totals of the responses so far; everything else about them is on disk."""

    samples: list[SampleFigures] = field(default_factory=list)
    mismatches: "array[float]" = field(default_factory=lambda: array("d"))  # of every token
    examples: list[Sample] = field(default_factory=list)
    tokens: int = 0  # sampled by this process
    seconds: float = 0.0  # of sampling


def respond(run: EvalJobConfig, components: Components, records: RunWriter, console: Console) -> Responses:
    """Sample and record the responses to the run's problems; call `conclude` after it."""
    evaluator, n = components.evaluator, components.evaluator.settings.samples
    problems = job_problems(run, components)
    key = "data" if run.eval.data is None else "eval.data"
    check_askable(problems, f"split={run.split} of {key}={evaluator.settings.data.name}", key)
    protocol = protocol_of(evaluator.settings, problems, components.policy.tokenizer)
    weights = weights_hash(components.policy.named_weights())
    log = records.open_log(f"protocol {protocol['hash']}, weights {weights}", problems, n)
    finished = len(log.samples)
    if finished:
        console.say(f"{finished} of {len(problems)} problems were finished before the interruption and are kept")
    records.clock.begin()
    totals = sample_all(run, components, problems, log, records, console)
    monitors = Monitors(1, console.say, run.monitors, sampling_key(run, "max_tokens"), steps=False)
    metrics = evaluator.figures(totals.samples, totals.mismatches, problems, None, monitors)
    records.rows(PASS_RATES, pass_rates(problems, totals.samples, n))
    return Responses(
        problems=problems,
        samples=totals.samples,
        examples=totals.examples,
        metrics=metrics,
        protocol=protocol,
        weights=weights,
        finished_before=finished,
        seconds=totals.seconds,
        tokens_per_second=totals.tokens / max(totals.seconds, 1e-9),
        notices=dict(monitors.counts),
        verdict=monitors.verdict(),
    )


def sample_all(
    run: EvalJobConfig,
    components: Components,
    problems: Sequence[Problem],
    log: ResponseLog,
    records: RunWriter,
    console: Console,
) -> ResponseTotals:
    """Sample, score and record the responses to all problems, block by block.

    A block is as large as its tokens may be at once in memory; most evaluations are a single block.
    """
    evaluator, n, totals = components.evaluator, components.evaluator.settings.samples, ResponseTotals()
    rows, most = run.rollout.max_rows, evaluator.sampling.max_tokens
    progress = Progress(console, len(problems) * n, log, rows, most)
    size = max(1, max(min(BLOCK_TOKENS // most, BLOCK), 4 * rows) // n)
    with records.growing(RESPONSES) as write:
        for first in range(0, len(problems), size):
            block = problems[first : first + size]
            with records.clock.phase("eval"):
                samples = sample_block(components, block, log, progress, console, totals)
                with console.wait(f"measuring entropies of {len(samples)} responses"):
                    scored = score_samples(samples, evaluator.scorer)
            write(rows_of(scored, block, n, components))
            totals.samples += map(figures_of, scored)
            totals.mismatches += mismatches_of(scored, evaluator.sampling)
            totals.examples += scored[::n][: run.log_generations - len(totals.examples)]
    return totals


def job_problems(run: EvalJobConfig, components: Components) -> list[Problem]:
    """Return the problems of the chosen split, as many as the settings allow."""
    most = components.evaluator.settings.final_problems
    return components.train_problems[:most] if run.split == "train" else components.final_problems


def sample_block(
    components: Components,
    problems: Sequence[Problem],
    log: ResponseLog,
    progress: "Progress",
    console: Console,
    totals: ResponseTotals,
) -> list[Sample]:
    """Return the samples, problem by problem; count tokens and seconds of those not yet in the log in `totals`."""
    evaluator, left = components.evaluator, [p for p in problems if p.id not in log.samples]
    n = evaluator.settings.samples

    def finished(number: int, sample: Sample) -> None:
        log.add(number, sample)
        progress.add(sample)

    began = time.monotonic()
    try:
        with console.wait("sampling", more=evaluator.rollouts.progress_text):
            fresh = evaluator.rollouts.sample(left, evaluator.sampling, n, PURPOSE, finished) if left else []
    except KeyboardInterrupt as stopped:
        state = f"with {progress.answered} of {progress.wanted} responses kept"
        raise type(stopped)(f"{stopped} {state}".strip()) from None
    totals.seconds += time.monotonic() - began
    totals.tokens += sum(s.length for s in fresh)
    by_problem = {p.id: fresh[i * n : (i + 1) * n] for i, p in enumerate(left)}
    return [s for p in problems for s in by_problem.get(p.id) or log.samples.pop(p.id)]


def check_askable(problems: Sequence[Problem], where: str, key: str = "data") -> None:
    """Refuse an empty split, and problems without a ground truth.

    `key`: of the data's settings, `data` or `eval.data`.
    """
    if not problems:
        raise DataError(f"{where} holds no problems: give data, or choose the other split")
    without = [p.id for p in problems if not p.answer.strip()]
    if without:
        raise DataError(
            f"{len(without)} of {len(problems)} problems in {where} have an empty ground truth ({few(without)}), so "
            f"nothing can be graded there: complete or remove these rows, or say where it stands ({key}.gold)"
        )


def rows_of(samples: Sequence[Sample], problems: Sequence[Problem], n: int, components: Components) -> Iterator[Row]:
    """Yield the rows of `responses.jsonl`; their log-probabilities are the model's own, at the sampling temperature."""
    prompts = components.evaluator.prompts(samples[::n])
    for place, sample in enumerate(samples):
        measured = [round(log_prob, 4) for log_prob in sample.log_probs or []]
        row = numbered_row(sample, problems[place // n], place % n)
        yield row | {"prompt": prompts[place // n], "log_probs": measured}


def pass_rates(problems: Sequence[Problem], samples: Sequence[SampleFigures], n: int) -> list[Row]:
    """Count how often each problem was solved, for curricula (data.pass_rates)."""
    return [
        {
            "problem_id": p.id,
            "question_hash": question_hash(p.question),
            "samples": n,
            "correct": sum(map(is_correct, samples[i * n : (i + 1) * n])),
        }
        for i, p in enumerate(problems)
    ]


def conclude(records: RunWriter, components: Components, responses: Responses, more: dict[str, Any]) -> None:
    """Write the metrics row and then the summary, which marks the job as complete."""
    r = responses
    metrics = r.metrics | {"eval/tokens_per_second": r.tokens_per_second}
    records.metrics(Counters(eval_step=1, clock=records.clock).row() | metrics)
    status, reason = r.verdict
    summary = {
        "status": status,
        "reason": reason,
        "accuracy": metrics["eval/accuracy"],
        "accuracy_interval": [metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]],
        **more_accuracies(metrics, *components.evaluator.rewards),
        **by_facts(r.samples, r.problems),
        "length": metrics["eval/length"],
        "truncated": metrics["eval/truncated"],
        "tokens_per_second": round(r.tokens_per_second, 1),
        **more,
        "eval_problems": len(r.problems),
        "data_sizes": components.sizes,
        "problems_kept_from_before": r.finished_before,
        "notices": r.notices,
        "weights": r.weights,
        **({"start": asdict(components.start)} if components.start else {}),
        "protocol": r.protocol,
        **time_summary(records.clock),
        "seconds": round(r.seconds, 1),  # of sampling
        "threads": torch.get_num_threads(),
    }
    records.summary(summary)


@dataclass(slots=True)
class SamplingRate:
    """How fast the responses of this process are sampled, and how long the others will take."""

    total: int  # responses to sample
    rows: int  # of them at the same time
    max_tokens: int
    done: int = 0
    tokens: int = 0  # of those done
    longest: int = 0  # of those done, in tokens

    def add(self, length: int) -> None:
        """Count a finished response of this many tokens."""
        self.done, self.tokens, self.longest = self.done + 1, self.tokens + length, max(self.longest, length)

    def outlook(self, spent: float) -> tuple[float, float]:
        """Estimate (tokens per second, seconds left), counting what `rows` concurrent responses have written so far.

        While the first ones run, all are assumed as long as the longest finished one; later, half a mean response.
        They are expected to end halfway from there to the limit; those that wait, to be of mean length.

        >>> SamplingRate(total=4, rows=4, max_tokens=10, done=1, tokens=10, longest=10).outlook(spent=2.0)
        (20.0, 0.0)
        >>> SamplingRate(total=16, rows=2, max_tokens=10, done=8, tokens=80, longest=10).outlook(spent=9.0)
        (10.0, 6.5)
        """
        mean, alive = self.tokens / self.done, min(self.rows, self.total - self.done)
        age = self.longest if self.done < self.rows else mean / 2
        speed = (self.tokens + alive * age) / spent
        ahead = alive * (self.max_tokens - age) / 2 + (self.total - self.done - alive) * mean
        return speed, ahead / speed


class Progress:
    """Prints done, accuracy so far, tokens per second and time left: in place on a terminal, a few lines in a log."""

    def __init__(self, console: Console, wanted: int, log: ResponseLog, rows: int, max_tokens: int) -> None:
        """`wanted`: total number of responses, some of which are in the log."""
        self.console, self.wanted = console, wanted
        before = [is_correct(s) for samples in log.samples.values() for s in samples]
        self.answered, self.correct = len(before), sum(before)
        self.rate = SamplingRate(wanted - len(before), rows, max_tokens)
        self.began, self.printed = time.monotonic(), 0.0

    def add(self, sample: Sample) -> None:
        """Count a graded response."""
        rate = self.rate
        rate.add(len(sample.response.token_ids))
        self.answered += 1
        self.correct += is_correct(sample)
        spent = time.monotonic() - self.began
        speed, left = rate.outlook(max(spent, 1e-9))
        done, accuracy = f"{rate.done}/{rate.total}", self.correct / self.answered
        if self.console.live:
            self.console.progress(f"{done}, accuracy {accuracy:.3f}, {speed:.0f} tokens/s, {clock(left)} left")
            return
        next_tenth = 10 * rate.done // rate.total > 10 * (rate.done - 1) // rate.total
        if next_tenth and spent > self.printed + PRINT_EVERY_S:
            self.printed = spent
            self.console.say(
                f"{done} responses, accuracy so far {accuracy:.3f}, {speed:.0f} tokens/s, "
                f"{clock(spent)}, about {clock(left)} left"
            )
