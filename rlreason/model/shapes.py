"""The shape of a model, read without loading it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.config.model import TINY_CONTEXT, ModelConfig, TinyModelConfig

TINY_VOCABULARY = 2048 + 4  # most tokens of the built-in model: its tokenizer's, and the four tags
#: model_type in config.json -> how queries and keys are normed: not at all, each head's, or all heads' together.
FAMILIES = {"llama": "none", "qwen2": "none", "qwen3": "head", "olmo2": "whole"}
#: Sizes in a config.json -> the largest plausible value, so that a typo ends in a message.
LARGEST = {
    "vocab_size": 10**7,
    "hidden_size": 10**6,
    "num_hidden_layers": 1000,
    "num_attention_heads": 10**4,
    "num_key_value_heads": 10**4,
    "head_dim": 10**5,
    "intermediate_size": 10**7,
    "max_position_embeddings": 10**9,
}
MAY_BE_LEFT_OUT = ("num_key_value_heads", "head_dim", "max_position_embeddings")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A Llama-like decoder: grouped attention, a gated MLP of three matrices, two norms a layer."""

    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width inside the MLP
    tied: bool  # the output head is the embedding
    qk_norm: str = "none"  # none | head | whole
    qkv_bias: bool = False
    out_bias: bool = False  # of attention's output
    mlp_bias: bool = False
    context: int = 1 << 30  # tokens with positions

    @property
    def query_width(self) -> int:
        """Numbers in all queries of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Numbers in all keys of a token, and in all its values."""
        return self.kv_heads * self.head_dim

    @property
    def numbers(self) -> int:
        """Number of parameters, tied ones once."""
        return sum(self.parameters().values())

    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Name -> (inputs, outputs) of every linear layer but the output head."""
        d, q, kv, inner = self.width, self.query_width, self.kv_width, self.intermediate
        of_layer = {
            "self_attn.q_proj": (d, q),
            "self_attn.k_proj": (d, kv),
            "self_attn.v_proj": (d, kv),
            "self_attn.o_proj": (q, d),
            "mlp.gate_proj": (d, inner),
            "mlp.up_proj": (d, inner),
            "mlp.down_proj": (inner, d),
        }
        return {f"model.layers.{n}.{name}": size for n in range(self.layers) for name, size in of_layer.items()}

    def parameters(self) -> dict[str, int]:
        """Name -> size of every weight, named as in transformers; a tied head is listed as the embedding."""
        found = {"model.embed_tokens.weight": self.vocab * self.width}
        for name, (inward, outward) in self.linear_layers().items():
            found[f"{name}.weight"] = inward * outward
            layer = name.rpartition(".")[2]
            biased = self.out_bias if layer == "o_proj" else self.mlp_bias
            if layer in ("q_proj", "k_proj", "v_proj"):
                biased = self.qkv_bias
            if biased:
                found[f"{name}.bias"] = outward
        for n in range(self.layers):
            found |= {f"model.layers.{n}.{name}.weight": size for name, size in self._norms().items()}
        found["model.norm.weight"] = self.width
        return found if self.tied else found | {"lm_head.weight": self.vocab * self.width}

    def _norms(self) -> dict[str, int]:
        before = "post_feedforward_layernorm" if self.qk_norm == "whole" else "input_layernorm"
        norms = {before: self.width, "post_attention_layernorm": self.width}
        if self.qk_norm == "head":
            return norms | {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        if self.qk_norm == "whole":
            return norms | {"self_attn.q_norm": self.query_width, "self_attn.k_norm": self.kv_width}
        return norms


#: The published shapes of the models in conf/model, for a plan before anything is downloaded.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ModelShape(49152, 576, 30, 9, 3, 64, 1536, True, context=8192),
    "Qwen/Qwen2.5-Math-1.5B": ModelShape(151936, 1536, 28, 12, 2, 128, 8960, True, qkv_bias=True, context=4096),
    "Qwen/Qwen3-0.6B": ModelShape(151936, 1024, 28, 16, 8, 128, 3072, True, "head", context=40960),
    "Qwen/Qwen3-0.6B-Base": ModelShape(151936, 1024, 28, 16, 8, 128, 3072, True, "head", context=32768),
    "Qwen/Qwen3-1.7B-Base": ModelShape(151936, 2048, 28, 16, 8, 128, 6144, True, "head", context=32768),
    "allenai/OLMo-2-0425-1B": ModelShape(100352, 2048, 16, 16, 16, 128, 8192, False, "whole", context=4096),
    "meta-llama/Llama-3.2-1B": ModelShape(128256, 2048, 16, 32, 8, 64, 8192, True, context=131072),
}


class Shape(NamedTuple):
    """A model's shape, if known, and where it was read or why it is unknown."""

    shape: ModelShape | None
    source: str


