"""Place vLLM's engines on GPUs, and plan the memory of a run, from plain numbers; imports no torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.model.memory import (
    Workload,
    forward_bytes,
    gradient_bytes,
    in_process_bytes,
    kv_of_token,
    moment_bytes,
    training_bytes,
    vllm_cache,
    weight_bytes,
)
from rlreason.model.shapes import ModelShape
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
        cure = (
            f"set rollout.gpus={visible - first}" if visible > first else "leave rollout.gpus and rollout.placement out"
        )
        raise ConfigError(f"{setting}: GPUs visible here: {visible}, and it takes {first + engines}: {cure}")
    return list(range(first, first + engines))


def describe_placement(placement: str, gpus: Sequence[int], ranks: int) -> str:
    """Describe where the engines run, for the console.

    >>> describe_placement("auto", [0, 1], 1), describe_placement("second_gpu", [1], 1)
    ('rollout.placement=colocate: vLLM runs on GPU 0, 1', 'rollout.placement=second_gpu: vLLM runs on GPU 1')
    """
    hint = f"; rollout.gpus={ranks} samples on all of the policy's" if len(gpus) == 1 and ranks > 1 else ""
    where = placement if placement == "second_gpu" else "colocate"
    return f"rollout.placement={where}: vLLM runs on GPU {', '.join(map(str, gpus))}{hint}"


BUCKET = 256 << 20  # bytes of gradients summed in one call: training/ranks.py
NCCL = 300 << 20  # bytes of its buffers: a guess
#: Bytes of the libraries and their context, whatever the model: guesses on a GPU.
CONTEXT = {"cuda": 600 << 20, "cpu": 500 << 20}
#: What vLLM takes besides weights and cache, CUDA graphs among it: guesses.
VLLM = {"cuda": 1500 << 20, "cpu": 700 << 20}
SHARE = 0.9  # of the free memory that a plan may take: allocators keep unusable fragments

Parts = dict[str, int]  # name -> bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by part, at the peak of training and at that of sampling; a part not held then is left out.

    If nothing is trained, `training` is the scoring of responses, and `trains` is false.
    """

    training: Parts
    sampling: Parts
    trains: bool = True
    other_device: Parts = field(default_factory=dict)  # of an engine with its own GPU
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

    def fits(self, device: Device) -> bool:
        """Whether it leaves a tenth of the free memory, as far as that is known."""
        return device.free is None or self.peak <= SHARE * device.free


def may_be_spread(work: Workload) -> bool:
    """Whether the model can be sharded: 8-bit moments and weights in half precision cannot be divided.

    Nor can a model on a GPU from which the in-process engine samples.
    """
    samples_whole = work.engine == "hf" and work.head.on_gpu
    return work.optimizer == "adamw" and work.weights == 4 and not samples_whole


def plan_of(work: Workload, device: Device) -> Plan:
    """Return the plan on `device`. If several ranks may choose: whole models if those fit, else sharded ones."""
    if work.parallel == "shard" and work.ranks > 1:
        return _plan_of(spread_work(work), device)
    plan = _plan_of(replace(work, parallel="replicate"), device)
    chooses = work.ranks > 1 and work.parallel == "auto" and may_be_spread(work)
    return _plan_of(spread_work(work), device) if chooses and not plan.fits(device) else plan


def spread_work(work: Workload) -> Workload:
    """The workload of ranks that each have a part: casts are not kept, except for a gradient without checkpointing."""
    return replace(work, parallel="shard", casts=work.casts._replace(kept=0))


def _plan_of(work: Workload, device: Device) -> Plan:
    """Plan ranks whose mode is decided: what is always held, and what training and sampling add.

    training: held + gradients + casts + activations + head or layer, or held + gradients in the optimizer's step
    sampling: held + casts + KV cache + decoding; without gradients and activations
    """
    spread = work.parallel == "shard"
    held, step = trainer_parts(work)
    engine = engine_parts(work, device)
    training, sampling = held | step, held | ({} if work.elsewhere else engine)
    if work.engine == "hf" and spread:  # rank 0 samples from its whole copy, in main memory
        sampling = held
    elif work.engine == "hf":
        sampling |= {"cast weights": work.casts.kept}
    elif work.resident and not work.elsewhere:
        training |= engine
    of_vllm = CONTEXT[device.kind] * (1 if work.elsewhere else 2) + VLLM[device.kind]  # it has a process of its own
    base = {"libraries": of_vllm if work.engine == "vllm" and not work.elsewhere else CONTEXT[device.kind]}
    return Plan(
        {name: amount for name, amount in (base | training).items() if amount},
        {name: amount for name, amount in (base | sampling).items() if amount},
        bool(work.trained),
        {"libraries": of_vllm} | engine if work.elsewhere else {},
        work.ranks,
        work.parallel,
        weight_bytes(work.shape, 4) * (2 if work.reference else 1) if spread else 0,
    )


