"""Intervals against other formulas, enumeration and simulation, and against scipy and statsmodels where they are."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlreason.runtime.intervals import (
    Z95,
    bootstrap_intervals,
    cluster_interval,
    cluster_variance,
    of_clusters,
    wilson_interval,
)


@given(st.integers(0, 1000))
def test_clusters_keep_the_mean_and_have_the_robust_variance(seed):
    rng = np.random.default_rng(seed)
    values, clusters = rng.integers(0, 2, (3, 30)).astype(float), rng.integers(0, 8, 30).tolist()
    of = of_clusters(values, clusters)
    assert of.mean(axis=1) == pytest.approx(values.mean(axis=1))
    places = [[i for i, c in enumerate(clusters) if c == k] for k in dict.fromkeys(clusters)]
    robust = cluster_variance([values[0, place].sum() for place in places], [len(place) for place in places])
    assert of[0].var(ddof=1) / of.shape[1] == pytest.approx(robust)
    assert of_clusters(values, range(30)) is values


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_bounds_are_where_the_score_test_turns(case):
    """Each bound p solves |p^ - p| = z sqrt(p (1-p) / n), except where it is cut off at 0 or 1."""
    successes, n = case
    low, high = wilson_interval(successes, n)
    assert 0 <= low <= successes / n <= high <= 1
    for bound in (low, high):
        if 0 < bound < 1:
            assert abs(successes / n - bound) == pytest.approx(Z95 * math.sqrt(bound * (1 - bound) / n), abs=1e-9)


def test_wilson_is_that_of_statsmodels():
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    for successes, n in ((0, 7), (3, 10), (62, 200), (200, 200)):
        assert wilson_interval(successes, n) == pytest.approx(
            proportion.proportion_confint(successes, n, 0.05, "wilson"), abs=1e-6
        )


def clusters(seed: int, count: int, size: int, own: float) -> list[int]:
    """Right answers per problem, whose difficulties differ: beta-distributed chances with mean 0.3."""
    rng = np.random.default_rng(seed)
    return rng.binomial(size, rng.beta(0.3 / own, 0.7 / own, count)).tolist()


def test_the_cluster_variance_is_that_of_the_means_of_equal_clusters():
    hits = clusters(0, 40, 8, own=1.0)
    assert cluster_variance(hits, [8] * 40) == pytest.approx(np.var(np.array(hits) / 8, ddof=1) / 40)


def test_the_cluster_variance_is_that_of_statsmodels():
    api = pytest.importorskip("statsmodels.api")
    rng = random.Random(1)
    sizes = [rng.randint(1, 6) for _ in range(30)]
    hits = [rng.randint(0, size) for size in sizes]
    rows = [float(i < hit) for hit, size in zip(hits, sizes, strict=True) for i in range(size)]
    groups = np.repeat(np.arange(30), sizes)
    fitted = api.OLS(rows, np.ones(len(rows))).fit(cov_type="cluster", cov_kwds={"groups": groups})
    assert cluster_variance(hits, sizes) == pytest.approx(fitted.bse[0] ** 2)  # one regressor: the same factor


@given(st.lists(st.booleans(), min_size=1, max_size=60))
def test_one_trial_per_cluster_gives_the_wilson_interval(hits):
    found = cluster_interval([int(h) for h in hits], [1] * len(hits))
    assert found == pytest.approx(wilson_interval(sum(hits), len(hits)), abs=1e-12)


def test_asking_again_what_is_always_answered_alike_adds_no_evidence():
    hits = [1, 0, 0, 1, 1, 0, 0]
    assert cluster_interval([8 * h for h in hits], [8] * 7) == pytest.approx(wilson_interval(3, 7), abs=1e-12)


def test_the_cluster_interval_covers_where_wilson_does_not():
    """120 data sets of 50 problems x 8 samples with difficulties that differ: 95% intervals should hold 0.3."""
    covered = {"cluster": 0, "plain": 0}
    for seed in range(120):
        hits = clusters(seed, 50, 8, own=1.0)
        for name, (low, high) in (
            ("cluster", cluster_interval(hits, [8] * 50)),
            ("plain", wilson_interval(sum(hits), 400)),
        ):
            covered[name] += low <= 0.3 <= high
    assert covered["cluster"] >= 0.89 * 120
    assert covered["plain"] <= 0.80 * 120


def test_bootstrap_quantiles_are_those_of_all_resamples():
    values = np.array([[0.0], [0.25], [0.5], [1.0]])
    means = [np.mean(chosen) for chosen in itertools.product(values[:, 0], repeat=4)]
    low, high = bootstrap_intervals(values, seed=3, draws=40_000)
    assert low[0] == pytest.approx(np.quantile(means, 0.025), abs=0.03)
    assert high[0] == pytest.approx(np.quantile(means, 0.975), abs=0.03)


def test_bootstrap_intervals_are_those_of_scipy():
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(0).random((60, 1)) ** 2
    low, high = bootstrap_intervals(values, seed=0, draws=20_000)
    theirs = stats.bootstrap((values[:, 0],), np.mean, n_resamples=20_000, method="percentile", rng=1)
    assert (low[0], high[0]) == pytest.approx(tuple(theirs.confidence_interval), abs=2e-3)


def test_bootstrap_columns_meet_the_same_draws():
    values = np.random.default_rng(0).random((30, 1))
    low, high = bootstrap_intervals(np.concatenate([values, values, 2 * values], axis=1), seed=5)
    assert low[0] == low[1] == pytest.approx(low[2] / 2)
    assert high[0] == high[1] == pytest.approx(high[2] / 2)
