"""The weights that the built-in model starts from: shipped with the package, kept from an earlier run, or made now."""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch

from rlreason.config.model import TinyModelConfig
from rlreason.data.files import fingerprint
from rlreason.model.policy import Policy
from rlreason.model.weight_cache import SUFFIX, BrokenWeightsError, WeightCache, Weights, checksum, copied, read_weights
from rlreason.setup.warm_start import Lessons

Recipe = dict[str, Any]
SHIPPED = Path(__file__).resolve().parents[1] / "model" / "shipped"

#: Settings of the model that change how numbers are rounded, and no more.
ROUNDING = ("dtype", "head", "attention")
#: Settings of the model that act after its warm start, or not on its weights.
AFTERWARDS = ("name", "cache", "gradient_checkpointing", "check_memory", "freeze", "lora")


@dataclass(frozen=True, slots=True)
class Start:
    """The weights that a run starts from."""

    source: Literal["shipped", "cache", "made", "random"]
    weights: str  # checksum of all of them
    key: str = ""  # of the recipe and of what made it
    seconds: float = 0.0  # to make or find them


def recipe_of(tiny: TinyModelConfig, policy: Policy, lessons: Lessons) -> Recipe:
    """Everything that a user can change about the start model, in plain values.

    The tokenizer, the data, the formats and the first batch of lessons enter by their content.
    """
    settings = {f.name: getattr(tiny, f.name) for f in fields(tiny) if f.name not in (*ROUNDING, *AFTERWARDS)}
    settings["warm_start"] = lessons.described()
    if tiny.dtype == "bfloat16":  # asked for; auto takes what the device has
        settings["dtype"] = tiny.dtype
    words = json.loads(policy.tokenizer.backend_tokenizer.to_str())["model"]
    return {
        **settings,
        "tokenizer": hashed(words["vocab"], words["merges"], policy.tokenizer.get_vocab()),
        "data": fingerprint(lessons.problems),
        "formats": hashed([(form.prompt("{question}"), form.trace) for form in lessons.formats]),
        "lessons": hashed(next(lessons.batches(1))),
    }


def maker_of(tiny: TinyModelConfig, policy: Policy) -> dict[str, Any]:
    """What makes the model: other code, libraries and devices round otherwise."""
    names = [f.name for f in fields(tiny) if f.name in ROUNDING and f.name not in ("dtype", "head")]
    on_gpu = policy.device.type == "cuda"
    return {
        "code": code_hash(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": torch.cuda.get_device_name() if on_gpu else f"cpu {torch.backends.cpu.get_cpu_capability()}",
        "products": str(policy.compute_dtype),
        "head": str(policy.head_dtype),
        **{name: getattr(tiny, name) for name in names},
    }


@cache
def code_hash(modules: Sequence[str] = ("rlreason.setup.warm_start", "rlreason.model.tiny")) -> str:
    """Of the sources of these modules and of every module of this package that they import, and so on."""
    root, waiting, sources = Path(__file__).resolve().parents[2], list(modules), dict[str, str]()
    while waiting:
        name = waiting.pop()
        if name in sources:
            continue
        path = root.joinpath(*name.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        sources[name] = file.read_text(encoding="utf-8")
        waiting += re.findall(r"^\s*(?:from|import) (rlreason[\w.]*)", sources[name], re.MULTILINE)
    return hashed(sorted(sources.items()))


def find_or_make(
    tiny: TinyModelConfig, policy: Policy, lessons: Lessons, make: Callable[[], None], say: Callable[[str], None]
) -> Start:
    """Give the policy its start weights; `make` teaches it where they are nowhere to be found."""
    began = time.monotonic()
    recipe = recipe_of(tiny, policy, lessons)
    key = hashed(recipe, maker_of(tiny, policy))

    def made() -> Weights:
        make()
        return copied(policy.named_weights())

    def done(source: Literal["shipped", "cache", "made"], weights: Weights, key: str) -> Start:
        put(policy, weights)
        return Start(source, checksum(weights), key, round(time.monotonic() - began, 1))

    if tiny.cache is None:
        return done("made", made(), key)
    if (shipped := find_shipped(recipe, say)) is not None:
        return done("shipped", shipped, hashed(recipe))
    if (folder := cache_folder(tiny.cache)) is None:
        say("! model.cache=auto: there is no home folder to keep the model in: give model.cache=DIR")
        return done("made", made(), key)
    weights, found = WeightCache(folder, say).get(key, made)
    return done("cache" if found else "made", weights, key)


def put(policy: Policy, weights: Weights) -> None:
    """Every weight of the model, by name."""
    with torch.no_grad():
        for name, live in policy.named_weights():
            live.copy_(weights[name])


def find_shipped(recipe: Recipe, say: Callable[[str], None], folder: Path = SHIPPED) -> Weights | None:
    """The weights that come with the package for this recipe, whatever machine runs it."""
    for described in sorted(folder.glob("*.json")):
        if json.loads(described.read_text(encoding="utf-8"))["recipe"] == json.loads(json.dumps(recipe)):
            file = described.with_suffix(SUFFIX)
            try:
                return read_weights(file, hashed(recipe))
            except (OSError, BrokenWeightsError) as error:
                say(f"! {file} is broken ({error}): install rlreason again; the model is made here instead")
    return None


def cache_folder(setting: str) -> Path | None:
    """`model.cache` as a folder; None where that is to be in the home folder, and there is none."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    auto = Path(base if Path(base).is_absolute() else "~/.cache") / "rlreason"
    try:
        return (auto if setting == "auto" else Path(setting)).expanduser()
    except RuntimeError:
        return None


def hashed(*values: Any) -> str:
    """16 hex digits of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]
