"""Log-probabilities and entropies of given tokens without ever holding all logits.

For a vocabulary of 150,000 the logits of one rollout batch are larger than the model. Here the head
is applied to a chunk of positions at a time, forward and again backward, so that at most
`chunk x vocab` logits exist at once.
"""

from typing import Any

import torch
from torch import Tensor

from rlreason.model.products import operand, product

#: Positions per chunk. 512 x 151,936 float32 logits are 311 MB; smaller chunks waste matmul speed.
CHUNK = 512
#: The logit of a row that no token has: its probability is 0, and its share of a sum or a gradient is a number.
NEVER = -1e9


def without_padding(logits: Tensor, padded_from: int | None) -> Tensor:
    """The logits (..., vocab), in place, with probability 0 from this id on: rows that are there to fill the matrix."""
    if padded_from is not None:
        logits[..., padded_from:] = NEVER
    return logits


def _logits(hidden: Tensor, weight: Tensor, temperature: float, padded_from: int | None) -> Tensor:
    """Operands (positions, width), (vocab, width) -> a new (positions, vocab) float32, divided by the temperature."""
    logits = product(hidden, weight).float()
    return without_padding(logits if temperature == 1.0 else logits.div_(temperature), padded_from)


def _space(hidden: Tensor, weight: Tensor, chunk: int) -> Tensor:
    """(positions, vocab) float32 that all chunks write into in turn: new memory costs more than what is written."""
    return hidden.new_empty(min(chunk, hidden.shape[0]), weight.shape[0], dtype=torch.float32)


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h W^T / T)[y] and its entropy, with logits recomputed chunk by chunk in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float,
        chunk: int,
        want_entropy: bool,
        head: torch.dtype,
        products: torch.dtype,
        padded_from: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        log_probs = torch.empty(n, dtype=torch.float32, device=hidden.device)
        log_norm = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if want_entropy else log_probs.new_zeros(0)
        space = _space(hidden, weight, chunk)
        rows, factors = operand(hidden, head), operand(weight, head)
        for start in range(0, n, chunk):
            at = slice(start, start + chunk)
            logits = _logits(rows[at], factors, temperature, padded_from)  # (chunk, vocab)
            top = logits.amax(-1, keepdim=True)
            logits -= top
            exp = torch.exp(logits, out=space[: len(logits)])
            total = exp.sum(-1)
            log_total = total.log()
            log_probs[at] = logits.gather(1, labels[at, None])[:, 0] - log_total
            log_norm[at] = top[:, 0] + log_total
            if want_entropy:
                entropy[at] = log_total - exp.mul_(logits).sum(-1) / total
            del logits  # else it is there while the next chunk's is computed
        ctx.save_for_backward(rows, weight, labels, log_norm, entropy)
        ctx.temperature, ctx.chunk, ctx.dtype = temperature, chunk, hidden.dtype
        ctx.head, ctx.products, ctx.padded_from = head, products, padded_from
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs no backward work
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, labels, log_norm, entropy = ctx.saved_tensors
        grad = torch.zeros_like(log_norm) if grads[0] is None else grads[0] / ctx.temperature
        grad_entropy = grads[1] / ctx.temperature if entropy.numel() and grads[1] is not None else None
        grad_hidden = torch.empty_like(rows, dtype=ctx.dtype)
        # The weight gradient sums over all chunks, so it is kept in float32 whatever the dtype of products.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        space = _space(rows, weight, ctx.chunk)
        factors = operand(weight, ctx.head)
        same = ctx.products == ctx.head  # else numbers are rounded for these two products alone
        inputs, slopes = (rows, factors) if same else (rows.to(ctx.products), weight.to(ctx.products))
        for start in range(0, rows.shape[0], ctx.chunk):
            at = slice(start, start + ctx.chunk)
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
            grad_logits = operand(grad_logits, ctx.products) if same else grad_logits.to(ctx.products)
            grad_hidden[at] = product(grad_logits, slopes.t())
            if grad_weight is not None:
                product(grad_logits.t(), inputs[at].t(), add_to=grad_weight)
            del grad_logits  # rounded, it has a memory of its own
        weight_grad = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, weight_grad, None, None, None, None, None, None, None


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    want_entropy: bool = True,
    head: torch.dtype | None = None,
    products: torch.dtype | None = None,
    padded_from: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution softmax(h W^T / T).

        log p(y_t) = z_t[y_t] / T - logsumexp(z_t / T),    H_t = -sum_v p_t(v) log p_t(v)

    hidden (n, width), weight (vocab, width), labels (n,) int64; returns two float32 tensors (n,), in
    nats, whatever the input dtype. Gradients flow through both to `hidden` and `weight`; the entropy is
    empty when `want_entropy` is false.

    `head` is the number type of h and W in the logits' product, there and back (None: that of `hidden`); z, its sums
    and all that is made of them are float32. `products` is the type of what the two products of the backward pass
    multiply (None: `head`): in bfloat16 the gradient of the logits is rounded there, beside h and W, which gives the
    gradients of h and W an error of 0.15% of their norms (random numbers, tests/test_head.py); that of W is summed over
    the positions in float32. The rounding of h and W themselves has the gradient 1. From the id `padded_from` on, rows
    of W belong to no token and have probability 0.

    >>> h, w = torch.zeros(2, 3), torch.ones(4, 3)
    >>> lp, entropy = chunked_log_probs(h, w, torch.tensor([0, 3]))
    >>> torch.allclose(lp, torch.tensor(0.25).log()) and torch.allclose(entropy, torch.tensor(4.0).log())
    True
    """
    head = head or hidden.dtype
    out: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(
        hidden, weight, labels, temperature, chunk, want_entropy, head, products or head, padded_from
    )
    return out
