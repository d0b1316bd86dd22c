"""Intervals, tests and differences between settings, as pure functions of numbers and arrays; a design's seeds.

Seeds are the sample where a *setting* is judged; problems alone are never enough. p-values of several comparisons are
corrected together (Holm).
"""

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959964  # of a normal distribution, 95% lie within so many standard deviations
Floats = NDArray[np.float64]


def wilson_interval(successes: float, n: float) -> tuple[float, float]:
    """Return the 95% interval of a proportion (Wilson 1927), accurate for small n and proportions near 0 or 1.

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)
    """
    if n == 0:
        return 0.0, 1.0
    p, z2 = successes / n, Z95 * Z95
    middle = p + z2 / (2 * n)
    half = Z95 * math.sqrt(max(0.0, p * (1 - p) / n + z2 / (4 * n * n)))
    low, high = (middle - half) / (1 + z2 / n), (middle + half) / (1 + z2 / n)
    return max(0.0, min(p, low)), min(1.0, max(p, high))  # rounding must not put the proportion outside


def fewer_p(k: int, n: int, k_before: int, n_before: int) -> float:
    """Return Fisher's exact p-value (1935), one-sided: k or fewer of n right, where k_before of n_before were before.

        P(X <= k),   X hypergeometric:  C(K, i) C(N-K, n-i) / C(N, n),   K = k + k_before,  N = n + n_before

    >>> round(fewer_p(0, 3, 3, 3), 4), round(fewer_p(3, 3, 0, 3), 4)  # 1 / C(6, 3)
    (0.05, 1.0)
    """
    from scipy.stats import hypergeom  # here: it takes a second to import

    return float(hypergeom.cdf(k, n + n_before, k + k_before, n))


def cluster_interval(successes: Sequence[float], sizes: Sequence[int]) -> tuple[float, float]:
    """Return the 95% interval of a proportion whose trials come in clusters, such as several samples of one problem.

    `successes[k]` of the `sizes[k]` trials of cluster k. It is Wilson's interval with as many independent trials as
    have the `cluster_variance` v of p: n_eff = p (1-p) / v, at most n and at least k = n^2 / sum_k n_k^2, what they are
    worth if those of a cluster are all alike; k where p is 0 or 1. Of clusters that differ in size v, which rests on
    the large ones, is taken (t_{k-1} / z)^2 times.
    """
    n = sum(sizes)
    if n == 0:
        return 0.0, 1.0
    p, k = sum(successes) / n, n**2 / sum(m * m for m in sizes)
    robust = cluster_variance(successes, sizes)
    if robust > 0 and len({*sizes}) > 1:
        robust = (half_width(LEVEL, math.sqrt(robust), 0.0, k - 1) / Z95) ** 2
    independent = min(max(p * (1 - p) / robust, k), n) if robust > 0 and 0 < p < 1 else (n if 0 < p < 1 else k)
    return wilson_interval(p * independent, independent)


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
    variance = sum((v - mean) ** 2 for v in values) / (n - 1)
    half = half_width(LEVEL, math.sqrt(variance / n), 0.0, n - 1)
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


