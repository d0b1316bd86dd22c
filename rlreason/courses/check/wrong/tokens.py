"""Compute wrong per-token losses: mistakes in the ratio, the clip, the advantage and the sequence's ratio."""

from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.subject import Kind, Knobs
from rlreason.courses.check.wrong.averages import masked

_RATIO = "the line that computes the ratio of new to old probabilities"
_CLIP = "the clip of the ratio, and which of the two terms is taken"
_SIGN = "the minus sign in front of the loss"
_ADV = "how the advantages meet the log-probabilities"
_GSPO = "the mean over the response that makes the sequence's ratio"

LOSS_KNOBS = {
    "sign": {"plus": Kind("the loss has the opposite sign: descending it makes good responses rarer", _SIGN)},
    "pick": {
        "max": Kind("the larger of the two terms is taken, not the smaller (min and max swapped)", _CLIP),
        "clipped": Kind("only the clipped term is used: the other one is never compared with it", _CLIP),
        "unclipped": Kind("the clip is not applied", _CLIP),
        "min_ratio": Kind("the smaller ratio is taken before the advantage multiplies: wrong for negative ones", _CLIP),
    },
    "bounds": {
        "upper": Kind("the ratio is clipped above only", _CLIP),
        "lower": Kind("the ratio is clipped below only", _CLIP),
        "zero": Kind("the ratio is clipped around 0, not around 1", _CLIP),
        "log": Kind("the log of the ratio is clipped, not the ratio", _CLIP),
        "fixed": Kind("cliprange is ignored: 0.2 stands in its place", _CLIP),
    },
    "ratio": {
        "ignores_old": Kind("the old log-probabilities are not used: the ratio is always 1", _RATIO),
        "policy_old": Kind("gradient through old log-probabilities: old and new are the same tensor", _RATIO),
        "inverse": Kind("the ratio is upside down: old over new", _RATIO),
        "log": Kind("the log of the ratio is used as the ratio: exp is missing", _RATIO),
        "quotient": Kind("the quotient of the log-probabilities is used as the ratio", _RATIO),
        "detached": Kind("the ratio carries no gradient (detached)", _RATIO),
        "sequence": Kind("the ratio is that of the whole row, not of the token", _RATIO),
        "shifted": Kind("old and new log-probabilities are paired shifted by one", _RATIO),
    },
    "advantage": {
        "ignored": Kind("the advantage is not used", _ADV),
        "over_time": Kind("advantages are spread over positions, not over rows (broadcast along the wrong axis)", _ADV),
        "mean": Kind("every row gets the mean advantage of the batch", _ADV),
        "whitened": Kind("the advantages are normalised over the batch once more", _ADV),
        "other_input": Kind("raw rewards and advantages are swapped", "which of the two this loss type takes"),
        "reversed": Kind("rows get one another's advantages", _ADV),
    },
    "weight": {
        "probability": Kind("the probability is used where its logarithm belongs", "which of the two is multiplied"),
        "with_log": Kind("the ratio is multiplied with the log-probability besides", _RATIO),
        "detached": Kind("log-probabilities carry no gradient (detached)", "what is detached"),
    },
    "sequence": {
        "all": Kind("prompt or padding positions in the sequence's ratio", _GSPO),
        "width": Kind("the sequence's log-ratio is divided by the padded width, not by its own tokens", _GSPO),
        "sum": Kind("the sequence's ratio is a product, not a mean over its tokens (length is not divided out)", _GSPO),
        "mean_ratio": Kind("the sequence's ratio is a mean of ratios, not the exp of a mean of logs", _GSPO),
        "detached": Kind("the sequence's ratio carries no gradient (detached)", _GSPO),
        "token": Kind("the ratio is that of each token, not of the sequence", _GSPO),
    },
    "method": {
        "none": Kind("the ratio is not used: the loss is that of plain policy gradients", "the branch of this method"),
        "noclip": Kind("the clip is not applied", "the branch of this method"),
        "grpo": Kind("the clip is applied where none is asked for", "the branch of this method"),
    },
    "time": {
        "mean": Kind(
            "tokens are averaged already: every position of a row has the row's mean", "means inside the loss"
        ),
        "length": Kind("the loss of each token is divided by the length of the row", "means inside the loss"),
    },
}
"""Knob -> setting -> the kind of bug it is."""


def token_loss(
    method: str,
    advantages: Tensor,
    policy: Tensor,
    old: Tensor | None,
    cliprange: float,
    mask: Tensor | None,
    k: Knobs,
) -> Tensor:
    """The loss of each token (batch, seq) by none, noclip, grpo or gspo, with the mistakes of `k`.

    advantages (batch, 1); policy, old and mask (batch, seq).
    """
    method = k.get("method", method)
    a = _advantage(advantages, k.get("advantage", ""))
    loss = -_surrogate(method, a, policy, old, cliprange, mask, k)
    loss = -loss if "sign" in k else loss
    time = k.get("time", "")
    if time == "mean":
        loss = loss.mean(-1, keepdim=True).expand_as(loss)
    return loss / (policy.shape[-1] if time == "length" else 1)


