"""Call the user's functions by the handout's names, and make the models, tokenizers and numbers of trial calls."""

import inspect
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from tokenizers import processors
from torch import Tensor

from rlreason.courses.check.records import RAISES, Fault, Function, Inputs, NotWrittenError, short_text, their_error
from rlreason.data.tasks import make_stories

_RETURN = "the return line"


def call(function: Function, inputs: Inputs) -> Any:
    """Return what the user's function returns; `Fault` if it raises, returns nothing or changes its inputs."""
    arguments = _arguments(function, inputs)
    before = {name: _copy(value) for name, value in inputs.items() if isinstance(value, Tensor | list)}
    constants = [name for name, value in inputs.items() if isinstance(value, Tensor) and not value.requires_grad]
    try:
        answer = function(*arguments.args, **arguments.kwargs)
    except BaseException as error:  # also SystemExit: whatever a stranger's function does
        if isinstance(error, NotImplementedError) and "aten" not in str(error):  # torch raises it with aten
            raise NotWrittenError from error
        raise Fault(*RAISES, their_error(error), "an answer") from error
    for name, value in before.items():
        if not _same(inputs[name], value):
            where = f"operations on {name} that end in an underscore or assign into it"
            raise Fault(f"it changes its input {name} in place", where, short_text(inputs[name]), short_text(value))
    for name in constants:
        if inputs[name].requires_grad:
            fault = f"it turns on a gradient through its input {name}, which has to stay a constant"
            raise Fault(fault, "what is done to it before it is used")
    if answer is None:
        raise NotWrittenError
    return answer


def _arguments(function: Function, inputs: Inputs) -> inspect.BoundArguments:
    """Bind the inputs to the function's parameters by name, or by position if it has other names."""
    signature = inspect.signature(function)
    try:
        return signature.bind(**inputs)
    except TypeError as by_name:
        try:
            return signature.bind(*inputs.values())
        except TypeError:
            name = f"its parameters do not fit the handout: {by_name}"
            raise Fault(name, "the def line", f"takes {signature}", f"takes ({', '.join(inputs)})") from None


def fits(function: Function, inputs: Inputs) -> bool:
    """Return whether the function can be called with these inputs."""
    try:
        _arguments(function, inputs)
    except Fault:
        return False
    return True


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, Tensor):
        return value.shape == before.shape and torch.equal(value.detach().nan_to_num(), before.nan_to_num())
    return bool(value == before)


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else list(value)


def fresh(inputs: Inputs, leaf: str) -> Inputs:
    """Copy the inputs, the one named `leaf` as a tensor that collects a gradient."""
    copies = {name: _copy(value) if isinstance(value, Tensor | list) else value for name, value in inputs.items()}
    if leaf:
        copies[leaf].requires_grad_()
    if "reward_fn" in copies:
        copies["reward_fn"] = TextReward()
    return copies


def answer_parts(answer: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the items of a returned tuple; `Fault` if it has not one for each name."""
    if isinstance(answer, tuple | list) and len(answer) == len(names):
        return tuple(answer)
    got = f"a tuple of {len(answer)}" if isinstance(answer, tuple | list) else type(answer).__name__
    raise Fault("it returns something else than the handout asks for", _RETURN, got, f"({', '.join(names)})")


def tensor(value: Any, what: str, scalar: bool = False) -> Tensor:
    """Return the value as a detached tensor; `Fault` if it is none. A scalar may be a number, or of shape (1,)."""
    if scalar and isinstance(value, int | float):
        return torch.tensor(float(value))
    if not isinstance(value, Tensor):
        raise Fault(f"it returns no tensor as {what}", _RETURN, type(value).__name__, "a tensor")
    if what in ("input_ids", "labels") and value.is_floating_point():
        raise Fault(f"its {what} are no whole numbers", "the dtype of what is returned", str(value.dtype))
    return value.detach().reshape(()) if scalar and value.numel() == 1 else value.detach()


def gradient(value: Tensor, leaf: Tensor, where: Tensor | None = None) -> Tensor:
    """Return d sum(weights x value) / d leaf, summed over `where`; zeros if value does not depend on leaf.

    The weights are fixed numbers between 0.5 and 1.5, one for each element, which tells elements apart.
    """
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    weights = 0.5 + torch.rand(value.shape, generator=random(9)).to(value.dtype)
    weighed = weights * (value if where is None else value * where.to(value.dtype))
    return torch.autograd.grad(weighed.sum(), leaf, allow_unused=True, materialize_grads=True)[0].detach()


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
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            f"{begin} $A", special_tokens=special
        )
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
