"""Compute wrong averages over tokens and rows: mistakes in masks, denominators and micro-batches."""

import torch
from torch import Tensor

from rlreason.courses.check.subject import Kind, Knobs

_MASK = "where the mask is applied: which positions it is true for"
_ROWS = "what the sum over tokens is divided by"
_BATCH = "what the sum over rows is divided by"
_GA = "where gradient_accumulation_steps enters"
_CONSTANT = "where the constant enters"

KNOBS = {
    "mask": {
        "ignored": Kind("the mask is ignored: prompt and padding positions count", _MASK),
        "inverted": Kind("the mask is upside down: prompt and padding count, the response does not", _MASK),
        "late": Kind("the mask is shifted by one: the first response token is lost", _MASK),
        "early": Kind("the mask is shifted by one: the last response token is lost", _MASK),
        "rolled_late": Kind("the mask is shifted by one: the first response token is lost", _MASK),
        "rolled_early": Kind("the mask is shifted by one: the last response token is lost", _MASK),
        "to_end": Kind("padding positions count", _MASK),
        "from_start": Kind("prompt positions count", _MASK),
        "no_first": Kind("the first response token is lost", _MASK),
        "no_last": Kind("the last response token is lost", _MASK),
    },
    "rows": {
        "token": Kind("all tokens of the (micro-)batch are averaged together, not row by row", _ROWS),
        "sum": Kind("tokens are summed, not averaged", _ROWS),
        "width": Kind("sums over tokens are divided by the padded width, not by the response's own tokens", _ROWS),
        "longest": Kind(
            "sums over tokens are divided by the longest response, not by the response's own tokens", _ROWS
        ),
    },
    "batch": {
        "sum": Kind("rows are summed, not averaged", _BATCH),
        "mean": Kind("the sum is divided by the number of rows besides", _BATCH),
        "no_last": Kind("remainder of a batch dropped: the last row does not count", _BATCH),
        "tokens": Kind("the loss is divided by the (micro-)batch's own tokens", _BATCH),
    },
    "constant": {
        "ignored": Kind("the constant is ignored", _CONSTANT),
        "squared": Kind("the constant divides twice", _CONSTANT),
        "times": Kind("the constant multiplies", _CONSTANT),
        "tokens": Kind("sums are divided by the tokens that count, not by the constant", _CONSTANT),
        "width": Kind("sums are divided by the padded width, not by the constant", _CONSTANT),
        "mean": Kind("the mean over tokens is divided by the constant, not their sum", _CONSTANT),
    },
    "accumulation": {
        "ignored": Kind("gradient_accumulation_steps does not divide the loss", _GA),
        "twice": Kind("gradient_accumulation_steps divides the loss twice", _GA),
        "times": Kind("gradient_accumulation_steps multiplies the loss", _GA),
        "returned": Kind(
            "the loss that is returned is not the one that goes backward (not divided)", "the return line"
        ),
        "backward": Kind(
            "the loss that goes backward is not the one that is returned (not divided)", "the call of backward"
        ),
    },
    "loss_sign": {"plus": Kind("the loss has the opposite sign", "the minus sign in front of the loss")},
    "backward": {
        "missing": Kind("backward is not called: there is no gradient", "the call of backward"),
        "twice": Kind("the gradient is that of two backward calls", "the calls of backward"),
        "overwritten": Kind(
            "gradients of micro-batches are not added up: each call clears what was there", "zero_grad, or grad = None"
        ),
    },
}
"""Knob -> setting -> the kind of bug it is."""


def masked(mask: Tensor, how: str) -> Tensor:
    """Return the mask (batch, seq) as bool, with one mistake."""
    m = mask.bool()
    after, before = m.long().cumsum(-1), m.long().flip(-1).cumsum(-1).flip(-1)
    blank = torch.zeros_like(m[:, :1])
    return {
        "ignored": lambda: torch.ones_like(m),
        "inverted": lambda: ~m,
        "late": lambda: torch.cat([blank, m[:, :-1]], 1),
        "early": lambda: torch.cat([m[:, 1:], blank], 1),
        "rolled_late": lambda: m.roll(1, -1),
        "rolled_early": lambda: m.roll(-1, -1),
        "to_end": lambda: after > 0,
        "from_start": lambda: before > 0,
        "no_first": lambda: m & (after > 1),
        "no_last": lambda: m & (before > 1),
    }.get(how, lambda: m)()


def aggregate(loss: Tensor, mask: Tensor, how: str, constant: float, k: Knobs) -> Tensor:
    """Per-token losses (batch, seq) to a scalar with the mistakes of `k`.

    how: sequence (mean of the rows' means), constant (masked sum / constant), constant_mean (that, a mean over rows).
    """
    m = masked(mask, k.get("mask", "")).to(loss.dtype)
    batch = k.get("batch", "")
    if batch == "no_last":
        loss, m = loss[:-1], m[:-1]
    sums, counts = (loss * m).sum(-1), m.sum(-1)
    if how == "sequence":
        rows = _per_row(sums, counts, loss.shape[-1], k.get("rows", ""))
    else:
        rows = _by_constant(sums, counts, loss.shape[-1], constant, k.get("constant", ""))
    n = len(rows)
    if how == "constant" or k.get("rows") == "token":
        return rows.sum() / {"mean": n, "tokens": float(counts.sum())}.get(batch, 1)
    return rows.sum() / {"sum": 1, "tokens": float(counts.sum())}.get(batch, n)


def _per_row(sums: Tensor, counts: Tensor, width: int, how: str) -> Tensor:
    least = counts.clamp(min=1)
    return {
        "token": lambda: sums / counts.sum(),
        "sum": lambda: sums,
        "width": lambda: sums / width,
        "longest": lambda: sums / counts.max(),
    }.get(how, lambda: sums / least)()


def _by_constant(sums: Tensor, counts: Tensor, width: int, constant: float, how: str) -> Tensor:
    return {
        "ignored": lambda: sums,
        "squared": lambda: sums / constant**2,
        "times": lambda: sums * constant,
        "tokens": lambda: sums / counts.sum(),
        "width": lambda: sums / width,
        "mean": lambda: sums / counts.clamp(min=1) / constant,
    }.get(how, lambda: sums / constant)()


def micro_batch_step(loss: Tensor, accumulation: int, leaf: Tensor, k: Knobs) -> Tensor:
    """Divide by the micro-batches, go backward into `leaf`, return the loss; with the mistakes of `k`."""
    loss = -loss if "loss_sign" in k else loss
    how, backward = k.get("accumulation", ""), k.get("backward", "")
    scaled = {
        "ignored": lambda: loss,
        "twice": lambda: loss / accumulation**2,
        "times": lambda: loss * accumulation,
    }.get(how, lambda: loss / accumulation)()
    gone = loss if how == "backward" else scaled
    if backward == "overwritten":
        leaf.grad = None
    if backward != "missing":
        (gone * (2 if backward == "twice" else 1)).backward()
    return (loss if how == "returned" else scaled).detach()