def _advantage(a: Tensor, how: str) -> Tensor:
    changed: Tensor = {
        "ignored": lambda: torch.ones_like(a),
        "over_time": lambda: a.reshape(1, -1),
        "mean": lambda: a.mean().expand_as(a),
        "whitened": lambda: (a - a.mean()) / (a.std() + 1e-8),
        "reversed": lambda: a.flip(0),
    }.get(how, lambda: a)()
    return changed


def _surrogate(
    method: str, a: Tensor, policy: Tensor, old: Tensor | None, cliprange: float, mask: Tensor | None, k: Knobs
) -> Tensor:
    weight = k.get("weight", "")
    if method == "none" or old is None:
        return a * _plain(policy, weight)
    ratio = _sequence_ratio(policy, old, mask, k) if method == "gspo" else _ratio(policy, old, k.get("ratio", ""))
    unclipped = ratio.detach() * a * policy if weight == "with_log" else a * ratio
    if method == "noclip":
        return unclipped
    clipped = _clip(ratio, a, cliprange, k.get("bounds", ""))
    return _pick(unclipped, clipped, ratio, a, cliprange, k.get("pick", ""))


def _plain(policy: Tensor, weight: str) -> Tensor:
    return {
        "probability": lambda: policy.exp(),
        "detached": lambda: policy.detach() + 0 * policy,
    }.get(weight, lambda: policy)()


def _ratio(policy: Tensor, old: Tensor, how: str) -> Tensor:
    gap = policy - old
    return {
        "inverse": lambda: (-gap).exp(),
        "log": lambda: gap,
        "quotient": lambda: policy / old,
        "detached": lambda: gap.exp().detach() + 0 * policy,
        "ignores_old": lambda: (policy - policy.detach()).exp(),
        "policy_old": lambda: (policy - policy).exp(),
        "sequence": lambda: gap.sum(-1, keepdim=True).exp().expand_as(gap),
        "shifted": lambda: (policy - old.roll(1, -1)).exp(),
    }.get(how, lambda: gap.exp())()


def _sequence_ratio(policy: Tensor, old: Tensor, mask: Tensor | None, k: Knobs) -> Tensor:
    how = k.get("sequence", "")
    if how == "token":
        return _ratio(policy, old, k.get("ratio", ""))
    m = torch.ones_like(policy) if mask is None else mask.to(policy.dtype)
    gap = old - policy if k.get("ratio") == "inverse" else policy - old
    total, count = (gap * m).sum(-1, keepdim=True), m.sum(-1, keepdim=True).clamp(min=1)
    mean = total / count
    ratio = {
        "all": lambda: gap.mean(-1, keepdim=True).exp(),
        "width": lambda: (total / policy.shape[-1]).exp(),
        "sum": lambda: total.exp(),
        "mean_ratio": lambda: (gap.exp() * m).sum(-1, keepdim=True) / count,
        "detached": lambda: mean.exp().detach() + 0 * mean,
    }.get(how, lambda: mean.exp() if k.get("ratio") != "log" else mean)()
    if k.get("ratio") == "ignores_old":
        ratio = (mean - mean.detach()).exp()
    return ratio.expand_as(policy)


def _clip(ratio: Tensor, a: Tensor, c: float, bounds: str) -> Tensor:
    if bounds == "log":
        return ratio.clamp(min=1e-9).log().clamp(-c, c).exp() * a
    limits: dict[str, tuple[float | None, float | None]] = {
        "upper": (None, 1 + c),
        "lower": (1 - c, None),
        "zero": (-c, c),
        "fixed": (0.8, 1.2),
    }
    low, high = limits.get(bounds, (1 - c, 1 + c))
    return ratio.clamp(low, high) * a


def _pick(unclipped: Tensor, clipped: Tensor, ratio: Tensor, a: Tensor, c: float, how: str) -> Tensor:
    return {
        "max": lambda: unclipped.maximum(clipped),
        "clipped": lambda: clipped,
        "unclipped": lambda: unclipped,
        "min_ratio": lambda: ratio.minimum(ratio.clamp(1 - c, 1 + c)) * a,
    }.get(how, lambda: unclipped.minimum(clipped))()


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


_ENCODE = "the calls of the tokenizer"
_PAD = "where rows are padded"
_SHIFT = "the slices that make input_ids, labels and mask"
_MASK = "how response_mask is made"

