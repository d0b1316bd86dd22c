"""The rollout engine of a run, from its `rollout` settings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlreason.config.evaluation import evaluation_of
from rlreason.config.grpo import GRPOConfig
from rlreason.config.jobs import EvalJobConfig
from rlreason.config.run import RunConfig
from rlreason.config.sft import EIConfig, SFTConfig
from rlreason.engines.base import Engine
from rlreason.engines.hf.engine import HFEngine
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.process import VLLMProcess
from rlreason.engines.vllm.startup import require_vllm
from rlreason.engines.weight_check import PROBE_PROMPT, PROBE_TOKENS
from rlreason.errors import ConfigError
from rlreason.model.policy import Policy
from rlreason.records.files import ENGINE_LOG
from rlreason.setup.prompts import PromptIds
from rlreason.types import Problem


@dataclass(frozen=True, slots=True)
class Demand:
    """The most that a run asks of its engine: what a copy of the model needs to have room for."""

    longest: int  # tokens of the longest prompt with a full response
    rows: int  # responses that are asked for at once


def check_engine(run: RunConfig) -> None:
    """Before anything slow is done: is what the settings name installed?"""
    if run.rollout.engine == "vllm":
        require_vllm()
        gpus = torch.cuda.device_count()
        if run.rollout.placement == "second_gpu" and gpus < 2:
            raise ConfigError(
                f"rollout.placement=second_gpu: GPUs visible here: {gpus}, and it takes two, one for the policy and "
                "one for vLLM: choose auto"
            )


def demand_of(
    run: RunConfig, prompt_ids: PromptIds, asked_ids: PromptIds, train: Sequence[Problem], validation: Sequence[Problem]
) -> Demand:
    """What training on `train` and evaluating on `validation` can ask for, whichever problems are drawn.

    An evaluation may have a prompt, lengths and several responses of its own.
    """
    evaluation = evaluation_of(run)
    asked = train if isinstance(run, EvalJobConfig) and run.split == "train" else validation
    in_a_step = run.questions * run.group_size if isinstance(run, GRPOConfig | EIConfig) else 0
    at_once = evaluation.samples * len(asked[: evaluation.final_problems])
    learned = (evaluation if isinstance(run, EvalJobConfig) else run).sampling.max_tokens
    longest = max(
        max((len(prompt_ids(p)) + learned for p in ([] if isinstance(run, SFTConfig) else train)), default=0),
        max((len(asked_ids(p)) + evaluation.sampling.max_tokens for p in validation), default=0),
    )
    return Demand(longest, max(in_a_step, at_once, 1))


def make_engine(
    run: RunConfig, policy: Policy, folder: Path, say: Callable[[str], None], demand: Callable[[], Demand]
) -> Engine:
    """The engine, ready to sample. `demand` is asked only where room has to be planned: it reads every prompt."""
    if run.rollout.engine == "hf":
        return HFEngine(policy, run.rollout.max_rows)
    placement, place = run.rollout.placement, policy.device.type
    say(placed(placement, place))
    make = VLLMProcess if placement == "second_gpu" else VLLMEngine
    settings = vllm_settings(run, demand())
    if placement == "auto" and place == "cpu" and not settings["sleep"] and not run.rollout.async_steps:
        say("! rollout.sleep=false has no effect: it is about a GPU's memory, and vLLM runs on the processor here")
    return make(policy, log=folder / ENGINE_LOG, say=say, **settings)


def vllm_settings(run: RunConfig, demand: Demand) -> dict[str, Any]:
    """What vLLM is told, wherever it runs; nothing of it is read by the embedded engine but `max_rows`.

    Its length is that of what is asked for and of the probe that looks at its weights, its rows those that are ever
    asked for at once: it sets memory aside for all of them.
    """
    rollout = run.rollout
    shares = rollout.placement in ("auto", "shared")  # a GPU of its own need not be given back
    return {
        "max_len": max(demand.longest, PROBE_PROMPT + PROBE_TOKENS),
        "max_rows": min(rollout.max_rows, demand.rows),
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
