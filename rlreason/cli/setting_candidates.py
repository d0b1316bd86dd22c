"""List completions of the words that start runs: flags, and the settings and options of what Hydra composes."""

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import BooleanNode, Container, DictConfig, Node, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlreason.cli.aliases import NAMES, PLACED, translated
from rlreason.cli.candidates import awaiting_value, of_flags, paths, runs_or_files
from rlreason.cli.flags import Request, composing, flags_parser, read
from rlreason.cli.mistakes import choices_among, config_of, options
from rlreason.cli.options import PLUGINS
from rlreason.config.groups import NAMED_REWARDS
from rlreason.config.leaves import INPUTS, typed_word
from rlreason.config.store import register
from rlreason.errors import ConfigError
from rlreason.objectives.rules import OPTIONS

RESUME = "resume="  # see resume.py
LISTS = ("experiment", "logger")  # groups of which a run may have several options, as in [a,b]
FOLDERS = ("hydra.run.dir", "hydra.sweep.dir", "model.cache")  # settings that name a place to write to


def of_runs(before: Sequence[str], word: str) -> list[str]:
    """Return completions: flags, settings and options."""
    parser = flags_parser()
    if word.startswith("-") or awaiting_value(parser, before):
        return of_flags(parser, before, word)
    if word.startswith(RESUME):
        return [f"{RESUME}{run}" for run in runs_or_files(word.removeprefix(RESUME))]
    try:
        request = read([one for one in before if not "--version".startswith(one)])
    except ConfigError:  # in other words
        request = Request({}, [one for one in before if "=" in one and not one.startswith("-")])
    register()
    with composing(request):
        others = [RESUME] * (not request.multirun and len(word) > 1)  # rarely meant if nothing is typed yet
        return of_flags(parser, before, word) + others + of_override(word, _composed(request), request.multirun)


def _composed(request: Request) -> DictConfig:
    """Return the config that the previous words choose, with Hydra's part."""
    words = request.overrides
    with suppress(ConfigError):  # one of them cannot be translated
        words = translated(words, note=lambda _: None)
    return config_of(choices_among(words), request.config_name)


def of_override(word: str, cfg: DictConfig, multirun: bool = False) -> list[str]:
    """Return what an override may become in a run of this config, a level at a time. Hydra must be ready to compose."""
    plain = word.lstrip("+")
    key, equals, value = plain.partition("=")
    found = _values_of(key, value, cfg, multirun) if equals else _keys(plain, cfg)
    if plus := word[
        : len(word) - len(plain)
    ]:  # for existing settings Hydra accepts only ++, and no choice of an option
        groups = _groups(cfg)
        found = [one for one in found if plus == "++" and _ours(one.partition("=")[0]) not in groups]
    return [plus + one for one in found]


def _keys(word: str, cfg: DictConfig) -> list[str]:
    """Return what may stand before the equals sign: `loss=`, `loss.`, `sampling.temperature=`."""
    place, dot, _ = word.rpartition(".")
    node = _select(cfg, place) if dot else cfg
    inner = dict(node.items_ex(resolve=False)) if isinstance(node, DictConfig) else {}
    if not dot and not word.startswith("h"):
        inner.pop("hydra", None)  # rarely meant, and its settings are many
    keys = [
        f"{place}{dot}{name!s}" + ("." if isinstance(child, DictConfig) and not child._is_none() else "=")
        for name, child in inner.items()
    ]
    keys += [f"{key}=" for key in _groups(cfg) if "@" in word or "@" not in key]
    if any(key.startswith(word) for key in keys):
        return keys
    return [f"{name}=" for name in NAMES]  # a handout's


def _groups(cfg: DictConfig) -> dict[str, str]:
    """Return the places of options in this run, each with its group, such as {"eval.prompt": "prompt"}.

    Only existing choices: only GRPO has the axes of an objective.
    """
    there, chooses = options(), list(map(str, cfg.hydra.runtime.choices))
    placed = {key: group for key, group in PLACED.items() if f"{group}@{key}" in chooses}
    full = {f"{group}@{key}": group for key, group in placed.items()}
    return {group: group for group in (*there, *PLUGINS) if group in chooses} | placed | full


def _values_of(key: str, value: str, cfg: DictConfig, multirun: bool) -> list[str]:
    """Return the words KEY=VALUE that the value may become; of a list or sweep, the last value is completed."""
    name, ours, head = NAMES.get(key), _ours(key), ""
    if group := _groups(cfg).get(ours):
        words = GlobalHydra.instance().config_loader().get_group_options(group)
    elif ours.removeprefix("eval.") in INPUTS or ours in FOLDERS or value.startswith((".", "/", "~")):
        return [f"{key}={path}" for path in paths(value)]
    else:
        words = _words(ours, cfg)
    if name and name.values:
        words = list({ours: theirs for theirs, ours in reversed([*name.values.items()])}.values())  # a spelling of each
    if value.startswith("[") and group in LISTS:
        head, value, multirun = "[", value[1:], True
        words = [word for word in words if word != "none"]  # which excludes others
    if multirun:
        *given, _ = value.split(",")
        head, words = head + "".join(f"{one}," for one in given), [word for word in words if word not in given]
    return [f"{key}={head}{word}" for word in words]


def _ours(key: str) -> str:
    """Return our key for one that may be a handout's."""
    return NAMES[key].key if key in NAMES else key


def _words(key: str, cfg: DictConfig) -> list[str]:
    """Return the words that a setting accepts; for any other setting its current value."""
    place, _, name = key.rpartition(".")
    parent = _select(cfg, place) if place else cfg
    if not isinstance(parent, DictConfig):
        return []
    node = parent._get_node(name, validate_access=False)
    if not isinstance(node, Node) or isinstance(node, Container):
        return []
    null = ["null"] if node._is_optional() else []
    if isinstance(node, BooleanNode):
        return ["true", "false", *null]
    kind: Any = OmegaConf.get_type(parent)
    of_fields = {field.name: field.metadata for field in fields(kind)} if is_dataclass(kind) else {}
    of_objective = OPTIONS.get(key.removeprefix("loss.")) or (NAMED_REWARDS if name == "reward" else None)
    if choices := dict(of_fields.get(name, ())).get("choices") or of_objective:
        return [*choices, *null]
    now = _select(cfg, key)
    return [typed_word(now)] if now is not None and re.fullmatch(r"[\w.+-]+", typed_word(now)) else null


def _select(cfg: DictConfig, key: str) -> Any:
    """Return what the config has under a key; None if there is nothing, or the key is no key."""
    with suppress(OmegaConfBaseException, ValueError):
        return OmegaConf.select(cfg, key) if key else None
    return None
