"""Turn the errors of Hydra and OmegaConf into one line each, and explain words that name nothing."""

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from hydra import compose
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rlreason.cli.aliases import NAMES, PLACED
from rlreason.cli.flags import config_content, group_options
from rlreason.cli.subcommands import SUBCOMMANDS, named_subcommand
from rlreason.config.store import BLOCKS, SCHEMAS
from rlreason.errors import ConfigError
from rlreason.records.reader import RESOURCES, exit_code

#: Other programs' name -> settings: suggested, not translated, since theirs may differ in a unit or a default.
HABITS: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    **dict.fromkeys(("batch_size", "bs"), ("train_batch_size", "micro_batch_tokens")),
    **dict.fromkeys(("steps", "num_steps", "max_steps", "total_steps", "train_steps"), ("n_steps",)),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs"), ("epochs_per_rollout", "sft_epochs", "epochs")),
    **dict.fromkeys(
        ("max_length", "max_new_tokens", "max_completion_length", "max_response_length"), ("sampling.max_tokens",)
    ),
    **dict.fromkeys(("temp", "t"), ("sampling.temperature",)),
    **dict.fromkeys(("beta", "kl", "kl_weight"), ("kl_coef",)),
    **dict.fromkeys(("num_generations", "num_samples", "n_samples"), ("group_size", "samples")),
    **dict.fromkeys(("clip", "clip_eps", "clip_range", "epsilon"), ("loss.cliprange",)),
    "wd": ("weight_decay",),
    **dict.fromkeys(("warmup", "num_warmup_steps"), ("warmup_steps",)),
    **dict.fromkeys(("grad_clip", "clip_grad", "gradient_clipping", "max_norm"), ("max_grad_norm",)),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_scheduler_type"), ("lr_schedule",)),
    **dict.fromkeys(("betas", "beta1", "beta2"), ("adam_betas",)),
    **dict.fromkeys(("per_device_train_batch_size", "mini_batch_size"), ("micro_batch_size",)),
    **dict.fromkeys(("lora_rank", "lora_r", "r"), ("model.lora.rank",)),
    **dict.fromkeys(("model_name", "model_path", "model_name_or_path"), ("model.path", "model")),
    **dict.fromkeys(("dataset", "dataset_name", "train_file"), ("data", "data.path")),
    **dict.fromkeys(("output", "output_dir", "out_dir", "save_dir"), ("hydra.run.dir",)),
    **dict.fromkeys(("wandb", "report_to", "use_wandb"), ("logger",)),
    **dict.fromkeys(("engine", "backend", "use_vllm"), ("rollout",)),
    **dict.fromkeys(("reward", "reward_fn", "reward_func", "reward_funcs"), ("prompt.reward",)),
}

_OF_GRPO_IN_EI = {
    "rollout_batch_size": "question_batch_size, the questions of a step, each with group_size responses",
    "epochs_per_rollout": "sft_epochs",
}
#: Algorithm -> setting of another algorithm -> its equivalent.
EQUIVALENTS: dict[str, dict[str, str]] = {
    "grpo": {
        "question_batch_size": "rollout_batch_size, which counts responses: questions times group_size",
        **dict.fromkeys(("sft_epochs", "epochs"), "epochs_per_rollout"),
        "samples": "group_size",
    },
    "ei": {**_OF_GRPO_IN_EI, "epochs": "sft_epochs", "samples": "group_size"},
    "sft": {
        **dict.fromkeys(("epochs_per_rollout", "sft_epochs"), "epochs"),
        **dict.fromkeys(("rollout_batch_size", "question_batch_size"), "train_batch_size"),
    },
    "evaluate": {"group_size": "samples", "n_list": "samples"},
    "best_of_n": {"group_size": "n_list"},
}


MOST = 3  # suggestions at once
INTERNAL_GROUPS = ("hydra", "schema")


def did_you_mean(shown: Iterable[str]) -> str:
    """
    >>> did_you_mean(["loss=gspo", "objective=gspo"]), did_you_mean([])
    ('did you mean loss=gspo or objective=gspo?', '')
    """
    words = list(dict.fromkeys(shown))[:MOST]
    return f"did you mean {' or '.join(words)}?" if words else ""


