"""The tensors that functions of log-probabilities and masks are tried on."""

import torch
from torch import Tensor

from rlreason.courses.check.subject import Function, Inputs

#: Log-ratios: on, near and far beyond the clip range, on both sides.
GAPS = (0.0, 0.9, -0.7, 0.12, -0.13, 0.35, -1.4, 1.6, -0.3, 0.05, -0.06, 0.22)


def random(seed: int) -> torch.Generator:
    """A source of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


def ragged_mask(lengths: list[tuple[int, int]], width: int) -> Tensor:
    """(batch, width) bool, true on `length` positions from `start` on, for every (start, length)."""
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (start, length) in enumerate(lengths):
        mask[row, start : start + length] = True
    return mask


def log_probs(rows: int, width: int, seed: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(policy, old) log-probabilities (rows, width); what stands where the mask is false is larger still."""
    policy = -0.2 - 2.5 * torch.rand(rows, width, generator=random(seed))
    gaps = torch.tensor(GAPS)
    order = torch.randint(len(GAPS), (rows, width), generator=random(seed + 1))
    gap = gaps[order]
    if mask is not None:
        policy, gap = policy.where(mask, policy - 3.0), gap.where(mask, 1.7 * gap + 0.4)
    return policy, policy - gap


def advantages(rows: int, seed: int) -> Tensor:
    """(rows, 1), of both signs and different sizes."""
    values = torch.tensor([1.3, -0.8, 0.4, -1.7, 0.9, -0.25, 2.1, -1.1])
    return values.roll(seed)[:rows, None].clone()


def weights_like(value: Tensor) -> Tensor:
    """Fixed numbers between 0.5 and 1.5, one for each element: a gradient with them shows which goes where."""
    return 0.5 + torch.rand(value.shape, generator=random(9), dtype=torch.float32).to(value.dtype)


def gradient(value: Tensor, leaf: Tensor, where: Tensor | None = None) -> Tensor:
    """d sum(weights x value) / d leaf; zeros where there is no way back to it."""
    weighed = weights_like(value) * (value if where is None else value * where.to(value.dtype))
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(weighed.sum(), leaf, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found.detach()


def given(inputs: Inputs) -> Inputs:
    """The inputs that a call is given: what begins with an underscore is the check's own."""
    return {name: value for name, value in inputs.items() if not name.startswith("_")}


Call = Function
