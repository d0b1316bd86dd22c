"""The memory of a run, in bytes: one formula, as pure functions of plain numbers."""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from rlreason.config.model import type_of_head
from rlreason.config.run import UNKNOWN_PROBLEMS, RunConfig
from rlreason.model.shapes import ModelShape
from rlreason.runtime.machine import Device, place_of

CHUNK = 512  # positions whose logits exist at once: model/log_probs.py
PROMPT_TOKENS = 8192  # of prompts read in one pass of the in-process engine: engines/hf/decoding.py
HEADROOM = 64  # most columns of a cache without responses: engines/hf/kv_cache.py
CACHE_BLOCK = 128  # tokens: vLLM allocates its cache in blocks of at most this; each sequence may leave one unfilled
SMALLEST_8BIT = 4096  # from this many numbers on, bitsandbytes keeps moments in one byte
PER_8BIT_BLOCK = 256  # numbers that share a float32 scale there
PROMPT = 384  # tokens assumed for a question without its template, until the prompts are measured
TINY_PROMPT = 128


class Head(NamedTuple):
    """How a run computes its output head. Sizes are bytes per number."""

    size: int = 4  # of the operands of the logits (model.head)
    products: int = 4  # of the operands of the backward pass's two products
    trained: bool = True  # its weights have a gradient
    entropy: bool = False  # so has the entropy
    on_gpu: bool = False

    @property
    def rounded(self) -> int:
        """Bytes of an operand's number; off a GPU rounded ones are held in float32. 0: no copy needed."""
        return (2 if self.on_gpu else 4) if self.size == 2 else 0


class Casts(NamedTuple):
    """Bytes of autocast's half-precision copies of the linear layers' float32 weights, without the head."""

    every: int = 0  # of all of them: held by a pass with gradient, whose backward pass needs them again
    kept: int = 0  # in a pass without: those of trained weights, which autocast keeps, and the largest other


