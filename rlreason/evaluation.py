"""Accuracy on validation problems, sampled the way training samples, always with the same random numbers.

It knows rollouts and grades; it must not know the optimizer.
"""

from collections.abc import Mapping, Sequence

from rlreason.algorithms.rollouts import Rollouts, rollout_metrics
from rlreason.engines.base import Sampling
from rlreason.statistics import wilson_interval
from rlreason.types import Problem, Sample


def evaluate(
    rollouts: Rollouts, problems: Sequence[Problem], sampling: Sampling
) -> tuple[list[Sample], dict[str, float]]:
    """One graded response per problem. A (problem, sample) keeps its seed, so two models meet the same luck."""
    samples = rollouts.sample(problems, sampling, n=1, purpose="eval")
    base = rollout_metrics(samples, prefix="eval")
    correct = sum(s.grade.outcome == "correct" for s in samples)  # partial credit of a reward of one's own counts whole
    low, high = wilson_interval(correct, len(samples))
    return samples, {
        "eval/accuracy": correct / max(len(samples), 1),
        "eval/reward": base["reward/mean"],
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/format": base["reward/format"],
        "eval/length": base["eval/length"],
        "eval/truncated": base["eval/truncated"],
        "eval/problems": len(samples),
    }


def grading_failures(grading: Mapping[str, float]) -> float:
    """Grades that say something about the grader instead of the model: they count as not correct, but not unseen."""
    return sum(grading.get(f"grading/{name}", 0.0) for name in ("timeouts", "kills", "errors", "bad_golds"))
