"""The memory of a run, in bytes: the one formula, as pure functions of a model's shape and of numbers.

What autograd keeps was read from the program and is held against it by tests/test_memory_plan.py on the processor, in
float32 and in bfloat16. On a GPU updates of two models were measured on one H200, and are 1% to 6% above the same sums;
all else is arithmetic there.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from rlreason.memory.head import Head, head_bytes
from rlreason.memory.shapes import ModelShape

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
