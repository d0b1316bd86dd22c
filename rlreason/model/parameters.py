"""Make a model: build the tiny one or load a folder, choose what is trained and in which precision, add adapters."""

import copy
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as hf_logging
from transformers.utils.peft_utils import find_adapter_config_file

from rlreason.config.model import TINY_CONTEXT, ModelConfig
from rlreason.errors import ConfigError
from rlreason.model.memory import matches
from rlreason.runtime.machine import VISIBLE, Device, driver_gpus, why_unseen
from rlreason.runtime.text import first_line

#: A model is text and numbers: no program that comes with it is run, and no pickle read, which would run one.
NOTHING_RUNS = {"trust_remote_code": False, "use_safetensors": True}
#: Errors of libraries for an unreadable folder. Not RuntimeError, which torch raises for too little memory.
UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, SafetensorError, StrictDataclassError,
)  # fmt: skip
#: Buffers that older versions of transformers saved and newer ones compute: no weights.
_COMPUTED = re.compile(r"\.(masked_bias|attn\.bias|inv_freq|(cos|sin)_cached|position_ids)$")


@contextmanager
def seeded(seed: int = 0) -> Iterator[None]:
    """Seed torch's CPU generator, from which transformers draws weights, in this block; hide its progress bars."""
    hf_logging.disable_progress_bar()  # a run prints its own progress
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not `torch.manual_seed`, which seeds every GPU too
        yield


END = "<|endoftext|>"
PAD = "<|pad|>"
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
VOCABULARY = 2048  # most tokens: enough for every word of every shipped prompt to be one token


def build_tokenizer(texts: Iterable[str], vocab_size: int = 512) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer on `texts`: any string survives encoding and decoding.

    A number of up to two digits is one token, and so are the four r1_zero tags, which survive decoding.
    """
    core = Tokenizer(models.BPE())
    words = pre_tokenizers.Split(Regex(r"\d{1,2}| ?[^\s\d]+ ?|\s"), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END, pad_token=PAD)
    tokenizer.add_tokens(list(TAGS))
    return tokenizer


def build_model(
    vocab_size: int, width: int = 128, layers: int = 2, heads: int = 4, init_scale: float = 0.06, seed: int = 0
) -> LlamaForCausalLM:
    """Build a Llama with random weights from `seed`. Its larger initial scale lets a small model learn fast."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=TINY_CONTEXT,
        initializer_range=init_scale,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    with seeded(seed):
        return LlamaForCausalLM(config)


@contextmanager
def _loading(path: str) -> Iterator[None]:
    try:
        with seeded():
            yield
    except UNREADABLE as error:
        raise ConfigError(
            f"model.path={path} cannot be loaded ({first_line(error).rstrip(' .')}): give a hub name that this machine "
            "can reach, or a folder with config.json, safetensors weights and a tokenizer, of a family that "
            "transformers has; a pickle (.bin) or a program of its own is never run here"
        ) from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or a hub name; `ConfigError` if it is empty or names no end token."""
    with _loading(path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not tokenizer.encode("How many?", add_special_tokens=False):  # transformers may make up an empty one
        raise ConfigError(f"model.path={path} holds no tokenizer: copy that of the model it was made from into it")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path={path}: its tokenizer names no end-of-text token; set eos_token in its config")
    return tokenizer


def load_model(path: str) -> PreTrainedModel:
    """Load a model from a folder or a hub name in float32, every weight from the files; `ConfigError` otherwise."""
    with _loading(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        several = [config, config.get_text_config()]
        if find_adapter_config_file(path) or any(getattr(one, "quantization_config", None) for one in several):
            raise ConfigError(
                f"model.path={path} holds an adapter (adapter_config.json) or quantised weights (quantization_config), "
                "and only whole models are loaded: merge the adapter with peft's merge_and_unload(), or give the model "
                "that the weights were made from"
            )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, in one line
            **NOTHING_RUNS,
        )
    model: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    unexpected = [name for name in report["unexpected_keys"] if not _COMPUTED.search(name)]
    wrong = {"missing": report["missing_keys"], "unknown": unexpected, "of another shape": report["mismatched_keys"]}
    if first := [f"{min(some)} is {what}" for what, some in wrong.items() if some]:
        raise ConfigError(
            f"model.path={path}: its weights are not those of the model in its config.json ({'; '.join(first)}): give "
            "the folder as save_pretrained wrote it"
        )
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        # the files may have a head although config.json says that it is tied
        model.config.get_text_config().tie_word_embeddings = False
    if (settings := model.generation_config) is not None:
        try:
            settings.validate(strict=True)
        except (ValueError, TypeError):  # transformers would refuse to save these: only their tokens are kept
            names = "bos_token_id", "eos_token_id", "pad_token_id"
            model.generation_config = GenerationConfig(**{name: getattr(settings, name) for name in names})
    return model


def from_config(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model of this architecture, float32, on the processor, with uninitialised weights."""
    own = copy.deepcopy(config)  # it records how a model was made
    with seeded(), no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(own, dtype=torch.float32, attn_implementation="sdpa")
    model.tie_weights()
    model.eval()
    return model


