"""The memory of a run, in bytes: one formula, as pure functions of plain numbers."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from rlreason.config.model import type_of_head
from rlreason.config.run import RunConfig
from rlreason.model.shapes import Device, ModelShape

CHUNK = 512  # positions whose logits exist at once: model/logprobs.py


class Head(NamedTuple):
    """How a run computes its output head. Sizes are bytes a number."""

    size: int = 4  # of what is multiplied to make logits (model.head)
    products: int = 4  # of what the two products of the backward pass multiply
    trained: bool = True  # its weights get a gradient
    entropy: bool = False  # the entropy gets one too
    on_gpu: bool = False

    @property
    def rounded(self) -> int:
        """Bytes of a number of the operands; off a GPU rounded ones lie in float32. 0: they need no copy."""
        return (2 if self.on_gpu else 4) if self.size == 2 else 0

    @property
    def kept(self) -> int:
        """Bytes that a number of its input takes until the backward pass."""
        return self.rounded or 4


def head_bytes(shape: ModelShape, scored: int, head: Head, with_gradient: bool = True) -> int:
    """The most that the head takes at one time for `scored` positions. n = min(512, scored).

        forward:  2 x 4 n V + r (V d + scored d)
        backward: 4 scored d + 4 V d + max(2 x 4 n V, made) + r V d + 2 (V d + scored d)
        made:     4 n V + 4 V d of float32 products;    6 n V + 2 V d + 4 V d of half-precision ones;
                  6 n V on a GPU, where products of half precision are added to the gradient in place

    The gradient of the weight is a sum over chunks: the sum and one chunk's, which is made when the logits are gone;
    the processor rounds it up before it adds. r: bytes of a rounded operand; the last term only where the backward
    pass rounds what the logits were not made of. `entropy`: 4 n V beside the first of the two. V d with a factor 4:
    only where the head is trained.
    """
    n, v, d = min(CHUNK, scored), shape.vocab, shape.width
    half = head.products == 2
    if not with_gradient:
        return 2 * 4 * n * v + head.rounded * (v * d + scored * d)
    trained = v * d if head.trained else 0
    of_logits = (12 if head.entropy else 8) * n * v
    if half and head.on_gpu:
        made = 6 * n * v
    elif half:
        same = head.size == 2  # its rounded numbers lie in float32, and so does what they make
        made = max(10 * n * v, 8 * n * v + 4 * trained) if same else 6 * n * v + 6 * trained
    else:
        made = 4 * n * v + 4 * trained
    operands = head.rounded * v * d + (2 * (v * d + scored * d) if half and head.size == 4 else 0)
    return 4 * scored * d + 4 * trained + operands + max(of_logits, made)


PROMPT_TOKENS = 8192  # of prompts that the in-process engine reads in one pass: engines/hf/decoding.py
HEADROOM = 64  # columns that a cache without responses gets at most: engines/hf/kv_cache.py
CACHE_BLOCK = (
    128  # tokens: vLLM hands its cache out in blocks of at most this, and each sequence may leave one unfilled
)
SMALLEST_8BIT = 4096  # numbers from which on bitsandbytes keeps moments in one byte
PER_8BIT_BLOCK = 256  # numbers that share a float32 scale there


def weight_bytes(shape: ModelShape, weights: int) -> int:
    """Weights of `weights` bytes each (4 or 2). The output head, and an embedding tied to it, stays float32.

    weights x (numbers - head) + 4 head
    """
    head = shape.vocab * shape.width
    return weights * (shape.numbers - head) + 4 * head


class Casts(NamedTuple):
    """Bytes of the half-precision copies that autocast makes of float32 weights of linear layers, the head's aside."""

    every: int = 0  # of all linear layers: what a pass with gradient holds, which needs them again in its backward pass
    kept: int = 0  # of those that are trained: autocast keeps a copy until its block ends, and of no other weight
    of_layer: int = 0  # of one decoder layer
    largest: int = 0  # of the largest matrix that is not trained: cast anew at each use, and dropped behind it


