"""Record what a loop or a train step does to a model: forward passes, gradients of logits, optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Forward:
    """One forward pass with a gradient: its ids (rows, width), and d loss / d logits once that is known."""

    ids: Tensor
    logits: Tensor | None = None  # (rows, width, vocab), detached; None where the output head was gone round
    gradient: Tensor | None = None  # the same shape, summed over backward calls
    backward: int = 0  # how many backward calls reached it
    foreign: bool = False  # of a copy of the policy
    half: bool = False  # computed in bfloat16 or float16


@dataclass(eq=False)
class RecordedSample:
    """A response that was sampled or given, with what the right answer is computed from."""

    number: int
    prompt: int  # the number of its prompt: samples of one prompt are a group
    round: int  # before how many optimizer steps it was sampled
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    truth: str
    truncated: bool = False
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # all that reward_fn returns
    old: Tensor = field(default_factory=lambda: torch.zeros(0))  # (tokens,) under the weights that sampled
    old_untempered: Tensor = field(default_factory=lambda: torch.zeros(0))  # the same at temperature 1
    place: int = 0  # of its question among the prompts

    @property
    def ids(self) -> list[int]:
        """Return prompt and response."""
        return self.prompt_ids + self.token_ids


class Recorder:
    """Hooks on a model that record its forward passes; `on_step` is called before each optimizer step."""

    def __init__(self, model: Any) -> None:
        self.model, self.paused = model, False
        self.forwards: list[Forward] = []  # since the last optimizer step
        self.on_step: Callable[[], None] = lambda: None
        model.get_input_embeddings().register_forward_hook(self._entered)
        model.get_output_embeddings().register_forward_hook(self._left)

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self  # a copy of the policy, such as a reference model, is written down by the same

    def _entered(self, module: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        if self.paused or not output.requires_grad:
            return
        forward = Forward(arguments[0].detach().clone(), foreign=module is not self.model.get_input_embeddings())
        self.forwards.append(forward)

        def reached(gradient: Tensor) -> None:
            forward.backward += 1

        output.register_hook(reached)

    def _left(self, module: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        if self.paused or not output.requires_grad or not self.forwards:
            return
        forward = self.forwards[-1]
        forward.logits, forward.half = output.detach().clone(), output.dtype in (torch.bfloat16, torch.float16)

        def reached(gradient: Tensor) -> None:
            known = forward.gradient
            forward.gradient = gradient.detach().clone() if known is None else known + gradient.detach()

        output.register_hook(reached)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing in this block: for the check's own passes."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def step(self) -> None:
        """Record that an optimizer step is about to be taken."""
        with self.pause():
            self.on_step()
        self.forwards = []


class RecordedSGD(torch.optim.SGD):
    """Plain gradient descent that notifies a recorder of each step."""

    told = "plain gradient descent"

    def __init__(self, model: Any, learning_rate: float, recorder: Recorder) -> None:
        super().__init__(model.parameters(), lr=learning_rate)
        self.recorder, self.steps = recorder, 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Notify, then step."""
        self.recorder.step()
        self.steps += 1
        return super().step(closure)


def scored(model: Any, samples: Sequence[RecordedSample], temperature: float, width: int) -> tuple[Tensor, Tensor]:
    """(log-probabilities (n, width) of the response tokens with gradient, logits there (n, width, vocab))."""
    longest = max(len(s.ids) for s in samples)
    ids = torch.zeros(len(samples), longest, dtype=torch.long)
    for row, s in enumerate(samples):
        ids[row, : len(s.ids)] = torch.tensor(s.ids)
    logits = model(ids).logits
    at = torch.zeros(len(samples), width, dtype=torch.long)
    labels = torch.zeros(len(samples), width, dtype=torch.long)
    for row, s in enumerate(samples):
        n = len(s.token_ids)
        at[row, :n] = torch.arange(len(s.prompt_ids) - 1, len(s.ids) - 1)
        labels[row, :n] = torch.tensor(s.token_ids)
    there = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))
    return (there / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0], there


def mask_of(samples: Sequence[RecordedSample], width: int) -> Tensor:
    """(n, width) bool, true on response tokens."""
    lengths = torch.tensor([len(s.token_ids) for s in samples])
    return torch.arange(width)[None] < lengths[:, None]


def padded(rows: Sequence[Tensor], width: int) -> Tensor:
    """Return (n, width), zeros after each row's end."""
    out = torch.zeros(len(rows), width)
    for number, row in enumerate(rows):
        out[number, : len(row)] = row
    return out
