"""Build the rollout engine of a run from its `rollout` settings."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from rlreason.config.groups import RolloutConfig
from rlreason.config.run import RunConfig
from rlreason.engines.base import Demand, Engine
from rlreason.engines.hf.engine import HFEngine
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.many import ManyEngines
from rlreason.engines.vllm.start import plan_memory, require_vllm
from rlreason.engines.vllm.transfer import (
    PROBE_PROMPT,
    PROBE_TOKENS,
    HostTransfer,
    InProcessTransfer,
    NCCLTransfer,
    WeightTransfer,
)
from rlreason.errors import ConfigError
from rlreason.model.chat import PromptIds
from rlreason.model.fitting import describe_placement, engine_gpus, held_later, ranks_here, spread_work
from rlreason.model.memory import gradient_bytes, moment_bytes, workload_of
from rlreason.model.policy import Policy
from rlreason.model.shapes import Device, shape_from
from rlreason.records.files import ENGINE_LOGS
from rlreason.types import Problem


def check_engine(run: RunConfig) -> None:
    """Check early that the engine is installed and that there are enough GPUs; `ConfigError` otherwise."""
    if run.rollout.engine == "vllm":
        require_vllm()
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
    learned = run.asking.sampling.max_tokens
    longest = max(
        max((len(prompt_ids(p)) + learned for p in (train if run.samples_training_data else [])), default=0),
        max((len(asked_ids(p)) + evaluation.sampling.max_tokens for p in validation), default=0),
    )
    return Demand(longest, max(run.responses_per_step, at_once, 1))


def make_engine(
    run: RunConfig, policy: Policy, folder: Path, say: Callable[[str], None], demand: Callable[[], Demand]
) -> Engine:
    """Start the engine. `demand` reads every prompt and is called only where memory has to be planned."""
    if run.rollout.engine == "hf":
        return HFEngine(policy, run.rollout.max_rows, run.rollout.compile, say)
    rollout, place = run.rollout, policy.device.type
    where, transfers = transfers_of(rollout, place, ranks_here(run))
    say(where)
    if rollout.placement == "auto" and place == "cpu" and not rollout.sleep and not rollout.async_level:
        say("! rollout.sleep=false has no effect: it is about a GPU's memory, and vLLM runs on the processor here")
    largest = demand()
    rollout = with_planned_cache(run, policy, policy.device, largest)
    if len(transfers) == 1:
        (transfer,) = transfers.values()
        return VLLMEngine(policy, rollout, transfer, folder / ENGINE_LOGS[0], largest, say)

    def say_with_name(name: str, text: str) -> None:  # warnings keep their leading !
        say(f"! {name}: {text[2:]}" if text.startswith("! ") else f"{name}: {text}")

    engines = [
        VLLMEngine(policy, rollout, transfer, folder / log, largest, partial(say_with_name, name), started=False)
        for (name, transfer), log in zip(transfers.items(), ENGINE_LOGS, strict=False)
    ]
    return ManyEngines(engines, list(transfers))


def transfers_of(rollout: RolloutConfig, device: str, ranks: int) -> tuple[str, dict[str, WeightTransfer]]:
    """Return where vLLM runs, as text, and the weight transfer of each engine by the name of its device.

    `device`: cuda or cpu, of the policy; `ranks`: of the trainer. `ConfigError` where the settings do not fit these.
    """
    placement, engines = rollout.placement, rollout.gpus
    if placement in ("colocate", "second_gpu") and device != "cuda":
        raise ConfigError(f"rollout.placement={placement}: the policy is not on a GPU: choose auto or cpu")
    if placement == "cpu" and device == "cuda":
        raise ConfigError("rollout.placement=cpu: the policy is on the GPU and vLLM belongs there too: choose auto")
    if device == "cpu":
        several = f", and {engines} vLLMs share the processor" if engines > 1 else ""
        names = [f"the processor ({k + 1} of {engines})" for k in range(engines)]
        ways = {name: transfer_to(None, engines, ranks) for name in names}
        return f"rollout.placement=cpu: there is no GPU here{several}", ways
    gpus = engine_gpus(placement, engines, ranks, torch.cuda.device_count())
    ways = {f"GPU {gpu}": transfer_to(gpu, engines, ranks) for gpu in gpus}
    return describe_placement(placement, gpus, ranks), ways


def transfer_to(gpu: int | None, engines: int, ranks: int) -> WeightTransfer:
    """Choose how rank 0's weights reach one of several engines, which runs on this GPU or on the processor (None).

    The first GPU is rank 0's. An engine inside rank 0's process creates torch's default process group there, which
    ranks that shard a model need themselves; on the processor a second engine would create it again.
    """
    if ranks == 1 and (gpu == 0 or (gpu is None and engines == 1)):
        return InProcessTransfer()
    return NCCLTransfer(gpu, shared=gpu < ranks) if gpu else HostTransfer(gpu, shared=gpu is not None)


def with_planned_cache(run: RunConfig, policy: Policy, device: torch.device, demand: Demand) -> RolloutConfig:
    """Return the `rollout` settings with a KV cache that leaves the memory that the trainer allocates later.

    Unchanged where `rollout.kv_cache_gb` is set, or vLLM has a GPU for itself.
    """
    if run.rollout.kv_cache_gb is not None or run.rollout.placement == "second_gpu":
        return run.rollout
    longest = min(max(demand.longest, PROBE_PROMPT + PROBE_TOKENS), policy.max_context)
    rows = min(run.rollout.max_rows, demand.rows)
    cache = plan_memory(policy, device, longest, rows, None, reserve_of(run, policy, demand.longest)).cache
    return replace(run.rollout, kv_cache_gb=cache / 2**30)


def reserve_of(run: RunConfig, policy: Policy, longest: int) -> int:
    """Return the bytes that the trainer will take besides the weights, by the memory plan, at `longest` tokens.

    For a model family that the plan does not know, activations are left out.
    """
    shape = shape_from(policy.model.config.get_text_config().to_dict())
    if shape is not None:
        here = Device(policy.device.type, bf16=policy.compute_dtype == torch.bfloat16)
        response = max(run.sampling.max_tokens, run.evaluation.sampling.max_tokens)
        work = workload_of(run, shape, here, max(1, longest - response))
        return held_later(spread_work(work) if policy.in_main_memory else work)
    weights = list(policy.model.parameters())
    trained = [(p.numel(), p.element_size()) for p in weights if p.requires_grad and run.trains]
    has_reference = getattr(run, "kl_placement", "none") != "none"
    copies = int(has_reference) + int(policy.in_main_memory)  # of which none is on the device yet
    first = gradient_bytes(trained) if getattr(run, "restarts", False) else 0
    whole: int = sum(p.numel() * p.element_size() for p in weights)
    return moment_bytes(trained, run.optimizes_by or "adamw") + copies * whole + first