def near(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Return the nearest of the known words, ignoring case.

    >>> near("GROPO", ["grpo", "ei"])
    ['grpo']
    """
    folded = {name.lower(): name for name in known}
    return [folded[name] for name in difflib.get_close_matches(word[:100].lower(), folded, n=count, cutoff=cutoff)]


def nearest_options(word: str, offered: Sequence[str]) -> list[str]:
    """Return the options that a word may mean: one spelled similarly, or else those that it abbreviates.

    >>> nearest_options("grpo_lr", ["grpo_learning_rate", "grpo_off_policy"]), nearest_options("q", ["xy"])
    (['grpo_learning_rate'], [])
    """
    return near(word, offered) or [name for name in offered if len(word) > 1 and shortens(word, name)]


def shortens(word: str, name: str) -> bool:
    """Return whether a word consists of the beginnings of a name's words, in their order.

    >>> shortens("grpo_lr", "grpo_learning_rate"), shortens("qwen3", "qwen3_1_7b"), shortens("rate", "grpo_off_policy")
    (True, True, False)
    """
    letters = re.sub(r"[\W_]", "", word.lower())
    reached = {0}  # how many of the letters are accounted for
    for part in re.findall(r"[a-z]+|\d", name.lower()):
        reached |= {at + n for at in reached for n in range(1, len(part) + 1) if letters.startswith(part[:n], at)}
    return bool(letters) and len(letters) in reached


def config_of(choices: Sequence[str], name: str) -> DictConfig:
    """Return the config of these options without the settings that were given, so that it composes; with Hydra's part.

    A file that contains the mistake itself is left out.
    """
    of_files = ("experiment=", "sweep=")
    for words in (list(choices), [word for word in choices if not word.lstrip("+").startswith(of_files)]):
        try:
            return compose(name, words, return_hydra_config=True)
        except Exception:  # options that do not go with each other
            continue
    return compose("config", [], return_hydra_config=True)


def keys_below(node: Any, prefix: str = "") -> list[str]:
    """Return every key as it is typed on the command line: `seed`, `sampling`, `sampling.max_tokens` ..."""
    if isinstance(node, DictConfig):
        node = OmegaConf.to_container(node)
    if not isinstance(node, dict):
        return []
    return [key for name, child in node.items() for key in (f"{prefix}{name}", *keys_below(child, f"{prefix}{name}."))]


def keys_to_set(cfg: DictConfig) -> list[str]:
    """Return the keys that take a value or an option: no group of settings without options, such as `sampling`."""
    keys, groups = [key for key in keys_below(cfg) if not key.startswith("hydra")], options_by_group()
    holders = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in holders or key in groups]


def options_by_group() -> dict[str, list[str]]:
    """Return every group that a user chooses from, with its options, including those of the user's own folders."""
    groups = [group for group in group_options("", ObjectType.GROUP) if group not in INTERNAL_GROUPS]
    return {group: group_options(group) for group in groups}


def choices_named(word: str) -> list[str]:
    """Return the choices whose option has this name, or else a similar one. Short names must agree more closely.

    A short name is near to too many others, so more of it must agree.
    """
    offered = [(option, f"{group}={option}") for group, names in options_by_group().items() for option in names]
    exact = [choice for option, choice in offered if option.lower() == word.lower()]
    nearest = near(word, [option for option, _ in offered], cutoff=0.8)
    return exact or [choice for option, choice in offered if option in nearest]


def settings_like(word: str, cfg: DictConfig) -> list[str]:
    """Return what a setting that the config does not have may mean, as it is typed."""
    keys = keys_to_set(cfg)
    last = word.rpartition(".")[2]
    if word in NAMES:  # translated on the command line, but not in files
        return [NAMES[word].key]
    if exact := [choice for choice in choices_named(word) if choice.endswith(f"={word}")]:
        return exact
    if habit := [key for key in HABITS.get(last.lower(), ()) if key in keys_below(cfg)]:
        return habit
    if same := [key for key in keys if key.rpartition(".")[2] == last and key != word]:
        return same
    if same := [key for key in keys_of_options() if key.rpartition(".")[2] == last]:
        return same
    known = {key: key for key in keys} | {
        name: f"{name} ({other.key} here)" for name, other in NAMES.items() if other.key.partition(".")[0] in cfg
    }
    by_last = {key.rpartition(".")[2]: key for key in keys if "." in key}
    if found := near(word, known, cutoff=0.7):
        return [known[found[0]]]
    if found := near(last, by_last, cutoff=0.75):
        return [by_last[found[0]]]
    return choices_named(word) or [known[name] for name in near(word, known)]


def keys_of_options() -> list[str]:
    """Return the settings that any option of a group has."""
    groups = {group.removeprefix("schema/"): nodes for group, nodes in SCHEMAS.items() if "/" in group}
    keys = [
        f"{group}.{field.name}"
        for group, nodes in groups.items()
        for node in nodes.values()
        for field in fields(node)
        if not is_dataclass(field.type)  # a group takes no value
    ]
    return list(dict.fromkeys(keys))


def algorithms_with(key: str) -> list[str]:
    """Return the algorithms that have a setting, by its whole key or by the group that contains it."""
    top = key.partition(".")[0]
    return [name for name, node in SCHEMAS["schema"].items() if top in {field.name for field in fields(node)}]


def options_with(group: str, rest: str) -> list[str]:
    """Return the options of a group whose schema has a setting, such as `n_train` of `data`, which stories have."""
    nodes, found = SCHEMAS.get(f"schema/{group}", {}), []
    for option in group_options(group) if nodes else []:
        defaults = config_content(f"{group}/{option}").get("defaults") or []
        paths = [item.partition("@")[0] for item in defaults if isinstance(item, str)]
        if any(_has(nodes[name], rest) for name in nodes.keys() & {path.rpartition("/")[2] for path in paths}):
            found.append(option)
    return found


def _has(node: Any, key: str) -> bool:
    first, _, rest = key.partition(".")
    inner = {field.name: field.type for field in fields(node)}
    return first in inner and (not rest or (is_dataclass(inner[first]) and _has(inner[first], rest)))


def choices_among(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that choose an option, of those that can be parsed."""
    parser, found, groups = OverridesParser.create(), [], options_by_group()
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
    """Return what an unknown key may mean: a setting of another run, or one spelled similarly."""
    cfg = config_of(choices, name)
    if key.startswith("hydra."):
        return _unknown_to_hydra(key, cfg)
    algorithm = str(cfg.get("algorithm"))
    group = key.rpartition(".")[0]
    if group and isinstance(OmegaConf.select(cfg, group), DictConfig):
        return _unknown_in_group(key, group, cfg, choices)
    said = f"{key} is no setting of this run"
    if key in BLOCKS:
        return f"{said}: in a sweep's file, write {key} below hydra.sweeper, beside params"
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
    whose = PLACED.get(top, top)  # group of options
    has_options = group == top and whose in options_by_group()
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
    """Return which group of options a word may mean."""
    group, _, package = word.partition("@")
    if package:
        return f"{word}=... puts an option in another place than its own: write {group}=OPTION"
    if group in options_by_group() and group not in ("experiment", "sweep"):
        return f"{group} is no option of the chosen algorithm (an objective's axes are GRPO's): leave it out"
    meant = did_you_mean(near(group, options_by_group()))
    return f"{group or '(nothing)'} is no group to choose from: {meant or 'leave it out, or write key=value'}"


def no_override(word: str, is_first: bool = False) -> str:
    """Return what a word without an equals sign may mean; a subcommand, if it comes first."""
    said = f"{word} is neither an option nor an override: "
    if subcommand := named_subcommand([word]):
        return f"{said}a subcommand comes first, as in rlreason {subcommand.name} {subcommand.takes}"
    groups, cfg = options_by_group(), config_of([], "config")
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
        *names, last = (subcommand.name for subcommand in SUBCOMMANDS)
        return f"{word} is no subcommand: {', '.join(names)} and {last} are; settings are key=value"
    return f"{said}{did_you_mean(meant)} write key=value (python -m rlreason --help)".replace(":  ", ": ")


USUAL = ("r1_zero", "jsonl")  # options used as examples
LONGEST_SHOWN = 100  # characters of one word in a message
TYPES = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
REASONS = {
    "is not Optional": "it cannot be without a value",
    "Invalid type assigned": "it is a group of settings, each with a name of its own",
    "is not a ListConfig": "it is a list, as in [1,2]",
}
#: Hydra's message about one word -> ours.
SIMPLE = {
    r"(?:Ambiguous value for argument|Sweep parameters) '(.+)'": (
        "WORD names several values: add -m to run each of them, or use [a,b] for a list"
    ),
    r"Could not delete from config. '([^']+)' does not exist": "~WORD takes away what is not there: leave it out",
    r"Could not append to config. An item is already at '([^']+)'": (
        "+WORD adds what is there already: take the + away"
    ),
    r"Multiple values for ([^.\s]+)\.": "WORD is chosen already: write WORD=OPTION, without a +",
    r"not supported: '\++([^'=]+)": "WORD is chosen already: write WORD=OPTION, without a +",
}
#: Lines of Hydra's messages that do not help here.
NOISE = (
    "full_key:",
    "object_type=",
    "To append",
    "Set the env",
    "See https",
    "Config search path",
    "provider=",
    "reference_type=",
)


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
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error, overrides, name)) from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"a file of options is no YAML ({_reason(error)}): fix it, or choose another") from error
    except (ConfigError, BrokenPipeError):
        raise
    except Exception as error:
        if not composing or exit_code(error) == RESOURCES:
            raise
        if "Unexpected type for root: NoneType" in str(error):  # OmegaConf's, of a setting below a null
            raise ConfigError(_below_null(overrides)) from error
        raise ConfigError(
            f"{' '.join(overrides)} cannot be composed ({_reason(error)}): fix or leave out a word"
        ) from error


def _below_null(overrides: Sequence[str]) -> str:
    """Return the message about a setting of an option that was not chosen."""
    plain = [word.lstrip("+") for word in overrides]
    chosen_places = {word.partition("=")[0].partition("@")[2] for word in plain if not word.startswith("~")}
    for place, group in PLACED.items():
        below = [word for word in plain if word.startswith(f"{place}.")]
        if below and place not in chosen_places:
            having = options_with(group, below[0].partition("=")[0][len(place) + 1 :]) or options_by_group()[group]
            option = next((name for name in USUAL if name in having), having[0])
            cure = f"choose one as well, as in {place}={option} {below[0]}"
            return f"{below[0]} needs an option to change, and {place} is null: {cure}"
    return f"{' '.join(overrides)} changes a setting of an option that was not chosen: choose one as well"


def _reason(error: Exception) -> str:
    """Return the message of an error in a line, with its position in a file if it has one."""
    if mark := getattr(error, "problem_mark", None):
        return f"{mark.name}, line {mark.line + 1}: {getattr(error, 'problem', '')}"
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def one_line(error: Exception, overrides: Sequence[str] = (), name: str = "config") -> str:
    """Return Hydra's message in one line, with the nearest right word for an unknown one."""
    cause = error.__cause__ or error
    if isinstance(cause, ConfigError):  # from one of our resolvers
        return str(cause)
    text, full_key = f"{error}\n{cause}", getattr(cause, "full_key", None)
    if unknown := re.search(r"Key '([^']+)' (?:is )?not in '?\w+'?", text):
        file = re.search(r"In '((\w+)/[^']+)': \w+ raised", text)
        if file and unknown[1] == file[2]:
            return f"{file[1]}.yaml sets {file[2]}, which is no setting: begin it with the line # @package _global_"
        said = unknown_key(full_key or unknown[1], choices_among(overrides), name)
        return f"{file[1]}.yaml: {said}" if file else said
    if absent := re.search(r"Could not override '([^']*)'\.\s+(?:No match|Did you mean)", text):
        return unknown_group(absent[1])
    if below := [word for word in overrides if word.lstrip("+").startswith(f"{full_key}.") and "Value '{}'" in text]:
        return f"{below[0]}: {full_key} is one value, with nothing below it: write {full_key}=VALUE"
    if value := re.search(r"Value '(.*?)' of type '[^']+' could not be converted to (\w+)", text, re.DOTALL):
        return f"{full_key}={value[1]} must be of type {value[2]}: give {TYPES.get(value[2], 'a value of that type')}"
    if word := re.search(r"Error parsing override '([^'=]*)'\s+missing EQUAL", text):
        return no_override(word[1], list(overrides[:1]) == [word[1]])
    if isinstance(error, OverrideParseException):
        return _unreadable(str(error.override))
    if override := re.search(r"Error merging override (.+)", text):
        reason = str(cause).splitlines()[0].rstrip(".")
        reason = next((ours for theirs, ours in REASONS.items() if theirs in reason), reason)
        return (
            f"{override[1]} does not fit there ({reason}): python -m rlreason --cfg job shows the form of every setting"
        )
    for pattern, said in SIMPLE.items():
        if found := re.search(pattern, text):
            return said.replace("WORD", found[1])
    return _plain(error, full_key, overrides)


def _plain(error: Exception, full_key: str | None, overrides: Sequence[str]) -> str:
    """Return the rest of Hydra's message after the word that it is about."""
    lines = [line.strip() for line in str(error).splitlines()]
    text = " ".join(line for line in lines if line and not line.startswith(NOISE)).rstrip(".")
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", text)
    if file := re.match(r"In '([^']+)': (?:\w+ raised while composing config: )?(.*)", text):
        return f"{file[1]}.yaml does not compose ({file[2]}): fix the file"
    about = [word for word in overrides if full_key and word.lstrip("+~").startswith(f"{full_key}=")]
    about = about or [word for word in overrides if "${" in word]
    return f"{about[-1]} cannot be resolved ({text}): give a value" if about else text


def _unreadable(word: str) -> str:
    key, equals, value = word.partition("=")
    if not key.strip() and not value.strip():
        return f"an empty word ({word!r}) is neither an option nor an override: write key=value"
    if not key:
        return f"{word} names no setting in front of the equals sign: write key=value"
    if not equals and (meant := re.fullmatch(r"([A-Za-z_][\w.]*)\s*[:\s]\s*(\S+)", word)):
        return f"{word} cannot be read: write {meant[1]}={meant[2]}"
    if equals and key != key.strip() and value.strip():
        return f"{word} cannot be read: write {key.strip()}={value.strip()}, without the space"
    if not re.fullmatch(r"[~+]*[\w./@:-]+", key, re.ASCII):
        return f"{word} cannot be read: no setting is called {key.strip()} (python -m rlreason --cfg job lists them)"
    if not equals:
        return no_override(word)
    return f"{word} cannot be read: a value with = : , ( ) quotes or brackets needs quotes, as in {key}='\"a=b\"'"
