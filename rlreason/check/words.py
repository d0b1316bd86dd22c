"""What a finding looks like for a person: numbers, tensors and inputs as short text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

LONGEST = 400


def shown(value: Any) -> str:
    """A value as short text: a tensor as nested lists of four digits.

    >>> shown([1.0, "a", 0.33333333])
    "[1, 'a', 0.3333]"
    """
    if hasattr(value, "detach"):
        text = _numbers(value.detach().tolist())
    elif isinstance(value, float | list | tuple | bool):
        text = _numbers(value)
    else:
        text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _numbers(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_numbers, value))}]"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return f"{value:.4g}" if value else "0"
    return repr(value)


def shown_inputs(inputs: dict[str, Any]) -> dict[str, str]:
    """Every input by name; what has a `told` attribute says itself what it is."""
    out = {}
    for name, value in inputs.items():
        if value is not None and not name.startswith("_"):
            out[name] = value.told if hasattr(value, "told") else shown(value)
    return out


def mask_of(value: Tensor) -> str:
    """A mask as a row of 0 and 1 for each sequence."""
    return "[" + ", ".join("".join("1" if bit else "0" for bit in row) for row in value.tolist()) + "]"
