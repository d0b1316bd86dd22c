"""Call the user's functions on numbers, models and tokenizers made for trials, compare results, and describe bugs."""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor

from rlreason.data.tasks import make_stories

Function = Callable[..., Any]
Inputs = dict[str, Any]  # arguments of one call, by the handout's names
Observed = dict[str, Tensor]  # results and gradients of one call, by name
Kind = tuple[str, str]  # of a bug: what is wrong, and where to look; neither gives the solution away

RAISES: Kind = ("it raises an error", "the line that is named")


@dataclass(eq=False)
class Bug(Exception):  # noqa: N818  # it is a result, not an error of ours
    """One bug as it is reported, with the inputs that show it; raised where a call shows it."""

    kind: str
    where: str
    yours: str = ""
    ours: str = ""
    inputs: dict[str, str] = field(default_factory=dict)
    note: str = ""  # where and when it shows

    def row(self, function: str) -> dict[str, Any]:
        """Return it as a bug of this function, for --json."""
        return {"function": function, **asdict(self)}


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
    text = value if isinstance(value, str) else _numbers(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) <= 400 else f"{text[:400]} ..."


def _numbers(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_numbers, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else repr(value)


def their_error(error: BaseException) -> str:
    """Return an error of the user's code as text: its type, its first line, and the line of that code that raised it.

    >>> their_error(ValueError("no sum"))
    'ValueError: no sum'
    """
    text = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}".removesuffix(": ")
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _is_library(f.filename)]
    return text + (f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else "")


def _is_library(file: str) -> bool:
    """Return whether a file is of this package, of an installed one, or of Python itself."""
    ours = (str(Path(__file__).parent), sysconfig.get_path("stdlib"), "<")
    return file.startswith(ours) or "site-packages" in file


def call(function: Function, inputs: Inputs) -> Any:
    """Return what the user's function returns; `Bug` if it raises, `NotWrittenError` if it returns nothing."""
    arguments = _bound(function, inputs)
    try:
        answer = function(*arguments.args, **arguments.kwargs)
    except BaseException as error:  # also SystemExit: whatever a stranger's function does
        if isinstance(error, NotImplementedError) and "aten" not in str(error):  # torch raises it with aten
            raise NotWrittenError from error
        raise Bug(*RAISES, their_error(error), "an answer") from error
    if answer is None:
        raise NotWrittenError
    return answer


def _bound(function: Function, inputs: Inputs) -> inspect.BoundArguments:
    """Bind the inputs to the function's parameters by name, or by position if it has other names."""
    signature = inspect.signature(function)
    try:
        return signature.bind(**inputs)
    except TypeError as by_name:
        try:
            return signature.bind(*inputs.values())
        except TypeError:
            kind = f"its parameters do not fit the handout: {by_name}"
            raise Bug(kind, "the def line", f"takes {signature}", f"takes ({', '.join(inputs)})") from None


def changed(arguments: Inputs, inputs: Inputs) -> Bug | None:
    """Return the bug of a call that changed its arguments, which were copies of the inputs."""
    for name, right in inputs.items():
        value = arguments[name]
        is_same = torch.equal(value, right) if isinstance(right, Tensor) else value == right
        if isinstance(right, Tensor | list) and not is_same:
            where = f"operations on {name} that end in an underscore or assign into it"
            return Bug(f"it changes its input {name} in place", where, short_text(value), short_text(right))
    return None


def fresh(inputs: Inputs, leaf: str) -> Inputs:
    """Copy the inputs, the one named `leaf` as a tensor that collects a gradient."""
    copies = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor | list):
            copies[name] = value.clone() if isinstance(value, Tensor) else list(value)
    if leaf:
        copies[leaf].requires_grad_()
    if "reward_fn" in copies:
        copies["reward_fn"] = TextReward()
    return copies


def answer_parts(answer: Any, names: str | Sequence[str]) -> dict[str, Any]:
    """Return an answer's parts by name: the items of a tuple, the values of a dictionary for a list of names, or all.

    `Bug` if it has not one for each name.
    """
    if isinstance(names, str):
        return {names: answer}
    parts: dict[str, Any] = {}
    got, asked = type(answer).__name__, f"({', '.join(names)})"
    if isinstance(names, list):
        asked = f"a dictionary with {asked}"
        if isinstance(answer, Mapping):
            got, parts = str(list(answer)), {name: answer[name] for name in names if name in answer}
    elif isinstance(answer, tuple | list):
        got = f"a tuple of {len(answer)}"
        parts = dict(zip(names, answer, strict=False)) if len(answer) == len(names) else {}
    if len(parts) < len(names):
        raise Bug("it returns something else than the handout asks for", "the return line", got, asked)
    return parts


