"""A short SFT that gives a tiny model its two habits, in one or several formats: answer hastily, or work step by step.

RL selects among behaviours that a model already has; this is where the tiny model gets them. It trains through
the same `Learner` as everything else: SFT is `-A log p` with A = 1 on given text.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from rlreason.algorithms.sft import imitation_sample
from rlreason.data.stories import habit_trace
from rlreason.learner import Learner, TokenObjective
from rlreason.policy import Policy
from rlreason.types import Problem


@dataclass(frozen=True, slots=True)
class Format:
    """How a question is asked, and how a response to it is written."""

    prompt: Callable[[str], str]  # a question -> its prompt
    trace: str  # a template with {solution} and {answer}


def warm_up(
    policy: Policy,
    problems: Sequence[Problem],
    formats: Sequence[Format],
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    hasty_share: float,
    slip_share: float,
    micro_batch_tokens: int,
    seed: int,
    progress: Callable[[str], None] = lambda text: None,
) -> float:
    """Train on freshly written traces; the rate rises over 5% of the steps, then falls to a tenth; -> last loss.

    The formats take turns, trace by trace; one that is listed twice gets two turns.
    """
    rng = random.Random(f"warm-up/{seed}")
    learner = Learner(policy, TokenObjective(length_norm="token"), learning_rate, micro_batch_tokens=micro_batch_tokens)
    loss, turns = 0.0, cycle(formats)
    for step in range(steps):
        samples = []
        for p in rng.choices(problems, k=batch_size):
            form = next(turns)
            trace = habit_trace(p, rng, hasty_share, slip_share, form.trace)
            ids = policy.encode_prompt(form.prompt(p.question)), policy.encode_response(trace)
            samples.append(imitation_sample(*ids, trace))
        rate = learning_rate * min(1.0, (step + 1) / (0.05 * steps)) * (1 - 0.9 * step / steps)
        loss = learner.update(samples, learning_rate=rate)["train/loss"]
        progress(f"warm start {step + 1}/{steps}, loss {loss:.3f}")
    return loss
