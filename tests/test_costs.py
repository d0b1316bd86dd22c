"""Bins, which are found faster than by looking at every one, are those of the plain way, written out here."""

import random

import pytest

from rlreason.model.packing import within_budget


def first_fit(sizes: list[int], budget: int, max_rows: int | None, rows: list[int]) -> list[list[int]]:
    """First fit decreasing, looking at every bin."""
    bins: list[list[int]] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        for held in bins:
            fits = sum(sizes[i] for i in held) + sizes[index] <= budget
            if fits and (max_rows is None or sum(rows[i] for i in held) + rows[index] <= max_rows):
                held.append(index)
                break
        else:
            bins.append([index])
    return bins


@pytest.mark.parametrize("seed", range(20))
def test_bins_are_those_of_plain_first_fit(seed):
    source = random.Random(seed)
    count, most = source.choice((0, 1, 2, 17, 64, 65, 150)), source.choice((3, 50, 130))
    sizes = [source.randint(0, most) for _ in range(count)]
    rows = [source.randint(1, 4) for _ in sizes]
    for budget, max_rows in ((100, None), (source.randint(-5, 120), source.choice((0, 1, 2, 5)))):
        assert within_budget(sizes, budget, max_rows) == first_fit(sizes, budget, max_rows, [1] * count)
        assert within_budget(sizes, budget, max_rows, rows) == first_fit(sizes, budget, max_rows, rows)
