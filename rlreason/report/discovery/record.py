"""Where the record of a problem stands, and where a score stands among what others reached."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlreason.config.leaves import typed_word
from rlreason.report.discovery.texts import figure, said, table

LARGEST_SCORE = 1e15


def records_of(record: Sequence[Mapping[str, Any]]) -> list[tuple[float, str]]:
    """(score, who) of the entries of a problem's `record` that have a number as their score."""
    found = []
    for row in record:
        score = row.get("score")
        if isinstance(score, int | float) and not isinstance(score, bool) and 0 <= score <= LARGEST_SCORE:
            found.append((float(score), str(row.get("who") or "")))
    return found


def standing(record: Sequence[Mapping[str, Any]], score: int, unit: str) -> list[str]:
    """Where the record of a problem stands, and where a score stands among it."""
    if not record:
        return ["The problem names no records."]
    rows = [
        [said(typed_word(row.get("score")), 30), said(str(row.get("who") or ""), 80), said(str(row.get("note") or ""))]
        for row in record
    ]
    lines = [*table([said(unit, 30), "who", "note"], rows, frozenset({0})), ""]
    known = sorted(records_of(record), key=lambda one: one[0])
    below, above = [one for one in known if one[0] <= score], [one for one in known if one[0] > score]
    reached = f"reaches {figure(below[-1][0])} ({said(below[-1][1], 80)})" if below else "reaches none of these"
    if above:
        ahead = f"; the next above it is {figure(above[0][0])} ({said(above[0][1], 80)})."
    else:
        ahead = ", the highest figure of the table: check it by other means before you believe it."
    return [*lines, f"The best score here, {figure(score)}, {reached}{ahead}" if known else ""]
