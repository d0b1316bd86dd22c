"""Statistics of finite samples, as pure functions of plain numbers and arrays: import them from here."""

from rlreason.statistics.differences import (
    PROBLEMS,
    SEEDS,
    UNPAIRED,
    Difference,
    compared,
    paired_difference,
    unpaired_difference,
)
from rlreason.statistics.families import holm
from rlreason.statistics.foresight import ASSUMED, Spread, assumed_range, seeds_needed, smallest_difference, spread_of
from rlreason.statistics.intervals import (
    Z95,
    Floats,
    bootstrap_intervals,
    cluster_interval,
    cluster_variance,
    fewer_p,
    mean_interval,
    mismatch_metrics,
    of_clusters,
    wilson_interval,
)
from rlreason.statistics.words import points, sentence

__all__ = [
    "ASSUMED",
    "PROBLEMS",
    "SEEDS",
    "UNPAIRED",
    "Z95",
    "Difference",
    "Floats",
    "Spread",
    "assumed_range",
    "bootstrap_intervals",
    "cluster_interval",
    "cluster_variance",
    "compared",
    "fewer_p",
    "holm",
    "mean_interval",
    "mismatch_metrics",
    "of_clusters",
    "paired_difference",
    "points",
    "seeds_needed",
    "sentence",
    "smallest_difference",
    "spread_of",
    "unpaired_difference",
    "wilson_interval",
]
