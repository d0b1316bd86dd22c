"""Define the records of a check: cases, faults and bugs, with values and errors as text."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Function = Callable[..., Any]
Inputs = dict[str, Any]
Observed = dict[str, "Tensor"]  # results and gradients of one call, by name
Kind = tuple[str, str]  # of a bug: what is wrong, and where to look; neither gives the solution away

RAISES: Kind = ("it raises an error", "the line that is named")


@dataclass(frozen=True)
class Bug:
    """One bug with the inputs that show it, as it is reported."""

    name: str
    where: str
    yours: str = ""
    ours: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    note: str = ""  # where and when it shows

    def with_inputs(self, inputs: dict[str, str]) -> Bug:
        """Return it with these inputs before its own."""
        return replace(self, inputs=inputs | self.inputs)

    def row(self, function: str) -> dict[str, Any]:
        """Return it as a bug of this function, for --json."""
        shown = {"inputs": self.inputs, "yours": self.yours, "ours": self.ours, "note": self.note}
        return {"function": function, "kind": self.name, "where": self.where, **shown}


class Fault(Exception):  # noqa: N818  # it is a result, not an error of ours
    """The user's function raised, returned another type, or changed its inputs."""

    def __init__(self, name: str, where: str, yours: str = "", ours: str = "") -> None:
        super().__init__(name)
        self.bug = Bug(name, where, yours, ours)


class NotWrittenError(Exception):
    """The user's function raised NotImplementedError or returned None: it is not written yet."""


@dataclass(frozen=True)
class Case:
    """The arguments of one call, by the handout's names."""

    inputs: Inputs
    branch: str = ""  # cases of one branch share a diagnosis, which says so
    meaning: Kind | None = None  # the bug, if no case without a meaning shows one
    as_well: Inputs | None = None  # inputs whose right answer is right here, too


@dataclass(frozen=True)
class Options:
    """What decides an objective, by the names of 2026's train step."""

    importance_reweighting_method: str = "none"  # or noclip, grpo or gspo
    baseline: str = "mean"  # or none
    advantage_normalizer: str = "std"  # or mean or none
    advantage_eps: float = 1e-6
    cliprange: float = 0.2
    loss_normalization: str = "sequence"  # mean of rows' means; constant: masked sum / constant; or constant_mean
    normalization_constant: float = 1.0
    max_grad_norm: float = 1e6
    temperature: float = 1.0
    old_outside: float | None = None  # the old log-probability that was given outside the responses


METHOD_OF = {"no_baseline": "none", "reinforce_with_baseline": "none", "grpo_clip": "grpo"}  # by the name of 2025


def options_of(named: Inputs) -> Options:
    """Return the options among the arguments of a function, or the settings of a loop, of either year."""
    options = {field.name: named[field.name] for field in fields(Options) if field.name in named}
    for name in ("normalize_by_std", "use_std_normalization"):
        if name in named:
            options["advantage_normalizer"] = "std" if named[name] else "none"
    if "normalize_constant" in named:
        options |= {"loss_normalization": "constant_mean", "normalization_constant": named["normalize_constant"]}
    if "loss_type" in named:
        options["importance_reweighting_method"] = METHOD_OF[named["loss_type"]]
    elif "advantages" in named:
        options["importance_reweighting_method"] = "grpo"
    return Options(**options, temperature=named.get("sampling_temperature", 1.0))


LONGEST = 400


def short_text(value: Any) -> str:
    """Return a value as short text: a tensor as nested lists of four digits.

    >>> short_text([1.0, "a", 0.33333333])
    "[1, 'a', 0.3333]"
    """
    if hasattr(value, "description"):
        return str(value.description)
    value = value.detach().tolist() if hasattr(value, "detach") else value
    text = value if isinstance(value, str) else _numbers(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def _numbers(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_numbers, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def their_error(error: BaseException) -> str:
    """Return an error of the user's code as text: its type, its first line, and the line of that code that raised it.

    >>> their_error(ValueError("no sum"))
    'ValueError: no sum'
    """
    text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return text + (f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else "")


def _is_library(file: str) -> bool:
    """Return whether a file is of this package, of an installed one, or of Python itself."""
    roots = (Path(__file__).parent, *(Path(sysconfig.get_path(n)) for n in ("stdlib", "purelib")))
    return file.startswith("<") or "site-packages" in file or any(root in Path(file).parents for root in roots)
