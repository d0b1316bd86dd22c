"""Cases and known mistakes of the per-token losses and of the averages, of both years."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check.calling import answer_parts, fresh, tensor
from rlreason.courses.check.engine import smaller_tensors
from rlreason.courses.check.inputs import advantages, gradient, log_probs, ragged_mask, random
from rlreason.courses.check.mistakes import (
    AGGREGATION_KNOBS,
    LOSS_KNOBS,
    KnobKinds,
    LossInputs,
    wrong_average,
    wrong_mask,
    wrong_token_loss,
)
from rlreason.courses.check.subject import CallCase, Function, Inputs, Kind, Knobs, Observed, Subject

_ROWS = ("raw_rewards_or_advantages", "raw_rewards", "advantages", "policy_log_probs", "old_log_probs", "response_mask")
_COLUMNS = ("policy_log_probs", "old_log_probs", "response_mask")
_NUMBERS = (*_ROWS[:-1], "cliprange")
_PLAIN = ("sign", "advantage", "weight", "time")
_CLIP = ("sign", "pick", "bounds", "ratio", "advantage", "weight", "time", "method")
_SHAPES = ((3, 5, 0), (4, 4, 3), (2, 6, 5), (1, 4, 7), (5, 3, 11))  # rows, positions, seed
SPANS = [(1, 3), (2, 4), (0, 2), (3, 3)]  # (start, length) of the response in each row


def choose(knobs: KnobKinds, *names: str) -> dict[str, Mapping[str, Kind]]:
    """Return only the knobs of these names, in this order."""
    return {name: knobs[name] for name in names}


def _smaller(inputs: Inputs) -> Iterator[Inputs]:
    return smaller_tensors(inputs, _ROWS, _COLUMNS, _NUMBERS)


def _observe_loss(function: Function, inputs: Inputs) -> Observed:
    """Observe a function that returns the loss alone: loss and gradient per token, on response tokens if masked."""
    call = fresh(inputs, "policy_log_probs")
    loss, leaf = function(**call), call["policy_log_probs"]
    tensor(loss, "the loss")
    if loss.shape != leaf.shape:
        return {"loss": loss.detach()}
    mask = inputs.get("response_mask")
    if mask is None:
        return {"loss": loss.detach(), "gradient of policy_log_probs": gradient(loss, leaf)}
    masked_loss = loss.detach().where(mask.bool(), torch.zeros_like(loss))
    return {"loss": masked_loss, "gradient of policy_log_probs": gradient(loss, leaf, mask.bool())}


def _observe_loss_and_metadata(function: Function, inputs: Inputs) -> Observed:
    return _observe_loss(lambda **call: answer_parts(function(**call), ("loss", "metadata"))[0], inputs)


def _naive_cases() -> list[CallCase]:
    return [
        CallCase(
            {"raw_rewards_or_advantages": advantages(b, s), "policy_log_probs": log_probs(b, t, s)[0]},
            about="as many rows as positions" if b == t else "",
        )
        for b, t, s in _SHAPES
    ]


NAIVE = Subject(
    cs336_2025.compute_naive_policy_gradient_loss,
    "cs336_2025",
    _naive_cases,
    _observe_loss,
    lambda i, k: wrong_token_loss(LossInputs("none", i["raw_rewards_or_advantages"], i["policy_log_probs"]), k),
    choose(LOSS_KNOBS, *_PLAIN),
    _smaller,
)


def _clip_cases() -> list[CallCase]:
    cases = []
    for (b, t, s), c in zip(_SHAPES, (0.2, 0.1, 0.5, 0.3, 0.2), strict=True):
        policy, old = log_probs(b, t, s)
        inputs = {"advantages": advantages(b, s), "policy_log_probs": policy, "old_log_probs": old, "cliprange": c}
        cases.append(CallCase(inputs, about="as many rows as positions" if b == t else ""))
    policy, old = log_probs(2, 4, 21)
    zero = {"advantages": torch.zeros(2, 1), "policy_log_probs": policy, "old_log_probs": old, "cliprange": 0.2}
    on_policy = {**cases[0].inputs, "old_log_probs": cases[0].inputs["policy_log_probs"].clone()}
    cases.append(CallCase(zero, about="advantages of 0"))
    cases.append(CallCase(on_policy, about="equal old and new log-probabilities"))
    return cases


def _wrong_clip(i: Inputs, k: Knobs) -> Any:
    inputs = LossInputs("grpo", i["advantages"], i["policy_log_probs"], i["old_log_probs"], i["cliprange"])
    return wrong_token_loss(inputs, k), {}


CLIP = Subject(
    cs336_2025.compute_grpo_clip_loss,
    "cs336_2025",
    _clip_cases,
    _observe_loss_and_metadata,
    _wrong_clip,
    choose(LOSS_KNOBS, *_CLIP),
    _smaller,
)


METHOD_OF = {"no_baseline": "none", "reinforce_with_baseline": "none", "grpo_no_clip": "noclip", "grpo_clip": "grpo"}


def wrong_loss_2025(i: Inputs, k: Knobs) -> Tensor:
    """Return the loss of each token by 2025's `loss_type`, with the mistakes of `k`."""
    uses_rewards = (i["loss_type"] == "no_baseline") != (k.get("advantage") == "other_input")
    a = i["raw_rewards"] if uses_rewards else i["advantages"]
    method = METHOD_OF[i["loss_type"]]
    return wrong_token_loss(LossInputs(method, a, i["policy_log_probs"], i["old_log_probs"], i["cliprange"]), k)


