"""The rollout engine of a run, from its `rollout` settings."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlreason.config.rollout import RolloutConfig
from rlreason.config.run import RunConfig
from rlreason.engines.base import Demand, Engine
from rlreason.engines.hf.engine import HFEngine
from rlreason.engines.vllm.arguments import plan_memory
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.installation import require_vllm
from rlreason.engines.vllm.process import NCCLTransfer
from rlreason.engines.vllm.weight_transfer import InProcessTransfer
from rlreason.engines.weight_check import PROBE_PROMPT, PROBE_TOKENS
from rlreason.errors import ConfigError
from rlreason.memory.formula import gradient_bytes, moment_bytes
from rlreason.memory.machine import Device
from rlreason.memory.plan import held_later, work_of
from rlreason.memory.shapes import shape_from
from rlreason.model.policy import Policy
from rlreason.records.files import ENGINE_LOG
from rlreason.setup.preflight import too_few_gpus
from rlreason.setup.prompts import PromptIds
from rlreason.types import Problem


def check_engine(run: RunConfig) -> None:
    """Before anything slow is done: is what the settings name installed?"""
    if run.rollout.engine == "vllm":
        require_vllm()
        if why := too_few_gpus(run.rollout.placement, torch.cuda.device_count()):
            raise ConfigError(why)


def demand_of(
    run: RunConfig, prompt_ids: PromptIds, asked_ids: PromptIds, train: Sequence[Problem], validation: Sequence[Problem]
) -> Demand:
    """What training on `train` and evaluating on `validation` can ask for, whichever problems are drawn.

    An evaluation may have a prompt, lengths and several responses of its own.
    """
    evaluation = run.evaluation
    asked = train if run.asks_training_data and not run.trains else validation
    at_once = evaluation.samples * len(asked[: evaluation.final_problems])
    learned = run.asking.sampling.max_tokens
    longest = max(
        max((len(prompt_ids(p)) + learned for p in (train if run.asks_training_data else [])), default=0),
        max((len(asked_ids(p)) + evaluation.sampling.max_tokens for p in validation), default=0),
    )
    return Demand(longest, max(run.responses_per_step, at_once, 1))


def make_engine(
    run: RunConfig, policy: Policy, folder: Path, say: Callable[[str], None], demand: Callable[[], Demand]
) -> Engine:
    """The engine, ready to sample. `demand` is asked only where room has to be planned: it reads every prompt."""
    if run.rollout.engine == "hf":
        return HFEngine(policy, run.rollout.max_rows, run.rollout.compile, say)
    rollout, place = run.rollout, policy.device.type
    say(placed(rollout.placement, place))
    if rollout.placement == "auto" and place == "cpu" and not rollout.sleep and not rollout.async_level:
        say("! rollout.sleep=false has no effect: it is about a GPU's memory, and vLLM runs on the processor here")
    transfer = NCCLTransfer() if rollout.placement == "second_gpu" else InProcessTransfer()
    asked = demand()
    rollout = with_planned_cache(run, policy, transfer.device(policy), asked)
    return VLLMEngine(policy, rollout, transfer, folder / ENGINE_LOG, asked, say)


def with_planned_cache(run: RunConfig, policy: Policy, device: torch.device, demand: Demand) -> RolloutConfig:
    """The run's `rollout` settings with a cache that leaves room for what the trainer takes after vLLM has started.

    As they are where `rollout.kv_cache_gb` is set, or vLLM has a GPU for itself.
    """
    if run.rollout.kv_cache_gb is not None or run.rollout.placement == "second_gpu":
        return run.rollout
    longest = min(max(demand.longest, PROBE_PROMPT + PROBE_TOKENS), policy.max_context)
    rows = min(run.rollout.max_rows, demand.rows)
    cache = plan_memory(policy, device, longest, rows, None, reserve_of(run, policy, demand.longest)).cache
    return replace(run.rollout, kv_cache_gb=cache / 2**30)


def reserve_of(run: RunConfig, policy: Policy, longest: int) -> int:
    """Bytes that the trainer will take beside the weights, by the memory plan; sequences have `longest` tokens at most.

    Of a family that the plan does not know, without what a forward and backward pass takes.
    """
    shape = shape_from(policy.model.config.get_text_config().to_dict())
    if shape is not None:
        here = Device(policy.device.type, bf16=policy.compute_dtype == torch.bfloat16)
        response = max(run.sampling.max_tokens, run.evaluation.sampling.max_tokens)
        return held_later(work_of(run, shape, here, max(1, longest - response)))
    weights = list(policy.model.parameters())
    trained = [(p.numel(), p.element_size()) for p in weights if p.requires_grad and run.trains]
    has_reference = getattr(run, "kl_placement", "none") != "none"
    copies = sum(p.numel() * p.element_size() for p in weights) if has_reference else 0
    first = gradient_bytes(trained) if getattr(run, "restarts", False) else 0
    return moment_bytes(trained, run.optimizes_by or "adamw") + copies + first


def placed(placement: str, device: str) -> str:
    """Where vLLM runs and why, as text. Unless a second GPU is asked for, it runs where the policy is.

    >>> placed("auto", "cpu")
    'rollout.placement=cpu: there is no GPU here'
    """
    if placement in ("colocate", "second_gpu") and device != "cuda":
        raise ConfigError(f"rollout.placement={placement}: the policy is not on a GPU: choose auto or cpu")
    if placement == "cpu" and device == "cuda":
        raise ConfigError("rollout.placement=cpu: the policy is on the GPU and vLLM belongs there too: choose auto")
    if placement == "second_gpu":
        return "rollout.placement=second_gpu: vLLM runs in a process and on a GPU of its own"
    return {
        "cuda": "rollout.placement=colocate: vLLM runs on the policy's GPU",
        "cpu": "rollout.placement=cpu: there is no GPU here",
    }[device]
