"""The config group `rollout`: which engine samples, and where."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from rlreason.config.choices import choice
from rlreason.runtime.gpus import VISIBLE, driver_gpus, torch_has_gpus

INSTALL_VLLM = "pip install 'vllm>=0.26,<0.33' on a GPU machine; docs/vllm.md has the lines for one without"
WITHOUT_VLLM = f"rollout=vllm: vLLM is not installed: {INSTALL_VLLM}; or choose rollout=hf"


def engine_here(path: str | None) -> str:
    """What `rollout=auto` stands for on this machine, told without loading torch. `path`: the setting model.path."""
    return chosen_engine(path, usable_gpus(), _is_installed())


def chosen_engine(path: str | None, gpus: Sequence[str], has_vllm: bool) -> str:
    """vllm for a model in files where torch will find a GPU and vLLM is installed, else hf.

    >>> chosen_engine("Qwen/Qwen3-0.6B", ["H100"], True), chosen_engine(None, ["H100"], True)
    ('vllm', 'hf')
    """
    return "vllm" if path and gpus and has_vllm else "hf"


def usable_gpus() -> list[str]:
    """The GPUs here, unless the environment hides them or the torch that is installed computes on none."""
    hidden = os.environ.get(VISIBLE, "0").strip() in ("", "-1")
    return [] if hidden or not torch_has_gpus() else driver_gpus()


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


@dataclass
class RolloutConfig:
    """Which engine samples, and where."""

    engine: str = choice("hf", "vllm")  # chosen by rollout=NAME; by rollout=auto, the one for this machine
    max_rows: int = 256  # sequences decoded side by side, at most
    async_level: int = 0  # 1: the next batch is sampled, with weights one update old, while this one is learned
    # Decoding steps by torch.compile: worth its minutes on long runs; with it a run that goes on may round otherwise.
    compile: bool = False
    # GPUs that sample, with a vLLM each: prompts are dealt among them, and the tokens are those of one.
    gpus: int = 1
    # colocate: on the policy's GPUs, and the next ones where it asks for more; second_gpu: on GPUs behind them, in
    # processes of their own; auto: colocate where there is a GPU, else cpu.
    placement: str = choice("auto", "colocate", "second_gpu", "cpu", default="auto")
    sleep: bool = True  # give the engine's memory to training; false is faster where both fit
    # Gigabytes of the KV cache; null: enough for max_rows, at most 40% of what is free.
    kv_cache_gb: float | None = None
    # When engine and trainer disagree after a weight sync: stop, warn, or off to compare nothing.
    attest: str = choice("stop", "warn", "off", default="stop")
    timeout_s: float = 600.0  # seconds for the start, one decoding step or one weight sync

    @property
    def shares_gpu(self) -> bool:
        """Whether vLLM runs where the policy does, so that its memory may be given back."""
        return self.placement in ("auto", "colocate")

    def problems(self) -> list[str]:
        """Every violated rule inside the group, one line each: setting, value, rule, cure."""
        bad = []
        if self.async_level and self.engine == "hf":
            bad.append(
                "rollout.async_level=1 with rollout=hf: the in-process engine samples from the very weights that are "
                "being trained; set it to 0, or choose rollout=vllm"
            )
        if self.async_level and self.engine == "vllm" and self.sleep and self.shares_gpu:
            bad.append(
                "rollout.async_level=1 with rollout.sleep=true: an engine that samples during training cannot give "
                "its memory away; set rollout.sleep=false"
            )
        return bad
