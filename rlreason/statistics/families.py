"""Several comparisons at once: p-values that keep the error of the whole family."""

from collections.abc import Sequence


def holm(p_values: Sequence[float], family: int | None = None) -> list[float]:
    """The p-values adjusted by Holm's step-down rule (1979), in the order given.

    The k-th smallest is multiplied by m - k + 1, and none is smaller than the ones before it or larger than 1. Among
    verdicts with adjusted p <= 0.05 any is wrong in at most 5% of the families, however their members depend.

    `family`: m, where more comparisons belong to it than have been made so far.

    >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])], [round(p, 3) for p in holm([0.01], family=4)]
    ([0.03, 0.06, 0.06], [0.04])
    """
    m = max(len(p_values), family or 0)
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, k in enumerate(sorted(range(len(p_values)), key=lambda k: p_values[k])):
        largest = max(largest, min(1.0, (m - rank) * p_values[k]))
        adjusted[k] = largest
    return adjusted
