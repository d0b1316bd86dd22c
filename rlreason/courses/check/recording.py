"""Record the model's calls and the optimizer steps of a loop or train step, and compute each step's right gradient."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlreason.courses.check.calling import small_model
from rlreason.courses.check.observing import multiple
from rlreason.courses.check.records import Options
from rlreason.objectives.advantages import compute_group_advantages
from rlreason.objectives.aggregation import aggregate_loss
from rlreason.objectives.losses import LOSSES

LOSS_OF = {"none": "reinforce_with_baseline", "noclip": "grpo_no_clip", "grpo": "grpo_clip", "gspo": "gspo"}
NORM_OF = {"std": "group_std", "none": "none", "mean": "group_mean"}


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
    truncated: bool
    parts: dict[str, float]  # all that reward_fn returns
    place: int = 0  # the index of its question among the prompts
    old: Tensor = field(default_factory=lambda: torch.zeros(0))  # (tokens,) under the weights that sampled
    old_untempered: Tensor = field(default_factory=lambda: torch.zeros(0))  # the same at temperature 1

    @property
    def reward(self) -> float:
        """Return the total reward."""
        return self.parts["reward"]

    @property
    def ids(self) -> list[int]:
        """Return prompt and response."""
        return self.prompt_ids + self.token_ids


class Member(NamedTuple):
    """A sample in a row of ids, and where it begins there."""

    row: int
    sample: RecordedSample
    start: int


@dataclass(eq=False)
class Forward:
    """One call of the model with a gradient, which is a micro-batch of an update."""

    ids: Tensor  # (rows, width)
    arguments: dict[str, Tensor] = field(default_factory=dict)  # attention_mask and position_ids, where given
    reached: bool = False  # a backward call reached it
    learned: bool = False  # with a gradient other than 0
    head: bool = False  # the output head was called
    half: bool = False  # computed in bfloat16 or float16
    foreign: bool = False  # it is of a copy of the policy
    members: list[Member] = field(default_factory=list)

    @property
    def is_cut(self) -> bool:
        """Return whether the ids lack the last token, as inputs do: the labels of the longest row hold one more."""
        return any(start + len(s.ids) > self.ids.shape[1] for _, s, start in self.members)

    def labels(self, pad: int, is_cut: bool = False) -> tuple[Tensor, Tensor]:
        """Return the labels (members, places) of the rows, and where they are response tokens, as bool."""
        labels = torch.nn.functional.pad(self.ids[[m.row for m in self.members], 1:], (0, 1), value=pad)
        mask = torch.zeros(labels.shape, dtype=torch.bool)
        for i, (_, s, start) in enumerate(self.members):
            mask[i, start + len(s.prompt_ids) - 1 : start + len(s.ids) - 1] = True
            if start + len(s.ids) == self.ids.shape[1] + 1:
                labels[i, -1] = s.token_ids[-1]
        return (labels, mask) if is_cut else (labels[:, :-1], mask[:, :-1])


def one_row_each(samples: Sequence[RecordedSample]) -> Forward:
    """Return the samples in a row for each, padded on the right."""
    rows = [torch.tensor(s.ids) for s in samples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return Forward(ids, members=[Member(i, s, 0) for i, s in enumerate(samples)])


def gathered(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities (rows, places) of labels, each behind the logits at its place."""
    return (logits[:, : labels.shape[1]] / temperature).log_softmax(-1).gather(-1, labels[..., None])[..., 0]


def scored(model: Any, samples: Sequence[RecordedSample], temperature: float) -> list[Tensor]:
    """Return the log-probabilities (tokens,) of each sample, without gradient."""
    rows = one_row_each(samples)
    labels, mask = rows.labels(0)
    with torch.no_grad():
        log_probs = gathered(model(rows.ids).logits, labels, temperature)
    return [row[own] for row, own in zip(log_probs, mask, strict=True)]


def find(ids: Sequence[int], samples: Sequence[RecordedSample]) -> list[tuple[RecordedSample, int]]:
    """Return the samples in a row of ids, which may lack their last token, and where each begins."""
    text = f" {' '.join(map(str, ids))} "
    matches = []
    for sample in samples:
        at = text.find(f" {' '.join(map(str, sample.ids[:-1]))} ")
        if at >= 0:
            matches.append((sample, text[: at + 1].count(" ") - 1))
    if len({start for _, start in matches}) == 1:  # samples that begin like the longest, which is in the row
        longest = max(len(s.ids) for s, _ in matches)
        matches = [(s, start) for s, start in matches if len(s.ids) == longest]
    return matches


