"""The memory plan of a run: which of the formula's parts it has, which are held at the same time, and the two peaks."""

from dataclasses import dataclass, field
from typing import Any

from rlreason.config.run import RunConfig
from rlreason.memory import formula as f
from rlreason.memory.machine import Device
from rlreason.memory.shapes import ModelShape

CONTEXT = {"cuda": 600 << 20, "cpu": 500 << 20}  # bytes of the libraries and their context, whatever the model
VLLM = {
    "cuda": 1500 << 20,
    "cpu": 700 << 20,
}  # what vLLM takes besides weights and cache, CUDA graphs among it; guesses
PROMPT = 384  # tokens that a question is taken to have, before its template, where nobody has measured the prompts
TINY_PROMPT = 128
UNKNOWN_PROBLEMS = 1000


@dataclass(frozen=True, slots=True)
class Sampled:
    """Responses that are asked for at once."""

    count: int
    group: int  # to one prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Work:
    """What of a run its memory depends on, as plain numbers. Sizes are bytes a number, lengths are tokens."""

    shape: ModelShape
    weights: int = 4
    products: int = 4
    trained: tuple[tuple[int, int], ...] = ()  # (numbers, size) of every trained tensor; none: nothing is trained
    trains_head: bool = True
    adapters: bool = False  # the trained tensors stand beside the model's own weights
    optimizer: str = "adamw"
    checkpointing: bool = False
    tokens: int = 8192  # of the longest micro-batch
    scored: int = 8192  # those among them that predict a response's token
    several: bool = True  # a step has more than one micro-batch, so gradients are there while the next one runs
    entropy: bool = False  # its gradient is needed
    reference: bool = False
    restarts: bool = False
    prompt: int = PROMPT
    sampled: tuple[Sampled, ...] = ()
    max_rows: int = 256
    engine: str = "hf"
    compiled: bool = False
    resident: bool = False  # the engine keeps its memory during training
    elsewhere: bool = False  # the engine has a GPU of its own
    cache_gb: float | None = None

    @property
    def residual(self) -> int:
        """Bytes of a number between the layers: those of the embedding."""
        return 2 if self.weights == 2 and not self.shape.tied else 4

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is sampled."""
        return min(self.shape.context, self.prompt + max((s.max_tokens for s in self.sampled), default=0))


def work_of(run: RunConfig, shape: ModelShape, device: Device, prompt: int | None = None) -> Work:
    """The work of a run; `prompt`: tokens of its longest prompt, where they are known."""
    model, rollout, options = run.model, run.rollout, vars(run)
    weights = 2 if model.weights == "bfloat16" else 4
    half = model.dtype == "bfloat16" or (model.dtype == "auto" and device.kind == "cuda" and device.bf16)
    prompt = prompt or (TINY_PROMPT if model.made_on_the_spot else PROMPT)
    lora = model.lora
    trained = f.trained_tensors(shape, weights, model.freeze, lora.rank, lora.targets) if run.trains else []
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    frozen_head = lora.rank > 0 or len(f.trained_tensors(shape, weights, [*model.freeze, head])) == len(trained)
    tokens, several = row_of(run, min(shape.context, prompt + run.sampling.max_tokens))
    on_gpu = device.kind == "cuda"
    return Work(
        shape=shape,
        weights=weights,
        products=2 if half or weights == 2 else 4,
        trained=tuple(trained),
        trains_head=not frozen_head,
        adapters=run.trains and lora.rank > 0,
        optimizer=run.optimizes_by or "adamw",
        checkpointing=model.gradient_checkpointing,
        tokens=tokens,
        scored=tokens,
        several=several,
        entropy=bool(options.get("entropy_coef")),
        reference=options.get("kl_placement", "none") != "none",
        restarts=bool(getattr(run, "restarts", False)),
        prompt=prompt,
        sampled=sampled_by(run),
        max_rows=rollout.max_rows,
        engine=rollout.engine,
        compiled=rollout.compile,
        resident=rollout.engine == "vllm" and not (on_gpu and rollout.sleep and rollout.shares_gpu),
        elsewhere=rollout.engine == "vllm" and rollout.placement == "second_gpu",
        cache_gb=rollout.kv_cache_gb,
    )


def row_of(run: RunConfig, longest: int) -> tuple[int, bool]:
    """(tokens of the longest micro-batch, whether a step may have several); a sequence of `longest` tokens at most."""
    settings: Any = run
    if not run.trains:
        return run.micro_batch_tokens, False
    most = run.micro_batch_tokens if not run.samples_to_learn else min(longest, run.micro_batch_tokens)
    size = settings.sequences_per_micro_batch() or settings.train_batch_size
    tokens = min(run.micro_batch_tokens, size * most)
    return tokens, settings.train_batch_size * most > tokens


def sampled_by(run: RunConfig) -> tuple[Sampled, ...]:
    """What a run asks of its engine at once: in a training step, and in an evaluation."""
    settings: Any = run
    evaluation = run.evaluation
    problems = evaluation.final_problems or run.problems_there or UNKNOWN_PROBLEMS
    asked = Sampled(problems * evaluation.samples, evaluation.samples, evaluation.sampling.max_tokens)
    if not run.samples_to_learn:
        return (asked,)
    return asked, Sampled(run.responses_per_step, settings.group_size, run.sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """Bytes by part, at the peak of training and at that of sampling; a part that is not held then is left out.

    Where nothing is trained, `training` is the scoring of responses, and `trains` is false.
    """

    training: dict[str, int]
    sampling: dict[str, int]
    trains: bool = True
    other_device: dict[str, int] = field(default_factory=dict)  # of an engine with a GPU of its own

    @property
    def peak(self) -> int:
        """Bytes at the higher of the two peaks."""
        return max(sum(self.training.values()), sum(self.sampling.values()))

    @property
    def first(self) -> str:
        """What `training` is in words."""
        return "training" if self.trains else "scoring"

    @property
    def when(self) -> str:
        """Which of the two is the higher one."""
        return self.first if sum(self.training.values()) >= sum(self.sampling.values()) else "sampling"


def plan_of(work: Work, device: Device) -> Plan:
    """The plan: what is always held, and what comes on top in training and in sampling.

    training: held + gradients + casts + activations + head or layer, or held + gradients in the optimizer's step
    sampling: held + casts + KV cache + decoding; without gradients and activations
    held:     weights, moments, the reference model, the first weights of a run that restarts
    """
    held = held_parts(work)
    engine = engine_parts(work, device)
    of_training = held | _training(work)
    of_sampling = held | ({} if work.elsewhere else engine)
    if work.engine == "hf":
        of_sampling |= {"cast weights": f.cast_bytes(work.shape, work.weights, work.products)}
    elif work.resident and not work.elsewhere:
        of_training |= engine
    of_vllm = CONTEXT[device.kind] + VLLM[device.kind]
    base = {"libraries": of_vllm if work.engine == "vllm" and not work.elsewhere else CONTEXT[device.kind]}
    training, sampling = (
        {name: amount for name, amount in parts.items() if amount} for parts in (base | of_training, base | of_sampling)
    )
    return Plan(training, sampling, bool(work.trained), {"libraries": of_vllm} | engine if work.elsewhere else {})


def held_parts(work: Work) -> dict[str, int]:
    """What is held from the first step to the last."""
    weights = f.weight_bytes(work.shape, work.weights)
    return {
        "weights": weights + (f.gradient_bytes(work.trained) if work.adapters else 0),
        "moments": f.moment_bytes(work.trained, work.optimizer) if work.trained else 0,
        "reference model": weights if work.reference else 0,
        "first weights": f.gradient_bytes(work.trained) if work.restarts else 0,
    }


def held_later(work: Work) -> int:
    """Bytes that the trainer takes where vLLM samples, after vLLM has planned its cache: its engine starts before.

    Moments, the reference model and the first weights; where vLLM keeps its memory, what training takes on top as well.
    """
    if work.elsewhere:
        return 0
    held = held_parts(work)
    return sum(held.values()) - held["weights"] + (sum(_training(work).values()) if work.resident else 0)


def _training(work: Work) -> dict[str, int]:
    s, cast = work.shape, f.cast_bytes(work.shape, work.weights, work.products)
    if not work.trained:  # responses are scored, and nothing is kept for a gradient
        return {"cast weights": cast, "logits, head": f.forward_bytes(s, work.tokens, work.scored, work.products)}
    gradients = f.gradient_bytes(work.trained)
    activations, on_top = f.training_bytes(
        s,
        work.tokens,
        work.scored,
        work.products,
        residual=work.residual,
        checkpointing=work.checkpointing,
        trains_head=work.trains_head,
        entropy=work.entropy,
    )
    passes = activations + on_top + cast
    if work.several:
        return {"gradients": gradients, "cast weights": cast, "activations": activations, "logits, head": on_top}
    if gradients >= passes:  # of the only micro-batch: they appear as activations go
        return {"gradients": gradients}
    return {"cast weights": cast, "activations": activations, "logits, head": on_top}


def engine_parts(work: Work, device: Device) -> dict[str, int]:
    """What the engine takes for itself while it samples.

    vLLM plans its cache when the model's weights are loaded, with a reserve for what comes later.
    """
    s = work.shape
    if work.engine == "vllm":
        return {"engine's weights": work.products * s.numbers, "KV cache": planned_cache(work, device)[0]}
    most = {"KV cache": 0, "decoding": 0}
    for asked in work.sampled:
        rows = min(max(work.max_rows // asked.group * asked.group, asked.group), asked.count)
        sizes = rows, asked.group, work.prompt, asked.max_tokens, work.products
        cache = f.in_process_cache(s, *sizes, copies=work.compiled)
        beside = f.decoding_bytes(s, *sizes, waiting=asked.count > rows)
        if cache + beside > sum(most.values()):
            most = {"KV cache": cache, "decoding": beside}
    return most


def planned_cache(work: Work, device: Device) -> tuple[int, int]:
    """(bytes of vLLM's cache, bytes that one sequence takes), as vLLM's start will plan them."""
    kv, weights = f.kv_bytes(work.shape, work.products), work.products * work.shape.numbers
    there = device.second_free if work.elsewhere else device.free
    trainer = 0 if work.elsewhere else held_parts(work)["weights"]
    free = max(0, (1 << 62 if there is None else there) - trainer - CONTEXT[device.kind])
    rows = min(work.max_rows, max((sampled.count for sampled in work.sampled), default=1))
    return f.vllm_cache(kv, weights, free, work.longest, rows, work.cache_gb, held_later(work))
