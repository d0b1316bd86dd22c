"""Build the rollout engine of a run from its `rollout` settings."""

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from rlreason.config.groups import WITHOUT_VLLM, RolloutConfig
from rlreason.config.run import RunConfig
from rlreason.engines.base import Demand, Engine
from rlreason.engines.hf import HFEngine
from rlreason.engines.vllm import VLLMEngine
from rlreason.engines.vllm_process import Place
from rlreason.errors import ConfigError
from rlreason.model.chat import PromptIds
from rlreason.model.memory import moment_bytes, shape_from, workload_of
from rlreason.model.plan import engine_gpus, held_later, ranks_here
from rlreason.model.policy import Policy
from rlreason.runtime.machine import Device
from rlreason.types import Problem


def check_engine(run: RunConfig) -> None:
    """Check early that the engine is installed and that there are enough GPUs; `ConfigError` otherwise."""
    if run.rollout.engine == "vllm":
        if importlib.util.find_spec("vllm") is None:
            raise ConfigError(WITHOUT_VLLM)
        engine_gpus(run.rollout.placement, run.rollout.gpus, ranks_here(run), torch.cuda.device_count())


def demand_of(
    run: RunConfig, prompt_ids: PromptIds, asked_ids: PromptIds, train: Sequence[Problem], validation: Sequence[Problem]
) -> Demand:
    """Return the largest request of training on `train` and evaluating on `validation`, whichever problems are drawn.

    An evaluation may have its own prompt (`asked_ids`), lengths and number of responses.
    """
    evaluation = run.evaluation
    evaluated = train if run.samples_training_data and not run.trains else validation
    at_once = evaluation.samples * len(evaluated[: evaluation.final_problems])
    lengths = [len(asked_ids(p)) + evaluation.sampling.max_tokens for p in validation]
    if run.samples_training_data:
        lengths += [len(prompt_ids(p)) + run.asking.sampling.max_tokens for p in train]
    return Demand(max(lengths, default=0), max(run.responses_per_step, at_once, 1))


def largest(demands: Iterable[Demand]) -> Demand:
    """Return the demand that covers all of these."""
    sizes = [(demand.longest, demand.rows) for demand in demands]
    return Demand(*map(max, zip(*sizes, strict=True)))


def make_engine(
    run: RunConfig, policy: Policy, folder: Path, say: Callable[[str], None], demand: Callable[[], Demand]
) -> Engine:
    """Start the engine. `demand` reads every prompt and is called only where memory has to be planned."""
    if run.rollout.engine == "hf":
        return HFEngine(policy, run.rollout.max_rows, run.rollout.compile)
    places, largest = places_of(run.rollout, policy.device.type, ranks_here(run)), demand()
    if run.rollout.placement != "second_gpu" and run.rollout.kv_cache_gb is None:
        largest = replace(largest, reserve=reserve_of(run, policy, largest.longest))
    return VLLMEngine(policy, run.rollout, places, folder, largest, say)


def places_of(rollout: RolloutConfig, device: str, ranks: int) -> list[Place]:
    """Return the place of each engine of vLLM's.

    `device`: cuda or cpu, of the policy; `ranks`: of the trainer. `ConfigError` where the settings do not fit these.
    """
    placement, engines = rollout.placement, rollout.gpus
    if placement != "auto" and (placement == "cpu") != (device == "cpu"):
        raise ConfigError(f"rollout.placement={placement}: the policy is on the {device}, and so is vLLM: choose auto")
    if device == "cpu":
        return [Place(f"the processor ({k + 1} of {engines})") for k in range(engines)]
    places = []
    for gpu in engine_gpus(placement, engines, ranks, torch.cuda.device_count()):
        # The first GPU is that of rank 0, who sends the weights. Next to other ranks a file stands in for CUDA IPC:
        # vLLM's sending side would wait for all ranks to take part.
        transfer = "nccl" if gpu else "ipc" if ranks == 1 else None
        places.append(Place(f"GPU {gpu}", gpu, rollout.sleep and gpu < ranks, transfer))
    return places


def reserve_of(run: RunConfig, policy: Policy, longest: int) -> int:
    """Return the bytes that the trainer will take besides the weights, by the memory plan, at `longest` tokens.

    For a model family that the plan does not know, activations are left out.
    """
    shape = shape_from(policy.model.config.get_text_config().to_dict())
    if shape is not None:
        here = Device(policy.device.type, bf16=policy.compute_dtype == torch.bfloat16)
        response = max(run.sampling.max_tokens, run.evaluation.sampling.max_tokens)
        work = workload_of(run, shape, here, max(1, longest - response))
        return held_later(replace(work, parallel="shard" if policy.in_main_memory else "replicate"))
    parameters = list(policy.model.parameters())
    trained = [weight for weight in parameters if weight.requires_grad and run.trains]
    gradients = sum(weight.nbytes for weight in trained)
    later = moment_bytes(sum(weight.numel() for weight in trained), gradients, run.optimizes_by or "adamw")
    # whole copies of which none is on the device yet
    copies = (getattr(run, "kl_placement", "none") != "none") + policy.in_main_memory
    if getattr(run, "restarts", False):
        later += gradients
    return int(later + copies * sum(weight.nbytes for weight in parameters))
