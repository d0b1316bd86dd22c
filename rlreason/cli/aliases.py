"""Translate the names and values of the courses' handouts and of papers to the ones used here.

One table. Names are translated on parsed overrides, so that every form of Hydra's grammar is covered: sweeps, lists,
quotes, prefixes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString, Transformer, ValueType

from rlreason.cli.flags import group_options
from rlreason.errors import ConfigError
from rlreason.objectives.objective import LOSS_NUMBERS
from rlreason.runtime.plugins import announced

YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
NONE = ("false", "no", "off", "null", "none", "~")  # YAML's words for nothing: the option `none`, where a group has it

MAY_BE_ABSENT = ("experiment", "sweep")  # groups without which a run is whole


@dataclass(frozen=True)
class Name:
    """Our `key` for a name, and our `values` if its values differ too; then no others are accepted."""

    key: str
    values: Mapping[str, str] | None = None


DIVIDE_BY_STD = {**dict.fromkeys(YES, "group_std"), **dict.fromkeys(NO, "none")}

NAMES: dict[str, Name] = {
    "n_grpo_steps": Name("n_steps"),
    "n_ei_steps": Name("n_steps"),
    "epochs_per_rollout_batch": Name("epochs_per_rollout"),
    "G": Name("group_size"),
    "ei_batch_size": Name("question_batch_size"),
    "D_b": Name("question_batch_size"),
    "sampling_temperature": Name("sampling.temperature"),
    "sampling_min_tokens": Name("sampling.min_tokens"),
    "sampling_max_tokens": Name("sampling.max_tokens"),
    "loss_type": Name("loss"),
    "importance_reweighting_method": Name(
        "loss", {"none": "reinforce_with_baseline", "noclip": "grpo_no_clip", "grpo": "grpo_clip", "gspo": "gspo"}
    ),
    **{number: Name(f"loss.{number}") for number in ("cliprange", *LOSS_NUMBERS)},
    "use_std_normalization": Name("std_norm", DIVIDE_BY_STD),
    "normalize_by_std": Name("std_norm", DIVIDE_BY_STD),
    "advantage_normalizer": Name("std_norm", {"std": "group_std", "none": "none", "mean": "group_mean"}),
    "loss_normalization": Name("length_norm", {"sequence": "masked_mean", "constant": "constant"}),
    "normalize_constant": Name("length_norm.constant"),
    "normalization_constant": Name("length_norm.constant"),
}
#: Options of a group with another name in a handout.
OPTIONS: dict[str, dict[str, str]] = {"length_norm": {"masked_normalize": "constant"}}

#: Keys that hold an option of a group in another place -> that group: typed as any setting, they stand for Hydra's own
#: spelling (eval.prompt=r1_zero for prompt@eval.prompt=r1_zero).
PLACED = {"eval.prompt": "prompt", "eval.data": "data"}

#: Short name that is a setting too -> the longer one, which says more.
SHORT = {"eval_problems": "eval.problems", "samples": "eval.samples"}

#: A handout's setting that has no counterpart: vLLM's share of the GPU. Its memory is planned in GB here.
GPU_SHARE = "gpu_memory_utilization"


def translated(words: Sequence[str], note: Callable[[str], object] = print) -> list[str]:
    """Return the overrides under our names and options; `note` is called once per name with our name.

    An override that cannot be parsed is left unchanged: composing it reports the error. Hydra must be ready to compose.
    """
    parser = OverridesParser.create()
    said: dict[str, str] = {}
    out = []
    for word in words:
        try:
            override = parser.parse_override(word)
        except Exception:  # of Hydra, which fails on odd words in many ways
            out.append(word)
            continue
        if override.key_or_group == GPU_SHARE:
            said[GPU_SHARE] = _gpu_share(override)
            continue
        if group := PLACED.get(override.key_or_group):
            if override.value_type is ValueType.ELEMENT and _text(override.value()).lower() in NONE:
                out.append(f"~{group}@{override.key_or_group}")  # Hydra's spelling of no option
                continue
            override = _with(override, key=group, package=override.key_or_group, values=_refuse_null)
        if override.key_or_group in MAY_BE_ABSENT and _text(override.value()).lower() in NONE:
            continue  # the same as without it: Hydra has no word for that
        name = NAMES.get(override.key_or_group)
        if (found := _of_packages(override)) and (now := _with_values(override, found)) != word:
            said.setdefault(word, f"{word} is {now} here")
            out.append(now)
            continue
        ours = _option_names(_renamed(override, name) if name else override)
        if name:
            plain = name.values is None
            said.setdefault(
                override.key_or_group,
                f"{override.key_or_group} is {name.key} here" if plain else f"{word} is {ours.input_line} here",
            )
        out.append(str(ours.input_line))
    _refuse_two_names(words)
    for text in said.values():
        note(f"note: {text}")
    return out


def _renamed(override: Override, name: Name) -> Override:
    renamed = _with(override, key=name.key)
    if name.values is None or override.value_type is None:
        return renamed
    accepted = name.values

    def value(given: Any) -> str:
        if (text := _text(given).lower()) in accepted:
            return accepted[text]
        shown: dict[str, str] = {}  # the first spelling of each
        for theirs, ours in accepted.items():
            shown.setdefault(ours, theirs)
        choices = ", ".join(f"{theirs} ({name.key}={ours} here)" for ours, theirs in shown.items())
        raise ConfigError(f"{override.key_or_group}={_text(given)} is none of {choices}: choose one")

    if override.value_type not in (ValueType.ELEMENT, ValueType.SIMPLE_CHOICE_SWEEP, ValueType.CHOICE_SWEEP):
        value(override.get_value_string())  # a range or a glob of it means nothing
    return _with(renamed, values=value)


def _of_packages(override: Override) -> dict[str, QuotedString]:
    """Return the names of rewards that installed packages announce; those of data and losses are options."""
    if not override.key_or_group.endswith("reward") or override.value_type is None:
        return {}
    return {name: QuotedString(found, Quote.single) for name, found in announced(override.key_or_group).items()}


def _with_values(override: Override, found: Mapping[str, Any]) -> str:
    """Return the override with each value replaced by its name here."""
    return str(_with(override, values=lambda given: found.get(_text(given), given)).input_line)


def _option_names(override: Override) -> Override:
    """For a config group, return the option's own spelling, ignoring case, hyphens and dots."""
    if override.value_type is None or not _is_group(override.key_or_group):
        return override
    options = group_options(override.key_or_group)
    others = OPTIONS.get(override.key_or_group, {})
    folded = {_folded(option): option for option in options} | {_folded(name): o for name, o in others.items()}

    def option(given: Any) -> Any:
        if isinstance(given, list):
            return [option(one) for one in given]
        if _text(given) in options:
            return _text(given)
        if given is None or given is False or _text(given).lower() in NONE:
            return "none" if "none" in options else given
        return folded.get(_folded(_text(given)), given)

    return _with(override, values=option)


