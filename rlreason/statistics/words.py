"""What a difference between two settings says, in words that follow the interval and never go further than it."""

from rlreason.statistics.differences import LEVEL, PROBLEMS, UNPAIRED, Difference
from rlreason.statistics.foresight import seeds_needed


def points(accuracy: float) -> str:
    """A difference in accuracy with three digits, as accuracies are shown.

    >>> points(0.0456), points(-0.0001)
    ('0.046', '0.000')
    """
    text = f"{accuracy:.3f}"
    return text.removeprefix("-") if float(text) == 0 else text


def sentence(found: Difference, adjusted_p: float | None = None, family: int = 1) -> str:
    """Whether one setting is better than another, and by how much; "cannot tell" where the interval holds 0.

    `adjusted_p`: by Holm over a `family` of comparisons, which then decides; the interval shown is the raw one.

    >>> from rlreason.statistics.differences import difference
    >>> sentence(difference(0.1, (0.01, 0.0, 3.0), 4, 256, "seeds and problems"))
    'better by 0.100 (0.068 to 0.132)'
    >>> sentence(difference(0.02, (0.01, 0.0, 3.0), 4, 256, "seeds and problems"))
    'cannot tell: the difference lies between -0.012 and 0.052; about 7 seeds would settle a difference of this size'
    >>> sentence(difference(-0.1, (0.0, 0.01, float("inf")), 1, 256, "problems"))
    'these two trained models differ, worse by 0.100 (0.080 to 0.120); one seed tells nothing of the settings'
    """
    p = found.p if adjusted_p is None else adjusted_p
    one_seed = found.over == PROBLEMS
    if p > LEVEL:
        return _cannot_tell(found, LEVEL if adjusted_p is None else LEVEL / max(family, 1), one_seed)
    ends = sorted((abs(found.low), abs(found.high)))
    size = f"by {points(abs(found.mean))} ({points(ends[0])} to {points(ends[1])})"
    word = ("better " if found.mean > 0 else "worse ") + size
    if one_seed:
        return f"these two trained models differ, {word}; one seed tells nothing of the settings"
    return word + ", the settings having run other seeds" * (found.over == UNPAIRED)


def _cannot_tell(found: Difference, level: float, one_seed: bool) -> str:
    lies = f"the difference lies between {points(found.low)} and {points(found.high)}"
    if found.low > 0 or found.high < 0:
        lies += " by itself, and may be 0 among so many comparisons"
    if one_seed:
        return f"cannot tell these two trained models apart: {lies}; one seed tells nothing of the settings"
    if found.over == UNPAIRED:
        lies += ", the settings having run other seeds"
    return f"cannot tell: {lies}; {settling(found, level)}"


def settling(found: Difference, level: float = LEVEL) -> str:
    """How many seeds would settle a difference of this size.

    >>> from rlreason.statistics.differences import difference
    >>> settling(difference(0.0, (0.01, 0.0, 3.0), 4, 256, "seeds and problems"))
    'no number of seeds would settle a difference of this size on these problems'
    """
    if (needed := seeds_needed(found, level)) is None:
        return "no number of seeds would settle a difference of this size on these problems"
    return f"about {max(needed, found.seeds + 1)} seeds would settle a difference of this size"
