"""Estimate the accuracy of choosing among N responses: pass@k, Best@N, majority votes, and their picture."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlreason.grading import Grader
from rlreason.grading.answers.compare import Sketch, apart, sketch
from rlreason.records.training_curves import picture
from rlreason.types import ScoredResponse

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
    while start < n:
        end = start
        while end < n and scores[order[end]] == scores[order[start]]:
            end += 1
        total += sum(weights[start:end]) * sum(right[i] for i in order[start:end]) / (end - start)
        start = end
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
    alone = (counts == most[:, None]).sum(1) == 1
    first = counts.argmax(1)[:, None]
    share = np.take_along_axis(won, first, 1)[:, 0] / np.maximum(most, 1)
    return float(np.mean(share * alone))


def subsets_of(n: int, k: int, seed: int = 0, most: int = MOST_SUBSETS) -> NDArray[np.int64]:
    """Return all subsets of k of n, or a fixed number of random ones where there are more than `most`: (count, k)."""
    if math.comb(n, k) <= most:
        return np.array(list(combinations(range(n), k)), dtype=np.int64)
    rng: Any = np.random.default_rng(seed)
    return np.asarray(rng.random((RANDOM_SUBSETS, n)).argpartition(k, axis=1)[:, :k], dtype=np.int64)


def is_exact(n: int, k: int) -> bool:
    """Whether `subsets_of` returns every subset."""
    return math.comb(n, k) <= MOST_SUBSETS


def answer_classes(texts: Sequence[str], grader: Grader) -> list[int | None]:
    """Return the class of each response's answer, numbered in order of appearance; None where it gives none.

    >>> texts = ["so </think> <answer>0.5</answer>", "</think> <answer> 1/2 </answer>", "no idea"]
    >>> answer_classes(texts, Grader())
    [0, 0, None]
    """
    classes = _Classes(grader)
    answers = ((read.answer, read.candidates) for read in map(grader.read, texts))
    return [classes.of(answer, texts) if answer is not None and answer.strip() else None for answer, texts in answers]


class _Classes:
    """The classes so far, each with its first answer.

    An answer belongs to the first class whose first answer is the same. Comparisons are cached by text, and sketches
    show most differences: only the rest is compared by the grader's rules.
    """

    def __init__(self, grader: Grader) -> None:
        self._grader, self._rel_tol = grader, grader.comparison.rel_tol
        self._firsts: list[tuple[str, Sketch | None]] = []
        self._place: dict[str, int] = {}  # text -> its class
        self._passed: dict[str, int] = {}  # text -> how many classes it does not belong to

    def of(self, answer: str, candidates: Sequence[str]) -> int:
        """Return the class of an answer, a new one where none matches; `candidates`: the texts that may state it."""
        if (known := self._place.get(answer)) is not None:
            return known
        sketches = [sketch(text) for text in candidates]
        for place in range(self._passed.get(answer, 0), len(self._firsts)):
            first, drawn = self._firsts[place]
            if all(apart(one, drawn, self._rel_tol) for one in sketches):
                continue
            if self._grader.same(answer, first):
                self._place[answer] = place
                return place
        self._firsts.append((candidates[-1], sketches[-1]))
        self._passed[answer] = len(self._firsts) - 1
        return len(self._firsts) - 1


def same_answers(samples: Sequence[ScoredResponse], truths: Sequence[str], grader: Grader) -> dict[str, float]:
    """Return `eval/same_answer` and `eval/same_answer_right` (see `common_answer`); {} for a plug-in."""
    if grader.plugin:
        return {}
    return common_answer([grader.read(s.text).answer for s in samples], truths, grader.same, "eval")


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
    right = sum(times for truth, times in Counter(truths).items() if same(answer, truth))
    return {f"{prefix}/same_answer": count / len(answers), f"{prefix}/same_answer_right": right / len(truths)}


Points = Sequence[Sequence[float]]  # (value, low, high) for each N

MARKERS = "osD^vP"


def draw_best_of_n(
    path: Path, runs: Mapping[str, tuple[Sequence[int], Mapping[str, Points]]], title: str, subtitle: str
) -> None:
    """Draw a line per run and way to choose; with several runs, colours show the ways and line styles the runs."""
    ways = list(dict.fromkeys(way for _, curves in runs.values() for way in curves))
    ticks = sorted({n for n_list, _ in runs.values() for n in n_list})
    with picture(path, title, (8, 5)) as ax:
        from matplotlib.ticker import NullFormatter, NullLocator

        for (run, (n_list, curves)), style in zip(runs.items(), ("-", "--", ":", "-.") * len(runs), strict=False):
            for way, points in curves.items():
                place = ways.index(way)
                values, low, high = zip(*points, strict=True)
                label = f"{run}: {way}" if run else way
                ax.plot(n_list, values, style, color=f"C{place}", marker=MARKERS[place % 6], markersize=5, label=label)
                ax.fill_between(n_list, low, high, color=f"C{place}", alpha=0.12, linewidth=0)
        ax.set_xscale("log", base=2)
        ax.set_xticks(ticks, [str(n) for n in ticks])
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_minor_formatter(NullFormatter())
        ax.set_xlabel("N, responses to choose from")
        ax.set_ylabel("share of problems solved")
        ax.set_ylim(bottom=0)
        ax.grid(alpha=0.25)
        ax.legend(fontsize=8, frameon=False, loc="upper left")
        ax.set_title(subtitle, fontsize=8, loc="left", color="0.4")
