"""One run of somebody's train loop on a small model: what it is handed, what it does with it, written down.

    train_grpo(policy, tokenizer, prompts, ground_truths, reward_fn, generate, optimizer, *, n_grpo_steps, ...)

`docs/check.md` documents the signature.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch

from rlreason.check.functions.tokens import small_model, story_tokenizer
from rlreason.check.loop.gradients import with_gradients
from rlreason.check.loop.recording import RecordedSGD, Recorder, Sample, scored
from rlreason.check.loop.seeing import other_context, seen_weights
from rlreason.check.loop.tables import Options, Update
from rlreason.data.stories import make_stories

METHOD_OF = {"reinforce_with_baseline": "none", "grpo_no_clip": "noclip", "grpo_clip": "grpo"}
MUST = ("policy", "tokenizer", "prompts", "ground_truths", "reward_fn", "generate", "optimizer")
#: Pieces of text that sampled tokens are made of; some neighbours would be one token if they were tokenized together.
PIECES = ("7", "+", "3", "=", "10", " ", "b", "u", "ys", "so", "9", "-", "1", "h", "as", "4", "?", " lo", "ses", "2")


@dataclass(frozen=True)
class Settings:
    """The numbers of a run, by the handout's names: keyword arguments of the loop."""

    n_grpo_steps: int = 2
    rollout_batch_size: int = 12
    group_size: int = 4
    train_batch_size: int = 12
    gradient_accumulation_steps: int = 3
    epochs_per_rollout_batch: int = 1
    sampling_temperature: float = 0.7
    sampling_max_tokens: int = 6
    loss_type: str = "reinforce_with_baseline"
    cliprange: float = 0.2
    advantage_eps: float = 1e-6
    use_std_normalization: bool = True
    max_grad_norm: float = 1e6
    seed: int = 0


@dataclass(frozen=True)
class Scenario:
    """A run that is tried. `open`: handouts leave it open, so a loop may refuse it."""

    about: str
    settings: Settings
    learning_rate: float = 0.3
    open: bool = False


