"""Load a model folder, or refuse it in one line; build models without weights, to be filled later."""

import contextlib
import copy
import json
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
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
from transformers.utils.import_utils import is_accelerate_available
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
LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
#: Buffers that older versions of transformers saved and newer ones compute: no weights.
_COMPUTED = re.compile(r"\.(masked_bias|attn\.bias|inv_freq|(cos|sin)_cached|position_ids)$")
WRAPPED = re.compile(r"^(?:_orig_mod\.|module\.|_fsdp_wrapped_module\.|base_model\.model\.)+")


@contextlib.contextmanager
def _loading(path: str) -> Iterator[None]:
    try:
        yield
    except UNREADABLE as error:
        raise ConfigError(
            f"model.path={path} cannot be loaded ({first_line(error).rstrip(' .')}): {_cure(path, error)}"
        ) from error


def _cure(path: str, error: Exception) -> str:
    """Return advice for a model that cannot be loaded."""
    if "custom code" in str(error):
        return "it needs a program of its own, which is never run here: give a model of a family that transformers has"
    if "safetensors" in str(error) and any(Path(path).glob("*model*.bin")):
        return (
            "a pickle holds weights there, which may run a program: where you trust it, load it with transformers and "
            "save it again with save_pretrained, which writes safetensors"
        )
    return (
        "give a folder with config.json, safetensors weights and a tokenizer, or a hub name that this machine can reach"
    )


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model folder or a hub name; `ConfigError` if it is empty or names no end token."""
    with seeded(), _loading(path):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not tokenizer.encode("How many?", add_special_tokens=False):  # transformers may make up an empty one
        raise ConfigError(
            f"model.path={path} holds no tokenizer: copy tokenizer.json and tokenizer_config.json of the model that "
            "it was made from into it"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path={path}: its tokenizer names no end-of-text token; set eos_token in its config")
    return tokenizer


def load_model(path: str, **how: Any) -> PreTrainedModel:
    """Load a model from a folder or a hub name in float32, every weight from the files; `ConfigError` otherwise.

    `how`: further arguments of transformers' `from_pretrained`.
    """
    with seeded(), _loading(path):
        if (file := find_adapter_config_file(path)) is not None:  # transformers would add it, or fetch its base model
            base = json.loads(Path(file).read_text(encoding="utf-8")).get("base_model_name_or_path")
            raise ConfigError(
                f"model.path={path} holds an adapter (adapter_config.json, made for {base}), and whole models alone "
                "are loaded here: merge it with peft (AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload()"
                ".save_pretrained(NEW), and the tokenizer beside it), or move the adapter_* files away to train the "
                "model without it"
            )
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        for part in (config, config.get_text_config()):
            given = getattr(part, "quantization_config", None) or getattr(part, "compression_config", None)
            if given:
                quantisation = given if isinstance(given, dict) else given.to_dict()
                method = quantisation.get("quant_method", "quantization_config")
                raise ConfigError(
                    f"model.path={path} holds quantised weights ({method}), which cannot be trained here: give the "
                    "model that they were made from"
                )
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=torch.float32,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, in one line
            **NOTHING_RUNS,
            **how,
        )
    model: PreTrainedModel = loaded[0]
    report: dict[str, Any] = loaded[1]
    unexpected = [name for name in report["unexpected_keys"] if not _COMPUTED.search(name)]
    if why := mismatch(model, report["missing_keys"], unexpected, report["mismatched_keys"]):
        raise ConfigError(f"model.path={path}: {why}")
    if model.get_output_embeddings().weight is not model.get_input_embeddings().weight:
        model.config.get_text_config().tie_word_embeddings = (
            False  # the files may have a head although config.json says that it is tied
        )
    return model


def look_into(path: str) -> str:
    """Load a model without its weights, with a run's checks, and describe it. `ConfigError` as in a run.

    Without accelerate, the package that transformers needs for that, the weights are read too.
    """
    model = load_model(path, **({"device_map": "meta"} if is_accelerate_available() else {}))
    check_tokenizer(path, load_tokenizer(path), model)
    return f"{len(model.state_dict())} weights of {type(model).__name__}, all in {path}"


def check_tokenizer(path: str, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise `ConfigError` if text can become a token for which the model has no row.

    A special token beyond the rows, as for padding, is allowed: nothing here uses it. See `Policy.checked_ids`.
    """
    embeddings: Any = model.get_input_embeddings()
    rows, ids = len(embeddings.weight), tokenizer.get_vocab()
    special = {*tokenizer.all_special_ids, *(i for i, t in tokenizer.added_tokens_decoder.items() if t.special)}
    beyond = {number: token for token, number in ids.items() if number >= rows and number not in special}
    if beyond:
        raise ConfigError(
            f"model.path={path}: its tokenizer has {max(ids.values()) + 1} tokens, the model {rows} "
            f"({beyond[min(beyond)]!r} is number {min(beyond)}): give the tokenizer that belongs to the model, or give "
            "the model a row for each with resize_token_embeddings and save both"
        )


