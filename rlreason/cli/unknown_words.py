"""A word of the command line that names nothing: which setting, group, option or verb was meant, in one line."""

import re
from collections.abc import Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.aliases import PLACED
from rlreason.cli.habits import EQUIVALENTS
from rlreason.cli.suggestions import (
    algorithms_with,
    choices_named,
    chosen,
    did_you_mean,
    keys_below,
    keys_to_set,
    near,
    options,
    options_with,
    settings_like,
)
from rlreason.cli.verbs import VERBS, named_verb


def choices_among(overrides: Sequence[str]) -> list[str]:
    """The overrides that choose an option, of the readable ones."""
    parser, found, groups = OverridesParser.create(), [], options()
    for word in overrides:
        try:
            override = parser.parse_override(word)
        except Exception:
            continue
        group = override.key_or_group
        is_choice = group in groups or group.startswith("hydra/")
        if is_choice and not override.is_sweep_override() and not override.is_delete():
            found.append(word)
    return found


def unknown_key(key: str, choices: Sequence[str], name: str) -> str:
    """Which setting a key that this run does not have may have meant: another run's, or one spelt alike."""
    cfg = chosen(choices, name)
    if key.startswith("hydra."):
        return _unknown_to_hydra(key, cfg)
    algorithm = str(cfg.get("algorithm"))
    group = key.rpartition(".")[0]
    if group and isinstance(OmegaConf.select(cfg, group), DictConfig):
        return _unknown_in_group(key, group, cfg, choices)
    said = f"{key} is no setting of this run"
    owners = [name for name in algorithms_with(key) if name != algorithm]
    if owners and algorithm not in algorithms_with(key):
        theirs = " and ".join(f"algorithm={owner}'s" for owner in owners)
        ours = EQUIVALENTS.get(algorithm, {}).get(key)
        cure = f"algorithm={algorithm} has {ours}" if ours else f"leave it out, or choose algorithm={owners[0]}"
        return f"{said}: it is one of {theirs}: {cure}"
    cure = did_you_mean(settings_like(key, cfg)) or "python -m rlreason --cfg job lists every key"
    return f"{said}: {cure}"


def _unknown_in_group(key: str, group: str, cfg: DictConfig, choices: Sequence[str]) -> str:
    node = OmegaConf.select(cfg, group)
    top = next((place for place in PLACED if f"{group}.".startswith(f"{place}.")), group.partition(".")[0])
    whose = PLACED.get(top, top)  # the group of options
    has_options = group == top and whose in options()
    said = f"{key} is no setting of " + (f"the chosen option of {group}" if has_options else group)
    of_others = [f"{top}={option}" for option in options_with(whose, key[len(top) + 1 :])]
    has = f"{'it' if not has_options else 'the chosen one'} has {', '.join(f'{group}.{name!s}' for name in node)}"
    if of_others:
        cure = f"it is one of {' and '.join(of_others[:4])}: choose one of those, or leave it out"
        return f"{said}: {cure} ({has})"
    last = key.rpartition(".")[2]
    here = [name for name in map(str, node) if f"{group}.{name}" in keys_to_set(cfg)]
    near_here = [f"{group}.{name}" for name in near(last, here)]
    meant = near_here or [like for like in settings_like(last, cfg) if like.startswith(f"{top}.")]
    if meant:
        return f"{said}: {did_you_mean(meant)}"
    other = f"choose another {top}=..., or leave it out" if has_options else "leave it out"
    return f"{said}: {other} ({has})"


def _unknown_to_hydra(key: str, cfg: DictConfig) -> str:
    part = "/".join(key.split(".")[:2])
    if part in ("hydra/launcher", "hydra/sweeper"):
        return f"{key} is no setting of the chosen {part}: choose another {part}=..., or leave this out"
    meant = near(
        key, cutoff=0.82, known=(known for known in keys_below(cfg.hydra, "hydra.") if known != "hydra.help.template")
    )
    return f"{key} is no setting of Hydra: {did_you_mean(meant) or 'python -m rlreason --cfg hydra lists them'}"


def unknown_group(word: str) -> str:
    """Which group of options a word may have meant."""
    group, _, package = word.partition("@")
    if package:
        return f"{word}=... puts an option in another place than its own: write {group}=OPTION"
    if group in options() and group not in ("experiment", "sweep"):
        return f"{group} is no option of the chosen algorithm (an objective's axes are GRPO's): leave it out"
    meant = did_you_mean(near(group, options()))
    return f"{group or '(nothing)'} is no group to choose from: {meant or 'leave it out, or write key=value'}"


def no_override(word: str, is_first: bool = False) -> str:
    """A word without an equals sign: what it may have been meant as; a verb, where it comes first."""
    said = f"{word} is neither an option nor an override: "
    if verb := named_verb([word]):
        return f"{said}a verb comes first, as in rlreason {verb.name} {verb.takes}"
    groups, cfg = options(), chosen([], "config")
    if word in groups:
        return f"{said}write key=value, as in {word}={groups[word][0]} ({', '.join(groups[word])})"
    if word in keys_to_set(cfg):
        return f"{said}write key=value, as in {word}={OmegaConf.select(cfg, word)}"
    group, _, option = re.sub(r"[/:]", ".", word).rpartition(".")
    if option in groups.get(group, ()):
        return f"{said}write {group}={option}"
    flags = ("multirun", "help", "version", "cfg", "config-dir", "hydra-help")
    meant = [f"--{flag}" for flag in near(word, flags, cutoff=0.8)] or choices_named(word)
    meant = meant or [f"{like}=..." for like in near(word, [*groups, *keys_to_set(cfg)], cutoff=0.7)]
    if is_first and not meant and re.fullmatch(r"[A-Za-z][\w-]{0,30}", word):
        *names, last = (verb.name for verb in VERBS)
        return f"{word} is no verb: {', '.join(names)} and {last} are; settings are key=value"
    return f"{said}{did_you_mean(meant)} write key=value (python -m rlreason --help)".replace(":  ", ": ")
