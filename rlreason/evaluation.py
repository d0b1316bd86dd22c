"""Accuracy on fixed problems, always with the same random numbers, so that two models meet the same luck.

Training runs and the jobs that only evaluate share this code. It knows rollouts and grades; it must not know the
optimizer, settings or files.
"""

from collections.abc import Callable, Sequence

from rlreason.algorithms.rollouts import Measure, Rollouts, by_outcome, measure, rollout_metrics
from rlreason.engines.base import Sampling
from rlreason.grading.metrics import grading_failures
from rlreason.statistics import cluster_interval, gap_metrics
from rlreason.types import Problem, Sample

PURPOSE = "eval"  # what seeds depend on beside the run's seed, the problem and the sample's number


def evaluate(
    rollouts: Rollouts, problems: Sequence[Problem], sampling: Sampling, of: Measure | None = None
) -> tuple[list[Sample], dict[str, float]]:
    """One graded response per problem, each measured under the model `of`, and what they come to."""
    samples = rollouts.sample(problems, sampling, n=1, purpose=PURPOSE)
    if of is not None:
        rollouts.tell("measuring entropies")
        measure(samples, of)
    return samples, figures(samples, sampling)


def figures(samples: Sequence[Sample], sampling: Sampling) -> dict[str, float]:
    """`eval/...` numbers of graded responses, several of which may answer one problem.

    Entropies and the gap between engine and trainer are there where the samples were measured. The gap counts from
    token `min_tokens` on: before it, the engine sampled under a ban on ending.
    """
    gaps = [
        abs(engine - ours)
        for s in samples
        if s.log_probs
        for engine, ours in list(zip(s.response.log_probs, s.log_probs, strict=True))[sampling.min_tokens :]
    ]
    base = rollout_metrics(samples, prefix="eval")
    accuracy, low, high = share(samples, is_correct)
    return {
        "eval/accuracy": accuracy,
        "eval/reward": base["reward/mean"],
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/format": base["reward/format"],
        "eval/truncated": base["eval/truncated"],
        "eval/problems": len({s.group for s in samples}),
        "eval/samples": len(samples),
        **by_outcome(samples, "eval"),
        **gap_metrics(gaps, "eval"),
        "eval/grading_failures": grading_failures([s.grade for s in samples]),
    }


def is_correct(sample: Sample) -> bool:
    """Partial credit of a reward of one's own counts only where it is whole."""
    return sample.grade.outcome == "correct"


def share(samples: Sequence[Sample], of: Callable[[Sample], bool]) -> tuple[float, float, float]:
    """The share of samples that `of` holds for, with its 95% interval over problems."""
    hits: dict[str, list[bool]] = {}
    for s in samples:
        hits.setdefault(s.group, []).append(of(s))
    low, high = cluster_interval([sum(h) for h in hits.values()], [len(h) for h in hits.values()])
    return sum(map(of, samples)) / max(len(samples), 1), low, high
