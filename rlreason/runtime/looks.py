"""Look at a comparison several times while seeds are added, and keep the 5% of a verdict: error spending.

    looks with s_1 < ... < s_K seeds, level A in all, of which A f(s_k / s_K) is spent up to look k:
        f(t) = 2 Phi(-z_0.975 / sqrt(t)) / 0.05          the shape of O'Brien and Fleming (Lan and DeMets 1983)
        P(|B(u_k)| >= b_k, and |B(u_i)| < b_i at all looks i < k) = A (f(s_k / s_K) - f(s_{k-1} / s_K))
        nominal level of look k = 2 Phi(-b_k / sqrt(u_k)),     u_k = (s_k - 2) / (s_K - 2)

B is a Brownian motion. The levels are those of p-values, here of Student's t (Jennison and Turnbull 2000), which are
less alike at two looks than normal ones: with u_k = s_k / s_K, 5.2 to 5.8% are spent for 5%; so, 4.9 to 5.2%.
"""

import math
from bisect import bisect_left
from dataclasses import replace
from functools import lru_cache

import numpy as np

from rlreason.runtime.statistics import LEVEL, PROBLEMS, TIED, Z95, Difference, Floats, half_width

FIRST_LOOK = 3  # seeds
UNLIKELY = 0.1  # probability of a decision: with less, no more seeds


@lru_cache
def looks_of(max_seeds: int) -> tuple[int, ...]:
    """Return the numbers of seeds with which settings are looked at: 3, 4, 6, 8, 12, 16 ..., `max_seeds`.

    >>> looks_of(8), looks_of(5), looks_of(0)
    ((3, 4, 6, 8), (3, 4, 5), ())
    """
    steps = sorted(base * 2**k for base in (2, 3) for k in range(max_seeds.bit_length()))
    return (*(seeds for seeds in steps if FIRST_LOOK <= seeds < max_seeds), max_seeds) if max_seeds else ()


@lru_cache
def levels(max_seeds: int, level: float = LEVEL) -> Floats:
    """Return the nominal two-sided level of each look, (looks,), where `level` is spent in all.

    >>> levels(8).round(4)
    array([0.0014, 0.0046, 0.0202, 0.0381])
    """
    from scipy.optimize import brentq  # here: slow to import
    from scipy.special import ndtr

    def beyond(bound: float, at: Floats, mass: Floats, step: float, share: float) -> float:
        return float(mass @ (ndtr((-bound - at) / step) + ndtr((at - bound) / step))) - share

    looks = np.array(looks_of(max_seeds))
    spent = np.diff(2 * ndtr(-Z95 / np.sqrt(looks / max_seeds)) / LEVEL * level, prepend=0.0)
    times = (looks - 2) / (max_seeds - 2)
    nodes, weights = np.polynomial.legendre.leggauss(80)
    at, mass, bounds, before = np.zeros(1), np.ones(1), list[float](), 0.0  # of the paths that go on
    for time, share in zip(times, spent, strict=True):
        step = math.sqrt(time - before)
        bound = brentq(beyond, 0.0, 40.0, (at, mass, step, share), xtol=1e-12)
        ahead = bound * nodes
        density = np.exp(-(((ahead[:, None] - at) / step) ** 2) / 2) / (step * math.sqrt(2 * math.pi))
        at, mass, before = ahead, bound * weights * (density @ mass), float(time)
        bounds.append(bound)
    nominal: Floats = 2 * ndtr(-np.array(bounds) / np.sqrt(times))
    return nominal


@lru_cache
def _spent(max_seeds: int) -> tuple[Floats, Floats]:
    """Return levels in all, from 1e-12 to nearly 1, and the nominal ones of each look: (levels,), (looks, levels)."""
    whole = np.unique([*np.geomspace(1e-12, 0.999, 40), *(LEVEL / n for n in range(1, 21))])
    return whole, np.stack([levels(max_seeds, level) for level in whole], axis=1)


def after_looks(found: Difference, max_seeds: int) -> Difference:
    """Return a difference as it holds after the looks up to its number of seeds: interval and p-value.

    Its p is the level in all whose nominal one at this look is the p of the data (repeated p-value), and its interval
    has the nominal level of 5% in all (repeated interval): both hold whatever made the looks end, and Holm's rule
    corrects such p-values of settings that ended at different looks. `max_seeds` of 0: the seeds were fixed.
    """
    if not max_seeds or found.over == PROBLEMS:  # of two trained models
        return found
    look = min(bisect_left(looks_of(max_seeds), found.seeds), len(looks_of(max_seeds)) - 1)
    parts = found.se_seeds, found.se_extra, found.dof, found.dof_extra
    half = half_width(float(levels(max_seeds)[look]), *parts)
    whole, nominal = _spent(max_seeds)
    p = found.p and float(np.exp(np.interp(np.log(found.p), np.log(nominal[look]), np.log(whole), right=0.0)))
    return replace(found, half=half, low=max(found.mean - half, -1.0), high=min(found.mean + half, 1.0), p=p)


def chance(found: Difference, max_seeds: int, comparisons: int, equal_within: float) -> float:
    """Return the probability that `max_seeds` would decide a difference, as it looks now (predictive power).

    The mean over all S seeds is D + t_{s - 1} se sqrt(1 - s / S), of the mean D over s seeds and its standard error.
    Decided is a mean further from 0 than the half width of S seeds, or that lies within `equal_within` with it.
    """
    from scipy.special import stdtr

    if not 1 < found.seeds < max_seeds:
        return 0.0
    share, dof = found.seeds / max_seeds, found.dof * (max_seeds - 1) / (found.seeds - 1)
    parts = found.se_seeds * math.sqrt(share), found.se_extra, dof, found.dof_extra
    apart, half = (half_width(float(levels(max_seeds, level)[-1]), *parts) for level in (LEVEL / comparisons, LEVEL))
    ends = np.array([-apart, apart, half - equal_within, equal_within - half])
    below = stdtr(found.dof, (ends - found.mean) / max(found.se_seeds * math.sqrt(1 - share), TIED))
    return float(min(below[0] + 1 - below[1] + max(below[3] - below[2], 0.0), 1.0))  # where both ranges meet: any mean
