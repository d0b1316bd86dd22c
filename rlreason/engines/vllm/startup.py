"""What vLLM is given: its place in this process, a log, memory, a model folder, and every argument spelled out.

Facts about vLLM live here, its use in vllm.py. It must not know training, rewards or a run's settings.
"""

import contextlib
import copy
import importlib.util
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlreason.config.rollout import INSTALL_VLLM as INSTALL
from rlreason.config.rollout import WITHOUT_VLLM
from rlreason.engines.base import Sampling
from rlreason.errors import ConfigError
from rlreason.model.parameters import model_size
from rlreason.model.policy import Policy
from rlreason.runtime.signals import temporary_folder

NEWEST = (0, 32)
FILES = "rlreason-vllm-"  # how folders for an engine's temporary files begin


def require_vllm() -> None:
    """Cheap, for the beginning of a run: looks for vLLM and does not import it."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(WITHOUT_VLLM)


def import_vllm(log: Path, oldest: tuple[int, int]) -> Any:
    """vLLM with its engine in this process and its talk in a file. A user without it reads one line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # so that the handler below is the only one
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with noise_into(log):
            import vllm
            import vllm.entrypoints.llm
            import vllm.inputs
            import vllm.sampling_params
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        cure = "pip uninstall torchvision torchaudio torchcodec" if "torchvision" in text else INSTALL
        raise ConfigError(f"rollout=vllm: vLLM cannot be imported ({text}): {cure}; or choose rollout=hf") from error
    version = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
    if not oldest <= version <= NEWEST:
        span = " to ".join("{}.{}".format(*end) for end in (oldest, NEWEST))
        raise ConfigError(f"rollout=vllm: vLLM {vllm.__version__} is outside the versions {span} for this: {INSTALL}")
    _write_to(log)
    return vllm


def _write_to(log: Path) -> None:
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(log, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)


@contextlib.contextmanager
def noise_into(log: Path) -> Iterator[None]:
    """What libraries write past Python to standard error goes to the end of the log."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)


def last_lines(log: Path, count: int = 5) -> str:
    """The end of vLLM's log, for a message about its failure."""
    if not log.is_file():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    return "".join(f"\n  {line[:300]}" for line in [f"last lines of {log}:", *lines])


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes that the engine will take, planned before anything is loaded."""

    weights: int
    cache: int
    free: int

    def __str__(self) -> str:
        weights, cache, free = (f"{size / 2**30:.2g}" for size in (self.weights, self.cache, self.free))
        return f"{weights} GB of weights + {cache} GB of cache, {free} GB free"


def plan_memory(
    policy: Policy, dtype: torch.dtype, device: torch.device, max_len: int, max_rows: int, cache_gb: float | None
) -> MemoryPlan:
    """As much cache as `max_rows` sequences of `max_len` tokens need, at most 40% of what the weights leave free.

    A token's keys and values take 2 * layers * kv_heads * head_dim numbers.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else _available_memory()
    config = policy.model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    token = 2 * config.num_hidden_layers * kv_heads * head_dim * dtype.itemsize
    weights = model_size(policy.model) * dtype.itemsize
    block = 128  # caches are handed out in blocks of at most this; every sequence may leave one unfilled
    one = token * (max_len + block)
    wanted = min(one * max_rows, int(0.4 * (free - weights)))
    cache = int(cache_gb * 2**30) if cache_gb is not None else max(wanted, one)
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


def _available_memory() -> int:
    import psutil  # vLLM brings it

    return int(psutil.virtual_memory().available)


def engine_settings(
    dtype: torch.dtype, max_len: int, max_rows: int, memory: MemoryPlan, device: torch.device, sleeps: bool
) -> dict[str, Any]:
    """Arguments of `vllm.LLM`, beside the model's folder."""
    settings: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "load_format": "dummy",  # the first hand-over brings the weights
        "generation_config": "vllm",  # not the model's own
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "hf_overrides": {"head_dtype": "float32"},  # like the trainer, which never rounds logits
        "max_model_len": max_len,
        "max_num_seqs": max_rows,
        "kv_cache_memory_bytes": memory.cache,
        "enable_prefix_caching": True,
        "seed": 0,
    }
    if device.type == "cpu":
        return settings | {
            "enforce_eager": True,
            "block_size": 32,  # of the prefix cache, the smallest: a group's samples share more of their prompt
            # A prompt read in two parts, with a seed of its own, ends vLLM on the processor (a CPU generator has no
            # offset to turn back), so prompts are read whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, max_len),
        }
    return settings | {
        "enable_sleep_mode": sleeps,
        "gpu_memory_utilization": 0.9 * memory.free / torch.cuda.mem_get_info(device)[1],
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},  # fast decoding without compiling
    }


def sampling_fields(sampling: Sampling, end_ids: Iterable[int], sees_special: bool) -> dict[str, Any]:
    """Arguments of `vllm.SamplingParams`: every one that shapes the distribution or the end, spelled out.

    `sees_special`: stop strings are sought in a text that holds special tokens.
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
    """Fill a folder with the model's shape and tokenizer but no weights: those are handed over like all later ones.

    It holds no generation_config.json, so a model's own top-k or penalties have no way into sampling.
    """
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(getattr(policy.model, "_orig_mod", policy.model)).__name__]
    config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


def place_for_files() -> contextlib.AbstractContextManager[str]:
    """A folder for all temporary files of an engine: its sockets and the file at which its parts meet stay behind it.

    The path of a socket takes 107 characters at most, so a long name of the temporary folder is left for /tmp.
    """
    return temporary_folder(FILES, Path("/tmp") if len(tempfile.gettempdir()) > 40 else None)


@contextlib.contextmanager
def files_into(folder: str) -> Iterator[None]:
    """Whatever asks for the temporary folder here, or in a process that starts now, gets this one."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()  # of compiled code, which is to outlive a run: named now, it stays where it is
    chosen, variable = tempfile.gettempdir(), os.environ.get("TMPDIR")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        yield
    finally:
        tempfile.tempdir = chosen
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable


def generators_kept() -> contextlib.AbstractContextManager[None]:
    """torch's global random generators are afterwards as they were before."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """vLLM seeds every global random generator and replaces torch's thread setting as it starts: put both back."""
    python, numpy = random.getstate(), np.random.get_state()
    set_threads, threads, asked = torch.set_num_threads, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # otherwise vLLM turns torch down to one thread for good
    try:
        with generators_kept():
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        if asked is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = asked
        random.setstate(python)
        np.random.set_state(numpy)