def trainer_parts(work: Workload) -> tuple[Parts, Parts]:
    """Return what a rank holds from the first step to the last, and what a step adds at its peak.

    Several ranks with whole models also take one bucket of gradients, or the largest tensor's, while these are summed.
    Of sharded ones each holds its share, and every weight whole while it computes, with the next layer's: 4 (root +
    2 layer), and in the backward pass a layer's whole gradient twice, 8 layer, or the root's, 8 root. root: numbers of
    embedding, output head and last norm, which are in no layer; layer: of one layer.
    """
    weights, gradients = weight_bytes(work.shape, work.weights), gradient_bytes(work.trained)
    held = {
        "weights": weights + (gradients if work.adapters else 0),
        "moments": moment_bytes(work.trained, work.optimizer) if work.trained else 0,
        "reference model": weights if work.reference else 0,
        "first weights": gradients if work.restarts else 0,
    }
    step = step_parts(work)
    nccl = NCCL if work.head.on_gpu else 0
    if work.ranks == 1:
        return held, step
    if work.parallel != "shard":
        largest = max((4 * numbers for numbers, _ in work.trained), default=0)
        return held, step | {"sum over ranks": max(BUCKET, largest) + nccl}
    root, layer = root_and_layer(work.shape)
    passes = {name: amount for name, amount in step.items() if name != "gradients"}
    backward = max(8 * layer, 8 * root - sum(passes.values())) if work.trained else 0
    shares = {"gradients": -(-gradients // work.ranks)} if work.trained else {}
    gathered = {"gathered weights": 4 * (root + 2 * layer) + backward + nccl}
    return {name: -(-amount // work.ranks) for name, amount in held.items()}, shares | passes | gathered


def root_and_layer(shape: ModelShape) -> tuple[int, int]:
    """Count the numbers outside all layers, and those of one layer."""
    root = shape.width * (shape.vocab * (1 if shape.tied else 2) + 1)
    return root, (shape.numbers - root) // shape.layers


def step_parts(work: Workload) -> Parts:
    """What a step adds at its peak, of a whole model."""
    if not work.trained:  # responses are only scored, without a gradient
        on_top = forward_bytes(work.shape, work.tokens, work.scored, work.products, work.head)
        return {"cast weights": work.casts.every, "logits, head": on_top}
    gradients = gradient_bytes(work.trained)
    activations, casts, on_top = training_bytes(work)
    passes = {"cast weights": casts, "activations": activations, "logits, head": on_top}
    if work.several:
        return {"gradients": gradients} | passes
    # of the only micro-batch they replace its activations
    return {"gradients": gradients} if gradients >= sum(passes.values()) else passes


def held_later(work: Workload) -> int:
    """Bytes that the trainer allocates where vLLM samples, after vLLM has planned its cache: its engine starts first.

    Moments, the reference model and the first weights; if vLLM keeps its memory, also what training adds. Of a sharded
    model the weights too, which come from main memory then, and at least its share of them with what a rank needs to
    receive them: the root, and its largest tensor.
    """
    if work.elsewhere:
        return 0
    held, step = trainer_parts(work)
    later = sum(held.values()) + (sum(step.values()) if work.resident else 0)
    if work.parallel != "shard":
        return later - held["weights"]
    root, _ = root_and_layer(work.shape)
    to_receive = 4 * (root + work.shape.width * work.shape.vocab) + (NCCL if work.head.on_gpu else 0)
    return max(later, held["weights"] + to_receive)


def engine_parts(work: Workload, device: Device) -> Parts:
    """What the engine takes while it samples; one of several with a GPU each.

    vLLM plans its cache once the model's weights are loaded, with a reserve for what comes later.
    """
    if work.engine == "vllm":
        return {
            "engine's weights": work.products * work.shape.numbers,
            "KV cache": planned_cache(work, device)[0],
        }
    cache, beside = max((in_process_bytes(work, request) for request in work.sampled), key=sum, default=(0, 0))
    return {"KV cache": cache, "decoding": beside}


def planned_cache(work: Workload, device: Device) -> tuple[int, int]:
    """Return (bytes of vLLM's cache, bytes of one sequence) as vLLM's start will plan them."""
    s = work.shape
    there = device.second_free if work.elsewhere else device.free
    trainer = 0 if work.elsewhere or work.parallel == "shard" else trainer_parts(work)[0]["weights"]
    free = max(0, (1 << 62 if there is None else there) - trainer - CONTEXT[device.kind])
    room = free - work.products * s.numbers - held_later(work)
    rows = min(work.max_rows, max((-(-sampled.count // work.engines) for sampled in work.sampled), default=1))
    return vllm_cache(kv_of_token(s.layers, s.kv_width, work.products), room, work.longest, rows, work.cache_gb)
