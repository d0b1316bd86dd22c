"""Compute accuracy and its companions on fixed problems, sampled with the same random numbers for every model."""

import math
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import Any

from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import metrics_by_outcome, rollout_metrics
from rlreason.health.finding import grading_failures
from rlreason.runtime.intervals import cluster_interval, mismatch_metrics
from rlreason.runtime.text import question_keys
from rlreason.types import Grade, Problem, Sample, ScoredResponse

PURPOSE = "eval"  # part of every seed, besides the run's seed, the problem and the sample's number


def mismatches_of(
    samples: Iterable[Sample], sampling: Sampling
) -> "array[float]":  # which Python 3.11 cannot subscript
    """Return |log p_engine - log p_trainer| in nats of every token of the scored samples, from `min_tokens` on.

    Before that token end tokens were banned, so the engine sampled from another distribution.
    """
    return array(
        "d",
        (
            abs(engine - ours)
            for s in samples
            if s.log_probs
            for engine, ours in islice(zip(s.response.log_probs, s.log_probs, strict=True), sampling.min_tokens, None)
        ),
    )


def questions_of(problems: Iterable[Problem]) -> dict[str, str]:
    """Return problem id -> the key of its question, which rows with the same question share."""
    return question_keys((p.id, p.question) for p in problems)


def eval_metrics(
    samples: Sequence[ScoredResponse], mismatches: Sequence[float], questions: Mapping[str, str] = MappingProxyType({})
) -> dict[str, float]:
    """Return the `eval/...` metrics of graded responses, several of which may answer one problem.

    `questions`: by problem id (`questions_of`); where problems share a question, `eval/questions` counts them.
    `mismatches`: of their tokens (`mismatches_of`). Entropies are included where the samples were scored.
    """
    base = rollout_metrics(samples, prefix="eval")
    accuracy, low, high = proportion_with_ci(samples, is_correct, questions)
    problems = {s.group for s in samples}
    different = len({questions.get(group, group) for group in problems})
    return {
        "eval/accuracy": accuracy,
        "eval/reward": base["reward/mean"],
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/format": base["reward/format"],
        "eval/truncated": base["eval/truncated"],
        "eval/problems": len(problems),
        **({"eval/questions": different} if different < len(problems) else {}),
        "eval/samples": len(samples),
        **solved_once(samples),
        **prompt_reward_metrics(samples, questions),
        **metrics_by_outcome(samples, "eval"),
        **mismatch_metrics(mismatches, "eval"),
        "eval/grading_failures": grading_failures([s.grade for s in samples]),
    }


def solved_once(samples: Sequence[ScoredResponse]) -> dict[str, float]:
    """Return pass@n, the share of problems with at least one correct response; {} with one response each."""
    groups = {s.group for s in samples}
    if len(groups) == len(samples):
        return {}
    return {"eval/solved_once": len({s.group for s in samples if is_correct(s)}) / len(groups)}


def prompt_reward_metrics(samples: Sequence[ScoredResponse], questions: Mapping[str, str]) -> dict[str, float]:
    """Return accuracy by the prompt's reward and the number of disagreements; {} unless another reward counts."""
    if not samples or any(s.prompt_grade is None for s in samples):
        return {}
    accuracy, low, high = proportion_with_ci(samples, correct_by_prompt, questions)
    return {
        "eval/accuracy_prompt_reward": accuracy,
        "eval/accuracy_prompt_reward_low": low,
        "eval/accuracy_prompt_reward_high": high,
        "eval/disagreements": sum(is_correct(s) != correct_by_prompt(s) for s in samples),
    }


def more_accuracies(metrics: Mapping[str, float], counted: str, second: str | None) -> dict[str, Any]:
    """Return further entries of a summary: with several responses per problem, and by a second reward with its name."""
    more: dict[str, Any] = {}
    if "eval/questions" in metrics:
        more["eval_questions"] = int(metrics["eval/questions"])
    if "eval/solved_once" in metrics:
        more["solved_once"] = metrics["eval/solved_once"]
    if second is not None and "eval/accuracy_prompt_reward" in metrics:
        name = "accuracy_prompt_reward"
        more |= {
            "rewards": {"accuracy": counted, name: second},
            name: metrics[f"eval/{name}"],
            f"{name}_interval": [metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"]],
            "disagreements": int(metrics["eval/disagreements"]),
            "responses": int(metrics["eval/samples"]),
        }
    return more


def describe_accuracies(accuracy: float, more: Mapping[str, Any]) -> list[str]:
    """Describe these entries, one line each.

    >>> describe_accuracies(0.5, {"solved_once": 0.75})
    ['solved at least once: 0.750 of the problems']
    """
    lines = []
    if "solved_once" in more:
        lines.append(f"solved at least once: {more['solved_once']:.3f} of the problems")
    if "rewards" in more:
        names, other = more["rewards"], more["accuracy_prompt_reward"]
        apart, responses = more["disagreements"], more["responses"]
        lines.append(
            f"by {names['accuracy']} {accuracy:.3f}, which counts; by {names['accuracy_prompt_reward']} {other:.3f}"
        )
        lines.append(f"they disagree on {apart} of {responses} responses" if apart else "they agree on every response")
    return lines


def correct_by_prompt(sample: ScoredResponse) -> bool:
    """Whether it is correct by the prompt's own reward, where another reward counts."""
    return sample.prompt_grade is not None and sample.prompt_grade.outcome == "correct"


def is_correct(sample: ScoredResponse) -> bool:
    """Whether it counts as correct; by a user's reward, where it reaches `grading.correct_at`."""
    return sample.grade.outcome == "correct"


def proportion_with_ci(
    samples: Sequence[ScoredResponse],
    of: Callable[[ScoredResponse], bool],
    questions: Mapping[str, str] = MappingProxyType({}),
) -> tuple[float, float, float]:
    """Return the share of samples for which `of` is true, and its 95% interval over problems, or their `questions`."""
    hits: dict[str, list[bool]] = {}
    for s in samples:
        hits.setdefault(questions.get(s.group, s.group), []).append(of(s))
    low, high = cluster_interval([sum(h) for h in hits.values()], [len(h) for h in hits.values()])
    return sum(map(of, samples)) / max(len(samples), 1), low, high


@dataclass(frozen=True, slots=True)
class SampleFigures:
    """What metrics need of a scored sample, without its tokens, which would fill the memory."""

    group: str
    grade: Grade
    prompt_grade: Grade | None
    text: str
    length: int
    truncated: bool
    tokens_key: int
    entropy: float | None
    nll: float
    n_log_probs: int
    log_prob: float  # of the whole response under the model, in nats; 0 where it was not scored

    @property
    def mean_log_prob(self) -> float:
        """Mean per token; 0 without tokens."""
        return self.log_prob / max(self.length, 1)


def figures_of(s: Sample) -> SampleFigures:
    """Return the figures of a sample, so that its tokens can be freed."""
    return SampleFigures(
        group=s.group,
        grade=s.grade,
        prompt_grade=s.prompt_grade,
        text=s.text,
        length=s.length,
        truncated=s.truncated,
        tokens_key=s.tokens_key,
        entropy=s.entropy,
        nll=s.nll,
        n_log_probs=s.n_log_probs,
        log_prob=math.fsum(s.log_probs or []),
    )
