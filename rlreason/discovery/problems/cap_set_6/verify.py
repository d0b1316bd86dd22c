"""The verifier of cap sets: points of F_3^n, the vectors of 0, 1 and 2, with no three of them on a line.

Three different points x, y, z lie on a line where x + y + z = 0 modulo 3 in every coordinate. In dimension 6 no cap has
more than 112 points (Potechin, Maximal caps in AG(6,3), Designs, Codes and Cryptography 46, 2008), and one has as many
(Calderbank and Fishburn, Maximal three-independent subsets of {0,1,2}^n, the same journal, 4, 1994).

Needs the standard library alone, and nothing of the project: it runs in a process of its own.
"""

from typing import Any


def verify(
    rows: list[list[int]], *, dimension: int = 6, upper_bound: int = 112, most_points: int = 1_000
) -> dict[str, Any]:
    """Check the set and count it. `rows`: one list of integers per point, of any size and length.

    A dict with `score` and `num_points` (0 where the set is not valid), `valid`, `error`, `error_kind` (empty, size,
    type, ragged, dimension, entry, duplicate, line, alarm), `alarm`, and what is known of the set: `raw_points`,
    `dimension` (None where rows differ in length), `duplicates` (rows that repeat an earlier one) and `worst_line`,
    three rows on a line: {"rows": [i, j, k], "vectors": [...]}, counted from 0.

    `upper_bound` is proved (112 in dimension 6), so a larger valid set scores nothing and raises an alarm.

    >>> result = verify([[0, 1], [1, 1], [0, 2], [2, 1]], dimension=2, upper_bound=4)
    >>> result["error"], result["worst_line"]["rows"]
    ('Rows 0, 1 and 3 (counted from 0) lie on a line', [0, 1, 3])
    """
    facts: dict[str, Any] = {"raw_points": len(rows), "dimension": None, "duplicates": 0, "worst_line": None}
    if fault := _fault_of_form(rows, dimension, most_points, facts):
        return _verdict(facts, *fault)
    if line := line_among([tuple(row) for row in rows]):
        facts["worst_line"] = {"rows": list(line), "vectors": [list(rows[i]) for i in line]}
        return _verdict(facts, "line", "Rows {}, {} and {} (counted from 0) lie on a line".format(*line))
    if len(rows) > upper_bound:
        text = (
            f"{len(rows)} points pass every check, but it is proved that no cap in dimension {dimension} has more than "
            f"{upper_bound}: the verifier or the bound must be wrong, so the set gets no score"
        )
        return _verdict(facts, "alarm", text)
    return _verdict(facts)


def line_among(points: list[tuple[int, ...]]) -> tuple[int, int, int] | None:
    """Three points on a line, as increasing numbers; None where there are none. `points`: different ones, of 0, 1, 2.

    Two points x and y determine the third of their line, -(x + y) modulo 3, which is neither of them.
    """
    place = {point: i for i, point in enumerate(points)}
    for second, y in enumerate(points):
        for first, x in enumerate(points[:second]):
            third = place.get(tuple(-(a + b) % 3 for a, b in zip(x, y, strict=True)), -1)
            if third > second:
                return first, second, third
    return None


def _fault_of_form(
    rows: list[list[int]], dimension: int, most_points: int, facts: dict[str, Any]
) -> tuple[str, str] | None:
    """Kind and text of what is wrong with the rows before lines are looked for; `facts` gets what can be told."""
    if not rows:
        return "empty", "The set is empty"
    lengths = [len(row) for row in rows]
    facts["dimension"] = lengths[0] if len(set(lengths)) == 1 else None
    if len(rows) > most_points:
        return "size", f"{len(rows)} points are too many: at most {most_points} are checked"
    for i, row in enumerate(rows):
        if any(type(x) is not int for x in row):
            return "type", f"Row {i} (counted from 0) holds something else than plain integers"
    facts["duplicates"] = len(rows) - len(set(map(tuple, rows)))
    if facts["dimension"] is None:
        other = next(i for i, length in enumerate(lengths) if length != lengths[0])
        return "ragged", (
            f"The rows differ in length: row 0 has {lengths[0]} coordinates and row {other} has {lengths[other]}, "
            f"expected {dimension}"
        )
    if facts["dimension"] != dimension:
        return "dimension", f"Dimension is {facts['dimension']}, expected {dimension}"
    for i, row in enumerate(rows):
        if any(not 0 <= x <= 2 for x in row):
            return "entry", f"Row {i} (counted from 0) has an entry that is none of 0, 1, 2"
    if facts["duplicates"]:
        again = next(i for i, row in enumerate(rows) if rows.index(row) < i)
        return "duplicate", f"Row {again} (counted from 0) repeats row {rows.index(rows[again])}"
    return None


def _verdict(facts: dict[str, Any], kind: str | None = None, text: str | None = None) -> dict[str, Any]:
    score = facts["raw_points"] if kind is None else 0
    verdict = {"score": score, "num_points": score, "valid": kind is None, "error": text, "error_kind": kind}
    return verdict | {"alarm": text if kind == "alarm" else None} | facts
