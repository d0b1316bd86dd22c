"""Mistakes of the command line, one line each, found by looking at the words and not at Hydra's messages.

Options are looked up before anything is composed. Where Hydra or OmegaConf then refuse to compose, the options alone
are composed, and each word is held to what that run has. What nothing here knows is the library's own first line.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hydra import compose
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlreason.cli.names import EQUIVALENTS, HABITS, MAY_BE_ABSENT, NAMES, NONE, PLACED
from rlreason.cli.options import (
    algorithms_with,
    choices_among,
    choices_named,
    config_exists,
    config_of,
    group_options,
    is_sweep,
    keys_below,
    keys_of_models,
    keys_to_set,
    near,
    options_by_group,
    options_with,
    shortens,
    type_of,
    values_of,
)
from rlreason.cli.subcommands import SUBCOMMANDS, named_subcommand
from rlreason.config.store import BLOCKS, FUNCTIONS
from rlreason.errors import ConfigError
from rlreason.records.reader import RESOURCES, exit_code
from rlreason.runtime.text import first_line

LONGEST_SHOWN = 100  # characters of one word in a message
SEVERAL = ("experiment", "logger")  # groups of which a run may have several options, as a list
PLUGINS = {"hydra/launcher": "rlreason[launchers]", "hydra/sweeper": ""}  # groups of Hydra's -> an extra that adds some
NAMED = ("model", "data", "prompt")  # groups whose options have a name among their settings
USUAL = ("r1_zero", "jsonl")  # options used as examples
LIST = "python -m rlreason --cfg job lists every key"


@contextmanager
def mistakes_in(words: Sequence[str]) -> Iterator[None]:
    """Make the words printable in error messages of the block: no control characters, and cut if they are very long."""
    try:
        yield
    except ConfigError as error:
        text = str(error)
        parts = {part for word in words for part in (word, *word.lstrip("+~").partition("=")[::2]) if len(part) > 1}
        for part in sorted(parts, key=len, reverse=True):
            text = text.replace(part, printable(part))
        if text == str(error):
            raise
        raise type(error)(text) from error


def printable(word: str) -> str:
    r"""Return a word as it is printed in a message.

    >>> printable("seed=1\nx"), printable("seed=" + "9" * 5000)[-30:]
    ('seed=1\\nx', '999999999... (5005 characters)')
    """
    plain = "".join(c if c.isprintable() else repr(c)[1:-1] for c in word)
    return plain if len(plain) <= LONGEST_SHOWN else f"{plain[:LONGEST_SHOWN]}... ({len(word)} characters)"


@contextmanager
def in_one_line(overrides: Sequence[str], name: str = "config", composing: bool = False) -> Iterator[None]:
    """Raise Hydra's errors about these overrides as a `ConfigError`.

    While it is `composing`, only Hydra is at work, which fails on odd words in many ways: any error counts.
    """
    try:
        yield
    except (ConfigError, BrokenPipeError):
        raise
    except Exception as error:
        of_hydra = isinstance(error, HydraException | OmegaConfBaseException | YAMLError | UnicodeDecodeError)
        if not (of_hydra or composing) or exit_code(error) == RESOURCES:
            raise
        raise ConfigError(explained(error, overrides, name)) from error


def explained(error: Exception, overrides: Sequence[str], name: str) -> str:
    """Return in one line what is wrong: with a word, with a file of options, or the library's own first line."""
    if isinstance(error.__cause__, ConfigError):  # of a resolver or a function's option of ours
        return str(error.__cause__)
    if isinstance(error, YAMLError | UnicodeDecodeError):
        mark = getattr(error, "problem_mark", None)
        where = f"{mark.name}, line {mark.line + 1}: {getattr(error, 'problem', '')}" if mark else first_line(error)
        return f"a file of options is no YAML ({where}): fix it, or choose another"
    if in_file := re.match(r"In '([^']+)'", str(error)):
        return _in_file(in_file[1], str(error), config_of(choices_among(overrides), name))
    cfg = config_of(choices_among(overrides), name)
    if line := next(filter(None, (wrong(word, overrides, cfg, name) for word in overrides)), ""):
        return line
    about = [word for word in overrides if "${" in word]
    return (
        f"{about[-1] if about else ' '.join(overrides)} cannot be composed ({first_line(error)}): fix or leave it out"
    )


def _in_file(file: str, text: str, cfg: DictConfig) -> str:
    """Return what is wrong with a file of options, with the nearest right key for an unknown one."""
    group = file.partition("/")[0]
    if unknown := re.search(r"Key '([^']+)' (?:is )?not in", text):
        if unknown[1] == group:
            return f"{file}.yaml sets {group}, which is no setting: begin it with the line # @package _global_"
        return f"{file}.yaml: {unknown_key(unknown[1], cfg)}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"{file}.yaml does not compose ({' '.join(lines[:2]).partition(': ')[2]}): fix the file"


