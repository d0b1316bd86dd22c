"""A whole run: the keys common to all algorithms, the rules between them, and what a run grades with."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from omegaconf import MISSING

from rlreason.config.data import DataConfig, StoriesConfig
from rlreason.config.fields import MADE
from rlreason.config.groups import (
    EvalConfig,
    EvalProtocolConfig,
    GradingConfig,
    LoggerConfig,
    MonitorsConfig,
    PromptConfig,
    RolloutConfig,
    SamplingConfig,
    WaitsConfig,
    complaints,
    evaluation_of,
)
from rlreason.config.model import SHARED_WARM_START, TINY_CONTEXT, ModelConfig


@dataclass
class AnyRunConfig:
    """Keys of every run."""

    trains: ClassVar[bool] = False
    works_on_a_model: ClassVar[bool] = False  # whether it loads a model here; else it requests one elsewhere

    algorithm: str = MISSING  # what the run does
    seed: int = 0  # of sampling, order of problems, data.limit, new adapters; not of made-up data and the tiny model
    waits: WaitsConfig = field(default_factory=WaitsConfig)

    @property
    def most_spent(self) -> str:
        """What a run may spend at most, as overrides; "" if only time."""
        return ""

    @property
    def problems_there(self) -> int | None:
        """How many problems an evaluation can use at most, if the settings say so before any data is read."""
        return None

    @property
    def ratio_is_one(self) -> bool:
        """Whether each update learns from samples of the policy that it updates."""
        return False

    def bounds(self) -> dict[str, int | None]:
        """The settings that limit the number of evaluation problems, with their values."""
        return {}

    def problems(self) -> list[str]:
        """Every violated rule between settings, one line each: setting, value, rule, cure."""
        groups = (getattr(self, f.name) for f in fields(self) if f.name != "eval")
        return [
            line for group in groups if is_dataclass(group) and hasattr(group, "problems") for line in group.problems()
        ]


UNKNOWN_PROBLEMS = 1000  # in data of unknown size


@dataclass
class RunConfig(AnyRunConfig):
    """Keys of every algorithm that works on a model, whether it trains it or not."""

    works_on_a_model: ClassVar[bool] = True
    samples_to_learn: ClassVar[bool] = False  # whether it learns from responses that it samples and grades
    reads_eval_samples: ClassVar[bool] = True  # whether `eval.samples` sets the number of responses of an evaluation

    # Threads on the processor; null: one for the tiny model, otherwise as many processors as this process may use.
    threads: int | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    prompt: PromptConfig = field(default_factory=PromptConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)  # how evaluations differ from training

    micro_batch_tokens: int = MISSING  # the memory knob: tokens in one forward pass, more than the longest response has
    # Short for eval.problems: how many validation problems every evaluation uses, always the same ones; null: all.
    eval_problems: int | None = None
    log_generations: int = 3  # responses shown in the terminal: before training, or after an evaluation

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the objective corrects for engine and trainer giving sampled tokens different probabilities."""
        return False

    @property
    def uses_training_data(self) -> bool:
        """Whether training problems are learned from or sampled."""
        return True

    @property
    def samples_training_data(self) -> bool:
        """Whether responses to training problems are sampled, to learn from them or to measure."""
        return self.samples_to_learn

    @property
    def judges_to_learn(self) -> bool:
        """Whether the prompt's reward decides what is learned from, besides its use in evaluations."""
        return self.samples_to_learn or self.filters_traces

    @property
    def filters_traces(self) -> bool:
        """Whether responses given with the data are graded."""
        return self.uses_training_data and self.data.filter == "correct"

    @property
    def reads_traces(self) -> bool:
        """Whether responses given with the data are graded or imitated."""
        return self.filters_traces

    @property
    def asking(self) -> "Asking":
        """The prompt and sampling for training problems."""
        return self

    @property
    def evaluation(self) -> EvalProtocolConfig:
        """The resolved settings of evaluations."""
        return evaluation_of(self)

    @property
    def responses_per_step(self) -> int:
        """Number of responses sampled in a training step."""
        return 0

    @property
    def saves_model(self) -> bool:
        """Whether the run saves its weights."""
        return False

    @property
    def checkpoints_at_once(self) -> int:
        """Most checkpoints in the run folder at one time."""
        return 0

    @property
    def keeps_moments(self) -> bool:
        """Whether the checkpoints of a finished run keep the optimizer's moments."""
        return False

    @property
    def ranks_requested(self) -> int:
        """Number of training ranks by the settings, outside torchrun."""
        return 1

    @property
    def optimizes_by(self) -> str | None:
        """The optimizer; None if nothing is trained."""
        return None

    @property
    def own_scorer(self) -> str | None:
        """The user's function `module:function` that scores responses, besides any reward."""
        return None

    @property
    def own_loss(self) -> str | None:
        """The user's loss `module:function`."""
        return None

    def responses_saved(self) -> int:
        """About how many responses are written: those of the last evaluation."""
        evaluation = self.evaluation
        return evaluation.samples * (evaluation.final_problems or self.problems_there or UNKNOWN_PROBLEMS)

    def data_read(self) -> dict[str, DataConfig]:
        """Every data set that the run reads, by its setting."""
        own = self.eval.data
        trained = {"data": self.data} if own is None or self.uses_training_data else {}
        return trained if own is None else trained | {"eval.data": own}

    def problems(self) -> list[str]:
        """Every violated rule between settings, one line each: setting, value, rule, cure."""
        bad = super().problems()
        bad += complaints(self)
        if self.monitors.parity == "correct" and not self.corrects_mismatch:
            bad.append(
                "monitors.parity=correct needs weights that correct: with GRPO set mismatch=truncate mismatch_cap=2, "
                "with another algorithm monitors.parity=warn"
            )
        bad += self._matches()
        return bad

    @property
    def problems_on_the_way(self) -> int | None:
        """Number of problems in the evaluations before the last; None: all."""
        return self.problem_limit

    @property
    def problems_at_the_end(self) -> int | None:
        """Number of problems in the last evaluation; None: all."""
        return self.problem_limit if self.eval.final_problems is None else self.eval.final_problems

    @property
    def problem_limit(self) -> int | None:
        """The limit on every evaluation under either of its names; None if there is none."""
        return self.eval_problems if self.eval.problems is None else self.eval.problems

    def bounds(self) -> dict[str, int | None]:
        """The settings that limit the number of evaluation problems, with their values."""
        if self.eval.problems is not None:
            return {"eval.problems": self.eval.problems}
        return {} if self.eval_problems is None else {"eval_problems": self.eval_problems}

    @property
    def answers(self) -> int:
        """Responses per problem in an evaluation."""
        return 1 if self.eval.samples is None else self.eval.samples

    @property
    def counted(self) -> tuple[str, str]:
        """The override that sets `answers`; and how to get a single one."""
        return f"eval.samples={self.eval.samples}", "eval.samples=1"

    @property
    def problems_there(self) -> int | None:
        """How many problems an evaluation can use at most, if the settings say so before any data is read."""
        return getattr(self.data if self.eval.data is None else self.eval.data, "n_validation", None)

    def warnings(self) -> dict[str, str]:
        """Warnings by short name about settings that seldom help: printed before the run and counted in its summary."""
        return {}

    def _matches(self) -> list[str]:
        bad = []
        tiny = self.model.made_on_the_spot
        if tiny and not isinstance(self.data, StoriesConfig):
            bad.append(
                f"model=tiny with data={self.data.name}: the tiny model learns its habits from stories: "
                "choose data=stories, or a pretrained model (model=local model.path=DIR)"
            )
        if tiny and self.prompt.chat:
            bad.append(
                "prompt.chat=true with model=tiny: a model made on the spot has no chat template: choose a pretrained "
                "instruct model (model=local model.path=DIR), or prompt=r1_zero_short"
            )
        for key, longest in self._longest_responses().items():
            if tiny and longest >= TINY_CONTEXT:
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
        """The settings that limit a response in tokens, with their values."""
        own = self.eval.sampling.max_tokens
        asked = {} if own is None else {"eval.sampling.max_tokens": own}
        return {"sampling.max_tokens": self.sampling.max_tokens} | asked

    def not_multiple(self, larger: str, smaller: str) -> list[str]:
        """Return a complaint if one setting is no positive multiple of another; both by their names."""
        a, b = getattr(self, larger), getattr(self, smaller)
        if b > 0 and a >= b and a % b == 0:
            return []
        divisor = next((d for d in range(min(a, b, MADE), 0, -1) if a % d == 0), 1)
        return [f"{larger}={a} must be a positive multiple of {smaller}={b}: try {smaller}={divisor}"]


