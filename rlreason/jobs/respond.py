"""Ask a run's problems, keep every response: what all jobs that do not train share.

What is finished is on disk at once; an interrupted job goes on with the problems that are left. Entropies and
log-probabilities are measured at the end in the order of the problems, so that the file does not depend on where
the job was interrupted. It must not know what becomes of the responses.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlreason.config.jobs import Asking
from rlreason.console import Console, clock
from rlreason.data.files import question_hash
from rlreason.errors import ConfigError
from rlreason.evaluation import figures, is_correct, stream
from rlreason.jobs.identity import weights_hash
from rlreason.jobs.store import Store, row_of
from rlreason.protocol import Protocol
from rlreason.records import finite, write_whole
from rlreason.setup.house import House
from rlreason.setup.protocol import protocol_of
from rlreason.types import Problem, Sample


@dataclass(frozen=True, slots=True)
class Responses:
    """All responses of a job, problem by problem, each with its grade and its numbers under the model."""

    problems: list[Problem]
    samples: list[Sample]
    metrics: dict[str, float]  # eval/...
    protocol: Protocol
    weights: str
    found: int  # problems that an interrupted job had finished
    seconds: float  # of sampling, in this process
    tokens_per_second: float


def respond(run: Asking, house: House, folder: Path, console: Console) -> tuple[Responses, Store]:
    """The responses to the run's problems. Remove the store when everything that follows from them is written."""
    problems, n = asked(run, house), run.responses
    protocol, weights = protocol_of(run, problems, n), weights_hash(house.policy.named_weights())
    store = Store(folder, f"protocol {protocol['hash']}, weights {weights}", problems, n)
    left = [p for p in problems if p.id not in store.samples]
    found = len(problems) - len(left)
    if found:
        console.say(f"{found} of {len(problems)} problems were finished before the interruption and are kept")
    progress = Progress(console, len(left) * n, [s for samples in store.samples.values() for s in samples])

    def finished(number: int, sample: Sample) -> None:
        store.add(number, sample)
        progress.add(sample)

    began = time.monotonic()
    try:
        fresh = stream(house.rollouts, left, house.sampling, n, finished)
    finally:
        store.close()
    seconds = time.monotonic() - began
    by_problem = store.samples | {p.id: fresh[i * n : (i + 1) * n] for i, p in enumerate(left)}
    samples = [s for p in problems for s in by_problem[p.id]]
    console.progress("measuring entropies ...")
    metrics = figures(samples, house.sampling, house.measure)
    store.finish(rows_of(samples, problems, n, house))
    write_pass_rates(folder, problems, samples, n)
    speed = sum(len(s.response.token_ids) for s in fresh) / max(seconds, 1e-9)
    return Responses(problems, samples, metrics, protocol, weights, found, seconds, speed), store


def asked(run: Asking, house: House) -> list[Problem]:
    """The problems of the job; each must have a gold answer, or there is nothing to grade."""
    problems = house.train_problems[: run.eval_problems] if run.split == "train" else house.eval_problems
    if not problems:
        raise ConfigError(f"split={run.split} of data={run.data.name} holds no problems: give data, or the other split")
    without = [p.id for p in problems if not p.answer.strip()]
    if without:
        raise ConfigError(
            f"{len(without)} of {len(problems)} problems have an empty gold answer ({', '.join(without[:3])}): nothing "
            "can be graded there: complete or remove these rows, or say where the gold stands (data.gold)"
        )
    return problems


def rows_of(samples: Sequence[Sample], problems: Sequence[Problem], n: int, house: House) -> list[dict[str, object]]:
    """The lines of `responses.jsonl`: log-probabilities are the model's own here, at the sampling temperature."""
    decode = house.policy.tokenizer.decode
    prompts = [str(decode(s.response.prompt_ids, clean_up_tokenization_spaces=False)) for s in samples[::n]]
    measured = [
        {
            "prompt": prompts[place // n],
            "entropy": None if s.entropy is None else round(s.entropy, 4),
            "log_probs": [round(lp, 4) for lp in s.old_log_probs],
        }
        for place, s in enumerate(samples)
    ]
    rows = (row_of(s, problems[place // n], place % n) for place, s in enumerate(samples))
    return [finite(row | more) for row, more in zip(rows, measured, strict=True)]


def write_pass_rates(folder: Path, problems: Sequence[Problem], samples: Sequence[Sample], n: int) -> None:
    """How often each problem was solved: what a curriculum (data.pass_rates) chooses by."""
    rows = (
        {
            "problem_id": p.id,
            "question_hash": question_hash(p.question),
            "samples": n,
            "correct": sum(map(is_correct, samples[i * n : (i + 1) * n])),
        }
        for i, p in enumerate(problems)
    )
    write_whole(folder / "pass_rates.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


def conclude(folder: Path, house: House, responses: Responses, store: Store, more: dict[str, Any]) -> None:
    """The numbers as one row and as `summary.json`, which is written last: with it the job is whole."""
    r = responses
    metrics = r.metrics | {"time/eval": r.seconds, "eval/tokens_per_second": r.tokens_per_second}
    write_whole(folder / "metrics.jsonl", json.dumps(finite({"eval_step": 0, **metrics})) + "\n")
    summary = {
        "status": "finished",
        "accuracy": metrics["eval/accuracy"],
        "accuracy_interval": [metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]],
        "length": metrics["eval/length"],
        "truncated": metrics["eval/truncated"],
        "tokens_per_second": round(r.tokens_per_second, 1),
        **more,
        "eval_problems": len(r.problems),
        "problems_kept_from_before": r.found,
        "weights": r.weights,
        "protocol": r.protocol,
        "seconds": round(r.seconds, 1),
        "threads": torch.get_num_threads(),
    }
    if house.mirror:
        house.mirror.log({"eval_step": 0, **metrics})
        house.mirror.finish(summary)
    write_whole(folder / "summary.json", json.dumps(finite(summary), indent=2, allow_nan=False) + "\n")
    store.remove()


class Progress:
    """Done, accuracy so far, tokens per second and time left: in place on a terminal, ten lines in a log file."""

    def __init__(self, console: Console, total: int, before: Sequence[Sample]) -> None:
        self.console, self.total = console, total
        self.answered, self.correct = len(before), sum(map(is_correct, before))
        self.done = self.tokens = 0
        self.began = time.monotonic()

    def add(self, sample: Sample) -> None:
        self.done += 1
        self.answered += 1
        self.correct += is_correct(sample)
        self.tokens += len(sample.response.token_ids)
        spent = time.monotonic() - self.began
        left = clock(spent / self.done * (self.total - self.done))
        line = (
            f"{self.done}/{self.total} responses, accuracy so far {self.correct / self.answered:.3f}, "
            f"{self.tokens / max(spent, 1e-9):.0f} tokens/s, {clock(spent)}, {left} left"
        )
        tenth = math.floor(10 * self.done / self.total) > math.floor(10 * (self.done - 1) / self.total)
        if self.console.live:
            self.console.progress(line)
        elif tenth and spent > 5:
            self.console.say(line)
