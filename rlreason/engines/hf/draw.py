"""Drawing the next tokens of a batch: one random number a row, no sort, no pass in float64 over the vocabulary."""

import torch
from torch import Tensor

BLOCK = 256  # tokens whose probabilities are summed before the cumulative sum: as many as the vocabulary has blocks


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution at one uniform number per row.

    token = min { v : sum_{w <= v} p(w) > u },  p = softmax(logits / T);  T = 0 takes the most likely token.
    logits (rows, vocab) float32, uniforms (rows,) float64 in [0, 1). Returns token ids (rows,) int64 and their
    natural-log probabilities (rows,) float32 under p (under T = 1 when greedy). No token with p = 0 is drawn.

    >>> ids, lp = draw(torch.tensor([[0.0, float("-inf"), 0.0]]), torch.tensor([0.5], dtype=torch.float64), 1.0)
    >>> ids.tolist(), round(lp.item(), 4)
    ([2], -0.6931)
    """
    if temperature not in (0.0, 1.0):
        logits = logits / temperature
    probs = logits.softmax(-1)
    ids = logits.argmax(-1) if temperature == 0 else _inverted(probs, uniforms)
    return ids, probs.gather(1, ids[:, None])[:, 0].log()


def _inverted(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Which token each uniform number falls on: first in which block of the vocabulary, then where in the block."""
    vocab = probs.shape[1]
    if vocab <= 8 * BLOCK:
        return _first_beyond(probs, uniforms)[0]
    even = vocab - vocab % BLOCK
    blocks = probs[:, :even].unflatten(1, (-1, BLOCK)).sum(-1)
    if even < vocab:
        blocks = torch.cat([blocks, probs[:, even:].sum(-1, keepdim=True)], 1)
    block, within = _first_beyond(blocks, uniforms)
    columns = block[:, None] * BLOCK + torch.arange(BLOCK, device=probs.device)
    inside = probs.gather(1, columns.clamp(max=vocab - 1)).masked_fill_(columns >= vocab, 0.0)
    return block * BLOCK + _first_beyond(inside, within)[0]


def _first_beyond(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The first column with sum_{w <= v} mass(w) > u sum_w mass(w), and which share of its own mass u took.

    masses (rows, columns), uniforms (rows,) float64 in [0, 1]; returns (rows,) int64 and (rows,) float64 in [0, 1].
    """
    cumulative = masses.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Strictly below the total, also where rounding took u to 1, so that what is found has a mass of its own.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    column = torch.searchsorted(cumulative, target, right=True).clamp_(max=masses.shape[1] - 1)
    mass = masses.gather(1, column).double()
    share = (target - cumulative.gather(1, column) + mass) / mass
    return column[:, 0], share[:, 0].clamp_(0.0, 1.0)
