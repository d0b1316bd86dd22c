"""Record what a train loop samples, judges and learns from, and compute the right gradient of each optimizer step."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2026
from rlreason.courses.check.calling import Function, Inputs, NotWrittenError, call, small_model, story_tokenizer
from rlreason.courses.check.mistakes import (
    NO_MISTAKE,
    Mistake,
    log_probs_of,
    options_of,
    wrong_advantages,
    wrong_average,
    wrong_token_loss,
)
from rlreason.data.tasks import make_stories

OUTSIDE = -1.0  # the old log-probability outside the responses
#: Responses are made of these texts; tokenized together, some neighbours would be one token.
PIECES = ("7", "+", "3", "=", "10", " ", "b", "u", "ys", "so", "9", "-", "1", "h", "as", "4", "?", " lo", "ses", "2")


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run of a loop, or of 2026's train step as a loop of one step."""

    about: str
    settings: Inputs  # by the handout's names
    learning_rate: float = 0.3
    may_be_refused: bool = False  # handouts leave it open
    answers: int = 18  # the number of different ground truths of the 18 questions
    flat: bool = False  # all responses to the first question of a step earn the same reward
    is_step: bool = False  # its texts are tokenized again, and its samples are of another policy


@dataclass(eq=False, slots=True)
class RecordedSample:
    """A response that was sampled, with everything that its right weight depends on."""

    place: int  # the index of its question among the prompts; -1: it is none of them
    round: int  # the number of optimizer steps before it was sampled
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    truth: str
    truncated: bool
    parts: dict[str, float]  # all that reward_fn returns
    asked: Inputs  # what `generate` was called with; `repeats`: whether for several responses to a prompt
    old: Tensor = field(init=False)  # log-probabilities (tokens,) of what sampled it

    @property
    def ids(self) -> list[int]:
        """Return prompt and response."""
        return self.prompt_ids + self.token_ids

    def log_probs(self, logits: Tensor, temperature: float) -> Tensor:
        """Return the log-probabilities (tokens,) of the response under logits (1, prompt + response, vocab)."""
        behind = logits[:, len(self.prompt_ids) - 1 :]
        return log_probs_of(behind, torch.tensor([self.token_ids]), temperature)[0]

    @torch.no_grad()
    def scored_by(self, model: Any, temperature: float) -> Tensor:
        """Return the log-probabilities (tokens,) of the response, without gradient."""
        return self.log_probs(model(torch.tensor([self.ids])).logits, temperature)


@dataclass(eq=False, slots=True)
class Forward:
    """One call of the model with a gradient, which is a micro-batch of an update."""

    ids: Tensor  # (rows, width)
    hidden: Tensor  # (rows, width, model width), what the output head is given
    coarse: bool  # in half precision
    has_logits: bool = False  # whether the output head was called
    learned: bool = False  # a backward call reached it with a gradient other than 0


def as_text(ids: Sequence[int]) -> str:
    """Return ids as text, in which those of a part can be found."""
    return f" {' '.join(map(str, ids))} "


def find(ids: Sequence[int], samples: Sequence[RecordedSample]) -> tuple[RecordedSample, int] | None:
    """Return the longest sample in a row of ids, which may lack its last token, and where it begins."""
    text = as_text(ids)
    for sample in sorted(samples, key=lambda s: -len(s.ids)):
        at = text.find(as_text(sample.ids[:-1]))
        if at >= 0:
            return sample, text[:at].count(" ")
    return None


