"""What advantages do when rewards change: names a bug that no known mistake reproduces."""

from typing import Any

import torch

from rlreason.courses.check.engine import places
from rlreason.courses.check.subject import Kind


def _mixing(call: Any) -> Kind | None:
    """Whether the second group's advantages move with the first group's rewards; `call(rewards (6,))` -> (6,)."""
    start = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.25, 0.0])
    other = torch.tensor([2.0, 0.0, 1.0, 1.0, 0.25, 0.0])
    a, b = call(start), call(other)
    if a.shape == b.shape == start.shape and bool(places(b[3:], a[3:]).any()):
        where = "the reshape or loop that forms the groups, and the dim of mean and std"
        return Kind("groups mix questions: one group's advantages change with another group's rewards", where)
    return None


def _unequal(call: Any) -> Kind | None:
    """Whether equal rewards give other advantages than 0."""
    a = call(torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 0.5]))
    if bool(a.isnan().any()):
        return Kind("equal rewards give NaN", "the division where the standard deviation is 0")
    if bool((a.abs() > 1e-4).any()):
        return Kind("equal rewards give advantages other than 0", "what is subtracted and added")
    return None


def hints(caller: Any) -> tuple[Any, ...]:
    """The hints of a function; `caller(function)` gives a call(rewards (6,), eps) -> advantages, of groups of 3."""

    def of(property_: Any) -> Any:
        return lambda function: property_(caller(function))

    return tuple(map(of, (_mixing, _unequal)))
