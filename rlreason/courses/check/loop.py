"""Run a train loop, or the train step of 2026, on a small model with recording parts, and have its runs judged.

    train_grpo(policy, tokenizer, prompts, ground_truths, reward_fn, generate, optimizer, *, n_grpo_steps, ...)

`docs/check.md` documents the signature.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from random import Random
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.calling import answer_parts, call, small_model, story_tokenizer, tensor, word_tokenizer
from rlreason.courses.check.loop_judge import bug_of_updates, in_calls, in_counts, in_metrics, of_rewards
from rlreason.courses.check.recording import RecordedSample, Recording, Update, one_row_each, scored
from rlreason.courses.check.records import (
    RAISES,
    Bug,
    Fault,
    Function,
    Kind,
    NotWrittenError,
    Options,
    TimeUpError,
    their_error,
)
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
        Settings(rollout_batch_size=8, train_batch_size=8, n_grpo_steps=1, seed=4),
        open=True,
    ),
)  # fmt: skip
METHOD_OF = {"reinforce_with_baseline": "none", "grpo_clip": "grpo"}
AGAIN = 100  # added to the number of a question for each time that it is asked again in a step
#: Responses are made of these texts; tokenized together, some neighbours would be one token.
PIECES = ("7", "+", "3", "=", "10", " ", "b", "u", "ys", "so", "9", "-", "1", "h", "as", "4", "?", " lo", "ses", "2")


class Session(Recording):
    """One run of a loop, and its arguments, which record their use."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.settings = scenario, scenario.settings
        s = self.settings
        options = Options(
            importance_reweighting_method=METHOD_OF[s.loss_type],
            advantage_normalizer="std" if s.use_std_normalization else "none",
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

    def run(self, function: Function) -> Any:
        """Return the loop's metrics; it gets the seven parts and those settings that it takes."""
        own = inspect.signature(function).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in own.values())
        return function(
            policy=self.model,
            tokenizer=self.tokenizer,
            prompts=list(self.prompts),
            ground_truths=list(self.truths),
            reward_fn=self.reward_fn,
            generate=self.generate,
            optimizer=self.optimizer,
            **{name: value for name, value in asdict(self.settings).items() if takes_all or name in own},
        )

    def reward(self, text: str, truth: str) -> dict[str, float]:
        """Return the reward, which is 1 for all responses to a flat question."""
        parts = super().reward(text, truth)
        return parts | {"reward": 1.0} if truth in self.flat.values() else parts

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
        new: list[RecordedSample] = []
        called = {"prompts": prompts, "n": n, "temperature": temperature, "max_tokens": max_tokens, "seed": seed}
        self.calls.append(called | {"samples": new})
        if self.scenario.flat and temperature == self.settings.sampling_temperature and prompts[0] in self.prompts:
            self.flat.setdefault(len(self.updates), self.truths[self.prompts.index(prompts[0])])
        for prompt in prompts:
            for k in range(n):
                new.append(self._sample(prompt, "" if seed is None else f"{seed}/{prompt}/{k}", max_tokens))
                self.samples.append(new[-1])
        olds, untempered = (scored(self.model, new, t) for t in (temperature, 1.0))
        for s, old, at_one in zip(new, olds, untempered, strict=True):
            s.old, s.old_untempered = old, at_one
        return [
            SimpleNamespace(
                prompt=prompts[i // n],
                prompt_ids=list(s.prompt_ids),
                token_ids=list(s.token_ids),
                text=s.text,
                log_probs=s.old.tolist(),
                truncated=s.truncated,
            )
            for i, s in enumerate(new)
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
        encode, end = self.tokenizer.encode, self.tokenizer.eos_token_id
        truncated = rng.random() < 0.5
        length = max_tokens if truncated else rng.randint(2, max_tokens - 1)
        ids: list[int] = []
        while len(ids) < length:
            ids += encode(rng.choice(PIECES), add_special_tokens=False)
        ids = ids[:length] if truncated else [*ids[: length - 1], end]
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        place = self.prompts.index(prompt) if prompt in self.prompts else -1
        truth = self.truths[place] if place >= 0 else ""
        number, step, prompt_ids = len(self.samples), len(self.updates), encode(prompt, add_special_tokens=False)
        parts = self.reward(text, truth)
        return RecordedSample(number, place, step, prompt_ids, ids, text, truth, truncated, parts, place)

    def training_calls(self) -> list[dict[str, Any]]:
        """Return the calls of `generate` that are not of an evaluation, which has another temperature or no groups."""
        temperature = self.settings.sampling_temperature
        calls = [c for c in self.calls if c["temperature"] == temperature] or self.calls
        return [c for c in calls if c["n"] > 1 or len(set(c["prompts"])) < len(c["prompts"])] or calls

    def training(self) -> list[RecordedSample]:
        """Return the samples to learn from; a question that is asked twice in a step gets two groups."""
        samples = [s for c in self.training_calls() for s in c["samples"]]
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
            if len(update.samples) != size:
                update.samples = rollout[batch * size : (batch + 1) * size]
            update.strangers, update.passes = [], [one_row_each(update.samples)]
        if len(update.samples) < size and len(rollout) % size:
            update.size = len(update.samples)
        update.unclear = any(s.prompt >= AGAIN for s in rollout) and bool(update.samples) and not update.is_right
        return update


def check_loop(function: Function, notes: list[str]) -> list[Bug]:
    """Return the bug of a train loop that the first scenario shows; add scenarios not tried to `notes`."""
    unwritten = 0
    for scenario in SCENARIOS:
        session, failure, metrics = Session(scenario), None, None
        try:
            metrics = session.run(function)
        except TimeUpError:
            raise
        except BaseException as error:  # also SystemExit: it is the user's loop
            if scenario.open and not session.updates:
                notes.append(f"not tried, as the loop refuses it: {scenario.about} ({their_error(error)})")
                continue
            if isinstance(error, NotImplementedError) and not session.updates:
                unwritten += 1
                continue
            failure = Bug(RAISES, their_error(error), "a run to its end")
        if failure is None and not session.calls and not session.updates and metrics is None:
            unwritten += not scenario.open
        elif bug := _bug_of_run(session, failure, metrics, notes):
            return [bug.with_inputs({"scenario": scenario.about})]
    if unwritten == sum(not scenario.open for scenario in SCENARIOS):
        raise NotWrittenError
    return [Bug(RAISES, "NotImplementedError, or nothing is done")] if unwritten else []


def _bug_of_run(session: Session, failure: Bug | None, metrics: Any, notes: list[str]) -> Bug | None:
    """Return the bug of a run: of its calls and counts, else of its gradients, else of its metrics."""
    session.samples = session.training()
    if failure is None and (bug := next(chain(in_calls(session), in_counts(session)), None)):
        return bug
    updates = [u for u in session.updates if u.samples or u.strangers]
    if any(f.half for u in updates for f in u.forwards):
        note = "mixed precision: its gradients and metrics are not judged, because they are too coarse"
        notes += [] if note in notes else [note]
        return failure
    judged = [u for u in updates if not u.unclear]
    if session.scenario.open:  # what an uneven batch is divided by is left open, but not how its rows compare
        judged = [u for u in judged if not (u.samples and 0.3 < (u.factor() or 0) < 1.7)]
    if bug := bug_of_updates(judged) or failure:
        return bug
    rows = metrics if isinstance(metrics, list | tuple) and len(metrics) == len(updates) else []
    return next((bug for row, update in zip(rows, updates, strict=False) for bug in in_metrics(row, update)), None)


PROMPTS = ("what is two plus three ?", "so four plus two is what ?", "seven minus one ?")
RESPONSES = (
    "five . <eos>", "six six six four plus two .", "two", "three plus three <eos>",
    "so four plus two is six . <eos>", ". <eos>", "six four two three five seven", "two plus",
    "so", "two two . . . . so what is it", "six five four . <eos>", "nine minus one seven so ?",
)  # fmt: skip
_TWO = {"gradient_accumulation_steps": 2}
STEP_SETTINGS: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 1},
    {"gradient_accumulation_steps": 3},
    {"gradient_accumulation_steps": 5},  # does not divide the rows, which a step may refuse
    _TWO | {"max_grad_norm": 0.05},
    _TWO | {"advantage_eps": 0.5},
    _TWO | {"loss_normalization": "constant", "normalization_constant": 40, "advantage_normalizer": "none"},
    _TWO | {"baseline": "none", "advantage_normalizer": "none"},
    _TWO | {"advantage_normalizer": "mean", "advantage_eps": 0.1},
    _TWO | {"importance_reweighting_method": "noclip"},
    _TWO | {"importance_reweighting_method": "grpo", "cliprange": 0.1},
    _TWO | {"importance_reweighting_method": "gspo", "cliprange": 0.02},
)
OUTSIDE = -1.0  # the old log-probability outside the responses, where it must not be read