@dataclass(frozen=True, slots=True)
class Sampled:
    """Responses requested at once."""

    count: int
    group: int  # per prompt
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The memory-relevant settings of a run, as plain numbers. Sizes are bytes per number, lengths are tokens."""

    shape: ModelShape
    weights: int = 4
    products: int = 4
    trained: tuple[tuple[int, int], ...] = ()  # (numbers, size) of every trained tensor; empty: nothing is trained
    adapters: bool = False  # the trained tensors are separate from the model's weights
    optimizer: str = "adamw"
    checkpointing: bool = False
    tokens: int = 8192  # of the longest micro-batch
    scored: int = 8192  # those of them that predict a response token
    casts: Casts = Casts()  # noqa: RUF009 - a tuple of numbers
    head: Head = Head()  # noqa: RUF009
    several: bool = True  # a step has more than one micro-batch, so gradients are held while the next one runs
    reference: bool = False
    restarts: bool = False
    prompt: int = PROMPT
    sampled: tuple[Sampled, ...] = ()
    max_rows: int = 256
    engine: str = "hf"
    compiled: bool = False
    resident: bool = False  # the engine keeps its memory during training
    elsewhere: bool = False  # the engine has its own GPU, or several
    engines: int = 1  # that share the sampling
    cache_gb: float | None = None
    ranks: int = 1  # processes that train
    parallel: str = "auto"  # replicate | shard | auto: what fits

    @property
    def residual(self) -> int:
        """Bytes per number between the layers: those of the embedding."""
        return 2 if self.weights == 2 and not self.shape.tied else 4

    @property
    def longest(self) -> int:
        """Tokens of the longest sampled sequence."""
        return min(self.shape.context, self.prompt + max((s.max_tokens for s in self.sampled), default=0))


def workload_of(run: RunConfig, shape: ModelShape, device: Device, prompt: int | None = None) -> Workload:
    """Return the workload of a run; `prompt`: tokens of its longest prompt, if known."""
    settings: Any = run
    model, rollout, options, trains = run.model, run.rollout, vars(run), run.trains
    on_gpu, weights = device.kind == "cuda", 2 if model.weights == "bfloat16" else 4
    half = model.dtype == "bfloat16" or (model.dtype == "auto" and on_gpu and device.bf16)
    products = 2 if half or weights == 2 else 4
    head = type_of_head(model.head, rollout.engine, "bfloat16" if products == 2 else "float32")
    head_size = 2 if head == "bfloat16" else 4
    rank, freeze = (model.lora.rank, model.freeze) if trains else (0, ())
    frozen_head = rank > 0 or is_frozen(shape, "model.embed_tokens.weight" if shape.tied else "lm_head.weight", freeze)
    prompt = prompt or (TINY_PROMPT if model.made_on_the_spot else PROMPT)
    tokens = most = run.micro_batch_tokens
    several = False
    if trains:
        if run.samples_to_learn:
            most = min(most, shape.context, prompt + run.sampling.max_tokens)
        size = settings.sequences_per_micro_batch() or settings.train_batch_size
        tokens = min(tokens, size * most)
        several = settings.train_batch_size * most > tokens
    evaluation = run.evaluation
    problems = evaluation.final_problems or run.problems_there or UNKNOWN_PROBLEMS
    sampled = [Sampled(problems * evaluation.samples, evaluation.samples, evaluation.sampling.max_tokens)]
    if run.samples_to_learn:
        sampled.append(Sampled(run.responses_per_step, settings.group_size, run.sampling.max_tokens))
    place = place_of()
    return Workload(
        shape=shape,
        weights=weights,
        products=products,
        trained=tuple(trained_tensors(shape, weights, freeze, rank, model.lora.targets)) if trains else (),
        adapters=rank > 0,
        optimizer=run.optimizes_by or "adamw",
        checkpointing=model.gradient_checkpointing,
        casts=cast_bytes(shape, weights, products, freeze, rank),
        head=Head(head_size, min(head_size, products), not frozen_head, bool(options.get("entropy_coef")), on_gpu),
        tokens=tokens,
        scored=tokens,
        several=several,
        reference=options.get("kl_placement", "none") != "none",
        restarts=bool(getattr(run, "restarts", False)),
        prompt=prompt,
        sampled=tuple(sampled),
        max_rows=rollout.max_rows,
        engine=rollout.engine,
        compiled=rollout.compile,
        resident=rollout.engine == "vllm" and not (on_gpu and rollout.sleep and rollout.shares_gpu),
        elsewhere=rollout.engine == "vllm" and rollout.placement == "second_gpu",
        engines=rollout.gpus if rollout.engine == "vllm" else 1,
        cache_gb=rollout.kv_cache_gb,
        ranks=(place.world if place else run.ranks_requested) if trains else 1,
        parallel=str(options.get("parallel", "auto")),
    )


def weight_bytes(shape: ModelShape, weights: int) -> int:
    """Weights of `weights` bytes each (4 or 2). The output head, and an embedding tied to it, stays float32.

    weights x (numbers - head) + 4 head
    """
    head = shape.vocab * shape.width
    return weights * (shape.numbers - head) + 4 * head


def is_frozen(shape: ModelShape, name: str, freeze: Sequence[str]) -> bool:
    """Whether a weight's name, or the other name of a tied embedding, matches a pattern of `model.freeze`."""
    names = [name, "lm_head.weight"] if shape.tied and name == "model.embed_tokens.weight" else [name]
    return any(matches(known, freeze) for known in names)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a shell pattern matches the name entirely or from a dot on."""
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"*.{p}") for p in patterns)


def cast_bytes(shape: ModelShape, weights: int, products: int, freeze: Sequence[str] = (), rank: int = 0) -> Casts:
    """Bytes of the copies for products of half precision: 2 per number of a linear layer, if its weights are wider.

    Only weights that require a gradient are kept within a block of autocast (torch/csrc: cached_cast); adapters of
    `rank` leave every weight of the model without one.
    """
    if products >= weights:
        return Casts()
    sizes = {name: 2 * a * b for name, (a, b) in shape.linear_layers().items()}
    frozen = [size for name, size in sizes.items() if rank or matches(f"{name}.weight", freeze)]
    every = sum(sizes.values())
    return Casts(every, every - sum(frozen) + max(frozen, default=0))


def trained_tensors(
    shape: ModelShape, weights: int, freeze: Sequence[str] = (), rank: int = 0, targets: Sequence[str] | None = None
) -> list[tuple[int, int]]:
    """List (numbers, bytes each) of every trained tensor: all but the frozen ones, or the two of every adapter.

    An adapter of rank r on a layer of `in` and `out` numbers has r (in + out), in float32 (arXiv:2106.09685).
    """
    if rank:
        adapted = [size for name, size in shape.linear_layers().items() if matches(name, targets or ["*"])]
        return [(rank * numbers, 4) for size in adapted for numbers in size]
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    every = shape.parameters().items()
    return [(count, 4 if name == head else weights) for name, count in every if not is_frozen(shape, name, freeze)]


def gradient_bytes(trained: Sequence[tuple[int, int]]) -> int:
    """One gradient for every trained number, in its own precision."""
    return sum(numbers * size for numbers, size in trained)


def moment_bytes(trained: Sequence[tuple[int, int]], optimizer: str) -> int:
    """Both moments of every trained number: adamw in its precision; adamw_8bit in one byte each, and their scales.

    adamw: 2 size;    adamw_8bit: 2 (1 + 4 / 256), but 8 where a tensor has fewer than 4096 numbers
    """
    if optimizer == "adamw":
        return 2 * gradient_bytes(trained)
    return sum(8 * n if n < SMALLEST_8BIT else 2 * n + 8 * -(-n // PER_8BIT_BLOCK) for n, _ in trained)


def head_bytes(shape: ModelShape, scored: int, head: Head, with_gradient: bool = True) -> int:
    """Peak bytes of the head for `scored` positions. n = min(512, scored).

        forward:  2 x 4 n V + r (V d + scored d)
        backward: 4 scored d + 4 V d + max(2 x 4 n V, made) + r V d + 2 (V d + scored d)
        made:     4 n V + 4 V d of float32 products;    6 n V + 2 V d + 4 V d of half-precision ones;
                  6 n V on a GPU, where products of half precision are added to the gradient in place

    The gradient of the weight is the sum over chunks and one chunk's, made when the logits are gone; the processor
    rounds it up before it adds. r: bytes of a rounded operand; the last term only where the backward pass rounds what
    the logits were not made of. Entropy: 4 n V beside the logits. V d with a factor 4: only of a trained head.
    """
    n, v, d = min(CHUNK, scored), shape.vocab, shape.width
    half = head.products == 2
    if not with_gradient:
        return 2 * 4 * n * v + head.rounded * (v * d + scored * d)
    trained = v * d if head.trained else 0
    of_logits = (12 if head.entropy else 8) * n * v
    if half and head.on_gpu:
        made = 6 * n * v
    elif half and head.size == 2:  # its rounded numbers are held in float32, and so are their products
        made = max(10 * n * v, 8 * n * v + 4 * trained)
    elif half:
        made = 6 * n * v + 6 * trained
    else:
        made = 4 * n * v + 4 * trained
    operands = head.rounded * v * d + (2 * (v * d + scored * d) if half and head.size == 4 else 0)
    return 4 * scored * d + 4 * trained + operands + max(of_logits, made)


def saved_by_layer(shape: ModelShape, products: int, residual: int = 4) -> int:
    """Bytes that autograd keeps of one token in one layer, with products of `products` bytes a number.

        float32:  4 (6 d + 2 q + 2 k + 4 m + norms + h)
        bfloat16: 4 (4 d + norms_32 + h) + 2 (5 d + 2 q + 2 k + 4 m + norms_16)

    d: width; q, k: all queries and all keys of a token; m: inside the MLP; h: heads (log-sum-exps). A norm keeps its
    input and its output before the weight; a product keeps its input, which autocast rounds once for each layer
    that reads it (three of attention, two of the MLP). Attention keeps queries, keys, values and outputs; the MLP the
    outputs of gate, SiLU and up, and their product. norms: of queries and keys, 2 (q + k) if a model has them,
    half of them in half precision if each head has its own. `residual`: bytes of the stream between the layers,
    2 if weights in half precision are not tied to the float32 head: then 4 (2 d) + 2 (4 d) of each token, since the
    inputs of products need no rounding, or 4 (4 d) + 2 (2 d) with norms after attention and MLP.
    """
    d, q, k, m = shape.width, shape.query_width, shape.kv_width, shape.intermediate
    attended, scales = 2 * q + 2 * k, shape.heads + 2
    normed = 0 if shape.qk_norm == "none" else 2 * (q + k)
    if products == 4:
        return 4 * (6 * d + attended + normed + 4 * m + scales)
    half = q + k if shape.qk_norm == "head" else 0
    wide, narrow = (4, 5) if residual == 4 else (4, 2) if shape.qk_norm == "whole" else (2, 4)
    return 4 * (wide * d + normed - half + scales) + 2 * (narrow * d + attended + 4 * m + half)


def saved_bytes(work: Workload) -> int:
    """Activations of a row. With gradient checkpointing a layer keeps only its input.

    Besides the layers, the last norm and the rotary table in float32, and the head's input.
    """
    s = work.shape
    of_layer = work.residual * s.width if work.checkpointing else saved_by_layer(s, work.products, work.residual)
    besides = 4 * work.tokens * (2 * s.width + 2 * s.head_dim + 1) + (work.head.rounded or 4) * work.scored * s.width
    return s.layers * work.tokens * of_layer + besides


def training_bytes(work: Workload) -> tuple[int, int, int]:
    """Return (activations, casts, further bytes) at the peak of a forward and backward pass, without gradients.

    The peak is in the head's backward pass; or in that of a layer, once checkpointing has recomputed it; or at the
    end, where the gradients of tied head and embedding are added. The graph holds the casts of all layers; with
    checkpointing they last as long as the forward pass, or a layer's.
    """
    s, kept = work.shape, saved_bytes(work)
    waiting = 4 * s.vocab * s.width if work.head.trained and s.tied else 0
    # in one layer's backward pass, two gradients inside the MLP and two of the stream
    layer = work.tokens * (2 * work.products * s.intermediate + 4 * s.width) + waiting
    of_head = head_bytes(s, work.scored, work.head)
    if not work.checkpointing:
        return kept, work.casts.every, max(of_head, layer, 2 * waiting - kept)
    again = work.tokens * (saved_by_layer(s, work.products, work.residual) - work.residual * s.width)
    first = work.casts.kept + again  # the last layer of the forward pass, whose own numbers are dropped after it
    return kept, 0, max(of_head, layer + again + work.casts.every // s.layers, first, 2 * waiting - kept)


def forward_bytes(shape: ModelShape, tokens: int, scored: int, products: int, head: Head) -> int:
    """A pass without gradients: one layer's numbers, and the logits of a chunk."""
    layer = tokens * (3 * products * shape.intermediate + 4 * 3 * shape.width)
    return max(layer, 4 * (tokens + scored) * shape.width + head_bytes(shape, scored, head, with_gradient=False))


