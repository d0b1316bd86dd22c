"""What settings and values were called in the version before, understood for one more: typed, or in a saved run."""

from copy import deepcopy
from typing import Any

KEYS = {
    "rollout.async_steps": "rollout.async_level",
    "refill_rounds": "max_resampling_rounds",
    "baseline.kind": "baseline",
    "std_norm.kind": "std_norm",
    "logger.kind": "logger",
    "guards.parity": "monitors.parity",
    "guards.parity_bound": "monitors.parity_bound",
}
VALUES: dict[str, dict[str, str]] = {"rollout.placement": {"shared": "colocate"}}
GONE = ("guards",)  # groups that there are no more
SWITCHES = {"logger.kind": ("wandb", "tensorboard", "trackio")}  # in a file, one of these words is a switch now


def renewed(saved: dict[str, Any]) -> dict[str, Any]:
    """The saved settings of a run under the names of this version; the given ones stay as they are.

    >>> renewed({"rollout": {"async_steps": 1, "placement": "shared"}, "baseline": {"kind": "mean"}})
    {'rollout': {'placement': 'colocate', 'async_level': 1}, 'baseline': 'mean'}
    >>> renewed({"logger": {"kind": "wandb", "project": "p"}})
    {'logger': {'project': 'p', 'wandb': True, 'tensorboard': False, 'trackio': False}}
    >>> renewed({"guards": {"parity": "stop", "parity_bound": 0.1}})
    {'monitors': {'parity': 'stop', 'parity_bound': 0.1}}
    """
    out = deepcopy(saved)
    for former, key in KEYS.items():
        node, name = _place(out, former)
        if isinstance(node, dict) and name in node:
            value = node.pop(name)
            if former in SWITCHES:
                node |= {word: word == value for word in SWITCHES[former]}
                continue
            group, dot, _ = key.partition(".")
            if dot:
                out.setdefault(group, {})
            node, name = _place(out, key)
            node[name] = value
    for group in GONE:
        if out.get(group) == {}:
            del out[group]
    for key, values in VALUES.items():
        node, name = _place(out, key)
        if isinstance(node, dict) and node.get(name) in values:
            node[name] = values[node[name]]
    return out


def _place(settings: dict[str, Any], key: str) -> tuple[Any, str]:
    """The group that holds a setting, None where there is none, and the setting's name in it."""
    *groups, name = key.split(".")
    node: Any = settings
    for group in groups:
        node = node.get(group) if isinstance(node, dict) else None
    return node, name
