"""A whole run: its top-level keys, and the rules that must hold between keys of different groups.

The names are the handout's (`rollout_batch_size`, `train_batch_size`, `group_size`, `epochs_per_rollout`).
It knows the groups and the rules of the objective, which are plain words too.
"""

import math
from dataclasses import dataclass, field, fields, is_dataclass

from omegaconf import MISSING

from rlreason.config.groups import (
    Baseline,
    Data,
    Grading,
    LengthNorm,
    Logger,
    Loss,
    Model,
    Prompt,
    Rollout,
    Sampling,
    StdNorm,
    Stories,
    TinyModel,
)
from rlreason.objectives.rules import check_objective


@dataclass
class Run:
    """Keys that every algorithm has."""

    algorithm: str = MISSING
    seed: int = 0
    threads: int | None = None  # on the processor; None: one for the tiny model, every core otherwise
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    prompt: Prompt = field(default_factory=Prompt)
    grading: Grading = field(default_factory=Grading)
    rollout: Rollout = field(default_factory=Rollout)
    logger: Logger = field(default_factory=Logger)
    sampling: Sampling = field(default_factory=Sampling)

    n_steps: int = MISSING
    learning_rate: float = MISSING
    weight_decay: float = 0.0
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm, once per optimizer step
    micro_batch_tokens: int = MISSING  # the memory knob: tokens in one forward pass
    micro_batch_size: int | None = None  # at most so many sequences in one forward pass; None: as tokens allow
    gradient_accumulation_steps: int | None = None  # the handout's way to say micro_batch_size

    eval_every: int = MISSING  # steps; 0: only before and after
    eval_problems: int = MISSING
    save_rollouts_every: int = 1  # steps; 0: never
    save_model: bool = True

    def problems(self) -> list[str]:
        """Every violated rule, one line each: setting, value, rule, cure."""
        groups = (getattr(self, f.name) for f in fields(self))
        bad = [
            line for group in groups if is_dataclass(group) and hasattr(group, "problems") for line in group.problems()
        ]
        bad += self._numbers()
        if isinstance(self.model, TinyModel) and not isinstance(self.data, Stories):
            bad.append(
                f"model=tiny with data={self.data.name}: the tiny model learns its habits from stories: "
                "choose data=stories, or a pretrained model (model=local model.path=DIR)"
            )
        if isinstance(self.model, TinyModel) and self.prompt.reward == "question_only":
            bad.append(
                f"model=tiny with prompt={self.prompt.name}: the tiny model learns to answer in <answer> tags, and "
                "this prompt's reward expects a box: choose prompt=r1_zero_short, or a pretrained model"
            )
        if self.prompt.reward not in ("r1_zero", "question_only") and ":" not in self.prompt.reward:
            bad.append(
                f"prompt.reward={self.prompt.reward} is neither r1_zero nor question_only nor "
                "module:function: choose one"
            )
        return bad

    def _numbers(self) -> list[str]:
        bad = []
        positive = ("n_steps", "learning_rate", "max_grad_norm", "micro_batch_tokens", "eval_problems")
        bad += [
            f"{key}={getattr(self, key)} must be above 0" for key in positive if not 0 < getattr(self, key) < math.inf
        ]
        not_negative = ("weight_decay", "eval_every", "save_rollouts_every")
        bad += [f"{key}={getattr(self, key)} must not be negative" for key in not_negative if getattr(self, key) < 0]
        s = self.sampling
        if not 0 <= s.min_tokens <= s.max_tokens or s.max_tokens < 1:
            bad.append(
                f"sampling.min_tokens={s.min_tokens}, sampling.max_tokens={s.max_tokens}: "
                "0 <= min <= max and max >= 1 must hold"
            )
        if self.threads is not None and self.threads < 1:
            bad.append(f"threads={self.threads} must be at least 1, or null to choose by the model's size")
        if not 0 < s.temperature < math.inf:
            bad.append(
                f"sampling.temperature={s.temperature}: the policy gradient needs samples, so it must be "
                "above 0: try 1.0"
            )
        if len(self.adam_betas) != 2 or not all(0 <= beta < 1 for beta in self.adam_betas):
            bad.append(f"adam_betas={list(self.adam_betas)} must be two numbers in [0, 1): try [0.9,0.95]")
        return bad

    def not_multiple(self, larger: str, smaller: str) -> list[str]:
        a, b = getattr(self, larger), getattr(self, smaller)
        if b > 0 and a >= b and a % b == 0:
            return []
        divisor = max((d for d in range(1, max(1, min(a, b)) + 1) if a > 0 and a % d == 0), default=1)
        return [f"{larger}={a} must be a positive multiple of {smaller}={b}: try {smaller}={divisor}"]


