"""What choosing among N responses is worth, estimated from n >= N responses to one problem: pure functions.

Each estimate is the expectation over a random N of the n responses, worked out instead of taking the first N: no
sample is wasted, and for N = 1 every one of them is the share of right responses.
"""

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

MOST_SUBSETS = 20_000  # up to so many are all taken; beyond, RANDOM_SUBSETS of them are drawn
RANDOM_SUBSETS = 5_000


def pass_at(n: int, correct: int, k: int) -> float:
    """Probability that at least one of k responses is right (Chen et al. 2021, unbiased): 1 - C(n-c, k) / C(n, k).

    >>> pass_at(4, 1, 2), pass_at(4, 1, 1), pass_at(4, 3, 2)
    (0.5, 0.25, 1.0)
    """
    return (math.comb(n, k) - math.comb(n - correct, k)) / math.comb(n, k)


def best_at(scores: Sequence[float], right: Sequence[bool], k: int) -> float:
    """Probability that the response with the highest score among k is right.

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
    """Probability that the most frequent answer of a subset is right.

    answers (n,) the class of each response's answer, None where it gives none: it has no vote. A tie between
    different answers is no win, and neither is a subset without votes. Where a class holds right and wrong
    responses, it wins by its share of right ones in the subset. subsets (count, k) from `subsets_of`.

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
    """Every subset of k of n, or a fixed number of random ones where that would be more than `most`: (count, k)."""
    if math.comb(n, k) <= most:
        return np.array(list(combinations(range(n), k)), dtype=np.int64)
    rng: Any = np.random.default_rng(seed)
    return np.asarray(rng.random((RANDOM_SUBSETS, n)).argpartition(k, axis=1)[:, :k], dtype=np.int64)


def is_exact(n: int, k: int) -> bool:
    """Whether `subsets_of` takes every subset."""
    return math.comb(n, k) <= MOST_SUBSETS
