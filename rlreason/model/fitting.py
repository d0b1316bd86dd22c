"""Place vLLM's engines on GPUs, and plan whether a run fits into memory, from plain numbers; imports no torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.model.memory import (
    Decoding,
    TokenRow,
    Workload,
    decoding_bytes,
    forward_bytes,
    gradient_bytes,
    in_process_cache,
    kv_bytes,
    moment_bytes,
    training_bytes,
    vllm_cache,
    weight_bytes,
)
from rlreason.runtime.machine import Device, place_of


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
        parts = f", {ranks} for the policy and {engines} for vLLM" if apart else ""
        cures = ["leave rollout.gpus out"] if engines > 1 else []
        cures += ["choose auto"] if apart else []
        room = visible - first
        cure = f"set rollout.gpus={room}" if room >= 1 else " and ".join(cures)
        raise ConfigError(f"{setting}: GPUs visible here: {visible}, and it takes {first + engines}{parts}: {cure}")
    return list(range(first, first + engines))


def describe_placement(placement: str, gpus: Sequence[int], ranks: int) -> str:
    """Describe where the engines run, for the console.

    >>> describe_placement("auto", [0], 1)
    "rollout.placement=colocate: vLLM runs on the policy's GPU"
    >>> describe_placement("colocate", [0, 1, 2], 2)
    'rollout.placement=colocate: vLLM runs on GPUs 0, 1, 2; the policy shares 0, 1'
    >>> describe_placement("auto", [0], 4)
    "rollout.placement=colocate: vLLM runs on the policy's first GPU; rollout.gpus=4 samples on all of them"
    >>> describe_placement("second_gpu", [1], 1)
    'rollout.placement=second_gpu: vLLM runs in a process and on a GPU of its own'
    >>> describe_placement("second_gpu", [2, 3], 2)
    'rollout.placement=second_gpu: vLLM runs on GPUs 2, 3, which the policy does not use'
    """
    if placement == "second_gpu":
        if list(gpus) == [1]:
            return "rollout.placement=second_gpu: vLLM runs in a process and on a GPU of its own"
        return f"rollout.placement=second_gpu: vLLM runs on {_listed(gpus)}, which the policy does not use"
    if len(gpus) == 1 and ranks > 1:
        more = f"rollout.gpus={ranks} samples on all of them"
        return f"rollout.placement=colocate: vLLM runs on the policy's first GPU; {more}"
    if len(gpus) == 1:
        return "rollout.placement=colocate: vLLM runs on the policy's GPU"
    shared = ", ".join(str(gpu) for gpu in gpus if gpu < ranks)
    return f"rollout.placement=colocate: vLLM runs on {_listed(gpus)}; the policy shares {shared}"


def _listed(gpus: Sequence[int]) -> str:
    return f"GPU{'s' if len(gpus) > 1 else ''} {', '.join(map(str, gpus))}"


BUCKET = 256 << 20  # bytes of gradients summed in one call: training/ranks.py
NCCL = 300 << 20  # bytes of its buffers: a guess
AT_ONCE = 2  # layers whose weights are whole: the one that computes, and the next one


def on_ranks(
    work: Workload, held: dict[str, int], training: dict[str, int], spread: bool
) -> tuple[dict[str, int], dict[str, int]]:
    """Return (what a rank always holds, what a step adds at its peak), given those of a single process.

    whole:  all of it, and one bucket of gradients, or the largest tensor's, while they are summed at the end
    spread: held / ranks and gradients / ranks, each weight whole while it computes:
            4 (root + 2 layer), and in the backward pass a layer's whole gradient twice, 8 layer, or the root's, 8 root

    root: numbers of embedding, output head and last norm, which are in no layer; layer: of one layer.
    """
    if work.ranks == 1:
        return held, training
    if not spread:
        largest = max((4 * numbers for numbers, _ in work.trained), default=0)
        return held, training | {"sum over ranks": max(BUCKET, largest) + (NCCL if work.head.on_gpu else 0)}
    root, layer = root_and_layer(work)
    divided = {name: -(-amount // work.ranks) for name, amount in held.items()}
    passes = {name: amount for name, amount in training.items() if name != "gradients"}
    gradients = {"gradients": -(-gradient_bytes(work.trained) // work.ranks)} if work.trained else {}
    of_backward = max(8 * layer, 8 * root - sum(passes.values())) if work.trained else 0
    gathered = 4 * (root + AT_ONCE * layer) + of_backward + (NCCL if work.head.on_gpu else 0)
    return divided, gradients | passes | {"gathered weights": gathered}


def root_and_layer(work: Workload) -> tuple[int, int]:
    """Count the numbers outside all layers, and those of one layer."""
    s = work.shape
    root = s.width * (s.vocab * (1 if s.tied else 2) + 1)
    return root, (s.numbers - root) // s.layers


def start_bytes(work: Workload) -> int:
    """Bytes besides its share of the weights that a rank needs to receive them: the root, and its largest tensor."""
    root, _ = root_and_layer(work)
    return 4 * (root + work.shape.width * work.shape.vocab) + (NCCL if work.head.on_gpu else 0)


#: Bytes of the libraries and their context, whatever the model: guesses on a GPU.
CONTEXT = {"cuda": 600 << 20, "cpu": 500 << 20}
#: What vLLM takes besides weights and cache, CUDA graphs among it: guesses.
VLLM = {"cuda": 1500 << 20, "cpu": 700 << 20}
SHARE = 0.9  # of the free memory that a plan may take: allocators keep unusable fragments


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by part, at the peak of training and at that of sampling; a part not held then is left out.

    If nothing is trained, `training` is the scoring of responses, and `trains` is false.
    """

    training: dict[str, int]
    sampling: dict[str, int]
    trains: bool = True
    other_device: dict[str, int] = field(default_factory=dict)  # of an engine with its own GPU
    ranks: int = 1  # that train
    mode: str = "replicate"  # each has the whole model, or a part of it (shard)
    main_memory: int = 0  # bytes besides a GPU's: rank 0's whole copies of sharded models

    @property
    def peak(self) -> int:
        """Bytes at the higher of the two peaks."""
        return max(sum(self.training.values()), sum(self.sampling.values()))

    @property
    def first(self) -> str:
        """The name of the part `training`."""
        return "training" if self.trains else "scoring"

    @property
    def when(self) -> str:
        """The name of the part with the higher peak."""
        return self.first if sum(self.training.values()) >= sum(self.sampling.values()) else "sampling"


