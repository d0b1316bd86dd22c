"""Entropies and log-probabilities, and the tokenizing of prompts with outputs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2026
from rlreason.courses.check.calling import tensor
from rlreason.courses.check.engine import first_difference, smaller_tensors, without
from rlreason.courses.check.functions.tensors import given, gradient, random
from rlreason.courses.check.functions.tokens import byte_tokenizer, small_model, word_tokenizer
from rlreason.courses.check.subject import CallCase, Fault, Function, Inputs, Kind, Knobs, Seen, Subject
from rlreason.courses.check.wrong.scoring import ENTROPY_KNOBS, LABEL_KNOBS, entropy, response_log_probs
from rlreason.courses.check.wrong.tokenizing import KNOBS as TOKEN_KNOBS
from rlreason.courses.check.wrong.tokenizing import tokenized


def _entropy_cases() -> list[CallCase]:
    cases = [
        CallCase({"logits": (torch.randn(b, t, v, generator=random(s)) * 2).round(decimals=1)})
        for s, (b, t, v) in enumerate(((2, 3, 5), (3, 3, 3), (1, 4, 7)))
    ]
    large = torch.tensor([[[150.0, 149.0, -150.0], [-140.0, -141.0, -141.0]]])
    return [*cases, CallCase({"logits": large}, branch="large", about="logits far from 0")]


def _observe_entropy(function: Function, inputs: Inputs) -> Seen:
    found = tensor(function(**given(inputs)), "the entropies")
    if bool((inputs["logits"].abs() > 100).any()):  # float32 has few digits left behind 150
        # raw logits taken for log-probabilities overflow to inf, the logarithm of a softmax gives NaN
        return {"whether each entropy is finite": found.isfinite().float(), "which are NaN": found.isnan().float()}
    return {"entropies": found}


def _smaller_logits(inputs: Inputs) -> Iterator[Inputs]:
    for dim in (0, 1, 2):
        for place in range(inputs["logits"].shape[dim] - 1, -1, -1):
            if inputs["logits"].shape[dim] > 1 + (dim == 2):
                yield without(inputs, ["logits"], [place], dim)
    yield from smaller_tensors(inputs, (), (), ("logits",))


ENTROPY = Subject(
    "compute_entropy",
    "cs336_2025 cs336_2026",
    ("logits",),
    cs336_2026.compute_entropy,
    _entropy_cases,
    _observe_entropy,
    lambda knobs: lambda logits: entropy(logits, knobs),
    ENTROPY_KNOBS,
    _smaller_logits,
)


def _scored_cases() -> list[CallCase]:
    model = small_model()
    cases = []
    for seed, (b, t) in enumerate(((2, 5), (3, 4), (1, 6))):
        ids = torch.randint(3, model.config.vocab_size, (b, t), generator=random(seed))
        labels = torch.randint(3, model.config.vocab_size, (b, t), generator=random(seed + 7))
        for want in (True, False):
            inputs: Inputs = {"model": model, "input_ids": ids, "labels": labels, "return_token_entropy": want}
            cases.append(CallCase(inputs, about=f"return_token_entropy={want}"))
    return cases


def _observe_scored(function: Function, inputs: Inputs) -> Seen:
    answer = function(**given(inputs))
    wanted = ["log_probs", *(["token_entropy"] if inputs["return_token_entropy"] else [])]
    if not hasattr(answer, "keys") or not set(wanted) <= set(answer.keys()):
        got = list(answer.keys()) if hasattr(answer, "keys") else type(answer).__name__
        kind = Kind("it returns something else than the handout asks for", "the dictionary that is returned")
        raise Fault(kind, str(got), f"a dictionary with {' and '.join(wanted)}")
    seen = {name: tensor(answer[name], name) for name in wanted}
    weight = inputs["model"].get_output_embeddings().weight
    seen["gradient of the model's weights"] = gradient(answer["log_probs"], weight)
    return seen


def _smaller_ids(inputs: Inputs) -> Iterator[Inputs]:
    yield from smaller_tensors(inputs, ("input_ids", "labels"), ("input_ids", "labels"), ())


SCORED = Subject(
    "get_response_log_probs",
    "cs336_2025 cs336_2026",
    ("model", "input_ids", "labels", "return_token_entropy"),
    cs336_2026.get_response_log_probs,
    _scored_cases,
    _observe_scored,
    lambda knobs: (
        lambda model, input_ids, labels, return_token_entropy: response_log_probs(
            model, input_ids, labels, return_token_entropy, knobs
        )
    ),
    {**LABEL_KNOBS, **ENTROPY_KNOBS},
    _smaller_ids,
)


_BEGIN = "a tokenizer that puts a begin token before every text"
_MERGE = "tokens that would merge across the border of prompt and output"
_SPACE = "white space at the borders"
_PAD_IS_END = "pad token equal to the end token"
_ONE_TOKEN = "a prompt of one token"


def _token_cases() -> list[CallCase]:
    prompts = ["what is two plus three ?", "so ?", "what is six ?"]
    outputs = ["five . <eos>", "so four plus two is six . <eos>", "."]
    made = [
        (prompts, outputs, word_tokenizer(), "outputs of different lengths"),
        (prompts, outputs, word_tokenizer("<eos>"), _PAD_IS_END),
        (prompts[:1], outputs[:1], word_tokenizer(), "a single row"),
        (prompts, outputs, word_tokenizer("<pad>", True), _BEGIN),
        (["so", "what is"], ["two plus", "six . so . <eos>"], word_tokenizer("<eos>"), _ONE_TOKEN),
        (["the app", "7+3", "ban"], ["les are red", "=10", "anas 数é 😀"], byte_tokenizer(),
         _MERGE),
        (["the apples ", "so\n"], [" are red\n", " 7+3=10 "], byte_tokenizer(), _SPACE),
    ]  # fmt: skip
    return [
        CallCase({"prompt_strs": p, "output_strs": o, "tokenizer": t}, about=about) for p, o, t, about in made
    ]  # fmt: skip


def _observe_tokens(function: Function, inputs: Inputs) -> Seen:
    answer = function(**given(inputs))
    names = ("input_ids", "labels", "response_mask")
    if not hasattr(answer, "keys") or not set(names) <= set(answer.keys()):
        got = list(answer.keys()) if hasattr(answer, "keys") else type(answer).__name__
        kind = Kind("it returns something else than the handout asks for", "the dictionary that is returned")
        raise Fault(kind, str(got), f"a dictionary with {', '.join(names)}")
    seen = {name: tensor(answer[name], name) for name in names}
    for name in names[:2]:
        if seen[name].is_floating_point():
            kind = Kind(f"its {name} are no whole numbers", "the dtype of what is returned")
            raise Fault(kind, str(seen[name].dtype), "torch.int64")
    return {name: value.long() for name, value in seen.items()}


def _begin_before_prompts(seen: Seen, inputs: Inputs) -> bool:
    """A begin token in front of the prompt alone is right, too: it is what an engine puts there."""
    tokenizer = inputs["tokenizer"]
    begin = tokenizer.bos_token
    if begin is None or tokenizer.encode("so")[0] != tokenizer.bos_token_id:
        return False
    prompts = [f"{begin} {prompt}" for prompt in inputs["prompt_strs"]]
    ours = _observe_tokens(cs336_2026.tokenize_prompt_and_output, {**inputs, "prompt_strs": prompts})
    return first_difference(seen, ours) is None


def _only_some(function: Function) -> Kind | None:
    """A hint: the kind of tokenizer that the differences appear with, where it is one kind alone."""
    differing = set()
    for case in _token_cases():
        ours = _observe_tokens(cs336_2026.tokenize_prompt_and_output, case.inputs)
        try:
            seen = _observe_tokens(function, case.inputs)
        except Fault:
            continue
        if first_difference(seen, ours) is not None and not _begin_before_prompts(seen, case.inputs):
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


def _wrong_tokens(knobs: Knobs) -> Function:
    def wrong(prompt_strs: list[str], output_strs: list[str], tokenizer: Any) -> dict[str, Tensor]:
        return tokenized(prompt_strs, output_strs, tokenizer, knobs)

    return wrong


TOKENS = Subject(
    "tokenize_prompt_and_output",
    "cs336_2025 cs336_2026",
    ("prompt_strs", "output_strs", "tokenizer"),
    cs336_2026.tokenize_prompt_and_output,
    _token_cases,
    _observe_tokens,
    _wrong_tokens,
    TOKEN_KNOBS,
    _smaller_texts,
    alike=_begin_before_prompts,
    hints=(_only_some,),
)
SUBJECTS = (TOKENS, ENTROPY, SCORED)
