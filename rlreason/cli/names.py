"""Names and values of the courses' handouts, of papers and of discovery, and what stands for them here.

They are applied to `key=value` before it is parsed: to each value of a list, of a sweep, or of a function of Hydra's
grammar, as in `use_std_normalization=choice(True,False)`.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from rlreason.cli.flags import OWN_CONFIGS, options_by_group
from rlreason.errors import ConfigError
from rlreason.objectives.objective import LOSS_NUMBERS
from rlreason.runtime.plugins import announced

NONE = ("false", "no", "off", "null", "none", "~")  # YAML's words for nothing: the option `none`, where a group has it
MAY_BE_ABSENT = ("experiment", "sweep")  # groups without which a run is whole

NAMES: dict[str, str] = {
    "n_grpo_steps": "n_steps",
    "n_ei_steps": "n_steps",
    "epochs_per_rollout_batch": "epochs_per_rollout",
    "G": "group_size",
    "ei_batch_size": "question_batch_size",
    "D_b": "question_batch_size",
    "sampling_temperature": "sampling.temperature",
    "sampling_min_tokens": "sampling.min_tokens",
    "sampling_max_tokens": "sampling.max_tokens",
    "loss_type": "loss",
    "importance_reweighting_method": "loss",
    **{number: f"loss.{number}" for number in ("cliprange", *LOSS_NUMBERS)},
    "use_std_normalization": "std_norm",
    "normalize_by_std": "std_norm",
    "advantage_normalizer": "std_norm",
    "loss_normalization": "length_norm",
    "normalize_constant": "length_norm.constant",
    "normalization_constant": "length_norm.constant",
}
DIVIDE_BY_STD = {"true": "group_std", "yes": "group_std", "1": "group_std", "false": "none", "no": "none", "0": "none"}
#: Values of such a name, where they differ too: no others are accepted.
VALUES: dict[str, Mapping[str, str]] = {
    "importance_reweighting_method": {
        "none": "reinforce_with_baseline", "noclip": "grpo_no_clip", "grpo": "grpo_clip", "gspo": "gspo",
    },
    "use_std_normalization": DIVIDE_BY_STD,
    "normalize_by_std": DIVIDE_BY_STD,
    "advantage_normalizer": {"std": "group_std", "none": "none", "mean": "group_mean"},
    "loss_normalization": {"sequence": "masked_mean", "constant": "constant"},
}  # fmt: skip
#: Options of a group with another name in a handout.
OPTIONS: dict[str, dict[str, str]] = {"length_norm": {"maskednormalize": "constant"}}
#: Keys that hold an option of a group in another place -> that group: typed as any setting, they stand for Hydra's own
#: spelling (eval.prompt=r1_zero for prompt@eval.prompt=r1_zero).
PLACED = {"eval.prompt": "prompt", "eval.data": "data"}
#: A handout's setting that has no counterpart: vLLM's share of the GPU. Its memory is planned in GB here.
GPU_SHARE = "gpu_memory_utilization"
#: Short names in discovery, for settings that have another meaning or none in other algorithms.
OF_DISCOVERY = {
    "model": "client.model",
    "base_url": "client.base_url",
    "temperature": "client.temperature",
    "max_tokens": "client.max_tokens",
    "enable_thinking": "client.thinking",
    "thinking": "client.thinking",
    "timeout": "score.timeout_s",
}
#: Other programs' names, and those of other algorithms, -> settings: suggested, not translated, since theirs may differ
#: in a unit or a default.
_HABITS = {
    "lr": "learning_rate",
    "seeds": "seed",
    "batch_size": "train_batch_size micro_batch_tokens",
    "steps num_steps max_steps": "n_steps",
    "epochs num_train_epochs epochs_per_rollout sft_epochs": "epochs_per_rollout sft_epochs epochs",
    "rollout_batch_size question_batch_size": "question_batch_size rollout_batch_size train_batch_size",
    "max_length max_new_tokens max_completion_length": "sampling.max_tokens",
    "beta kl": "kl_coef",
    "num_generations group_size samples": "group_size samples n_list",
    "clip_eps epsilon": "loss.cliprange",
    "warmup num_warmup_steps": "warmup_steps",
    "grad_clip": "max_grad_norm",
    "lr_scheduler_type": "lr_schedule",
    "per_device_train_batch_size": "micro_batch_size",
    "lora_rank lora_r": "model.lora.rank",
    "model_path model_name_or_path path": "model.path model",
    "dataset": "data data.path",
    "output_dir": "hydra.run.dir",
    "wandb use_wandb": "logger=wandb",
    "report_to": "logger",
    "use_vllm": "rollout",
    "reward reward_fn reward_funcs": "prompt.reward",
}
HABITS = {theirs: ours.split() for names, ours in _HABITS.items() for theirs in names.split()}

WORD = re.compile(r"([~+]*)([^=]*)(=?)(.*)", re.DOTALL)
TOKEN = re.compile(r"""(['"]?)([^\s,()\[\]{}'"=]++)\1(?!\()""")  # one value, with its quotes; no function's name
Note = Callable[[str], object]


def translated(words: Sequence[str], note: Note = print, algorithm: str = "") -> list[str]:
    """Return the overrides under our names and options; `note` is called once per name with our name.

    `algorithm`: of the run whose settings are changed. Hydra must be ready to compose.
    """
    discovers = OWN_CONFIGS.keys() & {algorithm, *(word.lower().partition("algorithm=")[2] for word in words)}
    names = NAMES | OF_DISCOVERY if discovers else NAMES
    groups, typed, notes, found = options_by_group(), dict[str, str](), dict[str, str](), list[str]()
    for word in words:
        sign, key, equals, value = WORD.fullmatch(word).groups()  # type: ignore[union-attr]
        if key == GPU_SHARE:
            notes[key] = f"{key} is not read here: rollout.kv_cache_gb=GB sets the size of vLLM's cache"
            continue
        ours, now = names.get(key, key), value
        if typed.setdefault(ours, key) != key:  # only the later value would count
            raise ConfigError(f"{typed[ours]} and {key} both set {ours}: leave one of them out")
        group = PLACED.get(ours, ours.partition("@")[0])
        if equals and value.lower() in NONE and (ours in PLACED or ours in MAY_BE_ABSENT):  # Hydra has no word for that
            found += [f"~{group}@{ours}"] if ours in PLACED else []
            continue
        if equals and key in VALUES:
            now = _valued(key, value)
        elif equals and group in groups:
            now = _options(group, value, groups[group])
        elif equals and key.endswith("reward") and (rewards := announced(key)):
            now = TOKEN.sub(lambda token: rewards.get(token[2], token[0]), value)
        if ours != key:
            notes[key] = f"{word} is {ours}={now} here"
        place = f"{group}@{ours}" if ours in PLACED else ours
        found.append(f"{sign}{place}{equals}{now}")
    for text in notes.values():
        note(f"note: {text}")
    return found


def fold(option: str) -> str:
    """Return a name without the characters that are ignored.

    >>> fold("GRPO-No-Clip"), fold("Qwen3-0.6B") == fold("qwen3_0_6b")
    ('grponoclip', True)
    """
    return re.sub(r"[-_. ]", "", option.lower())


def _options(group: str, value: str, options: Sequence[str]) -> str:
    """Replace each value by the option's own spelling, ignoring case, hyphens and dots."""
    folded = {fold(option): option for option in options} | OPTIONS.get(group, {})
    if "none" in options:
        folded |= dict.fromkeys(NONE, "none")
    return TOKEN.sub(lambda token: token[0] if token[2] in options else folded.get(fold(token[2]), token[0]), value)


def _valued(name: str, value: str) -> str:
    """Replace each value of a handout's name; `ConfigError` for one that it does not have."""
    accepted = VALUES[name]
    wrong = [token[2] for token in TOKEN.finditer(value) if token[2].lower() not in accepted]
    if wrong or value.startswith("["):
        raise ConfigError(f"{name}={value} is none of {', '.join(accepted)}: choose one")
    return TOKEN.sub(lambda token: accepted[token[2].lower()], value)
