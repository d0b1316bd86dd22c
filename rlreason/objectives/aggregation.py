"""From per-token losses to the scalar of an optimizer step: which tokens are averaged, and over what.

The counts are those of the whole optimizer step (all micro-batches, all ranks), so however a step is split, its loss
and gradient are the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # so that the card and the rules need no torch
    from torch import Tensor


def _masked_sum(tensor: Tensor, mask: Tensor, dim: int | None) -> Tensor:
    """Sum where the mask is true; values elsewhere (inf and NaN too) are ignored."""
    kept = tensor.masked_fill(~mask.bool(), 0.0)
    return kept.sum() if dim is None else kept.sum(dim)


def masked_mean(tensor: Tensor, mask: Tensor, dim: int | None = None, empty: Literal["nan", "zero"] = "nan") -> Tensor:
    """Mean where `mask` is true, along `dim` or over all; `empty` is the result for a slice without any.

    >>> import torch
    >>> values, mask = torch.tensor([[1.0, 3.0], [5.0, 7.0]]), torch.tensor([[True, True], [True, False]])
    >>> masked_mean(values, mask, dim=-1)
    tensor([2., 5.])
    """
    count = mask.bool().sum() if dim is None else mask.bool().sum(dim)
    return _masked_sum(tensor, mask, dim) / (count.clamp(min=1) if empty == "zero" else count)


def masked_normalize(tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None = None) -> Tensor:
    """Sum where `mask` is true, along `dim` or over all, divided by `normalize_constant`.

    The example of CS336's section on length normalisation: two responses of 4 and 7 tokens, advantage 2,
    ratio 1, longest possible response 7. The mean gives both responses the same weight, the tokens of the
    shorter one more of it; the constant gives every token the same weight.

    >>> import torch
    >>> mask = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]]).bool()
    >>> ratio = torch.ones(2, 7, requires_grad=True)
    >>> by_mean = masked_mean(ratio * 2, mask, dim=-1)
    >>> by_constant = masked_normalize(ratio * 2, mask, 7, dim=-1)
    >>> by_mean.detach(), by_constant.detach()
    (tensor([2., 2.]), tensor([1.1429, 2.0000]))
    >>> torch.autograd.grad(by_mean.mean(), ratio)[0]
    tensor([[0.2500, 0.2500, 0.2500, 0.2500, 0.0000, 0.0000, 0.0000],
            [0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429]])
    >>> torch.autograd.grad(by_constant.mean(), ratio)[0]
    tensor([[0.1429, 0.1429, 0.1429, 0.1429, 0.0000, 0.0000, 0.0000],
            [0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429, 0.1429]])
    """
    return _masked_sum(tensor, mask, dim) / normalize_constant


def _share(numerator: Tensor, divisor: float | Tensor) -> Tensor:
    """numerator / divisor; a step that counts nothing gives a finite zero that still supports backward."""
    return numerator / divisor if divisor > 0 else numerator * 0.0


#: masked_mean, GRPO (arXiv 2402.03300): every sequence weighs the same; constant, Dr. GRPO (arXiv 2503.20783): a token
#: weighs the same in every step; token, DAPO (arXiv 2503.14476): every token of this step weighs the same.
AGGREGATIONS = ("masked_mean", "constant", "token")


def aggregate_loss(
    per_token_loss: Tensor,
    response_mask: Tensor,
    length_norm: str,
    *,
    n_sequences: float,
    n_tokens: float,
    constant: float | None,
) -> Tensor:
    """This micro-batch's share of the optimizer step's loss. (batch, seq), (batch, seq) bool -> scalar

    `n_sequences` and `n_tokens` count the whole optimizer step over all micro-batches and ranks
    (`step_divisors`); the shares of any split add up to the same loss. A row without response tokens adds 0.

    >>> import torch
    >>> loss, mask = torch.tensor([[6.0, 6.0], [3.0, 9.0]]), torch.tensor([[True, True], [True, False]])
    >>> counts = {"n_sequences": 2, "n_tokens": 3, "constant": 5}
    >>> [aggregate_loss(loss, mask, name, **counts).item() for name in AGGREGATIONS]
    [4.5, 1.5, 5.0]
    """
    if length_norm == "token":
        return _share(_masked_sum(per_token_loss, response_mask, dim=None), n_tokens)
    if length_norm == "masked_mean":
        return _share(masked_mean(per_token_loss, response_mask, dim=-1, empty="zero").sum(), n_sequences)
    if constant is None or constant <= 0:
        raise ValueError(f"constant={constant}: length_norm=constant divides by it; give the longest response length")
    return _share(masked_normalize(per_token_loss, response_mask, constant), n_sequences)


def step_divisors(lengths: Tensor, kept: Tensor, length_norm: str) -> tuple[int, int]:
    """(n_sequences, n_tokens) of an optimizer step.

    lengths (n,) int: response tokens of each sequence; kept (n,) bool: which sequences have loss.

    Sequences without loss (skipped zero-variance groups, masked overlong responses) follow one rule: an average is
    over what it averages, so `masked_mean` and `token` do not count them; a constant stays constant, so `constant`
    counts every sequence. Add the counts of all ranks before use.

    >>> import torch
    >>> lengths, kept = torch.tensor([4, 7, 5]), torch.tensor([True, False, True])
    >>> step_divisors(lengths, kept, "token"), step_divisors(lengths, kept, "constant")
    ((2, 9), (3, 9))
    """
    counted = kept.new_ones(kept.shape) if length_norm == "constant" else kept & (lengths > 0)
    return int(counted.sum()), int(lengths[kept].sum())
