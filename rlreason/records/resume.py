"""Whether a job that does not train goes on with what an interrupted one left in its folder."""

from pathlib import Path
from typing import Any

import yaml

from rlreason.config.former_names import renewed
from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG, UNFINISHED

#: Settings that an interrupted job may go on without: they change its speed, its memory or what it shows.
HARMLESS = ("threads", "log_generations", "micro_batch_tokens", "rollout.max_rows", "rollout.kv_cache_gb")


def goes_on(folder: Path, config: str) -> bool:
    """Whether a job with this config continues the interrupted one in the folder: one of the same algorithm.

    With other settings it is refused (`ConfigError`): it was probably meant to go on, and its responses must not be
    mixed with others.
    """
    path = folder / CONFIG
    if not path.exists() or not (folder / UNFINISHED).exists():
        return False
    before, now = _flat(path.read_text(encoding="utf-8")), _flat(config)
    if before.get("algorithm") != now.get("algorithm"):
        return False
    if different := changed(before, now):
        raise ConfigError(
            f"hydra.run.dir={folder} holds an interrupted run with other settings ({different}): "
            "type its command again to go on with it, or choose another folder"
        )
    return True


def changed(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first setting in which two configs differ, as text; empty when only speed and display do.

    >>> changed({"seed": 0, "sampling.max_tokens": 48}, {"seed": 0, "sampling.max_tokens": 64})
    'sampling.max_tokens=48 there, 64 here'
    """
    keys = [k for k in dict.fromkeys((*old, *new)) if old.get(k) != new.get(k) and k not in HARMLESS]
    return f"{keys[0]}={old.get(keys[0])} there, {new.get(keys[0])} here" if keys else ""


def _flat(config: str) -> dict[str, Any]:
    """The settings of a config by their dotted names of this version; {} where it is no config at all."""

    def below(node: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {prefix[:-1]: node}
        return {key: v for name, child in node.items() for key, v in below(child, f"{prefix}{name}.").items()}

    try:
        settings = yaml.safe_load(config)
    except yaml.YAMLError:
        return {}
    return below(renewed(settings), "") if isinstance(settings, dict) else {}
