"""Settings of every algorithm that trains: optimizer, schedule, evaluation, budget and checkpoints."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from rlreason.config.run import RunConfig
from rlreason.objectives.card import Card, imitation_card
from rlreason.objectives.objective import LengthNormConfig, Objective
from rlreason.settings import LARGE, MADE, MISSING, MOST, Settings, choice, count, group, number, text

MOST_RANKS = 1024
UNKNOWN_EVALUATIONS = 12  # at most about so many, if eval_every does not say how many


@dataclass
class OptimizationConfig(Settings):
    """What the learner and its schedule take; every algorithm that trains inherits these keys."""

    learning_rate: float = number(above=0, high=1e30, doc="the highest rate of lr_schedule")
    lr_schedule: str = choice("constant | linear | cosine", "after the warm-up; linear and cosine fall towards 0")
    warmup_steps: int = number(0, "steps over which the rate rises")
    optimizer: str = choice("adamw | adamw_8bit", "adamw_8bit: moments in 2 bytes a weight, not 8 (bitsandbytes)")
    weight_decay: float = number(0.0, "of AdamW, on every weight alike", high=1e30)
    adam_betas: list[float] = number([0.9, 0.95], "of AdamW's two moments", below=1)
    max_grad_norm: float = number(1.0, "gradients are scaled down to this norm, once a step", above=0, high=1e30)
    train_batch_size: int = count(most=MADE, doc="responses per step; with GRPO it divides rollout_batch_size")
    micro_batch_size: int | None = count(None, "sequences per pass; null: by micro_batch_tokens", MADE)
    gradient_accumulation_steps: int | None = count(
        None, "says micro_batch_size in the handout's way; it divides train_batch_size", MADE
    )

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate."""
        return self.learning_rate

    def rules(self) -> Iterator[str]:
        """Check the sizes of batch and micro-batch, and the number of betas."""
        batch, steps, size = self.train_batch_size, self.gradient_accumulation_steps, self.micro_batch_size
        accumulated = f"gradient_accumulation_steps={steps}"
        if len(self.adam_betas) != 2:
            yield f"adam_betas={list(self.adam_betas)} must be two numbers: try [0.9,0.95]"
        if steps is not None and (steps < 1 or batch % steps):
            yield f"{accumulated} must divide train_batch_size={batch}: try a power of two, or null"
        elif steps is not None and size is not None and size * steps != batch:
            yield f"{accumulated} x micro_batch_size={size} is not train_batch_size={batch}: set one"

    def sequences_per_micro_batch(self) -> int | None:
        """Limit on sequences; the handout's accumulation steps are converted to the largest micro-batch they allow."""
        steps, size = self.gradient_accumulation_steps, self.micro_batch_size
        return size if steps is None else self.train_batch_size // steps


@dataclass
class BudgetConfig:
    """A run ends before the step that would exceed one of these, its last evaluation inside; null: no bound."""

    hours: float | None = number(None, "wall clock, set-up and evaluations too (time/total)", above=0, high=LARGE)
    tokens: int | None = count(None, "tokens sampled to learn from (tokens/generated)", MOST * MOST)
    steps: int | None = count(None, "steps; a falling rate still falls towards n_steps")


@dataclass
class CheckpointConfig:
    """Of every run that trains. A run that a signal stops writes one besides, unless `every` is 0."""

    every: int | None = number(None, "steps between checkpoints; null: for under 5% of the time; 0: no resuming")
    minutes: float | None = number(
        10.0, "most between them, within 10% of the time; null: no limit", above=0, only_if="here.every is None"
    )
    keep: int = count(
        2,
        "so many of the newest stay, and the best; of a run that finished or spent its budget the newest and the best",
    )
    keep_final: bool = text(False, "a finished run keeps its optimizer's moments too, for a larger n_steps later")