def cast_bytes(shape: ModelShape, weights: int, products: int, freeze: Sequence[str] = (), rank: int = 0) -> Casts:
    """The copies of `weights` bytes a number that products of fewer bytes need: 2 bytes a number of a linear layer.

    Only weights that require a gradient are kept within a block of autocast (torch/csrc: cached_cast); adapters of
    `rank` leave every weight of the model without one.
    """
    if products >= weights:
        return Casts()
    sizes = {name: 2 * a * b for name, (a, b) in shape.linear_layers().items()}
    frozen = [size for name, size in sizes.items() if rank or _matches(f"{name}.weight", freeze)]
    every = sum(sizes.values())
    return Casts(every, every - sum(frozen), every // shape.layers, max(frozen, default=0))


def trained_tensors(
    shape: ModelShape, weights: int, freeze: Sequence[str] = (), rank: int = 0, targets: Sequence[str] | None = None
) -> list[tuple[int, int]]:
    """(numbers, bytes each) of every tensor that is trained: all but the frozen ones, or the two of every adapter.

    An adapter of rank r on a layer of `in` and `out` numbers has r (in + out), in float32 (arXiv:2106.09685).
    `freeze` and `targets` are patterns on names, as `model.parameters.matching_names` reads them.
    """
    if rank:
        adapted = [size for name, size in shape.linear_layers().items() if _matches(name, targets or ["*"])]
        return [(rank * numbers, 4) for size in adapted for numbers in size]
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    also = {head: ["lm_head.weight"]} if shape.tied else {}
    return [
        (numbers, 4 if name == head else weights)
        for name, numbers in shape.parameters().items()
        if not any(_matches(known, freeze) for known in (name, *also.get(name, [])))
    ]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, p) or fnmatchcase(name, f"*.{p}") for p in patterns)


def gradient_bytes(trained: Sequence[tuple[int, int]]) -> int:
    """One gradient for every trained number, in its own precision."""
    return sum(numbers * size for numbers, size in trained)


