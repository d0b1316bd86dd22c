"""Run a train loop on a small model, hand it recording parts, and collect its samples, calls and updates.

    train_grpo(policy, tokenizer, prompts, ground_truths, reward_fn, generate, optimizer, *, n_grpo_steps, ...)

`docs/check.md` documents the signature.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

from rlreason.courses.check.calling import story_tokenizer
from rlreason.courses.check.loop_update import LoopOptions, RecordedSample, Recording, Update, scored
from rlreason.data.tasks import make_stories


@dataclass(frozen=True)
class Settings:
    """The keyword arguments of the loop, by the handout's names."""

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
    """One run of the loop."""

    about: str
    settings: Settings
    learning_rate: float = 0.3
    open: bool = False  # handouts leave it open, so a loop may refuse it
    answers: int = 18  # the number of different ground truths of the 18 questions
    flat: bool = False  # all responses to the first question of a step earn the same reward


SCENARIOS = (
    Scenario("on-policy, 3 questions x 4 responses, 3 micro-batches, temperature 0.7", Settings(), flat=True),
    Scenario(
        "off-policy: 2 epochs, 2 updates each, grpo_clip 0.1, temperature 1.3, no std, max_grad_norm 0.05",
        Settings(
            train_batch_size=6, gradient_accumulation_steps=2, epochs_per_rollout_batch=2, loss_type="grpo_clip",
            cliprange=0.1, sampling_temperature=1.3, use_std_normalization=False, max_grad_norm=0.05, seed=1,
        ),
        learning_rate=8.0,
    ),
    Scenario(
        "advantage_eps 0.5, 6 questions x 2 responses, 2 updates, no micro-batches, some questions of one answer",
        Settings(
            group_size=2, train_batch_size=6, gradient_accumulation_steps=1, advantage_eps=0.5,
            sampling_temperature=0.9, seed=2,
        ),
        answers=5,
    ),
    Scenario(
        "a rollout batch of 16 in train batches of 12, each in 2 micro-batches: 4 responses are left for the last",
        Settings(rollout_batch_size=16, gradient_accumulation_steps=2, n_grpo_steps=1, seed=3),
        open=True,
    ),
    Scenario(
        "a train batch of 8 in 3 micro-batches, which do not divide it",
        Settings(
            rollout_batch_size=8, train_batch_size=8, gradient_accumulation_steps=3, n_grpo_steps=1, seed=4
        ),
        open=True,
    ),
)  # fmt: skip


METHOD_OF = {"reinforce_with_baseline": "none", "grpo_no_clip": "noclip", "grpo_clip": "grpo"}
AGAIN = 100  # added to the number of a question for each time that it is asked again in a step
#: Responses are made of these texts; tokenized together, some neighbours would be one token.
PIECES = ("7", "+", "3", "=", "10", " ", "b", "u", "ys", "so", "9", "-", "1", "h", "as", "4", "?", " lo", "ses", "2")


@dataclass(frozen=True)
class LoopResponse:
    """One response, as `generate` returns it."""

    prompt: str
    prompt_ids: list[int]
    token_ids: list[int]  # exactly what was sampled, the end token included where one was sampled
    text: str  # for the reward: without the end token
    log_probs: list[float]  # of each token under the policy at this temperature
    truncated: bool  # cut at max_tokens, without an end token


def reward(text: str, truth: str) -> float:
    """Return a reward between 0 and 2 that any change of text or truth changes."""
    total = sum((place + 3) * ord(letter) for place, letter in enumerate(f"{text.strip()}\n{truth.strip()}"))
    return (total % 97) / 48


