"""The shape of a model, read without loading it."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.config.model import TINY_CONTEXT, ModelConfig, TinyModelConfig

TINY_VOCABULARY = 2048 + 4  # most tokens of the built-in model: its tokenizer's, and the four tags
#: model_type in config.json -> how queries and keys are normed: not at all, each head's, or all heads' together.
FAMILIES = {"llama": "none", "qwen2": "none", "qwen3": "head", "olmo2": "whole"}
QKV = ("q_proj", "k_proj", "v_proj")


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
    biased: tuple[str, ...] = ()  # linear layers with a bias
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
        found = {"model.embed_tokens.weight": self.vocab * self.width, "model.norm.weight": self.width}
        for name, (inward, outward) in self.linear_layers().items():
            found[f"{name}.weight"] = inward * outward
            if name.rpartition(".")[2] in self.biased:
                found[f"{name}.bias"] = outward
        before = "post_feedforward_layernorm" if self.qk_norm == "whole" else "input_layernorm"
        norms = {before: self.width, "post_attention_layernorm": self.width}
        if self.qk_norm == "head":
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}
        elif self.qk_norm == "whole":
            norms |= {"self_attn.q_norm": self.query_width, "self_attn.k_norm": self.kv_width}
        for n in range(self.layers):
            found |= {f"model.layers.{n}.{name}.weight": size for name, size in norms.items()}
        return found if self.tied else found | {"lm_head.weight": self.vocab * self.width}


#: The published shapes of the models in conf/model, for a plan before anything is downloaded.
PUBLISHED = {
    "HuggingFaceTB/SmolLM2-135M-Instruct": ModelShape(49152, 576, 30, 9, 3, 64, 1536, True, context=8192),
    "Qwen/Qwen2.5-Math-1.5B": ModelShape(151936, 1536, 28, 12, 2, 128, 8960, True, biased=QKV, context=4096),
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
    file = Path(name) / "config.json" if Path(name).is_dir() else _in_cache(name)
    if file is not None:
        shape = None
        with suppress(OSError, ValueError, AttributeError, TypeError):
            shape = shape_from(json.loads(file.read_text(encoding="utf-8")))
        known = str(file) if shape else f"the shape is unknown: the plan reads {', '.join(FAMILIES)} from {file}"
        return Shape(shape, known)
    if name in PUBLISHED:
        return Shape(PUBLISHED[name], f"the published shape of {name}")
    return Shape(None, f"the shape of {name} is unknown until its config.json is here: hf download {name} config.json")


def tiny_shape(width: int, layers: int, heads: int) -> ModelShape:
    """Return the built-in model's shape.

    >>> tiny_shape(128, 2, 4).numbers
    689280
    """
    sizes = width, layers, heads, heads, width // heads, 3 * width
    return ModelShape(TINY_VOCABULARY, *sizes, True, context=TINY_CONTEXT)


def shape_from(config: Mapping[str, Any]) -> ModelShape | None:
    """Read the shape from a config.json; None for another family, or where a size is missing or no count."""
    keys = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    family, sizes = config.get("model_type"), [config.get(key) for key in keys]
    if family not in FAMILIES or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    heads, biased = config["num_attention_heads"], list[str]()
    if family == "qwen2":
        biased += QKV
    elif config.get("attention_bias"):
        biased += (*QKV, "o_proj")
    if config.get("mlp_bias"):
        biased += ("gate_proj", "up_proj", "down_proj")
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
        biased=tuple(biased),
        context=config.get("max_position_embeddings") or 1 << 30,
    )


def _in_cache(name: str) -> Path | None:
    """Return the config.json of a model in the hub's cache."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    with suppress(HFValidationError):  # not a valid name on the hub
        file = try_to_load_from_cache(name, "config.json")
        return Path(file) if isinstance(file, str) else None
    return None