def with_settings_that_save(model: PreTrainedModel) -> str:
    """Reduce generation settings that transformers refuses to save to their tokens, in place; return a line on that.

    Nothing here samples by them. "" if they are valid.
    """
    settings = model.generation_config
    try:
        if settings is not None:
            settings.validate(strict=True)
        return ""
    except (ValueError, TypeError) as error:
        tokens = {key: getattr(settings, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**tokens)
        why = " ".join(str(error).split())[:120]
        return f"generation_config.json is saved with its tokens alone, since transformers refuses the rest ({why} ...)"


def check_saved(folder: Path, expected: int) -> None:
    """Raise `ConfigError` unless the folder holds a config, and weights with this count of numbers."""
    written = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as held:
            written += sum(math.prod(held.get_slice(name).get_shape()) for name in held.keys())  # noqa: SIM118
    if written != expected or not (folder / "config.json").is_file():
        raise ConfigError(
            f"{folder} was saved with {written} of the model's {expected} numbers"
            f"{'' if (folder / 'config.json').is_file() else ' and without config.json'}: give a model folder without "
            "adapters, as save_pretrained writes it"
        )


def mismatch(
    model: PreTrainedModel,
    missing: Collection[str],
    unexpected: Collection[str],
    wrong: Collection[tuple[str, torch.Size, torch.Size]],
) -> str:
    """Say how the weights in the files differ from the model's, and the cure; "" if they do not.

    `missing`: the model's names that the files lack; `unexpected`: names in the files without a place in the model;
    `wrong`: (name, shape in the files, shape in the model).
    """
    if not missing and not unexpected and not wrong:
        return ""
    config, names = model.config.get_text_config(), set(model.state_dict())
    differences, in_files = list[str](), (names - set(missing)) | set(unexpected)
    layers = len({number[1] for name in in_files if (number := LAYER.search(name))})
    if layers != (expected := getattr(config, "num_hidden_layers", layers)):
        differences.append(f"config.json has {expected} layers, the files {layers}")
    if missing:
        differences.append(
            f"{len(missing)} of the model's {len(names)} weights are not in the files ({_some(missing)})"
        )
        head = model.get_output_embeddings().weight
        weights = model.named_parameters(remove_duplicate=False)
        name_of_head = next(name for name, weight in weights if weight is head)
        if not config.tie_word_embeddings and name_of_head in missing:
            differences[-1] += ", the output head among them, and config.json says tie_word_embeddings=false"
    if unexpected:
        differences.append(f"{len(unexpected)} in the files have no place in it ({_some(unexpected)})")
    if wrong:
        name, theirs, ours = min(wrong)
        differences.append(
            f"{len(wrong)} have another shape than config.json says ({name}: {list(theirs)}, expected {list(ours)})"
        )
    cure = "give the folder as save_pretrained wrote it, with the config.json that belongs to these weights"
    if prefix := next((wrapped[0] for name in sorted(unexpected) if (wrapped := WRAPPED.match(name))), ""):
        cure = f"save it again from the module itself, so that no name begins with {prefix}"
    return f"{'; '.join(differences)}: {cure}"


def _some(names: Collection[str]) -> str:
    return ", ".join(sorted(names)[:2]) + " ..." * (len(names) > 2)


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
    theirs = _model_log_probs(policy)
    if states:
        policy.attention, policy.why_attention = "sdpa" if policy.model._supports_sdpa else "eager", "the model's own"
        policy.remarks.append(f"one sequence to a pass, which is slower ({states}: a state goes from token to token)")
    policy.model.set_attn_implementation(NAMES[policy.attention] if policy.packs else policy.attention)
    types = policy.compute_dtype, policy.head_dtype
    policy.compute_dtype = policy.head_dtype = torch.float32
    ours = _packed_log_probs(policy)
    shares = policy.shares_prompts and ours.device.type == "cpu"  # on a GPU in half precision: `check_sharing`
    if shares and not (apart := (_packed_log_probs(policy, share=True) - ours).abs().max().item()) < 1e-3:
        policy.stop_sharing(f"log-probabilities differ by {apart:.2g}")
    policy.compute_dtype, policy.head_dtype = types
    worst, where, why = (ours - theirs).abs().max().item(), "in its own forward pass", "caps, scales or attention sinks"
    if math.isnan(worst):
        raise ConfigError(
            f"model {type(policy.model).__name__} gives log-probabilities that are no numbers, as weights do that a "
            "diverged run has left: give another model"
        )
    if states and worst < 1e-3:
        where, why = "where it samples from its cache", f"layers that carry a state from token to token, {states}"
        try:
            worst = (ours - _model_log_probs(policy, by_token=True)).abs().max().item()
        except Exception as error:  # a model with a cache of its own kind
            worst, why = math.inf, f"{why} ({first_line(error)})"
    if not worst < 1e-3:  # float32 rounding stays below a tenth of this
        raise ConfigError(
            f"model {type(policy.model).__name__} gives other log-probabilities here than {where} (by up to "
            f"{worst:.3g} nats), because of {why}: choose a model without them, such as Qwen2, Qwen3, Llama, OLMo 2 or "
            "SmolLM2"
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


@torch.no_grad()
def check_kernel(policy: "Policy") -> None:
    """Raise `ConfigError` if the policy's kernel gives other log-probabilities than one causal call per sequence.

    Both are computed in the policy's own dtype.
    """
    ours = _packed_log_probs(policy)
    policy.model.set_attn_implementation(NAMES["sdpa"])
    plain = _packed_log_probs(policy)
    policy.model.set_attn_implementation(NAMES[policy.attention])
    worst = (ours - plain).abs().max().item()
    if not worst < 0.5:  # nats by which half precision may change a token, as between engine and trainer
        raise ConfigError(
            f"model.attention={policy.attention} gives other log-probabilities here than one call per sequence (by "
            f"up to {worst:.3g} nats): choose model.attention=sdpa"
        )


def check_head(policy: "Policy") -> None:
    """Raise `ConfigError` if the output head in its number type gives other log-probabilities or gradients than in
    float32, or cannot be computed here.
    """
    head, why = policy.head_dtype, ""
    try:
        (ours, slope), policy.head_dtype = _input_gradient(policy, share=False), torch.float32
        plain, expected = _input_gradient(policy, share=False)
        worst, apart = (ours - plain).abs().max().item(), ((slope - expected).norm() / expected.norm()).item()
        if not (worst < 0.5 and apart < 0.1):  # rounding stays below a tenth of both
            why = f"log-probabilities differ by up to {worst:.2g} nats from those in float32, gradients by {apart:.2g}"
    except RuntimeError as error:  # this GPU or torch lacks the product
        why = first_line(error)
    finally:
        policy.head_dtype = head
    if why:
        name = str(head).removeprefix("torch.")
        raise ConfigError(f"the output head cannot multiply in {name} here ({why}): set model.head=float32")


def check_sharing(policy: "Policy") -> None:
    """Stop sharing prompts if that changes log-probabilities or gradients, or cannot be computed.

    Both are computed in the policy's own dtype.
    """
    why = None
    try:
        (shared, slope), (plain, expected) = (_input_gradient(policy, share) for share in (True, False))
        apart = (slope - expected).norm() / expected.norm()
        if not ((shared - plain).abs().max() < 0.5 and apart < 0.1):  # half precision rounds each part's output
            why = f"gradients differ by {apart.item():.2g}"
    except (RuntimeError, AttributeError, TypeError) as error:  # this torch or GPU has another kernel, or none
        why = first_line(error)
    if why is not None:
        policy.stop_sharing(why)


def _input_gradient(policy: "Policy", share: bool) -> tuple[Tensor, Tensor]:
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
