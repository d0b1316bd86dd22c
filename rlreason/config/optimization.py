"""How weights are changed: the optimizer, its learning rate over the run, and how a step is cut into micro-batches."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from rlreason.config.choices import choice


@dataclass
class OptimizationConfig:
    """What the learner and its schedule take; every algorithm that trains inherits these keys."""

    learning_rate: float = MISSING  # the highest rate of lr_schedule
    # The rate after the warm-up: linear and cosine fall towards 0 by the last step.
    lr_schedule: str = choice("constant", "linear", "cosine", default="constant")
    warmup_steps: int = 0  # steps over which the rate rises
    # adamw_8bit: both moments in one byte each, 2 bytes a weight where adamw takes 8; needs bitsandbytes.
    optimizer: str = choice("adamw", "adamw_8bit", default="adamw")
    weight_decay: float = 0.0  # of AdamW, on every weight alike
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # of AdamW's two moments
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm, once per optimizer step
    train_batch_size: int = MISSING  # responses per optimizer step; with GRPO it divides rollout_batch_size
    micro_batch_size: int | None = None  # sequences in one forward pass at most; null: as micro_batch_tokens allows
    # Says micro_batch_size in the handout's way; it divides train_batch_size.
    gradient_accumulation_steps: int | None = None

    def sequences_per_micro_batch(self) -> int | None:
        """At most so many; the handout's accumulation steps are turned into the largest micro-batch they allow."""
        steps, size = self.gradient_accumulation_steps, self.micro_batch_size
        return size if steps is None else self.train_batch_size // steps

    def optimization_problems(self) -> list[str]:
        """Every violated rule between these keys, one line each: setting, value, rule, cure."""
        steps, size = self.gradient_accumulation_steps, self.micro_batch_size
        bad = []
        if len(self.adam_betas) != 2:
            bad.append(f"adam_betas={list(self.adam_betas)} must be two numbers: try [0.9,0.95]")
        if steps is not None and (steps < 1 or self.train_batch_size % steps):
            bad.append(
                f"gradient_accumulation_steps={steps} must divide train_batch_size={self.train_batch_size}: "
                "try a power of two, or leave it out (micro_batch_tokens decides)"
            )
        elif steps is not None and size is not None and size * steps != self.train_batch_size:
            bad.append(
                f"gradient_accumulation_steps={steps} x micro_batch_size={size} is not train_batch_size="
                f"{self.train_batch_size}: set one of the two and leave the other null"
            )
        return bad