def skeleton_of(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model of this architecture without memory: shapes only."""
    with torch.device("meta"):
        return from_config(config)


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate memory on the device for tensors without any, in place; tied ones stay tied."""
    bare = [
        part
        for part in module.modules()
        if any(tensor.is_meta for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)))
    ]
    for part in bare:
        part.to_empty(device=device, recurse=False)
    if bare and isinstance(module, PreTrainedModel):
        module.tie_weights()


def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Convert the weights to `dtype` in place, except the output head (and embeddings tied to it): logits stay exact.

    Buffers keep their precision: rounded rotary frequencies would shift distant positions.
    """
    head = model.get_output_embeddings().weight
    for parameter in model.parameters():
        if parameter is not head:
            parameter.data = parameter.data.to(dtype)


def freeze(model: PreTrainedModel, patterns: Sequence[str]) -> str:
    """Freeze parameters whose names match a pattern, in place; tied weights are frozen under either of their names.

    Return a line on what is still trained; `ConfigError` if that is nothing.
    """
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    for name in matching_names(named, patterns, "model.freeze"):
        named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ConfigError(f"model.freeze={list(patterns)} leaves nothing to train: name fewer parameters")
    return f"frozen weights: {describe_trained(model)}"


def describe_trained(model: nn.Module) -> str:
    """Describe how many parameters an optimizer would change; the model's size excludes its adapters."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"{trained / 1e6:.3g} M of {model_size(model) / 1e6:.3g} M parameters are trained"


def model_size(model: nn.Module) -> int:
    """Count a model's parameters without its adapters; tied ones once."""
    return sum(p.numel() for name, p in model.named_parameters() if ".lora_" not in name)


def matching_names(names: Iterable[str], patterns: Sequence[str], setting: str) -> list[str]:
    """Return the names that a shell pattern matches entirely or from a dot on, in order.

    A pattern that matches none is a `ConfigError`, which names `setting` and the first name.

    >>> matching_names(["a.0.q_proj", "a.0.v_proj", "a.1.q_proj"], ["q_proj", "a.0.*"], "model.freeze")
    ['a.0.q_proj', 'a.0.v_proj', 'a.1.q_proj']
    """
    names = list(names)
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ConfigError(f"{setting}: {pattern} matches no name in this model: one is {names[0]}, or *")
    return [name for name in names if matches(name, patterns)]


BASE = ".base_layer."  # inserted by peft between a wrapped layer's name and the names of its own weights


def add_lora(model: PreTrainedModel, rank: int, alpha: float, targets: Sequence[str] | None, seed: int) -> str:
    """Freeze the model and add a trainable pair A (rank, in), B (out, rank) to each chosen linear layer.

        y = W x + (alpha / rank) B A x,    B = 0 at first, so the model starts as it is

    (Hu et al. 2021, arXiv:2106.09685). The layers are wrapped in place, so the model is called as before.
    `targets` are patterns on layer names; None: every linear layer but the output head. A and B are float32
    whatever the model's weights are. Return a line on what was done.
    """
    from peft import LoraConfig, inject_adapter_in_model

    head = model.get_output_embeddings()
    linear = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear) and layer is not head]
    chosen = matching_names(linear, ["*"] if targets is None else targets, "model.lora.targets")
    # Any alpha scales, whatever the annotation says.
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=0.0, bias="none")  # type: ignore[arg-type]
    with seeded(seed):
        inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return f"LoRA rank {rank}: {describe_trained(model)}"


