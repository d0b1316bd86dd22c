"""What settings and values were called in the version before, understood for one more: typed, or in a saved run."""

from typing import Any

from omegaconf import DictConfig, OmegaConf

KEYS = {
    "rollout.async_steps": "rollout.async_level",
    "refill_rounds": "max_resampling_rounds",
    "baseline.kind": "baseline",
    "std_norm.kind": "std_norm",
}
VALUES: dict[str, dict[str, str]] = {"rollout.placement": {"shared": "colocate"}}


def renewed(saved: Any) -> Any:
    """The saved settings of a run (or a part of them) under the names of this version; the given ones stay as they are.

    >>> renewed(OmegaConf.create({"rollout": {"async_steps": 1, "placement": "shared"}}))
    {'rollout': {'placement': 'colocate', 'async_level': 1}}
    """
    out = saved.copy()
    for former, key in KEYS.items():
        group, _, name = former.rpartition(".")
        node = OmegaConf.select(out, group)
        if isinstance(node, DictConfig) and name in node:
            OmegaConf.update(out, key, node.pop(name), force_add=True)
    for key, values in VALUES.items():
        if (value := OmegaConf.select(out, key)) in values:
            OmegaConf.update(out, key, values[value])
    return out
