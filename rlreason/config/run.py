"""A whole run: the keys that every algorithm has, the rules between them, and what a run grades with."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeGuard

from omegaconf import MISSING

from rlreason.config.data import DataConfig, StoriesConfig
from rlreason.config.evaluation import EvalConfig, EvalProtocolConfig, complaints, evaluation_of
from rlreason.config.fields import MADE
from rlreason.config.groups import GradingConfig, LoggerConfig, PromptConfig, RolloutConfig, SamplingConfig, WaitsConfig
from rlreason.config.model import SHARED_WARM_START, TINY_CONTEXT, ModelConfig
from rlreason.config.monitors import MonitorsConfig


@dataclass
class AnyRunConfig:
    """Keys of every run."""

    trains: ClassVar[bool] = False
    works_on_a_model: ClassVar[bool] = False  # whether it loads one here; else it asks one elsewhere

    algorithm: str = MISSING  # what the run does
    seed: int = 0  # of sampling, order of problems, data.limit, new adapters; not of made-up data and the tiny model
    waits: WaitsConfig = field(default_factory=WaitsConfig)

    @property
    def most_spent(self) -> str:
        """What a run may spend at most, as it is typed; "" where it spends nothing but its time."""
        return ""

    @property
    def problems_there(self) -> int | None:
        """How many problems an evaluation can ask at most, where the settings say it before any data is read."""
        return None

    @property
    def ratio_is_one(self) -> bool:
        """Whether each update of the run is made by the policy that sampled what it learns from."""
        return False

    def bounds(self) -> dict[str, int | None]:
        """The settings that bound how many problems evaluations ask, with their values."""
        return {}

    def problems(self) -> list[str]:
        """Every violated rule between settings, one line each: setting, value, rule, cure."""
        groups = (getattr(self, f.name) for f in fields(self) if f.name != "eval")
        return [
            line for group in groups if is_dataclass(group) and hasattr(group, "problems") for line in group.problems()
        ]


UNKNOWN_PROBLEMS = 1000  # in data whose size nobody knows before it is read


@dataclass
class RunConfig(AnyRunConfig):
    """Keys of every algorithm that works on a model, whether it trains it or not."""

    works_on_a_model: ClassVar[bool] = True
    samples_to_learn: ClassVar[bool] = False  # whether it learns from responses that it samples and grades
    reads_eval_samples: ClassVar[bool] = True  # whether `eval.samples` says how many responses an evaluation takes

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
    eval: EvalConfig = field(default_factory=EvalConfig)  # where evaluations differ from training

    micro_batch_tokens: int = MISSING  # the memory knob: tokens in one forward pass, more than the longest response has
    # Short for eval.problems: how many validation problems every evaluation asks, always the same ones; null: all.
    eval_problems: int | None = None
    log_generations: int = 3  # responses shown in the terminal: before training, or after an evaluation

    @property
    def corrects_mismatch(self) -> bool:
        """Whether the objective makes up for engine and trainer giving sampled tokens different probabilities."""
        return False

    @property
    def uses_training_data(self) -> bool:
        """Training problems are learned from or asked."""
        return True

    @property
    def asks_training_data(self) -> bool:
        """Responses to training problems are sampled, to learn from them or to measure."""
        return self.samples_to_learn

    @property
    def judges_to_learn(self) -> bool:
        """The prompt's reward decides what is learned from, apart from what evaluations do with it."""
        return self.samples_to_learn or self.filters_traces

    @property
    def filters_traces(self) -> bool:
        """Responses that came with the data are judged."""
        return self.uses_training_data and self.data.filter == "correct"

    @property
    def reads_traces(self) -> bool:
        """Responses that came with the data are judged or imitated."""
        return self.filters_traces

    @property
    def asking(self) -> "Asking":
        """How training problems are asked."""
        return self

    @property
    def evaluation(self) -> EvalProtocolConfig:
        """How its evaluations ask and judge, nothing left open."""
        return evaluation_of(self)

    @property
    def responses_per_step(self) -> int:
        """Responses that a training step samples."""
        return 0

    @property
    def saves_model(self) -> bool:
        """Whether the run leaves its weights."""
        return False

    @property
    def checkpoints_at_once(self) -> int:
        """Checkpoints that lie in the run folder at one time, at most."""
        return 0

    @property
    def keeps_moments(self) -> bool:
        """Whether its checkpoints hold the optimizer's moments when the run has finished."""
        return False

    @property
    def ranks_asked(self) -> int:
        """Ranks that train by the settings, outside torchrun."""
        return 1

    @property
    def optimizes_by(self) -> str | None:
        """The optimizer; None: nothing is trained."""
        return None

    @property
    def own_scorer(self) -> str | None:
        """A function `module:function` of the user's that scores responses apart from any reward."""
        return None

    @property
    def own_loss(self) -> str | None:
        """A loss `module:function` of the user's."""
        return None

    def responses_saved(self) -> int:
        """How many responses are written down, about: those of the last evaluation."""
        evaluation = self.evaluation
        return evaluation.samples * (evaluation.final_problems or self.problems_there or UNKNOWN_PROBLEMS)

    def data_read(self) -> dict[str, DataConfig]:
        """Every data set that the run reads, by the setting that it stands under."""
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

    def bounds(self) -> dict[str, int | None]:
        """The settings that bound how many problems evaluations ask, with their values."""
        if self.eval.problems is not None:
            return {"eval.problems": self.eval.problems}
        return {} if self.eval_problems is None else {"eval_problems": self.eval_problems}

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
        """The settings that bound a response in tokens, with their values."""
        own = self.eval.sampling.max_tokens
        asked = {} if own is None else {"eval.sampling.max_tokens": own}
        return {"sampling.max_tokens": self.sampling.max_tokens} | asked

    def not_multiple(self, larger: str, smaller: str) -> list[str]:
        """A complaint where one setting is no positive multiple of another; both by their names."""
        a, b = getattr(self, larger), getattr(self, smaller)
        if b > 0 and a >= b and a % b == 0:
            return []
        divisor = next((d for d in range(min(a, b, MADE), 0, -1) if a % d == 0), 1)
        return [f"{larger}={a} must be a positive multiple of {smaller}={b}: try {smaller}={divisor}"]


