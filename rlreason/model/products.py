"""Products with weights in float32, there and back, by the library that is fast on this processor.

torch multiplies float32 matrices with MKL, which uses the widest vector registers of Intel's processors alone: on
others with AVX-512 oneDNN, which torch has too, takes half the time. Sums are of float32 in both.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# oneDNN, and torch's layer above it, keep a program with its working memory for each of the last 1024 shapes. The
# tokens of a row differ from row to row, so few come again: a third of a run's memory went there. Read at first use.
for _variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_variable, "32")

LEAST = 1 << 20  # multiplications from which on oneDNN makes up for its longer call: measured, 64 x 128 x 128


class Linear(nn.Linear):
    """A linear layer that multiplies by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """input (..., in) -> (..., out)"""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x (..., in), weight (out, in), bias (out,): the same sum, rounded in another order.

    As `F.linear` does, it computes in the dtype that an autocast around it asks for. Differentiable once, and not by
    the transforms of `torch.func`: what asks for more wants torch's own layers, or weights in float64.
    """
    if not _is_for_onednn(x, weight):
        return F.linear(x, weight, bias)
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    if learns:
        result: Tensor = _Linear.apply(x, weight, bias)
        return result
    return _onednn(x, weight, bias)


def operand(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x with its numbers rounded to `dtype`, as `product` takes them: off a GPU half-precision ones lie in float32.

    >>> operand(torch.tensor([1 / 3]), torch.bfloat16)
    tensor([0.3340])
    """
    rounded = x.to(dtype)
    return rounded if x.is_cuda or dtype.itemsize > 2 else rounded.float()


def product(a: Tensor, b: Tensor, add_to: Tensor | None = None) -> Tensor:
    """The output head's product of operands a (n, k) and b (m, k) -> (n, m); added to `add_to`, in place, where given.

        a b^T: out_ij = sum over k of a_ik b_jk

    Numbers in half precision are multiplied on a GPU as they are and summed in float32, which the result has: what
    vLLM's head computes there (0.32: LogitsProcessor._apply_head). The kernel is CUDA's alone. Elsewhere the same
    numbers are float32 (see `operand`), whose products of two of them are exact: the same sum in another order.
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
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            _onednn(grad, weight.t()) if of_x else None,
            _outer(rows, x.reshape(-1, x.shape[-1])) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """a^T b of a (rows, n) and b (rows, m); oneDNN is faster with the smaller one in front."""
    return _onednn(a.t(), b.t()) if a.shape[1] <= b.shape[1] else _onednn(b.t(), a.t()).t()


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    bias = None if bias is None else bias.contiguous()
    result: Tensor = torch.ops.mkldnn._linear_pointwise(_dense(x), _dense(weight), bias, "none", [], "")
    return result


def _dense(x: Tensor) -> Tensor:
    """The same values without gaps: for a slice or an expanded tensor oneDNN takes a thousand times as long."""
    return x if x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous()) else x.contiguous()


def _is_for_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is large enough, in float32, and on a processor where oneDNN is the faster one."""
    return (
        not torch.compiler.is_compiling()  # the compiler chooses by itself
        and x.numel() * weight.shape[0] >= LEAST
        and x.dtype == weight.dtype == torch.float32
        and _helps(x.device.type)
        and not torch.is_autocast_enabled("cpu")
    )


def use_fast_products(model: nn.Module) -> None:
    """From now on the model's linear layers on this processor compute by `linear`, where that helps."""
    for module in model.modules():
        if type(module) is nn.Linear and _helps(module.weight.device.type):
            module.__class__ = Linear


@cache
def _helps(device: str) -> bool:
    """Whether oneDNN is the faster one: on a processor with AVX-512 that Intel did not make."""
    wide = device == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX512"
    if not wide or not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    described = Path("/proc/cpuinfo")
    return described.exists() and "GenuineIntel" not in described.read_text(errors="replace")
