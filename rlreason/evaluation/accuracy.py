"""Accuracy on fixed problems, always with the same random numbers, so that two models meet the same luck."""

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
from rlreason.types import Counted, Grade, Problem, Sample

PURPOSE = "eval"  # what seeds depend on besides the run's seed, the problem and the sample's number


def mismatches_of(
    samples: Iterable[Sample], sampling: Sampling
) -> "array[float]":  # which Python 3.11 cannot subscript
    """|log p_engine - log p_trainer| in nats of every token from `min_tokens` on, of the samples that were scored.

    Before that token the engine sampled under a ban on ending.
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
    """Problem id -> its question's key: rows that ask one question are one of it."""
    return question_keys((p.id, p.question) for p in problems)


def eval_metrics(
    samples: Sequence[Counted], mismatches: Sequence[float], questions: Mapping[str, str] = MappingProxyType({})
) -> dict[str, float]:
    """`eval/...` numbers of graded responses, several of which may answer one problem.

    `questions`: by problem id (`questions_of`); where several problems ask one, `eval/questions` counts them.
    `mismatches`: of their tokens (`mismatches_of`). Entropies are there where the samples were scored.
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
        **second_opinion(samples, questions),
        **metrics_by_outcome(samples, "eval"),
        **mismatch_metrics(mismatches, "eval"),
        "eval/grading_failures": grading_failures([s.grade for s in samples]),
    }


def solved_once(samples: Sequence[Counted]) -> dict[str, float]:
    """The share of problems with a correct response among all of theirs, where a problem has several: pass@n."""
    groups = {s.group for s in samples}
    if len(groups) == len(samples):
        return {}
    return {"eval/solved_once": len({s.group for s in samples if is_correct(s)}) / len(groups)}


def second_opinion(samples: Sequence[Counted], questions: Mapping[str, str]) -> dict[str, float]:
    """Accuracy by the prompt's reward where another one counts, and how many responses they call differently."""
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
    """What a summary says besides the accuracy: of several responses per problem, and by a second reward, by name."""
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
    """These in sentences.

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


def correct_by_prompt(sample: Counted) -> bool:
    """Whether the prompt's own reward calls it correct, where another one counts."""
    return sample.prompt_grade is not None and sample.prompt_grade.outcome == "correct"


def is_correct(sample: Counted) -> bool:
    """Whether it counts as correct: of a reward of one's own, where it reaches `grading.correct_at`."""
    return sample.grade.outcome == "correct"


def proportion_with_ci(
    samples: Sequence[Counted], of: Callable[[Counted], bool], questions: Mapping[str, str] = MappingProxyType({})
) -> tuple[float, float, float]:
    """The share of samples that `of` holds for, with its 95% interval over problems, or over their `questions`."""
    hits: dict[str, list[bool]] = {}
    for s in samples:
        hits.setdefault(questions.get(s.group, s.group), []).append(of(s))
    low, high = cluster_interval([sum(h) for h in hits.values()], [len(h) for h in hits.values()])
    return sum(map(of, samples)) / max(len(samples), 1), low, high


@dataclass(frozen=True, slots=True)
class Judged:
    """The figures of a scored sample, under the names that it has them by (`types.Counted`)."""

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
        """Per token; 0 of no tokens."""
        return self.log_prob / max(self.length, 1)


def judged(s: Sample) -> Judged:
    """What is kept of a sample."""
    return Judged(
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
