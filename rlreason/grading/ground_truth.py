"""What data sets hold as a right answer, and the texts that an answer is compared with."""

import math
from typing import Any

#: A list means any of its members.
GroundTruth = str | int | float | list[str | int | float]


def reference_answers(ground_truth: Any) -> list[str] | None:
    """The texts that count as right, or None for a kind of value that no answer can be compared with.

    >>> reference_answers([38, "38.0"]), reference_answers(None), reference_answers(float("nan"))
    (['38', '38.0'], None, None)
    """
    members = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    texts: list[str] = []
    for member in members:
        if isinstance(member, str):
            texts.append(member)
        elif isinstance(member, int | float) and not isinstance(member, bool):
            if math.isnan(member):
                return None
            try:
                texts.append(str(member))
            except ValueError:  # an integer of more digits than Python prints
                return None
        elif not isinstance(ground_truth, list):
            return None
    return texts or None
