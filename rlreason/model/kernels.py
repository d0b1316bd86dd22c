"""Kernels for attention on packed sequences: which of them this machine can use, and how each is called.

A kernel takes queries (tokens, heads, head_dim), keys and values (tokens, kv_heads, head_dim) of sequences that lie
end to end, the offsets at which each begins and ends (sequences + 1,) int32, the longest one's tokens and the scale of
attention scores (None: head_dim ** -0.5).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from rlreason.errors import ConfigError

Kernel = Callable[[Tensor, Tensor, Tensor, Tensor, int, float | None], Tensor]

HALF = (torch.float16, torch.bfloat16)
OLDEST_GPU = (8, 0)  # compute capability of Ampere, the first for which the flash kernels are written


@dataclass(frozen=True, slots=True)
class Hardware:
    """What the choice of a kernel depends on."""

    device: str  # cuda | cpu | ...
    dtype: torch.dtype  # of products
    capability: tuple[int, int] | None = None  # of the GPU
    absent: Mapping[str, str] = field(default_factory=dict)  # kernel -> why it cannot be called, with the cure


def choose_kernel(requested: str, hardware: Hardware) -> tuple[str, str]:
    """(kernel, why that one). `auto` takes torch's variable-length kernel where it runs, and else `sdpa`.

    A kernel that is requested by name and cannot run is a `ConfigError`.

    >>> choose_kernel("auto", Hardware("cpu", torch.float32))
    ('sdpa', 'no GPU')
    >>> choose_kernel("auto", Hardware("cuda", torch.bfloat16, (9, 0)))[0]
    'varlen'
    """
    if requested == "sdpa":
        return "sdpa", "as asked"
    kernel = "varlen" if requested == "auto" else requested
    obstacle, cure = None, "choose model.attention=auto"
    if hardware.device != "cuda":
        obstacle = "no GPU"
    elif hardware.capability is not None and hardware.capability < OLDEST_GPU:
        capability, oldest = ("{}.{}".format(*version) for version in (hardware.capability, OLDEST_GPU))
        obstacle = f"a GPU of compute capability {capability}, below {oldest}"
    elif hardware.dtype not in HALF:
        obstacle = f"products in {str(hardware.dtype).removeprefix('torch.')}"
        cure = "set model.dtype=bfloat16, or model.attention=auto"
    elif hardware.capability is None:
        obstacle = "a GPU of unknown compute capability"
    elif kernel in hardware.absent:
        obstacle = hardware.absent[kernel]
    if obstacle is None:
        return kernel, "as asked" if requested == kernel else "a GPU, in half precision"
    if requested == "auto":
        return "sdpa", obstacle
    raise ConfigError(f"model.attention={requested} cannot run here ({obstacle}): {cure}")


def select_kernel(requested: str, device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    """(kernel, why that one) on this machine, for matrix products in `dtype`."""
    return choose_kernel(requested, detect_hardware(requested, device, dtype))


def detect_hardware(requested: str, device: torch.device, dtype: torch.dtype) -> Hardware:
    """What `choose_kernel` needs to know of this machine; a package is imported only where it is requested."""
    cuda = device.type == "cuda"
    absent = {}
    try:
        from torch.nn.attention import varlen  # noqa: F401
    except ImportError as error:
        absent["varlen"] = f"torch {torch.__version__} has no such kernel: {error}"
    if cuda and requested == "flash_attention_2":
        try:
            from flash_attn import flash_attn_varlen_func  # noqa: F401
        except ImportError as error:  # not installed, or built for another torch
            absent[requested] = (
                f"{error}; pip install --no-build-isolation 'rlreason[flash-attn]' builds it for this torch"
            )
    return Hardware(device.type, dtype, torch.cuda.get_device_capability(device) if cuda else None, absent)


def end_to_end(
    kernel: Kernel, query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, longest: int, scale: float | None
) -> Tensor:
    """Call a kernel with transformers' shapes.

    (1, heads, tokens, head_dim) and (1, kv_heads, tokens, head_dim) -> (1, tokens, heads, head_dim)
    """
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    return kernel(q, k, v, bounds, longest, scale).unsqueeze(0)


def by_torch(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None) -> Tensor:
    """torch's own variable-length flash kernel."""
    from torch.nn.attention.varlen import varlen_attn

    grouped: dict[str, Any] = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if grouped and not _takes_grouped_heads():
        times, grouped = q.shape[1] // k.shape[1], {}
        k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
    out = varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, window_size=(-1, 0), **grouped)
    assert isinstance(out, Tensor)  # the log-sum-exp was not requested
    return out


@cache
def _takes_grouped_heads() -> bool:
    """Whether this torch reads each key head once for all its query heads; up to 2.11 keys must be repeated."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in signature(varlen_attn).parameters


def by_flash_attn(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, longest: int, scale: float | None) -> Tensor:
    """The flash-attn package's kernel; keys may have fewer heads than queries."""
    from flash_attn import flash_attn_varlen_func

    out: Tensor = flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, softmax_scale=scale, causal=True)
    return out


KERNELS: dict[str, Kernel] = {"varlen": by_torch, "flash_attention_2": by_flash_attn}
