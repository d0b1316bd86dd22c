"""The micro-batch steps of 2025, which go backward by themselves."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rlreason.check.calling import answer_parts, fresh, tensor
from rlreason.check.functions.averages import SPANS, STEP_KNOBS, step_knobs
from rlreason.check.functions.losses import dispatched_wrong
from rlreason.check.functions.tensors import advantages, given, log_probs, ragged_mask
from rlreason.check.shrink import smaller_tensors
from rlreason.check.subject import Case, Fault, Finding, Function, Inputs, Kind, Knobs, Seen, Subject
from rlreason.check.words import shown
from rlreason.check.wrong import aggregation, losses
from rlreason.courses import cs336_2025


def observe_step(function: Function, inputs: Inputs) -> Seen:
    """Of a step that goes backward: its loss, the gradient after one call and after two."""
    call = fresh(given(inputs), "policy_log_probs")
    leaf = call["policy_log_probs"]
    loss, _ = answer_parts(function(**call), ("loss", "metadata"))
    seen = {"loss": tensor(loss, "the loss", scalar=True), "gradient of policy_log_probs": _grad(leaf)}
    function(**call)
    seen["gradient after a second call"] = _grad(leaf)
    return seen


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()


def _sft_cases() -> list[Case]:
    cases = []
    for number, (accumulation, constant) in enumerate(((2, 1.0), (4, 5.0), (1, 3.0), (3, 1.0))):
        rows = 3 if number < 3 else 2
        mask = ragged_mask([(s, min(n, 6 - s)) for s, n in SPANS[:rows]], 6)
        inputs: Inputs = {
            "policy_log_probs": log_probs(rows, 6, 50 + number, mask)[0],
            "response_mask": mask,
            "gradient_accumulation_steps": accumulation,
            "normalize_constant": constant,
        }
        cases.append(Case(inputs, about=f"gradient_accumulation_steps={accumulation}, normalize_constant={constant}"))
    return cases


def _sft_wrong(knobs: Knobs) -> Function:
    def wrong(
        policy_log_probs: Tensor,
        response_mask: Tensor,
        gradient_accumulation_steps: int,
        normalize_constant: float,
    ) -> tuple[Tensor, dict[str, Any]]:
        how = "sequence" if "rows" in knobs else "constant_mean"
        loss = aggregation.aggregate(-policy_log_probs, response_mask, how, normalize_constant, knobs)
        return aggregation.micro_batch_step(loss, gradient_accumulation_steps, policy_log_probs, knobs), {}

    return wrong


_STEP_ROWS = ("policy_log_probs", "response_mask", "raw_rewards", "advantages", "old_log_probs")
_STEP_COLUMNS = ("policy_log_probs", "response_mask", "old_log_probs")


def _smaller_step(inputs: Inputs) -> Iterator[Inputs]:
    for smaller in smaller_tensors(inputs, _STEP_ROWS, _STEP_COLUMNS, (*_STEP_ROWS, "cliprange")):
        if bool(smaller["response_mask"].any(-1).all()):  # a row without tokens is no fair trial
            yield smaller


SFT = Subject(
    "sft_microbatch_train_step",
    "cs336_2025",
    ("policy_log_probs", "response_mask", "gradient_accumulation_steps", "normalize_constant"),
    cs336_2025.sft_microbatch_train_step,
    _sft_cases,
    observe_step,
    _sft_wrong,
    step_knobs("mask", "batch", "constant", "accumulation", "loss_sign", "backward", "rows"),
    _smaller_step,
)


def _grpo_cases() -> list[Case]:
    cases = []
    for loss_type in ("no_baseline", "reinforce_with_baseline", "grpo_no_clip", "grpo_clip"):
        for number, (accumulation, c) in enumerate(((2, 0.2), (1, 0.1), (4, 0.5))):
            rows = 4 - number
            mask = ragged_mask([(s, min(n, 6 - s)) for s, n in SPANS[:rows]], 6)
            policy, old = log_probs(rows, 6, 60 + number, mask)
            inputs: Inputs = {
                "policy_log_probs": policy,
                "response_mask": mask,
                "gradient_accumulation_steps": accumulation,
                "loss_type": loss_type,
                "raw_rewards": torch.tensor([1.0, 0.0, 0.5, 1.0])[:rows, None].clone(),
                "advantages": advantages(rows, number),
                "old_log_probs": old,
                "cliprange": c,
            }
            about = f"loss_type={loss_type}, gradient_accumulation_steps={accumulation}"
            cases.append(Case(inputs, branch=loss_type, about=about))
    return cases


def _grpo_wrong(knobs: Knobs) -> Function:
    per_token = dispatched_wrong(knobs)

    def wrong(
        policy_log_probs: Tensor,
        response_mask: Tensor,
        gradient_accumulation_steps: int,
        loss_type: str,
        raw_rewards: Tensor,
        advantages: Tensor,
        old_log_probs: Tensor,
        cliprange: float,
    ) -> tuple[Tensor, dict[str, Any]]:
        loss, _ = per_token(policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange)
        total = aggregation.aggregate(loss, response_mask, "sequence", 1.0, knobs)
        return aggregation.micro_batch_step(total, gradient_accumulation_steps, policy_log_probs, knobs), {}

    return wrong


def _metadata(function: Function) -> Iterator[Finding]:
    """A property: single numbers in the metadata do not move with what stands where the mask is false."""
    case = next(c for c in _grpo_cases() if c.branch == "grpo_clip")
    mask = case.inputs["response_mask"]
    old = case.inputs["old_log_probs"]
    moved = {**case.inputs, "old_log_probs": old.where(mask, case.inputs["policy_log_probs"])}
    further = {**case.inputs, "old_log_probs": old.where(mask, old + 2.0)}
    try:
        told = [_scalars(answer_parts(function(**fresh(i, "policy_log_probs")), ("loss", "metadata"))[1])
                for i in (case.inputs, moved, further)]  # fmt: skip
    except Fault:
        return
    for name, value in told[0].items():
        others = [t[name] for t in told[1:] if name in t]
        if any(abs(value - other) > 1e-5 * (1 + abs(value)) for other in others):
            yield Finding(
                "grpo_microbatch_train_step",
                f"prompt or padding positions in {name} of the metadata",
                f"the mean that makes {name}: which positions it is over",
                {"old_log_probs where the mask is false": "changed; everything else stays"},
                f"{name} changes from {shown(value)} to {' or '.join(map(shown, others))}",
                f"{name} stays",
            )


def _scalars(metadata: Any) -> dict[str, float]:
    out = {}
    for name, value in metadata.items() if isinstance(metadata, dict) else ():
        if isinstance(value, Tensor) and value.numel() == 1:
            out[str(name)] = float(value.detach().double())
        elif isinstance(value, int | float):
            out[str(name)] = float(value)
    return {name: value for name, value in out.items() if value == value}


def _micro_split(make: Any, function: Function) -> Kind | None:
    """A hint: whether positions outside the mask move the loss."""
    inputs = make()[0].inputs
    mask = inputs["response_mask"]
    moved = {**inputs, "policy_log_probs": inputs["policy_log_probs"].where(mask, torch.tensor(-7.0))}
    first, second = (observe_step(function, i) for i in (inputs, moved))
    grad = first["gradient of policy_log_probs"]
    if not torch.allclose(first["loss"], second["loss"], atol=1e-5) or bool(grad[~mask].any()):
        return STEP_KNOBS["mask"]["ignored"]
    if bool((first["gradient after a second call"] - 2 * grad).abs().max() > 1e-5):
        return Kind("a second call does not add the same gradient again", "backward, zero_grad and what is kept")
    return None


GRPO = Subject(
    "grpo_microbatch_train_step",
    "cs336_2025",
    (
        "policy_log_probs",
        "response_mask",
        "gradient_accumulation_steps",
        "loss_type",
        "raw_rewards",
        "advantages",
        "old_log_probs",
        "cliprange",
    ),
    cs336_2025.grpo_microbatch_train_step,
    _grpo_cases,
    observe_step,
    _grpo_wrong,
    {
        **step_knobs("mask", "rows", "batch", "accumulation", "loss_sign", "backward"),
        **{name: losses.KNOBS[name] for name in ("pick", "bounds", "ratio", "advantage", "weight", "method", "dual")},
    },
    _smaller_step,
    properties=(_metadata,),
    hints=(partial(_micro_split, _grpo_cases),),
    optional=frozenset({"grpo_no_clip"}),
)
SUBJECTS = (SFT, GRPO)
