"""Suggest the nearest right words for an unknown one, or for one that another program uses."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from hydra import compose
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.aliases import NAMES
from rlreason.config.store import SCHEMAS

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
    keys, groups = [key for key in keys_below(cfg) if not key.startswith("hydra")], options()
    holders = {key.rpartition(".")[0] for key in keys}
    return [key for key in keys if key not in holders or key in groups]


def options() -> dict[str, list[str]]:
    """Return every group that a user chooses from, with its options, including those of the user's own folders."""
    loader = GlobalHydra.instance().config_loader()
    groups = [group for group in loader.list_groups("") if group not in INTERNAL_GROUPS]
    return {group: loader.get_group_options(group, ObjectType.CONFIG) for group in groups}


def choices_named(word: str) -> list[str]:
    """Return the choices whose option has this name, or else a similar one. Short names must agree more closely.

    A short name is near to too many others, so more of it must agree.
    """
    offered = [(option, f"{group}={option}") for group, names in options().items() for option in names]
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
    loader = GlobalHydra.instance().config_loader()
    nodes = SCHEMAS.get(f"schema/{group}", {})
    if not isinstance(loader, ConfigLoaderImpl):
        return []
    found = []
    for option in loader.get_group_options(group) if nodes else []:
        loaded = loader.repository.load_config(f"{group}/{option}")
        paths = [default.get_name() or "" for default in loaded.defaults_list or []] if loaded else []
        if any(_has(nodes[name], rest) for name in nodes.keys() & {path.rpartition("/")[2] for path in paths}):
            found.append(option)
    return found


def _has(node: Any, key: str) -> bool:
    first, _, rest = key.partition(".")
    inner = {field.name: field.type for field in fields(node)}
    return first in inner and (not rest or (is_dataclass(inner[first]) and _has(inner[first], rest)))