def kv_of_token(layers: int, kv_width: int, size: int) -> int:
    """Keys and values of one token in all layers: 2 L k numbers of `size` bytes, k = key heads x their size.

    >>> kv_of_token(28, 2 * 128, 2)
    28672
    """
    return 2 * layers * kv_width * size


def in_process_bytes(work: Workload, request: Sampled) -> tuple[int, int]:
    """Return the bytes of (the in-process engine's cache, what it takes beside it at its peak) for a request.

        cache = (P prompt + rows response) kv,    P = rows / group, rounded up; one more for each row if compiled

    Beside it: logits twice (before and after a step, or with their softmax), attention scores of a layer three times;
    or, in a compaction, keys of a layer twice more; or the keys, values and numbers of prompts being read, while the
    cache is full if more responses are requested than there are rows. Of each row, the tokens, log-probabilities and
    random numbers. engines/hf/kv_cache.py.
    """
    s, group, response, prompt = work.shape, max(1, request.group), request.max_tokens, work.prompt
    rows = min(max(work.max_rows // group * group, group), request.count)
    prompts, columns, waiting = -(-rows // group), prompt + response, request.count > rows
    token = kv_of_token(s.layers, s.kv_width, work.products)
    responses = rows * response * token
    cache = (prompts + (rows if work.compiled else 0)) * prompt * token + responses
    logits = 4 * rows * s.vocab
    small = 8 * rows * s.vocab if s.vocab <= 8 * 256 else 0  # a cumulative sum in float64
    operands = work.head.rounded * s.vocab * s.width
    step = max(2 * logits, logits + operands) + small + 3 * 4 * rows * s.heads * columns
    compaction = logits + (responses // s.layers if waiting or response > HEADROOM else 0)
    read = min(PROMPT_TOKENS, prompts * prompt)
    # while being read, keys are float32, because of rotary positions, and values have the products' type
    as_read = prompts * prompt * kv_of_token(s.layers, s.kv_width, 1) * (4 + work.products) // 2
    reading = logits + as_read + forward_bytes(s, read, prompts, work.products, work.head)
    beside = max(step, compaction, reading - (0 if waiting else responses))
    return cache, rows * (20 * response + 4 * columns) + beside


def vllm_cache(token: int, room: int, max_len: int, max_rows: int, cache_gb: float | None) -> tuple[int, int]:
    """Return (bytes of vLLM's cache, bytes of one sequence); `token`: bytes of one token.

        one = token (max_len + 128),    cache = max(one, min(one max_rows, 0.4 room))

    As much as `max_rows` sequences of `max_len` tokens need, at most 40% of `room`: of what is free without the weights
    and what the trainer takes later. `cache_gb` (of 2^30 bytes) overrides it.
    """
    one = token * (max_len + CACHE_BLOCK)
    if cache_gb is not None:
        return int(cache_gb * 2**30), one
    return max(one, min(one * max_rows, int(0.4 * room))), one