def _cases_2025() -> list[CallCase]:
    cases = []
    for loss_type in METHOD_OF:
        for case in _clip_cases()[:4]:
            rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0])[: len(case.inputs["advantages"]), None].clone()
            first = {"policy_log_probs": None, "loss_type": loss_type, "raw_rewards": rewards}  # in the handout's order
            cases.append(CallCase(first | case.inputs, branch=loss_type, about=f"loss_type={loss_type}"))
    return cases


LOSS_2025 = Subject(
    cs336_2025.compute_policy_gradient_loss,
    "cs336_2025",
    _cases_2025,
    _observe_loss_and_metadata,
    lambda i, k: (wrong_loss_2025(i, k), {}),
    choose(LOSS_KNOBS, *_CLIP),
    _smaller,
    optional=frozenset({"grpo_no_clip"}),
)


def _cases_2026() -> list[CallCase]:
    cases = []
    for method in ("none", "noclip", "grpo", "gspo"):
        for number, (b, t, c) in enumerate(((3, 6, 0.2), (4, 6, 0.05), (3, 6, 0.5), (4, 4, 0.2))):
            mask = ragged_mask([(s, min(n, t - s)) for s, n in SPANS[:b]], t)
            policy, old = log_probs(b, t, 30 + number, mask)
            a = advantages(b, number)
            if method == "gspo":  # within a row the ratios have one sign, so that their mean leaves the range
                old = policy - torch.tensor([0.5, -0.6, 0.15, -0.1])[:b, None] * (policy - old).abs().clamp(min=0.3)
            inputs: Inputs = {
                "raw_rewards_or_advantages": a.reshape(-1) if number % 2 else a,
                "policy_log_probs": policy,
                "importance_reweighting_method": method,
                "old_log_probs": old,
                "cliprange": c,
                "response_mask": mask,
            }
            shape = "rewards of shape (batch,)" if number % 2 else "rewards of shape (batch, 1)"
            cases.append(CallCase(inputs, branch=method, about=f"importance_reweighting_method={method}, {shape}"))
    return cases


def _wrong_loss_2026(i: Inputs, k: Knobs) -> Any:
    a, method = i["raw_rewards_or_advantages"].reshape(-1, 1), i["importance_reweighting_method"]
    inputs = LossInputs(method, a, i["policy_log_probs"], i["old_log_probs"], i["cliprange"], i["response_mask"])
    return wrong_token_loss(inputs, k), {}


LOSS_2026 = Subject(
    cs336_2026.compute_policy_gradient_loss,
    "cs336_2026",
    _cases_2026,
    _observe_loss_and_metadata,
    _wrong_loss_2026,
    choose(LOSS_KNOBS, *_CLIP, "sequence"),
    _smaller,
)
LOSSES = (NAIVE, CLIP, LOSS_2025, LOSS_2026)


MASKED_KNOBS: KnobKinds = {
    "mask": {
        "ignored": Kind("the mask is ignored", "where the mask is applied"),
        "inverted": Kind("the mask is upside down", "where the mask is applied"),
        "late": Kind("the mask is shifted by one", "where the mask is applied"),
        "early": Kind("the mask is shifted by one", "where the mask is applied"),
    },
    "divide": {
        "constant": Kind("the constant is ignored", "what the sum is divided by"),
        "count": Kind("sums are divided by the number of masked-in elements", "what the sum is divided by"),
        "both": Kind("sums are divided by the number of elements besides", "what the sum is divided by"),
        "size": Kind("sums are divided by all elements, also those that are masked out", "what the sum is divided by"),
        "times": Kind("the constant multiplies", "what the sum is divided by"),
        "sum": Kind("the sum is given back, not a mean", "what the sum is divided by"),
        "all": Kind("slices are divided by the count of the whole mask", "the dim of the count"),
    },
    "empty": {
        "zero": Kind("a slice without any element gives 0 where the course asks for NaN", "the count where it is 0"),
    },
    "dim": {
        "ignored": Kind("dim is ignored: everything is summed", "the dim of the sums"),
        "last": Kind("dim is ignored: the last one is always taken", "the dim of the sums"),
        "first": Kind("dim is ignored: the first one is always taken", "the dim of the sums"),
        "other": Kind("the other dim is taken", "the dim of the sums"),
        "keep": Kind("the summed dimension is kept with size 1", "keepdim in the sums"),
    },
    "falsy": {"dim0": Kind("dim=0 is taken for no dim at all", "how dim is tested: 0 is false in Python")},
}


