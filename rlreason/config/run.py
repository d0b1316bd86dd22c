"""A whole run: the keys that every algorithm has, those of every training, and the rules between them.

The names are the handout's where it has one. It knows the groups.
"""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import ClassVar

from omegaconf import MISSING

from rlreason.config.data import DataConfig, StoriesConfig
from rlreason.config.evaluation import EvalConfig, complaints
from rlreason.config.groups import (
    GradingConfig,
    LoggerConfig,
    MonitorsConfig,
    PromptConfig,
    SamplingConfig,
)
from rlreason.config.model import TINY_CONTEXT, ModelConfig, TinyModelConfig
from rlreason.config.ranges import MADE
from rlreason.config.rollout import RolloutConfig
from rlreason.objectives.objective import LengthNormConfig, Objective


@dataclass
class RunConfig:
    """Keys of every algorithm, whether it trains or not."""

    algorithm: str = MISSING
    seed: int = 0
    threads: int | None = None  # on the processor; None: one for the tiny model, otherwise what this process may use
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    guards: MonitorsConfig = field(default_factory=MonitorsConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)  # where evaluations differ from training

    micro_batch_tokens: int = MISSING  # the memory knob: tokens in one forward pass
    eval_problems: int | None = None  # short for eval.problems: of the validation data, always the same; null: all
    log_generations: int = 3  # responses that are shown in the terminal, before training or after an evaluation

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the objective makes up for engine and trainer giving sampled tokens different probabilities."""
        return False

    def problems(self) -> list[str]:
        """Every violated rule between settings, one line each: setting, value, rule, cure."""
        groups = (getattr(self, f.name) for f in fields(self) if f.name != "eval")
        bad = [
            line for group in groups if is_dataclass(group) and hasattr(group, "problems") for line in group.problems()
        ]
        bad += complaints(self)
        if self.guards.parity == "correct" and not self.corrects_mismatch:
            bad.append(
                "guards.parity=correct needs weights that correct: with GRPO set mismatch=truncate mismatch_cap=2, "
                "with another algorithm guards.parity=warn"
            )
        bad += self._matches()
        return bad

    @property
    def problems_on_the_way(self) -> int | None:
        """How many problems the evaluations before the last ask; None: all."""
        return self.asked_at_most

    @property
    def problems_at_the_end(self) -> int | None:
        """How many problems the last evaluation asks; None: all."""
        return self.asked_at_most if self.eval.final_problems is None else self.eval.final_problems

    @property
    def asked_at_most(self) -> int | None:
        """The bound on every evaluation under either of its names; None: there is none."""
        return self.eval_problems if self.eval.problems is None else self.eval.problems

    @property
    def answers(self) -> int:
        """Responses per problem in an evaluation."""
        return 1 if self.eval.samples is None else self.eval.samples

    @property
    def counted(self) -> tuple[str, str]:
        """The setting that says how many these are, as it is typed; and how to ask for one."""
        return f"eval.samples={self.eval.samples}", "eval.samples=1"

    @property
    def problems_there(self) -> int | None:
        """How many problems an evaluation can ask at most, where the settings say it before any data is read."""
        return getattr(self.data if self.eval.data is None else self.eval.data, "n_validation", None)

    def warnings(self) -> dict[str, str]:
        """What may be meant but seldom helps, by a short name: said before the run and counted in its summary."""
        return {}

    def _matches(self) -> list[str]:
        bad = []
        if isinstance(self.model, TinyModelConfig) and not isinstance(self.data, StoriesConfig):
            bad.append(
                f"model=tiny with data={self.data.name}: the tiny model learns its habits from stories: "
                "choose data=stories, or a pretrained model (model=local model.path=DIR)"
            )
        if isinstance(self.model, TinyModelConfig) and self.prompt.chat:
            bad.append(
                "prompt.chat=true with model=tiny: a model made on the spot has no chat template: choose a pretrained "
                "instruct model (model=local model.path=DIR), or prompt=r1_zero_short"
            )
        for key, longest in self._longest_responses().items():
            if isinstance(self.model, TinyModelConfig) and longest >= TINY_CONTEXT:
                bad.append(
                    f"{key}={longest} must be below {TINY_CONTEXT}, the tiny model's context, which the prompt shares: "
                    "lower it"
                )
            elif self.micro_batch_tokens <= longest:
                bad.append(
                    f"micro_batch_tokens={self.micro_batch_tokens} must be above {key}={longest}, so that a prompt and "
                    f"its whole response fit: raise it (try {2 * longest}), or lower {key}"
                )
        return bad

    def _longest_responses(self) -> dict[str, int]:
        """The settings that bound a response in tokens, with their values."""
        own = self.eval.sampling.max_tokens
        asked = {} if own is None else {"eval.sampling.max_tokens": own}
        return {"sampling.max_tokens": self.sampling.max_tokens} | asked

    def not_multiple(self, larger: str, smaller: str) -> list[str]:
        a, b = getattr(self, larger), getattr(self, smaller)
        if b > 0 and a >= b and a % b == 0:
            return []
        divisor = next((d for d in range(min(a, b, MADE), 0, -1) if a % d == 0), 1)
        return [f"{larger}={a} must be a positive multiple of {smaller}={b}: try {smaller}={divisor}"]


@dataclass
class TrainingConfig(RunConfig):
    """Keys of every algorithm that trains."""

    learning_rate: float = MISSING
    lr_schedule: str = "constant"  # after the warm-up: constant | linear | cosine, the last two down towards 0
    warmup_steps: int = 0  # over which the rate rises
    optimizer: str = "adamw"  # adamw | adamw_8bit
    weight_decay: float = 0.0
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    max_grad_norm: float = 1.0  # gradients are scaled down to this norm, once per optimizer step
    length_norm: LengthNormConfig = field(default_factory=LengthNormConfig)
    train_batch_size: int = MISSING  # responses per optimizer step
    micro_batch_size: int | None = None  # at most so many sequences in one forward pass; None: as tokens allow
    gradient_accumulation_steps: int | None = None  # the handout's way to say micro_batch_size

    interim_eval_problems: int | None = MISSING  # asked on the way where eval_problems is null; the end asks all
    eval_every: int | None = None  # steps; null: at least ten evaluations in all; 0: only before and after
    save_rollouts_every: int = 1  # steps; 0: never
    save_model: bool = True

    #: With eval_every=null, steps between evaluations at most.
    longest_without_evaluation: ClassVar[int | None] = None

    @property
    def problems_on_the_way(self) -> int | None:
        return self.interim_eval_problems if self.asked_at_most is None else self.asked_at_most

    def objective(self) -> Objective:
        """What is optimised. Of imitation: -A log p with A = 1, so only the length norm counts."""
        given = self.length_norm.divisor
        constant = self.sampling.max_tokens if given is None else given
        return Objective(length_norm=LengthNormConfig(self.length_norm.kind, constant))

    def sequences_per_micro_batch(self) -> int | None:
        """The handout's accumulation steps, turned into the largest micro-batch they allow."""
        steps, size = self.gradient_accumulation_steps, self.micro_batch_size
        return size if steps is None else self.train_batch_size // steps

    def problems(self) -> list[str]:
        bad = super().problems()
        n_steps: int | None = getattr(self, "n_steps", None)  # what a step is, each algorithm says
        if self.lr_schedule not in ("constant", "linear", "cosine"):
            bad.append(f"lr_schedule={self.lr_schedule} is none of constant, linear, cosine: choose one")
        if n_steps is not None:
            bad += self.schedule_problems(n_steps)
        if self.optimizer not in ("adamw", "adamw_8bit"):
            bad.append(f"optimizer={self.optimizer} is none of adamw, adamw_8bit: choose one")
        if self.rollout.async_steps and self.algorithm != "grpo":
            bad.append(
                f"rollout.async_steps=1 with algorithm={self.algorithm}: only GRPO can correct for it: set it to 0"
            )
        if self.algorithm != "sft" and self.sampling.temperature == 0:
            bad.append(
                f"sampling.temperature={self.sampling.temperature}: learning from samples needs different ones, so it "
                "must be above 0: try 1.0"
            )
        if len(self.adam_betas) != 2:
            bad.append(f"adam_betas={list(self.adam_betas)} must be two numbers: try [0.9,0.95]")
        return bad + self._accumulation()

    def schedule_problems(self, n_steps: int) -> list[str]:
        """Complaints about a learning rate that never reaches its height, or never falls, in so many steps."""
        known = getattr(self, "n_steps", None) is not None
        if self.warmup_steps > n_steps:
            many = f"n_steps={n_steps}" if known else f"the run's {n_steps} steps"
            return [f"warmup_steps={self.warmup_steps} is more than {many}: lower it"]
        if self.warmup_steps == n_steps > 0 and self.lr_schedule in ("linear", "cosine"):
            return [
                f"lr_schedule={self.lr_schedule} with warmup_steps={self.warmup_steps}: the rate rises over all of the "
                f"{n_steps} steps and never falls: lower warmup_steps, or set lr_schedule=constant"
            ]
        return []

    def _accumulation(self) -> list[str]:
        steps, size = self.gradient_accumulation_steps, self.micro_batch_size
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
