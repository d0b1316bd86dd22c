"""Call the user's functions on numbers, models and tokenizers made for trials, compare results, and describe bugs."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import processors
from torch import Tensor

from rlreason.data.tasks import make_stories
from rlreason.model.parameters import build_model, build_tokenizer

Function = Callable[..., Any]
Inputs = dict[str, Any]  # arguments of one call, by the handout's names
Observed = dict[str, Tensor]  # results and gradients of one call, by name
Kind = tuple[str, str]  # of a bug: what is wrong, and where to look; neither gives the solution away

#: What functions and loops are tried on.
TRIALS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("trials.yaml").read_text("utf-8"))
RAISES: Kind = ("it raises an error", "the line that is named")


@dataclass(eq=False)
class Bug(Exception):  # noqa: N818  # it is a result, not an error of ours
    """One bug as it is reported, with the inputs that show it; raised where a call shows it."""

    kind: str
    where: str
    yours: str = ""
    ours: str = ""
    inputs: dict[str, str] = field(default_factory=dict)


class NotWrittenError(Bug):
    """The user's function raised NotImplementedError or returned None: it is not written yet."""

    def __init__(self) -> None:
        super().__init__(*RAISES, "NotImplementedError, or None")


def short_text(value: Any) -> str:
    """Return a value as short text: a tensor as nested lists of four digits.

    >>> short_text([1.0, "a", 0.33333333])
    "[1, 'a', 0.3333]"
    """
    if hasattr(value, "description"):
        return str(value.description)
    if isinstance(value, Tensor):
        value = value.tolist()
    text = f"{value:.4g}" if isinstance(value, float) else repr(value)
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(short_text, value))}]"
    return text if len(text) <= 400 else f"{text[:400]} ..."


def their_error(error: BaseException) -> str:
    """Return an error of the user's code as text: its type, its first line, and the line of that code that raised it.

    >>> their_error(ValueError("no sum"))
    'ValueError: no sum'
    """
    text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
    library = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(library) and "site-packages" not in f.filename]
    return text + (f" ({theirs[-1].filename}, line {theirs[-1].lineno})" if theirs else "")


def call(function: Function, inputs: Inputs) -> Any:
    """Return what the user's function returns for the inputs by name, or by position if its parameters differ.

    `Bug` if it raises or takes neither, `NotWrittenError` if it returns nothing.
    """
    signature, given, named = inspect.signature(function), list[Any](), inputs
    try:
        signature.bind(**inputs)
    except TypeError as by_name:
        given, named = list(inputs.values()), {}
        try:
            signature.bind(*given)
        except TypeError:
            kind = f"its parameters do not fit the handout: {by_name}"
            raise Bug(kind, "the def line", f"takes {signature}", f"takes ({', '.join(inputs)})") from None
    try:
        answer = function(*given, **named)
    except BaseException as error:  # also SystemExit: whatever a stranger's function does
        if isinstance(error, NotImplementedError) and "aten" not in str(error):  # torch raises it with aten
            raise NotWrittenError from error
        raise Bug(*RAISES, their_error(error), "an answer") from error
    if answer is None:
        raise NotWrittenError
    return answer


def refuse_changes(arguments: Inputs, inputs: Inputs) -> None:
    """Raise `Bug` for a call that changed its arguments, which were copies of the inputs."""
    for name, right in inputs.items():
        value = arguments[name]
        is_same = torch.equal(value, right) if isinstance(right, Tensor) else value == right
        if isinstance(right, Tensor | list) and not is_same:
            where = f"operations on {name} that end in an underscore or assign into it"
            raise Bug(f"it changes its input {name} in place", where, short_text(value), short_text(right))


def answer_parts(answer: Any, names: str | Sequence[str]) -> dict[str, Any]:
    """Return an answer's parts by name: the items of a tuple, the values of a dictionary for a list of names, or all.

    `Bug` if it has not one for each name.
    """
    if isinstance(names, str):
        return {names: answer}
    if isinstance(names, list):
        asked = "a dictionary"
        parts = {name: answer[name] for name in names if name in answer} if isinstance(answer, Mapping) else {}
    else:
        asked = "a tuple"
        fits = isinstance(answer, tuple | list) and len(answer) == len(names)
        parts = dict(zip(names, answer, strict=True)) if fits else {}
    if len(parts) < len(names):
        kind = "it returns something else than the handout asks for"
        raise Bug(kind, "the return line", short_text(answer), f"{asked} of {', '.join(names)}")
    return parts


def tensor(value: Any, what: str) -> Tensor:
    """Return a tensor or a number as a detached tensor, a single one of any shape as a scalar; `Bug` for another."""
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise Bug(f"it returns no tensor as {what}", "the return line", type(value).__name__, "a tensor")
    return value.detach().reshape(()) if value.numel() == 1 else value.detach()


def gradient(value: Tensor, leaf: Tensor) -> Tensor:
    """Return d sum(weights x value) / d leaf; zeros if value does not depend on leaf.

    The weights are fixed numbers between 0.5 and 1.5, one for each element, which tells elements apart.
    """
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    weights = 0.5 + torch.rand(value.shape, generator=random(9)).to(value.dtype)
    total = (weights * value).sum()
    return torch.autograd.grad(total, leaf, allow_unused=True, materialize_grads=True)[0].detach()


