"""Start vLLM: check the installation, build its arguments, and protect the trainer's process from its changes."""

import atexit
import contextlib
import copy
import importlib.util
import logging
import os
import queue
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from rlreason.config.groups import INSTALL_VLLM as INSTALL
from rlreason.config.groups import WITHOUT_VLLM
from rlreason.engines.base import Sampling
from rlreason.errors import ConfigError
from rlreason.model.memory import kv_of_token, vllm_cache
from rlreason.model.parameters import model_size
from rlreason.model.policy import Policy
from rlreason.runtime.files import whole
from rlreason.runtime.signals import temporary_folder
from rlreason.runtime.text import redacted

NEWEST = (0, 32)


def require_vllm() -> None:
    """`ConfigError` where vLLM is not installed; cheap, since it is not imported."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(WITHOUT_VLLM)


def import_vllm(log: Path, oldest: tuple[int, int], exact: bool) -> Any:
    """Import vLLM with its engine in this process and its log in a file; return the module.

    `exact`: the model computes in float32. Attention on a GPU is then a Triton kernel, which would round its factors
    to TF32: by up to 2e-2 nats of a token's log-probability, emulated for 16 layers. `ConfigError` where vLLM cannot
    be imported, or its version is not between `oldest` and the newest tested one.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # so that the handler below is the only one
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if exact:
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # read where a kernel is compiled
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with stderr_into(log):
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
    log_into(log)
    return vllm


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def log_into(log: Path) -> None:
    """Append vLLM's log of this process to this file only, without secrets."""
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(log, encoding="utf-8", delay=True)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)


@contextlib.contextmanager
def stderr_into(log: Path) -> Iterator[None]:
    """Append what libraries write directly to standard error to the log."""
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
    """Return the end of vLLM's log for an error message; secrets are hidden."""
    if not log.is_file():
        return ""
    lines = redacted(log.read_text(encoding="utf-8", errors="replace")).splitlines()[-count:]
    return "".join(f"\n  {line[:300]}" for line in [f"last lines of {log}:", *lines])


