"""Whether two observations of a call are equal up to float32 rounding, and where they first differ."""

import torch
from torch import Tensor

from rlreason.check.subject import Seen

RELATIVE, OF_LARGEST, ABSOLUTE = 2e-4, 2e-5, 1e-6


def places(yours: Tensor, ours: Tensor) -> Tensor:
    """Where two tensors of one shape differ by more than rounding, as bool. NaN equals NaN."""
    a, b = yours.detach().double(), ours.detach().double()
    finite = b[b.isfinite()].abs()
    largest = finite.max() if len(finite) else b.new_zeros(())
    allowed = ABSOLUTE + RELATIVE * b.abs() + OF_LARGEST * largest
    same = ((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan())
    return ~same


def first_difference(yours: Seen, ours: Seen) -> str | None:
    """The name of the first observation that differs, in shape or in value; None: all are equal."""
    for name, right in ours.items():
        got = yours.get(name)
        if got is None or got.shape != right.shape or bool(places(got, right).any()):
            return name
    return None


def clearly_apart(yours: Seen, ours: Seen) -> bool:
    """Whether they differ by more than a hair, so that a counter-example shows it in four digits."""
    for name, right in ours.items():
        got = yours.get(name)
        if got is None or got.shape != right.shape:
            return True
        bad = places(got, right)
        if bool(bad.any()):
            a, b = got.double()[bad], right.double()[bad]
            gap = (a - b).abs() / b.abs().clamp(min=1e-3)
            return bool((~(gap < 0.02)).any())
    return False


def multiple(yours: Tensor, ours: Tensor) -> float | None:
    """The number k with yours = k ours everywhere, where there is one other than 1."""
    a, b = yours.detach().double().flatten(), ours.detach().double().flatten()
    if a.shape != b.shape or not bool(b.any()) or not bool(a.isfinite().all() & b.isfinite().all()):
        return None
    factor = float((a @ b) / (b @ b))
    fits = not bool(places(a, factor * b).any())
    return factor if fits and abs(factor - 1) > 1e-3 else None


def is_wild(value: Tensor) -> bool:
    """Whether it holds infinite values or NaN."""
    return bool((~torch.isfinite(value.detach().double())).any())