class Session:
    """One run of a loop: a model, its optimizer, `generate` and `reward_fn`, which record their use."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.settings = scenario, scenario.settings
        self.options = options_of(self.settings)
        self.tokenizer = story_tokenizer()
        self.model = small_model(vocab=len(self.tokenizer))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=scenario.learning_rate)
        self.optimizer.register_step_pre_hook(lambda *_: self.updates.append(Update(self)))
        self.model.base_model.register_forward_hook(self._on_call, with_kwargs=True)
        self.model.get_output_embeddings().register_forward_hook(self._on_head)
        stories = make_stories(18, 5, sizes=(2, 2, 9))
        self.prompts = [story.question for story in stories]
        self.truths = [f"{stories[n % scenario.answers].answer}/{n % scenario.answers}" for n in range(len(stories))]
        self.flat: set[str] = set()  # ground truths whose responses all earn the same reward, one for each step
        self.samples: list[RecordedSample] = []
        self.reward_calls: list[tuple[str, str]] = []
        self.newest: Forward | None = None
        self.forwards: list[Forward] = []  # that a backward call has reached since the last optimizer step
        self.updates: list[Update] = []

    def __deepcopy__(self, memo: Any) -> Session:
        return self  # the hooks of a copied policy, such as a reference model, record here too

    def run(self, function: Function) -> Any:
        """Return what a train step returns for responses to three questions, or a loop, which need not return anything.

        A loop gets seven parts and those settings that it takes. `NotWrittenError` for one that did nothing.
        """
        if self.scenario.is_step:
            size = self.settings["group_size"]
            rollouts = self.generate(self.prompts[:3], n=size, max_tokens=self.settings["sampling_max_tokens"])
            rows = [torch.tensor([OUTSIDE] * (len(r.prompt_ids) - 1) + r.log_probs) for r in rollouts]
            named = {
                "model": self.model,
                "tokenizer": self.tokenizer,
                "optimizer": self.optimizer,
                "reward_fn": self.reward_fn,
                "repeated_prompts": [r.prompt for r in rollouts],
                "rollout_responses": [r.text for r in rollouts],
                "repeated_ground_truths": [truth for truth in self.truths[:3] for _ in range(size)],
                "old_log_probs": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=OUTSIDE),
            } | self.settings
            own = inspect.signature(cs336_2026.grpo_train_step).parameters
            return call(function, {name: named[name] for name in own if name in named})
        parts = {
            "policy": self.model,
            "tokenizer": self.tokenizer,
            "prompts": list(self.prompts),
            "ground_truths": list(self.truths),
            "reward_fn": self.reward_fn,
            "generate": self.generate,
            "optimizer": self.optimizer,
        }
        own = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in own.values())
        taken = {name: value for name, value in self.settings.items() if takes_all or name in own}
        answer = call(lambda **given: [function(**given)], parts | taken)  # a loop need not return anything
        if answer == [None] and not self.samples and not self.updates:
            raise NotWrittenError
        return answer

    def reward_fn(self, response: str, ground_truth: str) -> dict[str, float]:
        """Return the reward of a response with its parts, and record the call."""
        self.reward_calls.append((response, ground_truth))
        return self._reward(response, ground_truth)

    def _reward(self, text: str, truth: str) -> dict[str, float]:
        """Return a reward between 0 and 2 that any change of text or truth changes, with parts that differ from it."""

        def number(text: str, truth: str) -> float:
            letters = f"{text.strip()}\n{truth.strip()}"
            return sum((place + 3) * ord(letter) for place, letter in enumerate(letters)) % 97 / 48

        total = 1.0 if truth in self.flat else number(text, truth)
        return {"reward": total, "format_reward": number(text, "format"), "answer_reward": number(truth, text)}

    def generate(
        self,
        prompts: Sequence[str],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 16,
        seed: int | None = None,
    ) -> list[SimpleNamespace]:
        """Return n responses to each prompt, prompt by prompt; a seed alone decides the responses to a prompt."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        asked = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        asked["repeats"] = n > 1 or len(set(prompts)) < len(prompts)
        returned = []
        for prompt, k in product(prompts, range(n)):
            s = self._sample(prompt, "" if seed is None else f"{seed}/{prompt}/{k}", asked)
            s.old = s.scored_by(self.model, temperature)
            if self.scenario.is_step:  # a little away from the policy
                other = s.scored_by(small_model(1, len(self.tokenizer)), temperature)
                s.old = s.old + 0.3 * (other - s.old).clamp(-2, 2)
            self.samples.append(s)
            shown = {"prompt_ids": list(s.prompt_ids), "token_ids": list(s.token_ids), "log_probs": s.old.tolist()}
            returned.append(SimpleNamespace(prompt=prompt, text=s.text, truncated=s.truncated, **shown))
        return returned

    def _sample(self, prompt: str, seed: str, asked: Inputs) -> RecordedSample:
        """Return a response by its seed; without one, its first token differs from those of the others of its group."""
        place = self.prompts.index(prompt) if prompt in self.prompts else -1
        truth, step = self.truths[place] if place >= 0 else "", len(self.updates)
        if self.scenario.flat and len(self.flat) <= step:
            self.flat.add(truth)
        firsts = {s.token_ids[0] for s in self.samples if (s.place, s.round) == (place, step)}
        max_tokens = asked["max_tokens"]
        for attempt in range(200):
            rng = Random(seed or f"{len(self.samples)}/{attempt}")
            truncated = rng.random() < 0.5
            length = max_tokens if truncated else rng.randint(2, max_tokens - 1)
            ids = [i for _ in range(length) for i in self.encode(rng.choice(PIECES))]
            ids = ids[:length] if truncated else [*ids[: length - 1], self.tokenizer.eos_token_id]
            text = self.tokenizer.decode(ids, skip_special_tokens=not self.scenario.is_step)
            if seed or (ids[0] not in firsts and (not self.scenario.is_step or self.encode(text) == ids)):
                break
        parts = self._reward(text, truth)
        return RecordedSample(place, step, self.encode(prompt), ids, text, truth, truncated, parts, asked)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def training(self) -> list[RecordedSample]:
        """Return the samples that are not of an evaluation, which has another temperature or no groups."""
        samples = [s for s in self.samples if s.asked["temperature"] == self.options.temperature] or self.samples
        return [s for s in samples if s.asked["repeats"]] or samples

    def _on_call(self, module: Any, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        ids, hidden = named.get("input_ids", arguments[0] if arguments else None), output[0]
        if ids is None or not hidden.requires_grad:
            return
        coarse = hidden.element_size() < 4 or torch.is_autocast_enabled(hidden.device.type)
        forward = self.newest = Forward(ids.clone(), hidden.detach(), coarse)

        def on_backward(gradient: Tensor) -> None:
            forward.learned |= bool(gradient.any())
            if forward not in self.forwards:  # as in a second backward call
                self.forwards.append(forward)

        hidden.register_hook(on_backward)

    def _on_head(self, module: Any, arguments: Any, output: Tensor) -> None:
        if self.newest and output.requires_grad:
            self.newest.has_logits = True

    def gradient(self) -> Tensor:
        """Return the model's gradient as one vector, 0 where there is none."""
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
        return torch.cat([gradient.flatten() for gradient in gradients])


class Update:
    """One optimizer step: what the model was called with, and everything that its right gradient depends on.

    A loop learns from its latest samples, a train batch after another.
    """

    def __init__(self, session: Session) -> None:
        self.session, self.settings, self.options = session, session.settings, session.options
        self.model = small_model(vocab=len(session.tokenizer))
        self.model.load_state_dict(session.model.state_dict())  # before the step
        self.at_step = session.gradient()
        self.before = session.updates[-1].at_step if session.updates else torch.zeros_like(self.at_step)
        self.forwards, session.forwards = session.forwards, []
        samples, self.size = session.training(), session.settings["train_batch_size"]  # a loss is the mean over so many
        self.rollout = [s for s in samples if s.round == samples[-1].round]
        asked = Counter(s.place for s in self.rollout)
        #: Which leaves open what a group is.
        self.asked_twice = max(asked.values(), default=0) > self.settings["group_size"]
        self.strangers: list[list[int]] = []  # ids of rows that were not sampled
        self.members: list[tuple[RecordedSample, Forward, int, int]] = []  # a sample, its row there, its first place
        self.passes: list[list[RecordedSample]] = []  # micro-batches
        for forward in self.forwards:
            first = len(self.members)
            for row, ids in enumerate(forward.ids.tolist()):
                if match := find(ids, self.rollout):
                    self.members.append((match[0], forward, row, match[1]))
                else:
                    self.strangers.append(ids)
            if members := self.members[first:]:
                self.passes.append([sample for sample, *_ in members])
        self.samples = list(dict.fromkeys(sample for samples in self.passes for sample in samples))
        earlier = [u for u in session.updates if u.rollout[:1] == self.rollout[:1]]
        batch = len(earlier) % max(1, -(-len(self.rollout) // self.size))  # of the pass over the rollout
        self.sampler = earlier[0].model if earlier else self.model
        self.epoch_began = earlier[-batch].model if batch else self.model
        if self.samples and not all(f.has_logits for f in self.forwards):  # packed rows: take the next train batch
            self.samples = self.rollout[batch * self.size : (batch + 1) * self.size]
            self.strangers, self.members, self.passes = [], [], [self.samples]
        if len(self.samples) < self.size and len(self.rollout) % self.size:
            self.size = len(self.samples)

    def loss(self, m: Mistake, passes: Sequence[Sequence[RecordedSample]]) -> Tensor:
        """Return the loss of these micro-batches of the update, with gradient and one mistake."""
        o, by_key = self.options, defaultdict[object, list[RecordedSample]](list)
        for key, s in zip(m("groups", self), self.rollout, strict=True):
            by_key[key].append(s)
        groups = list(by_key.values())
        ranked = [s for group in groups for s in group]
        of_one_size = len({len(group) for group in groups}) == 1
        parts = [(ranked, len(groups[0]))] if of_one_size else [(group, len(group)) for group in groups]
        rewards = [(torch.tensor([m("read", s.parts) for s in part]), size) for part, size in parts]
        advantages = torch.cat([wrong_advantages(part, size, o, m) for part, size in rewards])
        weights = m("input", advantages, torch.tensor([s.parts["reward"] for s in ranked]))
        total = torch.zeros(())
        for samples in passes:
            logits, labels, mask = _rows(self, tuple(samples))
            log_probs = m("score", logits, labels, o.temperature)
            old = torch.full_like(log_probs.detach(), OUTSIDE)
            old[mask] = torch.cat([m("old", s, self) for s in samples])
            mask = m("response", mask, torch.tensor([[s.truncated] for s in samples]))
            a = weights[[ranked.index(s) for s in samples], None]
            average = wrong_average(wrong_token_loss(o, a, log_probs, old, mask, m), mask, o, m)
            total = total + m("share", len(mask), self) * average
        return total

    def gradient_of(self, m: Mistake, passes: Sequence[Sequence[RecordedSample]]) -> Tensor:
        """Return the gradient of that loss by the model's parameters, as one vector."""
        parameters = list(self.model.parameters())
        grads = torch.autograd.grad(self.loss(m, passes), parameters, retain_graph=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in grads])

    def clipped(self, gradient: Tensor) -> Tensor:
        """Return a gradient scaled to a norm of at most `max_grad_norm`, as torch clips."""
        return gradient * min(1.0, self.options.max_grad_norm / (float(gradient.norm()) + 1e-6))

    @cached_property
    def right(self) -> Tensor:
        """Return the right gradient at the step."""
        return self.clipped(self.gradient_of(NO_MISTAKE, [self.samples]))

    def is_at_step(self, gradient: Tensor) -> bool:
        """Return whether this is the gradient at the step, up to float32 rounding relative to the largest entry."""
        rounding = 2e-3 * float(gradient.nan_to_num().abs().max()) + 1e-7
        return torch.allclose(self.at_step, gradient, rtol=0, atol=rounding, equal_nan=True)


@cache
@torch.enable_grad()
def _rows(update: Update, samples: tuple[RecordedSample, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits with gradient, labels and response mask (n, places) of samples in a row each, right-padded."""
    width = max(len(s.ids) for s in samples)
    ids = torch.full((len(samples), width), update.session.tokenizer.pad_token_id)
    mask = torch.zeros(len(samples), width - 1, dtype=torch.bool)
    for i, s in enumerate(samples):
        ids[i, : len(s.ids)] = torch.tensor(s.ids)
        mask[i, len(s.prompt_ids) - 1 : len(s.ids) - 1] = True
    return update.model(ids).logits, ids[:, 1:], mask
