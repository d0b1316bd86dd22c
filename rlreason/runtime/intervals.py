"""Confidence intervals, tests and the expected best of k draws, as pure functions of numbers and arrays."""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959964  # of a normal distribution, 95% lie within so many standard deviations
Floats = NDArray[np.float64]


def wilson_interval(successes: float, n: float, z: float = Z95) -> tuple[float, float]:
    """Return the 95% interval of a proportion (Wilson 1927), accurate for small n and proportions near 0 or 1.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    """
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, z * z
    middle = p + z2 / (2 * n)
    half = z * math.sqrt(max(0.0, p * (1 - p) / n + z2 / (4 * n * n)))
    low, high = (middle - half) / (1 + z2 / n), (middle + half) / (1 + z2 / n)
    return max(0.0, min(p, low)), min(1.0, max(p, high))  # rounding must not put the proportion outside


def fewer_p(k: int, n: int, k_before: int, n_before: int) -> float:
    """Return Fisher's exact p-value (1935), one-sided: k or fewer of n right, where k_before of n_before were before.

        P(X <= k),   X hypergeometric:  C(K, i) C(N-K, n-i) / C(N, n),   K = k + k_before,  N = n + n_before

    >>> round(fewer_p(0, 3, 3, 3), 4), fewer_p(3, 3, 0, 3)  # 1 / C(6, 3)
    (0.05, 1.0)
    """
    right, total = k + k_before, n + n_before

    def log_ways(of: int, some: int) -> float:
        return math.lgamma(of + 1) - math.lgamma(some + 1) - math.lgamma(of - some + 1)

    possible = range(max(0, n - (total - right)), min(k, right, n) + 1)
    ways = (log_ways(right, i) + log_ways(total - right, n - i) - log_ways(total, n) for i in possible)
    return min(1.0, math.fsum(map(math.exp, ways)))


def cluster_interval(successes: Sequence[float], sizes: Sequence[int], z: float = Z95) -> tuple[float, float]:
    """Return the 95% interval of a proportion whose trials come in clusters, such as several samples of one problem.

    `successes[k]` of the `sizes[k]` trials of cluster k. It is Wilson's interval with as many independent trials as
    have the `cluster_variance` v of p: n_eff = p (1-p) / v, at least K and at most n; K where p is 0 or 1.
    """
    n, k = sum(sizes), len(sizes)
    if n == 0:
        return 0.0, 1.0
    p = sum(successes) / n
    robust = cluster_variance(successes, sizes)
    independent = min(max(p * (1 - p) / robust, k), n) if robust > 0 and 0 < p < 1 else (n if 0 < p < 1 else k)
    return wilson_interval(p * independent, independent, z)


def cluster_variance(successes: Sequence[float], sizes: Sequence[int]) -> float:
    """Return the cluster-robust variance of a proportion (Liang and Zeger 1986); 0 for K < 2.

    K/(K-1) sum_k (y_k - p n_k)^2 / n^2
    """
    n, k = sum(sizes), len(sizes)
    if k < 2:
        return 0.0
    p = sum(successes) / n
    return k / (k - 1) * sum((y - p * m) ** 2 for y, m in zip(successes, sizes, strict=True)) / n**2


def of_clusters(values: Floats, clusters: Sequence[Hashable]) -> Floats:
    """Convert (..., problems) to (..., K), a value per cluster, such as the rows of one question, with equal means.

        v_k = m + (y_k - m n_k) K / n,   m = y / n the mean of a row of `values`, y_k the sum over its n_k of cluster k

    The variance of the mean of the v_k is `cluster_variance`. Where no two problems are alike, it is `values`.
    """
    places = {cluster: k for k, cluster in enumerate(dict.fromkeys(clusters))}
    n, k = len(clusters), len(places)
    if k == n:
        return values
    member = np.zeros((n, k))
    member[np.arange(n), [places[cluster] for cluster in clusters]] = 1.0
    mean = values.mean(axis=-1, keepdims=True)
    linearised: Floats = mean + (values - mean) @ member * (k / n)
    return linearised


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return (mean, low, high) of independent values, mean +- t_{S-1, 0.975} s / sqrt(S); of one value, no numbers."""
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan, math.nan
    from scipy.stats import t  # here: it takes a second to import

    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    half = float(t.ppf(0.975, n - 1)) * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def bootstrap_intervals(values: Floats, seed: int, draws: int = 4000) -> tuple[Floats, Floats]:
    """Return 95% percentile intervals (Efron 1979) of the column means of `values` (problems, columns).

    Problems are drawn with replacement, the same ones for every column, so that columns can be compared.
    """
    k = len(values)
    times = np.random.default_rng(seed).multinomial(k, np.full(k, 1 / k), size=draws)  # (draws, problems)
    low, high = np.quantile(times @ values / k, (0.025, 0.975), axis=0)
    return low, high


def mismatch_metrics(mismatches: Sequence[float], prefix: str) -> dict[str, float]:
    """Return mean, 99th percentile (nearest rank) and maximum of |log p_engine - log p_trainer| in nats, over tokens.

    Named `PREFIX/mismatch_mean`, `_p99` and `_max`; no metrics without tokens.

    >>> mismatch_metrics([0.0, 1.0], "rollout")["rollout/mismatch_p99"]
    1.0
    """
    if not mismatches:
        return {}
    values = np.sort(np.asarray(mismatches, dtype=np.float64))  # a list of so many floats would take four times as much
    p99 = float(values[math.ceil(0.99 * len(values)) - 1])
    named = {"mean": float(values.mean()), "p99": p99, "max": float(values[-1])}
    return {f"{prefix}/mismatch_{name}": value for name, value in named.items()}


LARGEST_TABLE = 4_000_000  # weights that `best_of_interval` holds at a time


def best_of(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of k draws, from m >= k independent ones: unbiased, and every draw is used.

        E = sum over i = k .. m of  x_(i) C(i-1, k-1) / C(m, k),     x_(1) <= ... <= x_(m)

    For scores of 0 and 1 it is pass@k (Chen et al. 2021, arXiv 2107.03374). `ValueError` unless 1 <= k <= m.

    >>> best_of([0, 22, 438], 2), best_of([0, 22, 438], 3)  # (22 + 438 + 438) / 3
    (299.3333333333333, 438.0)
    """
    return best_of_curve(scores, [k])[0]


def best_of_curve(scores: Sequence[float], ks: Sequence[int] | None = None) -> list[float]:
    """Return `best_of` for each of `ks`; for k = 1 .. m where None."""
    m = len(scores)
    ordered = np.sort(np.asarray(scores, dtype=np.float64))
    return [float(ordered @ weights_of_ranks(m, k)) for k in (range(1, m + 1) if ks is None else ks)]


def weights_of_ranks(m: int, k: int) -> Floats:
    """Return (m,) the probability that the i-th smallest of m is the largest of k drawn without replacement.

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
    """Return the 95% bootstrap interval (percentiles, Efron 1979) of `best_of` for each of `ks`: low and high (ks,).

    The m scores are drawn with replacement, the same ones for every k. For k near m the interval is too narrow: no
    upper end lies above the largest score.
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
    """Return the two-sided p-value of Wilcoxon's rank-sum test, exact with ties: over all C(n_a + n_b, n_a) splits.

    Equal values share the mean of their ranks; p = 2 min(P(W <= w), P(W >= w)), at most 1. `ValueError` where a side is
    empty. Of a few values no p is small: see `smallest_p`.

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
    """Return the smallest p-value of the rank-sum test with these numbers of values: 2 / C(n_a + n_b, n_a)."""
    return min(1.0, 2 / math.comb(n_a + n_b, n_a))
