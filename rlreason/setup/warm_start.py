"""A short SFT that gives a tiny model its habits, in one or several formats: answer hastily, or work step by step.

RL selects among behaviours that a model already has; this is where the tiny model gets them. It trains through
the same `Learner` as everything else: SFT is `-A log p` with A = 1 on given text.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import cycle
from typing import Any

import torch

from rlreason.algorithms.sft import sft_sample
from rlreason.config.data import HabitsConfig
from rlreason.config.model import WarmStartConfig
from rlreason.config.optimization import OptimizationConfig
from rlreason.data.stories_habits import habit_trace
from rlreason.learner import Learner
from rlreason.model.policy import Policy
from rlreason.model.tiny_formats import Format
from rlreason.objectives.objective import LengthNormConfig, Objective
from rlreason.types import Problem

#: In one forward pass. Not a setting: how a step is divided changes the rounding, and the weights with it.
MICRO_BATCH_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Lessons:
    """What a model is taught: freshly written traces, the same ones for the same seed.

    The formats take turns, trace by trace; one that is listed twice gets two turns.
    """

    problems: Sequence[Problem]
    formats: Sequence[Format]
    settings: WarmStartConfig
    seed: int
    habits: HabitsConfig = field(default_factory=HabitsConfig)  # of the task

    @property
    def shown(self) -> HabitsConfig:
        """The task's habits, with the shares that the model's own settings give."""
        hasty, slip = self.settings.hasty_share, self.settings.slip_share
        return replace(
            self.habits,
            hasty_share=self.habits.hasty_share if hasty is None else hasty,
            slip_share=self.habits.slip_share if slip is None else slip,
        )

    def described(self) -> dict[str, Any]:
        """The settings in plain values, no share left open, and of the habits what differs from the usual ones."""
        shown, usual = asdict(self.shown), asdict(HabitsConfig())
        shares = {name: shown.pop(name) for name in ("hasty_share", "slip_share")}
        return {**asdict(self.settings), **shares, **{k: v for k, v in shown.items() if v != usual[k]}}

    def batches(self, count: int) -> Iterator[list[tuple[str, str]]]:
        """`count` batches of (prompt, trace)."""
        rng, turns, shown = random.Random(f"warm-up/{self.seed}"), cycle(self.formats), self.shown
        for _ in range(count):
            batch = []
            for problem in rng.choices(self.problems, k=self.settings.batch_size):
                form = next(turns)
                trace = habit_trace(problem, rng, shown.hasty_share, shown.slip_share, form.trace, shown)
                batch.append((form.prompt(problem.question), trace))
            yield batch


def warm_up(policy: Policy, lessons: Lessons, progress: Callable[[str], None] = lambda text: None) -> float:
    """Train on the lessons; the rate rises over 5% of the steps, then falls to a tenth; -> last loss.

    With one thread, so that the weights are the same however many the run has: a run may go on with another number.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _taught(policy, lessons, progress)
    finally:
        torch.set_num_threads(threads)


def _taught(policy: Policy, lessons: Lessons, progress: Callable[[str], None]) -> float:
    steps, peak = lessons.settings.steps, lessons.settings.learning_rate
    objective, optimization = Objective(length_norm=LengthNormConfig("token")), OptimizationConfig(peak)
    learner = Learner(policy, objective, optimization, micro_batch_tokens=MICRO_BATCH_TOKENS)
    loss = 0.0
    for step, batch in enumerate(lessons.batches(steps)):
        samples = [
            sft_sample(policy.encode_prompt(prompt), policy.encode_response(trace), trace) for prompt, trace in batch
        ]
        rate = peak * min(1.0, (step + 1) / (0.05 * steps)) * (1 - 0.9 * step / steps)
        loss = learner.update(samples, learning_rate=rate)["train/loss"]
        progress(f"warm start {step + 1}/{steps}, loss {loss:.3f}")
    return loss
