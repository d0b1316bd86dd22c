"""Record the forward passes and optimizer steps of a loop or train step, and read what was learned from the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class Forward:
    """One forward pass with a gradient: its ids (rows, width), and d loss / d logits once backward has been called."""

    ids: Tensor
    logits: Tensor | None = None  # (rows, width, vocab), detached; None if the output head was not called
    gradient: Tensor | None = None  # the same shape, summed over backward calls
    backward: int = 0  # the number of backward calls that reached it
    foreign: bool = False  # it is of a copy of the policy
    half: bool = False  # computed in bfloat16 or float16


@dataclass(eq=False)
class RecordedSample:
    """A response that was sampled or given, with everything that its right weight depends on."""

    number: int
    prompt: int  # the number of its group: samples of one prompt are a group
    round: int  # the number of optimizer steps before it was sampled
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    truth: str
    truncated: bool = False
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)  # all that reward_fn returns
    old: Tensor = field(default_factory=lambda: torch.zeros(0))  # (tokens,) under the weights that sampled
    old_untempered: Tensor = field(default_factory=lambda: torch.zeros(0))  # the same at temperature 1
    place: int = 0  # the index of its question among the prompts

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
        model.get_input_embeddings().register_forward_hook(self._on_embeddings)
        model.get_output_embeddings().register_forward_hook(self._on_logits)

    def __deepcopy__(self, memo: Any) -> Recorder:
        return self  # a copied policy, such as a reference model, is recorded here too

    def _on_embeddings(self, module: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        if self.paused or not output.requires_grad:
            return
        forward = Forward(arguments[0].detach().clone(), foreign=module is not self.model.get_input_embeddings())
        self.forwards.append(forward)

        def count(gradient: Tensor) -> None:
            forward.backward += 1

        output.register_hook(count)

    def _on_logits(self, module: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        if self.paused or not output.requires_grad or not self.forwards:
            return
        forward = self.forwards[-1]
        forward.logits, forward.half = output.detach().clone(), output.dtype in (torch.bfloat16, torch.float16)

        def add(gradient: Tensor) -> None:
            earlier = forward.gradient
            forward.gradient = gradient.detach().clone() if earlier is None else earlier + gradient.detach()

        output.register_hook(add)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing in this block, which holds forward passes of the check itself."""
        self.paused = True
        try:
            yield
        finally:
            self.paused = False

    def step(self) -> None:
        """Call `on_step` right before an optimizer step, and begin the next list of forward passes."""
        with self.pause():
            self.on_step()
        self.forwards = []


class RecordedSGD(torch.optim.SGD):
    """Gradient descent that calls a recorder before each step."""

    description = "plain gradient descent"

    def __init__(self, model: Any, learning_rate: float, recorder: Recorder) -> None:
        super().__init__(model.parameters(), lr=learning_rate)
        self.recorder, self.steps = recorder, 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        """Call the recorder, then step."""
        self.recorder.step()
        self.steps += 1
        return super().step(closure)


def scored(model: Any, samples: Sequence[RecordedSample], temperature: float, width: int) -> tuple[Tensor, Tensor]:
    """Return the log-probabilities (n, width) of response tokens, with gradient, and the logits (n, width, vocab)."""
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
    at_tokens = logits.gather(1, at[..., None].expand(-1, -1, logits.shape[-1]))
    return (at_tokens / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0], at_tokens


@dataclass(frozen=True)
class LoopOptions:
    """The objective of an update."""

    method: str = "none"  # none, noclip, grpo or gspo
    baseline: str = "mean"
    normalizer: str = "std"
    advantage_eps: float = 1e-6
    cliprange: float = 0.2
    length_norm: str = "sequence"  # or constant: masked sum / constant
    constant: float = 1.0
    temperature: float = 1.0


@dataclass
class LogitGradients:
    """What the gradients of the logits show of an optimizer step."""

    samples: list[RecordedSample] = field(default_factory=list)  # those in its forward passes
    micro: list[list[int]] = field(default_factory=list)  # their indices in `samples`, by forward pass
    weights: Tensor | None = None  # (n, width): d loss / d log-probability; None if logits were not recorded
    outside: dict[str, float] = field(default_factory=dict)  # largest gradient at positions outside the responses
    strangers: list[list[int]] = field(default_factory=list)  # ids of rows that were not sampled
    temperature_seen: float | None = None  # at which the gradient is one of log-probabilities; None: at none
    label_shift: int = 0  # how many positions off the learned tokens are