def works_on_a_model(run: AnyRunConfig) -> TypeGuard[RunConfig]:
    """Whether a run loads a model here, whatever it does with it; else it asks one elsewhere."""
    return run.works_on_a_model


Asking = RunConfig | EvalProtocolConfig  # how problems are asked, by its `prompt` and `sampling`


@dataclass(frozen=True, slots=True)
class Condition:
    """Where settings are read. `where` and `cure` complete "KEY=VALUE has no effect: it is read WHERE: CURE"."""

    keys: tuple[str, ...]
    read: Callable[[Any], bool]  # of a run that has one of the keys
    where: str
    cure: str = "leave it out"


def on_several_ranks(run: RunConfig) -> bool:
    """Whether it trains on several ranks: so many are asked for, or torchrun has started them."""
    asked = getattr(run, "gpus", "1")
    return asked != "1" if asked != "auto" else int(os.environ.get("WORLD_SIZE") or 1) > 1


def judges(run: RunConfig) -> list[tuple[str, DataConfig]]:
    """Every reward that grades in this run, with the data it grades: first the one that an evaluation counts by."""
    evaluation = run.evaluation
    named = [(evaluation.reward, evaluation.data)]
    named += [(evaluation.prompt_reward, evaluation.data)] if evaluation.prompt_reward else []
    return named + ([(run.prompt.reward, run.data)] if run.judges_to_learn else [])


def is_own(reward: str, data: DataConfig) -> bool:
    """A function `module:function` of the user's or of the data judges responses."""
    return ":" in reward or data.verifier is not None


def checks_ground_truths(run: RunConfig) -> bool:
    """Whether the built-in comparison grades the ground truths of `data` before they are asked or learned from."""
    named = judges(run)
    asked = not is_own(*named[0])
    if run.eval.data is None and asked:
        return True
    if not run.asks_training_data:
        return False
    return not is_own(*named[-1]) if run.trains else asked


def warms_up_alone(run: RunConfig, prompt: PromptConfig | None = None) -> bool:
    """A model made on the spot learns the format of this prompt as the run has it."""
    return run.model.made_on_the_spot and Path((prompt or run.prompt).file).stem not in SHARED_WARM_START
