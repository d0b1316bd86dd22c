"""What of a run its memory depends on, as plain numbers: read from its settings and its model's shape."""

import os
from dataclasses import dataclass
from typing import Any

from rlreason.config.model import type_of_head
from rlreason.config.run import RunConfig
from rlreason.memory import formula as f
from rlreason.memory.head import Head
from rlreason.memory.machine import Device
from rlreason.memory.shapes import ModelShape

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
    adapters: bool = False  # the trained tensors stand beside the model's own weights
    optimizer: str = "adamw"
    checkpointing: bool = False
    tokens: int = 8192  # of the longest micro-batch
    scored: int = 8192  # those among them that predict a response's token
    casts: f.Casts = f.Casts()  # noqa: RUF009 - a tuple of numbers
    head: Head = Head()  # noqa: RUF009
    several: bool = True  # a step has more than one micro-batch, so gradients are there while the next one runs
    reference: bool = False
    restarts: bool = False
    prompt: int = PROMPT
    sampled: tuple[Sampled, ...] = ()
    max_rows: int = 256
    engine: str = "hf"
    compiled: bool = False
    resident: bool = False  # the engine keeps its memory during training
    elsewhere: bool = False  # the engine has a GPU of its own, or several
    engines: int = 1  # that share what is sampled
    cache_gb: float | None = None
    ranks: int = 1  # processes that train
    parallel: str = "auto"  # what each of them has of the model: replicate | shard | auto: what fits

    @property
    def residual(self) -> int:
        """Bytes of a number between the layers: those of the embedding."""
        return 2 if self.weights == 2 and not self.shape.tied else 4

    @property
    def may_be_spread(self) -> bool:
        """Whether ranks can have a share each: 8-bit moments and weights in half precision cannot be divided.

        Nor can a model on a GPU that the in-process engine samples from.
        """
        samples_whole = self.engine == "hf" and self.head.on_gpu
        return self.optimizer == "adamw" and self.weights == 4 and not samples_whole

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
    on_gpu, products = device.kind == "cuda", 2 if half or weights == 2 else 4
    return Work(
        shape=shape,
        weights=weights,
        products=products,
        trained=tuple(trained),
        adapters=run.trains and lora.rank > 0,
        optimizer=run.optimizes_by or "adamw",
        checkpointing=model.gradient_checkpointing,
        casts=f.cast_bytes(shape, weights, products, model.freeze if run.trains else (), lora.rank * run.trains),
        head=head_of(run, products, on_gpu, not frozen_head, bool(options.get("entropy_coef"))),
        tokens=tokens,
        scored=tokens,
        several=several,
        reference=options.get("kl_placement", "none") != "none",
        restarts=bool(getattr(run, "restarts", False)),
        prompt=prompt,
        sampled=sampled_by(run),
        max_rows=rollout.max_rows,
        engine=rollout.engine,
        compiled=rollout.compile,
        resident=rollout.engine == "vllm" and not (on_gpu and rollout.sleep and rollout.shares_gpu),
        elsewhere=rollout.engine == "vllm" and rollout.placement == "second_gpu",
        engines=engines_of(run),
        cache_gb=rollout.kv_cache_gb,
        ranks=ranks_of(run),
        parallel=str(options.get("parallel", "auto")),
    )


def head_of(run: RunConfig, products: int, on_gpu: bool, trained: bool, entropy: bool) -> Head:
    """How the run computes its output head; in half precision, its backward pass does too."""
    name = type_of_head(run.model.head, run.rollout.engine, "bfloat16" if products == 2 else "float32")
    size = 2 if name == "bfloat16" else 4
    return Head(size, min(size, products), trained, entropy, on_gpu)


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


def engines_of(run: RunConfig) -> int:
    """How many engines of vLLM share what is sampled (rollout.gpus)."""
    return run.rollout.gpus if run.rollout.engine == "vllm" else 1


def ranks_of(run: RunConfig) -> int:
    """How many processes train: those that torchrun has started, else as many as `gpus` says."""
    if not run.trains:
        return 1
    started, gpus = os.environ.get("WORLD_SIZE", ""), str(getattr(run, "gpus", "auto"))
    if started.isdecimal() and os.environ.get("RANK"):
        return max(1, int(started))
    return int(gpus) if gpus.isdecimal() else 1
