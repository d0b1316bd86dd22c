"""The rollout engine of a run, from its `rollout` settings."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from rlreason.config.run import RunConfig
from rlreason.engines.base import Demand, Engine
from rlreason.engines.hf.engine import HFEngine
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.installation import require_vllm
from rlreason.engines.vllm.process import NCCLTransfer
from rlreason.engines.vllm.weight_transfer import InProcessTransfer
from rlreason.errors import ConfigError
from rlreason.model.policy import Policy
from rlreason.records.files import ENGINE_LOG
from rlreason.setup.prompts import PromptIds
from rlreason.types import Problem


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
    return VLLMEngine(policy, rollout, transfer, folder / ENGINE_LOG, demand(), say)


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
