"""Compute accuracy on fixed problems, sampled alike for every model, and pass@N, best of N and majority of N."""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import combinations, groupby, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts, metrics_by_outcome, rollout_metrics
from rlreason.grading import Grader
from rlreason.grading.grader import grading_failures
from rlreason.records.training_curves import picture
from rlreason.runtime.statistics import cluster_interval, mismatch_metrics
from rlreason.runtime.text import question_keys
from rlreason.types import Problem, Sample, SampleFigures, ScoredResponse

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
    samples: Sequence[ScoredResponse], mismatches: Sequence[float], questions: Mapping[str, str]
) -> dict[str, float]:
    """Return the `eval/...` metrics of graded responses, several of which may answer one problem.

    `questions`: by problem id (`questions_of`); where problems share a question, `eval/questions` counts them.
    `mismatches`: of their tokens (`mismatches_of`). Entropies are included where the samples were scored.
    """
    base = rollout_metrics(samples, prefix="eval")
    correct = [is_correct(s) for s in samples]
    accuracy, low, high = proportion_with_ci(samples, correct, questions)
    problems = {s.group for s in samples}
    different = len({questions.get(problem, problem) for problem in problems})
    metrics: dict[str, float] = {
        "eval/accuracy": accuracy,
        "eval/reward": base["reward/mean"],
        "eval/accuracy_low": low,
        "eval/accuracy_high": high,
        "eval/format": base["reward/format"],
        "eval/truncated": base["eval/truncated"],
        "eval/problems": len(problems),
        "eval/samples": len(samples),
        **metrics_by_outcome(samples, "eval"),
        **mismatch_metrics(mismatches, "eval"),
        "eval/grading_failures": grading_failures([s.grade for s in samples]),
    }
    if different < len(problems):
        metrics["eval/questions"] = different
    if len(problems) < len(samples):  # pass@n
        metrics["eval/solved_once"] = len({s.group for s in samples if is_correct(s)}) / len(problems)
    by_prompt = [s.prompt_grade.outcome == "correct" for s in samples if s.prompt_grade]
    if len(by_prompt) == len(samples):  # another reward counts
        name = "eval/accuracy_prompt_reward"
        metrics[name], low, high = proportion_with_ci(samples, by_prompt, questions)
        metrics |= {f"{name}_low": low, f"{name}_high": high}
        metrics["eval/disagreements"] = sum(one != other for one, other in zip(correct, by_prompt, strict=True))
    return metrics


def more_accuracies(metrics: Mapping[str, float], rollouts: Rollouts) -> dict[str, Any]:
    """Return further entries of a summary: with several responses per problem, and by a second reward with its name."""
    more, second = dict[str, Any](), rollouts.second_grader
    if "eval/questions" in metrics:
        more["eval_questions"] = metrics["eval/questions"]
    if "eval/solved_once" in metrics:
        more["solved_once"] = metrics["eval/solved_once"]
    name = "accuracy_prompt_reward"
    if second is not None:
        more |= {
            "rewards": {"accuracy": rollouts.grader.reward, name: second.reward},
            name: metrics[f"eval/{name}"],
            f"{name}_interval": [metrics[f"eval/{name}_low"], metrics[f"eval/{name}_high"]],
            "disagreements": metrics["eval/disagreements"],
            "responses": metrics["eval/samples"],
        }
    return more


def describe_accuracies(accuracy: float, more: Mapping[str, Any]) -> list[str]:
    """Describe these entries, one line each."""
    lines = []
    if "solved_once" in more:
        lines.append(f"solved at least once: {more['solved_once']:.3f} of the problems")
    if "rewards" in more:
        counted, second = more["rewards"].values()
        lines += [
            f"by {counted} {accuracy:.3f}, which counts; by {second} {more['accuracy_prompt_reward']:.3f}",
            f"they disagree on {more['disagreements']} of {more['responses']} responses",
        ]
    return lines


def is_correct(sample: ScoredResponse) -> bool:
    """Return whether it counts as correct; by a user's reward, where it reaches `grading.correct_at`."""
    return sample.grade.outcome == "correct"


def proportion_with_ci(
    samples: Sequence[ScoredResponse], hits: Sequence[bool], questions: Mapping[str, str]
) -> tuple[float, float, float]:
    """Return the share of samples that are hits, and its 95% interval over problems, or their `questions`."""
    clusters: dict[str, list[bool]] = {}
    for s, hit in zip(samples, hits, strict=True):
        clusters.setdefault(questions.get(s.group, s.group), []).append(hit)
    low, high = cluster_interval([sum(h) for h in clusters.values()], [len(h) for h in clusters.values()])
    return sum(hits) / max(len(samples), 1), low, high


def figures_of(s: Sample) -> SampleFigures:
    """Return the figures of a sample, so that its tokens can be freed."""
    names = [field.name for field in fields(SampleFigures) if field.name != "log_prob"]
    return SampleFigures(**{name: getattr(s, name) for name in names}, log_prob=math.fsum(s.log_probs or []))


MOST_SUBSETS = 20_000  # up to this number all are used; beyond, RANDOM_SUBSETS random ones
RANDOM_SUBSETS = 5_000


def pass_at(n: int, correct: int, k: int) -> float:
    """Return the probability that one of k responses is right (Chen et al. 2021, unbiased): 1 - C(n-c, k) / C(n, k).

    >>> pass_at(4, 1, 2), pass_at(4, 1, 1), pass_at(4, 3, 2)
    (0.5, 0.25, 1.0)
    """
    return (math.comb(n, k) - math.comb(n - correct, k)) / math.comb(n, k)


