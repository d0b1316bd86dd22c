"""The best of k independent draws: what to expect of it, how sure that is, and whether other runs do better.

Scores are plain numbers, one a draw; a draw that failed is a score too, such as 0.
"""

import math
from collections.abc import Sequence

import numpy as np

from rlreason.statistics.intervals import Floats

LARGEST_TABLE = 4_000_000  # weights that `best_of_interval` holds at a time


def best_of(scores: Sequence[float], k: int) -> float:
    """Expected maximum of k draws, from m >= k independent ones of the same kind: unbiased, and no draw is wasted.

        E = sum over i = k .. m of  x_(i) C(i-1, k-1) / C(m, k),     x_(1) <= ... <= x_(m)

    It is the mean of the maximum over all subsets of k of the m scores: x_(i) is the largest of C(i-1, k-1) of them.
    For scores of 0 and 1 it is pass@k (Chen et al. 2021, arXiv 2107.03374): 1 - C(m-c, k) / C(m, k) with c ones.
    `ValueError` unless 1 <= k <= m.

    >>> best_of([0, 22, 438], 1), best_of([0, 22, 438], 3)
    (153.33333333333334, 438.0)
    >>> best_of([0, 22, 438], 2)  # (22 + 438 + 438) / 3
    299.3333333333333
    """
    return best_of_curve(scores, [k])[0]


def best_of_curve(scores: Sequence[float], ks: Sequence[int] | None = None) -> list[float]:
    """`best_of` for each of `ks`; for k = 1 .. m where None.

    >>> [round(best, 1) for best in best_of_curve([0, 22, 438])]
    [153.3, 299.3, 438.0]
    """
    m = len(scores)
    ordered = np.sort(np.asarray(scores, dtype=np.float64))
    return [float(ordered @ weights_of_ranks(m, k)) for k in (range(1, m + 1) if ks is None else ks)]


def weights_of_ranks(m: int, k: int) -> Floats:
    """(m,) the probability that the i-th smallest of m is the largest of k drawn without replacement.

        w_i = C(i-1, k-1) / C(m, k):   w_m = k/m,   w_(i-1) = w_i (i-k) / (i-1)

    >>> weights_of_ranks(3, 2).round(3)
    array([0.   , 0.333, 0.667])
    """
    if not 1 <= k <= m:
        raise ValueError(f"k={k} draws out of m={m}: k must lie between 1 and m")
    i = np.arange(m, 1, -1, dtype=np.float64)
    return np.cumprod(np.concatenate([[k / m], np.maximum(i - k, 0) / (i - 1)]))[::-1]


def best_of_interval(
    scores: Sequence[float], ks: Sequence[int], seed: int = 0, draws: int = 1000
) -> tuple[Floats, Floats]:
    """95% bootstrap interval (percentiles, Efron 1979) of `best_of` for each of `ks`: low (ks,) and high (ks,).

    The m scores are drawn with replacement, the same ones for every k. For k near m the interval rests on the few
    largest scores and is too narrow: no upper end lies above the largest score.

    >>> low, high = best_of_interval([5.0] * 4, [1, 4])
    >>> low.tolist(), high.tolist()
    ([5.0, 5.0], [5.0, 5.0])
    """
    m, rng = len(scores), np.random.default_rng(seed)
    weights = np.stack([weights_of_ranks(m, k) for k in ks])  # (ks, m)
    values, at_a_time = np.asarray(scores, dtype=np.float64), max(1, LARGEST_TABLE // m)
    parts = []
    for start in range(0, draws, at_a_time):
        again = np.sort(values[rng.integers(m, size=(min(at_a_time, draws - start), m))], axis=1)
        parts.append(again @ weights.T)  # (draws, ks)
    low, high = np.quantile(np.concatenate(parts), (0.025, 0.975), axis=0)
    return low, high


def rank_sum_p(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided p-value of Wilcoxon's rank-sum test, exact with ties: all C(n_a + n_b, n_a) splits are counted.

    Equal values share the mean of their ranks. Under "both come from one distribution" every split is as likely, so
    p = 2 min(P(W <= w), P(W >= w)), at most 1. `ValueError` where a side is empty. Of a few values no p is small:
    see `smallest_p`.

    >>> rank_sum_p([4, 5, 6], [1, 2, 3]), rank_sum_p([1, 1], [1, 1])
    (0.1, 1.0)
    """
    if not a or not b:
        raise ValueError("a rank test needs values on both sides")
    fewer, more = (a, b) if len(a) <= len(b) else (b, a)
    together = np.sort(np.asarray([*fewer, *more], dtype=np.float64))
    ranks = np.searchsorted(together, together, "left") + np.searchsorted(together, together, "right") + 1  # doubled
    own = np.asarray(fewer, dtype=np.float64)
    seen = int((np.searchsorted(together, own, "left") + np.searchsorted(together, own, "right") + 1).sum())
    n = len(fewer)
    ways = np.zeros((n + 1, int(np.sort(ranks)[-n:].sum()) + 1))  # how many choices of j ranks have a sum
    ways[0, 0] = 1.0
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, :-rank]
    shares = ways[n] / ways[n].sum()
    return float(min(1.0, 2 * min(shares[: seen + 1].sum(), shares[seen:].sum())))


def smallest_p(n_a: int, n_b: int) -> float:
    """The smallest p-value that the rank-sum test of so many values can give: 2 / C(n_a + n_b, n_a).

    >>> smallest_p(3, 3), round(smallest_p(5, 5), 4)
    (0.1, 0.0079)
    """
    return min(1.0, 2 / math.comb(n_a + n_b, n_a))
