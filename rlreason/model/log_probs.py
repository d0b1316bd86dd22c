"""Log-probabilities and entropies of given tokens without ever holding all logits."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# oneDNN, and torch's layer above it, keep a program with its working memory for each of the last 1024 shapes. The
# number of tokens differs from row to row, so few recur: a third of a run's memory went there. Read at first use.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "32")

LEAST = 1 << 20  # from this many multiplications on oneDNN makes up for its longer call: measured, 64 x 128 x 128


class Linear(nn.Linear):
    """A linear layer that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """input (..., in) -> (..., out)"""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x (..., in), weight (out, in), bias (out,): the same sum, rounded in another order.

    Like `F.linear`, it computes in the dtype of an enclosing autocast. Differentiable once, and not by the transforms
    of `torch.func`: for more, use torch's own layers, or weights in float64.
    """
    fast = (
        not torch.compiler.is_compiling()  # the compiler makes its own choice
        and x.numel() * weight.shape[0] >= LEAST
        and x.dtype == weight.dtype == torch.float32
        and _onednn_is_faster(x.device.type)
        and not torch.is_autocast_enabled("cpu")
    )
    multiply: Callable[..., Tensor] = _Linear.apply if fast else F.linear
    return multiply(x, weight, bias)


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round x to `dtype`, in the form that `product` takes: off a GPU half-precision numbers are held in float32.

    >>> operand(torch.tensor([1 / 3]), torch.bfloat16)
    tensor([0.3340])
    """
    rounded = x.to(dtype)
    return rounded if x.is_cuda or dtype.itemsize > 2 else rounded.float()


def product(a: Tensor, b: Tensor, add_to: Tensor | None = None) -> Tensor:
    """The output head's product of operands a (n, k) and b (m, k) -> (n, m); added to `add_to`, in place, if given.

        a b^T: out_ij = sum over k of a_ik b_jk

    On a GPU, half-precision numbers are multiplied as they are and summed in float32, the type of the result, like
    vLLM's head there (0.32: LogitsProcessor._apply_head). Elsewhere the same numbers are float32 (see `operand`).
    """
    if a.is_cuda and a.dtype.itemsize == 2:
        if add_to is None:
            return torch.mm(a, b.t(), out_dtype=torch.float32)
        return torch.addmm(add_to, a, b.t(), out_dtype=torch.float32, out=add_to)
    found = linear(a, b)
    return found if add_to is None else add_to.add_(found)


class _Linear(torch.autograd.Function):
    """y = x W^T + b,   dL/dx = g W,   dL/dW = g^T x,   dL/db = sum of g over rows, where g = dL/dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        grad_weight, rows = None, grad.reshape(-1, grad.shape[-1])
        if of_weight:  # faster with the smaller one first
            a, b = rows.t(), x.reshape(-1, x.shape[-1]).t()
            grad_weight = _onednn(a, b) if len(a) <= len(b) else _onednn(b, a).t()
        return _onednn(grad, weight.t()) if of_x else None, grad_weight, rows.sum(0) if of_bias else None


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply copies without gaps: with a slice or an expanded tensor oneDNN takes a thousand times as long."""
    x, weight = (t if t.dim() == 2 and t.t().is_contiguous() else t.contiguous() for t in (x, weight))
    bias = None if bias is None else bias.contiguous()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def use_fast_products(model: nn.Module) -> None:
    """Make the model's linear layers on this processor compute by `linear`, if that is faster here."""
    for module in model.modules():
        if type(module) is nn.Linear and _onednn_is_faster(module.weight.device.type):
            module.__class__ = Linear


@cache
def _onednn_is_faster(device: str) -> bool:
    """Whether oneDNN is faster: on a processor with AVX-512 not made by Intel."""
    wide = device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    described = Path("/proc/cpuinfo")
    if not wide or not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not described.exists():
        return False
    return "GenuineIntel" not in described.read_text(errors="replace")


#: Positions per chunk. 512 x 151,936 float32 logits are 311 MB; smaller chunks waste matmul speed.
CHUNK = 512
#: The logit of a row without a token: its probability is 0, and its terms in a sum or a gradient stay finite.
NEVER = -1e9


def without_padding(logits: Tensor, padded_from: int | None) -> Tensor:
    """Give the padding rows, from this id on, probability 0 in the logits (..., vocab), in place."""
    if padded_from is not None:
        logits[..., padded_from:] = NEVER
    return logits


