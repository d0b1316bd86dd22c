"""The smaller config groups: loss, length norm, sampling, prompt, grading, logger, each key with type and unit.

`model.py`, `data.py` and `rollout.py` beside it hold the larger ones. An option file in `conf/GROUP/` is typed by
one of these dataclasses, so a wrong key or type is refused before anything runs. `problems()` names what is wrong
inside a group, with the cure. Defaults that differ by option stand in the option files. It knows no other room,
and imports no torch, so that a typo is answered at once.
"""

import math
from dataclasses import dataclass, field

from omegaconf import MISSING

from rlreason.objectives.rules import READERS


@dataclass
class Loss:
    """A loss of the policy gradient and its numbers.

    One schema for every option, so that a file can set numbers whichever option is chosen beside it: the rules say
    which loss reads which.
    """

    loss_type: str = MISSING
    cliprange: float | None = None  # both sides at once
    cliprange_low: float | None = None  # the ratio is kept above 1 - low; None: cliprange
    cliprange_high: float | None = None  # and below 1 + high; None: cliprange
    dual_clip: float | None = None  # bound of -A ratio for A < 0, above 1 + high
    ratio_cap: float | None = None  # the ratio's largest value as a weight

    def numbers(self) -> dict[str, float | None]:
        """Keyword arguments of the loss function: those that it reads and that are set."""
        numbers = {key: getattr(self, key) for key, losses in READERS.items() if self.loss_type in losses}
        for side in ("cliprange_low", "cliprange_high"):
            if side in numbers and numbers[side] is None:
                numbers[side] = self.cliprange
        return {key: number for key, number in numbers.items() if number is not None}


@dataclass
class LengthNorm:
    kind: str = MISSING
    constant: float | None = None  # tokens; None: sampling.max_tokens. Read by kind=constant only

    @property
    def divisor(self) -> float | None:
        """The constant, in tokens, where this norm has one."""
        return self.constant if self.kind == "constant" else None

    def problems(self) -> list[str]:
        if self.constant is None or self.constant > 0:
            return []
        return [
            f"length_norm.constant={self.constant} must be above 0, because the loss is divided by it: give the "
            "length of a long response in tokens, or null for sampling.max_tokens"
        ]


@dataclass
class Baseline:
    kind: str = MISSING


@dataclass
class StdNorm:
    kind: str = MISSING


@dataclass
class Sampling:
    """How responses are sampled, in training and evaluation alike. No top-k or top-p: what is sampled is trained on."""

    temperature: float = MISSING  # 0 takes the most likely token, in evaluation only
    min_tokens: int = MISSING  # a response cannot end before this many tokens
    max_tokens: int = MISSING  # and is cut here

    def problems(self) -> list[str]:
        bad = []
        if not 0 <= self.min_tokens <= self.max_tokens or self.max_tokens < 1:
            bad.append(
                f"sampling.min_tokens={self.min_tokens}, sampling.max_tokens={self.max_tokens}: "
                "0 <= min <= max and max >= 1 must hold"
            )
        if not 0 <= self.temperature < math.inf:
            bad.append(f"sampling.temperature={self.temperature} must be 0 or above: try 1.0")
        return bad


@dataclass
class Prompt:
    name: str = MISSING
    file: str = MISSING  # in prompts/, or a path
    reward: str = MISSING  # r1_zero | question_only | module:function, your own (response, gold) -> score
    stop: list[str] = field(default_factory=list)
    trace: str = "{solution}"  # a response to imitate, written from {solution} and {answer}
    chat: bool = False  # the filled file is the user's turn in the model's own chat template
    system: str | None = None  # of a chat: the system message; null: none, or the template's own
    enable_thinking: bool | None = None  # of a chat whose template has this switch; null: the template's default


@dataclass
class Grading:
    """How answers are compared; part of what makes two accuracies comparable."""

    extract: str = "strict"  # strict: the answer itself | last_number | sentence: one number in a sentence counts
    timeout_s: float = 2.0  # of wall clock for one comparison
    percent: bool = True  # 38% equals 38 and 0.38
    rel_tol: float = 1e-6  # of a decimal against an exact value
    correct_at: float | None = None  # a reward of your own counts as correct from here on, less is partial; None: 1
    workers: int = 1  # processes for what the exact rules cannot decide
    memory_mb: int = 1536  # of each worker

    def problems(self) -> list[str]:
        bad = []
        if self.extract not in ("strict", "last_number", "sentence"):
            bad.append(f"grading.extract={self.extract} is none of strict, last_number, sentence: choose one")
        positive = ("timeout_s", "workers", "memory_mb")
        bad += [f"grading.{key}={getattr(self, key)} must be above 0" for key in positive if getattr(self, key) <= 0]
        if not 0 <= self.rel_tol < 1:
            bad.append(f"grading.rel_tol={self.rel_tol} must lie in [0, 1): try 1e-6")
        if self.correct_at is not None and not 0 < self.correct_at < math.inf:
            bad.append(
                f"grading.correct_at={self.correct_at} must be above 0, or everything counts as correct: try 1.0"
            )
        return bad


@dataclass
class Guards:
    """What happens when engine and trainer give sampled tokens different probabilities; measured in every step."""

    parity: str = "warn"  # warn | stop | correct (warn, and let the objective's mismatch weights correct for it)
    parity_bound: float = 0.05  # nats per token, mean over a step; float32 stays below 1e-4

    def problems(self) -> list[str]:
        bad = []
        if self.parity not in ("warn", "stop", "correct"):
            bad.append(f"guards.parity={self.parity} is none of warn, stop, correct: choose one")
        if not self.parity_bound > 0:
            bad.append(f"guards.parity_bound={self.parity_bound} must be above 0: try 0.05")
        return bad


@dataclass
class Logger:
    """Where metrics are mirrored. null leaves a setting to W&B's own variables, such as WANDB_PROJECT."""

    kind: str = MISSING
    project: str | None = None  # null: WANDB_PROJECT, else rlreason
    mode: str | None = None  # online | offline | disabled; null: WANDB_MODE, else online
    entity: str | None = None  # user or team
    group: str | None = None  # null: WANDB_RUN_GROUP, else the sweep that the run is part of
    tags: list[str] | None = None
    name: str | None = None  # null: WANDB_NAME, else the run folder's name
    notes: str | None = None

    def problems(self) -> list[str]:
        bad = []
        if self.kind not in ("none", "wandb"):
            bad.append(f"logger.kind={self.kind} is none of none, wandb: choose logger=none or logger=wandb")
        if self.mode not in (None, "online", "offline", "disabled"):
            bad.append(f"logger.mode={self.mode} is none of online, offline, disabled: choose one")
        return bad
