"""Products with weights in float32, without gradient, by the library that is fast on this processor.

torch multiplies float32 matrices with MKL, which uses the widest vector registers of Intel's processors alone: on
others with AVX-512 oneDNN, which torch has too, takes half the time. Sums are of float32 in both.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEAST = 1 << 20  # multiplications from which on oneDNN makes up for its longer call: measured, 64 x 128 x 128


def product(module: nn.Linear, x: Tensor) -> Tensor:
    """What a linear layer returns for x (..., in): (..., out)."""
    return linear(x, module.weight, module.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x (..., in), weight (out, in), bias (out,): the same sum, rounded in another order."""
    large = x.numel() * weight.shape[0] >= LEAST
    if large and x.dtype == weight.dtype == torch.float32 and not torch.is_grad_enabled() and _helps(x.device.type):
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return result
    return F.linear(x, weight, bias)


@contextmanager
def fast_products(model: nn.Module) -> Iterator[None]:
    """In the block the model's linear layers are computed by `linear`, where that helps. Without gradient only."""
    layers = [m for m in model.modules() if type(m) is nn.Linear and _helps(m.weight.device.type)]
    for layer in layers:
        layer.forward = partial(product, layer)  # type: ignore[method-assign]  # of this object alone
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@cache
def _helps(device: str) -> bool:
    """Whether oneDNN is the faster one: on a processor with AVX-512 that Intel did not make."""
    wide = device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not wide or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    described = Path("/proc/cpuinfo")
    return described.exists() and "GenuineIntel" not in described.read_text(errors="replace")
