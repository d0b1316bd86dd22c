"""The per-token losses of both years."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check.calling import answer_parts, fresh, tensor
from rlreason.courses.check.engine import smaller_tensors
from rlreason.courses.check.functions.scoring import advantages, given, gradient, log_probs, ragged_mask, random
from rlreason.courses.check.subject import CallCase, Function, Inputs, Kind, Knobs, Seen, Subject
from rlreason.courses.check.wrong import averages
from rlreason.courses.check.wrong.tokens import LOSS_KNOBS as KNOBS
from rlreason.courses.check.wrong.tokens import MASKED_KNOBS, masked_average, token_loss

_ROWS = ("raw_rewards_or_advantages", "raw_rewards", "advantages", "policy_log_probs", "old_log_probs", "response_mask")
_COLUMNS = ("policy_log_probs", "old_log_probs", "response_mask")
_NUMBERS = (*_ROWS[:-1], "cliprange")
_PLAIN = ("sign", "advantage", "weight", "time")
_CLIP = ("sign", "pick", "bounds", "ratio", "advantage", "weight", "time", "method")


def _knobs(*names: str) -> dict[str, Mapping[str, Kind]]:
    return {name: KNOBS[name] for name in names}


def _smaller(inputs: Inputs) -> Iterator[Inputs]:
    yield from smaller_tensors(inputs, _ROWS, _COLUMNS, _NUMBERS)


def _seen(loss: Tensor, inputs: Inputs, leaf: Tensor) -> Seen:
    """Loss and gradient per token; where a mask is given, on response tokens alone."""
    mask = inputs.get("response_mask")
    if loss.shape != leaf.shape:
        return {"loss": loss.detach()}
    where = None if mask is None else mask.bool()
    shown = loss.detach() if where is None else loss.detach().where(where, torch.zeros_like(loss))
    return {"loss": shown, "gradient of policy_log_probs": gradient(loss, leaf, where)}


def _graph(value: object) -> Tensor:
    if not isinstance(value, Tensor):
        tensor(value, "the loss")
    assert isinstance(value, Tensor)
    return value


def observe_naive(function: Function, inputs: Inputs) -> Seen:
    """Of a function that returns the loss alone."""
    call = fresh(given(inputs), "policy_log_probs")
    return _seen(_graph(function(**call)), inputs, call["policy_log_probs"])


def observe_pair(function: Function, inputs: Inputs) -> Seen:
    """Of a function that returns (loss, metadata)."""
    call = fresh(given(inputs), "policy_log_probs")
    loss, _ = answer_parts(function(**call), ("loss", "metadata"))
    return _seen(_graph(loss), inputs, call["policy_log_probs"])


def _shapes() -> Iterator[tuple[int, int, int]]:
    yield from ((3, 5, 0), (4, 4, 3), (2, 6, 5), (1, 4, 7), (5, 3, 11))


def _naive_cases() -> list[CallCase]:
    return [
        CallCase(
            {"raw_rewards_or_advantages": advantages(b, s), "policy_log_probs": log_probs(b, t, s)[0]},
            about="as many rows as positions" if b == t else "",
        )
        for b, t, s in _shapes()
    ]


def _naive_wrong(knobs: Knobs) -> Function:
    def wrong(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
        return token_loss("none", raw_rewards_or_advantages, policy_log_probs, None, 0.0, None, knobs)

    return wrong


NAIVE = Subject(
    "compute_naive_policy_gradient_loss",
    "cs336_2025",
    ("raw_rewards_or_advantages", "policy_log_probs"),
    cs336_2025.compute_naive_policy_gradient_loss,
    _naive_cases,
    observe_naive,
    _naive_wrong,
    _knobs(*_PLAIN),
    _smaller,
)


def _clip_cases() -> list[CallCase]:
    cases = []
    for (b, t, s), c in zip(_shapes(), (0.2, 0.1, 0.5, 0.3, 0.2), strict=True):
        policy, old = log_probs(b, t, s)
        cases.append(
            CallCase(
                {
                    "advantages": advantages(b, s),
                    "policy_log_probs": policy,
                    "old_log_probs": old,
                    "cliprange": c,
                },
                about="as many rows as positions" if b == t else "",
            )
        )
    policy, old = log_probs(2, 4, 21)
    zero = {"advantages": torch.zeros(2, 1), "policy_log_probs": policy, "old_log_probs": old, "cliprange": 0.2}
    on_policy = {**cases[0].inputs, "old_log_probs": cases[0].inputs["policy_log_probs"].clone()}
    return [
        *cases,
        CallCase(zero, about="advantages of 0"),
        CallCase(on_policy, about="equal old and new log-probabilities"),
    ]


def _clip_wrong(knobs: Knobs) -> Function:
    def wrong(
        advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return token_loss("grpo", advantages, policy_log_probs, old_log_probs, cliprange, None, knobs), {}

    return wrong


CLIP = Subject(
    "compute_grpo_clip_loss",
    "cs336_2025",
    ("advantages", "policy_log_probs", "old_log_probs", "cliprange"),
    cs336_2025.compute_grpo_clip_loss,
    _clip_cases,
    observe_pair,
    _clip_wrong,
    _knobs(*_CLIP),
    _smaller,
)

METHOD_OF = {
    "no_baseline": "none",
    "reinforce_with_baseline": "none",
    "grpo_no_clip": "noclip",
    "grpo_clip": "grpo",
}


def dispatched_wrong(knobs: Knobs) -> Function:
    """The 2025 dispatcher with these mistakes."""

    def wrong(
        policy_log_probs: Tensor,
        loss_type: str,
        raw_rewards: Tensor,
        advantages: Tensor,
        old_log_probs: Tensor,
        cliprange: float,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        uses_rewards = (loss_type == "no_baseline") != (knobs.get("advantage") == "other_input")
        a = raw_rewards if uses_rewards else advantages
        return token_loss(METHOD_OF[loss_type], a, policy_log_probs, old_log_probs, cliprange, None, knobs), {}

    return wrong


def _dispatch_cases() -> list[CallCase]:
    cases = []
    for loss_type in METHOD_OF:
        for case in _clip_cases()[:4]:
            rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0])[: len(case.inputs["advantages"]), None].clone()
            inputs = {"policy_log_probs": None, "loss_type": loss_type, "raw_rewards": rewards, **case.inputs}
            cases.append(CallCase(inputs, branch=loss_type, about=f"loss_type={loss_type}"))
    return cases


DISPATCH_2025 = Subject(
    "compute_policy_gradient_loss",
    "cs336_2025",
    ("policy_log_probs", "loss_type", "raw_rewards", "advantages", "old_log_probs", "cliprange"),
    cs336_2025.compute_policy_gradient_loss,
    _dispatch_cases,
    observe_pair,
    dispatched_wrong,
    _knobs(*_CLIP),
    _smaller,
    optional=frozenset({"grpo_no_clip"}),
)


def loss_wrong_2026(knobs: Knobs) -> Function:
    """The 2026 loss with these mistakes."""

    def wrong(
        raw_rewards_or_advantages: Tensor,
        policy_log_probs: Tensor,
        importance_reweighting_method: str = "none",
        old_log_probs: Tensor | None = None,
        cliprange: float | None = None,
        response_mask: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        a = raw_rewards_or_advantages.reshape(-1, 1)
        c = 0.0 if cliprange is None else cliprange
        method = importance_reweighting_method
        return token_loss(method, a, policy_log_probs, old_log_probs, c, response_mask, knobs), {}

    return wrong


def _cases_2026() -> list[CallCase]:
    cases = []
    spans = [(1, 3), (2, 4), (0, 2), (3, 3)]
    for method in ("none", "noclip", "grpo", "gspo"):
        for number, (b, t, c) in enumerate(((3, 6, 0.2), (4, 6, 0.05), (3, 6, 0.5), (4, 4, 0.2))):
            mask = ragged_mask([(s, min(n, t - s)) for s, n in spans[:b]], t)
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


LOSS_2026 = Subject(
    "compute_policy_gradient_loss",
    "cs336_2026",
    (
        "raw_rewards_or_advantages",
        "policy_log_probs",
        "importance_reweighting_method",
        "old_log_probs",
        "cliprange",
        "response_mask",
    ),
    cs336_2026.compute_policy_gradient_loss,
    _cases_2026,
    observe_pair,
    loss_wrong_2026,
    _knobs(*_CLIP, "sequence"),
    _smaller,
)


LOSSES = (NAIVE, CLIP, DISPATCH_2025, LOSS_2026)


SPANS = [(1, 3), (2, 4), (0, 2), (3, 3)]
STEP_KNOBS = averages.AGGREGATION_KNOBS


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
        out = averages.aggregate(
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


AVERAGES = (NORMALIZE, MEAN, AGGREGATE)