def made_up_reward(text: str, truth: str) -> dict[str, float]:
    """Return a reward between 0 and 2 that any change of text or truth changes, with parts that differ from it."""

    def number(text: str, truth: str) -> float:
        letters = f"{text.strip()}\n{truth.strip()}"
        return sum((place + 3) * ord(letter) for place, letter in enumerate(letters)) % 97 / 48

    return {
        "reward": number(text, truth),
        "format_reward": number(text, "format"),
        "answer_reward": number(truth, text),
    }


class Recording:
    """A model, its optimizer and a reward function, which record their use."""

    def __init__(self, tokenizer: Any, options: Options, learning_rate: float) -> None:
        self.tokenizer, self.options = tokenizer, options
        self.model = small_model(vocab=len(tokenizer))
        self.twin = copy.deepcopy(self.model)  # for the computations of the check itself
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=learning_rate)
        self.optimizer.register_step_pre_hook(lambda *_: self._on_step())
        self.samples: list[RecordedSample] = []
        self.reward_calls: list[tuple[str, str]] = []
        self.forwards: list[Forward] = []  # since the last optimizer step
        self.updates: list[Update] = []
        self.model.base_model.register_forward_hook(self._on_call, with_kwargs=True)
        self.model.get_output_embeddings().register_forward_hook(self._on_logits)

    def __deepcopy__(self, memo: Any) -> Recording:
        return self  # the hooks of a copied policy, such as a reference model, record here too

    def reward(self, text: str, truth: str) -> dict[str, float]:
        """Return the reward of a response with its parts."""
        return made_up_reward(text, truth)

    def update(self) -> Update:
        """Return the update of the step that is about to be taken."""
        raise NotImplementedError

    def reward_fn(self, response: str, ground_truth: str) -> dict[str, float]:
        """Return the reward of a response with its parts, and record the call."""
        self.reward_calls.append((str(response), str(ground_truth)))
        return self.reward(str(response), str(ground_truth))

    def _on_call(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        ids = named.get("input_ids", arguments[0] if arguments else None)
        if ids is None or not output[0].requires_grad:
            return
        read = ("attention_mask", "position_ids")
        tensors = {name: named[name].clone() for name in read if isinstance(named.get(name), Tensor)}
        forward = Forward(ids.detach().clone(), tensors, foreign=module is not self.model.base_model)
        self.forwards.append(forward)

        def on_backward(gradient: Tensor) -> None:
            forward.reached = True
            forward.learned = forward.learned or bool(gradient.any())

        output[0].register_hook(on_backward)

    def _on_logits(self, module: Any, arguments: tuple[Any, ...], output: Tensor) -> None:
        if output.requires_grad and self.forwards:
            self.forwards[-1].head = True
            self.forwards[-1].half = output.dtype in (torch.bfloat16, torch.float16)

    def _on_step(self) -> None:
        with torch.enable_grad():
            self.updates.append(self.update())
        self.forwards = []

    def gradient(self) -> Tensor:
        """Return the model's gradient as one vector, 0 where there is none."""
        return torch.cat(
            [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in self.model.parameters()]
        )


@dataclass
class Update:
    """One optimizer step: what the model was called with, and everything that its right gradient depends on."""

    recording: Recording
    rollout: list[RecordedSample]  # all samples of its rollout, in order
    size: int  # the number of sequences that the loss is a mean over
    accumulation: int
    before: Tensor  # the gradient at the step before
    epoch_began: Any = None  # a copy of the model when this pass over the rollout began
    unclear: bool = False  # a question was asked twice, which leaves open what its group is

    def __post_init__(self) -> None:
        self.options, self.tokenizer = self.recording.options, self.recording.tokenizer
        self.model = copy.deepcopy(self.recording.twin)  # before the step
        self.model.load_state_dict(self.recording.model.state_dict())
        self.at_step = self.recording.gradient()
        self.forwards = [f for f in self.recording.forwards if f.reached]
        self.strangers: list[list[int]] = []  # ids of rows that were not sampled
        for forward in self.forwards:
            for row, ids in enumerate(forward.ids.tolist()):
                matches = find(ids, self.rollout)
                if not matches:
                    self.strangers.append(ids)
                forward.members += [Member(row, *match) for match in matches]
        self.passes = [forward for forward in self.forwards if forward.members]
        self.samples = list({m.sample.number: m.sample for p in self.passes for m in p.members}.values())
        self._logits: dict[Forward, Tensor] = {}

    @cached_property
    def own(self) -> Forward:
        """Return the samples in a row for each, with which we compute what is right."""
        return one_row_each(self.samples)

    @cached_property
    def mask(self) -> Tensor:
        """Return where our rows (n, places) are response tokens, as bool."""
        return self.own.labels(0)[1]

    @cached_property
    def log_probs(self) -> Tensor:
        """Return the log-probabilities (n, places) of the labels of our rows before the step, with gradient."""
        return gathered(self.logits(self.own), self.own.labels(0)[0], self.options.temperature)

    def old(self) -> Tensor:
        """Return the log-probabilities (n, places) of the policy that sampled, on response tokens."""
        old = self.log_probs.detach().clone()
        old[self.mask] = torch.cat([s.old for s in self.samples])
        return old

    def logits(self, p: Forward) -> Tensor:
        """Return the logits (members, width, vocab) of rows, with what the student's call of the model was given."""
        if p not in self._logits:
            rows = [member.row for member in p.members]
            self._logits[p] = self.model(p.ids, **p.arguments).logits[rows]
        return self._logits[p]

    @cached_property
    def has_other_context(self) -> bool:
        """Return whether the logits of some response are not those behind its prompt alone."""
        right = {s.number: row for s, row in zip(self.samples, self.logits(self.own).detach(), strict=True)}
        for p in self.passes:
            for row, (_, s, start) in zip(self.logits(p).detach(), p.members, strict=True):
                first, n = len(s.prompt_ids) - 1, len(s.token_ids)
                seen = row[start + first : start + first + n]
                ours = right[s.number][first : first + len(seen)]
                if float((seen - ours).abs().max()) > 1e-2 * float(ours.abs().max()):
                    return True
        return False

    def advantages(self, rewards: Sequence[float], groups: Sequence[int]) -> Tensor:
        """Return the advantages (n,) of the samples, from rewards and groups of the rollout."""
        o, place = self.options, {s.number: i for i, s in enumerate(self.rollout)}
        advantages = compute_group_advantages(
            torch.tensor(rewards),
            torch.tensor(groups),
            baseline=o.baseline,
            std_norm=NORM_OF[o.advantage_normalizer],
            advantage_eps=o.advantage_eps,
        )
        return advantages[[place[s.number] for s in self.samples]]

    def right_advantages(self) -> Tensor:
        """Return the right advantages (n,)."""
        return self.advantages([s.reward for s in self.rollout], [s.prompt for s in self.rollout])

    def right_loss(self) -> Tensor:
        """Return the loss of the samples by `rlreason.objectives`, with gradient."""
        o, mask = self.options, self.mask
        clip = (
            {"cliprange_low": o.cliprange, "cliprange_high": o.cliprange}
            if o.importance_reweighting_method in ("grpo", "gspo")
            else {}
        )
        loss = LOSSES[LOSS_OF[o.importance_reweighting_method]](
            self.right_advantages()[:, None], self.log_probs, self.old(), mask, **clip
        )[0]
        how, n = ("masked_mean", self.size) if o.loss_normalization == "sequence" else ("constant", 1)
        return aggregate_loss(loss, mask, how, n_sequences=n, n_tokens=0, constant=o.normalization_constant)

    def gradient_of(self, loss: Tensor) -> Tensor:
        """Return a loss's gradient by the model's parameters, as one vector."""
        parameters = list(self.model.parameters())
        grads = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in grads])

    def clipped(self, gradient: Tensor) -> Tensor:
        """Return a gradient scaled to a norm of at most `max_grad_norm`, as torch clips."""
        return gradient * min(1.0, self.options.max_grad_norm / (float(gradient.norm()) + 1e-6))

    @cached_property
    def full(self) -> Tensor:
        """Return the right gradient before it is clipped."""
        return self.gradient_of(self.right_loss())

    def is_at_step(self, gradient: Tensor) -> bool:
        """Return whether this is the gradient at the step, up to float32 rounding relative to the largest entry."""
        gap = (self.at_step - gradient).abs().max()
        return bool(gap <= 2e-3 * gradient.abs().max() + 1e-7)  # false where there is NaN

    @property
    def is_right(self) -> bool:
        """Return whether the gradient at the step is the right one."""
        return self.is_at_step(self.clipped(self.full))

    @property
    def is_finite(self) -> bool:
        """Return whether the model still computes finite numbers."""
        return bool(self.log_probs.isfinite().all() and self.full.isfinite().all())

    def factor(self) -> float | None:
        """Return the number k other than 1 with gradient at the step = k x the right one, or None."""
        return multiple(self.at_step, self.clipped(self.full))
