"""Record what a loop or a train step does to a model: forward passes, gradients of logits, optimizer steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.mistakes import (
    ADVANTAGE_KNOBS,
    AGGREGATION_KNOBS,
    LOSS_KNOBS,
    KnobKinds,
    LossInputs,
    wrong_advantages,
    wrong_average,
    wrong_token_loss,
)
from rlreason.courses.check.subject import Kind, Knobs
from rlreason.objectives.advantages import compute_group_advantages
from rlreason.objectives.aggregation import aggregate_loss
from rlreason.objectives.losses import LOSSES


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

    description = "plain gradient descent"

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


LOSS_OF = {"none": "reinforce_with_baseline", "noclip": "grpo_no_clip", "grpo": "grpo_clip", "gspo": "gspo"}
NORM_OF = {"std": "group_std", "none": "none", "mean": "group_mean"}


@dataclass(frozen=True)
class Options:
    """The objective of an update."""

    method: str = "none"  # none, noclip, grpo or gspo
    baseline: str = "mean"
    normalizer: str = "std"
    advantage_eps: float = 1e-6
    cliprange: float = 0.2
    length_norm: str = "sequence"  # or constant: a sum over the constant
    constant: float = 1.0
    temperature: float = 1.0


@dataclass
class RecordedUpdate:
    """One optimizer step: its samples, and all that its right gradient follows from."""

    options: Options
    rollout: list[RecordedSample]  # all samples of its rollout, in order
    samples: list[RecordedSample]  # those in this step
    micro: list[list[int]]  # their places in `samples`, by backward call
    log_probs: Tensor  # (n, width), before the step
    size: int  # the sequences that the loss is a mean over
    weights: Tensor | None = None  # (n, width): what they were; None where they could not be seen
    accumulation: int = 1
    tokenizer: Any = None
    outside: dict[str, float] = field(default_factory=dict)  # largest gradient at other places, by what is there
    label_shift: int = 0  # how many places off the tokens are that are learned
    temperature_seen: float | None = None  # at which the gradient is that of log-probabilities; None: at none
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)  # as they were, as they should be, ...
    strangers: list[list[int]] = field(default_factory=list)  # rows learned from that were not sampled
    unseen: list[RecordedSample] = field(default_factory=list)  # given for this step, but in none of its passes
    earlier: list[RecordedSample] = field(default_factory=list)  # of earlier rollouts
    refreshed: Tensor | None = None  # (n, width): log-probabilities when this pass over the rollout began
    other_context: bool = False  # the logits of some response are not those of prompt and response alone
    forwards: list[Forward] = field(default_factory=list)  # the passes that it was learned by
    merged: bool = False  # responses to a question that was asked twice are one group
    unclear: bool = False  # a question was asked twice, and no way to group its responses explains the gradient

    @property
    def width(self) -> int:
        """Return the length of the longest response of the rollout."""
        return self.log_probs.shape[1]

    @property
    def mask(self) -> Tensor:
        """(n, width) bool."""
        return mask_of(self.samples, self.width)

    def old(self, how: str = "") -> Tensor:
        """(n, width) log-probabilities of the policy that sampled, or wrong ones."""
        if how == "refreshed" and self.refreshed is not None:
            return self.refreshed
        return padded([s.old_untempered if how == "untempered" else s.old for s in self.samples], self.width)

    def group(self, s: RecordedSample) -> int:
        """Return the number of a sample's group."""
        return s.place if self.merged else s.prompt

    def places(self) -> list[int]:
        """Return for each sample its index in the rollout."""
        order = {s.number: i for i, s in enumerate(self.rollout)}
        return [order[s.number] for s in self.samples]


def right_weights(update: RecordedUpdate) -> Tensor:
    """(n, width): the weights by `rlreason.objectives`."""
    o = update.options
    rewards = torch.tensor([s.reward for s in update.rollout])
    groups = torch.tensor([update.group(s) for s in update.rollout])
    a = compute_group_advantages(
        rewards, groups, baseline=o.baseline, std_norm=NORM_OF[o.normalizer], advantage_eps=o.advantage_eps
    )[torch.tensor(update.places())][:, None]
    leaf, mask = update.log_probs.detach().requires_grad_(), update.mask
    clip = {"cliprange_low": o.cliprange, "cliprange_high": o.cliprange} if o.method in ("grpo", "gspo") else {}
    loss, _ = LOSSES[LOSS_OF[o.method]](a, leaf, update.old(), mask, **clip)
    total = aggregate_loss(
        loss,
        mask,
        "masked_mean" if o.length_norm == "sequence" else "constant",
        n_sequences=update.size if o.length_norm == "sequence" else 1,
        n_tokens=0,
        constant=o.constant,
    )
    return torch.autograd.grad(total, leaf)[0]


