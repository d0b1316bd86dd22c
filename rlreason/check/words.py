"""What a finding looks like for a person: numbers, tensors and inputs as short text."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import Any

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


def their_error(error: BaseException) -> str:
    """An error in the user's code: its kind, its first line, and the last line of that code that it came through.

    >>> their_error(ValueError("no sum"))
    'ValueError: no sum'
    """
    text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__}: {error.msg} ({error.filename}, line {error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return text + (f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else "")


def _is_library(file: str) -> bool:
    """Whether a file is of this package, of an installed one, or of Python itself."""
    roots = (Path(__file__).parents[1] / "check", *(Path(sysconfig.get_path(n)) for n in ("stdlib", "purelib")))
    return file.startswith("<") or "site-packages" in file or any(root in Path(file).parents for root in roots)
