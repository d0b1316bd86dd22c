"""The memory plan of a run: what it holds at its peaks, and the overrides that make it fit. No torch.

Where vLLM's engines are placed, too, for both the run and `rlreason doctor`.
"""

import copy
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import reduce
from typing import Any, NamedTuple

from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.model.memory import (
    ModelShape,
    Workload,
    forward_bytes,
    in_process_bytes,
    kv_of_token,
    moment_bytes,
    shape_of,
    training_bytes,
    vllm_cache,
    weight_bytes,
    workload_of,
)
from rlreason.runtime.machine import Device, place_of
from rlreason.runtime.text import size


def ranks_here(run: RunConfig) -> int:
    """Return how many ranks of the trainer run on this machine, on its first GPUs."""
    if (place := place_of()) is not None:
        return int(os.environ.get("LOCAL_WORLD_SIZE") or place.world)
    return run.ranks_requested


def engine_gpus(placement: str, engines: int, ranks: int, visible: int) -> list[int]:
    """Return the GPU number of each engine, of `visible` GPUs; the trainer's ranks have the first ones.

    Engines share GPUs with ranks, starting with rank 0's, unless `placement` is second_gpu: then they get the GPUs
    after the trainer's. Without GPUs they share the processor. `ConfigError` where there are too few.

    >>> engine_gpus("auto", 1, 1, 8), engine_gpus("colocate", 4, 2, 8), engine_gpus("second_gpu", 6, 2, 8)
    ([0], [0, 1, 2, 3], [2, 3, 4, 5, 6, 7])
    """
    apart = placement == "second_gpu"
    first = ranks if apart else 0
    if (apart or (engines > 1 and visible)) and first + engines > visible:
        setting = "rollout.placement=second_gpu" if apart else f"rollout.gpus={engines}"
        raise ConfigError(
            f"{setting}: GPUs visible here: {visible}, and it takes {first + engines}: lower rollout.gpus, or leave "
            "rollout.placement out"
        )
    return list(range(first, first + engines))


BUCKET = 256 << 20  # bytes of a gradient in float32 while it is summed over ranks: a guess
NCCL = 300 << 20  # bytes of its buffers: a guess
#: Bytes of the libraries and their context, whatever the model: guesses on a GPU.
CONTEXT = {"cuda": 600 << 20, "cpu": 500 << 20}
#: What vLLM takes besides weights and cache, CUDA graphs among it: guesses.
VLLM = {"cuda": 1500 << 20, "cpu": 700 << 20}
SHARE = 0.9  # of the free memory that a plan may take: allocators keep unusable fragments
LARGEST_ERROR = 0.15  # of a plan, measured on a processor
STEP = 256  # micro_batch_tokens is lowered to multiples of this