def checkpoint_layers(model: nn.Module) -> str:
    """Keep only each layer's input in the forward pass, in place; the backward pass recomputes the rest.

    The layers' own switch works in training mode only, which would enable dropout and disable the cache. Return a line
    on what was done; `ConfigError` if the model's layers do not support it.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"model.gradient_checkpointing=true: {type(model).__name__} does not mark its layers")
    for layer in layers:
        # not a closure, which deepcopy would leave bound to the old layer; no random state: dropout is off
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    return f"activations of {len(layers)} layers are computed again for the gradient"


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def hardware_here() -> Device:
    """Detect this process's hardware."""
    if not torch.cuda.is_available():
        return Device("cpu")
    return Device("cuda", torch.cuda.get_device_name(), bf16=torch.cuda.is_bf16_supported(including_emulation=False))


def pick_device(wanted: str = "auto") -> torch.device:
    """Return the device of this setting; auto: torch's GPU, else the processor (`machine_remarks` says why)."""
    if wanted == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device=mps: torch {torch.__version__} finds no GPU of Apple's here: set device=auto")
    return torch.device("mps" if wanted == "mps" else "cuda" if torch.cuda.is_available() else "cpu")


def choose_dtype(name: str, hardware: Device, setting: str = "model.dtype") -> torch.dtype:
    """Return the dtype that `setting` names; `auto`: bfloat16 on a GPU that computes it natively, else float32.

    `ConfigError` for bfloat16 on a GPU without it: torch would compute in float32 and round.

    >>> choose_dtype("auto", Device("cuda", "H100")), choose_dtype("auto", Device("cuda", "T4", bf16=False))
    (torch.bfloat16, torch.float32)
    """
    if name == "auto":
        return torch.bfloat16 if hardware.kind == "cuda" and hardware.bf16 else torch.float32
    if name == "bfloat16" and hardware.kind == "cuda" and not hardware.bf16:
        raise ConfigError(
            f"{setting}=bfloat16: {hardware.name} has no bfloat16: set {setting}=float32 (model.dtype=float16 "
            "is faster), or choose a GPU of compute capability 8.0 or more (Ampere: A100, A10, RTX 30)"
        )
    return DTYPES[name]


def choose_types(model: ModelConfig, engine: str, hardware: Device) -> tuple[torch.dtype, torch.dtype]:
    """Return (dtype of matrix products, dtype of the output head's operands) of a run that samples by `engine`.

    `ConfigError` if they are unavailable here.
    """
    weights = choose_dtype(model.weights, hardware, "model.weights")
    products = choose_dtype(model.dtype, hardware) if weights == torch.float32 else weights
    head = model.head
    if head == "auto":  # vLLM's head has the type of its products, and sums in float32 (0.32, logits_processor.py)
        head = str(products).removeprefix("torch.") if engine == "vllm" else "float32"
    return products, choose_dtype(head, hardware, "model.head")


def machine_remarks(model: ModelConfig, hardware: Device) -> list[str]:
    """Warn about a GPU that torch cannot access, or one without bfloat16."""
    if hardware.kind == "cpu":
        unseen = why_unseen(driver_gpus(), os.environ.get(VISIBLE), str(torch.__version__), torch.version.cuda)
        return ["! " + ": ".join(unseen)] if unseen else []
    if hardware.bf16 or model.dtype != "auto" or model.weights != "float32":
        return []
    return [f"{hardware.name} has no bfloat16: products in float32, several times slower than model.dtype=float16"]


def lists_on_device(
    lists: Sequence[Sequence[float]], device: torch.device | str, dtype: torch.dtype = torch.int64
) -> list[Tensor]:
    """Return a tensor (length,) on the device for each list; they share one memory, so change none in place.

    >>> [part.tolist() for part in lists_on_device([[1, 2], [], [3]], "cpu")]
    [[1, 2], [], [3]]
    """
    together = torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)
    return list(on_device(together, device).split([len(one) for one in lists]))


def on_device(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor to the device, to one of CUDA's without waiting: later work there finds it."""
    if torch.device(device).type == "cuda":
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