@dataclass
class GRPO(Run):
    """Group-relative policy optimisation: sample a group per question, compare, learn, repeat."""

    algorithm: str = "grpo"
    loss: Loss = field(default_factory=Loss)
    length_norm: LengthNorm = field(default_factory=LengthNorm)
    baseline: Baseline = field(default_factory=Baseline)
    std_norm: StdNorm = field(default_factory=StdNorm)
    advantage_eps: float = 1e-6  # added to what std_norm divides by
    kl_placement: str = "none"  # none | loss | reward; the reference model is the one the run starts from
    kl_estimator: str = "k3"  # k1 | k2 | k3
    kl_coef: float = 0.0
    entropy_coef: float = 0.0  # above 0 rewards entropy
    overlong: str = "none"  # responses cut at max_tokens: none | mask (no loss) | penalty (DAPO's soft one)
    overlong_cache: int | None = None  # tokens over which the penalty grows; None: a fifth of max_tokens
    zero_variance: str = "keep"  # groups of equal rewards: keep | skip
    mismatch: str = "none"  # weights for the gap between engine and trainer: none | truncate | mask
    mismatch_cap: float | None = None  # the largest such weight

    rollout_batch_size: int = MISSING  # responses per step, over all questions
    group_size: int = MISSING  # responses per question
    epochs_per_rollout: int = MISSING  # passes over each rollout batch
    train_batch_size: int = MISSING  # responses per optimizer step

    @property
    def questions(self) -> int:
        """Different problems per step."""
        return self.rollout_batch_size // self.group_size

    @property
    def updates_per_rollout(self) -> int:
        """Optimizer steps per rollout batch; above 1, all but the first are off-policy."""
        return self.epochs_per_rollout * (self.rollout_batch_size // self.train_batch_size)

    def sequences_per_micro_batch(self) -> int | None:
        """The handout's accumulation steps, turned into the largest micro-batch they allow."""
        if self.gradient_accumulation_steps is not None:
            return self.train_batch_size // self.gradient_accumulation_steps
        return self.micro_batch_size

    def problems(self) -> list[str]:
        bad = super().problems()
        bad += self.not_multiple("rollout_batch_size", "group_size")
        bad += self.not_multiple("rollout_batch_size", "train_batch_size")
        if self.epochs_per_rollout < 1:
            bad.append(f"epochs_per_rollout={self.epochs_per_rollout}: each rollout batch is used at least once: try 1")
        if self.group_size < 2 and self.baseline.kind != "none":
            bad.append(
                f"group_size={self.group_size} with baseline={self.baseline.kind}: a response is compared with its "
                "group, and a group of one always gives advantage 0: use group_size=8, or loss=no_baseline"
            )
        cache = self.overlong_cache
        if cache is not None and not 0 < cache <= self.sampling.max_tokens:
            bad.append(
                f"overlong_cache={cache} must lie in 1..sampling.max_tokens={self.sampling.max_tokens}: try null"
            )
        if cache is not None and self.overlong != "penalty":
            bad.append(f"overlong_cache={cache} is read by overlong=penalty only: set it to null, or overlong=penalty")
        if self.length_norm.constant is not None and self.length_norm.kind != "constant":
            bad.append(
                f"length_norm.constant={self.length_norm.constant} is read by length_norm=constant only: set it to "
                "null, or choose length_norm=constant"
            )
        bad += self._accumulation()
        return bad or check_objective(self.settings())  # whose rules need sound numbers

    def settings(self) -> dict[str, object]:
        """The objective as plain words and numbers: what the rules check and the card describes."""
        own = ("advantage_eps", "kl_placement", "kl_estimator", "kl_coef", "entropy_coef", "overlong", "zero_variance")
        return {
            "loss_type": self.loss.loss_type,
            **self.loss.numbers(),
            "dual_clip": getattr(self.loss, "dual_clip", None),
            "length_norm": self.length_norm.kind,
            "constant": self.length_norm.constant,
            "baseline": self.baseline.kind,
            "std_norm": self.std_norm.kind,
            **{key: getattr(self, key) for key in (*own, "mismatch", "mismatch_cap", "epochs_per_rollout")},
            "on_policy": self.updates_per_rollout == 1,
        }

    def _accumulation(self) -> list[str]:
        steps, size = self.gradient_accumulation_steps, self.micro_batch_size
        if size is not None and size < 1:
            return [f"micro_batch_size={size} must be at least 1, or null to let micro_batch_tokens decide"]
        if steps is None:
            return []
        if steps < 1 or self.train_batch_size % steps:
            return [
                f"gradient_accumulation_steps={steps} must divide train_batch_size={self.train_batch_size}: "
                "try a power of two, or leave it out (micro_batch_tokens decides)"
            ]
        if size is not None and size * steps != self.train_batch_size:
            return [
                f"gradient_accumulation_steps={steps} x micro_batch_size={size} is not train_batch_size="
                f"{self.train_batch_size}: set one of the two and leave the other null"
            ]
        return []