Parts = dict[str, int]  # name -> bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by part, at the peak of training and at that of sampling; a part not held then is left out.

    If nothing is trained, `training` is the scoring of responses.
    """

    training: Parts
    sampling: Parts
    second_gpu: Parts  # of an engine with its own GPU
    ranks: int  # that train
    parallel: str  # replicate: each has the whole model; shard: a part of it
    main_memory: int  # bytes besides a GPU's: rank 0's whole copies of sharded models

    @property
    def peak(self) -> int:
        """Bytes at the higher of the two peaks."""
        return max(sum(self.training.values()), sum(self.sampling.values()))

    @property
    def first(self) -> str:
        """The name of `training`."""
        return "training" if "gradients" in self.training else "scoring"

    @property
    def when(self) -> str:
        """The name of the part with the higher peak."""
        return self.first if sum(self.training.values()) >= sum(self.sampling.values()) else "sampling"

    def fits(self, device: Device) -> bool:
        """Whether it leaves a tenth of the free memory, as far as that is known."""
        return device.free is None or self.peak <= SHARE * device.free


def plan_of(work: Workload, device: Device) -> Plan:
    """Return the plan on `device`. If several ranks may choose: whole models if those fit, else parts.

    training: held + gradients + casts + activations + head or layer;    sampling: held + casts + KV cache + decoding
    """
    if work.parallel == "auto" or (work.ranks == 1 and work.parallel == "shard"):
        whole = plan_of(replace(work, parallel="replicate"), device)
        samples_whole = work.engine == "hf" and work.on_gpu
        # 8-bit moments and half-precision weights cannot be divided
        divisible = work.optimizer == "adamw" and work.weights == 4 and not samples_whole
        if work.ranks == 1 or whole.fits(device) or not divisible:
            return whole
        work = replace(work, parallel="shard")
    sharded, libraries, second_gpu = work.parallel == "shard", CONTEXT[device.kind], dict[str, int]()
    held, step = trainer_parts(work)
    training, sampling = held | step, held
    if work.engine == "vllm":  # it has a process of its own
        engine = {"engine's weights": work.products * work.shape.numbers, "KV cache": planned_cache(work, device)[0]}
        if work.elsewhere:  # one of several with a GPU each
            second_gpu = {"libraries": libraries + VLLM[device.kind]} | engine
        else:
            libraries = 2 * libraries + VLLM[device.kind]
            sampling = sampling | engine
            training |= engine if work.resident else {}
    elif not sharded:  # else rank 0 samples from its whole copy, in main memory
        cache, beside = max((in_process_bytes(work, request) for request in work.sampled), key=sum, default=(0, 0))
        sampling = sampling | {"KV cache": cache, "decoding": beside, "cast weights": work.kept_casts}
    base = {"libraries": libraries}
    training, sampling = ({k: v for k, v in (base | parts).items() if v} for parts in (training, sampling))
    main_memory = weight_bytes(work.shape, 4) * (2 if work.reference else 1) if sharded else 0
    return Plan(training, sampling, second_gpu, work.ranks, work.parallel, main_memory)


def trainer_parts(work: Workload) -> tuple[Parts, Parts]:
    """Return what a rank holds from the first step to the last, and what a step adds at its peak.

    Several ranks with whole models also take one bucket of gradients, or the head's, while these are summed. With parts
    of a model each holds its share, and every weight whole while it computes, with the next layer's, and in the
    backward pass a layer's gradient twice: 4 (outside all layers + 4 layer).
    """
    s = work.shape
    weights = weight_bytes(s, work.weights)
    reference = work.gradients if work.adapters and work.parallel != "shard" else weights  # of adapters alone
    held = {
        "weights": weights + (work.gradients if work.adapters else 0),
        "moments": moment_bytes(work.trained, work.gradients, work.optimizer),
        "reference model": reference if work.reference else 0,
        "first weights": work.gradients if work.restarts else 0,
    }
    if work.trained:
        activations, casts, on_top = training_bytes(work)
        step = {"gradients": work.gradients, "cast weights": casts, "activations": activations, "logits, head": on_top}
    else:  # responses are only scored
        step = {"cast weights": work.casts, "logits, head": forward_bytes(work, work.tokens, work.tokens)}
    nccl = NCCL if work.on_gpu else 0
    if work.ranks == 1:
        return held, step
    if work.parallel == "replicate":
        return held, step | {"sum over ranks": max(BUCKET, work.head_gradient) + nccl}
    layer = (s.numbers - s.outside_layers) // s.layers
    held = {name: -(-amount // work.ranks) for name, amount in held.items()}
    shares = {"gradients": -(-work.gradients // work.ranks)}
    return held, step | shares | {"gathered weights": 4 * (s.outside_layers + 4 * layer) + nccl}


def held_later(work: Workload) -> int:
    """Bytes that the trainer allocates where vLLM samples, after vLLM has planned its cache: its engine starts first.

    Moments, the reference model and the first weights; if vLLM keeps its memory, also what training adds; of a sharded
    model the weights too, which come from main memory then.
    """
    if work.elsewhere:
        return 0
    held, step = trainer_parts(work)
    later = sum(held.values()) + (sum(step.values()) if work.resident else 0)
    return later if work.parallel == "shard" else later - held["weights"]


def planned_cache(work: Workload, device: Device) -> tuple[int, int]:
    """Return (bytes of vLLM's cache, bytes of one sequence) as vLLM's start will plan them, with the weights loaded."""
    numbers, weights = work.shape.numbers, 0
    free = device.second_free if work.elsewhere else device.free
    if not work.elsewhere and work.parallel != "shard":
        weights = trainer_parts(work)[0]["weights"]
    room = (1 << 62 if free is None else free) - weights - CONTEXT[device.kind] - work.products * numbers
    rows = min(work.max_rows, max((-(-sampled.count // work.engines) for sampled in work.sampled), default=1))
    token = kv_of_token(work.shape.layers, work.shape.kv_width, work.products)
    return vllm_cache(token, room - held_later(work), work.longest, rows, work.cache_gb)


Saving = tuple[dict[str, Any], bool]  # settings that save memory, whether the run learns the same, but for rounding


class Fitting(NamedTuple):
    """Overrides that make the plan fit, and its peak with them."""

    overrides: tuple[str, ...]
    peak: int
    same_result: bool


def savings(run: RunConfig, longest: int) -> Iterator[Saving]:
    """Yield all savings, free ones first, those that change the experiment last; `longest`: tokens of a sequence."""
    yield {"rollout.sleep": True}, True
    for tokens in _halves(run.micro_batch_tokens, -(-(longest + 1) // STEP) * STEP):
        yield {"micro_batch_tokens": tokens}, True
    yield {"model.gradient_checkpointing": True}, True
    for rows in _halves(run.rollout.max_rows, 16):
        yield {"rollout.max_rows": rows}, True
    for gigabytes in (16, 8, 4, 2, 1):
        yield {"rollout.kv_cache_gb": gigabytes}, True
    if run.rollout.engine == "vllm":  # the engine in process samples from a whole model
        yield {"parallel": "shard"}, True
    yield {"optimizer": "adamw_8bit"}, False
    yield {"model.weights": "bfloat16"}, False
    if not run.model.lora.rank:
        yield {"model.lora.rank": 16}, False
    yield {"kl_placement": "none", "kl_coef": 0}, False
    for smaller in _halves(getattr(run, "group_size", 0), 2):
        yield {"group_size": smaller}, False
    for tokens in _halves(run.sampling.max_tokens, 64):
        yield {"sampling.max_tokens": tokens}, False


def _halves(number: int, least: int) -> Iterator[int]:
    """Yield number / 2, number / 4, ... down to `least`, inclusive.

    >>> list(_halves(8, 2)), list(_halves(9, 3)), list(_halves(2, 2))
    ([4, 2], [4, 3], [])
    """
    while number > least:
        number = max(number // 2, least)
        yield number


def fitting(run: RunConfig, work: Workload, plan: Plan, device: Device) -> Fitting | None:
    """Return the first savings of the list that make the run fit; None if all of them together do not.

    Those that the run's rules refuse, and those that lower nothing that is too large, are left out.
    """
    settings, same_result, limit = dict[str, Any](), True, SHARE * (device.free or 0)
    for saved, same in savings(run, work.longest):
        changed = copy.deepcopy(run)
        for key, value in (settings | saved).items():
            *groups, name = key.split(".")
            setattr(reduce(getattr, groups, changed), name, value)
        less_work = workload_of(changed, work.shape, device, work.prompt)
        less = plan_of(less_work, device)
        pairs = (plan.training, less.training), (plan.sampling, less.sampling)
        helps = any(limit < sum(then.values()) > sum(now.values()) for then, now in pairs)
        cache, one = planned_cache(less_work, device)
        if changed.problems() or not helps or (run.rollout.engine == "vllm" and cache < one):
            continue
        plan, settings, same_result = less, settings | saved, same_result and same
        if plan.fits(device):
            overrides = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()]
            return Fitting(tuple(overrides), plan.peak, same_result)
    return None


def device_per_rank(device: Device, ranks: int) -> Device:
    """One rank's part of a device: all of its GPU, or a share of a processor's memory, which ranks share."""
    if device.kind != "cpu" or ranks == 1 or device.free is None:
        return device
    return replace(device, name=f"{device.name} for each of {ranks} ranks", free=device.free // ranks)


def parallel_mode(run: RunConfig, shape: ModelShape | None, device: Device, world: int) -> tuple[str, str]:
    """Return the mode of `world` ranks on devices like this one, replicate or shard, and why.

    `run.parallel` decides unless it is auto. `shape`: None if unknown: then the whole model.
    """
    setting = str(getattr(run, "parallel", "auto"))
    if setting != "auto":
        return setting, "as asked"
    here = device_per_rank(device, world)
    if world == 1 or shape is None or here.free is None:
        return "replicate", "one process trains, or how much memory it takes is unknown"
    work = replace(workload_of(run, shape, device), ranks=world)
    whole = plan_of(replace(work, parallel="replicate"), here)
    return plan_of(work, here).parallel, f"a whole model takes about {size(whole.peak)} of {size(here.free)}"


class Planned(NamedTuple):
    """A run's plan on a device; `plan` is None if the model's shape is unknown, and `source` says why."""

    device: Device
    source: str
    work: Workload | None = None
    plan: Plan | None = None
    cure: Fitting | None = None

    @property
    def verdict(self) -> str:
        """unknown | fits | tight (may run out of memory) | too large."""
        if self.plan is None or self.device.free is None:
            return "unknown"
        if self.plan.fits(self.device):
            return "fits"
        return "tight" if self.plan.peak * (1 - LARGEST_ERROR) <= self.device.free else "too large"


def planned(run: RunConfig, device: Device, prompt: int | None = None) -> Planned:
    """Return a run's plan, and the overrides that make it fit if it does not.

    `prompt`: tokens of the longest prompt; None: assumed.
    """
    shape, source = shape_of(run.model)
    if shape is None:
        return Planned(device, source)
    work = workload_of(run, shape, device, prompt)
    device = device_per_rank(device, work.ranks)
    plan = plan_of(work, device)
    cure = None if plan.fits(device) else fitting(run, work, plan, device)
    return Planned(device, source, work, plan, cure)


def table(outcome: Planned) -> list[str]:
    """Format the plan as aligned lines, a part a line, at the peak of training and at that of sampling."""
    if outcome.plan is None or outcome.work is None:
        return [outcome.source]
    plan, work = outcome.plan, outcome.work
    peaks = plan.training, plan.sampling
    lines = [
        f"{work.shape.numbers / 1e6:.4g} M parameters, by {outcome.source}",
        f"{'float32' if work.products == 4 else '16-bit'} products, rows of {work.tokens} tokens, prompts taken as "
        f"{work.prompt}, at most {work.max_rows} responses side by side",
        f"{plan.first:>28}{'sampling':>12}",
    ]
    for part in plan.training | plan.sampling:
        first, second = (size(held[part]) if part in held else "-" for held in peaks)
        lines.append(f"{part:<18}{first:>10}{second:>12}")
    first, second = (size(sum(held.values())) for held in peaks)
    lines.append(f"{'together':<18}{first:>10}{second:>12}")
    if plan.ranks > 1:
        copies = f"; in main memory {size(plan.main_memory)}" if plan.main_memory else ""
        lines.append(f"the plan is of rank 0 of {plan.ranks}, by parallel={plan.parallel}{copies}")
    if plan.second_gpu:
        lines.append("on the second GPU: " + ", ".join(f"{size(v)} of {k}" for k, v in plan.second_gpu.items()))
    return lines


def conclusion(outcome: Planned) -> str:
    """Say whether it fits, in a sentence, with the cure if it does not."""
    return ": ".join(filter(None, (verdict(outcome), cure(outcome))))


def verdict(outcome: Planned) -> str:
    """Say whether it fits, and by which numbers."""
    if outcome.plan is None:
        return outcome.source
    words = {"unknown": "takes", "fits": "fits:", "tight": "may not fit:", "too large": "does not fit:"}
    need = f"{words[outcome.verdict]} about {size(outcome.plan.peak)} in {outcome.plan.when}"
    if outcome.device.free is None:
        return f"{need}; how much memory is free here is unknown"
    return f"{need}, and {size(outcome.device.free)} are free on {outcome.device.name}"


def cure(outcome: Planned) -> str:
    """Return the overrides that make it fit; "" if it does."""
    if outcome.plan is None or outcome.verdict in ("fits", "unknown"):
        return ""
    if outcome.cure is None:
        peak = outcome.plan.sampling if outcome.plan.when == "sampling" else outcome.plan.training
        part = max(peak, key=peak.__getitem__)
        return f"no settings make it fit, the largest part is {part}: choose a smaller model, or a larger machine"
    changes = "" if outcome.cure.same_result else ", which changes what is learned"
    return f"{' '.join(outcome.cure.overrides)} takes {size(outcome.cure.peak)}{changes}"


def figures(outcome: Planned) -> dict[str, Any]:
    """Return the plan for `--json`, all sizes in bytes."""
    known = {"verdict": outcome.verdict, "device": asdict(outcome.device), "shape_from": outcome.source}
    plan, work, cure = outcome.plan, outcome.work, outcome.cure
    if plan is None or work is None:
        return known
    return (
        known
        | asdict(plan)
        | {
            "parameters": work.shape.numbers,
            "peak": plan.peak,
            "peak_in": plan.when,
            "share_of_free_used_at_most": SHARE,
            "assumed": {"prompt_tokens": work.prompt, "row_tokens": work.tokens},
            "fitting": list(cure.overrides) if cure else [],
            "fitting_peak": cure.peak if cure else None,
        }
    )
