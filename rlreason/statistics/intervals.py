"""Statistics of finite samples, as pure functions of plain numbers and arrays."""

import math
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959964  # of a normal distribution, 95% lie within so many standard deviations
Floats = NDArray[np.float64]


def wilson_interval(successes: float, n: float, z: float = Z95) -> tuple[float, float]:
    """95% interval of a proportion (Wilson 1927), within [0, 1] and accurate for small n and proportions near 0 or 1.

        (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)

    >>> low, high = wilson_interval(8, 10)
    >>> round(low, 4), round(high, 4)
    (0.4902, 0.9433)
    """
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, z * z
    middle = p + z2 / (2 * n)
    half = z * math.sqrt(max(0.0, p * (1 - p) / n + z2 / (4 * n * n)))
    low, high = (middle - half) / (1 + z2 / n), (middle + half) / (1 + z2 / n)
    return max(0.0, min(p, low)), min(1.0, max(p, high))  # rounding must not put the proportion outside


def fewer_p(k: int, n: int, k_before: int, n_before: int) -> float:
    """Fisher's exact p-value, one-sided: k or fewer of n right, where k_before of n_before were, by one probability.

        P(X <= k),   X hypergeometric:  C(K, i) C(N-K, n-i) / C(N, n),   K = k + k_before,  N = n + n_before

    Fisher (1935), *The design of experiments*. Few right answers never give a small p-value by themselves.

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
    """95% interval of a proportion whose trials come in clusters, such as several samples of one problem.

    `successes[k]` of the `sizes[k]` trials of cluster k.

    Wilson's interval with the number of independent trials that would have the cluster-robust variance of p = y/n:

        v = K/(K-1) sum_k (y_k - p n_k)^2 / n^2,   n_eff = p (1-p) / v, at least K and at most n

    With one trial per cluster it is Wilson's interval; where p is 0 or 1 and v is 0, n_eff = K.

    >>> cluster_interval([1, 0, 1], [1, 1, 1]) == wilson_interval(2, 3)
    True
    >>> low, high = cluster_interval([4, 0], [4, 4])  # two problems, however often they were asked
    >>> (low, high) == wilson_interval(1, 2)
    True
    """
    n, k = sum(sizes), len(sizes)
    if n == 0:
        return 0.0, 1.0
    p = sum(successes) / n
    robust = cluster_variance(successes, sizes)
    independent = min(max(p * (1 - p) / robust, k), n) if robust > 0 and 0 < p < 1 else (n if 0 < p < 1 else k)
    return wilson_interval(p * independent, independent, z)


def cluster_variance(successes: Sequence[float], sizes: Sequence[int]) -> float:
    """Cluster-robust variance of a proportion (Liang and Zeger 1986); 0 for K < 2.

    K/(K-1) sum_k (y_k - p n_k)^2 / n^2
    """
    n, k = sum(sizes), len(sizes)
    if k < 2:
        return 0.0
    p = sum(successes) / n
    return k / (k - 1) * sum((y - p * m) ** 2 for y, m in zip(successes, sizes, strict=True)) / n**2


def of_clusters(values: Floats, clusters: Sequence[Hashable]) -> Floats:
    """(..., problems) -> (..., K) a value for each cluster, such as the rows that ask one question, with equal means.

        v_k = m + (y_k - m n_k) K / n,   m = y / n the mean of a row of `values`, y_k the sum over its n_k of cluster k

    The variance of the mean of the v_k is `cluster_variance` (Liang and Zeger 1986), and differences of values keep
    their form, so what is computed of problems can be computed of these. Where no two are alike, it is `values`.

    >>> of_clusters(np.array([1.0, 1.0, 0.0]), ["a", "a", "b"]).round(3).tolist()  # twice as much weight for a
    [1.111, 0.222]
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
    """(mean, low, high) of independent values, such as the accuracies of seeds: Student's t, S - 1 degrees of freedom.

        mean +- t_{S-1, 0.975} s / sqrt(S)

    Of one value there is no interval: low and high are not numbers.

    >>> [round(x, 4) for x in mean_interval([0.5, 0.6, 0.7])]
    [0.6, 0.3516, 0.8484]
    """
    n = len(values)
    mean = sum(values) / n
    if n < 2:
        return mean, math.nan, math.nan
    from scipy.stats import t  # here: it takes a second to import

    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    half = float(t.ppf(0.975, n - 1)) * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def bootstrap_intervals(values: Floats, seed: int, draws: int = 4000) -> tuple[Floats, Floats]:
    """95% percentile intervals (Efron 1979) of the column means of `values` (problems, columns).

    Problems are drawn with replacement, the same ones for every column, so that columns can be compared.

    >>> low, high = bootstrap_intervals(np.array([[0.0, 1.0], [1.0, 1.0]]), seed=0)
    >>> low.tolist(), high.tolist()
    ([0.0, 1.0], [1.0, 1.0])
    """
    k = len(values)
    times = np.random.default_rng(seed).multinomial(k, np.full(k, 1 / k), size=draws)  # (draws, problems)
    low, high = np.quantile(times @ values / k, (0.025, 0.975), axis=0)
    return low, high


def mismatch_metrics(mismatches: Sequence[float], prefix: str) -> dict[str, float]:
    """Mean, 99th percentile (nearest rank) and maximum of |log p_engine - log p_trainer| in nats, over sampled tokens.

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
