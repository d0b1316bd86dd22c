"""What vLLM is started with, told or written by: the memory plan, its arguments, its model folder and its log."""

import copy
import importlib.util
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlreason.config.groups import WITHOUT_VLLM
from rlreason.engines.base import Sampling
from rlreason.errors import ConfigError
from rlreason.model.memory import kv_of_token, vllm_cache
from rlreason.model.parameters import model_size
from rlreason.model.policy import Policy
from rlreason.runtime.files import whole
from rlreason.runtime.text import redacted


def require_vllm() -> None:
    """`ConfigError` where vLLM is not installed; cheap, since it is not imported."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(WITHOUT_VLLM)


def last_lines(log: Path, count: int = 5) -> str:
    """Return the end of vLLM's log for an error message; secrets are hidden."""
    if not log.is_file():
        return ""
    lines = redacted(log.read_text(encoding="utf-8", errors="replace")).splitlines()[-count:]
    return "".join(f"\n  {line[:300]}" for line in [f"last lines of {log}:", *lines])


def hide_secrets(log: Path, say: Callable[[str], None]) -> None:
    """Rewrite the log where it holds secrets, once vLLM's process, which writes into it, has ended."""
    try:
        text = log.read_bytes().decode("utf-8", "surrogateescape") if log.is_file() else ""
        if (hidden := redacted(text)) != text:
            with whole(log) as partial:
                partial.write_bytes(hidden.encode("utf-8", "surrogateescape"))
    except OSError as error:  # the run has ended
        say(f"! secrets may stand in {log}: {error}")


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that the engine will take, planned before loading."""

    weights: int
    cache: int
    free: int

    def __str__(self) -> str:
        weights, cache, free = (f"{size / 2**30:.2g}" for size in (self.weights, self.cache, self.free))
        return f"{weights} GB of weights + {cache} GB of cache, {free} GB free"


def plan_memory(
    policy: Policy, device: torch.device, max_len: int, max_rows: int, cache_gb: float | None, reserve: int = 0
) -> MemoryPlan:
    """Plan the cache by `model.memory.vllm_cache`, in the free memory of `device` less `reserve` bytes.

    `ConfigError` where `cache_gb` does not hold one sequence, or weights and cache do not fit.
    """
    dtype = policy.compute_dtype
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        import psutil  # vLLM brings it

        free = int(psutil.virtual_memory().available)
    config = policy.model.config.get_text_config()
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    token = kv_of_token(config.num_hidden_layers, kv_heads * head_dim, dtype.itemsize)
    weights = model_size(policy.model) * dtype.itemsize
    cache, one = vllm_cache(token, free - weights - reserve, max_len, max_rows, cache_gb)
    plan = MemoryPlan(weights, cache, free)
    if cache < one:
        raise ConfigError(
            f"rollout.kv_cache_gb={cache_gb} does not hold one sequence of {max_len} tokens, which takes "
            f"{one / 2**30:.3g} GB: raise it, or set it to null to have it planned"
        )
    if weights + cache > free:
        raise ConfigError(
            f"rollout=vllm needs {plan}: lower rollout.max_rows, rollout.kv_cache_gb or sampling.max_tokens, or choose "
            "a smaller model"
        )
    return plan


def llm_arguments(
    dtype: str, max_len: int, max_rows: int, memory: MemoryPlan, device: torch.device, sleeps: bool
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` besides the model's folder."""
    arguments: dict[str, Any] = {
        "dtype": dtype,
        "load_format": "dummy",  # the first weight sync brings the weights
        "generation_config": "vllm",  # not the model's own
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        # Sums and logits in float32, like the trainer's; what is multiplied stays in the type of the products (vLLM
        # 0.32, logits_processor.py). In bfloat16 those are rounded hidden states and weights, on a GPU multiplied by
        # torch.mm(..., out_dtype=float32) and on a processor made float32 first: the trainer's model.head=bfloat16,
        # which model.head=auto is here. With model.head=float32 the trainer's weights alone are not rounded. Products
        # in float32 leave one head. "model" or "bfloat16" would round logits, which no choice of the trainer's does.
        "hf_overrides": {"head_dtype": "float32"},
        "max_model_len": max_len,
        "max_num_seqs": max_rows,
        "kv_cache_memory_bytes": memory.cache,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    if device.type == "cpu":
        return arguments | {
            "enforce_eager": True,
            "block_size": 32,  # of the prefix cache, the smallest: a group's samples share more of their prompt
            # A prompt read in two parts, with a seed of its own, ends vLLM on the processor (a CPU generator has no
            # offset to turn back), so prompts are read whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, max_len),
        }
    return arguments | {
        "enable_sleep_mode": sleeps,
        "gpu_memory_utilization": 0.9 * memory.free / torch.cuda.mem_get_info(device)[1],
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # fast decoding without compiling
    }


def sampling_arguments(sampling: Sampling, end_ids: Iterable[int], sees_special: bool) -> dict[str, Any]:
    """Return the arguments of `vllm.SamplingParams`: every one that affects the distribution or the end is set.

    `sees_special`: stop strings are searched in text with special tokens.
    """
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "bad_words": None,
        "allowed_token_ids": None,
        "max_tokens": sampling.max_tokens,
        "min_tokens": sampling.min_tokens,
        "stop": list(sampling.stop),
        "include_stop_str_in_output": True,
        "stop_token_ids": sorted(end_ids),
        "ignore_eos": True,  # the line above is the whole rule
        "logprobs": 0,  # the sampled token's
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": not sees_special,
        "spaces_between_special_tokens": True,
    }


def write_model(policy: Policy, folder: Path) -> str:
    """Write the model's config and tokenizer to a folder, without weights: the first weight sync brings them.

    There is no generation_config.json, so a model's own top-k or penalties do not affect sampling.
    """
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(getattr(policy.model, "_orig_mod", policy.model)).__name__]
    if policy.padded_from is not None:
        config.get_text_config().vocab_size = policy.padded_from  # as in `Policy.engine_weights`
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)
