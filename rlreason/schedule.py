"""The learning rate of every update, and when to evaluate, as functions of progress."""

import math
from fractions import Fraction

FEWEST_EVALUATIONS = 10  # in a run that does not say how often, the first and the last included


def learning_rate_at(done: float, width: float, total: float, peak: float, kind: str, warmup: float) -> float:
    """The rate of one update, from where it stands in the run. All lengths are in steps.

        done < warmup:   peak x min(1, (done + width) / warmup)
        constant:        peak
        linear:          peak x (total - done) / (total - warmup)
        cosine:          peak x (1 + cos(pi (done - warmup) / (total - warmup))) / 2

    done: steps finished before this update, a fraction when a step has several updates; width: this update's share
    of a step (1 / updates per step). No update is wasted: the first has a rate above 0, and so has the last. The
    decays are those of transformers' `get_scheduler`, whose warm-up lags one step behind: its first rate is 0.

    >>> [round(learning_rate_at(done, 1, 6, 1.0, "linear", 2), 3) for done in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [round(learning_rate_at(done / 2, 0.5, 2, 1.0, "cosine", 0), 3) for done in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    if done < warmup:
        return peak * min(1.0, (done + width) / warmup)
    if kind == "constant":
        return peak
    progress = min(1.0, (done - warmup) / (total - warmup)) if total > warmup else 1.0
    return peak * (1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


def evaluation_due(done: Fraction, width: Fraction, total: int, every: int | None, longest: int | None) -> bool:
    """Whether an evaluation belongs behind the update that ends at `done` steps of `total` and is `width` steps wide.

    every: steps between evaluations, 0 for none on the way. None: at least ten in the run with the first, before it,
    and no more than `longest` steps apart; in a run of fewer than nine steps some fall between the updates of a step,
    as far as it has several.

    >>> [step for step in range(1, 201) if evaluation_due(Fraction(step), Fraction(1), 200, None, 10)][:3]
    [10, 20, 30]
    >>> sum(evaluation_due(Fraction(step), Fraction(1), 31, None, None) for step in range(1, 32))
    9
    >>> eighths = [Fraction(k, 8) for k in range(1, 41)]  # 5 steps of 8 updates
    >>> sum(evaluation_due(point, Fraction(1, 8), 5, None, None) for point in eighths)
    9
    """
    if every == 0:
        return False
    gap = Fraction(every) if every else min(Fraction(total, FEWEST_EVALUATIONS - 1), Fraction(longest or total))
    if gap >= 1:  # at the ends of steps only
        return done.denominator == 1 and done // gap > (done - 1) // gap
    return done // gap > (done - width) // gap