class Session(Recording):
    """The arguments of a loop, which record their use."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.settings = scenario, scenario.settings
        s = self.settings
        options = LoopOptions(
            method=METHOD_OF[s.loss_type],
            normalizer="std" if s.use_std_normalization else "none",
            advantage_eps=s.advantage_eps,
            cliprange=s.cliprange,
            temperature=s.sampling_temperature,
            max_grad_norm=s.max_grad_norm,
        )
        super().__init__(story_tokenizer(), options, scenario.learning_rate)
        stories = make_stories(18, 5, min_events=2, max_events=2, max_value=9)
        self.prompts = [story.question for story in stories]
        kinds = [place % scenario.answers for place in range(len(stories))]
        self.truths = [f"{stories[kind].answer}/{kind}" for kind in kinds]
        self.flat: dict[int, str] = {}  # step -> the ground truth whose responses all earn the same reward
        self.calls: list[dict[str, Any]] = []  # of generate
        self.start = [p.detach().clone() for p in self.model.parameters()]
        self.metrics: Any = None

    def arguments(self, function: Callable[..., Any]) -> dict[str, Any]:
        """Return the arguments of the loop: the seven parts, and those settings that it takes."""
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
        return parts | {name: v for name, v in asdict(self.settings).items() if takes_all or name in own}

    def reward(self, text: str, truth: str) -> dict[str, float]:
        """Return the reward with its parts, which differ from it and from one another."""
        total = 1.0 if truth in self.flat.values() else reward(text, truth)
        return {"reward": total, "format_reward": reward(text, "format"), "answer_reward": reward(truth, text)}

    def generate(
        self,
        prompts: Sequence[str],
        *,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int = 16,
        seed: int | None = None,
    ) -> list[LoopResponse]:
        """Return n responses to each prompt, prompt by prompt; a seed alone decides the responses to a prompt."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        new: list[RecordedSample] = []
        call = {"prompts": prompts, "n": n, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        self.calls.append(call | {"samples": new})
        if self.scenario.flat and temperature == self.settings.sampling_temperature and prompts[0] in self.prompts:
            self.flat.setdefault(len(self.updates), self.truths[self.prompts.index(prompts[0])])
        for prompt in prompts:
            for k in range(n):
                new.append(self._sample(prompt, f"{seed}/{prompt}/{k}" if seed is not None else "", max_tokens))
                self.samples.append(new[-1])
        for s, old, untempered in zip(
            new, scored(self.model, new, temperature), scored(self.model, new, 1.0), strict=True
        ):
            s.old, s.old_untempered = old, untempered
        texts = [prompt for prompt in prompts for _ in range(n)]
        return [
            LoopResponse(prompt, list(s.prompt_ids), list(s.token_ids), s.text, s.old.tolist(), s.truncated)
            for s, prompt in zip(new, texts, strict=True)
        ]

    def _sample(self, prompt: str, seed: str, max_tokens: int) -> RecordedSample:
        """Return a response by its seed; without one, it differs from the others of its group before the last token."""
        for attempt in range(20):
            sample = self._draw(prompt, Random(seed or f"{len(self.samples)}/{attempt}"), max_tokens)
            others = [s.token_ids for s in self.samples if (s.place, s.round) == (sample.place, sample.round)]
            shorter = [max(1, min(len(ids), len(sample.token_ids)) - 1) for ids in others]
            if seed or all(ids[:n] != sample.token_ids[:n] for ids, n in zip(others, shorter, strict=True)):
                break
        return sample

    def _draw(self, prompt: str, rng: Random, max_tokens: int) -> RecordedSample:
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
        return RecordedSample(
            len(self.samples), place, len(self.updates), prompt_ids, ids, text, truth, truncated,
            self.reward(text, truth), place,
        )  # fmt: skip

    def training_calls(self) -> list[dict[str, Any]]:
        """Return the calls of `generate` that are not of an evaluation, which has another temperature or no groups."""
        temperature = self.settings.sampling_temperature
        calls = [c for c in self.calls if c["temperature"] == temperature] or self.calls
        return [c for c in calls if c["n"] > 1 or len(set(c["prompts"])) < len(c["prompts"])] or calls

    def training(self) -> list[RecordedSample]:
        """Return the samples to learn from; a question that is asked twice in a step gets two groups."""
        samples = [s for call in self.training_calls() for s in call["samples"]]
        count: Counter[tuple[int, int]] = Counter()
        for s in samples:
            if s.place >= 0:
                s.prompt = s.place + AGAIN * (count[s.round, s.place] // self.settings.group_size)
                count[s.round, s.place] += 1
        return samples

    def update(self) -> Update:
        """Return the update of a step: it learns from the latest samples, a train batch after another."""
        samples, size = self.training(), self.settings.train_batch_size
        latest = max((s.round for s in samples), default=0)
        rollout = [s for s in samples if s.round == latest]
        earlier = [u for u in self.updates if u.rollout[:1] == rollout[:1]]
        batch = len(earlier) % max(1, -(-len(rollout) // size))  # of the pass over the rollout
        before = self.updates[-1].at_step if self.updates else self.gradient() * 0
        update = Update(self, rollout, size, self.settings.gradient_accumulation_steps, before)
        update.epoch_began = earlier[-batch].model if batch else update.model
        if update.samples and not all(f.head for f in update.forwards):  # as in packed rows: take the next train batch
            next_ones = rollout[batch * size : (batch + 1) * size]
            update.learn_from(update.samples if len(update.samples) == size else next_ones)
        if len(update.samples) < size and len(rollout) % size:
            update.size = len(update.samples)
        update.unclear = any(s.prompt >= AGAIN for s in rollout) and bool(update.samples) and not update.is_right
        return update
