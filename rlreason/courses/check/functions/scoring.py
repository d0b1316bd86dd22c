"""Entropies and log-probabilities, and the tokenizing of prompts with outputs."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlreason.courses import cs336_2026
from rlreason.courses.check.calling import tensor
from rlreason.courses.check.engine import first_difference, smaller_tensors, without
from rlreason.courses.check.subject import CallCase, Fault, Function, Inputs, Kind, Knobs, Seen, Subject
from rlreason.courses.check.wrong.tokens import (
    ENTROPY_KNOBS,
    LABEL_KNOBS,
    TOKEN_KNOBS,
    entropy,
    response_log_probs,
    tokenized,
)
from rlreason.data.tasks import make_stories

WORDS = [
    "<pad>",
    "<eos>",
    "<bos>",
    "what",
    "is",
    "two",
    "plus",
    "three",
    "?",
    "four",
    "five",
    "six",
    "so",
    ".",
    "seven",
    "minus",
    "one",
    "nine",
]
TEXTS = ("what is two plus three?", "the apples are red, the pens are blue", "7+3=10 10-4=6", "bananas and cabbages")


class ToldTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that says in a finding what it is."""

    told = "a tokenizer"


@cache
def word_tokenizer(pad: str = "<pad>", adds_begin: bool = False) -> Any:
    """One token per word; with `adds_begin` it puts a begin token before every text unless told not to."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if adds_begin:
        begin = ("<bos>", WORDS.index("<bos>"))
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[begin])  # type: ignore[assignment]
    tokenizer = ToldTokenizer(tokenizer_object=core, pad_token=pad, eos_token="<eos>", bos_token="<bos>")
    told = "one token per word, ids " + ", ".join(f"{word} {i}" for i, word in enumerate(WORDS[:2]))
    tokenizer.told = told + f"; pad_token {pad}" + ("; puts <bos> before every text" if adds_begin else "")
    return tokenizer


@cache
def byte_tokenizer() -> Any:
    """Pairs of bytes merged as in real models: two texts tokenized apart need not be the ids of the joined text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    core.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<eos>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(list(TEXTS) * 4, trainer)
    tokenizer = ToldTokenizer(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>")
    tokenizer.told = "byte pairs, as real models have them"
    return tokenizer


@cache
def story_tokenizer() -> Any:
    """Byte pairs learned from the built-in number stories."""
    from rlreason.model.tiny import build_tokenizer

    texts = [f"{story.question} {story.solution}" for story in make_stories(60, 0)]
    return build_tokenizer(texts, vocab_size=330)


def small_model(seed: int = 0, vocab: int = len(WORDS)) -> Any:
    """A random Llama of one layer over the words above."""
    from rlreason.model.tiny import build_model  # here, because transformers' models take a second to import

    model = build_model(vocab, width=16, layers=1, heads=2, init_scale=0.5, seed=seed).eval()
    model.told = "a small random Llama"
    return model


#: Log-ratios: on, near and far beyond the clip range, on both sides.
GAPS = (0.0, 0.9, -0.7, 0.12, -0.13, 0.35, -1.4, 1.6, -0.3, 0.05, -0.06, 0.22)


def random(seed: int) -> torch.Generator:
    """A source of random numbers of its own."""
    return torch.Generator().manual_seed(seed)


def ragged_mask(lengths: list[tuple[int, int]], width: int) -> Tensor:
    """(batch, width) bool, true on `length` positions from `start` on, for every (start, length)."""
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, (start, length) in enumerate(lengths):
        mask[row, start : start + length] = True
    return mask


def log_probs(rows: int, width: int, seed: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(policy, old) log-probabilities (rows, width); what stands where the mask is false is larger still."""
    policy = -0.2 - 2.5 * torch.rand(rows, width, generator=random(seed))
    gaps = torch.tensor(GAPS)
    order = torch.randint(len(GAPS), (rows, width), generator=random(seed + 1))
    gap = gaps[order]
    if mask is not None:
        policy, gap = policy.where(mask, policy - 3.0), gap.where(mask, 1.7 * gap + 0.4)
    return policy, policy - gap


def advantages(rows: int, seed: int) -> Tensor:
    """(rows, 1), of both signs and different sizes."""
    values = torch.tensor([1.3, -0.8, 0.4, -1.7, 0.9, -0.25, 2.1, -1.1])
    return values.roll(seed)[:rows, None].clone()


def weights_like(value: Tensor) -> Tensor:
    """Fixed numbers between 0.5 and 1.5, one for each element: a gradient with them shows which goes where."""
    return 0.5 + torch.rand(value.shape, generator=random(9), dtype=torch.float32).to(value.dtype)


def gradient(value: Tensor, leaf: Tensor, where: Tensor | None = None) -> Tensor:
    """d sum(weights x value) / d leaf; zeros where there is no way back to it."""
    weighed = weights_like(value) * (value if where is None else value * where.to(value.dtype))
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (found,) = torch.autograd.grad(weighed.sum(), leaf, allow_unused=True)
    return torch.zeros_like(leaf) if found is None else found.detach()


def given(inputs: Inputs) -> Inputs:
    """The inputs that a call is given: what begins with an underscore is the check's own."""
    return {name: value for name, value in inputs.items() if not name.startswith("_")}


Call = Function


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
SCORING = (TOKENS, ENTROPY, SCORED)