def works_on_a_model(run: AnyRunConfig) -> TypeGuard[RunConfig]:
    """Whether a run loads a model here; else it requests one elsewhere."""
    return run.works_on_a_model


Asking = RunConfig | EvalProtocolConfig  # what defines `prompt` and `sampling` of problems


@dataclass(frozen=True, slots=True)
class Condition:
    """When settings are read. `where` and `cure` complete "KEY=VALUE has no effect: it is read WHERE: CURE"."""

    keys: tuple[str, ...]
    read: Callable[[Any], bool]  # of a run that has one of the keys
    where: str
    cure: str = "leave it out"


def on_several_ranks(run: RunConfig) -> bool:
    """Whether it trains on several ranks: by its settings, or started by torchrun."""
    asked = getattr(run, "gpus", "1")
    return asked != "1" if asked != "auto" else int(os.environ.get("WORLD_SIZE") or 1) > 1


def judges(run: RunConfig) -> list[tuple[str, DataConfig]]:
    """Every reward that grades in this run, with the data it grades: first the one that evaluations count."""
    evaluation = run.evaluation
    named = [(evaluation.reward, evaluation.data)]
    named += [(evaluation.prompt_reward, evaluation.data)] if evaluation.prompt_reward else []
    return named + ([(run.prompt.reward, run.data)] if run.judges_to_learn else [])


def is_own(reward: str, data: DataConfig) -> bool:
    """Whether responses are graded by a function `module:function` of the user's or of the data."""
    return ":" in reward or data.verifier is not None


def checks_ground_truths(run: RunConfig) -> bool:
    """Whether the built-in comparison grades the ground truths of `data` before they are used."""
    named = judges(run)
    asked = not is_own(*named[0])
    if run.eval.data is None and asked:
        return True
    if not run.samples_training_data:
        return False
    return not is_own(*named[-1]) if run.trains else asked


def warms_up_alone(run: RunConfig, prompt: PromptConfig | None = None) -> bool:
    """Whether a built-in model's warm start teaches this prompt's format only."""
    return run.model.made_on_the_spot and Path((prompt or run.prompt).file).stem not in SHARED_WARM_START