def _logits(hidden: Tensor, weight: Tensor, temperature: float, padded_from: int | None) -> Tensor:
    """Operands (positions, width), (vocab, width) -> a new (positions, vocab) float32, divided by the temperature."""
    logits = product(hidden, weight).float()
    return without_padding(logits if temperature == 1.0 else logits.div_(temperature), padded_from)


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h W^T / T)[y] and its entropy, with logits recomputed chunk by chunk in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        types: tuple[torch.dtype, torch.dtype],
        padded_from: int | None,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        log_probs, log_norm, entropy = (torch.empty(n, dtype=torch.float32, device=hidden.device) for _ in range(3))
        # Reused by all chunks: new memory costs more than the writing.
        space = hidden.new_empty(min(CHUNK, n), weight.shape[0], dtype=torch.float32)
        rows, factors = operand(hidden, types[0]), operand(weight, types[0])
        for start in range(0, n, CHUNK):
            at = slice(start, start + CHUNK)
            logits = _logits(rows[at], factors, temperature, padded_from)  # (chunk, vocab)
            top = logits.amax(-1, keepdim=True)
            logits -= top
            exp = torch.exp(logits, out=space[: len(logits)])
            total = exp.sum(-1)
            log_total = total.log()
            log_probs[at] = logits.gather(1, labels[at, None])[:, 0] - log_total
            log_norm[at] = top[:, 0] + log_total
            entropy[at] = log_total - exp.mul_(logits).sum(-1) / total
            del logits  # else it is held while the next chunk's is computed
        ctx.save_for_backward(rows, weight, labels, log_norm, entropy)
        ctx.temperature, ctx.types, ctx.padded_from, ctx.dtype = temperature, types, padded_from, hidden.dtype
        ctx.set_materialize_grads(False)  # no backward work for an entropy that is only measured
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows, weight, labels, log_norm, entropy = ctx.saved_tensors
        head, products = ctx.types
        grad, grad_entropy = (None if given is None else given / ctx.temperature for given in grads)
        if grad is None:
            grad = torch.zeros_like(log_norm)
        grad_hidden = torch.empty_like(rows, dtype=ctx.dtype)
        # The weight gradient sums over all chunks, so it is float32 whatever the dtype of products.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        space = rows.new_empty(min(CHUNK, len(rows)), weight.shape[0], dtype=torch.float32)
        factors = operand(weight, head)
        same = products == head  # else numbers are rounded only for these two products
        inputs, slopes = (rows, factors) if same else (rows.to(products), weight.to(products))
        for start in range(0, len(rows), CHUNK):
            at = slice(start, start + CHUNK)
            logits = _logits(rows[at], factors, ctx.temperature, ctx.padded_from)
            logits -= log_norm[at, None]
            probs = torch.exp(logits, out=space[: len(logits)])
            # d log p(y) / d logits = onehot(y) - p,    d H / d logits = -p (log p + H)
            if grad_entropy is None:
                grad_logits = probs.mul_(-grad[at, None])
            else:
                by_entropy = (logits + entropy[at, None]).mul_(grad_entropy[at, None])
                grad_logits = probs.mul_(by_entropy.add_(grad[at, None]).neg_())
                del by_entropy
            del logits  # before the products below, and before the next chunk's
            grad_logits.scatter_add_(1, labels[at, None], grad[at, None])
            grad_logits = operand(grad_logits, products) if same else grad_logits.to(products)
            grad_hidden[at] = product(grad_logits, slopes.t())
            if grad_weight is not None:
                product(grad_logits.t(), inputs[at].t(), add_to=grad_weight)
            del grad_logits  # rounded, it has its own memory
        weight_grad = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, weight_grad, None, None, None, None


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    types: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    padded_from: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution softmax(h W^T / T).

        log p(y_t) = z_t[y_t] / T - logsumexp(z_t / T),    H_t = -sum_v p_t(v) log p_t(v)

    hidden (n, width), weight (vocab, width), labels (n,) int64; returns two float32 tensors (n,), in nats. Gradients
    flow through both to `hidden` and `weight`.

    `types`: first that of h and W in the logits' product, there and back; z and its sums are float32. Then that of what
    the two products of the backward pass multiply: in bfloat16 the gradients of h and W have an error of 0.15% of their
    norms (random numbers, tests/test_head.py); that of W is summed in float32. From the id `padded_from` on, rows of W
    belong to no token and have probability 0.

    >>> h, w = torch.zeros(2, 3), torch.ones(4, 3)
    >>> lp, entropy = chunked_log_probs(h, w, torch.tensor([0, 3]))
    >>> torch.allclose(lp, torch.tensor(0.25).log()) and torch.allclose(entropy, torch.tensor(4.0).log())
    True
    """
    out: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(hidden, weight, labels, temperature, types, padded_from)
    return out
