"""Load a model folder, or refuse it in one line; build models without weights, to be filled later."""

import contextlib
import copy
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.cache_utils import DynamicCache
from transformers.initialization import no_init_weights
from transformers.utils.peft_utils import find_adapter_config_file

from rlreason.errors import ConfigError
from rlreason.model.attention import NAMES
from rlreason.model.log_probs import without_padding
from rlreason.model.packing import pack
from rlreason.model.parameters import merged_weights, seeded
from rlreason.runtime.text import first_line

if TYPE_CHECKING:
    from rlreason.model.policy import Policy


#: A model is text and numbers: no program that comes with it is run, and no pickle read, which would run one.
NOTHING_RUNS = {"trust_remote_code": False, "use_safetensors": True}
#: Errors of libraries for an unreadable folder. Not RuntimeError, which torch raises for too little memory.
UNREADABLE = (
    OSError, ValueError, LookupError, TypeError, AttributeError, ImportError, SafetensorError, StrictDataclassError,
)  # fmt: skip
#: Buffers that older versions of transformers saved and newer ones compute: no weights.
_COMPUTED = re.compile(r"\.(masked_bias|attn\.bias|inv_freq|(cos|sin)_cached|position_ids)$")


@contextlib.contextmanager
def _loading(path: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise ConfigError(
            f"model.path={path} cannot be loaded ({first_line(error).rstrip(' .')}): give a hub name that this machine "
            "can reach, or a folder with config.json, safetensors weights and a tokenizer, of a family that "
            "transformers has; a pickle (.bin) or a program of its own is never run here"
        ) from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or a hub name; `ConfigError` if it is empty or names no end token."""
    with seeded(), _loading(path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not tokenizer.encode("How many?", add_special_tokens=False):  # transformers may make up an empty one
        raise ConfigError(f"model.path={path} holds no tokenizer: copy that of the model it was made from into it")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path={path}: its tokenizer names no end-of-text token; set eos_token in its config")
    return tokenizer


def load_model(path: str) -> PreTrainedModel:
    """Load a model from a folder or a hub name in float32, every weight from the files; `ConfigError` otherwise."""
    with seeded(), _loading(path):
        if find_adapter_config_file(path) is not None:  # transformers would add it, or fetch its base model
            raise ConfigError(
                f"model.path={path} holds an adapter (adapter_config.json), and only whole models are loaded: merge it "
                "with peft's merge_and_unload(), or move the adapter_* files away"
            )
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        if quantised := getattr(config.get_text_config(), "quantization_config", None) or getattr(
            config, "quantization_config", None
        ):
            raise ConfigError(
                f"model.path={path} holds quantised weights ({str(quantised)[:80]}), which cannot be trained: give the "
                "model that they were made from"
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
    names = {
        "are missing in the files": report["missing_keys"],
        "have no place in the model": [name for name in report["unexpected_keys"] if not _COMPUTED.search(name)],
        "have another shape": [
            f"{name} {[*theirs]}, not {[*ours]}" for name, theirs, ours in report["mismatched_keys"]
        ],
    }
    if wrong := [f"{len(some)} {what} ({', '.join(sorted(some)[:2])})" for what, some in names.items() if some]:
        raise ConfigError(
            f"model.path={path}: its weights are not those of the model in its config.json: {'; '.join(wrong)}: give "
            "the folder as save_pretrained wrote it"
        )
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        # the files may have a head although config.json says that it is tied
        model.config.get_text_config().tie_word_embeddings = False
    return model


def with_settings_that_save(model: PreTrainedModel) -> list[str]:
    """Reduce generation settings that transformers refuses to save to their tokens, in place; return a line on that."""
    settings = model.generation_config
    try:
        if settings is not None:
            settings.validate(strict=True)
        return []
    except (ValueError, TypeError):
        tokens = {key: getattr(settings, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**tokens)
        return ["generation_config.json is saved with its tokens alone, since transformers refuses the rest"]


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


def one_layer_of(config: PretrainedConfig) -> PretrainedConfig:
    """Return the same architecture with only its first layer."""
    short = copy.deepcopy(config)
    short.num_hidden_layers = 1
    if getattr(short, "layer_types", None):
        short.layer_types = short.layer_types[:1]
    return short


def with_one_layer(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the model with only its first layer, between its embeddings and its output head."""
    short = from_config(one_layer_of(model.config))
    wanted = short.state_dict()
    short.load_state_dict({name: w for name, w in merged_weights(model) if name in wanted}, strict=False)  # tied ones
    return short


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate memory on the device for tensors without any, in place; tied ones stay tied."""
    new: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None and old.is_meta:
                if old not in new:
                    new[old] = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
                part._parameters[name] = new[old]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)


@torch.no_grad()
def check_model(policy: "Policy") -> None:
    """Switch the model to packed attention; `ConfigError` if that changes its log-probabilities.

    They are compared with the model's own forward pass, in float32 and on short sequences. A model is refused
    whose logits are capped or shifted after the output head, or whose attention has caps or sinks. One with recurrent
    layers is scored a sequence at a time, and refused if sampling from its cache gives other numbers.
    """
    policy.model.set_attn_implementation("eager")
    states = ", ".join(_recurrent_layers(policy))
    if states:
        policy.packs = policy.shares_prompts = False
        policy.attention, policy.why_attention = "sdpa" if policy.model._supports_sdpa else "eager", "the model's own"
        policy.remarks.append(f"one sequence to a pass, which is slower ({states}: a state goes from token to token)")
    theirs = _model_log_probs(policy)
    policy.model.set_attn_implementation(NAMES[policy.attention] if policy.packs else policy.attention)
    types = policy.compute_dtype, policy.head_dtype
    policy.compute_dtype = policy.head_dtype = torch.float32
    ours = _packed_log_probs(policy)
    if policy.shares_prompts and ours.device.type == "cpu":  # on a GPU in half precision: `check_kernel`
        apart = (_packed_log_probs(policy, share=True) - ours).abs().max().item()
        if not apart < 1e-3:
            policy.stop_sharing(f"log-probabilities differ by {apart:.2g}")
    policy.compute_dtype, policy.head_dtype = types
    worst, why = (ours - theirs).abs().max().item(), "in its own forward pass, because of caps, scales or sinks"
    if states and worst < 1e-3:
        why = f"where it samples from its cache, because of layers with a state, {states}"
        try:
            worst = (ours - _model_log_probs(policy, by_token=True)).abs().max().item()
        except Exception as error:  # a model with a cache of its own kind
            worst, why = math.inf, f"{why} ({first_line(error)})"
    if not worst < 1e-3:  # float32 rounding stays below a tenth of this; a diverged run leaves weights that give NaN
        raise ConfigError(
            f"model {type(policy.model).__name__} gives other log-probabilities here than {why} (by up to "
            f"{worst:.3g} nats): choose another model, such as Qwen2, Qwen3, Llama, OLMo 2 or SmolLM2"
        )


def _model_log_probs(policy: "Policy", by_token: bool = False) -> Tensor:
    """Log-probabilities of the short sequences by the model itself: all at once, or token by token from its cache."""
    found = list[Tensor]()
    for prompt, response in _short_pairs(policy):
        parts = [prompt, *([token] for token in response)] if by_token else [[*prompt, *response]]
        ids = [torch.tensor([part], device=policy.head.device) for part in parts]
        cache = {"past_key_values": DynamicCache(config=policy.model.config)} if by_token else {"use_cache": False}
        logits = torch.cat([policy.model(part, **cache).logits[0].float() for part in ids])
        log_probs = without_padding(logits, policy.padded_from).log_softmax(-1)
        found += [log_probs[len(prompt) + t - 1, token] for t, token in enumerate(response)]
    return torch.stack(found)


def _recurrent_layers(policy: "Policy") -> list[str]:
    """List the kinds of layers with a convolution over tokens (short ones, state spaces), or else linear attention."""
    layers = policy.model.modules()
    parents = (layer for layer in layers if any(isinstance(child, nn.Conv1d) for child in layer.children()))
    linear = {"linear_attention"}.intersection(getattr(policy.model.config, "layer_types", None) or ())
    return sorted({type(layer).__name__ for layer in parents} or linear)


def _packed_log_probs(policy: "Policy", share: bool = False) -> Tensor:
    """Log-probabilities of the short sequences, in one row, or in a row each if the policy scores that way."""
    pairs = _short_pairs(policy)
    rows = [pairs] if policy.packs else [[pair] for pair in pairs]
    return torch.cat([policy.log_probs(pack(row, policy.head.device, share))[0] for row in rows])


def _short_pairs(policy: "Policy") -> list[tuple[list[int], list[int]]]:
    """Short sequences that every model can read, two with the same prompt; a longer one, where a state may drift."""
    size = policy.padded_from or policy.head.shape[0]
    pairs = [([3, 5, 7], [11, 13, 2]), ([3, 5, 7], [6, 8, 12, 10]), ([4], [9, 9, 9])]
    pairs += [] if policy.packs else [([5, 7, 11], [(17 * i) % 97 + 3 for i in range(40)])]
    return [([i % size for i in prompt], [i % size for i in response]) for prompt, response in pairs]


def check_kernel(policy: "Policy") -> None:
    """Compare the policy's kernel, in its own dtype, with one causal call per sequence.

    Stop sharing prompts if that changes log-probabilities or gradients, or cannot be computed here; `ConfigError` if
    they are other ones without sharing too.
    """
    policy.model.set_attn_implementation(NAMES["sdpa"])
    plain = _with_gradient(policy)
    policy.model.set_attn_implementation(NAMES[policy.attention])
    if policy.shares_prompts:
        try:
            why = _apart(_with_gradient(policy, share=True), plain)
        except (RuntimeError, AttributeError, TypeError) as error:  # this torch or GPU has another kernel, or none
            why = first_line(error)
        if why:
            policy.stop_sharing(why)
    if why := _apart(_with_gradient(policy), plain):
        raise ConfigError(f"model.attention={policy.attention} is wrong here ({why}): choose model.attention=sdpa")


def _apart(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> str:
    """Say by how much log-probabilities and gradients differ; "" where half precision may: it stays below a tenth."""
    worst = (ours[0] - theirs[0]).abs().max().item()
    apart = ((ours[1] - theirs[1]).norm() / theirs[1].norm()).item()
    if worst < 0.5 and apart < 0.1:
        return ""
    return f"log-probabilities differ by up to {worst:.2g}, gradients by {apart:.2g} of their norm"


def _with_gradient(policy: "Policy", share: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probabilities of short sequences, and the gradient of their sum by the input embeddings, in float32."""
    weight = policy.model.get_input_embeddings().weight
    is_trained = weight.requires_grad
    weight.requires_grad_(True)  # even for a frozen reference model
    try:
        log_probs = _packed_log_probs(policy, share)
        (gradient,) = torch.autograd.grad(log_probs.sum(), [weight])
    finally:
        weight.requires_grad_(is_trained)
    return log_probs.detach(), gradient.float()