def shape_of(model: ModelConfig) -> Shape:
    """Return the shape of a built-in model, of one in a folder or the hub's cache, or of one of `PUBLISHED`.

    A built-in model is assumed to have as many tokens as its tokenizer may; the run's texts decide.
    """
    if isinstance(model, TinyModelConfig):
        return Shape(tiny_shape(model.width, model.layers, model.heads), "model=tiny")
    name = model.folder or ""
    file = Path(name) / "config.json"
    if not file.is_file() and not Path(name).is_dir():
        file = _in_cache(name) or file
    if file.is_file():
        return _read(file)
    if name in PUBLISHED:
        return Shape(PUBLISHED[name], f"the published shape of {name}")
    if Path(name).is_dir():
        return Shape(None, f"the shape of model.path={name} is unknown: the folder has no config.json")
    return Shape(None, f"the shape of {name} is unknown until its config.json is here: hf download {name} config.json")


def tiny_shape(width: int, layers: int, heads: int) -> ModelShape:
    """Return the built-in model's shape.

    >>> tiny_shape(128, 2, 4).numbers
    689280
    """
    sizes = width, layers, heads, heads, width // heads, 3 * width
    return ModelShape(TINY_VOCABULARY, *sizes, True, context=TINY_CONTEXT)


def shape_from(config: Mapping[str, Any]) -> ModelShape | None:
    """Read the shape from a config.json; None for another family, or for implausible sizes."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES or wrong_size(config):
        return None
    heads, bias = config["num_attention_heads"], bool(config.get("attention_bias"))
    return ModelShape(
        vocab=config["vocab_size"],
        width=config["hidden_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or max(1, config["hidden_size"] // heads),
        intermediate=config["intermediate_size"],
        tied=bool(config.get("tie_word_embeddings")),
        qk_norm=FAMILIES[family],
        qkv_bias=bias or family == "qwen2",
        out_bias=bias and family != "qwen2",
        mlp_bias=bool(config.get("mlp_bias")),
        context=config.get("max_position_embeddings") or 1 << 30,
    )


def wrong_size(config: Mapping[str, Any]) -> str:
    """Say which size in a config.json is missing or implausible; "" if all are valid.

    >>> wrong_size({"vocab_size": 100, "hidden_size": -8})
    'hidden_size=-8 must be a whole number from 1 to 1000000'
    """
    for key, most in LARGEST.items():
        value = config.get(key)
        if value is None and key in MAY_BE_LEFT_OUT:
            continue
        if value is None:
            return f"{key} is missing"
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            return f"{key}={str(value)[:30]} must be a whole number from 1 to {most}"
    return ""


def _read(file: Path) -> Shape:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return Shape(None, f"the shape is unknown: {file} cannot be read ({error})")
    settings = config if isinstance(config, dict) else {}
    if (shape := shape_from(settings)) is not None:
        return Shape(shape, str(file))
    families = ", ".join(FAMILIES)
    if settings.get("model_type") in [*FAMILIES]:
        return Shape(None, f"the shape is unknown: in {file} {wrong_size(settings)}")
    return Shape(
        None, f"the shape is unknown: {file} is of type {settings.get('model_type')}, and the plan knows {families}"
    )


def _in_cache(name: str) -> Path | None:
    """Return the config.json of a model in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(name, "config.json")
    except HFValidationError:  # not a valid name on the hub
        return None
    return Path(file) if isinstance(file, str) else None
