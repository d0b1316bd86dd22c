"""Wrong batches of token ids: tokenizing, special tokens, padding, shifts and masks as they go astray."""

from typing import Any

import torch
from torch import Tensor

from rlreason.check.subject import Kind, Knobs

_ENCODE = "the calls of the tokenizer"
_PAD = "where rows are padded"
_SHIFT = "the slices that make input_ids, labels and mask"
_MASK = "how response_mask is made"

KNOBS = {
    "encode": {
        "jointly": Kind("prompt and output are tokenized as one text: tokens merge across the border", _ENCODE),
        "special": Kind("special tokens are added to prompt and output: a begin token lies between them", _ENCODE),
        "special_output": Kind("special tokens are added to the output: a begin token lies before it", _ENCODE),
        "joint_tail": Kind("prompt and output are tokenized as one text: tokens merge across the border", _ENCODE),
        "special_joint": Kind("special tokens are added, and prompt and output are tokenized as one text", _ENCODE),
        "stripped": Kind("white space at the ends of the texts is stripped", _ENCODE),
        "space": Kind("a space is put between prompt and output", _ENCODE),
        "space_joint": Kind("prompt and output are tokenized as one text with a space between them", _ENCODE),
        "end": Kind("an end token is added to every output", _ENCODE),
        "no_special": Kind("special tokens of the output are lost", _ENCODE),
        "swapped": Kind("output and prompt are joined in swapped order", _ENCODE),
        "output_only": Kind("the prompt is left out", _ENCODE),
    },
    "pad": {
        "left": Kind("rows are padded on the left, not on the right", _PAD),
        "left_ids": Kind("rows are padded on the left, not on the right, and the mask is not", _PAD),
        "zero": Kind("rows are padded with token 0, not with the tokenizer's pad token", _PAD),
        "eos": Kind("rows are padded with the end token, not with the tokenizer's pad token", _PAD),
        "ignore": Kind("labels are padded with -100", _PAD),
        "apart": Kind("prompts and outputs are padded apart, so that padding lies between them", _PAD),
        "wider": Kind("rows are padded by one token too many", _PAD),
        "last": Kind("rows are padded by repeating their last token", _PAD),
    },
    "shift": {
        "labels": Kind("labels are not shifted: each is the token that stands at its own position", _SHIFT),
        "per_row": Kind("each row loses its own last token before padding, not the batch its last column", _SHIFT),
        "none": Kind("nothing is cut off: input_ids and labels have the full length", _SHIFT),
        "twice": Kind("labels are shifted by two", _SHIFT),
        "swapped": Kind("input_ids and labels are swapped", _SHIFT),
    },
    "mask": {
        "inputs": Kind("mask shifted by one: it is aligned with input_ids, not with labels", _MASK),
        "early": Kind("mask shifted by one: it begins one early and loses the last response token", _MASK),
        "prompt_too": Kind("mask covers the last prompt token besides the response", _MASK),
        "all": Kind("prompt tokens are in the mask", _MASK),
        "padding": Kind("padding is in the mask", _MASK),
        "everything": Kind("prompt and padding are in the mask: it is true everywhere", _MASK),
        "inverted": Kind("the mask is upside down", _MASK),
        "pad_value": Kind("the mask comes from the value of the token: an end token equal to the pad is lost", _MASK),
        "no_end": Kind("the last response token is not in the mask", _MASK),
        "no_eos": Kind("end tokens are not in the mask", _MASK),
        "no_first": Kind("the first response token is not in the mask", _MASK),
        "prompt_only": Kind("the mask marks the prompt, not the response", _MASK),
        "longest": Kind("the mask begins where the longest prompt ends, for all rows", _MASK),
        "first_row": Kind("every row has the first row's mask", _MASK),
        "one_more": Kind("the mask reaches one position too far, into the padding", _MASK),
    },
}  # fmt: skip
"""Knob -> setting -> the kind of bug it is."""


