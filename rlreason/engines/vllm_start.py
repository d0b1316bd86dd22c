"""What has to be right before a vLLM engine runs in this process: the library, its log, memory, a model folder.

Everything here happens once, before the engine is made. It must not know sampling, training or settings.
"""

import contextlib
import copy
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from rlreason.errors import ConfigError
from rlreason.memory import model_size
from rlreason.policy import Policy

OLDEST, NEWEST = (0, 26), (0, 32)
INSTALL = "pip install 'vllm>=0.26,<0.33' on a GPU machine; docs/vllm.md has the lines for one without"


def import_vllm(log: Path) -> ModuleType:
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
    if not OLDEST <= version <= NEWEST:
        raise ConfigError(
            f"rollout=vllm: vLLM {vllm.__version__} is outside the tested versions 0.26 to 0.32: {INSTALL}"
        )
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


def plan_memory(policy: Policy, dtype: torch.dtype, max_len: int, max_rows: int, cache_gb: float | None) -> MemoryPlan:
    """As much cache as `max_rows` sequences of `max_len` tokens need, at most 40% of what the weights leave free.

    A token's keys and values take 2 * layers * kv_heads * head_dim numbers.
    """
    if policy.device.type == "cuda":
        free = torch.cuda.mem_get_info(policy.device)[0]
    else:
        free = _available_memory()
    config = policy.model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    token = 2 * config.num_hidden_layers * kv_heads * head_dim * dtype.itemsize
    weights = model_size(policy.model) * dtype.itemsize
    block = 256  # caches are handed out in blocks; every sequence may leave one unfilled
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
            f"rollout=vllm needs {plan}: lower rollout.max_rows, rollout.kv_cache_gb or micro_batch_tokens (longest "
            "sequence), or choose a smaller model"
        )
    return plan


def _available_memory() -> int:
    import psutil  # vLLM brings it

    return int(psutil.virtual_memory().available)


@contextlib.contextmanager
def model_folder(policy: Policy) -> Iterator[str]:
    """A folder with the model's shape and tokenizer but no weights: those are handed over like all later ones.

    It holds no generation_config.json, so a model's own top-k or penalties have no way into sampling.
    """
    config = copy.deepcopy(policy.model.config)
    config.architectures = [type(getattr(policy.model, "_orig_mod", policy.model)).__name__]
    with tempfile.TemporaryDirectory(prefix="rlreason-vllm-") as folder:
        config.save_pretrained(folder)
        policy.tokenizer.save_pretrained(folder)
        yield folder


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """vLLM seeds every global random generator and replaces torch's thread setting as it starts: put both back."""
    python, numpy, cpu = random.getstate(), np.random.get_state(), torch.get_rng_state()
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    set_threads, threads, asked = torch.set_num_threads, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads)  # otherwise vLLM turns torch down to one thread for good
    try:
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
        torch.set_rng_state(cpu)
        if cuda:
            torch.cuda.set_rng_state_all(cuda)