class Stage(Recording):
    """One call of the train step on a fresh model, recorded."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        numbers = {name: value for name, value in settings.items() if name != "gradient_accumulation_steps"}
        options = Options(old_outside=OUTSIDE, **numbers)
        super().__init__(word_tokenizer(), options, learning_rate=0.5)
        for i, text in enumerate(RESPONSES):
            prompt_ids, ids = self.tokenizer.encode(PROMPTS[i // 4]), self.tokenizer.encode(text)
            truth = f"truth {i // 4 % 2}"  # two questions have the same answer
            cut, parts = not text.endswith("<eos>"), self.reward(text, truth)
            self.samples.append(RecordedSample(i, i // 4, 0, prompt_ids, ids, text, truth, cut, parts))
        mine, theirs = (scored(m, self.samples, 1.0) for m in (self.twin, small_model(seed=1)))
        for s, a, b in zip(self.samples, mine, theirs, strict=True):
            s.old = s.old_untempered = a + 0.3 * (b - a).clamp(-2, 2)  # a little away from the model's own

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that the step is called with."""
        out: dict[str, Any] = {
            "model": self.model,
            "tokenizer": self.tokenizer,
            "optimizer": self.optimizer,
            "gradient_accumulation_steps": 1,
            "max_grad_norm": 1e6,
            "reward_fn": self.reward_fn,
            "repeated_prompts": [prompt for prompt in PROMPTS for _ in range(4)],
            "rollout_responses": list(RESPONSES),
            "repeated_ground_truths": [s.truth for s in self.samples],
            "group_size": 4,
        }
        if self.options.importance_reweighting_method != "none":
            width = max(len(s.ids) for s in self.samples) - 1
            out["old_log_probs"] = torch.full((len(self.samples), width), OUTSIDE)
            for row, s in zip(out["old_log_probs"], self.samples, strict=True):
                row[len(s.prompt_ids) - 1 : len(s.ids) - 1] = s.old
        return out | self.settings

    def update(self) -> Update:
        """Return the update of a step; rows that no call of the model had are learned from with weight 0."""
        accumulation = self.settings["gradient_accumulation_steps"]
        update = Update(self, self.samples, len(self.samples), accumulation, before=self.gradient() * 0)
        update.samples = list(self.samples)
        return update