MICRO_KNOBS = {
    "micro": {
        "summed": Kind(
            "responses are summed, not averaged: their number divides nowhere",
            "what the sum over responses is divided by",
        ),
        "live": Kind(
            "responses to questions whose rewards are all equal are dropped, and the mean is taken over fewer",
            "what is done with groups of equal rewards: they count in the mean, with advantage 0",
        ),
        "not_divided": Kind(
            "micro-batches are added up without dividing: the gradient grows with their number",
            "where gradient_accumulation_steps divides the loss",
        ),
        "twice": Kind("the loss is divided by the number of micro-batches twice", "where the loss is divided"),
        "unequal": Kind(
            "a micro-batch weighs the same however many rows it has: a smaller one counts too much",
            "what the loss of a micro-batch is divided by, or multiplied with",
        ),
        "last": Kind("only the last micro-batch is learned from", "where gradients are cleared"),
        "by_setting": Kind(
            "the loss is divided by gradient_accumulation_steps though there are fewer or more micro-batches",
            "where the loss is divided",
        ),
        "share_of_constant": Kind(
            "the loss of a constant normaliser is divided by the micro-batches besides",
            "where the loss is divided",
        ),
    },
    "old": {
        "refreshed": Kind(
            "old log-probabilities are computed again in each epoch, not once with the samples",
            "where old log-probabilities are computed: in which loop",
        ),
        "untempered": Kind(
            "old log-probabilities are taken at temperature 1, new ones at the sampling temperature",
            "where old log-probabilities are computed",
        ),
    },
    "order": {
        "as_sampled": Kind(
            "groups mix questions: neighbours in the list of samples are taken for a group",
            "the order of repeated prompts, and the reshape or loop that forms the groups",
        ),
        "of_update": Kind(
            "groups mix questions: groups are formed within a shuffled or cut train batch",
            "where advantages are computed: before or after the batch is cut",
        ),
        "by_truth": Kind(
            "groups mix questions: those that have the same ground truth are taken for one group",
            "how responses are gathered into groups: by their question, never by its ground truth",
        ),
    },
    "part": {
        "answer_reward": Kind("answer_reward is taken where the total, reward, is asked for", "the use of reward_fn"),
        "format_reward": Kind("format_reward is taken where the total, reward, is asked for", "the use of reward_fn"),
        "binary": Kind("rewards are turned into 0 and 1", "what is done with the rewards"),
    },
}
KNOBS: KnobKinds = {
    "ratio": LOSS_KNOBS["ratio"],
    **MICRO_KNOBS,
    **ADVANTAGE_KNOBS,
    **{name: LOSS_KNOBS[name] for name in ("sign", "pick", "bounds", "advantage", "weight", "sequence")},
    "method": LOSS_KNOBS["method"],
    "mask": {name: AGGREGATION_KNOBS["mask"][name] for name in ("late", "early", "no_first", "no_last")},
    "rows": AGGREGATION_KNOBS["rows"]
    | {
        "width": Kind(
            "sums over tokens are divided by the padded width or sampling_max_tokens, not by the response's own tokens",
            "what the sum over a response's tokens is divided by",
        )
    },
    **{name: AGGREGATION_KNOBS[name] for name in ("batch", "constant")},
}


def wrong_weights(update: RecordedUpdate, k: Knobs) -> Tensor:
    """(n, width): the weights with these mistakes."""
    o = update.options
    a = advantages_with(update, k)[:, None]
    leaf, mask = update.log_probs.detach().requires_grad_(), update.mask
    if k.get("advantage") == "other_input":
        a = _rewards(update.samples, k)[:, None]
    old = update.old(k.get("old", "")).where(mask, update.log_probs)  # behind its end, a response has no ratio
    total = torch.zeros(())
    how = o.length_norm
    parts = update.micro[-1:] if k.get("micro") == "last" else update.micro
    n_micro = len(update.micro)
    of_constant = k.get("micro") == "share_of_constant"
    if "micro" in k and k["micro"] not in ("not_divided", "last") and (how == "constant") != of_constant:
        raise ValueError("a mistake of the other normaliser")
    for rows in parts:
        loss = wrong_token_loss(LossInputs(o.method, a[rows], leaf[rows], old[rows], o.cliprange, mask[rows]), k)
        part = wrong_average(loss, mask[rows], how, o.constant, k)
        share = len(rows) / update.size if how == "sequence" else 1.0
        share = {
            "not_divided": 1.0,
            "twice": share / n_micro,
            "unequal": 1 / n_micro,
            "live": len(rows) / len(update.samples),
            "summed": float(len(rows)),
            "by_setting": 1 / update.accumulation,
            "share_of_constant": 1 / n_micro,
        }.get(k.get("micro", ""), share)
        total = total + share * part
    return torch.autograd.grad(total, leaf)[0] * mask


def _rewards(samples: Sequence[RecordedSample], k: Knobs) -> Tensor:
    """Return (n,) rewards, or what was mistaken for them."""
    part = k.get("part", "")
    if part == "binary":
        return torch.tensor([float(s.reward > 0) for s in samples])
    return torch.tensor([s.parts.get(part, s.reward) for s in samples])


def advantages_with(update: RecordedUpdate, k: Knobs) -> Tensor:
    """(n,) of the update's samples, with mistakes."""
    o, order = update.options, k.get("order", "")
    if order == "by_truth":
        return _by_truth(update, k)
    members = update.samples if order == "of_update" else update.rollout
    number = {s.number: i for i, s in enumerate(members)}
    ranked = list(members) if order else sorted(members, key=update.group)
    if k.get("after") or k.get("groups"):
        ranked = list(members)
    size = max(Counter(update.group(s) for s in update.rollout).values())
    rewards = _rewards(ranked, k)
    if len(rewards) % size:
        raise ValueError("no whole groups")
    found = wrong_advantages(rewards, size, o.baseline, o.advantage_eps, o.normalizer, k)
    by_place = torch.zeros(len(members))
    by_place[torch.tensor([number[s.number] for s in ranked])] = found
    return by_place[torch.tensor([number[s.number] for s in update.samples])]


def _by_truth(update: RecordedUpdate, k: Knobs) -> Tensor:
    """(n,) advantages where a group is all responses whose questions have one ground truth."""
    o, truths = update.options, [s.truth for s in update.rollout]
    if len(set(truths)) == len({update.group(s) for s in update.rollout}):
        raise ValueError("no two questions have the same ground truth")
    groups = torch.tensor([truths.index(truth) for truth in truths])
    found = compute_group_advantages(
        _rewards(update.rollout, k), groups, baseline=o.baseline, std_norm=NORM_OF[o.normalizer],
        advantage_eps=o.advantage_eps,
    )  # fmt: skip
    return found[torch.tensor(update.places())]