@dataclass
class TrainingConfig(OptimizationConfig, RunConfig):
    """Keys of every algorithm that trains."""

    trains = True
    longest_without_evaluation: ClassVar[int | None] = None  # most steps between evaluations, with eval_every=null
    learning_temperature: ClassVar[Any] = 1.0  # of the distribution that is learned: given responses are imitated

    gpus: str = text("auto", "ranks, one on each GPU; auto: one, or those that torchrun has started; N: so many")
    parallel: str = choice(
        "auto | replicate | shard",
        "replicate: each rank has the whole model; shard: a part of weights and moments; auto: what fits",
        only_if="on_several_ranks",
    )
    length_norm: LengthNormConfig = group(LengthNormConfig)
    n_steps: int | None = count(doc="rollout batches of GRPO and EI, updates of SFT; null: by epochs")
    interim_eval_problems: int | None = count(
        doc="validation problems on the way; the last evaluation asks all", only_if="problem_limit is None"
    )
    eval_every: int | None = number(None, "steps between evaluations; null: ten or more; 0: only before and after")
    save_rollouts_every: int = number(1, "steps between saved responses; 0: none saved", only_if="samples_to_learn")
    save_model: bool = text(True, "the trained model is kept in model/")
    profile: bool = text(False, "a torch trace of the second step (profile.json.gz), largest costs (profile.md)")
    checkpoint: CheckpointConfig = group(CheckpointConfig)
    budget: BudgetConfig = group(BudgetConfig)

    def rules(self) -> Iterator[str]:
        """Check the schedule, the ranks, and what learning from samples needs."""
        if self.n_steps is not None:
            yield from self.schedule_rules(self.n_steps)
        if self.gpus != "auto" and not (self.gpus.isdecimal() and 1 <= int(self.gpus) <= MOST_RANKS):
            yield f"gpus={self.gpus} must be auto or a number from 1 to {MOST_RANKS}: try gpus=2"
        if self.parallel == "shard" and self.optimizer == "adamw_8bit":
            yield "parallel=shard with optimizer=adamw_8bit, whose moments cannot be spread: choose optimizer=adamw"
        if self.parallel == "shard" and self.model.weights == "bfloat16":
            yield "parallel=shard with model.weights=bfloat16: the head stays float32: set model.weights=float32"
        alone = "device=mps" if self.device == "mps" else f"model.dtype={self.model.dtype}"
        if self.on_several_ranks and alone in ("device=mps", "model.dtype=float16"):
            yield f"gpus={self.gpus} with {alone}, which trains in one process: set gpus=1"
        if self.rollout.async_level and self.algorithm != "grpo":
            yield f"rollout.async_level=1 with algorithm={self.algorithm}: only GRPO can correct for it: set it to 0"
        if self.budget.tokens is not None and not self.samples_to_learn:
            limit = f"budget.tokens={self.budget.tokens} with algorithm={self.algorithm}"
            yield f"{limit}, which samples none to learn from: set budget.steps or budget.hours"
        if self.samples_to_learn and self.sampling.temperature == 0:
            yield "sampling.temperature=0.0: learning from samples needs different ones, so it must be above 0: try 1.0"

    def schedule_rules(self, n_steps: int) -> Iterator[str]:
        """Complain about a learning rate that never reaches its peak in this many steps."""
        whole = 1 if self.restarts else n_steps  # steps of one schedule
        if self.warmup_steps > whole:
            anew = ", and restart=true starts the rate anew in each step" if self.restarts else ""
            yield f"warmup_steps={self.warmup_steps} is more than the {n_steps} steps of the run{anew}: lower it"

    @property
    def checkpoints_at_once(self) -> int:
        """Those that are kept, the best one, and one being written."""
        return 0 if self.checkpoint.every == 0 else self.checkpoint.keep + 2

    @property
    def restarts(self) -> bool:
        """Whether each step trains the model that the run started from."""
        return getattr(self, "restart", False)

    @property
    def on_several_ranks(self) -> bool:
        """Whether it trains on several ranks: by its settings, or started by torchrun."""
        return self.gpus != "1" if self.gpus != "auto" else int(os.environ.get("WORLD_SIZE") or 1) > 1

    def responses_saved(self) -> int:
        """Approximately: those of the saved steps, and of all evaluations."""
        sampled = (self.n_steps or 0) * self.responses_per_step
        return self.responses_evaluated() + (sampled // self.save_rollouts_every if self.save_rollouts_every else 0)

    def responses_evaluated(self) -> int:
        """Approximately: those of the evaluations on the way, and of the last one."""
        evaluation, last, every = self.evaluation, self.responses_at_the_end, self.eval_every
        evaluations = 2 if every == 0 else (self.n_steps or 0) // every + 2 if every else UNKNOWN_EVALUATIONS
        own = evaluations * (evaluation.samples * evaluation.problems if evaluation.problems else last) + last
        return own + sum(run.responses_evaluated() for run in self.by_set().values())

    def describe_batch(self, n_steps: int) -> str:
        """Describe what one step learns from; `n_steps`: steps of the whole run."""
        return f"{n_steps} optimizer steps of {self.train_batch_size} traces"

    def card(self) -> Card:
        """The objective card."""
        return imitation_card(self.length_norm, sampled=self.samples_to_learn)

    def objective(self) -> Objective:
        """The objective. Of imitation: -A log p with A = 1, so only the length norm matters."""
        constant = self.length_norm.divisor or self.sampling.max_tokens
        return Objective(length_norm=LengthNormConfig(self.length_norm.kind, constant))

    def too_few(self, there: int) -> str:
        """Say why this many training problems are too few for one step; "" if they suffice."""
        return ""

    def warnings(self) -> dict[str, str]:
        """Warnings by short name about settings that seldom help: printed before the run and counted in its summary."""
        lora = self.model.lora
        if not lora.rank or lora.learning_rate is not None or "learning_rate" in self.given:
            return {}
        return {
            "lora_learning_rate": (
                f"model.lora.rank={lora.rank} learns with learning_rate={self.learning_rate:g}, which is that of full "
                f"weights: ten times is usual for adapters, as in model.lora.learning_rate={10 * self.learning_rate:g}"
            )
        }

    @property
    def peak_learning_rate(self) -> float:
        """The highest learning rate: the adapters' own, if they have one."""
        own = self.model.lora.learning_rate if self.model.lora.rank else None
        return self.learning_rate if own is None else own


@dataclass
class OnlineConfig(TrainingConfig):
    """Keys of every algorithm that learns from responses which the policy samples in each step, a group per problem."""

    samples_to_learn = True
    questions_by: ClassVar[str]  # the setting that says how many different problems a step has

    n_steps: int = MISSING
    group_size: int = count(most=MADE, doc="responses per question; with GRPO it divides rollout_batch_size")
    skip_solved: int = number(0, "after this many groups in a row all correct, a question is dropped; 0: never")

    @property
    def questions(self) -> int:
        """Different problems per step."""
        raise NotImplementedError

    @property
    def responses_per_step(self) -> int:
        """Number of responses sampled in a training step."""
        return self.questions * self.group_size

    def too_few(self, there: int) -> str:
        key = self.questions_by
        if there >= self.questions:
            return ""
        many = f"{self.questions} different questions a step, and there are {there}"
        return f"{key}={getattr(self, key)} requires {many}: lower {key}, or give more data"
