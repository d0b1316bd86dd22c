"""What so many seeds and problems can show, before they have run, and how many it would take to settle a difference."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from rlreason.statistics.differences import LEVEL, Difference, half_width

MOST_SEEDS = 1000


@dataclass(frozen=True, slots=True)
class Spread:
    """What differences of two settings vary by, as variances in squared units of accuracy (0 to 1).

    Of one seed's mean difference over P problems: `seeds` + `residual` / P. What all seeds share because they answer
    the same problems: `shared` / P.
    """

    seeds: float
    residual: float
    shared: float = 0.0


#: Nothing is known: seeds spread by 2 to 5 points on each setting, half of which both settings share (so that the
#: difference spreads by as much), and the difference of two models' answers to one problem has the variance 0.225. With
#: 256 to 1,024 problems this gives the half widths of a simulation: 2 seeds 16-40 points, 3 5-13, 4 4-9, 5 3-7, 8 2-5.
ASSUMED = Spread(0.02**2, 0.225), Spread(0.05**2, 0.225)


def smallest_difference(seeds: int, problems: int, spread: Spread, level: float = LEVEL) -> float:
    """The half width to expect of the interval over so many seeds and problems: a smaller difference stays unsettled.

        sqrt((t_{S-1} c4(S) s)^2 / S + z^2 shared / P),   s^2 = seeds + residual / P

    c4(S) = E[s] / sigma of S normal values: what is expected is a half width, not its square. With one seed the
    interval is over problems, z sqrt((residual + shared) / P), and of two trained models, not of two settings.

    >>> [[round(100 * smallest_difference(s, p, a)) for s in (2, 3, 4, 5, 8)] for p, a in zip((1024, 256), ASSUMED)]
    [[18, 5, 4, 3, 2], [42, 13, 9, 7, 5]]
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


def assumed_range(seeds: int, problems: int, level: float = LEVEL) -> tuple[float, float]:
    """The smallest difference to expect where nothing is known: from seeds that spread little to such that spread much.

    >>> low, high = assumed_range(4, 1024)
    >>> round(low, 3), round(high, 3)
    (0.036, 0.076)
    """
    low, high = (smallest_difference(seeds, problems, spread, level) for spread in ASSUMED)
    return low, high


def spread_of(differences: Iterable[Difference]) -> Spread | None:
    """The spread that differences over several seeds have shown, the mean of theirs; None where there is none such.

    The residual of problems is part of the spread over seeds here: it holds for so many problems as they had.

    >>> from rlreason.statistics.differences import difference
    >>> shown = spread_of([difference(0.1, (0.02, 0.01, 3.0), 4, 100, "seeds and problems")])
    >>> round(shown.seeds, 6), shown.residual, round(shown.shared, 6)
    (0.0016, 0.0, 0.01)
    """
    found = [d for d in differences if d.seeds > 1]
    if not found:
        return None
    seeds = sum(d.se_seeds**2 * d.seeds for d in found) / len(found)
    return Spread(seeds, 0.0, sum(d.se_extra**2 * d.problems for d in found) / len(found))


def seeds_needed(found: Difference, level: float = LEVEL) -> int | None:
    """The fewest seeds with which the half width would be below a difference of this size, at the observed spreads.

    None: more than a thousand, as where the problems that all seeds share are what is uncertain. Of one seed, for
    which no spread over seeds is known, the middle of the assumed ones counts. `level`: smaller for one of several
    verdicts.

    >>> from rlreason.statistics.differences import difference
    >>> seeds_needed(difference(0.02, (0.01, 0.0, 3.0), 4, 256, "seeds and problems"))
    7
    >>> seeds_needed(difference(0.02, (0.0, 0.011, 3.0), 4, 256, "seeds and problems")) is None
    True
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
