"""The rollout engine of a run, from its `rollout` settings."""

from collections.abc import Callable
from pathlib import Path

from rlreason.config.run import Run
from rlreason.engines.base import Engine
from rlreason.engines.hf import HFEngine
from rlreason.engines.vllm import VLLMEngine
from rlreason.engines.vllm_start import require_vllm
from rlreason.errors import ConfigError
from rlreason.policy import Policy


def check_engine(run: Run) -> None:
    """Before anything slow is done: is what the settings name installed?"""
    if run.rollout.engine == "vllm":
        require_vllm()


def make_engine(run: Run, policy: Policy, folder: Path, say: Callable[[str], None]) -> Engine:
    rollout = run.rollout
    if rollout.engine == "hf":
        return HFEngine(policy, rollout.max_rows)
    say(placed(rollout.placement, policy.device.type))
    return VLLMEngine(
        policy,
        log=folder / "vllm.log",
        max_len=run.micro_batch_tokens,  # nothing longer could be learned from
        max_rows=rollout.max_rows,
        sleep=rollout.sleep,
        kv_cache_gb=rollout.kv_cache_gb,
        attest=rollout.attest,
        timeout_s=rollout.timeout_s,
        say=say,
    )


def placed(placement: str, device: str) -> str:
    """Where vLLM runs and why, in words. It always runs where the policy is.

    >>> placed("auto", "cpu")
    'rollout.placement=cpu: there is no GPU here'
    """
    if placement == "shared" and device != "cuda":
        raise ConfigError("rollout.placement=shared: there is no GPU here: choose auto or cpu")
    if placement == "cpu" and device == "cuda":
        raise ConfigError("rollout.placement=cpu: the policy is on the GPU and vLLM belongs beside it: choose auto")
    return {
        "cuda": "rollout.placement=shared: vLLM runs on the policy's GPU",
        "cpu": "rollout.placement=cpu: there is no GPU here",
    }[device]