def moment_bytes(trained: Sequence[tuple[int, int]], optimizer: str) -> int:
    """Both moments of every trained number: adamw in its precision; adamw_8bit in one byte each, and their scales.

    adamw: 2 size;    adamw_8bit: 2 (1 + 4 / 256), but 8 where a tensor has fewer than 4096 numbers
    """
    if optimizer == "adamw":
        return 2 * gradient_bytes(trained)
    return sum(
        8 * numbers if numbers < SMALLEST_8BIT else 2 * numbers + 8 * -(-numbers // PER_8BIT_BLOCK)
        for numbers, _ in trained
    )


def saved_by_layer(shape: ModelShape, products: int, residual: int = 4) -> int:
    """Bytes that autograd keeps of one token in one layer, with products of `products` bytes a number.

        float32:  4 (6 d + 2 q + 2 k + 4 m + norms + h)
        bfloat16: 4 (4 d + norms_32 + h) + 2 (5 d + 2 q + 2 k + 4 m + norms_16)

    d: width; q, k: all queries and all keys of a token; m: inside the MLP; h: heads (log-sum-exps). A norm keeps what
    comes in and what goes out before its weight; a product keeps its input, which autocast rounds once for each layer
    that reads it (three of attention, two of the MLP). Attention keeps queries, keys, values and outputs; the MLP what
    comes out of gate, of SiLU, of up, and their product. norms: of queries and keys, 2 (q + k) where a model has them,
    half of them in half precision where each head has its own. `residual`: bytes of the stream between the layers,
    2 where weights in half precision are not tied to the float32 head: then 4 (2 d) + 2 (4 d) of each token, since the
    inputs of products need no rounding, or 4 (4 d) + 2 (2 d) where norms stand behind attention and MLP.
    """
    d, q, k, m = shape.width, shape.query_width, shape.kv_width, shape.intermediate
    attended, qk, scales = 2 * q + 2 * k, q + k, shape.heads + 2
    normed = {"none": 0, "head": 2 * qk, "whole": 2 * qk}[shape.qk_norm]
    if products == 4:
        return 4 * (6 * d + attended + normed + 4 * m + scales)
    half = qk if shape.qk_norm == "head" else 0
    if residual == 4:
        return 4 * (4 * d + normed - half + scales) + 2 * (5 * d + attended + 4 * m + half)
    wide, narrow = (4, 2) if shape.qk_norm == "whole" else (2, 4)  # whose norms stand behind attention and MLP
    return 4 * (wide * d + normed - half + scales) + 2 * (narrow * d + attended + 4 * m + half)


def saved_besides(shape: ModelShape, tokens: int, scored: int, kept: int = 4) -> int:
    """Bytes that autograd keeps beside the layers: the last norm and the rotary table in float32, the head's input.

    `kept`: bytes of a number of that input.
    """
    return 4 * tokens * (2 * shape.width + 2 * shape.head_dim + 1) + kept * scored * shape.width


def saved_bytes(
    shape: ModelShape,
    tokens: int,
    scored: int,
    products: int,
    residual: int = 4,
    checkpointing: bool = False,
    kept: int = 4,
) -> int:
    """Activations of a row of `tokens`, `scored` of which predict a response's token.

    With gradient checkpointing a layer keeps its input alone.
    """
    of_layer = residual * shape.width if checkpointing else saved_by_layer(shape, products, residual)
    return shape.layers * tokens * of_layer + saved_besides(shape, tokens, scored, kept)


def backward_bytes(shape: ModelShape, tokens: int, products: int) -> int:
    """What the backward pass of one layer takes for a moment: two gradients inside the MLP, two of the stream."""
    return tokens * (2 * products * shape.intermediate + 4 * shape.width)


def training_bytes(
    shape: ModelShape,
    tokens: int,
    scored: int,
    products: int,
    *,
    residual: int = 4,
    checkpointing: bool = False,
    head: Head = Head(),  # noqa: B008 - a tuple of numbers
    casts: Casts = Casts(),  # noqa: B008 - a tuple of numbers
) -> tuple[int, int, int]:
    """(activations, casts, what comes on top) where a forward and backward pass holds most, without gradients.

    The most is held when the head's backward pass runs; or in that of a layer, where checkpointing has computed it
    again; or at the end, where the gradients of head and embedding, if they are tied, are added. The graph holds the
    casts of all layers; with checkpointing there is none, and they last as long as the forward pass, or a layer's.
    """
    kept = saved_bytes(shape, tokens, scored, products, residual, checkpointing, head.kept)
    waiting = 4 * shape.vocab * shape.width if head.trained and shape.tied else 0
    layer = backward_bytes(shape, tokens, products) + waiting
    of_head = head_bytes(shape, scored, head)
    if not checkpointing:
        return kept, casts.every, max(of_head, layer, 2 * waiting - kept)
    again = tokens * (saved_by_layer(shape, products, residual) - residual * shape.width)
    first = casts.kept + again  # the last layer of the forward pass, whose own numbers are dropped behind it
    return kept, 0, max(of_head, layer + again + casts.of_layer, first, 2 * waiting - kept)


def forward_bytes(shape: ModelShape, tokens: int, scored: int, products: int, head: Head) -> int:
    """A pass that keeps nothing for a gradient: one layer's numbers, and the logits of a chunk."""
    layer = tokens * (3 * products * shape.intermediate + 4 * 3 * shape.width)
    return max(layer, 4 * (tokens + scored) * shape.width + head_bytes(shape, scored, head, with_gradient=False))


def kv_of_token(layers: int, kv_width: int, size: int) -> int:
    """Keys and values of one token in all layers: 2 L k numbers of `size` bytes, k = key heads x their size.

    >>> kv_of_token(28, 2 * 128, 2)
    28672
    """
    return 2 * layers * kv_width * size


def kv_bytes(shape: ModelShape, size: int) -> int:
    """`kv_of_token` of a model's shape."""
    return kv_of_token(shape.layers, shape.kv_width, size)


def in_process_cache(
    shape: ModelShape, rows: int, group: int, prompt: int, response: int, size: int, copies: bool = False
) -> int:
    """The in-process engine's cache: each prompt once for its `group` of rows, each row's response.

        (P prompt + rows (response + 1)) kv,    P = rows / group, rounded up; a compaction holds one layer twice

    `copies`: compiled steps have a copy of the prompt for each row, beside it. engines/hf/kv_cache.py.
    """
    prompts = -(-rows // max(1, group)) + (rows if copies else 0)
    return (prompts * prompt + rows * response) * kv_bytes(shape, size)


def decoding_bytes(
    shape: ModelShape,
    rows: int,
    group: int,
    prompt: int,
    response: int,
    products: int,
    waiting: bool = False,
    head: Head = Head(),  # noqa: B008 - a tuple of numbers
) -> int:
    """What the in-process engine takes beside its cache: the most of a step, a compaction and the reading of prompts.

    Logits twice (before and after a step, or with their softmax), attention scores of a layer three times; or, in a
    compaction, keys of a layer twice more; or the keys, values and numbers of prompts that are read. Of each row, the
    tokens, log-probabilities and random numbers. `waiting`: more responses are asked for than there are rows, so
    prompts are read while the cache is full; else before it has any response.
    """
    columns, prompts = prompt + response, -(-rows // max(1, group))
    logits = 4 * rows * shape.vocab
    operands = head.rounded * shape.vocab * shape.width
    small = 8 * rows * shape.vocab if shape.vocab <= 8 * 256 else 0  # a cumulative sum in float64
    step = max(2 * logits, logits + operands) + small + 3 * 4 * rows * shape.heads * columns
    responses = rows * response * kv_bytes(shape, products)
    compaction = logits + (responses // shape.layers if waiting or response > HEADROOM else 0)
    read = min(PROMPT_TOKENS, prompts * prompt)
    # as they are read, keys are float32, which rotary positions make them, and values as products are
    as_read = prompts * prompt * kv_bytes(shape, 1) * (4 + products) // 2
    reading = logits + as_read + forward_bytes(shape, read, prompts, products, head)
    return rows * (20 * response + 4 * columns) + max(step, compaction, reading - (0 if waiting else responses))


def vllm_cache(
    token: int, weights: int, free: int, max_len: int, max_rows: int, cache_gb: float | None, reserve: int = 0
) -> tuple[int, int]:
    """(bytes of vLLM's cache, bytes that one sequence takes), `token` those of one token.

        one = token (max_len + 128),    cache = max(one, min(one max_rows, 0.4 (free - weights - reserve)))

    As much as `max_rows` sequences of `max_len` tokens need, at most 40% of what the weights leave free, and
    `reserve`, which the trainer takes later; `cache_gb` (of 2^30 bytes) sets it.
    """
    one = token * (max_len + CACHE_BLOCK)
    if cache_gb is not None:
        return int(cache_gb * 2**30), one
    return max(one, min(one * max_rows, int(0.4 * (free - weights - reserve)))), one


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
    casts: Casts = Casts()  # noqa: RUF009 - a tuple of numbers
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
    trained = trained_tensors(shape, weights, model.freeze, lora.rank, lora.targets) if run.trains else []
    head = "model.embed_tokens.weight" if shape.tied else "lm_head.weight"
    frozen_head = lora.rank > 0 or len(trained_tensors(shape, weights, [*model.freeze, head])) == len(trained)
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
        casts=cast_bytes(shape, weights, products, model.freeze if run.trains else (), lora.rank * run.trains),
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
