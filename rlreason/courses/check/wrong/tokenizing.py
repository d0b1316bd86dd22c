"""Compute wrong batches of token ids: mistakes in tokenizing, special tokens, padding, shifts and masks."""

from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.subject import Kind, Knobs

_ENCODE = "the calls of the tokenizer"
_PAD = "where rows are padded"
_SHIFT = "the slices that make input_ids, labels and mask"
_MASK = "how response_mask is made"

KNOBS = {
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