def tokenized(prompts: list[str], outputs: list[str], tokenizer: Any, k: Knobs) -> dict[str, Tensor]:
    """What `tokenize_prompt_and_output` gives, with the mistakes of `k`."""
    rows = [
        _ids(prompt, output, tokenizer, k.get("encode", "")) for prompt, output in zip(prompts, outputs, strict=True)
    ]
    end, shift, pad = tokenizer.eos_token_id, k.get("shift", ""), k.get("pad", "")
    pad_id = {"zero": 0, "eos": end}.get(pad, tokenizer.pad_token_id)
    longest = max(len(p) for p, _ in rows)
    if pad == "apart":
        rows = [([*p, *[pad_id] * (longest - len(p))], o) for p, o in rows]
    width = max(len(p) + len(o) for p, o in rows) + (pad == "wider")
    full = torch.full((len(rows), width), pad_id)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    real = torch.zeros_like(mask)
    for row, (p, o) in enumerate(rows):
        n = len(p) + len(o)
        start = width - n if pad == "left" else 0
        at = width - n if pad == "left_ids" else start
        full[row, at : at + n] = torch.tensor([*p, *o])
        if pad == "last":
            full[row, n:] = ([*p, *o])[-1]
        real[row, start : start + n] = 1
        begin = longest if k.get("mask") == "longest" else start + len(p)
        mask[row, begin : start + n] = 1
    out = _cut(full, real, shift)
    out["response_mask"] = _mask(mask, real, full, tokenizer, k.get("mask", ""))[:, 1:]
    if pad == "ignore":
        out["labels"] = out["labels"].where(real[:, 1:] == 1, -100)
    if shift == "none":
        out["response_mask"] = mask
    return out


def _ids(prompt: str, output: str, tokenizer: Any, how: str) -> tuple[list[int], list[int]]:
    if how == "stripped":
        prompt, output = prompt.strip(), output.strip()
    if how == "space":
        output = f" {output}"
    special = how in ("special", "special_joint")
    p = tokenizer.encode(prompt, add_special_tokens=special)
    if how in ("jointly", "special_joint", "space_joint"):
        between = " " if how == "space_joint" else ""
        joint = tokenizer.encode(prompt + between + output, add_special_tokens=special)
        return joint[: len(p)], joint[len(p) :]
    if how == "joint_tail":
        return p, tokenizer.encode(prompt + output, add_special_tokens=False)[len(p) :]
    o = tokenizer.encode(output, add_special_tokens=special or how == "special_output")
    if how == "end":
        o = [*o, tokenizer.eos_token_id]
    if how == "no_special":
        o = [i for i in o if i not in tokenizer.all_special_ids]
    return {"swapped": (o, p), "output_only": ([], o)}.get(how, (p, o))


def _cut(full: Tensor, real: Tensor, shift: str) -> dict[str, Tensor]:
    inputs, labels = full[:, :-1], full[:, 1:]
    if shift == "labels":
        labels = full[:, :-1]
    elif shift == "per_row":
        last = real[:, :-1].bool() & ~real[:, 1:].bool()
        padding = full.amax() if not bool((real == 0).any()) else int(full[real == 0][0])
        inputs = inputs.where(~last, padding)
    elif shift == "none":
        inputs = labels = full
    elif shift == "twice":
        labels = torch.cat([full[:, 2:], full[:, -1:]], 1)
    elif shift == "swapped":
        inputs, labels = labels, inputs
    return {"input_ids": inputs, "labels": labels}


def _mask(mask: Tensor, real: Tensor, full: Tensor, tokenizer: Any, how: str) -> Tensor:
    """The mask over the full width, of which the first column is cut off."""
    blank = torch.zeros_like(mask[:, :1])
    later, sooner = torch.cat([blank, mask[:, :-1]], 1), torch.cat([mask[:, 1:], blank], 1)
    found: Tensor = {
        "inputs": lambda: later,
        "early": lambda: sooner,
        "prompt_too": lambda: mask | sooner,
        "all": lambda: real,
        "padding": lambda: mask | (1 - real),
        "everything": lambda: torch.ones_like(mask),
        "inverted": lambda: 1 - mask,
        "pad_value": lambda: mask * (full != tokenizer.pad_token_id),
        "no_end": lambda: mask & sooner,
        "no_eos": lambda: mask * (full != tokenizer.eos_token_id),
        "no_first": lambda: mask & later,
        "prompt_only": lambda: real * (1 - mask),
        "first_row": lambda: mask[:1].expand_as(mask),
        "one_more": lambda: mask | later,
    }.get(how, lambda: mask)()
    return found
