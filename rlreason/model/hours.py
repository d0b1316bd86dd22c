"""How long a run takes on a card that is not here: published step times, scaled to its model, tokens and card.

    seconds = step (N / N_0) (T / T_0),    T = (sampled + learned) / 2

`step`: of the published run, which samples and learns T_0 = 256 responses of up to 1,024 tokens with N_0 = 1.54e9
parameters on one GPU that vLLM shares. N: parameters; `sampled` and `learned`: tokens at the limit of a response, each
of which is taken for half of the cost. An estimate of the size of a bill: right to a factor of two at best.
"""

from dataclasses import dataclass
from typing import Any

from rlreason.config.run import RunConfig
from rlreason.runtime.machine import Device

PARAMETERS, TOKENS = 1.54e9, 256 * 1024  # of the published step
FREE = 0.98  # of a card's memory, when nothing runs on it
PUBLISHED = "published (garg-aayush/building-from-scratch: Qwen2.5-Math-1.5B on MATH)"
SCALED = "scaled from those by memory bandwidth, tried by nobody"


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU: its memory, whether it computes bfloat16, and the seconds of the published step, from and to."""

    gigabytes: int
    step: tuple[float, float]
    source: str = SCALED
    bf16: bool = True

    def device(self, name: str) -> Device:
        """Return it as a device on which nothing runs."""
        total = self.gigabytes << 30
        return Device("cuda", f"{name} of {self.gigabytes} GB", int(FREE * total), total, self.bf16, int(FREE * total))


#: The step of a card with a share b of an H100's bandwidth: from 30 / b (tuned) and 54 b^-0.37 (untuned), which the
#: RTX 4090 obeys, in either order. A T4 computes in float32, taken as four times slower.
CARDS = {
    "h200": Card(141, (21, 47)),
    "h100": Card(80, (30, 54), PUBLISHED),
    "a100-80": Card(80, (49, 65)),
    "a100-40": Card(40, (64, 72)),
    "l40s": Card(48, (89, 117)),
    "rtx4090": Card(24, (84, 84), PUBLISHED),
    "l4": Card(24, (132, 336)),
    "t4": Card(16, (500, 1260), bf16=False),
}


def tokens_of(run: RunConfig) -> float:
    """Return T of a run: what it samples, evaluations included, and what it learns, halved.

    Traces of SFT are taken to be as long as a response may be.
    """
    settings: Any = run
    longest, evaluated = run.sampling.max_tokens, run.evaluation.sampling.max_tokens
    if not run.trains:
        return run.responses_saved() * evaluated / 2
    steps, learned, sampled = settings.n_steps or 0, 0.0, float(settings.responses_evaluated() * evaluated)
    if run.samples_to_learn:
        passes = getattr(run, "epochs_per_rollout", None) or settings.sft_epochs
        sampled += steps * settings.responses_per_step * longest
        learned = steps * settings.responses_per_step * longest * passes
    elif settings.epochs is None:
        learned = steps * settings.train_batch_size * longest
    else:
        learned = settings.epochs * (run.data.limit or getattr(run.data, "n_train", None) or 7500) * longest
    return float(sampled + learned) / 2


def hours(run: RunConfig, parameters: int, card: Card) -> tuple[float, float]:
    """Return the hours of a run on a card, from and to; `parameters` of its model."""
    low, high = (step * parameters / PARAMETERS * tokens_of(run) / TOKENS / 3600 for step in card.step)
    return low, high
