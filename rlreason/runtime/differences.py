"""Estimate the difference between two settings over seeds and problems, interpret it, and plan a design.

Seeds are the sample where a *setting* is judged; problems alone are never enough. p-values of several comparisons are
corrected together (Holm).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from rlreason.runtime.intervals import Z95, Floats

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

    @property
    def parts(self) -> tuple[float, float, float, float]:
        """The arguments of `half_width` after the level."""
        return self.se_seeds, self.se_extra, self.dof, self.dof_extra


def half_width(level: float, se_seeds: float, se_extra: float, dof: float, dof_extra: float = math.inf) -> float:
    """Add t_{dof, 1 - level/2} se_seeds and z_{1 - level/2} se_extra in quadrature; z is t of few problems."""
    from scipy.special import ndtri, stdtrit  # here: a tenth of a second to import

    z = float(ndtri(1 - level / 2))
    t = z if math.isinf(dof) else float(stdtrit(dof, 1 - level / 2))
    of_problems = z if math.isinf(dof_extra) else float(stdtrit(dof_extra, 1 - level / 2))
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


def difference(mean: float, se: tuple[float, float, float], seeds: int, problems: int, over: str) -> Difference:
    """Build a `Difference` from its mean and (se_seeds, se_extra, dof). One problem says nothing about others."""
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
    mean = float(d.mean())
    if seeds == 1:
        return difference(mean, (0.0, _se_of_problems(d[0]), math.inf), 1, problems, PROBLEMS)
    se_seeds = math.sqrt(float(d.mean(axis=1).var(ddof=1)) / seeds)
    extra = tied_or(se_seeds, math.sqrt(shared_variance(d) / problems), _se_of_problems(d.mean(axis=0)))
    return difference(mean, (se_seeds, extra, seeds - 1.0), seeds, problems, SEEDS)


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
    mean = float(between.mean())
    if fewer == 1:
        return difference(mean, (0.0, _se_of_problems(between), math.inf), 1, problems, PROBLEMS)
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
    return difference(mean, (se_seeds, extra, dof), fewer, problems, UNPAIRED)


def compared(a: Mapping[int, Floats], b: Mapping[int, Floats]) -> Difference:
    """Return the difference a - b of two settings: seed -> correctness (problems). `ValueError` where one has no seed.

    Paired over the seeds where one setting has run all those of the other, or both share at least three; else Welch.
    """
    common = sorted(a.keys() & b.keys())
    if len(common) >= min(3, len(a), len(b)) and common:
        return paired_difference(np.stack([a[seed] - b[seed] for seed in common]))
    return unpaired_difference(np.stack(list(a.values())), np.stack(list(b.values())))


def _se_of_problems(d: Floats) -> float:
    """Return the standard error of a mean over problems; 0 for one problem."""
    return float(d.std(ddof=1)) / math.sqrt(len(d)) if len(d) > 1 else 0.0


MOST_SEEDS = 1000


@dataclass(frozen=True, slots=True)
class Spread:
    """The variances of a difference of two settings, in squared units of accuracy (0 to 1).

    Of one seed's mean over P problems: `seeds` + `residual` / P. Shared by all seeds: `shared` / P.
    """

    seeds: float
    residual: float
    shared: float = 0.0


#: Without data: a difference spreads over seeds by 2 to 5 points, and has the variance 0.225 on one problem. With 256
#: to 1,024 problems this gives the half widths of a simulation: 2 seeds 16-40 points, 3 5-13, 4 4-9, 5 3-7, 8 2-5.
ASSUMED = Spread(0.02**2, 0.225), Spread(0.05**2, 0.225)


def smallest_difference(seeds: int, problems: int, spread: Spread, level: float = LEVEL) -> float:
    """Return the expected half width over so many seeds and problems: a smaller difference stays undecided.

        sqrt((t_{S-1} c4(S) s)^2 / S + z^2 shared / P),   s^2 = seeds + residual / P

    With one seed the interval is over problems, z sqrt((residual + shared) / P), and of two trained models.
    """
    shared = spread.shared / problems
    if seeds == 1:
        return half_width(level, 0.0, math.sqrt(spread.residual / problems + shared), math.inf)
    of_one = math.sqrt(spread.seeds + spread.residual / problems)
    return half_width(level, c4(seeds) * of_one / math.sqrt(seeds), math.sqrt(shared), seeds - 1)


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
        middle = sum(math.sqrt(spread.seeds) for spread in ASSUMED) / len(ASSUMED)
        of_one, extra = math.sqrt(middle**2 + ASSUMED[0].residual / found.problems), 0.0
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


def sentence(found: Difference, adjusted_p: float | None = None, family: int = 1) -> str:
    """State whether one setting is better than another, and by how much; "cannot tell" where the interval includes 0.

    `adjusted_p`: by Holm over a `family` of comparisons, which then decides; the interval shown is the raw one.

    >>> sentence(difference(0.1, (0.01, 0.0, 3.0), 4, 256, "seeds and problems"))
    'better by 0.100 (0.068 to 0.132)'
    >>> sentence(difference(0.02, (0.01, 0.0, 3.0), 4, 256, "seeds and problems"))
    'cannot tell: the difference lies between -0.012 and 0.052; about 7 seeds would settle a difference of this size'
    >>> sentence(difference(-0.1, (0.0, 0.01, float("inf")), 1, 256, "problems"))
    'these two trained models differ, worse by 0.100 (0.080 to 0.120); one seed tells nothing of the settings'
    """
    p = found.p if adjusted_p is None else adjusted_p
    one_seed = found.over == PROBLEMS
    if p > LEVEL:
        lies = f"the difference lies between {points(found.low)} and {points(found.high)}"
        if found.low > 0 or found.high < 0:
            lies += " by itself, and may be 0 among so many comparisons"
        if one_seed:
            return f"cannot tell these two trained models apart: {lies}; one seed tells nothing of the settings"
        if found.over == UNPAIRED:
            lies += ", the settings having run other seeds"
        return f"cannot tell: {lies}; {settling(found, LEVEL if adjusted_p is None else LEVEL / max(family, 1))}"
    ends = sorted((abs(found.low), abs(found.high)))
    size = f"by {points(abs(found.mean))} ({points(ends[0])} to {points(ends[1])})"
    word = ("better " if found.mean > 0 else "worse ") + size
    if one_seed:
        return f"these two trained models differ, {word}; one seed tells nothing of the settings"
    return f"{word}, the settings having run other seeds" if found.over == UNPAIRED else word


def settling(found: Difference, level: float = LEVEL) -> str:
    """State how many seeds would decide a difference of this size."""
    if (needed := seeds_needed(found, level)) is None:
        return "no number of seeds would settle a difference of this size on these problems"
    return f"about {max(needed, found.seeds + 1)} seeds would settle a difference of this size"


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
