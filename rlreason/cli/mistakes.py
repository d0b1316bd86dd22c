"""Mistakes of the command line, one line each, found by looking at the words and not at Hydra's messages.

Options are looked up before anything is composed. Where Hydra or OmegaConf then refuse to compose, the options alone
are composed, and each word is held to what that run has. What nothing here knows is the library's own first line.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from omegaconf import DictConfig

from rlreason.cli.flags import (
    choices_named,
    config_of,
    group_options,
    keys_below,
    near,
    options_by_group,
    sources,
)
from rlreason.cli.names import HABITS, MAY_BE_ABSENT, NAMES, PLACED, SETS, TOKEN, fold
from rlreason.config.store import FUNCTIONS, SCHEMAS
from rlreason.errors import ConfigError
from rlreason.runtime.text import first_line
from rlreason.sweeps.design import parsed

SEVERAL = ("experiment", "logger")  # groups of which a run may have several options, as a list
NAMED = ("model", "data", "prompt", *PLACED)  # places of options that have a name among their settings
LIST = "python -m rlreason --cfg job lists every key"


@contextmanager
def in_one_line(overrides: Sequence[str], name: str) -> Iterator[None]:
    """Raise the errors of Hydra, which fails on odd words in many ways, as a `ConfigError` about these overrides."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(explained(error, overrides, name)) from error


def explained(error: Exception, overrides: Sequence[str], name: str) -> str:
    """Return in one line what is wrong: with a file of options, with a word, or the library's own first line."""
    if isinstance(error.__cause__, ConfigError):  # of a resolver or a function's option of ours
        return str(error.__cause__)
    if mark := getattr(error, "problem_mark", None):
        return f"{mark.name}, line {mark.line + 1} is no YAML ({first_line(error)}): fix the file, or choose another"
    if in_file := re.match(r"In '([^']+)'", str(error)):
        return f"{in_file[1]}.yaml does not compose ({' '.join(str(error).split())}): fix it"
    words, groups = [(str(one.input_line), one) for one in parsed(overrides)], options_by_group()
    single = [(word, one.key_or_group) for word, one in words if not one.is_sweep_override()]
    options = [word for word, key in single if key in groups or key.startswith("hydra/")]
    cfg = config_of(options, name)  # what the options alone compose
    keys = keys_below(cfg)
    for word, one in words:
        key = one.key_or_group
        if key not in keys and "/" not in key and key not in groups:
            return unknown_key(key, cfg, keys)
        if one.is_sweep_override():
            return f"{word} names several values: add -m to run each of them, or use [a,b] for a list"
    if merging := re.match("Error merging override (.+)", str(error)):
        group = merging[1].lstrip("+").partition("=")[0]
        if settings := [key for key in keys if key.startswith(f"{group}.")]:
            return f"{merging[1]}: {group} is a group of settings: write one of {', '.join(settings[:4])}"
        return f"{merging[1]}: {first_line(error.__cause__ or error)}: give a value of this type"
    return f"{' '.join(overrides)} cannot be composed ({first_line(error)}): fix or leave it out"


def did_you_mean(matches: Iterable[str]) -> str:
    """Ask for the likeliest of these words.

    >>> did_you_mean(["loss=gspo", "objective=gspo"]), did_you_mean([])
    ('did you mean loss=gspo or objective=gspo?', '')
    """
    words = list(dict.fromkeys(matches))[:3]
    return f"did you mean {' or '.join(words)}?" if words else ""


# What can be said of a word by itself