def best_at(scores: Sequence[float], right: Sequence[bool], k: int) -> float:
    """Return the probability that the response with the highest score among k is right.

    Ranked from the best, i = 0 .. n-1, response i is the best of C(n-1-i, k-1) of the C(n, k) subsets. Equal scores
    share their ranks evenly, as if the tie were broken at random.

    >>> best_at([0.9, 0.5, 0.1], [True, False, False], 2)  # in 2 of 3 pairs
    0.6666666666666666
    """
    n = len(scores)
    order = sorted(range(n), key=lambda i: -scores[i])
    weights = [math.comb(n - 1 - rank, k - 1) for rank in range(n)]
    total, start = 0.0, 0
    for _, group in groupby(order, key=lambda i: scores[i]):
        tied = [right[i] for i in group]
        total += sum(weights[start : start + len(tied)]) * sum(tied) / len(tied)
        start += len(tied)
    return total / math.comb(n, k)


def majority_at(answers: Sequence[int | None], right: Sequence[bool], subsets: NDArray[np.int64]) -> float:
    """Return the probability that the most frequent answer of a subset is right.

    answers (n,) the class of each response's answer, None (no vote) where it gives none. A tie between different
    answers is no win, and neither is a subset without votes. A class of right and wrong responses wins by its share
    of right ones in the subset. subsets (count, k) from `subsets_of`.

    >>> majority_at([0, 0, 1], [True, True, False], subsets_of(3, 3))
    1.0
    >>> majority_at([0, 1], [True, False], subsets_of(2, 2))  # a tie
    0.0
    """
    classes = sorted({a for a in answers if a is not None})
    if not classes:
        return 0.0
    votes = np.array([[a == c for c in classes] for a in answers], dtype=np.float64)  # (n, classes)
    wins = votes * np.array(right, dtype=np.float64)[:, None]
    chosen = np.zeros((len(subsets), len(answers)))  # products of float64 are fast, and exact on whole numbers
    np.put_along_axis(chosen, subsets, 1.0, 1)
    counts, won = chosen @ votes, chosen @ wins  # (count, classes)
    most = counts.max(1)
    first = counts == most[:, None]
    share = (won * first).sum(1) / np.maximum(most, 1)
    return float(np.mean(share * (first.sum(1) == 1)))


def subsets_of(n: int, k: int, seed: int = 0, most: int = MOST_SUBSETS) -> NDArray[np.int64]:
    """Return all subsets of k of n, or a fixed number of random ones where there are more than `most`: (count, k)."""
    if math.comb(n, k) <= most:
        return np.array(list(combinations(range(n), k)), dtype=np.int64)
    rng: Any = np.random.default_rng(seed)
    return np.asarray(rng.random((RANDOM_SUBSETS, n)).argpartition(k, axis=1)[:, :k], dtype=np.int64)


def answer_classes(texts: Sequence[str], grader: Grader) -> list[int | None]:
    """Return the class of each response's answer, numbered in order of appearance; None where it gives none.

    An answer belongs to the first class whose first answer is the same. Classes are cached by text.

    >>> texts = ["so </think> <answer>0.5</answer>", "</think> <answer> 1/2 </answer>", "no idea"]
    >>> answer_classes(texts, Grader())
    [0, 0, None]
    """
    firsts: list[str] = []  # of each class
    known: dict[str, int] = {}  # text -> its class
    classes: list[int | None] = []
    for read in map(grader.read, texts):
        answer = read.answer
        if answer is None or not answer.strip():
            classes.append(None)
            continue
        if answer not in known:
            same = (place for place, first in enumerate(firsts) if grader.same(answer, first))
            known[answer] = next(same, len(firsts))
            if known[answer] == len(firsts):
                firsts.append(read.candidates[-1])
        classes.append(known[answer])
    return classes


def common_answer(
    answers: Sequence[str | None], truths: Sequence[str], same: Callable[[str, str], bool], prefix: str
) -> dict[str, float]:
    """Return `PREFIX/same_answer`, the share of responses with the commonest answer; `..._right`: of truths it equals.

    `answers`: one for each response, None where it states none. {} without any answer.

    >>> common_answer(["7", " 7", None, "8"], ["7", "9"], str.__eq__, "eval")
    {'eval/same_answer': 0.5, 'eval/same_answer_right': 0.5}
    """
    counts = Counter(answer.strip() for answer in answers if answer is not None and answer.strip())
    if not counts or not truths:
        return {}
    (answer, count), *_ = counts.most_common(1)
    right = sum(same(answer, truth) for truth in truths)
    return {f"{prefix}/same_answer": count / len(answers), f"{prefix}/same_answer_right": right / len(truths)}


def draw_best_of_n(
    path: Path, n_list: Sequence[int], curves: Mapping[str, Sequence[Sequence[float]]], title: str, subtitle: str
) -> None:
    """Draw a line per way to choose; `curves[name]` has (value, low, high) for each N."""
    with picture(path, title, (8, 5)) as ax:
        for way, points in curves.items():
            values, low, high = zip(*points, strict=True)
            (line,) = ax.plot(n_list, values, marker="o", markersize=5, label=way)
            ax.fill_between(n_list, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
        ax.set_xscale("log", base=2)
        ax.set_xticks(n_list, [str(n) for n in n_list])
        ax.minorticks_off()
        ax.set(xlabel="N, responses to choose from", ylabel="share of problems solved")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8, frameon=False, loc="upper left")
        ax.set_title(subtitle, fontsize=8, loc="left", color="0.4")
