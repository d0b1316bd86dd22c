"""Read the words of a command line before Hydra does: the handout's names, and mistakes in one line each.

Hydra says what is wrong over several lines and, in a sweep, only when the wrong job's turn comes. Here every
job is composed and checked first. It knows Hydra's public compose call and override parser.
"""

import difflib
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlreason.config.store import SCHEMAS, resource_dir, typed
from rlreason.errors import ConfigError

#: Names of the course handouts that are called otherwise here.
HANDOUT_NAMES = {
    "n_grpo_steps": "n_steps",
    "n_ei_steps": "n_steps",
    "epochs_per_rollout_batch": "epochs_per_rollout",
    "sampling_temperature": "sampling.temperature",
    "sampling_min_tokens": "sampling.min_tokens",
    "sampling_max_tokens": "sampling.max_tokens",
    "loss_type": "loss",
    "cliprange": "loss.cliprange",
    "ratio_cap": "loss.ratio_cap",
    "dual_clip": "loss.dual_clip",
    "cliprange_high": "loss.cliprange_high",
    "cliprange_low": "loss.cliprange_low",
}
QUESTIONS = ("--help", "-h", "--hydra-help", "--version", "--cfg", "-c", "--info", "-i", "--shell-completion", "-sc")
MOST_RUNS_CHECKED = 64  # composing one run takes about 0.1 s


def handout_names(words: list[str]) -> list[str]:
    """Replace a handout's name of a key by ours, and say so.

    >>> handout_names(["n_grpo_steps=5", "seed=1"])
    note: n_grpo_steps is n_steps here
    ['n_steps=5', 'seed=1']
    """
    out = []
    for word in words:
        key, sign, value = word.partition("=")
        if sign and key in HANDOUT_NAMES:
            print(f"note: {key} is {HANDOUT_NAMES[key]} here")
            key = HANDOUT_NAMES[key]
        if sign and key == "use_std_normalization":
            key, value = "std_norm", "group_std" if value.lower() == "true" else "none"
            print(f"note: use_std_normalization is std_norm={value} here")
        out.append(key + sign + value)
    return out


def quoted(words: list[str]) -> list[str]:
    """Quote a value that holds an equals sign, as the folders of sweeps do: Hydra cannot read it bare.

    >>> quoted(["-m", "model.path=runs/sweeps/x/seed=0", "seed=0,1", "a='b=c'"])
    ['-m', "model.path='runs/sweeps/x/seed=0'", 'seed=0,1', "a='b=c'"]
    """
    sweep = "-m" in words or "--multirun" in words  # there a comma separates values

    def one(word: str) -> str:
        key, _, value = word.partition("=")
        plain = "=" in value and not any(c in value for c in "'\"[]{}()\\" + "," * sweep)
        return f"{key}='{value}'" if plain and not word.startswith("-") else word

    return [one(word) for word in words]


def is_question(words: Iterable[str]) -> bool:
    """Whether the command asks about the program instead of starting a run."""
    return any(word == q or word.startswith(q + "=") for word in words for q in QUESTIONS)


def check_words(words: list[str]) -> None:
    """Compose and check every run that these words ask for; `ConfigError` in one line where one cannot start."""
    flags = {word for word in words if word.startswith("-")}
    if flags - {"-m", "--multirun"}:
        return  # flags such as --config-dir bring options of their own: Hydra itself must read them
    overrides = [word for word in words if word not in flags]
    with initialize_config_dir(str(resource_dir("conf")), version_base="1.3"):
        for combination in itertools.islice(_runs(overrides, bool(flags)), MOST_RUNS_CHECKED):
            _composed(combination)
        plain = [word for word in overrides if not flags or word.startswith(("sweep=", "hydra."))]
        job = _composed(plain, rules=False).hydra
        _check_writable(Path(job.sweep.dir if flags else job.run.dir))


def _check_writable(folder: Path) -> None:
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not place.is_dir() or not os.access(place, os.W_OK):
        raise ConfigError(f"the run folder {folder} cannot be made: {place} is no writable folder: choose another")


def _runs(overrides: list[str], multirun: bool) -> Iterable[list[str]]:
    """The overrides of each run of a sweep (one list for a single run)."""
    if not multirun:
        return [overrides]
    try:
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        parsed = parser.parse_overrides(overrides)
    except HydraException as error:
        raise ConfigError(one_line(error)) from error
    plain = [str(o.input_line) for o in parsed if not o.is_sweep_override()]
    params = _composed(plain, rules=False).hydra.sweeper.params or {}
    named = {o.key_or_group for o in parsed}
    from_file = [f"{key}={value}" for key, value in params.items() if key not in named]
    of_sweep = parser.parse_overrides(from_file)
    sweeps = [o for o in (*parsed, *of_sweep) if o.is_sweep_override()]
    fixed = [str(o.input_line) for o in of_sweep if not o.is_sweep_override()]
    choices = [[f"{o.get_key_element()}={value}" for value in o.sweep_string_iterator()] for o in sweeps]
    return ([*plain, *fixed, *combination] for combination in itertools.product(*choices))


def _composed(overrides: list[str], rules: bool = True) -> DictConfig:
    try:
        cfg = compose("config", overrides, return_hydra_config=not rules)
        if rules:
            OmegaConf.resolve(cfg)
            typed(cfg)
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(one_line(error)) from error
    return cfg


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
    if several := re.search(r"Ambiguous value for argument '([^']+)'", text):
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
    own = [f"algorithm={name}" for name, node in SCHEMAS["schema"].items() if node.__name__ == schema]
    cfg = compose("config", own)
    group, _, _ = full_key.rpartition(".")
    if group and isinstance(OmegaConf.select(cfg, group), DictConfig):
        keys = ", ".join(f"{group}.{key!s}" for key in OmegaConf.select(cfg, group))
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