def tensor(value: Any, what: str) -> Tensor:
    """Return a tensor or a number as a detached tensor, a single one of any shape as a scalar; `Bug` for another."""
    if isinstance(value, int | float):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise Bug(f"it returns no tensor as {what}", "the return line", type(value).__name__, "a tensor")
    return value.detach().reshape(()) if value.numel() == 1 else value.detach()


def gradient(value: Tensor, leaf: Tensor, where: Tensor | None = None) -> Tensor:
    """Return d sum(weights x value) / d leaf, summed over `where`; zeros if value does not depend on leaf.

    The weights are fixed numbers between 0.5 and 1.5, one for each element, which tells elements apart.
    """
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    weights = 0.5 + torch.rand(value.shape, generator=random(9)).to(value.dtype)
    weighed = weights * (value if where is None else value * where.to(value.dtype))
    return torch.autograd.grad(weighed.sum(), leaf, allow_unused=True, materialize_grads=True)[0].detach()


def _places(yours: Tensor, ours: Tensor) -> Tensor:
    """Return where two tensors of one shape differ by more than rounding, as bool. NaN equals NaN."""
    a, b = yours.detach().double(), ours.detach().double()
    largest = b.abs().where(b.isfinite(), 0.0).max()
    allowed = 1e-6 + 2e-4 * b.abs() + 2e-5 * largest
    return ~(((a - b).abs() <= allowed) | (a == b) | (a.isnan() & b.isnan()))


def first_difference(yours: Observed, ours: Observed) -> str | None:
    """Return the name of the first observation that differs in shape or value; None if all are equal."""
    for name, right in ours.items():
        got = yours.get(name)
        if got is None or got.shape != right.shape or bool(_places(got, right).any()):
            return name
    return None


def multiple(yours: Tensor, ours: Tensor) -> float | None:
    """Return the number k other than 1 with yours = k ours everywhere, or None."""
    a, b = yours.detach().double().flatten(), ours.detach().double().flatten()
    if a.shape != b.shape or not bool(b.any()) or not bool(a.isfinite().all() & b.isfinite().all()):
        return None
    factor = float((a @ b) / (b @ b))
    is_multiple = not bool(_places(a, factor * b).any())
    return factor if is_multiple and abs(factor - 1) > 1e-3 else None


@cache
def story_tokenizer(pad: str = "", begin: str = "") -> Any:
    """Return a byte-pair tokenizer trained on the built-in stories; ids of two texts need not be the joined text's.

    `pad` is the padding in place of its own; `begin` is put first where special tokens are added.
    """
    from rlreason.model.parameters import build_tokenizer  # here, because transformers' models take a second to import

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
    from rlreason.model.parameters import build_model

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

    def __call__(self, response: str, ground_truth: str, *more: Any, **named: Any) -> dict[str, float]:
        text, truth = str(response), str(ground_truth)
        self.calls.append((text, truth))
        number, _, right_truth = text.removeprefix("a").partition("|")
        value = float(number) if text.startswith("a") else -0.0625 * len(text)
        total = value if right_truth == truth else value - 1.5
        return {"reward": total, "format_reward": 1.0 - value / 4, "answer_reward": value / 2 + 0.125}


def misjudged(pairs: Iterable[tuple[str, str]], calls: Sequence[tuple[str, str]]) -> Bug | None:
    """Return the bug of the first (response, its ground truth) that reward_fn was never called with."""
    judged = {(text.strip(), truth) for text, truth in calls}
    missing = next((pair for pair in pairs if (pair[0].strip(), pair[1]) not in judged), None)
    if missing is None:
        return None
    text, truth = missing
    its_truths = [other for response, other in calls if response == text]
    texts = [response for response, other in calls if other == truth]
    if any(other == text for _, other in calls):
        kind = "reward_fn gets ground truth and response in swapped places"
    elif its_truths:
        kind = "answers are misaligned: a response is judged by another ground truth than its question's"
    else:
        kind = "the reward is asked for another text than was sampled, as for prompt and response together"
    yours = f"judged by {its_truths[0]!r}" if its_truths else f"judged text {next(iter(texts), 'nothing')!r}"
    where = "the call of reward_fn: what is handed to it as response and as ground truth"
    return Bug(kind, where, yours, f"response {text!r} judged by {truth!r}")
