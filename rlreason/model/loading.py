"""Load a model folder, or refuse it in one line; build models without weights, to be filled later."""

import contextlib
import copy
import json
import math
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.initialization import no_init_weights
from transformers.utils.import_utils import is_accelerate_available
from transformers.utils.peft_utils import find_adapter_config_file

from rlreason.errors import ConfigError
from rlreason.model.parameters import merged_weights, seeded
from rlreason.runtime.text import first_line

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
        _refuse_adapter(path)
        _refuse_quantised(path)
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
        kept = {key: getattr(settings, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = GenerationConfig(**kept)
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


def _refuse_adapter(path: str) -> None:
    """Refuse a folder with an adapter: transformers would add it to the model, or fetch its base model."""
    found = find_adapter_config_file(path)
    if found is None:
        return
    base = json.loads(Path(found).read_text(encoding="utf-8")).get("base_model_name_or_path")
    raise ConfigError(
        f"model.path={path} holds an adapter (adapter_config.json, made for {base}), and whole models alone are loaded "
        "here: merge it with peft (AutoPeftModelForCausalLM.from_pretrained(DIR).merge_and_unload().save_pretrained("
        "NEW), and the tokenizer beside it), or move the adapter_* files away to train the model without it"
    )


def _refuse_quantised(path: str) -> None:
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for part in (config, config.get_text_config()):
        how = getattr(part, "quantization_config", None) or getattr(part, "compression_config", None)
        if how:
            told = how if isinstance(how, dict) else how.to_dict()
            raise ConfigError(
                f"model.path={path} holds quantised weights ({told.get('quant_method', 'quantization_config')}), which "
                "cannot be trained here: give the model that they were made from"
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
    found, in_files = list[str](), (names - set(missing)) | set(unexpected)
    layers = len({number[1] for name in in_files if (number := LAYER.search(name))})
    if layers != (asked := getattr(config, "num_hidden_layers", layers)):
        found.append(f"config.json has {asked} layers, the files {layers}")
    if missing:
        found.append(f"{len(missing)} of the model's {len(names)} weights are not in the files ({_some(missing)})")
        if not config.tie_word_embeddings and _head_of(model) in missing:
            found[-1] += ", the output head among them, and config.json says tie_word_embeddings=false"
    if unexpected:
        found.append(f"{len(unexpected)} in the files have no place in it ({_some(unexpected)})")
    if wrong:
        name, theirs, ours = min(wrong)
        found.append(
            f"{len(wrong)} have another shape than config.json says ({name}: {list(theirs)}, expected {list(ours)})"
        )
    cure = "give the folder as save_pretrained wrote it, with the config.json that belongs to these weights"
    if prefix := next((wrapped[0] for name in sorted(unexpected) if (wrapped := WRAPPED.match(name))), ""):
        cure = f"save it again from the module itself, so that no name begins with {prefix}"
    return f"{'; '.join(found)}: {cure}"


def _head_of(model: PreTrainedModel) -> str:
    """Return the name of the output head's weights."""
    head = model.get_output_embeddings().weight
    return next(name for name, weight in model.named_parameters(remove_duplicate=False) if weight is head)


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
    found = copy.deepcopy(config)
    found.num_hidden_layers = 1
    if getattr(found, "layer_types", None):
        found.layer_types = found.layer_types[:1]
    return found


def with_one_layer(model: PreTrainedModel) -> PreTrainedModel:
    """Copy the model with only its first layer, between its embeddings and its output head."""
    short = from_config(one_layer_of(model.config))
    wanted = short.state_dict()
    short.load_state_dict({name: w for name, w in merged_weights(model) if name in wanted}, strict=False)  # tied ones
    return short


def materialize(module: nn.Module, device: torch.device) -> None:
    """Allocate memory on the device for tensors without any, in place; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, old in part._parameters.items():
            if old is not None and old.is_meta:
                if old not in made:
                    made[old] = nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
                part._parameters[name] = made[old]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty_like(buffer, device=device)
