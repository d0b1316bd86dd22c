"""Accuracy on fixed problems, always with the same random numbers, so that two models meet the same luck.

Training runs and the jobs that only evaluate share this code. It knows rollouts and grades; it must not know the
optimizer, settings or files.
"""

from collections.abc import Callable, Mapping, Sequence

from rlreason.algorithms.rollouts import Rollouts, by_outcome, rollout_metrics
from rlreason.engines.base import Sampling
from rlreason.statistics import cluster_interval, gap_metrics
from rlreason.types import Problem, Sample

#: (log-probabilities, entropies) of the response tokens of (prompt ids, response ids) pairs, under the trainer.
Measure = Callable[[list[tuple[list[int], list[int]]]], list[tuple[list[float], list[float]]]]

PURPOSE = "eval"  # what seeds depend on beside the run's seed, the problem and the sample's number


def evaluate(
    rollouts: Rollouts, problems: Sequence[Problem], sampling: Sampling, measure: Measure | None = None
) -> tuple[list[Sample], dict[str, float]]:
    """One graded response per problem, and what they come to."""
    samples = rollouts.sample(problems, sampling, n=1, purpose=PURPOSE)
    return samples, figures(samples, sampling, measure)


def figures(samples: Sequence[Sample], sampling: Sampling, measure: Measure | None = None) -> dict[str, float]:
    """`eval/...` numbers of graded responses, several of which may answer one problem."""
    gaps = measured(samples, measure, sampling.min_tokens) if measure else {}
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
        **gaps,
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


def measured(samples: Sequence[Sample], measure: Measure, gap_from: int = 0) -> dict[str, float]:
    """Give each sample its entropy and log-probabilities under the trainer; returns how far the engine's are away.

    The gap counts from token `gap_from` on: before it, the engine sampled under a ban on ending.
    """
    scores = measure([(s.response.prompt_ids, s.response.token_ids) for s in samples])
    gaps: list[float] = []
    for sample, (log_probs, entropies) in zip(samples, scores, strict=True):
        sample.entropy = sum(entropies) / len(entropies) if entropies else None
        sample.old_log_probs = log_probs
        pairs = zip(sample.response.log_probs, log_probs, strict=True)
        gaps += [abs(engine - ours) for engine, ours in pairs][gap_from:]
    return gap_metrics(gaps, "eval")


def grading_failures(grading: Mapping[str, float]) -> float:
    """Grades that say something about the grader instead of the model: they count as not correct, but not unseen."""
    return sum(grading.get(f"grading/{name}", 0.0) for name in ("timeouts", "kills", "errors", "bad_golds"))
