"""The rollout engine of a run, from its `rollout` settings."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rlreason.config.run import Run
from rlreason.engines.base import Engine
from rlreason.engines.hf import HFEngine
from rlreason.engines.vllm import VLLMEngine
from rlreason.engines.vllm_process import VLLMProcess
from rlreason.engines.vllm_start import require_vllm
from rlreason.errors import ConfigError
from rlreason.policy import Policy


def check_engine(run: Run) -> None:
    """Before anything slow is done: is what the settings name installed?"""
    if run.rollout.engine == "vllm":
        require_vllm()
        gpus = torch.cuda.device_count()
        if run.rollout.placement == "second_gpu" and gpus < 2:
            raise ConfigError(
                f"rollout.placement=second_gpu: GPUs visible here: {gpus}, and it takes two, one for the policy and "
                "one for vLLM: choose auto"
            )


def make_engine(run: Run, policy: Policy, folder: Path, say: Callable[[str], None]) -> Engine:
    if run.rollout.engine == "hf":
        return HFEngine(policy, run.rollout.max_rows)
    placement, place = run.rollout.placement, policy.device.type
    say(placed(placement, place))
    make = VLLMProcess if placement == "second_gpu" else VLLMEngine
    settings = vllm_settings(run)
    if placement == "auto" and place == "cpu" and not settings["sleep"] and not run.rollout.async_steps:
        say("! rollout.sleep=false has no effect: it is about a GPU's memory, and vLLM runs on the processor here")
    return make(policy, log=folder / "vllm.log", say=say, **settings)


def vllm_settings(run: Run) -> dict[str, Any]:
    """What vLLM is told, wherever it runs; nothing of it is read by the embedded engine but `max_rows`."""
    rollout = run.rollout
    shares = rollout.placement in ("auto", "shared")  # a GPU of its own need not be given back
    return {
        "max_len": run.micro_batch_tokens,  # nothing longer could be learned from
        "max_rows": rollout.max_rows,
        "sleep": shares and rollout.sleep,
        "kv_cache_gb": rollout.kv_cache_gb,
        "attest": rollout.attest,
        "timeout_s": rollout.timeout_s,
    }


def placed(placement: str, device: str) -> str:
    """Where vLLM runs and why, in words. Unless a second GPU is asked for, it runs where the policy is.

    >>> placed("auto", "cpu")
    'rollout.placement=cpu: there is no GPU here'
    """
    if placement in ("shared", "second_gpu") and device != "cuda":
        raise ConfigError(f"rollout.placement={placement}: the policy is not on a GPU: choose auto or cpu")
    if placement == "cpu" and device == "cuda":
        raise ConfigError("rollout.placement=cpu: the policy is on the GPU and vLLM belongs beside it: choose auto")
    if placement == "second_gpu":
        return "rollout.placement=second_gpu: vLLM runs in a process and on a GPU of its own"
    return {
        "cuda": "rollout.placement=shared: vLLM runs on the policy's GPU",
        "cpu": "rollout.placement=cpu: there is no GPU here",
    }[device]
