"""Hydra's mistakes in one line each: the setting, its value, the rule, and the nearest right word.

It knows the texts of Hydra's and OmegaConf's errors, and the schemas.
"""

import difflib
import re
from dataclasses import fields
from typing import Any

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import OverrideParseException
from omegaconf import DictConfig, OmegaConf

from rlreason.config.store import SCHEMAS
from rlreason.errors import ConfigError


def one_line(error: Exception) -> str:
    """Hydra's message in one line, with the nearest right word where a word was not known."""
    cause = error.__cause__ or error
    if isinstance(cause, ConfigError):  # one of our resolvers said it
        return str(cause)
    text = f"{error}\n{cause}"
    full_key = getattr(cause, "full_key", None)
    if unknown := re.search(r"Key '([^']+)' not in '(\w+)'", text):
        return _unknown_key(unknown[1], full_key or unknown[1], unknown[2])
    if group := re.search(r"Could not override '([\w/]+)(?:@[^']*)?'. No match", text):
        return f"{group[1]} is no option of the chosen algorithm (an objective's axes are GRPO's): leave it out"
    if option := re.search(r"Could not find '([\w/]+)/([^']+)'", text):
        offered = GlobalHydra.instance().config_loader().get_group_options(option[1])
        return f"{option[1]}={option[2]} is no option of {option[1]}: choose one of {', '.join(offered)}"
    if value := re.search(r"Value '(.*)' of type '[^']+' could not be converted to (\w+)", text):
        return f"{full_key}={value[1]} must be of type {value[2]}: give a value of that type"
    if word := re.search(r"Error parsing override '([^'=]*)'\s+missing EQUAL", text):
        return f"{word[1]} is neither an option nor an override: write key=value (python -m rlreason --help)"
    if isinstance(error, OverrideParseException):
        reason = str(error).splitlines()[0]
        return (
            f"{error.override} cannot be read ({reason}): a value with = , or spaces needs quotes, as in key='\"a=b\"'"
        )
    if several := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '(.+)'", text):
        return f"{several[1]} names several values: add -m to run each of them, or use [a,b] for a list"
    if override := re.search(r"Error merging override (.+)", text):
        reason = str(cause).splitlines()[0].rstrip(".")
        return (
            f"{override[1]} does not fit there ({reason}): python -m rlreason --cfg job shows the form of every setting"
        )
    noise = ("full_key:", "object_type=", "To append", "Set the env", "See https")
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(noise))


def _unknown_key(word: str, full_key: str, schema: str) -> str:
    if full_key.startswith("hydra."):
        part = "/".join(full_key.split(".")[:2])
        return f"{full_key} is no setting of the chosen {part}: choose another {part}=..., or leave this out"
    own = [f"algorithm={name}" for name, node in SCHEMAS["schema"].items() if node.__name__ == schema]
    cfg = compose("config", own)
    group, _, _ = full_key.rpartition(".")
    if group and isinstance(OmegaConf.select(cfg, group), DictConfig):
        chosen = (node for nodes in SCHEMAS.values() for node in nodes.values() if node.__name__ == schema)
        names = [f.name for node in chosen for f in fields(node)] or OmegaConf.select(cfg, group)
        keys = ", ".join(f"{group}.{key!s}" for key in names)
        return f"{full_key} is no setting of the chosen option of {group}, which has {keys}: choose another {group}=..."
    near = difflib.get_close_matches(full_key, _known_keys(cfg), n=1) or difflib.get_close_matches(word, cfg, n=1)
    cure = f"did you mean {near[0]}?" if near else "python -m rlreason --cfg job lists every key"
    return f"{full_key} is no setting of this run: {cure}"


def _known_keys(cfg: DictConfig) -> list[str]:
    """Every key of a config as it is typed on the command line: `seed`, `sampling.max_tokens` ..."""

    def below(node: Any, prefix: str) -> list[str]:
        if not isinstance(node, dict):
            return []
        return [key for name, child in node.items() for key in (f"{prefix}{name}", *below(child, f"{prefix}{name}."))]

    return below(OmegaConf.to_container(cfg), "")