def did_you_mean(shown: Iterable[str]) -> str:
    """
    >>> did_you_mean(["loss=gspo", "objective=gspo"]), did_you_mean([])
    ('did you mean loss=gspo or objective=gspo?', '')
    """
    words = list(dict.fromkeys(shown))[:3]
    return f"did you mean {' or '.join(words)}?" if words else ""


# What can be said of a word by itself


def refuse_wrong_words(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a word that cannot be read, chooses no option, or takes away what every run needs."""
    parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
    groups = options_by_group()
    for word in overrides:
        try:
            [override] = parser.parse_overrides([word])
            list(override.sweep_string_iterator() if override.is_sweep_override() else ())
        except Exception:  # Hydra fails on odd words in many ways
            raise ConfigError(unreadable(word, overrides)) from None
        key = override.key_or_group
        offered = groups.get(key) or (group_options(key) if key.startswith("hydra/") else [])
        if not key:
            raise ConfigError(f"{word} names no setting in front of the equals sign: write key=value")
        if override.is_hydra_override() and override.is_sweep_override():
            raise ConfigError(f"{word}: Hydra's own settings have one value in all runs: give one, or quote a text")
        if override.is_delete():
            if PLACED.get(override.package or "") != key and not key.startswith("hydra") and key not in MAY_BE_ABSENT:
                cure = f"choose an option instead, as in {key}={offered[0]}" if offered else f"write {key}=VALUE"
                raise ConfigError(f"~{key}: nothing that a run needs can be taken away: {cure}")
        elif override.package and PLACED.get(override.package) != key:
            raise ConfigError(f"{word} puts an option in another place than its own: write {key}=OPTION")
        elif override.is_add() and key in groups and key not in MAY_BE_ABSENT:
            raise ConfigError(f"{word}: {key} is chosen already: write {key}=OPTION, without a +")
        elif key.replace(".", "/") in PLUGINS and "." in key:
            raise ConfigError(f"{word}: {key.replace('.', '/')} is chosen with a slash: {key.replace('.', '/')}=NAME")
        elif offered:
            _refuse_wrong_option(override, key, offered)
        elif key == "hydra.searchpath":
            for place in values_of(override):
                if not place.startswith("pkg://") and not Path(place.removeprefix("file://")).is_dir():
                    raise ConfigError(f"{key}={place} is no folder: give a list of folders, or --config-dir DIR")
        else:
            _refuse_mere_name(override, groups, overrides)


def _refuse_wrong_option(override: Override, group: str, offered: Sequence[str]) -> None:
    word, values = override.input_line, values_of(override)
    one_of = f"choose one of {', '.join(offered)}"
    value = override._value
    lists = [one for one in (value.list if isinstance(value, ChoiceSweep) else [value]) if isinstance(one, list)]
    if group == "sweep" and (override.is_sweep_override() or lists):
        raise ConfigError(f"{word}: one sweep is one name, and another is a command of its own: {one_of}")
    if lists and group not in SEVERAL and group in options_by_group():
        raise ConfigError(f"{word}: a run has one option of {group}: {one_of}")
    if any(len(one) > 1 and "none" in map(str, one) for one in lists):
        raise ConfigError(f"{word} chooses none beside others: leave none out, or write {group}=none")
    if not values or isinstance(value, dict):
        raise ConfigError(f"{word} chooses no option of {group}: {one_of}")
    for shown in values:
        if shown in offered or (shown and config_exists(f"{group}/{shown}")):
            continue
        axes = ("loss", "baseline") if group == "objective" and shown not in NONE else ()
        elsewhere = [f"{axis}={shown}" for axis in axes if shown in group_options(axis)]
        meant = did_you_mean(elsewhere or near(shown, offered) or [one for one in offered if shortens(shown, one)])
        more = ", or a function of your own as module:function" if group in FUNCTIONS else ""
        if group in PLUGINS:
            extra = f"'{PLUGINS[group]}'" if PLUGINS[group] else f"hydra-NAME-{group[6:]}"
            more = f", or install the plug-in that brings it (pip install {extra})"
        key = override.package or group  # as it was typed
        raise ConfigError(f"{key}={shown} is no option of {group}: {meant}{' ' * bool(meant)}{one_of}{more}")


def _refuse_mere_name(override: Override, groups: dict[str, list[str]], words: Sequence[str]) -> None:
    """Refuse to set an option's name to that of another option: it would be recorded, and nothing else changed."""
    place, _, last = override.key_or_group.rpartition(".")
    kind = PLACED.get(place, place)
    for name in values_of(override) if last == "name" and kind in NAMED else ():
        option = name.lower().replace("-", "_")
        chosen = {f"{key}={found}" for key in (place, f"{kind}@{place}") for found in (name, option)}
        if (option in groups[kind] or (kind in FUNCTIONS and ":" in name)) and not chosen & set(words):
            raise mere_name(place, name, option if option in groups[kind] else name)


def mere_name(place: str, name: str, option: str) -> ConfigError:
    """Return the error about an option's name that is set to another option's."""
    return ConfigError(
        f"{place}.name={name} changes only what records call the option: choose the option itself, {place}={option}"
    )


def unreadable(word: str, words: Sequence[str]) -> str:
    """Return why a word is no override."""
    key, equals, value = word.partition("=")
    behind = "".join(words[words.index(word) + 1 :][:1]) if word in words else ""
    if not key.strip() and not value.strip():
        return f"an empty word ({word!r}) is neither an option nor an override: write key=value"
    if not key:
        return f"{word} names no setting in front of the equals sign: write key=value"
    if not equals and (meant := re.fullmatch(r"([A-Za-z_][\w.]*)\s*[:\s]\s*(\S+)", word)):
        return f"{word} cannot be read: write {meant[1]}={meant[2]}"
    if equals and key != key.strip() and value.strip():
        return f"{word} cannot be read: write {key.strip()}={value.strip()}, without the space"
    if not re.fullmatch(r"[~+]*[\w./@:-]+", key, re.ASCII):
        return f"{word} cannot be read: no setting is called {key.strip()} ({LIST})"
    if not equals:
        return no_override(word, words[0] == word)
    if value.endswith(",") and "[" not in value:
        return f"{word} ends with a comma: values are listed without spaces, as in -m {key}={value}{behind}"
    if missing := value.count("[") - value.count("]"):
        whole = value + ("" if "=" in behind else behind)
        whole += "]" * max(0, missing - behind.count("]"))
        return f"{word} lacks a bracket: write it without spaces, as in '{key}={whole}'"
    return f"{word} cannot be read: a value with = : , ( ) quotes or brackets needs quotes, as in {key}='\"a=b\"'"


def no_override(word: str, is_first: bool) -> str:
    """Return what a word without an equals sign may mean; a subcommand, if it comes first."""
    said, groups, cfg = f"{word} is neither an option nor an override: ", options_by_group(), config_of([], "config")
    if subcommand := named_subcommand([word]):
        return f"{said}a subcommand comes first, as in rlreason {subcommand.name} {subcommand.takes}"
    if word in groups:
        return f"{said}write key=value, as in {word}={groups[word][0]} ({', '.join(groups[word])})"
    if word in keys_to_set(cfg):
        return f"{said}write key=value, as in {word}={OmegaConf.select(cfg, word)}"
    group, _, option = re.sub(r"[/:]", ".", word).rpartition(".")
    if option in groups.get(group, ()):
        return f"{said}write {group}={option}"
    meant = choices_named(word) or [f"{like}=..." for like in near(word, [*groups, *keys_to_set(cfg)], cutoff=0.7)]
    if is_first and not meant and re.fullmatch(r"[A-Za-z][\w-]{0,30}", word):
        *names, last = (subcommand.name for subcommand in SUBCOMMANDS)
        return f"{word} is no subcommand: {', '.join(names)} and {last} are; settings are key=value"
    return f"{said}{did_you_mean(meant) or 'write key=value'} (python -m rlreason --help)"


# What can be said of it beside the run that the options compose


def wrong(word: str, overrides: Sequence[str], cfg: DictConfig, name: str) -> str:
    """Return what is wrong with one of the words, "" where nothing is known to be. `cfg`: what the options compose."""
    key, equals, value = word.lstrip("+~").partition("=")
    group = key.partition("@")[0]
    if not equals:
        return "" if word.startswith("~") else unreadable(word, overrides)
    if word in choices_among([word]):
        chosen = key in cfg.hydra.runtime.choices or group in MAY_BE_ABSENT
        return "" if chosen else f"{group} is no option of the chosen algorithm: leave it out"
    if key not in keys_below(cfg) and group not in options_by_group():
        return unknown_key(key, cfg, word)
    if is_sweep(word):
        return f"{word} names several values: add -m to run each of them, or use [a,b] for a list"
    if word.startswith("+") and not word.startswith("++"):
        return f"{word} adds what is there already: take the + away"
    if isinstance(OmegaConf.select(cfg, key), DictConfig) and not key.startswith("hydra"):
        inside = [one for one in keys_below(cfg) if one.startswith(f"{key}.")]
        return f"{word} does not fit there, since {key} is a group of settings: write one of {', '.join(inside[:5])}"
    try:
        compose(name, [*cfg.hydra.overrides.task, *cfg.hydra.overrides.hydra, word], return_hydra_config=True)
    except Exception as error:
        cause = error.__cause__ or error
        if "${" in value or key.startswith("hydra"):
            return f"{word} cannot be resolved ({first_line(cause)}): give a value"
        return f"{key}={value} must be {type_of(cfg, key)}: give such a value"
    return ""


def unknown_key(key: str, cfg: DictConfig, word: str = "") -> str:
    """Return what an unknown key may mean: a setting of another run or option, or one spelled similarly."""
    place, _, last = key.rpartition(".")
    keys, said = keys_below(cfg), f"{key} is no setting of this run"
    if key.startswith("hydra"):
        meant = near(key, (one for one in keys if one.startswith("hydra.")), cutoff=0.82)
        other = f"choose another {'/'.join(key.split('.')[:2])}=..., or see python -m rlreason --cfg hydra"
        return f"{key} is no setting of Hydra: {did_you_mean(meant) or other}"
    if key in BLOCKS:
        return f"{said}: in a sweep's file, write {key} below hydra.sweeper, beside params"
    if "/" in key or "@" in key or key == "schema":
        return f"{key} is no group to choose from: {did_you_mean(near(key, options_by_group())) or 'write key=value'}"
    top = next((one for one in PLACED if f"{key}.".startswith(f"{one}.")), key.partition(".")[0])
    having = options_with(PLACED.get(top, top), key[len(top) + 1 :])
    if place in keys or having:
        place = place if place in keys else top
        node = OmegaConf.select(cfg, place)
        if node is None and place in PLACED:
            having = having or options_by_group()[PLACED[place]]
            example = f"{place}={next((one for one in USUAL if one in having), having[0])} {word}".rstrip()
            return f"{word or key} needs an option to change, and {place} is null: choose one as well, as in {example}"
        if not isinstance(node, DictConfig):
            return f"{word or key}: {place} is one value, with nothing below it: write {place}=VALUE"
        has = [f"{place}.{one}" for one in map(str, node)]
        said = f"{key} is no setting of the chosen {place}"
        if having:
            of = " and ".join(f"{top}={option}" for option in having[:4])
            return (
                f"{said}: it is one of {of}: choose one of those, or leave it out (the chosen one has {', '.join(has)})"
            )
        like = [f"{place}.{one}" for one in near(last, (one.rpartition(".")[2] for one in has))]
        like = like or [one for one in settings_like(last, cfg) if one.startswith(f"{top}.")]
        return f"{said}: {did_you_mean(like) or 'leave it out'} (it has {', '.join(has)})"
    algorithm = str(cfg.get("algorithm"))
    owners = algorithms_with(key)
    if owners and algorithm not in owners:
        theirs, ours = " and ".join(f"algorithm={one}'s" for one in owners), EQUIVALENTS.get(algorithm, {}).get(key)
        cure = f"algorithm={algorithm} has {ours}" if ours else f"leave it out, or choose algorithm={owners[0]}"
        return f"{said}: it is one of {theirs}: {cure}"
    return f"{said}: {did_you_mean(settings_like(key, cfg)) or LIST}"


def settings_like(word: str, cfg: DictConfig) -> list[str]:
    """Return what a setting that the config does not have may mean, as it is typed."""
    keys, last = keys_to_set(cfg), word.rpartition(".")[2]
    if word in NAMES:  # translated on the command line, but not in files
        return [NAMES[word]]
    if exact := [one for one in choices_named(word) if one.endswith(f"={word}") and not one.startswith("sweep=")]:
        return exact
    if habit := [key for key in HABITS.get(last.lower(), ()) if key in keys_below(cfg)]:
        return habit
    if same := [key for key in (*keys, *keys_of_models()) if key.rpartition(".")[2] == last and key != word]:
        return same
    theirs = {name: f"{name} ({key} here)" for name, key in NAMES.items() if key.partition(".")[0] in cfg}
    by_last = {key.rpartition(".")[2]: key for key in keys}
    known = by_last | {key: key for key in keys} | theirs
    begins = [key for key in known if last.startswith(f"{key}_")]  # overlong_buffer: overlong
    return [known[name] for name in near(word, known, cutoff=0.7) or begins[-1:]] or choices_named(word)
