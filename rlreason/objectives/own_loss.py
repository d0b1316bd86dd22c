"""A loss of the user's own, `loss=module:function`: what a function must be to be one, and the trial that it stands.

Its numbers are keyword-only parameters, as those of the losses of `losses.py`, whose docstring says how one is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rlreason.errors import ConfigError
from rlreason.objectives.loss import Formula, Loss
from rlreason.objectives.losses import LOSSES
from rlreason.plugins.load import NotImportableError, described, load
from rlreason.types import Range

if TYPE_CHECKING:  # so that --help, the card and the rules need no torch
    from torch import Tensor

MAY_READ = ("old_log_probs", "response_mask")
FINITE = Range(-1e30, 1e30, "give a number that float32 can hold")


def loss_named(name: str) -> Loss:
    """A loss of the table, or one of the user's own by `module:function`. `ConfigError` where that is none."""
    if name in LOSSES:
        return LOSSES[name]
    try:
        found = load(name)
    except NotImportableError as error:
        raise ConfigError(f"loss={name}: {error}") from None
    return found if isinstance(found, Loss) else of_function(name, found)


def of_function(name: str, function: Callable[..., Any]) -> Loss:
    """A function as a loss, every number of which may be any; its formula is its docstring's first line."""
    said = f"loss={name}: "
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        raise ConfigError(f"{said}its parameters cannot be read: write a function in Python") from None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    numbers = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    others = [str(p) for p in parameters if p not in positional + numbers]
    unknown = [p.name for p in positional[2:] if p.name not in MAY_READ]
    if len(positional) < 2 or unknown or others:
        raise ConfigError(
            f"{said}it takes ({', '.join(map(str, parameters))}), and a loss takes (advantages, policy_log_probs), "
            f"{' and '.join(MAY_READ)} where it reads them, and its numbers after a *: change its parameters"
        )
    for p in numbers:
        if p.default is not p.empty and (isinstance(p.default, bool) or not isinstance(p.default, int | float | None)):
            raise ConfigError(f"{said}the default of {p.name} is {p.default!r:.40}: a loss has numbers alone")
    return Loss(function, lambda **given: _formula(function, given), {p.name: FINITE for p in numbers})


def _formula(function: Callable[..., Any], numbers: Mapping[str, float]) -> Formula:
    """What the card says where no formula was given."""
    first = next(iter((inspect.getdoc(function) or "").splitlines()), "")
    code = getattr(function, "__code__", None)
    place = f"{code.co_filename}, line {code.co_firstlineno}" if code else type(function).__name__
    given = "".join(f"{key}={number:g}, " for key, number in numbers.items())
    return Formula(first.rstrip(".") or "a function without a docstring", "", f"{given}a function of your own: {place}")


def broken_contract(name: str, numbers: Mapping[str, float]) -> str:
    """Why a loss cannot be trained with, in one line, tried on a small batch with padding; empty where it can."""
    said = f"loss={name}"
    try:
        return next((f"{said} {why}" for why in _faults(loss_named(name), numbers)), "")
    except ConfigError:
        raise
    except Exception as error:  # whatever a stranger's function does
        return f"{said} fails on a batch of 3 responses: {described(error)}: fix it"


def _faults(loss: Loss, numbers: Mapping[str, float]) -> Iterator[str]:
    import torch

    random = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)
    policy, old, other = (-0.05 - 3 * torch.rand(3, 5, generator=random) for _ in range(3))
    advantages = torch.tensor([[1.0], [-0.5], [0.25]])

    def tried(policy: Tensor, rows: slice = slice(None), old: Tensor = old) -> tuple[Any, Any, Tensor]:
        """(loss, stats, log-probabilities whose gradient is asked for) of some responses of the batch."""
        policy = policy[rows].clone().requires_grad_()
        return *loss(advantages[rows], policy, old[rows], mask[rows], **numbers), policy

    value, stats, variable = tried(policy)
    if not isinstance(value, torch.Tensor) or value.shape != mask.shape:
        shown = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        yield f"returns {shown} for log-probabilities of shape (3, 5): return the loss of each token, (batch, seq)"
    for key, stat in stats.items():
        if stat.shape != mask.shape:
            yield f"returns the statistic {key} of shape {tuple(stat.shape)}: give a value of each token, (batch, seq)"
    if not value[mask].isfinite().all():
        yield "is not finite where the log-probabilities lie between -3 and 0: keep it finite there"
    gradient = torch.autograd.grad(value[mask].sum(), variable)[0] if value.requires_grad else torch.zeros(3, 5)
    if not gradient.isfinite().all():
        yield "has a gradient that is not finite: mask what is not read before it is exponentiated or divided by"
    if not gradient.any():
        yield "has no gradient: compute it from policy_log_probs, not detached"
    moved, *_ = tried(policy.where(mask, other), old=old.where(mask, other + 0.5))
    if gradient[~mask].any() or not torch.allclose(moved[mask], value[mask], atol=1e-5):
        yield "reads what stands where response_mask is false: leave these positions out (masked_mean, torch.where)"
    alone, *_ = tried(policy, slice(0, 1))
    if not torch.allclose(alone[mask[:1]], value[:1][mask[:1]], atol=1e-5):
        yield (
            "gives a response another loss when other responses stand next to it, and a micro-batch is only a part of "
            "the step: compute each response from its own row"
        )
