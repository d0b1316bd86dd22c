"""The 64 vectors of 0 and 1: three of them with sum 0 modulo 3 in every coordinate are equal."""

from itertools import product


def run_code() -> list[list[int]]:
    """64 vectors in dimension 6, each a list of integers."""
    return [list(point) for point in product((0, 1), repeat=6)]
