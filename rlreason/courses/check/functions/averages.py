"""Masked averages, and the aggregation of 2026."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check.calling import fresh, tensor
from rlreason.courses.check.engine import smaller_tensors
from rlreason.courses.check.functions.tensors import given, gradient, ragged_mask, random
from rlreason.courses.check.subject import CallCase, Function, Inputs, Kind, Knobs, Seen, Subject
from rlreason.courses.check.wrong import aggregation
from rlreason.courses.check.wrong.scoring import MASKED_KNOBS, masked_average

SPANS = [(1, 3), (2, 4), (0, 2), (3, 3)]
STEP_KNOBS = aggregation.KNOBS


def step_knobs(*names: str) -> dict[str, Mapping[str, Kind]]:
    """The known mistakes of averages by these knobs."""
    return {name: STEP_KNOBS[name] for name in names}


def _masked_cases(extra: Inputs) -> list[CallCase]:
    cases = []
    for number, dim in enumerate((1, 0, None, -1)):
        value = (torch.randn(3, 5, generator=random(number)) * 2).round(decimals=2)
        mask = ragged_mask([(0, 2), (1, 3), (2, 2)], 5)
        value[0, 0] = value[2, 1] = 0.0  # 0 is a value like any other
        inputs: Inputs = {"tensor": value, "mask": mask, **extra, "dim": dim}
        cases.append(CallCase(inputs, branch="all" if dim is None else "dim", about=f"dim={dim}"))
    return cases


def _observe_masked(function: Function, inputs: Inputs) -> Seen:
    call = fresh(given(inputs), "tensor")
    value = function(**call)
    seen = {"result": tensor(value, "the result")}
    if not bool(seen["result"].isnan().any()):
        seen["gradient of tensor"] = gradient(value, call["tensor"])
    return seen


def _smaller_masked(inputs: Inputs) -> Iterator[Inputs]:
    yield from smaller_tensors(inputs, ("tensor", "mask"), ("tensor", "mask"), ("tensor",))


def _normalize_wrong(knobs: Knobs) -> Function:
    def wrong(tensor: Tensor, mask: Tensor, normalize_constant: float, dim: int | None) -> Tensor:
        return masked_average(tensor, mask, normalize_constant, dim, knobs)

    return wrong


def _mean_wrong(knobs: Knobs) -> Function:
    def wrong(tensor: Tensor, mask: Tensor, dim: int | None) -> Tensor:
        return masked_average(tensor, mask, None, dim, knobs)

    return wrong


_OF_CONSTANT = ("constant", "times")  # mistakes with the constant, which a mean does not have
NORMALIZE = Subject(
    "masked_normalize",
    "cs336_2025",
    ("tensor", "mask", "normalize_constant", "dim"),
    cs336_2025.masked_normalize,
    lambda: _masked_cases({"normalize_constant": 10.0}),
    _observe_masked,
    _normalize_wrong,
    MASKED_KNOBS,
    _smaller_masked,
)
MEAN = Subject(
    "masked_mean",
    "cs336_2025",
    ("tensor", "mask", "dim"),
    cs336_2025.masked_mean,
    lambda: _masked_cases({}),
    _observe_masked,
    _mean_wrong,
    {
        name: {key: kind for key, kind in values.items() if key not in _OF_CONSTANT}
        for name, values in MASKED_KNOBS.items()
    },
    _smaller_masked,
)


def _aggregate_cases() -> list[CallCase]:
    cases = []
    for how in ("sequence", "constant"):
        for number, constant in enumerate((7, 20, 3)):
            value = torch.randn(4, 6, generator=random(40 + number)).round(decimals=2)
            mask = ragged_mask([(s, min(n, 6 - s)) for s, n in SPANS[: 4 - number]], 6)
            inputs: Inputs = {
                "per_token_policy_gradient_loss": value[: 4 - number].clone(),
                "mask": mask,
                "loss_normalization": how,
                "normalization_constant": constant,
            }
            cases.append(CallCase(inputs, branch=how, about=f"loss_normalization={how}"))
    return cases


def _observe_aggregate(function: Function, inputs: Inputs) -> Seen:
    name = "per_token_policy_gradient_loss"
    call = fresh(given(inputs), name)
    value = function(**call)
    loss = tensor(value, "the loss", scalar=True)
    if loss.ndim:
        return {"loss": loss}
    return {"loss": loss, "gradient per token": gradient(value, call[name])}


def _aggregate_wrong(knobs: Knobs) -> Function:
    def wrong(
        per_token_policy_gradient_loss: Tensor,
        mask: Tensor,
        loss_normalization: str,
        normalization_constant: int,
    ) -> Tensor:
        out = aggregation.aggregate(
            per_token_policy_gradient_loss, mask, loss_normalization, normalization_constant, knobs
        )
        return -out if "loss_sign" in knobs else out

    return wrong


def _smaller_aggregate(inputs: Inputs) -> Iterator[Inputs]:
    names = ("per_token_policy_gradient_loss", "mask")
    yield from smaller_tensors(inputs, names, names, names[:1])


AGGREGATE = Subject(
    "aggregate_loss_across_microbatch",
    "cs336_2026",
    ("per_token_policy_gradient_loss", "mask", "loss_normalization", "normalization_constant"),
    cs336_2026.aggregate_loss_across_microbatch,
    _aggregate_cases,
    _observe_aggregate,
    _aggregate_wrong,
    step_knobs("mask", "rows", "batch", "constant", "loss_sign"),
    _smaller_aggregate,
)


SUBJECTS = (NORMALIZE, MEAN, AGGREGATE)