def refuse_wrong_words(overrides: Sequence[str]) -> None:
    """Raise `ConfigError` for a word that cannot be read, chooses no option, or takes away what every run needs."""
    groups = options_by_group()
    for word in overrides:
        try:
            [override] = parsed([word])
            several = list(override.sweep_string_iterator()) if override.is_sweep_override() else []
        except Exception:  # Hydra fails on odd words in many ways
            raise ConfigError(unreadable(word, overrides)) from None
        key, place = override.key_or_group, override.package or override.key_or_group
        if not key:
            raise ConfigError(unreadable(word, overrides))
        if override.is_delete():
            if place == key and not key.startswith(("hydra", *MAY_BE_ABSENT)):
                raise ConfigError(f"{word}: nothing that a run needs can be taken away: give {key} another value")
        elif offered := groups.get(key) or (group_options(key) if key.startswith("hydra/") else []):
            texts = several or [word.partition("=")[2]]
            values = [token[2] for text in texts for token in TOKEN.finditer(text.replace("\\", ""))]
            one_of = f"choose one of {', '.join(offered)}"
            is_list = texts[0].startswith("[") and key not in SEVERAL
            if not values or "{" in word or is_list or (key == "sweep" and len(values) > 1):
                raise ConfigError(f"{word}: a run has one option of {key}, and a command one sweep: {one_of}")
            for value in values:
                if not any(source.is_config(f"{key}/{value}") for source in sources()):
                    meant = did_you_mean(near(value, offered, 0.8) or choices_named(value) or near(value, offered))
                    more = ", or a function of your own as module:function" if key in FUNCTIONS else ""
                    more += ", or pip install 'rlreason[launchers]'" if key == "hydra/launcher" else ""
                    raise ConfigError(f"{place}={value} is no option of {key}: {meant} {one_of}{more}")
        elif place.endswith(".name") and place[:-5] in NAMED:
            place, name = place[:-5], word.partition("=")[2].strip("'\"")
            if fold(name) in map(fold, groups[PLACED.get(place, place)]):
                raise ConfigError(f"{word} changes only what records call it: choose the option itself, {place}={name}")


def unreadable(word: str, words: Sequence[str]) -> str:
    """Return why a word is no override, and what it may mean."""
    key, equals, value = word.partition("=")
    if meant := re.fullmatch(r"([A-Za-z_][\w.]*)(?:\s+=\s*|\s*[:\s]\s*)([^\s=]+)", word):
        return f"{word} cannot be read: write {meant[1]}={meant[2]}"
    if not equals:
        choices = [f"{group}={word}" for group, options in options_by_group().items() if word in options]
        no_override = f"{word} is no override; a run starts without a subcommand, and others have it first (--help)"
        return f"{no_override}: write {' or '.join(choices) or 'key=value'}"
    if value.endswith(",") or value.count("[") != value.count("]"):
        return f"{word} is a part of a list: write it without spaces, as in '{key}=[a,b]', or -m {key}=a,b in a sweep"
    return f"{word} cannot be read: a value with = : , ( ) quotes or brackets needs quotes, as in {key}='\"a=b\"'"


def unknown_key(key: str, cfg: DictConfig, keys: Sequence[str]) -> str:
    """Return what an unknown key may mean: a setting of another run, or one spelled similarly. `keys`: of `cfg`."""
    message, (place, _, last) = f"{key} is no setting of this run", key.rpartition(".")
    if place == SETS:
        return f"{key} is a set and no setting: give its data as {key}.data=gsm8k"
    if place.startswith(f"{SETS}.") and place not in keys_below(cfg):
        return f"{key}: there is no {place}: give its data first, as {SETS}=[gsm8k] or {SETS}.NAME.data=gsm8k"
    group = PLACED.get(place, place)
    kinds = SCHEMAS.get(f"schema/{group}", {}).items()
    if having := [f"/{group}/{name}@" for name, kind in kinds if last in kind.__dataclass_fields__]:
        fitting = [
            option
            for option in group_options(group)
            for source in sources()
            if source.is_config(path := f"{group}/{option}")
            and any(schema in str(source.load_config(path).config) for schema in having)
        ]
        choices = ", ".join(fitting) or "functions of your own"
        return f"{message}: other options of {group} have it: choose among {choices}"
    if meant := [one for one in HABITS.get(last.lower(), ()) if one.partition("=")[0] in keys]:
        return f"{message}: {did_you_mean(meant)}"
    top, schemas = key.partition(".")[0], SCHEMAS["schema"].items()
    owners = [f"algorithm={name}" for name, kind in schemas if top in kind.__dataclass_fields__]
    if owners and f"algorithm={cfg.get('algorithm')}" not in owners:
        return f"{message}: it is one of {' and '.join(owners)}: leave it out, or choose {owners[0]}"
    own = [one for one in keys if not one.startswith("hydra")]
    known = NAMES | {one.rpartition(".")[2]: one for one in own} | {one: one for one in keys}
    meant = [one for one in own if one.rpartition(".")[2] == last] or [known[one] for one in near(key, known, 0.7)]
    return f"{message}: {did_you_mean(meant or choices_named(last)) or LIST}"
