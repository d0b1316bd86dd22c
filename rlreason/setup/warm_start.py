"""A short SFT that gives a tiny model its two habits, in one or several formats: answer hastily, or work step by step.

RL selects among behaviours that a model already has; this is where the tiny model gets them. It trains through
the same `Learner` as everything else: SFT is `-A log p` with A = 1 on given text.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

from rlreason.algorithms.sft import sft_sample
from rlreason.data.stories import habit_trace
from rlreason.learner import Learner, TokenObjective
from rlreason.model.policy import Policy
from rlreason.model.tiny_formats import Format
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
    batch_size: int
    hasty_share: float
    slip_share: float
    seed: int

    def batches(self, count: int) -> Iterator[list[tuple[str, str]]]:
        """`count` batches of (prompt, trace)."""
        rng, turns = random.Random(f"warm-up/{self.seed}"), cycle(self.formats)
        for _ in range(count):
            batch = []
            for problem in rng.choices(self.problems, k=self.batch_size):
                form = next(turns)
                trace = habit_trace(problem, rng, self.hasty_share, self.slip_share, form.trace)
                batch.append((form.prompt(problem.question), trace))
            yield batch


def warm_up(
    policy: Policy,
    lessons: Lessons,
    *,
    steps: int,
    learning_rate: float,
    progress: Callable[[str], None] = lambda text: None,
) -> float:
    """Train on the lessons; the rate rises over 5% of the steps, then falls to a tenth; -> last loss."""
    learner = Learner(policy, TokenObjective(length_norm="token"), learning_rate, micro_batch_tokens=MICRO_BATCH_TOKENS)
    loss = 0.0
    for step, batch in enumerate(lessons.batches(steps)):
        samples = [
            sft_sample(policy.encode_prompt(prompt), policy.encode_response(trace), trace) for prompt, trace in batch
        ]
        rate = learning_rate * min(1.0, (step + 1) / (0.05 * steps)) * (1 - 0.9 * step / steps)
        loss = learner.update(samples, learning_rate=rate)["train/loss"]
        progress(f"warm start {step + 1}/{steps}, loss {loss:.3f}")
    return loss
