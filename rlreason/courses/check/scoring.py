"""Cases and known mistakes of tokenizing, entropies and log-probabilities, which both years share."""

import math
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2026
from rlreason.courses.check.calling import random, small_model, story_tokenizer, word_tokenizer
from rlreason.courses.check.subject import CallCase, Inputs, Kind, Mistake, Subject, known

_ENCODE = "the calls of the tokenizer"
_PAD = "where rows are padded"
_SHIFT = "the slices that make input_ids, labels and mask"
_MASK = "how response_mask is made"
_JOINTLY = "prompt and output are tokenized as one text: tokens merge across the border"
_SPECIAL = "special tokens are added to prompt and output: a begin token lies between them"
_STRIPPED = "white space at the ends of the texts is stripped"
_PAD_VALUE = "the mask comes from the value of the token: an end token equal to the pad is lost"


def _encode(prompt: str, output: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    return tuple(tokenizer.encode(text, add_special_tokens=False) for text in (prompt, output))  # type: ignore[return-value]


def _encode_jointly(prompt: str, output: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    n, joint = len(_encode(prompt, output, tokenizer)[0]), _encode(prompt + output, "", tokenizer)[0]
    return joint[:n], joint[n:]


# Steps: encode (prompt, output, tokenizer); labels (tokens, which are no padding); mask (mask, which are no padding,
# which are no pad token), all of shape (rows, width).
TOKEN_MISTAKES = (
    *known("encode", _ENCODE,
        (_JOINTLY, _encode_jointly),
        (_JOINTLY, lambda p, o, t: (_encode(p, o, t)[0], _encode_jointly(p, o, t)[1])),
        (_SPECIAL, lambda p, o, t: (t.encode(p), t.encode(o))),
        ("special tokens are added to the output: a begin token lies before it",
         lambda p, o, t: (_encode(p, o, t)[0], t.encode(o))),
        (_STRIPPED, lambda p, o, t: _encode(p.strip(), o.strip(), t)),
        ("a space is put between prompt and output", lambda p, o, t: _encode(p, f" {o}", t)),
        ("an end token is added to every output",
         lambda p, o, t: (_encode(p, o, t)[0], [*_encode(p, o, t)[1], t.eos_token_id])),
    ),
    *known("start", _PAD, ("rows are padded on the left, not on the right", lambda free: free)),
    *known("pad", _PAD,
        ("rows are padded with token 0, not with the tokenizer's pad token", lambda t: 0),
        ("rows are padded with the end token, not with the tokenizer's pad token", lambda t: t.eos_token_id),
    ),
    *known("labels", _PAD, ("labels are padded with -100",
                            lambda tokens, real: tokens[:, 1:].where(real[:, 1:] == 1, -100))),
    *known("labels", _SHIFT,
        ("labels are not shifted: each is the token that stands at its own position",
         lambda tokens, real: tokens[:, :-1]),
        ("labels are shifted by two", lambda tokens, real: torch.cat([tokens[:, 2:], tokens[:, -1:]], 1)),
    ),
    *known("mask", _MASK,
        ("mask shifted by one: it is aligned with input_ids, not with labels", lambda mask, real, no_pad: _later(mask)),
        ("mask shifted by one: it begins one early and loses the last response token",
         lambda mask, real, no_pad: _sooner(mask)),
        ("mask covers the last prompt token besides the response", lambda mask, real, no_pad: mask | _sooner(mask)),
        ("prompt tokens are in the mask", lambda mask, real, no_pad: real),
        ("padding is in the mask", lambda mask, real, no_pad: mask | (1 - real)),
        ("the mask is upside down", lambda mask, real, no_pad: 1 - mask),
        (_PAD_VALUE, lambda mask, real, no_pad: mask * no_pad),
        ("the last response token is not in the mask", lambda mask, real, no_pad: mask & _sooner(mask)),
        ("the first response token is not in the mask", lambda mask, real, no_pad: mask & _later(mask)),
    ),
    *known("begin", _MASK, ("the mask begins where the longest prompt ends, for all rows",
                            lambda own, longest: longest)),
)  # fmt: skip


def _later(mask: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask, (1, 0))[:, :-1]


def _sooner(mask: Tensor) -> Tensor:
    return torch.nn.functional.pad(mask, (0, 1))[:, 1:]


def _wrong_tokens(i: Inputs, m: Mistake) -> dict[str, Tensor]:
    """Return the result of `tokenize_prompt_and_output`, with one mistake."""
    tokenizer = i["tokenizer"]
    texts = zip(i["prompt_strs"], i["output_strs"], strict=True)
    rows = [m.at("encode", _encode)(prompt, output, tokenizer) for prompt, output in texts]
    longest = max(len(prompt) for prompt, _ in rows)
    width = max(len(prompt) + len(output) for prompt, output in rows)
    tokens = torch.full((len(rows), width), m.at("pad", lambda tokenizer: tokenizer.pad_token_id)(tokenizer))
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    real = torch.zeros_like(mask)
    for row, (prompt, output) in enumerate(rows):
        n = len(prompt) + len(output)
        start = m.at("start", lambda free: 0)(width - n)
        tokens[row, start : start + n] = torch.tensor([*prompt, *output])
        real[row, start : start + n] = 1
        mask[row, m.at("begin", lambda own, longest: own)(start + len(prompt), longest) : start + n] = 1
    no_pad = (tokens != tokenizer.pad_token_id).long()
    return {
        "input_ids": tokens[:, :-1],
        "labels": m.at("labels", lambda tokens, real: tokens[:, 1:])(tokens, real),
        "response_mask": m.at("mask", lambda mask, real, no_pad: mask)(mask, real, no_pad)[:, 1:],
    }


def _token_cases() -> list[CallCase]:
    prompts = ["what is two plus three ?", "so ?", "what is six ?"]
    outputs = ["five . <eos>", "so four plus two is six . <eos>", "."]
    by_value = Kind(_PAD_VALUE, _MASK)
    begin = "a tokenizer that puts a begin token before every text"
    merge = "tokens that would merge across the border of prompt and output"
    trials = [
        (prompts, outputs, word_tokenizer(), "outputs of different lengths", None),
        (prompts, outputs, word_tokenizer("<eos>"), "pad token equal to the end token", by_value),
        (prompts[:1], outputs[:1], word_tokenizer(), "a single row", None),
        (prompts, outputs, word_tokenizer("<pad>", True), begin, Kind(_SPECIAL, _ENCODE)),
        (["so", "what is"], ["two plus", "six . so . <eos>"], word_tokenizer("<eos>"), "a prompt of one token",
         by_value),
        (["How m", "Lea ha", "ban"], ["any apples", "s 3 app", "anas 数é 😀"], story_tokenizer(), merge,
         Kind(_JOINTLY, _ENCODE)),
        (["the apples ", "so\n"], [" are red\n", " 7+3=10 "], story_tokenizer(), "white space at the borders",
         Kind(_STRIPPED, _ENCODE)),
    ]  # fmt: skip
    return [
        CallCase({"prompt_strs": p, "output_strs": o, "tokenizer": t}, about=about, meaning=meaning)
        for p, o, t, about, meaning in trials
    ]


def _with_begin(inputs: Inputs) -> Inputs | None:
    """Return the inputs with a begin token before the prompts, where an engine puts it too."""
    tokenizer = inputs["tokenizer"]
    if tokenizer.bos_token is None or tokenizer.encode("so")[0] != tokenizer.bos_token_id:
        return None
    return {**inputs, "prompt_strs": [f"{tokenizer.bos_token} {prompt}" for prompt in inputs["prompt_strs"]]}


_SUM = "the sum over the vocabulary, and what is summed"
_LOG = "which logarithm is taken, and of what"
_DIM = "the dim of softmax and log_softmax"
_SLICES = "slices of logits and labels"
_NEXT = "shifted by one: the label of the next position is scored (labels are shifted already)"


def _entropy(logits: Tensor, dim: int = -1) -> Tensor:
    logp = logits.log_softmax(dim)
    return -(logp.exp() * logp).sum(-1)


def _plogp(p: Tensor) -> Tensor:
    return -(p * p.log()).sum(-1)


def _gather(values: Tensor, labels: Tensor) -> Tensor:
    return values.gather(-1, labels[..., None])[..., 0]


def _gather_next(values: Tensor, labels: Tensor) -> Tensor:
    return _gather(values, labels.roll(-1, -1))


ENTROPY_MISTAKES = (
    *known("entropy", _LOG, ("entropies are in bits: the logarithm has base 2", lambda z: _entropy(z) / math.log(2))),
    *known("entropy", "the minus sign", ("entropies have the opposite sign", lambda z: -_entropy(z))),
    *known("entropy", _SUM, ("the mean over the vocabulary is taken, not the sum",
                             lambda z: _entropy(z) / z.shape[-1])),
    *known("entropy", _DIM,
        ("the softmax runs over positions, not over the vocabulary", lambda z: _entropy(z, 1)),
        ("the softmax runs over rows, not over the vocabulary", lambda z: _entropy(z, 0)),
    ),
    *known("entropy", _LOG,
        ("raw logits are used as log-probabilities", lambda z: -(z.exp() * z).sum(-1)),
        ("the logarithm is missing: probabilities are multiplied with themselves",
         lambda z: -z.softmax(-1).square().sum(-1)),
        ("probabilities are multiplied with raw logits, not with log-probabilities",
         lambda z: -(z.softmax(-1) * z).sum(-1)),
    ),
    *known("entropy", "the softmax", ("large logits overflow: exponentials are taken of raw logits",
                                      lambda z: _plogp(z.exp() / z.exp().sum(-1, keepdim=True)))),
    *known("entropy", _LOG, ("a logarithm is taken of the softmax: probabilities that underflow to 0 give NaN",
                             lambda z: _plogp(z.log_softmax(-1).exp()))),
)  # fmt: skip
LOG_PROB_MISTAKES = (
    *known("gather", _SLICES,
        ("shifted by one: the label of the position before is scored",
         lambda values, labels, ids: _gather(values, labels.roll(1, -1))),
        (_NEXT, lambda values, labels, ids: _gather_next(values, labels)),
    ),
    *known("gather", "the index of gather",
           ("input_ids are scored in place of labels", lambda values, labels, ids: _gather(values, ids))),
    *known("gather", _SLICES, (_NEXT, lambda values, labels, ids: torch.nn.functional.pad(
        _gather_next(values, labels)[:, :-1], (0, 1)))),
    *known("gather", "the index of gather",
           ("the likeliest token is scored, not the label", lambda values, labels, ids: values.amax(-1))),
    *known("log", "the log_softmax",
        ("raw logits are given back: they are not normalised", lambda z: z),
        ("probabilities are given back, not their logarithms", lambda z: z.softmax(-1)),
    ),
    *known("log", "the minus sign", ("log-probabilities have the opposite sign", lambda z: -z.log_softmax(-1))),
    *known("log", "the dim of log_softmax",
           ("the softmax runs over positions, not over the vocabulary", lambda z: z.log_softmax(1))),
    *known("result", "no_grad and detach",
           ("log-probabilities carry no gradient: nothing can be learned from them", torch.detach)),
    *ENTROPY_MISTAKES,
)  # fmt: skip


def _wrong_log_probs(i: Inputs, m: Mistake) -> dict[str, Tensor]:
    """Return the result of `get_response_log_probs`, with one mistake."""
    logits = i["model"](i["input_ids"]).logits
    values = m.at("log", lambda logits: logits.log_softmax(-1))(logits)
    picked = m.at("gather", lambda values, labels, ids: _gather(values, labels))(values, i["labels"], i["input_ids"])
    entropies = m.at("entropy", _entropy)(logits)
    return {"log_probs": m.at("result", lambda log_probs: log_probs)(picked), "token_entropy": entropies}


def _entropy_cases() -> list[CallCase]:
    cases = [
        CallCase({"logits": (torch.randn(b, t, v, generator=random(s)) * 2).round(decimals=1)})
        for s, (b, t, v) in enumerate(((2, 3, 5), (3, 3, 3), (1, 4, 7)))
    ]
    large = torch.tensor([[[100.0, 99.0, -100.0], [-100.0, -101.0, -101.0]]])
    return [*cases, CallCase({"logits": large}, branch="large", about="logits far from 0")]


def _log_prob_cases() -> list[CallCase]:
    model = small_model()
    cases = []
    for seed, (b, t) in enumerate(((2, 5), (3, 4), (1, 6))):
        ids = torch.randint(3, model.config.vocab_size, (b, t), generator=random(seed))
        labels = torch.randint(3, model.config.vocab_size, (b, t), generator=random(seed + 7))
        for want in (True, False):
            inputs: Inputs = {"model": model, "input_ids": ids, "labels": labels, "return_token_entropy": want}
            cases.append(CallCase(inputs, about=f"return_token_entropy={want}"))
    return cases


SCORING = (
    Subject(
        cs336_2026.tokenize_prompt_and_output, _token_cases, ["input_ids", "labels", "response_mask"],
        _wrong_tokens, TOKEN_MISTAKES, as_well=_with_begin,
    ),
    Subject(
        cs336_2026.compute_entropy, _entropy_cases, "entropies",
        lambda i, m: m.at("entropy", _entropy)(i["logits"]), ENTROPY_MISTAKES,
    ),
    Subject(
        cs336_2026.get_response_log_probs, _log_prob_cases, ["log_probs", "token_entropy"],
        _wrong_log_probs, LOG_PROB_MISTAKES,
    ),
)  # fmt: skip
