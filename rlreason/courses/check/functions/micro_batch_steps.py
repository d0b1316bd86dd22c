"""The micro-batch steps of 2025, which go backward by themselves."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025
from rlreason.courses.check.calling import answer_parts, fresh, tensor
from rlreason.courses.check.engine import smaller_tensors
from rlreason.courses.check.functions.averages import SPANS, step_knobs
from rlreason.courses.check.functions.losses import dispatched_wrong
from rlreason.courses.check.functions.tensors import advantages, given, log_probs, ragged_mask
from rlreason.courses.check.subject import Bug, CallCase, Fault, Function, Inputs, Knobs, Seen, Subject
from rlreason.courses.check.wrong import aggregation, losses


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


def _sft_cases() -> list[CallCase]:
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
        cases.append(
            CallCase(inputs, about=f"gradient_accumulation_steps={accumulation}, normalize_constant={constant}")
        )
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


def _grpo_cases() -> list[CallCase]:
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
            cases.append(CallCase(inputs, branch=loss_type, about=about))
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


def _metadata(function: Any) -> Iterator[Bug]:
    """A property that finds no bug, as the handout leaves metadata open: notes which numbers of it move with positions
    where the mask is false."""
    case = next(c for c in _grpo_cases() if c.branch == "grpo_clip")
    mask, old = case.inputs["response_mask"], case.inputs["old_log_probs"]
    moved = [
        {**case.inputs, "old_log_probs": old.where(mask, other)} for other in (case.inputs["policy_log_probs"], old + 2)
    ]
    try:
        told = [_scalars(answer_parts(function(**fresh(i, "policy_log_probs")), ("loss", "metadata"))[1])
                for i in (case.inputs, *moved)]  # fmt: skip
    except Fault:
        return
    for name, value in told[0].items():
        if any(abs(value - other[name]) > 1e-5 * (1 + abs(value)) for other in told[1:] if name in other):
            function.notes.append(f"prompt or padding positions count in {name} of its metadata: is that meant?")
    yield from ()


def _scalars(metadata: Any) -> dict[str, float]:
    out = {}
    for name, value in metadata.items() if isinstance(metadata, dict) else ():
        if isinstance(value, Tensor) and value.numel() == 1:
            out[str(name)] = float(value.detach().double())
        elif isinstance(value, int | float):
            out[str(name)] = float(value)
    return {name: value for name, value in out.items() if value == value}


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
        **{name: losses.KNOBS[name] for name in ("pick", "bounds", "ratio", "advantage", "weight", "method")},
    },
    _smaller_step,
    properties=(_metadata,),
    optional=frozenset({"grpo_no_clip"}),
)
SUBJECTS = (SFT, GRPO)
