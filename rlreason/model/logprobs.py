"""Log-probabilities and entropies of given tokens without ever holding all logits.

For a vocabulary of 150,000 the logits of one rollout batch are larger than the model. Here the head
is applied to a chunk of positions at a time, forward and again backward, so that at most
`chunk x vocab` logits exist at once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

#: Positions per chunk. 512 x 151,936 float32 logits are 311 MB; smaller chunks waste matmul speed.
CHUNK = 512


class _ChunkedLogProbs(torch.autograd.Function):
    """log softmax(h W^T / T)[y] and its entropy, with logits recomputed chunk by chunk in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, chunk: int, want_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        n = hidden.shape[0]
        log_probs = torch.empty(n, dtype=torch.float32, device=hidden.device)
        log_norm = torch.empty_like(log_probs)
        entropy = torch.empty_like(log_probs) if want_entropy else log_probs.new_zeros(0)
        for start in range(0, n, chunk):
            at = slice(start, start + chunk)
            logits = F.linear(hidden[at], weight).float().div_(temperature)  # (chunk, vocab)
            log_norm[at] = logits.logsumexp(-1)
            log_probs[at] = logits.gather(1, labels[at, None])[:, 0] - log_norm[at]
            if want_entropy:
                probs = (logits - log_norm[at, None]).exp_()
                entropy[at] = log_norm[at] - probs.mul_(logits).sum(-1)
        ctx.save_for_backward(hidden, weight, labels, log_norm, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)  # an entropy that is only measured costs no backward work
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_norm, entropy = ctx.saved_tensors
        grad = torch.zeros_like(log_norm) if grads[0] is None else grads[0]
        grad_entropy = grads[1] if entropy.numel() else None
        grad_hidden = torch.empty_like(hidden)
        # The weight gradient sums over all chunks, so it is kept in float32 whatever the model's dtype.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for start in range(0, hidden.shape[0], ctx.chunk):
            at = slice(start, start + ctx.chunk)
            logits = F.linear(hidden[at], weight).float().div_(ctx.temperature)
            logits -= log_norm[at, None]
            probs = logits.exp()
            # d log p(y) / d logits = onehot(y) - p,    d H / d logits = -p (log p + H)
            grad_logits = probs * -grad[at, None]
            grad_logits.scatter_add_(1, labels[at, None], grad[at, None])
            if grad_entropy is not None:
                grad_logits -= grad_entropy[at, None] * probs * (logits + entropy[at, None])
            grad_logits = grad_logits.div_(ctx.temperature).to(hidden.dtype)
            grad_hidden[at] = grad_logits @ weight
            if grad_weight is not None:
                grad_weight += (grad_logits.t() @ hidden[at]).float()
        weight_grad = None if grad_weight is None else grad_weight.to(weight.dtype)
        return grad_hidden, weight_grad, None, None, None, None


def chunked_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    chunk: int = CHUNK,
    want_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Log-probability of each label and entropy of each distribution softmax(h W^T / T).

        log p(y_t) = z_t[y_t] / T - logsumexp(z_t / T),    H_t = -sum_v p_t(v) log p_t(v)

    hidden (n, width), weight (vocab, width), labels (n,) int64; returns two float32 tensors (n,), in
    nats, whatever the input dtype. Gradients flow through both to `hidden` and `weight`; the entropy is
    empty when `want_entropy` is false.

    >>> h, w = torch.zeros(2, 3), torch.ones(4, 3)
    >>> lp, entropy = chunked_log_probs(h, w, torch.tensor([0, 3]))
    >>> torch.allclose(lp, torch.tensor(0.25).log()) and torch.allclose(entropy, torch.tensor(4.0).log())
    True
    """
    out: tuple[Tensor, Tensor] = _ChunkedLogProbs.apply(hidden, weight, labels, temperature, chunk, want_entropy)
    return out