SCENARIOS = (
    Scenario("on-policy, 3 questions x 4 responses, 3 micro-batches, temperature 0.7", Settings()),
    Scenario(
        "off-policy: 2 epochs, 2 updates each, grpo_clip 0.1, temperature 1.3, no std, max_grad_norm 0.05",
        Settings(
            train_batch_size=6, gradient_accumulation_steps=2, epochs_per_rollout_batch=2, loss_type="grpo_clip",
            cliprange=0.1, sampling_temperature=1.3, use_std_normalization=False, max_grad_norm=0.05, seed=1,
        ),
        learning_rate=8.0,
    ),
    Scenario(
        "advantage_eps 0.5, 6 questions x 2 responses, 2 updates, no micro-batches, temperature 1",
        Settings(
            group_size=2, train_batch_size=6, gradient_accumulation_steps=1, advantage_eps=0.5,
            sampling_temperature=1.0, seed=2,
        ),
    ),
    Scenario(
        "a rollout batch of 12 in train batches of 8, each in 3 micro-batches: neither divides the other",
        Settings(train_batch_size=8, gradient_accumulation_steps=3, n_grpo_steps=1, seed=3),
        open=True,
    ),
    Scenario(
        "a train batch of 12 in 5 micro-batches, which do not divide it",
        Settings(gradient_accumulation_steps=5, n_grpo_steps=1, seed=4),
        open=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Response:
    """What `generate` returns for each response."""

    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]  # exactly what was sampled, the end token included where one was sampled
    text: str  # the same as text, without the end token: for the reward
    log_probs: list[float]  # of each token under the policy at this temperature
    truncated: bool  # cut at max_tokens, without an end token


def reward(text: str, truth: str) -> float:
    """A reward that any change of text or truth changes: between 0 and 2."""
    total = sum((place + 3) * ord(letter) for place, letter in enumerate(f"{text.strip()}\n{truth.strip()}"))
    return (total % 97) / 48


def reward_parts(text: str, truth: str) -> dict[str, float]:
    """The reward with its parts, which differ from it and from one another."""
    parts = {"format_reward": reward(text, "format"), "answer_reward": reward(truth, text)}
    return {"reward": reward(text, truth), **parts}


class Session:
    """The parts that a loop is handed, each of which writes down its use."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.settings = scenario, scenario.settings
        self.tokenizer = story_tokenizer()
        self.model = small_model(vocab=len(self.tokenizer))
        self.recorder = Recorder(self.model)
        self.optimizer = RecordedSGD(self.model, scenario.learning_rate, self.recorder)
        self.recorder.on_step = self._step
        stories = make_stories(18, 5, min_events=2, max_events=2, max_value=9)
        self.prompts = [story.question for story in stories]
        self.truths = [f"{story.answer}/{place}" for place, story in enumerate(stories)]  # no two alike
        self.samples: list[Sample] = []
        self.calls: list[dict[str, Any]] = []  # of generate
        self.judgements: list[tuple[str, str]] = []  # of reward_fn
        self.updates: list[Update] = []
        self.before = [torch.zeros_like(p) for p in self.model.parameters()]
        self.metrics: Any = None
        self.at_epoch: dict[int, torch.Tensor] = {}  # sample number -> log-probabilities when its epoch began

    def run(self, function: Callable[..., Any]) -> None:
        """Let the loop train."""
        self.metrics = function(**self.arguments(function))

    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """What the loop is called with: all that it must take, and those settings that it takes."""
        parts = {
            "policy": self.model,
            "tokenizer": self.tokenizer,
            "prompts": list(self.prompts),
            "ground_truths": list(self.truths),
            "reward_fn": self.reward_fn,
            "generate": self.generate,
            "optimizer": self.optimizer,
        }
        taken = inspect.signature(function).parameters
        every = any(p.kind is p.VAR_KEYWORD for p in taken.values())
        return parts | {name: v for name, v in asdict(self.settings).items() if every or name in taken}

    def reward_fn(self, response: str, ground_truth: str) -> dict[str, float]:
        """The reward of a response."""
        self.judgements.append((str(response), str(ground_truth)))
        return reward_parts(str(response), str(ground_truth))

    def generate(
        self,
        prompts: Sequence[str],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 16,
        seed: int | None = None,
    ) -> list[Response]:
        """n responses to each prompt, prompt by prompt. With a seed, a prompt's responses depend on it alone."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        call = {"prompts": prompts, "n": n, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        self.calls.append(call)
        new = []
        for prompt in prompts:
            for k in range(n):
                number = len(self.samples)
                new.append(
                    self._sample(prompt, Random(f"{seed}/{prompt}/{k}" if seed is not None else number), max_tokens)
                )
                self.samples.append(new[-1])
        width = max(len(s.token_ids) for s in new)
        with torch.no_grad(), self.recorder.pause():
            for t in dict.fromkeys((temperature, 1.0)):
                for s, row in zip(new, scored(self.model, new, t, width)[0], strict=True):
                    values = row[: len(s.token_ids)]
                    s.old = values if t == temperature else s.old
                    s.old_untempered = values if t == 1.0 else s.old_untempered
        return [
            Response(prompt, list(s.prompt_ids), list(s.token_ids), s.text, s.old.tolist(), s.truncated)
            for s, prompt in zip(new, (p for p in prompts for _ in range(n)), strict=True)
        ]

    def _sample(self, prompt: str, rng: Random, max_tokens: int) -> Sample:
        truncated = rng.random() < 0.5
        length = max_tokens if truncated else rng.randint(2, max_tokens - 1)
        ids: list[int] = []
        while len(ids) < length:
            ids += self.tokenizer.encode(rng.choice(PIECES), add_special_tokens=False)
        ids = ids[:length] if truncated else [*ids[: length - 1], self.tokenizer.eos_token_id]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        place = self.prompts.index(prompt) if prompt in self.prompts else -1
        truth = self.truths[place] if place >= 0 else ""
        prompt_ids = self.tokenizer.encode(prompt, add_special_tokens=False)
        return Sample(
            len(self.samples), place, self.optimizer.steps, prompt_ids, ids, text, truth, truncated,
            reward(text, truth), reward_parts(text, truth),
        )  # fmt: skip

    def objective(self) -> Options:
        """The objective that the settings ask for."""
        s = self.settings
        return Options(
            method=METHOD_OF[s.loss_type],
            normalizer="std" if s.use_std_normalization else "none",
            advantage_eps=s.advantage_eps,
            cliprange=s.cliprange,
            temperature=s.sampling_temperature,
        )

    def rollout(self) -> list[Sample]:
        """What was sampled last: all since the last optimizer step before which anything was."""
        latest = max((s.round for s in self.samples), default=0)
        return [s for s in self.samples if s.round == latest]

    def _refreshed(self, rollout: list[Sample], samples: list[Sample], width: int) -> torch.Tensor:
        """Log-probabilities of an update's samples when its pass over the rollout began."""
        taken = sum(u.rollout[:1] == rollout[:1] for u in self.updates)
        if taken % -(-len(rollout) // self.settings.train_batch_size) == 0:
            rows = scored(self.model, rollout, self.settings.sampling_temperature, width)[0].detach()
            self.at_epoch = {s.number: row for s, row in zip(rollout, rows, strict=True)}
        return torch.stack([self.at_epoch[s.number] for s in samples])

    def _by_order(self, seen: dict[str, Any], rollout: list[Sample]) -> None:
        """Where logits cannot be seen, as in packed rows, a train batch not found is the next one of the rollout."""
        size = self.settings.train_batch_size
        if len(seen["samples"]) != size:
            taken = sum(u.rollout[:1] == rollout[:1] for u in self.updates) % -(-len(rollout) // size)
            seen["samples"] = rollout[taken * size : (taken + 1) * size]
        seen |= {"micro": [list(range(len(seen["samples"])))], "outside": {}, "strangers": []}

    def _step(self) -> None:
        rollout, o = self.rollout(), self.objective()
        width = max((len(s.token_ids) for s in rollout), default=1)
        seen = seen_weights(self.recorder.forwards, rollout, width, o.temperature)
        if seen["weights"] is None and any(f.backward for f in self.recorder.forwards):
            self._by_order(seen, rollout)
        samples = seen["samples"]
        parameters = list(self.model.parameters())
        if not samples or not rollout:
            update = Update(o, rollout, rollout[:1], [[0]], torch.zeros(1, width), 1, None, strangers=seen["strangers"])
            if rollout:
                update.log_probs = torch.zeros(1, width)
        else:
            size = self.settings.train_batch_size
            size = len(samples) if len(samples) < size and len(rollout) % size else size
            update = Update(
                o, rollout, samples, seen["micro"], torch.zeros(0), size, seen["weights"],
                self.settings.gradient_accumulation_steps, outside=seen["outside"],
                temperature_seen=seen["temperature_seen"],
                strangers=seen["strangers"], forwards=[f for f in self.recorder.forwards if f.backward],
            )  # fmt: skip
        update.label_shift, update.tokenizer = seen["label_shift"], self.tokenizer
        with torch.enable_grad():
            if samples:
                found, there = scored(self.model, samples, o.temperature, width)
                update.log_probs = found.detach()
                update.other_context = other_context(update.forwards, samples, there.detach())
                update.refreshed = self._refreshed(rollout, samples, width)
                update.earlier = [s for s in self.samples if s not in rollout]
                with_gradients(update, self.model, self.settings.max_grad_norm, self.before)
        self.before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
        self.updates.append(update)
