"""The verifier of the kissing problem: exact, in Python's integers of any size, without any tolerance.

A set C of non-zero integer vectors in dimension 11 proves tau_11 >= |C| where the smallest squared distance between
two of them is at least the largest squared norm: every angle is then at least 60 degrees, so the directions touch one
ball as |C| balls of its size. Equality is allowed.

Needs the standard library alone, and nothing of the project: it runs in a process of its own.
"""

from collections.abc import Sequence
from operator import mul
from typing import Any

COMPARED = 1_000  # rows; a longer set in which so many have a pair that is too close is compared no further
LONGEST_SHOWN = 60  # digits of a number in an error's text
Facts = dict[str, Any]


def verify(rows: list[list[int]], *, dimension: int = 11, upper_bound: int = 868, most_points: int = 10_000) -> Facts:
    """Check the set and count it. `rows`: one list of integers per point, of any size and length.

    A dict with `score` and `num_points` (0 where the set is not valid), `valid`, `error`, `error_kind` (empty, size,
    type, ragged, dimension, zero_vector, too_close, alarm), `alarm` (a valid set above `upper_bound`, which is proved:
    it scores nothing), and what is known of the set, None where it was not reached: `raw_points`, `dimension`,
    `duplicates`, `max_squared_norm`, `min_squared_distance`, and `worst_pair`, the closest two rows, counted from 0: of
    pairs equally close the one whose second row, then whose first row comes first. `compared_rows`: of an invalid set
    of more than 1,000 rows only the first 1,000 are compared with one another where these are too close already.
    """
    facts: Facts = {"raw_points": len(rows), "duplicates": 0, "compared_rows": 0}
    facts |= dict.fromkeys(("dimension", "min_squared_distance", "max_squared_norm", "worst_pair"))

    def verdict(kind: str | None = None, error: str | None = None) -> Facts:
        score = 0 if kind else len(rows)
        alarm = error if kind == "alarm" else None
        told = {"score": score, "num_points": score, "valid": not kind, "error": error, "error_kind": kind}
        return {**told, "alarm": alarm, **facts}

    if not rows:
        return verdict("empty", "The set is empty")
    lengths = [len(row) for row in rows]
    facts["dimension"] = lengths[0] if len(set(lengths)) == 1 else None
    if len(rows) > most_points:
        return verdict("size", f"{len(rows)} points are too many: at most {most_points} are checked")
    for i, row in enumerate(rows):
        if any(type(x) is not int for x in row):
            return verdict("type", f"Row {i} (counted from 0) holds something else than plain integers")
    facts["duplicates"] = len(rows) - len(set(map(tuple, rows)))
    if facts["dimension"] is None:
        other = next(i for i, length in enumerate(lengths) if length != lengths[0])
        text = f"row 0 has {lengths[0]} coordinates and row {other} has {lengths[other]}, expected {dimension}"
        return verdict("ragged", f"The rows differ in length: {text}")
    if facts["dimension"] != dimension:
        return verdict("dimension", f"Dimension is {facts['dimension']}, expected {dimension}")
    norms = [sum(map(mul, row, row)) for row in rows]
    largest = facts["max_squared_norm"] = max(norms)
    if 0 in norms:
        return verdict("zero_vector", f"Row {norms.index(0)} (counted from 0) is the zero vector")
    distance, pair, compared = closest_pair(rows, norms)
    facts["compared_rows"] = compared
    if distance is not None:
        facts["min_squared_distance"] = distance
        facts["worst_pair"] = {"first": pair[0], "second": pair[1], "vectors": [list(rows[i]) for i in pair]}
        if distance < largest:
            part = f" (among the first {compared} of {len(rows)} points)" if compared < len(rows) else ""
            text = f"Minimum squared distance {_shown(distance)} < maximum squared norm {_shown(largest)}{part}"
            return verdict("too_close", text)
    if len(rows) > upper_bound:
        text = (
            f"{len(rows)} points pass every check, but it is proved that no valid set in dimension {dimension} has "
            f"more than {upper_bound}: the verifier or the bound must be wrong, so the set gets no score"
        )
        return verdict("alarm", text)
    return verdict()


def closest_pair(rows: Sequence[Sequence[int]], norms: Sequence[int]) -> tuple[int | None, tuple[int, int], int]:
    """(squared distance of the closest two rows, their places, how many rows were compared).

    By |x|^2 + |y|^2 - 2 <x, y>, `norms` being squared; the distance is None for one row. Stops after `COMPARED` rows
    where two of them are closer than the largest norm, and the set is not valid anyway.
    """
    best: int | None = None
    pair, largest = (0, 0), max(norms)
    for second in range(1, len(rows)):
        if best is not None and second >= COMPARED and best < largest:
            return best, pair, second
        double = [2 * x for x in rows[second]]
        nearer = [n - sum(map(mul, other, double)) for n, other in zip(norms[:second], rows, strict=False)]
        distance = norms[second] + min(nearer)
        if best is None or distance < best:
            best, pair = distance, (nearer.index(min(nearer)), second)
    return best, pair, len(rows)


def _shown(number: int) -> str:
    """A number >= 0 in full, or as 123000000000... (403 digits)."""
    if number < 10**LONGEST_SHOWN:
        return str(number)
    digits = number.bit_length() * 30102 // 100_000  # at most what it is
    while number >= 10**digits:
        digits += 1
    return f"{number // 10 ** (digits - 12)}... ({digits} digits)"