TOKEN_KNOBS = {
    "encode": {
        "jointly": Kind("prompt and output are tokenized as one text: tokens merge across the border", _ENCODE),
        "joint_tail": Kind("prompt and output are tokenized as one text: tokens merge across the border", _ENCODE),
        "special": Kind("special tokens are added to prompt and output: a begin token lies between them", _ENCODE),
        "special_output": Kind("special tokens are added to the output: a begin token lies before it", _ENCODE),
        "stripped": Kind("white space at the ends of the texts is stripped", _ENCODE),
        "space": Kind("a space is put between prompt and output", _ENCODE),
        "end": Kind("an end token is added to every output", _ENCODE),
    },
    "pad": {
        "left": Kind("rows are padded on the left, not on the right", _PAD),
        "zero": Kind("rows are padded with token 0, not with the tokenizer's pad token", _PAD),
        "eos": Kind("rows are padded with the end token, not with the tokenizer's pad token", _PAD),
        "ignore": Kind("labels are padded with -100", _PAD),
    },
    "shift": {
        "labels": Kind("labels are not shifted: each is the token that stands at its own position", _SHIFT),
        "twice": Kind("labels are shifted by two", _SHIFT),
    },
    "mask": {
        "inputs": Kind("mask shifted by one: it is aligned with input_ids, not with labels", _MASK),
        "early": Kind("mask shifted by one: it begins one early and loses the last response token", _MASK),
        "prompt_too": Kind("mask covers the last prompt token besides the response", _MASK),
        "all": Kind("prompt tokens are in the mask", _MASK),
        "padding": Kind("padding is in the mask", _MASK),
        "inverted": Kind("the mask is upside down", _MASK),
        "pad_value": Kind("the mask comes from the value of the token: an end token equal to the pad is lost", _MASK),
        "no_end": Kind("the last response token is not in the mask", _MASK),
        "no_first": Kind("the first response token is not in the mask", _MASK),
        "longest": Kind("the mask begins where the longest prompt ends, for all rows", _MASK),
    },
}  # fmt: skip
"""Knob -> setting -> the kind of bug it is."""


def tokenized(prompts: list[str], outputs: list[str], tokenizer: Any, k: Knobs) -> dict[str, Tensor]:
    """Return the result of `tokenize_prompt_and_output` with the mistakes of `k`."""
    rows = [
        _ids(prompt, output, tokenizer, k.get("encode", "")) for prompt, output in zip(prompts, outputs, strict=True)
    ]
    end, pad = tokenizer.eos_token_id, k.get("pad", "")
    pad_id = {"zero": 0, "eos": end}.get(pad, tokenizer.pad_token_id)
    longest = max(len(p) for p, _ in rows)
    width = max(len(p) + len(o) for p, o in rows)
    full = torch.full((len(rows), width), pad_id)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    real = torch.zeros_like(mask)
    for row, (p, o) in enumerate(rows):
        n = len(p) + len(o)
        start = width - n if pad == "left" else 0
        full[row, start : start + n] = torch.tensor([*p, *o])
        real[row, start : start + n] = 1
        begin = longest if k.get("mask") == "longest" else start + len(p)
        mask[row, begin : start + n] = 1
    out = _cut(full, k.get("shift", ""))
    out["response_mask"] = _mask(mask, real, full, tokenizer, k.get("mask", ""))[:, 1:]
    if pad == "ignore":
        out["labels"] = out["labels"].where(real[:, 1:] == 1, -100)
    return out


def _ids(prompt: str, output: str, tokenizer: Any, how: str) -> tuple[list[int], list[int]]:
    if how == "stripped":
        prompt, output = prompt.strip(), output.strip()
    if how == "space":
        output = f" {output}"
    special = how == "special"
    p = tokenizer.encode(prompt, add_special_tokens=special)
    if how in ("jointly", "joint_tail"):
        joint = tokenizer.encode(prompt + output, add_special_tokens=False)
        return p if how == "joint_tail" else joint[: len(p)], joint[len(p) :]
    o = tokenizer.encode(output, add_special_tokens=special or how == "special_output")
    return p, [*o, tokenizer.eos_token_id] if how == "end" else o


def _cut(full: Tensor, shift: str) -> dict[str, Tensor]:
    inputs, labels = full[:, :-1], full[:, 1:]
    if shift == "labels":
        labels = full[:, :-1]
    elif shift == "twice":
        labels = torch.cat([full[:, 2:], full[:, -1:]], 1)
    return {"input_ids": inputs, "labels": labels}


def _mask(mask: Tensor, real: Tensor, full: Tensor, tokenizer: Any, how: str) -> Tensor:
    """Return the mask over the full width, of which the first column is cut off."""
    blank = torch.zeros_like(mask[:, :1])
    later, sooner = torch.cat([blank, mask[:, :-1]], 1), torch.cat([mask[:, 1:], blank], 1)
    found: Tensor = {
        "inputs": lambda: later,
        "early": lambda: sooner,
        "prompt_too": lambda: mask | sooner,
        "all": lambda: real,
        "padding": lambda: mask | (1 - real),
        "inverted": lambda: 1 - mask,
        "pad_value": lambda: mask * (full != tokenizer.pad_token_id),
        "no_end": lambda: mask & sooner,
        "no_first": lambda: mask & later,
    }.get(how, lambda: mask)()
    return found