def wrong_masked_average(value: Tensor, mask: Tensor, constant: float | None, dim: int | None, k: Knobs) -> Tensor:
    """Return `masked_normalize` by a constant, or `masked_mean` if that is None, with the mistakes of `k`."""
    if "falsy" in k and dim == 0:
        dim = None
    how = k.get("dim", "")
    along = {"ignored": None, "last": -1, "first": 0}.get(how, dim)
    if how == "other" and dim is not None:
        along = 0 if dim in (1, -1) else 1
    m = wrong_mask(mask, k.get("mask", "")).to(value.dtype)
    masked = value.masked_fill(m == 0, 0.0)

    def summed(x: Tensor) -> Tensor:
        return x.sum() if along is None else x.sum(along, keepdim=how == "keep")

    total, count, size = summed(masked), summed(m), summed(torch.ones_like(m))
    right = count if constant is None else torch.tensor(float(constant))
    divisor = {
        "constant": lambda: torch.ones(()),
        "sum": lambda: torch.ones(()),
        "count": lambda: count,
        "both": lambda: count * right,
        "size": lambda: size,
        "times": lambda: 1 / right,
        "all": lambda: m.sum(),
    }.get(k.get("divide", ""), lambda: right)()
    return total / (divisor.clamp(min=1) if "empty" in k and constant is None else divisor)


def _masked_cases(extra: Inputs) -> list[CallCase]:
    cases = []
    for number, dim in enumerate((1, 0, None, -1)):
        value = (torch.randn(3, 5, generator=random(number)) * 2).round(decimals=2)
        mask = ragged_mask([(0, 2), (1, 3), (2, 2)], 5)
        value[0, 0] = value[2, 1] = 0.0  # a 0 counts like any other value
        inputs: Inputs = {"tensor": value, "mask": mask, **extra, "dim": dim}
        cases.append(CallCase(inputs, branch="all" if dim is None else "dim", about=f"dim={dim}"))
    return cases


def _observe_masked(function: Function, inputs: Inputs) -> Observed:
    call = fresh(inputs, "tensor")
    value = function(**call)
    observed = {"result": tensor(value, "the result")}
    if not bool(observed["result"].isnan().any()):
        observed["gradient of tensor"] = gradient(value, call["tensor"])
    return observed


def _smaller_masked(inputs: Inputs) -> Iterator[Inputs]:
    return smaller_tensors(inputs, ("tensor", "mask"), ("tensor", "mask"), ("tensor",))


NORMALIZE = Subject(
    cs336_2025.masked_normalize,
    "cs336_2025",
    lambda: _masked_cases({"normalize_constant": 10.0}),
    _observe_masked,
    lambda i, k: wrong_masked_average(i["tensor"], i["mask"], i["normalize_constant"], i["dim"], k),
    MASKED_KNOBS,
    _smaller_masked,
)
MEAN = Subject(
    cs336_2025.masked_mean,
    "cs336_2025",
    lambda: _masked_cases({}),
    _observe_masked,
    lambda i, k: wrong_masked_average(i["tensor"], i["mask"], None, i["dim"], k),
    {
        name: {key: kind for key, kind in values.items() if key not in ("constant", "times")}  # a mean has no constant
        for name, values in MASKED_KNOBS.items()
    },
    _smaller_masked,
)


_PER_TOKEN = "per_token_policy_gradient_loss"


def _aggregate_cases() -> list[CallCase]:
    cases = []
    for how in ("sequence", "constant"):
        for number, constant in enumerate((7, 20, 3)):
            value = torch.randn(4, 6, generator=random(40 + number)).round(decimals=2)
            mask = ragged_mask([(s, min(n, 6 - s)) for s, n in SPANS[: 4 - number]], 6)
            inputs: Inputs = {
                _PER_TOKEN: value[: 4 - number].clone(),
                "mask": mask,
                "loss_normalization": how,
                "normalization_constant": constant,
            }
            cases.append(CallCase(inputs, branch=how, about=f"loss_normalization={how}"))
    return cases


def _observe_aggregate(function: Function, inputs: Inputs) -> Observed:
    call = fresh(inputs, _PER_TOKEN)
    value = function(**call)
    loss = tensor(value, "the loss", scalar=True)
    if loss.ndim:
        return {"loss": loss}
    return {"loss": loss, "gradient per token": gradient(value, call[_PER_TOKEN])}


def _wrong_aggregate(i: Inputs, k: Knobs) -> Tensor:
    loss = wrong_average(i[_PER_TOKEN], i["mask"], i["loss_normalization"], i["normalization_constant"], k)
    return -loss if "loss_sign" in k else loss


AGGREGATE = Subject(
    cs336_2026.aggregate_loss_across_microbatch,
    "cs336_2026",
    _aggregate_cases,
    _observe_aggregate,
    _wrong_aggregate,
    choose(AGGREGATION_KNOBS, "mask", "rows", "batch", "constant", "loss_sign"),
    lambda inputs: smaller_tensors(inputs, (_PER_TOKEN, "mask"), (_PER_TOKEN, "mask"), (_PER_TOKEN,)),
)
AVERAGES = (NORMALIZE, MEAN, AGGREGATE)