@dataclass
class RecordedUpdate(LogitGradients):
    """One optimizer step: its samples, and everything that its right gradient depends on."""

    options: LoopOptions = field(default_factory=LoopOptions)
    rollout: list[RecordedSample] = field(default_factory=list)  # all samples of its rollout, in order
    log_probs: Tensor = field(default_factory=lambda: torch.zeros(0))  # (n, width), before the step
    size: int = 1  # the number of sequences that the loss is a mean over
    accumulation: int = 1
    tokenizer: Any = None
    forwards: list[Forward] = field(default_factory=list)  # those with a backward call
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)  # at step, right, ...: see `with_gradients`
    unseen: list[RecordedSample] = field(default_factory=list)  # given for this step, but in none of its passes
    earlier: list[RecordedSample] = field(default_factory=list)  # of earlier rollouts
    refreshed: Tensor | None = None  # (n, width): log-probabilities when this pass over the rollout began
    other_context: bool = False  # the logits of some response are not those after its prompt alone
    merged: bool = False  # responses to a question that was asked twice are one group
    unclear: bool = False  # a question was asked twice, and neither grouping explains the gradient

    @property
    def width(self) -> int:
        """Return the length of the longest response of the rollout."""
        return self.log_probs.shape[1]

    @property
    def mask(self) -> Tensor:
        """Return the mask (n, width) bool, true on response tokens."""
        lengths = torch.tensor([len(s.token_ids) for s in self.samples])
        return torch.arange(self.width)[None] < lengths[:, None]

    def old(self, how: str = "") -> Tensor:
        """Return log-probabilities (n, width) of the policy that sampled; mistaken ones if `how` names a mistake."""
        if how == "refreshed" and self.refreshed is not None:
            return self.refreshed
        old = torch.zeros(len(self.samples), self.width)
        for row, s in enumerate(self.samples):
            old[row, : len(s.token_ids)] = s.old_untempered if how == "untempered" else s.old
        return old

    def group(self, s: RecordedSample) -> int:
        """Return the number of a sample's group."""
        return s.place if self.merged else s.prompt

    def places(self) -> list[int]:
        """Return for each sample its index in the rollout."""
        order = {s.number: i for i, s in enumerate(self.rollout)}
        return [order[s.number] for s in self.samples]


def read_logit_gradients(
    forwards: Sequence[Forward], rollout: Sequence[RecordedSample], width: int, temperature: float
) -> LogitGradients:
    """Read from recorded gradients of logits which samples were learned, with which weights, and what else was."""
    out = LogitGradients()
    place: dict[int, int] = {}  # of a sample's number in out.samples
    rows: list[Tensor] = []
    temperatures = tuple(dict.fromkeys((temperature, 1.0, temperature**2, 1 / temperature)))
    misfit = dict.fromkeys(temperatures, 0.0)
    shifts: list[dict[int, bool]] = []
    visible = True
    for forward in forwards:
        if not forward.backward:
            continue
        members = []
        for row, ids in enumerate(forward.ids.tolist()):
            matches = find(ids, rollout)
            if not matches and (forward.gradient is None or bool(forward.gradient[row].any())):
                out.strangers.append(ids)
            for sample, start in matches:
                if sample.number not in place:
                    place[sample.number] = len(out.samples)
                    out.samples.append(sample)
                    rows.append(torch.zeros(width))
                members.append(place[sample.number])
                if forward.gradient is None or forward.logits is None:
                    visible = False
                    continue
                gradient, first = forward.gradient[row], start + len(sample.prompt_ids) - 1
                weights, misses = _token_weights(gradient, forward.logits[row], sample, first, temperatures)
                shifts.append(_label_shifts(gradient, ids, sample, first))
                rows[place[sample.number]][: len(weights)] += weights
                for t, miss in misses.items():
                    misfit[t] = max(misfit[t], miss)
                if len(matches) == 1:
                    _note_outside(out.outside, gradient, sample, first)
        if members:
            out.micro.append(members)
    out.weights = torch.stack(rows) if rows and visible else None
    out.temperature_seen = next((t for t, miss in misfit.items() if miss < 1e-2), None)
    out.label_shift = next((d for d in (-1, 1, -2) if shifts and all(s[d] for s in shifts)), 0)
    return out


