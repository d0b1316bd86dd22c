"""What installed packages announce by entry points: rewards, data and losses under short names."""

from importlib.metadata import entry_points

#: Where an entry point's name stands in for `module:function`, and the group that it is announced in.
GROUPS = {
    "loss": "rlreason.losses",
    "data": "rlreason.data",
    "prompt.reward": "rlreason.rewards",
    "eval.reward": "rlreason.rewards",
}


def announced(key: str) -> dict[str, str]:
    """Name -> `module:function` of what may stand at a setting. Nothing is imported, so a broken package harms nobody.

    Of two packages that announce one name, the first in the order of their places is taken.

    >>> announced("seed")
    {}
    """
    group = GROUPS.get(key)
    found = entry_points(group=group) if group else ()
    return {point.name: point.value.partition("[")[0].strip() for point in sorted(found, reverse=True)}
