"""Forecast the accuracy of settings at a later step, and the ceiling that they approach, with 90% intervals.

The curve is R(C) = R0 + (A - R0) F(C), with F(C) = 1 / (1 + (C_mid / C)^B) over steps C, equation 1 of ScaleRL (arXiv
2510.13786). A is the ceiling. It depends on the form of F, so 1 - 2^-((C / C_mid)^B) is fitted as well.

Of 46 recorded settings the intervals from the first 5 of 10 evaluations held 91% of the last mean accuracies, although
some fall. Simulated (both forms, 1 to 8 seeds, 256 to 1,319 problems, 192 pairs of equal settings): 98% of the ceilings
that are told; 0.5% of the pairs have a higher or lower ceiling and 3% are "only" faster or slower (t at 95%).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlreason.errors import ConfigError
from rlreason.report.study import Setting, Study
from rlreason.runtime.statistics import Floats, mean_interval
from rlreason.runtime.text import aligned

SURE = 0.9  # level of the intervals
FEWEST = 5  # evaluations, with the one before training
REACH, EXPONENTS = 8.0, (0.7, 3.0)  # of C_mid, in last steps; of B
NARROW = 0.1  # accuracy: such an interval tells a ceiling even if it ends at 0 or 1
EQUAL_CEILINGS = 0.05  # accuracy
METRIC = "eval/accuracy"
Interval = tuple[float, float, float]  # estimate, low, high


@dataclass(frozen=True, slots=True)
class Forecast:
    """Where a setting will be, in accuracy. `against`: what its curve tells beside the reference's."""

    setting: str
    seeds: int
    step: float  # of the last evaluation
    reached: float
    at: float  # the step asked for
    value: Interval  # as it would be measured there
    ceiling: Interval
    fell: bool  # after it rose, as no curve of this form: both intervals are 0 to 1
    against: str = ""

    @property
    def told(self) -> bool:
        """Return whether the data, and not the ends of the scale, bound the ceiling."""
        _, low, high = self.ceiling
        return bool(0 < low < high < 1 or 0 < high - low < NARROW)


def curves_of(setting: Setting) -> tuple[Floats, dict[int, Floats]]:
    """Return the steps that all its runs have evaluated, and seed -> accuracies there."""
    curves = {run.seed: run.series[METRIC] for run in setting.runs if METRIC in run.series}
    by_step = {seed: dict(zip(of.x["step"].tolist(), of.y, strict=True)) for seed, of in curves.items()}
    steps = sorted(set.intersection(*map(set, by_step.values()))) if by_step else []
    return np.array(steps), {seed: np.array([of[step] for step in steps]) for seed, of in by_step.items()}


def fitted(steps: Floats, accuracies: Floats, at: float, least: float) -> tuple[Interval, Interval]:
    """Return (value at a step, ceiling) of the curve of accuracies (seeds, evaluations) at `steps` (evaluations).

    Given F the curve is linear in R0 and A, so least squares are exact on a grid of forms, C_mid and B, for each seed.
    A shape F, which all seeds share, is accepted if the mean ceiling is between 0 and 1 and the sum of squares at most
    1 + 2 f / n times the smallest: n = seeds (evaluations - 2) - 2 and f is the 90% quantile of F(2, n). Its interval
    is Student's t over the seeds' own values, and at least over the residuals, which alone count with one seed. Given
    is the range over all accepted shapes; the value has the noise of an evaluation besides, `least` at least.
    """
    from scipy.stats import f, t  # slow to import

    first, last = steps[steps > 0][0], steps[-1]
    grid = np.meshgrid(np.geomspace(first / 4, REACH * last, 145), np.geomspace(*EXPONENTS, 43))
    middle, exponent = (axis.reshape(-1, 1) for axis in grid)  # (shapes, 1)

    def parts(x: Floats) -> Floats:  # (2 shapes, x, 2), the weights of R0 and A
        with np.errstate(divide="ignore"):
            rise = np.concatenate([1 / (1 + (middle / x) ** exponent), 1 - 2 ** -((x / middle) ** exponent)])
        return np.stack([1 - rise, rise], axis=-1)

    seeds, evaluations = accuracies.shape
    x = parts(steps)
    inverse = np.linalg.pinv(x)  # (2 shapes, 2, evaluations)
    ends = inverse @ accuracies.T  # (2 shapes, 2, seeds): R0 and A
    squares = ((accuracies.T - x @ ends) ** 2).sum(axis=(1, 2))
    mean_ceiling = ends[:, 1].mean(axis=1)
    squares[(mean_ceiling < 0) | (mean_ceiling > 1)] = math.inf
    n = max(seeds * (evaluations - 2) - 2, 1)
    best = int(squares.argmin())
    accepted = squares <= squares[best] * (1 + 2 * f.ppf(SURE, 2, n) / n)
    noise = max(squares[best] / n, least**2)  # variance of one evaluation of a seed
    over_seeds, over_residuals = (float(t.ppf((1 + SURE) / 2, dof)) for dof in (max(seeds - 1, 1), n))

    def interval(weights: Floats, of_one: float) -> Interval:  # (2 shapes, 2)
        values = np.einsum("ka,kas->ks", weights, ends)
        half = over_residuals * np.sqrt(noise * ((weights[:, None] @ inverse) ** 2).sum(axis=(1, 2)) / seeds)
        if seeds > 1:
            half = np.maximum(half, over_seeds * values.std(axis=1, ddof=1) / math.sqrt(seeds))
        mean, half = values.mean(axis=1), np.hypot(half, over_residuals * math.sqrt(of_one / seeds))
        low, high = (mean - half)[accepted].min(), (mean + half)[accepted].max()
        return np.clip(mean[best], 0, 1), max(low, 0.0), min(high, 1.0)

    return interval(parts(np.array([at]))[:, 0], noise), interval(np.tile([0.0, 1.0], (len(x), 1)), 0.0)