def enough(needed: int, free: int | None) -> bool:
    """Whether these bytes leave a tenth of those that are free."""
    return free is None or needed <= SHARE * free


def all_fit(plan: Plan, device: Device) -> bool:
    """Whether both the trainer's part and that of an engine with its own GPU fit."""
    return enough(plan.peak, device.free) and enough(sum(plan.other_device.values()), device.second_free)


def plan_of(work: Workload, device: Device) -> Plan:
    """Return the plan on `device`. If several ranks may choose: whole models if those fit, else sharded ones."""
    whole, spread = replace(work, parallel="replicate"), spread_work(work)
    if work.ranks == 1 or work.parallel != "auto":
        return _plan_of(spread if work.ranks > 1 and work.parallel == "shard" else whole, device)
    plan = _plan_of(whole, device)
    return plan if all_fit(plan, device) or not work.may_be_spread else _plan_of(spread, device)


def spread_work(work: Workload) -> Workload:
    """The workload of ranks that each have a part: casts are not kept, except for a gradient without checkpointing."""
    return replace(work, parallel="shard", casts=work.casts._replace(kept=0))


def _plan_of(work: Workload, device: Device) -> Plan:
    """Plan ranks whose mode is decided: what is always held, and what training and sampling add.

    training: held + gradients + casts + activations + head or layer, or held + gradients in the optimizer's step
    sampling: held + casts + KV cache + decoding; without gradients and activations
    held:     weights, moments, the reference model, the first weights of a run that restarts
    """
    spread = work.parallel == "shard"
    held, training = on_ranks(work, held_parts(work), training_parts(work), spread)
    engine = engine_parts(work, device)
    of_training, of_sampling = held | training, held | ({} if work.elsewhere else engine)
    if work.engine == "hf" and spread:  # rank 0 samples from its whole copy, in main memory
        of_sampling = held
    elif work.engine == "hf":
        of_sampling |= {"cast weights": work.casts.kept + work.casts.largest}
    elif work.resident and not work.elsewhere:
        of_training |= engine
    of_vllm = CONTEXT[device.kind] * (1 if work.elsewhere else 2) + VLLM[device.kind]  # it has a process of its own
    base = {"libraries": of_vllm if work.engine == "vllm" and not work.elsewhere else CONTEXT[device.kind]}
    training, sampling = (
        {name: amount for name, amount in parts.items() if amount} for parts in (base | of_training, base | of_sampling)
    )
    return Plan(
        training,
        sampling,
        bool(work.trained),
        {"libraries": of_vllm} | engine if work.elsewhere else {},
        work.ranks,
        work.parallel,
        weight_bytes(work.shape, 4) * (2 if work.reference else 1) if spread else 0,
    )