def _refuse_null(given: Any) -> Any:
    if given is None:
        raise ConfigError("null in a sweep over options: name training's option, or make that run by itself")
    return given


def _is_group(key: str) -> bool:
    try:
        return bool(group_options(key))
    except OSError:  # longer than a file's name can be
        return False


def _folded(option: str) -> str:
    """Return a name without the characters that are ignored.

    >>> _folded("GRPO-No-Clip"), _folded("Qwen3-0.6B") == _folded("qwen3_0_6b")
    ('grponoclip', True)
    """
    return re.sub(r"[-_. ]", "", option.lower())


def _text(given: Any) -> str:
    return given.text if isinstance(given, QuotedString) else str(given)


def _with(
    override: Override,
    key: str | None = None,
    values: Callable[[Any], Any] | None = None,
    package: str | None = None,
) -> Override:
    """Return the override, parsed and as text, with another key or package, or with each of its values replaced."""
    place = package or override.package
    new, before = replace(override, key_or_group=key or override.key_or_group, package=place), override._value
    text = "" if override.value_type is None else "=" + override.get_value_string()
    if values and isinstance(before, ChoiceSweep):
        new._value = replace(before, list=[values(one) for one in before.list])
        if new._value.list != before.list:
            text = "=" + _choices(new._value)
    elif values and override.value_type is ValueType.ELEMENT:
        now = new._value = values(before)
        if now != before:
            text = "=" + Transformer.str(now)
    new.input_line = new.get_key_element() + text
    return new


def _choices(sweep: ChoiceSweep) -> str:
    """Return a sweep over values as it is typed."""
    text = ",".join(Transformer.str(one) for one in sweep.list)
    text = text if sweep.simple_form and not sweep.shuffle and not sweep.tags else f"choice({text})"
    text = f"shuffle({text})" if sweep.shuffle else text
    return f"tag({','.join(sorted(sweep.tags))},{text})" if sweep.tags else text


def _refuse_two_names(words: Sequence[str]) -> None:
    """Refuse one setting under two names, since only the later value would count."""
    seen: dict[str, tuple[str, str]] = {}
    for word in words:
        typed = word.partition("=")[0].lstrip("+~")
        key = NAMES[typed].key if typed in NAMES else SHORT.get(typed, typed)
        other, before = seen.setdefault(key, (typed, word))
        if other != typed:
            raise ConfigError(f"{before} and {word} both set {key}: leave one of them out")


def _gpu_share(override: Override) -> str:
    """Return a note that a share of the GPU is not needed here; refuse a wrong value or a sweep of it."""
    given = override.value()
    cure = "leave it out, or give vLLM's cache a size by rollout.kv_cache_gb=GB"
    if override.is_sweep_override():
        raise ConfigError(f"{override.input_line} would repeat one run: the share of the GPU is not read here: {cure}")
    if override.value_type is not None and (not isinstance(given, int | float) or not 0 < given <= 1):
        raise ConfigError(f"{override.input_line} must be a share of the GPU, above 0 and at most 1: {cure}")
    return (
        f"{GPU_SHARE} is not needed here: vLLM's cache gets what rollout.max_rows need and training leaves free; "
        "rollout.kv_cache_gb=GB sets its size"
    )