def forecasts_of(study: Study, at: float) -> list[Forecast]:
    """Return the forecast of each setting; `ConfigError` where a curve is too short, or `at` lies within one."""
    found, reference = list[Forecast](), curves_of(study.reference)
    for setting in study.settings:
        steps, curves = curves_of(setting)
        if len(steps) < FEWEST:
            have = f"{setting.label} has {len(steps)} evaluations that all its seeds share"
            raise ConfigError(f"--forecast needs {FEWEST}, and {have}: give longer runs, or eval_every=1 to new ones")
        if not steps[-1] < at < math.inf:
            raise ConfigError(f"--forecast {at:g} is not after step {steps[-1]:g} of {setting.label}: give a later one")
        accuracies = np.stack([*curves.values()])
        asked = [run.series["eval/problems"].y[0] for run in setting.runs if "eval/problems" in run.series]
        least = 1 / min(asked, default=math.inf)  # one problem
        reached, falls = accuracies[:, -1].mean(), fell(accuracies, least)
        value = ceiling = reached, 0.0, 1.0
        if not falls:
            value, ceiling = fitted(steps, accuracies, at, least)
        one = Forecast(setting.label, len(curves), steps[-1], reached, at, value, ceiling, falls)
        found.append(replace(one, against=against(one, found[0], (steps, curves), reference)) if found else one)
    return found


def fell(accuracies: Floats, least: float) -> bool:
    """Return whether the best mean over seeds is above the first and the last by more than three standard errors.

    The noise of an evaluation of a seed is that of the second differences of (seeds, evaluations), which a steep rise
    adds to: at most that of a draw of so many problems, where these are known; `least`, one problem, at least.
    """
    means = accuracies.mean(axis=0)
    noise = np.median(np.abs(np.diff(accuracies, n=2, axis=1))) / 1.652  # 0.6745 sqrt(6)
    if least:
        noise = max(min(noise, math.sqrt(least) / 2), least)
    return bool(means.max() - max(means[0], means[-1]) > 3 * noise * math.sqrt(2 / len(accuracies)))


def against(one: Forecast, reference: Forecast, *curves: tuple[Floats, dict[int, Floats]]) -> str:
    """Say whether a setting has a higher ceiling than the reference or is only faster, if either can be told.

    The interval of the difference of two ceilings is that of Zou and Donner (2008), each side's distances in
    quadrature. Faster: a higher mean over the steps that both evaluated, by the 95% interval over the seeds that both
    ran, at ceilings that differ by less than `EQUAL_CEILINGS`.
    """
    (a, a_low, a_high), (b, b_low, b_high) = one.ceiling, reference.ceiling
    low, high = a - b - math.hypot(a - a_low, b_high - b), a - b + math.hypot(a_high - a, b - b_low)
    if low > 0 or high < 0:
        return "higher ceiling" if low > 0 else "lower ceiling"
    if low < -EQUAL_CEILINGS or high > EQUAL_CEILINGS:
        return "cannot be told apart"
    (steps, mine), (its_steps, its) = curves
    _, here, there = np.intersect1d(steps, its_steps, return_indices=True)
    leads = [float((mine[seed][here] - its[seed][there]).mean()) for seed in mine.keys() & its.keys()]
    _, low, high = mean_interval(leads) if leads else (0.0, math.nan, math.nan)
    return "only faster" if low > 0 else "only slower" if high < 0 else "cannot be told apart"


def forecast_text(forecasts: Sequence[Forecast]) -> list[str]:
    """Format the forecasts as a table, a line each, in percent."""
    rows = [
        ["setting", "seeds", "reached in training", f"at step {forecasts[0].at:g}", f"ceiling ({SURE:.0%} intervals)"]
    ]
    for one in forecasts:
        value, ceiling = (
            f"{100 * mean:.1f} ({100 * low:.1f} to {100 * high:.1f})" for mean, low, high in (one.value, one.ceiling)
        )
        if not one.told:
            ceiling = "cannot be told: rose and fell" if one.fell else f"cannot be told ({ceiling.partition('(')[2]}"
        ceiling += f"; {one.against}" if one.against else ""
        rows.append([one.setting, str(one.seeds), f"{100 * one.reached:.1f} at {one.step:g}", value, ceiling])
    return aligned(rows).split("\n")