def held_parts(work: Workload) -> dict[str, int]:
    """What is held from the first step to the last, of a whole model."""
    weights = weight_bytes(work.shape, work.weights)
    return {
        "weights": weights + (gradient_bytes(work.trained) if work.adapters else 0),
        "moments": moment_bytes(work.trained, work.optimizer) if work.trained else 0,
        "reference model": weights if work.reference else 0,
        "first weights": gradient_bytes(work.trained) if work.restarts else 0,
    }


def held_later(work: Workload) -> int:
    """Bytes that the trainer allocates where vLLM samples, after vLLM has planned its cache: its engine starts first.

    Moments, the reference model and the first weights; if vLLM keeps its memory, also what training adds.
    Of a sharded model the weights too: they come from main memory after vLLM has started, before it first sleeps.
    """
    if work.elsewhere:
        return 0
    spread = work.parallel == "shard"
    held, training = on_ranks(work, held_parts(work), training_parts(work), spread)
    later = sum(held.values()) + (sum(training.values()) if work.resident else 0)
    return max(later, held["weights"] + start_bytes(work)) if spread else later - held["weights"]


def training_parts(work: Workload) -> dict[str, int]:
    """What a step adds at its peak, of a whole model."""
    s = work.shape
    if not work.trained:  # responses are only scored, without a gradient
        on_top = forward_bytes(s, work.tokens, work.scored, work.products, work.head)
        return {"cast weights": work.casts.every, "logits, head": on_top}
    gradients = gradient_bytes(work.trained)
    row = TokenRow(work.tokens, work.scored, work.products, work.residual, work.checkpointing)
    activations, casts, on_top = training_bytes(s, row, work.head, work.casts)
    passes = {"cast weights": casts, "activations": activations, "logits, head": on_top}
    if work.several:
        return {"gradients": gradients} | passes
    if gradients >= sum(passes.values()):  # of the only micro-batch: they replace its activations
        return {"gradients": gradients}
    return passes


def engine_parts(work: Workload, device: Device) -> dict[str, int]:
    """What the engine takes while it samples; one of several with a GPU each.

    vLLM plans its cache once the model's weights are loaded, with a reserve for what comes later.
    """
    s = work.shape
    if work.engine == "vllm":
        return {"engine's weights": work.products * s.numbers, "KV cache": planned_cache(work, device)[0]}
    most = {"KV cache": 0, "decoding": 0}
    for request in work.sampled:
        rows = min(max(work.max_rows // request.group * request.group, request.group), request.count)
        decoding = Decoding(rows, request.group, work.prompt, request.max_tokens)
        cache = in_process_cache(s, decoding, work.products, copies=work.compiled)
        beside = decoding_bytes(s, decoding, work.products, waiting=request.count > rows, head=work.head)
        if cache + beside > sum(most.values()):
            most = {"KV cache": cache, "decoding": beside}
    return most


def planned_cache(work: Workload, device: Device) -> tuple[int, int]:
    """Return (bytes of vLLM's cache, bytes of one sequence) as vLLM's start will plan them."""
    kv, weights = kv_bytes(work.shape, work.products), work.products * work.shape.numbers
    there = device.second_free if work.elsewhere else device.free
    trainer = 0 if work.elsewhere or work.parallel == "shard" else held_parts(work)["weights"]
    free = max(0, (1 << 62 if there is None else there) - trainer - CONTEXT[device.kind])
    per_engine = max((-(-sampled.count // work.engines) for sampled in work.sampled), default=1)
    rows = min(work.max_rows, per_engine)
    return vllm_cache(kv, free - weights - held_later(work), work.longest, rows, work.cache_gb)