def hide_secrets(log: Path, say: Callable[[str], None]) -> None:
    """Rewrite the log atomically where it holds secrets, once vLLM's process has ended, which may write into it.

    A failure to write is only reported: the run has ended.
    """
    try:
        text = log.read_bytes().decode("utf-8", "surrogateescape")
        if (without_secrets := redacted(text)) == text:
            return
        for handler in logging.getLogger("vllm").handlers:
            handler.close()  # it opens the new file with the next line
        with whole(log) as partial:
            partial.write_bytes(without_secrets.encode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return
    except OSError as error:
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
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
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
    dtype: torch.dtype, max_len: int, max_rows: int, memory: MemoryPlan, device: torch.device, sleeps: bool
) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` besides the model's folder."""
    arguments: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
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


T = TypeVar("T")
CHECK_EVERY_S = 0.5


class SingleThread:
    """A daemon thread that runs calls in order, each with a time limit; a process may end while a call hangs."""

    def __init__(self, name: str, check: Callable[[], None]) -> None:
        self._check = check
        self._stopped = False
        self._last: Future[Any] | None = None
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

    def run(self, function: Callable[[], T], timeout_s: float) -> T:
        """Return or raise what `function` does.

        `TimeoutError` when it takes longer; then it still runs. `check` is called while waiting, and an exception of
        it ends the wait, too.
        """
        future: Future[T] = Future()
        if self._stopped:
            raise RuntimeError("the thread was stopped")
        self._last = future
        self._calls.put((future, function))
        deadline = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(min(CHECK_EVERY_S, max(deadline - time.monotonic(), 0.0)))
            if future.done():
                return future.result()
            self._check()
            if time.monotonic() >= deadline:
                raise TimeoutError

    @property
    def busy(self) -> bool:
        """Whether an abandoned call still runs."""
        return self._last is not None and not self._last.done()

    def stop(self) -> None:
        """End the thread after the queued calls."""
        self._stopped = True
        self._calls.put(None)


FILES = "rlreason-vllm-"  # prefix of the folders for an engine's temporary files
#: Held while an engine's start changes what belongs to the whole process: the environment, the temporary folder,
#: standard error and the list of its children. In-process engines take it for their whole start, the others until
#: their process runs, so that several of those load side by side.
STARTING = threading.Lock()
#: The variables by which torchrun tells a process its rank, besides those that begin with TORCHELASTIC_.
OF_RANKS = {"MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"} | {
    f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")
}


def folder_for_files() -> contextlib.AbstractContextManager[str]:
    """Return a folder for all temporary files of an engine: its sockets and the file of its rendezvous.

    A socket's path may have 107 characters, so /tmp replaces a temporary folder with a long name.
    """
    return temporary_folder(FILES, Path("/tmp") if len(tempfile.gettempdir()) > 40 else None)


_in_use = contextlib.ExitStack()  # folders that abandoned calls may still use
atexit.register(_in_use.close)


def remove_files(files: contextlib.ExitStack, thread: SingleThread) -> None:
    """Remove an engine's folder: now, or at the end of the process where an abandoned start still runs.

    Such a start meets its processes at a file there, and without the folder torch waits minutes for that file, in C++
    with Python's lock held: no signal would be handled any more.
    """
    if thread.busy:
        _in_use.push(files.pop_all())
    else:
        files.close()


@contextlib.contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Make this the temporary folder of this process and of processes that start now."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()  # of compiled code, which must outlive a run: torch names it once, here
    chosen, tempfile.tempdir = tempfile.gettempdir(), folder
    try:
        with environment({"TMPDIR": folder}):
            yield
    finally:
        tempfile.tempdir = chosen


def alone(names: Iterable[str]) -> dict[str, None]:
    """Return the variables to unset so that vLLM does not see the trainer's ranks; `names`: of all variables.

    vLLM would take their rank for its own (the GPU of LOCAL_RANK), or wait for a port that torchrun has; and it sets
    some of them for its own processes.

    >>> alone(["PATH", "RANK", "TORCHELASTIC_RUN_ID"]).keys() - OF_RANKS
    {'TORCHELASTIC_RUN_ID'}
    """
    return dict.fromkeys([*OF_RANKS, *(name for name in names if name.startswith("TORCHELASTIC_"))])


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set these environment variables, here and for processes that start now, and restore them; None: unset."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def generators_kept() -> contextlib.AbstractContextManager[None]:
    """Restore torch's global random generators, the processor's and the current GPU's, afterwards.

    Those of other GPUs are not read: that would take memory there.
    """
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else [])


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """Restore the global random generators, which vLLM seeds, and torch's thread setting, which it replaces."""
    python, numpy = random.getstate(), np.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with generators_kept():
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)


TRAINER = "RLREASON_TRAINER"  # environment variable: the process id of the trainer, with which the engine ends


def row_digests(weight: Tensor) -> Tensor:
    """Digest each row, (rows, ...) -> (rows,): the sum over a row's indices j of bits_j * odd_j, modulo 2^64.

    An odd factor is invertible modulo 2^64, so one changed number always changes the digest; the factors differ, so
    exchanged numbers do too.

    >>> row_digests(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).unique().numel()
    2
    """
    bits = weight.detach().contiguous().view({2: torch.int16, 4: torch.int32}[weight.dtype.itemsize])
    bits = bits.reshape(len(weight), -1)
    odd = torch.arange(bits.shape[1], device=bits.device) * -7046029254386353131 | 1  # int64 wraps around
    return torch.cat([(part.long() * odd).sum(1) for part in bits.split(1024)])  # a slice at a time: 8 bytes a number


def repack_tied_head(model: nn.Module) -> None:
    """Renew the packed copy of a tied output head that vLLM uses on the processor; a reload leaves it stale."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if head is not None and embedding is not None and head.weight is embedding.weight and not head.weight.is_cuda:
        head.quant_method.process_weights_after_loading(head)