def best_of(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of k draws, from m >= k independent ones: unbiased, and every draw is used.

        E = sum over i = k .. m of  x_(i) C(i-1, k-1) / C(m, k),     x_(1) <= ... <= x_(m)

    For scores of 0 and 1 it is pass@k (Chen et al. 2021, arXiv 2107.03374). `ValueError` unless 1 <= k <= m.

    >>> best_of([0, 22, 438], 2), best_of([0, 22, 438], 3)  # (22 + 438 + 438) / 3
    (299.3333333333333, 438.0)
    """
    ordered = np.sort(np.asarray(scores, dtype=np.float64))
    return float(ordered @ weights_of_ranks(len(scores), k))


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


def best_of_interval(scores: Sequence[float], ks: Sequence[int], draws: int = 1000) -> tuple[Floats, Floats]:
    """Return the 95% bootstrap interval (percentiles, Efron 1979) of `best_of` for each of `ks`: low and high (ks,).

    The m scores are drawn with replacement, the same ones for every k. For k near m the interval is too narrow: no
    upper end lies above the largest score.
    """
    values, rng = np.asarray(scores, dtype=np.float64), np.random.default_rng(0)
    weights = np.stack([weights_of_ranks(len(scores), k) for k in ks])  # (ks, m)
    again = np.sort(values[rng.integers(len(scores), size=(draws, len(scores)))], axis=1)
    low, high = np.quantile(again @ weights.T, (0.025, 0.975), axis=0)
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
    from scipy.stats import rankdata  # here: it takes a second to import

    fewer, more = (a, b) if len(a) <= len(b) else (b, a)
    ranks = (2 * rankdata([*fewer, *more])).astype(int)  # doubled: whole numbers
    n = len(fewer)
    seen = int(ranks[:n].sum())
    ways = np.zeros((n + 1, int(np.sort(ranks)[-n:].sum()) + 1))  # how many choices of j ranks have a sum
    ways[0, 0] = 1.0
    for rank in np.sort(ranks):
        ways[1:, rank:] += ways[:-1, :-rank]
    shares = ways[n] / ways[n].sum()
    return float(min(1.0, 2 * min(shares[: seen + 1].sum(), shares[seen:].sum())))


def smallest_p(n_a: int, n_b: int) -> float:
    """Return the smallest p-value of the rank-sum test with these numbers of values: 2 / C(n_a + n_b, n_a)."""
    return min(1.0, 2 / math.comb(n_a + n_b, n_a))


SEEDS = "seeds and problems"  # both settings ran these seeds
UNPAIRED = "unpaired seeds"  # the settings ran other seeds: Welch
PROBLEMS = "problems"  # one seed: this compares two trained models, not two settings
LEVEL = 0.05
SMALLEST_P = 1e-12
FEW_PROBLEMS = 64  # with fewer, their part of an interval has Student's t instead of the normal quantile
TIED = 1e-9  # standard errors below it are rounding: accuracies of a million answers differ by more


@dataclass(frozen=True, slots=True)
class Difference:
    """One setting minus another, in accuracy (0 to 1); `low` to `high`, within -1 to 1, is the 95% interval.

    `half` is its half width, and `p` the level at which `half_width` equals |mean|.
    """

    mean: float
    half: float
    low: float
    high: float
    p: float
    seeds: int  # of the setting that has fewer
    problems: int
    over: str  # SEEDS, UNPAIRED or PROBLEMS
    se_seeds: float
    se_extra: float
    dof: float  # of se_seeds; infinite for one seed
    dof_extra: float = math.inf  # of se_extra; infinite unless there are few problems


def half_width(level: float, se_seeds: float, se_extra: float, dof: float, dof_extra: float = math.inf) -> float:
    """Add t_{dof, 1 - level/2} se_seeds and z_{1 - level/2} se_extra in quadrature; z is t of few problems."""
    from scipy.special import ndtri, stdtrit  # here: a tenth of a second to import

    share = 1 - level / 2
    t, of_problems = (float(ndtri(share) if math.isinf(of) else stdtrit(of, share)) for of in (dof, dof_extra))
    return math.hypot(t * se_seeds, of_problems * se_extra)


def p_value(mean: float, se_seeds: float, se_extra: float, dof: float, dof_extra: float = math.inf) -> float:
    """Return the level at which the half width equals |mean|, by bisection; 1 for no difference, 0 below 1e-12."""
    parts = se_seeds, se_extra, dof, dof_extra
    if abs(mean) < TIED:
        return 1.0
    if half_width(SMALLEST_P, *parts) < abs(mean):
        return 0.0
    low, high = math.log(SMALLEST_P), 0.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if half_width(math.exp(middle), *parts) > abs(mean) else (low, middle)
    return math.exp(high)


def difference(
    mean: float,
    se: tuple[float, float, float],
    seeds: int,
    problems: int,
    over: str,
    dof_extra: float | None = None,
) -> Difference:
    """Build a `Difference` from its mean and (se_seeds, se_extra, dof). One problem says nothing about others."""
    if dof_extra is None:
        dof_extra = problems - 1.0 if problems < FEW_PROBLEMS else math.inf
    of_problems = (math.inf, math.inf) if problems == 1 else (se[1], dof_extra)
    if max(se[0], of_problems[0]) < TIED:  # no problem tells anything else: the rule of three, +- 3 / P
        of_problems = 3.0 / problems / Z95, math.inf
    parts = se[0], of_problems[0], se[2], of_problems[1]
    half = half_width(LEVEL, *parts)
    ends = max(mean - half, -1.0), min(mean + half, 1.0)
    return Difference(mean, half, *ends, p_value(mean, *parts), seeds, problems, over, *parts)


def paired_difference(d: Floats) -> Difference:
    """Return the difference between two settings from d (seeds S, problems P): one's correctness minus the other's.

        se_seeds^2 = variance over seeds of the mean over problems / S                 (S - 1 degrees of freedom)
        se_extra^2 = max(MS_problem - MS_residual, 0) / (S P)     what all seeds share, as they answer the same problems

    One seed: the interval over its problems (normal). `ValueError` for an empty layout.
    """
    d = np.asarray(d, dtype=np.float64)
    if d.ndim != 2 or d.size == 0:
        raise ValueError(f"a layout of seeds x problems is needed, not one of shape {d.shape}")
    seeds, problems = d.shape
    if seeds == 1:
        return difference_over_problems(d[0])
    se_seeds = math.sqrt(float(d.mean(axis=1).var(ddof=1)) / seeds)
    extra = tied_or(se_seeds, math.sqrt(shared_variance(d) / problems), _se_of_problems(d.mean(axis=0)))
    return difference(float(d.mean()), (se_seeds, extra, seeds - 1.0), seeds, problems, SEEDS)


def difference_over_problems(d: Floats) -> Difference:
    """Return the difference between two models of one seed each, from d (problems): its interval is over problems."""
    return difference(float(d.mean()), (0.0, _se_of_problems(d), math.inf), 1, len(d), PROBLEMS)


def tied_or(se_seeds: float, extra: float, of_problems: float) -> float:
    """Return se_extra: `extra`, or the larger of it and the standard error over problems where the seeds tie.

    Few seeds agree to the last answer by chance, and their spread of 0 lacks the noise of sampling. Simulated, 4 to 13%
    of equal settings of 2 seeds were told apart by `extra` alone, 0 to 1% by this rule.
    """
    return max(extra, of_problems) if se_seeds < TIED else extra


def shared_variance(d: Floats) -> float:
    """Return the variance between problems that seeds share, max(MS_problem - MS_residual, 0) / S; 0 for one problem.

    MS_problem = S sum_p (d_.p - D)^2 / (P - 1)
    """
    seeds, problems = d.shape
    if problems < 2 or seeds < 2:
        return 0.0
    of_problem = seeds * float(d.mean(axis=0).var(ddof=1))
    shared: float = max(of_problem - residual_variance(d), 0.0) / seeds
    return shared


def residual_variance(d: Floats) -> float:
    """Return MS_residual = sum_sp (d_sp - d_s. - d_.p + D)^2 / ((S - 1)(P - 1)) of a layout (seeds, problems)."""
    seeds, problems = d.shape
    rest = d - d.mean(axis=1, keepdims=True) - d.mean(axis=0, keepdims=True) + d.mean()
    return float((rest**2).sum() / ((seeds - 1) * (problems - 1)))


def unpaired_difference(a: Floats, b: Floats) -> Difference:
    """Return a - b for settings of different seeds, (seeds, problems) each, on the same problems: Welch (1947).

        se_seeds^2 = s_a^2 / S_a + s_b^2 / S_b
        se_extra^2 = max(V - MS_residual,a / S_a - MS_residual,b / S_b, 0) / P

    V is the variance over problems of mean_s a - mean_s b. Where one side has one seed, the interval is over problems.
    Degrees of freedom: Satterthwaite's for equal numbers of seeds, else min(S_a, S_b) - 1 (2 against 8 seeds:
    Satterthwaite's give 12-15% false verdicts).
    """
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    problems, fewer = a.shape[1], min(len(a), len(b))
    between = a.mean(axis=0) - b.mean(axis=0)
    if fewer == 1:
        return difference_over_problems(between)
    parts = [float(arm.mean(axis=1).var(ddof=1)) / len(arm) for arm in (a, b)]
    dof = fewer - 1.0
    if len(a) == len(b):
        below = sum(v * v / (len(arm) - 1) for v, arm in zip(parts, (a, b), strict=True))
        dof = sum(parts) ** 2 / below if below > 0 else float(len(a) + len(b) - 2)
    shared = 0.0
    if problems > 1:
        noise = sum(residual_variance(arm) / len(arm) for arm in (a, b))
        shared = max(float(between.var(ddof=1)) - noise, 0.0) / problems
    se_seeds = math.sqrt(sum(parts))
    extra = tied_or(se_seeds, math.sqrt(shared), _se_of_problems(between))
    return difference(float(between.mean()), (se_seeds, extra, dof), fewer, problems, UNPAIRED)


def compared(a: Mapping[int, Floats], b: Mapping[int, Floats]) -> Difference:
    """Return the difference a - b of two settings: seed -> correctness (problems). `ValueError` where one has no seed.

    Paired over the seeds where one setting has run all those of the other, or both share at least three; else Welch.
    """
    common = sorted(a.keys() & b.keys())
    if len(common) >= min(3, len(a), len(b)) and common:
        return paired_difference(np.stack([a[seed] - b[seed] for seed in common]))
    return unpaired_difference(np.stack(list(a.values())), np.stack(list(b.values())))


FEWEST_CLUSTERS = 3.5  # of one size: four of nearly one


def too_few(clusters: Sequence[Hashable]) -> bool:
    """Return whether clusters tell less than `FEWEST_CLUSTERS` of one size: 1 / sum w_k^2, of their shares w_k."""
    return len(clusters) ** 2 < FEWEST_CLUSTERS * sum(n * n for n in Counter(clusters).values())


def clustered(
    found: Difference, a: Mapping[int, Floats], b: Mapping[int, Floats], clusters: Sequence[Hashable]
) -> Difference:
    """Return `found`, which is `compared(a, b)`, or the difference by clusters of its problems where that is wider.

    An effect that goes by cluster is shared by the problems of one and by all seeds, so `se_extra` is that of the
    layout (seeds, clusters) of `of_clusters`. With w_k the share of problems in cluster k of K and q = sum w_k^2,

        se_extra^2 *= q / sum_k w_k^2 (1 - 2 w_k + q) * (K - 1) / K,    1 / q - 1 degrees of freedom

    which is 1 and K - 1 for clusters of one size. Clusters that are `too_few` do not count: one large and three small
    ones leave 0.06 degrees of freedom. Simulated, with 4 to 40 others of equal or unequal sizes, 2 to 8 seeds and
    effects of 0 or 3 points: 1 to 8% false (2 to 50% by problems); 3 to 40% wider without effects, the more the fewer
    and the less equal the clusters. Choosing this by a test for such effects gives up to 15% false.
    """
    if too_few(clusters):
        return found
    share = np.array([*Counter(clusters).values()]) / len(clusters)
    k, q = len(share), float((share**2).sum())
    of_a, of_b = ({seed: of_clusters(v, clusters) for seed, v in side.items()} for side in (a, b))
    between = np.mean([*of_a.values()], axis=0) - np.mean([*of_b.values()], axis=0)
    if np.ptp(between) < TIED:
        return found
    unequal = q / float((share**2 * (1 - 2 * share + q)).sum()) * (k - 1) / k
    se = found.se_seeds, compared(of_a, of_b).se_extra * math.sqrt(unequal), found.dof
    by_cluster = difference(found.mean, se, found.seeds, found.problems, found.over, 1 / q - 1)
    return max(found, by_cluster, key=lambda one: one.half)


def _se_of_problems(d: Floats) -> float:
    """Return the standard error of a mean over problems; 0 for one problem."""
    return float(d.std(ddof=1)) / math.sqrt(len(d)) if len(d) > 1 else 0.0


MOST_SEEDS = 1000


#: Without data: a difference spreads over seeds by 2 to 5 points, and has the variance 0.225 on one problem. With 256
#: to 1,024 problems this gives the half widths of a simulation: 2 seeds 16-40 points, 3 5-13, 4 4-9, 5 3-7, 8 2-5.
ASSUMED = 0.02, 0.05
RESIDUAL = 0.225


def smallest_difference(seeds: int, problems: int, spread: float, level: float = LEVEL) -> float:
    """Return the expected half width over so many seeds and problems: a smaller difference stays undecided.

        t_{S-1} c4(S) s / sqrt(S),   s^2 = spread^2 + 0.225 / P

    `spread`: standard deviation over seeds, in accuracy. With one seed the interval is over problems,
    z sqrt(0.225 / P), and of two trained models.
    """
    if seeds == 1:
        return half_width(level, 0.0, math.sqrt(RESIDUAL / problems), math.inf)
    of_one = math.sqrt(spread**2 + RESIDUAL / problems)
    return half_width(level, c4(seeds) * of_one / math.sqrt(seeds), 0.0, seeds - 1)


def c4(n: int) -> float:
    """E[s] / sigma of n normal values: sqrt(2 / (n-1)) Gamma(n/2) / Gamma((n-1)/2).

    >>> round(c4(2), 4), round(c4(8), 4)
    (0.7979, 0.965)
    """
    return math.sqrt(2 / (n - 1)) * math.exp(math.lgamma(n / 2) - math.lgamma((n - 1) / 2))


def seeds_needed(found: Difference, level: float = LEVEL) -> int | None:
    """Return the fewest seeds with which the half width is below a difference of this size, at the observed spreads.

    None: more than a thousand. Of one seed the middle of the assumed spreads counts. `level`: smaller for one of
    several verdicts.

    >>> seeds_needed(difference(0.02, (0.01, 0.0, 3.0), 4, 256, "seeds and problems"))
    7
    """
    size = abs(found.mean)
    if found.seeds > 1:
        of_one, extra = found.se_seeds * math.sqrt(found.seeds), found.se_extra
    else:
        middle = sum(ASSUMED) / len(ASSUMED)
        of_one, extra = math.sqrt(middle**2 + RESIDUAL / found.problems), 0.0
    of_problems = found.dof_extra if found.seeds > 1 else math.inf
    if half_width(level, 0.0, extra, math.inf, of_problems) >= size:
        return None
    for seeds in chain(range(2, 30), range(30, MOST_SEEDS + 1, 10)):
        if half_width(level, of_one / math.sqrt(seeds), extra, seeds - 1, of_problems) < size:
            return seeds
    return None


def points(accuracy: float) -> str:
    """Format a difference in accuracy with three digits, as accuracies are shown.

    >>> points(0.0456), points(-0.0001)
    ('0.046', '0.000')
    """
    text = f"{accuracy:.3f}"
    return text.removeprefix("-") if float(text) == 0 else text


def holm(p_values: Sequence[float], family: int | None = None) -> list[float]:
    """Adjust the p-values by Holm's step-down rule (1979), in the order given.

    The k-th smallest is multiplied by m - k + 1, and none is smaller than the ones before it or larger than 1.
    `family`: m, where more comparisons belong to it than have been made so far.
    """
    m = max(len(p_values), family or 0)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, k in enumerate(sorted(range(len(p_values)), key=lambda k: p_values[k])):
        largest = max(largest, min(1.0, (m - rank) * p_values[k]))
        adjusted[k] = largest
    return adjusted
