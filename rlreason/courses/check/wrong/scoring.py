"""Compute wrong entropies, log-probabilities and masked averages."""

from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.subject import Kind, Knobs
from rlreason.courses.check.wrong.aggregation import masked

_SUM = "the sum over the vocabulary, and what is summed"
_LOG = "which logarithm is taken, and of what"

ENTROPY_KNOBS = {
    "entropy": {
        "base2": Kind("entropies are in bits: the logarithm has base 2", _LOG),
        "negative": Kind("entropies have the opposite sign", "the minus sign"),
        "mean": Kind("the mean over the vocabulary is taken, not the sum", _SUM),
        "dim1": Kind("the softmax runs over positions, not over the vocabulary", "the dim of softmax and log_softmax"),
        "dim0": Kind("the softmax runs over rows, not over the vocabulary", "the dim of softmax and log_softmax"),
        "unnormalized": Kind("raw logits are used as log-probabilities", _LOG),
        "log_missing": Kind("the logarithm is missing: probabilities are multiplied with themselves", _LOG),
        "logits": Kind("probabilities are multiplied with raw logits, not with log-probabilities", _LOG),
        "overflow": Kind("large logits overflow: exponentials are taken of raw logits", "the softmax"),
        "underflow": Kind("a logarithm is taken of the softmax: probabilities that underflow to 0 give NaN", _LOG),
    }
}
LABEL_KNOBS = {
    "labels": {
        "late": Kind("shifted by one: the label of the position before is scored", "slices of logits and labels"),
        "early": Kind("shifted by one: the label of the next position is scored (labels are shifted already)",
                      "slices of logits and labels"),
        "inputs": Kind("input_ids are scored in place of labels", "the index of gather"),
        "cut": Kind("shifted by one: the label of the next position is scored (labels are shifted already)",
                    "slices of logits and labels"),
        "argmax": Kind("the likeliest token is scored, not the label", "the index of gather"),
    },
    "log": {
        "logits": Kind("raw logits are given back: they are not normalised", "the log_softmax"),
        "probabilities": Kind("probabilities are given back, not their logarithms", "the log_softmax"),
        "negative": Kind("log-probabilities have the opposite sign", "the minus sign"),
        "dim1": Kind("the softmax runs over positions, not over the vocabulary", "the dim of log_softmax"),
    },
    "grad": {
        "none": Kind("log-probabilities carry no gradient: nothing can be learned from them", "no_grad and detach"),
    },
}  # fmt: skip
MASKED_KNOBS = {
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


def entropy(logits: Tensor, k: Knobs) -> Tensor:
    """H of (batch, seq, vocab) logits -> (batch, seq), with the mistakes of `k`."""
    how = k.get("entropy", "")
    if how == "overflow":
        weights = logits.exp()
        p = weights / weights.sum(-1, keepdim=True)
        return -(p * p.log()).sum(-1)
    dim = {"dim1": 1, "dim0": 0}.get(how, -1)
    logp = logits.log_softmax(dim)
    p = logp.exp()
    if how == "underflow":
        return -(p * p.log()).sum(-1)
    right = -(p * logp).sum(-1)
    return {
        "base2": lambda: right / 0.6931471805599453,
        "negative": lambda: -right,
        "mean": lambda: -(p * logp).mean(-1),
        "unnormalized": lambda: -(logits.exp() * logits).sum(-1),
        "log_missing": lambda: -(p * p).sum(-1),
        "logits": lambda: -(p * logits).sum(-1),
    }.get(how, lambda: right)()


def response_log_probs(model: Any, input_ids: Tensor, labels: Tensor, return_token_entropy: bool, k: Knobs) -> Any:
    """Return the result of `get_response_log_probs` with the mistakes of `k`."""
    logits = model(input_ids).logits
    index = {
        "late": lambda: labels.roll(1, -1),
        "early": lambda: labels.roll(-1, -1),
        "inputs": lambda: input_ids,
        "argmax": lambda: logits.argmax(-1),
    }.get(k.get("labels", ""), lambda: labels)()
    how = k.get("log", "")
    scaled = logits / {"half": 2.0, "double": 0.5}.get(how, 1.0)
    values = {"logits": lambda: logits, "probabilities": lambda: logits.softmax(-1)}.get(
        how, lambda: scaled.log_softmax(1 if how == "dim1" else -1)
    )()
    values = values * {"negative": -1.0, "base2": 1 / 0.6931471805599453}.get(how, 1.0)
    picked = values.gather(-1, index[..., None])[..., 0]
    if k.get("labels") == "cut":  # logits[:, :-1] with labels[:, 1:], and 0 for the last
        early = values.gather(-1, labels.roll(-1, -1)[..., None])[..., 0]
        picked = torch.cat([early[:, :-1], torch.zeros_like(early[:, :1])], 1)
    out = {"log_probs": picked.detach() if "grad" in k else picked}
    if return_token_entropy:
        out["token_entropy"] = entropy(scaled, k)
    return out


def masked_average(value: Tensor, mask: Tensor, constant: float | None, dim: int | None, k: Knobs) -> Tensor:
    """Return `masked_normalize` by a constant, or `masked_mean` if that is None, with the mistakes of `k`."""
    if "falsy" in k and dim == 0:
        dim = None
    how = k.get("dim", "")
    along = {"ignored": None, "last": -1, "first": 0}.get(how, dim)
    if how == "other" and dim is not None:
        along = 0 if dim in (1, -1) else 1
    m = masked(mask, k.get("mask", "")).to(value.dtype)
    kept = value.masked_fill(m == 0, 0.0)

    def summed(x: Tensor) -> Tensor:
        return x.sum() if along is None else x.sum(along, keepdim=how == "keep")

    total, count, size = summed(kept), summed(m), summed(torch.ones_like(m))
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
