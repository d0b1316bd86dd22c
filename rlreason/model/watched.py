"""Whether an update reached the weights, and whether the optimizer's moments are numbers: what an update leaves behind.

A few elements of each tensor are looked at, because a copy of all weights would double their memory.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

ELEMENTS = 64  # of each tensor


@torch.no_grad()
def sampled_elements(tensors: Iterable[Tensor], most: int = ELEMENTS) -> list[Tensor]:
    """Copies of up to `most` elements of each tensor, spread evenly over it; the same ones in every call."""
    here = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)  # what this process has of it
    return [t.detach().reshape(-1)[:: max(1, -(-t.numel() // most))].clone() for t in here]


@torch.no_grad()
def changed_share(before: Sequence[Tensor], after: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """The share of the elements with a gradient that differ, averaged over the tensors that have any -> scalar.

    Rows of an embedding whose token did not occur have none. NaN where no element has a gradient.

    >>> ones = torch.ones(2)
    >>> changed_share([torch.zeros(2), torch.zeros(2)], [torch.tensor([0.0, 1.0]), torch.zeros(2)], [ones, 0 * ones])
    tensor(0.5000)
    """
    moved = [((a != b) & (g != 0)).sum() / (g != 0).sum() for a, b, g in zip(before, after, gradients, strict=True)]
    return torch.stack(moved).nanmean() if moved else torch.tensor(torch.nan)


@torch.no_grad()
def not_finite(states: Iterable[dict[str, Any]]) -> set[int]:
    """The numbers of the parameters of which an optimizer keeps a floating-point moment that is not all numbers."""
    kept = [[t for t in state.values() if isinstance(t, Tensor) and t.is_floating_point()] for state in states]
    owners = [n for n, tensors in enumerate(kept) for _ in tensors]
    if not owners:
        return set()
    norms = torch._foreach_norm([t.detach() for tensors in kept for t in tensors], ord=torch.inf)
    finite = torch.isfinite(torch.stack([norm.float().cpu() for norm in norms])).tolist()
    return {owner for owner, good in zip(owners, finite, strict=True) if not good}