def check_step(function: Function, notes: list[str]) -> list[Bug]:
    """Return the bugs of a train step that the first of `STEP_SETTINGS` shows; an error only if there is no other."""
    faults: list[Bug] = []
    unwritten = 0
    for settings in STEP_SETTINGS:
        stage = Stage(settings)
        setting = ", ".join(f"{name}={value}" for name, value in settings.items())
        try:
            loss, metadata = answer_parts(call(function, stage.arguments()), ("loss", "metadata"))
            bugs = list(_bugs_of_stage(stage, tensor(loss, "the loss", scalar=True), metadata))
        except NotWrittenError:
            unwritten += 1
            bugs = []
        except Fault as fault:
            bugs = []
            if len(stage.samples) % settings["gradient_accumulation_steps"] and not stage.updates:
                notes.append(f"not tried, as it refuses it: {setting} ({fault.bug.yours})")
            else:
                faults.append(fault.bug.with_inputs({"setting": setting}))
        if bugs:
            return [bug.with_inputs({"setting": setting}) for bug in bugs]
    if unwritten == len(STEP_SETTINGS):
        raise NotWrittenError
    return faults[:1] or [Bug(RAISES, "NotImplementedError, or None")] * bool(unwritten)


def _bugs_of_stage(stage: Stage, loss: Tensor, metadata: Any) -> Iterator[Bug]:
    """Yield the bugs of a finished step: of its rewards and gradient, else of what it returns and leaves behind."""
    steps = len(stage.updates)
    if steps != 1:
        kind = Kind(f"the optimizer takes {steps} steps where one is asked for", "the calls of optimizer.step()")
        yield Bug(kind, f"{steps} steps", "1 step")
        return
    (update,) = stage.updates
    if any(f.half for f in update.forwards):
        return
    wrong = next(of_rewards(stage, [s.truth for s in stage.samples]), None) or bug_of_updates(stage.updates)
    if wrong:
        yield wrong
        return
    if any(p.grad is not None and bool(p.grad.any()) for p in stage.model.parameters()):
        yield Bug(Kind("gradients are left behind after the step", "zero_grad after the step"), "gradients", "none")
    right = update.right_loss().item()
    if abs(float(loss) - right) > 1e-4 * (1 + abs(right)):
        name = "the loss that is returned is not the batch's loss before the step"
        kind = Kind(name, "what is added up over the micro-batches and returned")
        yield Bug(kind, f"loss {float(loss):.5g}", f"loss {right:.5g}")
    yield from in_metrics(metadata, update, of_one_pass=True)
