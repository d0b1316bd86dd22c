"""Cases and known mistakes of tokenizing, entropies and log-probabilities, which both years share."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2026
from rlreason.courses.check.calling import tensor
from rlreason.courses.check.engine import first_difference, smaller_tensors, without
from rlreason.courses.check.inputs import byte_tokenizer, gradient, random, small_model, word_tokenizer
from rlreason.courses.check.mistakes import KnobKinds
from rlreason.courses.check.subject import CallCase, Fault, Function, Inputs, Kind, Knobs, Observed, Subject

_ENCODE = "the calls of the tokenizer"
_PAD = "where rows are padded"
_SHIFT = "the slices that make input_ids, labels and mask"
_MASK = "how response_mask is made"

TOKEN_KNOBS: KnobKinds = {
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


def _wrong_tokens(i: Inputs, k: Knobs) -> dict[str, Tensor]:
    """Return the result of `tokenize_prompt_and_output`, with the mistakes of `k`."""
    tokenizer, pad, shift = i["tokenizer"], k.get("pad", ""), k.get("shift", "")
    texts = zip(i["prompt_strs"], i["output_strs"], strict=True)
    rows = [_ids(prompt, output, tokenizer, k.get("encode", "")) for prompt, output in texts]
    pad_id = {"zero": 0, "eos": tokenizer.eos_token_id}.get(pad, tokenizer.pad_token_id)
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
    labels = full[:, 1:]
    if shift == "labels":
        labels = full[:, :-1]
    elif shift == "twice":
        labels = torch.cat([full[:, 2:], full[:, -1:]], 1)
    if pad == "ignore":
        labels = labels.where(real[:, 1:] == 1, -100)
    response_mask = _wrong_response_mask(mask, real, full != tokenizer.pad_token_id, k.get("mask", ""))[:, 1:]
    return {"input_ids": full[:, :-1], "labels": labels, "response_mask": response_mask}


def _ids(prompt: str, output: str, tokenizer: Any, how: str) -> tuple[list[int], list[int]]:
    """Return the ids of prompt and output, with one mistake."""
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


def _wrong_response_mask(mask: Tensor, real: Tensor, no_pad: Tensor, how: str) -> Tensor:
    """Return the mask (rows, width) with one mistake; `real` is 1 on prompt and response."""
    blank = torch.zeros_like(mask[:, :1])
    later, sooner = torch.cat([blank, mask[:, :-1]], 1), torch.cat([mask[:, 1:], blank], 1)
    wrong: Tensor = {
        "inputs": lambda: later,
        "early": lambda: sooner,
        "prompt_too": lambda: mask | sooner,
        "all": lambda: real,
        "padding": lambda: mask | (1 - real),
        "inverted": lambda: 1 - mask,
        "pad_value": lambda: mask * no_pad,
        "no_end": lambda: mask & sooner,
        "no_first": lambda: mask & later,
    }.get(how, lambda: mask)()
    return wrong


_BEGIN = "a tokenizer that puts a begin token before every text"
_MERGE = "tokens that would merge across the border of prompt and output"
_SPACE = "white space at the borders"
_PAD_IS_END = "pad token equal to the end token"
_ONE_TOKEN = "a prompt of one token"


def _token_cases() -> list[CallCase]:
    prompts = ["what is two plus three ?", "so ?", "what is six ?"]
    outputs = ["five . <eos>", "so four plus two is six . <eos>", "."]
    trials = [
        (prompts, outputs, word_tokenizer(), "outputs of different lengths"),
        (prompts, outputs, word_tokenizer("<eos>"), _PAD_IS_END),
        (prompts[:1], outputs[:1], word_tokenizer(), "a single row"),
        (prompts, outputs, word_tokenizer("<pad>", True), _BEGIN),
        (["so", "what is"], ["two plus", "six . so . <eos>"], word_tokenizer("<eos>"), _ONE_TOKEN),
        (["the app", "7+3", "ban"], ["les are red", "=10", "anas 数é 😀"], byte_tokenizer(), _MERGE),
        (["the apples ", "so\n"], [" are red\n", " 7+3=10 "], byte_tokenizer(), _SPACE),
    ]
    return [CallCase({"prompt_strs": p, "output_strs": o, "tokenizer": t}, about=about) for p, o, t, about in trials]


def _items(answer: Any, names: Sequence[str]) -> dict[str, Tensor]:
    """Return these items of a returned dictionary; `Fault` if it has not all of them."""
    if hasattr(answer, "keys") and set(names) <= set(answer.keys()):
        return {name: tensor(answer[name], name) for name in names}
    result = list(answer.keys()) if hasattr(answer, "keys") else type(answer).__name__
    kind = Kind("it returns something else than the handout asks for", "the dictionary that is returned")
    listed = ", ".join(names) if len(names) > 2 else " and ".join(names)
    raise Fault(kind, str(result), f"a dictionary with {listed}")


def _observe_tokens(function: Function, inputs: Inputs) -> Observed:
    observed = _items(function(**inputs), ("input_ids", "labels", "response_mask"))
    for name in ("input_ids", "labels"):
        if observed[name].is_floating_point():
            kind = Kind(f"its {name} are no whole numbers", "the dtype of what is returned")
            raise Fault(kind, str(observed[name].dtype), "torch.int64")
    return {name: value.long() for name, value in observed.items()}


def _begins_prompts(observed: Observed, inputs: Inputs) -> bool:
    """Return whether only the prompts have a begin token more, which is right too: an engine puts it there."""
    tokenizer = inputs["tokenizer"]
    begin = tokenizer.bos_token
    if begin is None or tokenizer.encode("so")[0] != tokenizer.bos_token_id:
        return False
    prompts = [f"{begin} {prompt}" for prompt in inputs["prompt_strs"]]
    ours = _observe_tokens(cs336_2026.tokenize_prompt_and_output, {**inputs, "prompt_strs": prompts})
    return first_difference(observed, ours) is None


def _one_kind_of_case(function: Function) -> Kind | None:
    """Hint at the mistake whose cases alone show a difference."""
    differing = set()
    for case in _token_cases():
        ours = _observe_tokens(cs336_2026.tokenize_prompt_and_output, case.inputs)
        try:
            observed = _observe_tokens(function, case.inputs)
        except Fault:
            continue
        if first_difference(observed, ours) is not None and not _begins_prompts(observed, case.inputs):
            differing.add(case.about)
    if differing == {_BEGIN}:
        return TOKEN_KNOBS["encode"]["special"]
    if differing == {_MERGE}:
        return TOKEN_KNOBS["encode"]["jointly"]
    if differing == {_SPACE}:
        return TOKEN_KNOBS["encode"]["stripped"]
    if differing and differing <= {_PAD_IS_END, _ONE_TOKEN}:
        return TOKEN_KNOBS["mask"]["pad_value"]
    return None


def _smaller_texts(inputs: Inputs) -> Iterator[Inputs]:
    names = ("prompt_strs", "output_strs")
    n = len(inputs["prompt_strs"])
    for row in range(n):
        if n > 1:
            yield without(inputs, names, [row], 0)
    for name in names:
        for row, text in enumerate(inputs[name]):
            words = text.split(" ")
            if len(words) > 1:
                texts = list(inputs[name])
                texts[row] = " ".join(words[1:])
                yield {**inputs, name: texts}


TOKENS = Subject(
    cs336_2026.tokenize_prompt_and_output,
    "cs336_2025 cs336_2026",
    _token_cases,
    _observe_tokens,
    _wrong_tokens,
    TOKEN_KNOBS,
    _smaller_texts,
    alike=_begins_prompts,
    hints=(_one_kind_of_case,),
)


_SUM = "the sum over the vocabulary, and what is summed"
_LOG = "which logarithm is taken, and of what"

ENTROPY_KNOBS: KnobKinds = {
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
LABEL_KNOBS: KnobKinds = {
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


def _wrong_entropy(logits: Tensor, k: Knobs) -> Tensor:
    """Return the entropies (batch, seq) of logits (batch, seq, vocab), with the mistakes of `k`."""
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


def _wrong_log_probs(i: Inputs, k: Knobs) -> dict[str, Tensor]:
    """Return the result of `get_response_log_probs`, with the mistakes of `k`."""
    logits, labels, how = i["model"](i["input_ids"]).logits, i["labels"], k.get("log", "")
    index = {
        "late": lambda: labels.roll(1, -1),
        "early": lambda: labels.roll(-1, -1),
        "inputs": lambda: i["input_ids"],
        "argmax": lambda: logits.argmax(-1),
    }.get(k.get("labels", ""), lambda: labels)()
    values = {
        "logits": lambda: logits,
        "probabilities": lambda: logits.softmax(-1),
        "negative": lambda: -logits.log_softmax(-1),
        "dim1": lambda: logits.log_softmax(1),
    }.get(how, lambda: logits.log_softmax(-1))()
    picked = values.gather(-1, index[..., None])[..., 0]
    if k.get("labels") == "cut":  # logits[:, :-1] with labels[:, 1:], and 0 for the last
        early = values.gather(-1, labels.roll(-1, -1)[..., None])[..., 0]
        picked = torch.cat([early[:, :-1], torch.zeros_like(early[:, :1])], 1)
    out = {"log_probs": picked.detach() if "grad" in k else picked}
    if i["return_token_entropy"]:
        out["token_entropy"] = _wrong_entropy(logits, k)
    return out


def _entropy_cases() -> list[CallCase]:
    cases = [
        CallCase({"logits": (torch.randn(b, t, v, generator=random(s)) * 2).round(decimals=1)})
        for s, (b, t, v) in enumerate(((2, 3, 5), (3, 3, 3), (1, 4, 7)))
    ]
    large = torch.tensor([[[150.0, 149.0, -150.0], [-140.0, -141.0, -141.0]]])
    return [*cases, CallCase({"logits": large}, branch="large", about="logits far from 0")]


def _observe_entropy(function: Function, inputs: Inputs) -> Observed:
    entropies = tensor(function(**inputs), "the entropies")
    if bool((inputs["logits"].abs() > 100).any()):  # float32 has few digits left behind 150
        # raw logits taken for log-probabilities overflow to inf, the logarithm of a softmax gives NaN
        finite, nan = entropies.isfinite().float(), entropies.isnan().float()
        return {"whether each entropy is finite": finite, "which are NaN": nan}
    return {"entropies": entropies}


def _smaller_logits(inputs: Inputs) -> Iterator[Inputs]:
    for dim in (0, 1, 2):
        for place in range(inputs["logits"].shape[dim] - 1, -1, -1):
            if inputs["logits"].shape[dim] > 1 + (dim == 2):
                yield without(inputs, ["logits"], [place], dim)
    yield from smaller_tensors(inputs, (), (), ("logits",))


ENTROPY = Subject(
    cs336_2026.compute_entropy,
    "cs336_2025 cs336_2026",
    _entropy_cases,
    _observe_entropy,
    lambda i, k: _wrong_entropy(i["logits"], k),
    ENTROPY_KNOBS,
    _smaller_logits,
)


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


def _observe_log_probs(function: Function, inputs: Inputs) -> Observed:
    answer = function(**inputs)
    observed = _items(answer, ("log_probs", "token_entropy") if inputs["return_token_entropy"] else ("log_probs",))
    weight = inputs["model"].get_output_embeddings().weight
    observed["gradient of the model's weights"] = gradient(answer["log_probs"], weight)
    return observed


LOG_PROBS = Subject(
    cs336_2026.get_response_log_probs,
    "cs336_2025 cs336_2026",
    _log_prob_cases,
    _observe_log_probs,
    _wrong_log_probs,
    {**LABEL_KNOBS, **ENTROPY_KNOBS},
    lambda inputs: smaller_tensors(inputs, ("input_ids", "labels"), ("input_ids", "labels"), ()),
)
SCORING = (TOKENS, ENTROPY, LOG_PROBS)
