"""Answers of settings by simulation: what they differ by is known, so the rule that judges them can be judged."""

import numpy as np
from numpy.typing import NDArray

Answers = NDArray[np.float64]  # (seeds, problems), 0 or 1


def arms(
    rng: np.random.Generator, seeds: int, problems: int, spreads: tuple[float, ...], gains: tuple[float, ...] = ()
) -> list[Answers]:
    """The answers of one setting for each spread (standard deviation over its seeds, in accuracy).

    Problems are drawn from a population, as hard for one setting as for another but for a part of each setting's own.
    Half of the variance over seeds is shared by all settings, as with the same data order. `gains`: what a setting is
    better by, in accuracy.
    """
    hardness = rng.beta(1.2, 1.2, problems)
    shared = rng.normal(0, 1, seeds)
    made = []
    for k, spread in enumerate(spreads):
        of_seed = spread * (np.sqrt(0.5) * shared + np.sqrt(0.5) * rng.normal(0, 1, seeds))
        own = rng.normal(0, 0.05, problems)  # settings are good at different problems
        chance = 0.15 + 0.6 * hardness + own - own.mean() + of_seed[:, None] + (gains[k] if gains else 0.0)
        made.append((rng.random((seeds, problems)) < chance).astype(float))
    return made
