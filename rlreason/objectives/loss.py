"""What a loss is to the rest of the project: a function of tensors, its formula, and what is said of its numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from rlreason.types import Range

if TYPE_CHECKING:  # so that --help, the card and the rules need no torch
    from torch import Tensor

    LossAndStats = tuple[Tensor, dict[str, Tensor]]

RHO = r"\rho_t = \frac{\pi_\theta(y_t)}{\pi_{old}(y_t)},\quad "  # what \rho_t means, before a formula that uses it


class Formula(NamedTuple):
    """The loss of one token: in plain text, in LaTeX, and what a reader should know of it."""

    plain: str
    latex: str
    note: str


@dataclass(frozen=True)
class Loss:
    """A loss function with what is said about it.

    The function returns the loss of each token, (batch, seq), alone or with statistics of that shape by name. What it
    reads follows from the function's signature: `old_log_probs` and `response_mask` are parameters where it
    does, and each number of its own is a keyword-only parameter, which becomes the setting `loss.NUMBER`. A number with
    a default may be left out.
    """

    function: Callable[..., LossAndStats | Tensor]
    formula: Callable[..., Formula]  # of the numbers, by name
    ranges: Mapping[str, Range] = field(default_factory=dict)  # of each number
    problems: Callable[..., list[str]] = lambda **numbers: []  # rules between numbers, one line each
    published: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # title -> numbers, and axes unlike GRPO's
    notes: tuple[str, ...] = ()  # where libraries or papers of that name differ

    def __post_init__(self) -> None:
        if odd := self.numbers.keys() ^ self.ranges.keys():
            raise ValueError(
                f"loss {self.function.__name__}: {', '.join(sorted(odd))}: ranges needs a line for every keyword-only "
                "parameter of the function, and no other"
            )

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.function).parameters

    @cached_property
    def numbers(self) -> dict[str, bool]:
        """The names of its numbers, and whether each must be given."""
        own = (p for p in self._parameters.values() if p.kind is p.KEYWORD_ONLY)
        return {p.name: p.default is p.empty for p in own}

    @cached_property
    def defaults(self) -> dict[str, float | None]:
        """The number that each has where none is given; None: none."""
        return {name: None if must else self._parameters[name].default for name, must in self.numbers.items()}

    @cached_property
    def has_ratio(self) -> bool:
        """Whether it reads the log-probabilities of the policy that sampled, and so allows for older samples."""
        return "old_log_probs" in self._parameters

    def __call__(
        self,
        advantages: Tensor,
        policy_log_probs: Tensor,
        old_log_probs: Tensor | None,
        response_mask: Tensor | None,
        **numbers: float,
    ) -> LossAndStats:
        """(loss, stats) per token, each (batch, seq); what the function does not read is not handed to it."""
        more = {"old_log_probs": old_log_probs, "response_mask": response_mask}
        read = {name: value for name, value in more.items() if name in self._parameters}
        found = self.function(advantages, policy_log_probs, **read, **numbers)
        loss, stats = found if isinstance(found, tuple) else (found, {})
        return loss, {name: stat.detach().to(loss.dtype) for name, stat in stats.items()}
