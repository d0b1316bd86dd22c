"""Optimizers by name, the learning rate of each update, averaged metrics, and when evaluations are due."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlreason.config.leaves import required
from rlreason.config.training import OptimizationConfig

COUNTS = ("train/skipped_updates", "train/empty_updates", "train/tokens")  # metrics that add up
FEWEST_EVALUATIONS = 10  # in a run without eval_every, the first and the last included


def make_optimizer(settings: OptimizationConfig, parameters: Iterable[Tensor]) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over all parameters alike, biases and norms included.

    `adamw_8bit` keeps both moments in one byte each, scaled block by block (Dettmers et al. 2022, arXiv:2110.02861):
    2 bytes a parameter where `adamw` takes 8. Tensors of fewer than 4096 numbers keep float32 moments.
    """
    # Fused into one pass over memory: on a processor, where it is a tenth of a step, five times faster.
    kind: Callable[..., Any] = partial(torch.optim.AdamW, fused=True)
    if settings.optimizer == "adamw_8bit":
        kind = _adamw_8bit()
    optimizer: Optimizer = kind(
        parameters, lr=settings.learning_rate, betas=tuple(settings.adam_betas), weight_decay=settings.weight_decay
    )
    return optimizer


def _adamw_8bit() -> Callable[..., Any]:
    """bitsandbytes' AdamW. It runs on processors from version 0.50 on; torchao's needs a compiler there."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # silence a warning about a kernel that optimizers do not use
    try:
        with required("optimizer=adamw_8bit", "bitsandbytes"):
            from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]
    finally:
        logger.setLevel(level)
    kind: Callable[..., Any] = AdamW8bit
    return kind


def put_moments(optimizer: Optimizer, parameters: Sequence[Tensor], moments: Sequence[dict[str, Any]]) -> None:
    """Replace the optimizer's state by these moments, parameter by parameter.

    Not by its own load_state_dict, which would convert 8-bit moments to the parameters' type.
    """
    optimizer.state.clear()
    for parameter, kept in zip(parameters, moments, strict=True):
        if kept:  # all on the parameter's device: fused AdamW keeps its step count there too
            optimizer.state[parameter] = {
                key: value.to(parameter.device) if isinstance(value, Tensor) else value for key, value in kept.items()
            }


def learning_rate_at(done: float, width: float, total: float, peak: float, kind: str, warmup: float) -> float:
    """The rate of one update, from where it stands in the run. All lengths are in steps.

        done < warmup:   peak x min(1, (done + width) / warmup)
        constant:        peak
        linear:          peak x (total - done) / (total - warmup)
        cosine:          peak x (1 + cos(pi (done - warmup) / (total - warmup))) / 2

    done: steps finished before this update, a fraction when a step has several updates; width: this update's share
    of a step (1 / updates per step). No update is wasted: the first has a rate above 0, and so has the last. The
    decays are those of transformers' `get_scheduler`, whose warm-up lags one step behind: its first rate is 0.

    >>> [round(learning_rate_at(done, 1, 6, 1.0, "linear", 2), 3) for done in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    >>> [round(learning_rate_at(done / 2, 0.5, 2, 1.0, "cosine", 0), 3) for done in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    if done < warmup:
        return peak * min(1.0, (done + width) / warmup)
    if kind == "constant":
        return peak
    progress = min(1.0, (done - warmup) / (total - warmup)) if total > warmup else 1.0
    return peak * (1.0 - progress if kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress)))


@dataclass(frozen=True, slots=True)
class LearningRateSchedule:
    """The learning rate of each update of a run."""

    peak: float
    kind: str  # constant | linear | cosine
    warmup: float  # steps
    n_steps: int

    def at(self, done: int, place: int, count: int, restarts: bool = False) -> float:
        """Return the rate of update `place` (0, 1, ...) of a step's `count`, after `done` whole steps.

        `restarts`: the step restarts from the initial weights, and so does the schedule: it is one step long.
        """
        total = 1 if restarts else self.n_steps
        return learning_rate_at(done + place / count, 1 / count, total, self.peak, self.kind, self.warmup)


def evaluation_due(done: Fraction, width: Fraction, total: int, every: int | None, longest: int | None) -> bool:
    """Whether an evaluation is due after the update that ends at `done` of `total` steps and is `width` steps wide.

    every: steps between evaluations, 0 for none on the way. None: at least ten in the run with the first, before it,
    and no more than `longest` steps apart; in a run of fewer than nine steps some fall between the updates of a step,
    as far as it has several.

    >>> [step for step in range(1, 201) if evaluation_due(Fraction(step), Fraction(1), 200, None, 10)][:3]
    [10, 20, 30]
    >>> sum(evaluation_due(Fraction(step), Fraction(1), 31, None, None) for step in range(1, 32))
    9
    >>> eighths = [Fraction(k, 8) for k in range(1, 41)]  # 5 steps of 8 updates
    >>> sum(evaluation_due(point, Fraction(1, 8), 5, None, None) for point in eighths)
    9
    """
    if every == 0:
        return False
    gap = Fraction(every) if every else min(Fraction(total, FEWEST_EVALUATIONS - 1), Fraction(longest or total))
    if gap >= 1:  # at the ends of steps only
        return done.denominator == 1 and done // gap > (done - 1) // gap
    return done // gap > (done - width) // gap


def averaged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average the metrics of a step's updates over those that measured them; counts are summed.

    >>> averaged([{"train/loss": 1.0, "train/empty_updates": 0}, {"train/empty_updates": 1}])
    {'train/loss': 1.0, 'train/empty_updates': 1.0}
    """
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        out[name] = sum(values) / (1 if name in COUNTS else len(values))
    return out