def find(ids: Sequence[int], samples: Sequence[RecordedSample]) -> list[tuple[RecordedSample, int]]:
    """Return the samples in a row of ids, which may lack their last token, and where each begins."""
    text = f" {' '.join(map(str, ids))} "
    matches = []
    for sample in samples:
        needle = f" {' '.join(map(str, sample.ids[:-1]))} "
        at = text.find(needle)
        if at >= 0:
            matches.append((sample, text[: at + 1].count(" ") - 1))
    if len({start for _, start in matches}) == 1:  # samples that begin like the longest, which is in the row
        longest = max(len(s.ids) for s, _ in matches)
        matches = [(s, start) for s, start in matches if len(s.ids) == longest]
    return matches


def _token_weights(
    gradient: Tensor, logits: Tensor, sample: RecordedSample, first: int, temperatures: Sequence[float]
) -> tuple[Tensor, dict[float, float]]:
    """Return the weights of a sample's tokens at the first temperature, and the misfit at each (0: exact).

    The gradient of a weight times log softmax(z / t) by z is weight / t x (one-hot - softmax(z / t)).
    """
    n = min(len(sample.token_ids), len(gradient) - first)
    g, z = gradient[first : first + n], logits[first : first + n]
    labels = torch.tensor(sample.token_ids[:n])
    misses, weights = {}, torch.zeros(n)
    for t in reversed(temperatures):
        direction = -(z / t).softmax(-1)
        direction[torch.arange(n), labels] += 1
        along = (g * direction).sum(-1) / direction.square().sum(-1)
        rest = (g - along[:, None] * direction).norm(dim=-1)
        sizes, least = g.norm(dim=-1), 1e-3 * gradient.norm(dim=-1).max()
        counted = sizes > max(float(least), 1e-7)  # with an advantage of 0 the gradient is rounding
        misses[t] = float((rest / sizes)[counted].max()) if bool(counted.any()) else 0.0
        weights = along * t
    return weights, misses


def _label_shifts(gradient: Tensor, ids: Sequence[int], sample: RecordedSample, first: int) -> dict[int, bool]:
    """Return for each shift whether all learned tokens of a response are that many positions off."""
    last = min(first + len(sample.token_ids), len(gradient))
    learned = {p: trained_token(gradient[p]) for p in range(first, last) if bool(gradient[p].any())}
    shifts = {}
    for shift in (-1, 1, -2):
        inside = [p for p in learned if 0 <= p + 1 + shift < len(ids)]
        shifts[shift] = bool(inside) and all(ids[p + 1 + shift] == learned[p] for p in inside)
    return shifts


def trained_token(gradient: Tensor) -> int:
    """Return the token that a gradient of logits (vocab,) is for: the only one with its sign."""
    for sign in (1, -1):
        if int((sign * gradient > 0).sum()) == 1:
            return int((sign * gradient).argmax())
    return int(gradient.abs().argmax())


def _note_outside(outside: dict[str, float], gradient: Tensor, sample: RecordedSample, first: int) -> None:
    """Note the largest gradients before a response and behind it."""
    last = first + len(sample.token_ids)
    largest = float(gradient.abs().max())
    if sample.truncated and last < len(gradient) and bool(gradient[last].any()):
        outside["token behind truncated"] = trained_token(gradient[last])
    behind = int(gradient[last:].any(-1).sum()) if last < len(gradient) else 0
    outside["places behind"] = max(outside.get("places behind", 0), behind)
    for name, part in (("prompt", gradient[:first]), ("behind", gradient[last:])):
        size = float(part.abs().max()) if part.numel() else 0.0
        if size > 1e-3 * largest:
            outside[name] = max(outside.get(name, 0.0), size)


def has_other_context(forwards: Sequence[Forward], samples: Sequence[RecordedSample], right: Tensor) -> bool:
    """Return whether recorded logits differ from those of the samples alone, `right` (n, width, vocab)."""
    place = {s.number: i for i, s in enumerate(samples)}
    for forward in forwards:
        for row, ids in enumerate(forward.ids.tolist() if forward.logits is not None else []):
            for sample, start in find(ids, samples):
                first = start + len(sample.prompt_ids) - 1
                assert forward.logits is not None
                seen = forward.logits[row, first : first + len(sample.token_ids)]
                ours = right[place[sample.number], : len(seen)]
                if float((seen - ours).abs().max()) > 1e-2 * float(ours.abs().max()):
                    return True
    return False
