"""From logits to the log-prob of each label and the entropy of each position.

The result is float32 for any model dtype (float64 stays): sums over a vocabulary lose too much in 16 bits.
The plain formulas over full logits, for the courses and as the reference of faster ways. Labels are the next tokens
already: nothing is shifted here.
"""

import torch
from torch import Tensor


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def compute_entropy(logits: Tensor) -> Tensor:
    """H = -sum_v p_v log p_v in nats over the last dimension. (batch, seq, vocab) -> (batch, seq)

    A logit of -inf has p = 0 and adds nothing.

    >>> compute_entropy(torch.zeros(1, 2, 8))
    tensor([[2.0794, 2.0794]])
    """
    log_probs = torch.log_softmax(_at_least_float32(logits), dim=-1)
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(-1)


def gather_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
    """log p(label) at the same position. (batch, seq, vocab), (batch, seq) int64 -> (batch, seq)"""
    log_probs = torch.log_softmax(_at_least_float32(logits), dim=-1)
    return log_probs.gather(-1, labels[..., None])[..., 0]
