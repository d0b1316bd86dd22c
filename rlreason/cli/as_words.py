"""Settings as the words of a command line: a run from Python is one that could have been typed."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import fields
from typing import Any, cast

from hydra import compose
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig, OmegaConf

from rlreason.cli.mistakes import in_one_line
from rlreason.cli.suggestions import options
from rlreason.config.groups import names_function
from rlreason.config.jobs import EvaluateConfig
from rlreason.config.leaves import typed_word
from rlreason.config.run import RunConfig
from rlreason.config.unread import unread_keys
from rlreason.errors import ConfigError

PLAIN = re.compile(r"(?!(?:null|true|false|inf|nan)$)[A-Za-z_/][\w./-]*", re.IGNORECASE | re.ASCII)
_COMPOSED = "composed by rlreason from: "  # a flag of a config, behind it the words that it came from
SHARED = ("dtype", "weights", "attention")  # settings that every model has, however it was made
GROUPS = ("model", "data", "prompt", "eval.prompt", "eval.data")  # whose options are found again by their names


def remember(cfg: DictConfig, words: Sequence[str]) -> None:
    """Let a config know the words that it was composed from, in copies of it too."""
    cfg._set_flag(_COMPOSED + shlex.join(words), True)


def words_of(config: DictConfig | RunConfig, anew: Sequence[str] = ()) -> list[str]:
    """Words that compose to these settings: those it came from, and one for each value that was changed since.

    `anew`: words that follow and choose a part of them anew, which is left to them. Hydra must be ready to compose.
    `ConfigError` where no words could give them.
    """
    now = plain(config)
    flags = config._metadata.flags or {} if isinstance(config, DictConfig) else {}
    known = [flag.removeprefix(_COMPOSED) for flag in flags if flag.startswith(_COMPOSED)]
    keys = set(map(key_of, anew))
    words = without(shlex.split(known[-1]) if known else named_options(now), keys)
    base = plain(composed_settings(words))
    return [*words, *differences(base, replaced(now, base, keys))]


def key_of(word: str) -> str:
    """The setting that a word sets, or the place of the option that it chooses.

    >>> key_of("prompt@eval.prompt=r1_zero"), key_of("++data=gsm8k")
    ('eval.prompt', 'data')
    """
    return word.lstrip("+~").partition("=")[0].rpartition("@")[2]


def without(words: Sequence[str], keys: Set[str]) -> list[str]:
    """The words that set none of these, nor anything inside."""
    return [word for word in words if not any(f"{key_of(word)}.".startswith(f"{key}.") for key in keys)]


def replaced(settings: Mapping[str, Any], base: Mapping[str, Any], keys: Set[str], prefix: str = "") -> dict[str, Any]:
    """The settings, those of `keys` as in `base`.

    >>> replaced({"seed": 1, "prompt": {"reward": "mine"}}, {"prompt": {"reward": "r1_zero"}}, {"prompt.reward"})
    {'seed': 1, 'prompt': {'reward': 'r1_zero'}}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        before = base.get(key)
        if f"{prefix}{key}" in keys:
            found[key] = before
        elif isinstance(value, dict) and isinstance(before, dict):
            found[key] = replaced(value, before, keys, f"{prefix}{key}.")
        else:
            found[key] = value
    return found


def composed_settings(words: Sequence[str]) -> DictConfig:
    """What these words compose to, unchecked. Hydra must be ready."""
    with in_one_line(words, composing=True):
        return compose("config", list(words))


def plain(config: DictConfig | RunConfig) -> dict[str, Any]:
    """Settings as nested dicts, without Hydra's own."""
    cfg = OmegaConf.structured(config) if isinstance(config, RunConfig) else config
    found = OmegaConf.to_container(cfg, resolve=True)
    if not isinstance(found, dict) or "algorithm" not in found:
        raise ConfigError("config= holds no settings of a run: give what rlreason.compose(...) returned")
    return {str(key): value for key, value in found.items() if key != "hydra"}


def named_options(settings: Mapping[str, Any]) -> list[str]:
    """The options by which settings without a memory name themselves."""
    words, known = [f"algorithm={settings['algorithm']}"], options()
    for group in GROUPS:
        node: Any = settings
        kind = group.rpartition(".")[2]
        for part in group.split("."):
            node = (node or {}).get(part)
        option = (node or {}).get("name")
        if option in known.get(kind, []) or names_function(option or ""):
            words.append(f"{kind}@{group}={option}" if kind != group else f"{group}={option}")
    loss = (settings.get("loss") or {}).get("loss_type") or ""
    return [*words, f"loss={loss}"] if names_function(loss) else words


def differences(base: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """A word for each setting of `now` that is another in `base`."""
    for key, value in now.items():
        before = base.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and value.keys() == before.keys():
            yield from differences(before, value, f"{prefix}{key}.")
        elif value != before or type(value) is not type(before):
            yield f"{prefix}{key}={spelled(value)}"


def spelled(value: Any) -> str:
    """A value as Hydra reads it back.

    >>> spelled(["</answer>", "a"]), spelled("null"), spelled({"question": "my q"}), spelled(1e-06)
    ("['</answer>',a]", "'null'", "{question:'my q'}", '1e-06')
    """
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{spelled(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(spelled, value))}]"
    if isinstance(value, str) and not PLAIN.fullmatch(value):
        return QuotedString(value, Quote.single).with_quotes()
    return typed_word(value)


def words_to_evaluate(settings: Mapping[str, Any], model: str, anew: Sequence[str] = ()) -> list[str]:
    """Words of `algorithm=evaluate` on a model folder, asked and judged as in the run that had these settings.

    `anew`: words that follow and choose a part of them anew. Other data are asked whatever data the run had for
    evaluations, and all of them.
    """
    kept = {field.name for field in fields(EvaluateConfig)} - {"model"}
    keys = set(map(key_of, anew)) - {"model"}
    if "data" in keys:
        keys |= {"eval.data"}
    if keys & {"data", "eval.data"}:
        keys |= {"eval_problems", "eval.problems"}
    if "prompt.reward" in keys or "eval.prompt.reward" in keys:
        keys |= {"eval.reward"}
    chosen = named_options({key: settings[key] for key in kept & settings.keys()} | {"algorithm": "evaluate"})
    words = [*without(chosen, keys), "model=local", f"model.path={spelled(model)}"]
    base = plain(composed_settings(words))
    same = {key: settings[key] for key in base.keys() & settings.keys() - {"algorithm", "model"}}
    trained = settings.get("model") or {}
    same["model"] = base["model"] | {key: trained[key] for key in SHARED if key in trained}
    words += differences(base, replaced(same, base, keys))
    follow = [word for word in anew if not word.lstrip("+").startswith("hydra")]
    run = cast(RunConfig, OmegaConf.to_object(composed_settings([*words, *follow])))
    unread = unread_keys(run)  # such as how long training went on
    return [word for word in words if word.partition("=")[0] not in unread]