def _are_close(yours: Tensor, ours: Tensor) -> bool:
    """Return whether two tensors of one shape differ by no more than rounding. NaN equals NaN."""
    a, b = yours.double(), ours.double()
    largest = float(b.abs().where(b.isfinite(), 0.0).max())
    return torch.allclose(a, b, rtol=2e-4, atol=1e-6 + 2e-5 * largest, equal_nan=True)


def first_difference(yours: Observed, ours: Observed) -> str:
    """Return the name of the first observation that differs in shape or value; "" if all are equal."""
    for name, right in ours.items():
        got = yours.get(name)
        if got is None or got.shape != right.shape or not _are_close(got, right):
            return name
    return ""


def multiple(yours: Tensor, ours: Tensor) -> float | None:
    """Return the number k other than 1 with yours = k ours everywhere, or None."""
    a, b = yours.double().flatten(), ours.double().flatten()
    if a.shape != b.shape:
        return None
    factor = a @ b / (b @ b)
    return float(factor) if _are_close(a, factor * b) and abs(factor - 1) > 1e-3 else None


def described(name: str, pairs: Sequence[tuple[Tensor, Tensor]], where: str, rest: str = "") -> Kind:
    """Describe a difference of (yours, ours) that no known mistake explains."""
    got, right = pairs[0]
    if got.shape != right.shape:
        return f"{name}: shape {tuple(got.shape)} where the handout asks for {tuple(right.shape)}", "the return line"
    if not bool(got.isfinite().all()) and bool(right.isfinite().all()):
        where = "divisions by what can be 0, logarithms of 0 and exponentials of large numbers"
        return f"NaN or inf in its {name}", where
    first, *others = (multiple(*pair) for pair in pairs)
    if first is not None and all(f is not None and abs(f - first) <= 1e-3 * abs(first) for f in others):
        return f"{first:.4g} times the right {name}", "what it is divided by or multiplied with"
    return f"other {name} than ours{rest}", where


@cache
def story_tokenizer(pad: str = "", begin: str = "") -> Any:
    """Return a byte-pair tokenizer trained on the built-in stories; ids of two texts need not be the joined text's.

    `pad` is the padding in place of its own; `begin` is put first where special tokens are added.
    """
    texts = [f"{story.question} {story.solution}" for story in make_stories(60, 0)]
    tokenizer: Any = build_tokenizer(texts, vocab_size=330)
    tokenizer.pad_token = pad or tokenizer.pad_token
    if begin:
        special = [(begin, tokenizer.convert_tokens_to_ids(begin))]
        added = processors.TemplateProcessing(f"{begin} $A", special_tokens=special)
        tokenizer.backend_tokenizer.post_processor = added
    tokenizer.description = f"byte pairs, as real models have them; pad_token {tokenizer.pad_token}"
    return tokenizer


def small_model(seed: int = 0, vocab: int = 18) -> Any:
    """Return a random Llama of one layer over `vocab` tokens."""
    model = build_model(vocab, width=16, layers=1, heads=2, init_scale=0.5, seed=seed).eval()
    model.description = "a small random Llama"
    return model


def random(seed: int) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


class TextReward:
    """A reward function that reads the reward from the response: `a0.5|t1` earns 0.5 under the ground truth `t1`.

    Under another ground truth it earns 1.5 less. The parts differ from the total. Its calls are recorded.
    """

    description = "{'reward': r, ...}, r from the responses below"

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []  # (response, ground truth)

    def __call__(self, response: str, ground_truth: str) -> dict[str, float]:
        self.calls.append((response, ground_truth))
        number, _, right_truth = response.removeprefix("a").partition("|")
        value = float(number) if response.startswith("a") else -0.0625 * len(response)
        total = value if right_truth == ground_truth else value - 1.5
        return {"reward": total, "format_reward": 1.0 - value / 4, "answer_reward": value / 2 + 0.125}


def refuse_misjudged(pairs: Iterable[tuple[str, str]], calls: Sequence[tuple[str, str]]) -> None:
    """Raise `Bug` for the first (response, its ground truth) that reward_fn was never called with."""
    judged = {(text.strip(), truth) for text, truth in calls}
    for text, truth in pairs:
        if (text.strip(), truth) in judged:
            continue
        yours = f"judged texts {short_text([response for response, other in calls if other == truth])}"
        kind = "the reward is asked for another text than was sampled, as for prompt and response together"
        if any(other == text for _, other in calls):
            kind = "reward_fn gets ground truth and response in swapped places"
        elif truths := [other for response, other in calls if response == text]:
            yours = f"judged by {short_text(truths)}"
            kind = "answers are misaligned: a response is judged by another ground truth than its question's"
        where = "the call of reward_fn: what is handed to it as response and as ground truth"
        raise Bug(kind, where, yours, f"response {text!r} judged by {truth!r}")
