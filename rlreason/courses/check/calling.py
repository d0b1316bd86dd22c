"""Load the user's module, make the inputs of trial calls, and call its functions by the handout's names."""

import importlib
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlreason.courses.check.subject import Fault, Kind, TimeUpError, UnwrittenFault, short_text, their_error
from rlreason.data.tasks import make_stories
from rlreason.errors import ConfigError


class Yours:
    """The user's function, called by the handout's names, or by position if it has others."""

    def __init__(self, function: Callable[..., Any], parameters: Sequence[str]) -> None:
        self.function, self.parameters = function, parameters
        self.notes: list[str] = []  # cases that were not tried, and what is no bug but worth a look
        self.by_place = False
        self.required = dict.fromkeys(parameters, False)  # the handout's parameters: whether it has no default
        self.lacks: list[str] = []  # the handout's parameters that it does not have
        self.demands: list[str] = []  # its own parameters that get no argument
        try:
            own = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            return
        kinds = {p.kind for p in own}
        places = [p for p in own if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        named = {p.name: p for p in own if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
        pairs = {name: named[name] for name in parameters if name in named}
        if inspect.Parameter.VAR_KEYWORD not in kinds and len(pairs) < len(parameters):
            takes_any = inspect.Parameter.VAR_POSITIONAL in kinds
            self.by_place = takes_any or len(places) >= len(parameters)
            if self.by_place:
                pairs = dict(zip(parameters, places, strict=False))
            else:
                self.lacks = [name for name in parameters if name not in pairs]
        self.required |= {name: p.default is p.empty for name, p in pairs.items()}
        paired = set(pairs.values())
        self.demands = [p.name for p in {*places, *named.values()} - paired if p.default is p.empty]

    def has_defaults(self, inputs: dict[str, Any]) -> bool:
        """Return whether it can be called with these inputs alone."""
        return all(name in inputs or not required for name, required in self.required.items())

    def check_signature(self) -> None:
        """Raise `Fault` if the signature cannot take the handout's arguments."""
        wrong = f"there is none called {', '.join(self.lacks)}" if self.lacks else ""
        if not wrong and self.demands:
            wrong = f"it asks for {', '.join(self.demands)}, which is never given"
        if wrong:
            kind = Kind(f"its parameters do not fit the handout: {wrong}", "the def line")
            raise Fault(kind, f"takes {inspect.signature(self.function)}")

    def __call__(self, **given: Any) -> Any:
        """Return its answer; `Fault` if it raises or changes its inputs."""
        copies = {name: _copy(value) for name, value in given.items()}
        flags = {name: value.requires_grad for name, value in given.items() if isinstance(value, Tensor)}
        try:
            if self.by_place:
                answer = self.function(*(given[name] for name in self.parameters if name in given))
            else:
                answer = self.function(**given)
        except TimeUpError:
            raise
        except BaseException as error:  # also SystemExit: whatever a stranger's function does
            unwritten = isinstance(error, NotImplementedError) and "aten" not in str(error)  # torch raises it with aten
            fault = UnwrittenFault if unwritten else Fault
            raise fault(Kind("it raises an error", "the line that is named"), their_error(error)) from error
        finally:
            torch.set_default_dtype(torch.float32)
        self._refuse_changed(given, copies, flags)
        if answer is None:
            raise UnwrittenFault(Kind("it returns nothing (None)", "the return line"), "None")
        return answer

    def _refuse_changed(self, given: dict[str, Any], copies: dict[str, Any], flags: dict[str, bool]) -> None:
        for name, value in given.items():
            before = copies[name]
            if isinstance(value, Tensor):
                same = value.shape == before.shape and torch.equal(value.detach().nan_to_num(), before.nan_to_num())
            else:
                same = not isinstance(value, list) or value == before
            if not same:
                where = f"operations on {name} that end in an underscore or assign into it"
                kind = Kind(f"it changes its input {name} in place", where)
                raise Fault(kind, short_text(value), short_text(before))
            if name in flags and value.requires_grad and not flags[name]:
                name = f"it turns on a gradient through its input {name}, which has to stay a constant"
                kind = Kind(name, "what is done to it before it is used")
                raise Fault(kind, "requires_grad=True afterwards", "requires_grad=False")


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value


def fresh(inputs: dict[str, Any], leaf: str) -> dict[str, Any]:
    """Copy the inputs, the one named `leaf` as a tensor that collects a gradient."""
    copies = {name: _copy(value) for name, value in inputs.items()}
    if leaf:
        copies[leaf].requires_grad_()
    return copies


def answer_parts(answer: Any, names: Sequence[str]) -> tuple[Any, ...]:
    """Return the items of a returned tuple; `Fault` if it has not one for each name."""
    if isinstance(answer, tuple | list) and len(answer) == len(names):
        return tuple(answer)
    got = f"a tuple of {len(answer)}" if isinstance(answer, tuple | list) else _type(answer)
    kind = Kind("it returns something else than the handout asks for", "the return line")
    raise Fault(kind, got, f"({', '.join(names)})")


def tensor(value: Any, what: str, scalar: bool = False) -> Tensor:
    """Return the value as a detached tensor; `Fault` if it is none. A scalar may be a number, or of shape (1,)."""
    if isinstance(value, Tensor):
        if what in ("input_ids", "labels") and value.is_floating_point():
            kind = Kind(f"its {what} are no whole numbers", "the dtype of what is returned")
            raise Fault(kind, str(value.dtype), "torch.int64")
        return value.detach().reshape(()) if scalar and value.numel() == 1 else value.detach()
    if scalar and isinstance(value, int | float):
        return torch.tensor(float(value))
    kind = Kind(f"it returns no tensor as {what}", "the return line")
    raise Fault(kind, _type(value), "a tensor")


def numbers(row: Any) -> dict[str, float]:
    """Return the numbers in a dictionary of metrics."""
    out = {}
    for name, value in row.items() if isinstance(row, Mapping) else ():
        with suppress(TypeError, ValueError, RuntimeError):
            out[str(name)] = float(value)
    return out


def _type(value: Any) -> str:
    return "None" if value is None else f"an object of type {type(value).__name__}"


def load_module(path_or_name: str) -> ModuleType:
    """Load `package.module`, or the module of a file `path/to/module.py`; `ConfigError` if that fails."""
    path, here, given = Path(path_or_name), str(Path.cwd()), f"MODULE={path_or_name}:"
    if path.is_dir():
        inner = next((p.name for p in sorted(path.glob("*.py"))), "module.py")
        raise ConfigError(f"{given} is a folder: give a file of it, such as {path / inner}")
    if path_or_name.endswith(".py") or path.is_file():
        name = _importable(path)
    else:
        name = path_or_name.replace("/", ".")
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{given} there is no module {error.name} in {here} or among the installed packages: fix the name, or "
                "give the path of a .py file"
            ) from None
        raise ConfigError(f"{given} importing it fails: {their_error(error)}: fix or install that") from None
    except TimeUpError:
        raise
    except BaseException as error:  # also what ends a process, such as SystemExit
        raise ConfigError(f"{given} importing it fails: {their_error(error)}: fix that") from None


def _importable(path: Path) -> str:
    """Return a file's name as a module, which can be imported then; so can what lies next to it and above it."""
    if not path.is_file():
        raise ConfigError(f"MODULE={path}: is no file: give the path of a .py file, or the dotted name of a module")
    path = path.resolve()
    root = path.parent
    while (root / "__init__.py").is_file():  # a file of a package may import its neighbours with a dot
        root = root.parent
    sys.path[:0] = [str(root), str(path.parent), str(path.parent.parent), str(Path.cwd())]
    name = ".".join(path.relative_to(root).with_suffix("").parts)
    sys.modules.pop(name, None)  # of Python's own, or of another file
    return name


WORDS = [
    "<pad>", "<eos>", "<bos>", "what", "is", "two", "plus", "three", "?", "four", "five", "six", "so", ".", "seven",
    "minus", "one", "nine",
]  # fmt: skip


@cache
def word_tokenizer(pad: str = "<pad>", adds_begin: bool = False) -> Any:
    """Return a tokenizer of one token per word; `adds_begin` makes it put <bos> first when special tokens are added."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    if adds_begin:
        begin = ("<bos>", WORDS.index("<bos>"))
        core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[begin])  # type: ignore[assignment]
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core, pad_token=pad, eos_token="<eos>", bos_token="<bos>")
    tokenizer.description = f"one token per word, ids <pad> 0, <eos> 1; pad_token {pad}"
    if adds_begin:
        tokenizer.description += "; puts <bos> before every text"
    return tokenizer


@cache
def story_tokenizer() -> Any:
    """Return a byte-pair tokenizer trained on the built-in stories; ids of two texts need not be the joined text's."""
    from rlreason.model.parameters import build_tokenizer

    texts = [f"{story.question} {story.solution}" for story in make_stories(60, 0)]
    tokenizer: Any = build_tokenizer(texts, vocab_size=330)
    tokenizer.description = "byte pairs, as real models have them"
    return tokenizer


def small_model(seed: int = 0, vocab: int = len(WORDS)) -> Any:
    """Return a random Llama of one layer over `vocab` tokens."""
    from rlreason.model.parameters import build_model  # here, because transformers' models take a second to import

    model = build_model(vocab, width=16, layers=1, heads=2, init_scale=0.5, seed=seed).eval()
    model.description = "a small random Llama"
    return model


#: Log-ratios inside, near and far outside the clip range, on both sides.
GAPS = (0.0, 0.9, -0.7, 0.12, -0.13, 0.35, -1.4, 1.6, -0.3, 0.05, -0.06, 0.22)


def random(seed: int) -> torch.Generator:
    """Return a seeded generator."""
    return torch.Generator().manual_seed(seed)


SPANS = [(1, 3), (2, 4), (0, 2), (3, 3)]  # (start, length) of the response in each row


def response_mask(rows: int, width: int) -> Tensor:
    """Return a mask (rows, width) bool, true on the responses, which are of different lengths at different places."""
    mask = torch.zeros(rows, width, dtype=torch.bool)
    for row, (start, length) in enumerate(SPANS[:rows]):
        mask[row, start : start + length] = True
    return mask


def log_probs(rows: int, width: int, seed: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (policy, old) log-probabilities (rows, width), with larger ratios where the mask is false."""
    policy = -0.2 - 2.5 * torch.rand(rows, width, generator=random(seed))
    gap = torch.tensor(GAPS)[torch.randint(len(GAPS), (rows, width), generator=random(seed + 1))]
    if mask is not None:
        policy, gap = policy.where(mask, policy - 3.0), gap.where(mask, 1.7 * gap + 0.4)
    return policy, policy - gap


def advantages(rows: int, seed: int) -> Tensor:
    """Return advantages (rows, 1) of both signs and different sizes."""
    values = torch.tensor([1.3, -0.8, 0.4, -1.7, 0.9, -0.25, 2.1, -1.1])
    return values.roll(seed)[:rows, None].clone()


def gradient(value: Tensor, leaf: Tensor, where: Tensor | None = None) -> Tensor:
    """Return d sum(weights x value) / d leaf, summed over `where`; zeros if value does not depend on leaf.

    The weights are fixed numbers between 0.5 and 1.5, one for each element, which tells elements apart.
    """
    weights = 0.5 + torch.rand(value.shape, generator=random(9), dtype=torch.float32).to(value.dtype)
    weighed = weights * (value if where is None else value * where.to(value.dtype))
    if not value.requires_grad:
        return torch.zeros_like(leaf)
    (grad,) = torch.autograd.grad(weighed.sum(), leaf, allow_unused=True)
    return torch.zeros_like(leaf) if grad is None else grad.detach()


class TextReward:
    """A reward function that reads the reward from the response: `a0.5|t1` earns 0.5 under the ground truth `t1`.

    Under another ground truth it earns 1.5 less. The parts differ from the total.
    """

    description = "{'reward': r, ...}, r from the table of the responses below"

    def __call__(self, response: str, ground_truth: str, *more: Any, **named: Any) -> dict[str, float]:
        text, truth = str(response), str(ground_truth)
        if text[:1] == "a" and truth[:1] == "t":
            number, _, right_truth = text[1:].partition("|")
            value = float(number)
            total = value if right_truth == truth else value - 1.5
            return {"reward": total, "format_reward": 1.0 - value / 4, "answer_reward": value / 2 + 0.125}
        return {"reward": -0.0625 * (1 + len(text)), "format_reward": 0.25, "answer_reward": 0.75}
