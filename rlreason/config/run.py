"""A whole run: the keys common to all algorithms, what follows from them, and what a run grades with."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeGuard

from rlreason.config import conflicts
from rlreason.config.data import DataConfig
from rlreason.config.evaluation import EvalConfig, EvalProtocolConfig, evaluation_of
from rlreason.config.groups import (
    GradingConfig,
    LoggerConfig,
    MonitorsConfig,
    PromptConfig,
    RolloutConfig,
    SamplingConfig,
    WaitsConfig,
)
from rlreason.config.model import SHARED_WARM_START, ModelConfig, TinyModelConfig
from rlreason.settings import MADE, MAX_SEED, Settings, group, number, processors, text


@dataclass
class AnyRunConfig(Settings):
    """Keys of every run."""

    trains: ClassVar[bool] = False
    works_on_a_model: ClassVar[bool] = False  # whether it loads a model here; else it requests one elsewhere

    algorithm: str = text(doc="what the run does")
    seed: int = number(
        0,
        high=MAX_SEED,
        doc="of sampling, order of problems, data.limit, new adapters; not of made-up data and the tiny model",
    )
    waits: WaitsConfig = group(WaitsConfig)

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


UNKNOWN_PROBLEMS = 1000  # in data of unknown size


@dataclass
class RunConfig(AnyRunConfig):
    """Keys of every algorithm that works on a model, whether it trains it or not."""

    rules = conflicts.of_run
    works_on_a_model: ClassVar[bool] = True
    samples_to_learn: ClassVar[bool] = False  # whether it learns from responses that it samples and grades

    threads: int | None = processors(
        None, doc="threads on the processor; null: one for the tiny model, else as many as this process may use"
    )
    model: ModelConfig = group(ModelConfig)
    data: DataConfig = group(DataConfig, only_if="reads_data")
    prompt: PromptConfig = group(PromptConfig)
    grading: GradingConfig = group(GradingConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    monitors: MonitorsConfig = group(MonitorsConfig)
    logger: LoggerConfig = group(LoggerConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    eval: EvalConfig = group(EvalConfig, doc="how evaluations differ from training")

    micro_batch_tokens: int = number(
        low=1, doc="the memory knob: tokens in one forward pass, more than the longest response has"
    )
    eval_problems: int | None = number(
        None,
        low=1,
        doc="short for eval.problems: how many validation problems every evaluation uses, always the same ones; "
        "null: all",
        only_if="eval.problems is None",
    )
    log_generations: int = number(3, high=MADE, doc="responses shown before training, or after an evaluation")

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

    # What the conditions of settings ask (`only_if`); `here` is one of the groups prompt, eval.prompt, data, eval.data.

    @property
    def on_several_ranks(self) -> bool:
        """Whether it trains on several ranks: by its settings, or started by torchrun."""
        return False

    @property
    def reads_eval_samples(self) -> bool:
        """Whether `eval.samples` sets the number of responses of an evaluation."""
        return True

    @property
    def warms_up(self) -> bool:
        """Whether a model made on the spot is taught its habits."""
        return isinstance(self.model, TinyModelConfig) and self.model.warm_start.steps > 0

    def reads_prompt(self, here: PromptConfig) -> bool:
        """Whether questions are put in this prompt."""
        return here is not self.prompt or self.trains or self.eval.prompt is None

    def judges_by(self, here: PromptConfig) -> bool:
        """Whether this prompt's reward judges responses."""
        return here is not self.prompt or self.judges_to_learn or self.eval.prompt is None

    def imitates(self, here: PromptConfig) -> bool:
        """Whether responses are written in this prompt's form: given ones, or those of a warm start for it alone."""
        alone = self.model.made_on_the_spot and Path(here.file).stem not in SHARED_WARM_START
        if here is self.prompt:
            return self.reads_traces or alone
        return alone and here.file != self.prompt.file

    @property
    def reads_data(self) -> bool:
        """Whether problems of `data` are learned from, asked, or teach the tiny model."""
        return self.uses_training_data or self.eval.data is None or self.model.made_on_the_spot

    def names_data(self, here: DataConfig) -> bool:
        """Whether the records name this data."""
        return here is not self.data or self.trains or self.eval.data is None

    def trains_on(self, here: DataConfig) -> bool:
        """Whether training problems of this data are learned from or sampled."""
        return here is self.data and self.uses_training_data

    def verifies(self, here: DataConfig) -> bool:
        """Whether the verifier of this data, where it has one, grades responses."""
        return any(data is here and ":" not in reward for reward, data in judges(self))

    def compares_ground_truths(self, here: DataConfig) -> bool:
        """Whether the built-in comparison grades the ground truths of this data before they are used."""
        named = judges(self)
        asked = not is_own(*named[0])
        if asked and (here is not self.data or self.eval.data is None):
            return True
        if here is not self.data or not self.samples_training_data:
            return False
        return not is_own(*named[-1]) if self.trains else asked

    @property
    def compares_answers(self) -> bool:
        """Whether the built-in comparison grades responses."""
        return not all(is_own(*named) for named in judges(self))

    @property
    def has_own_reward(self) -> bool:
        """Whether a function of the user's or of the data grades responses."""
        return any(is_own(*named) for named in judges(self))

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


def works_on_a_model(run: AnyRunConfig) -> TypeGuard[RunConfig]:
    """Whether a run loads a model here; else it requests one elsewhere."""
    return run.works_on_a_model


Asking = RunConfig | EvalProtocolConfig  # what defines `prompt` and `sampling` of problems


def judges(run: RunConfig) -> list[tuple[str, DataConfig]]:
    """Every reward that grades in this run, with the data it grades: first the one that evaluations count."""
    evaluation = run.evaluation
    named = [(evaluation.reward, evaluation.data)]
    named += [(evaluation.prompt_reward, evaluation.data)] if evaluation.prompt_reward else []
    return named + ([(run.prompt.reward, run.data)] if run.judges_to_learn else [])


def is_own(reward: str, data: DataConfig) -> bool:
    """Whether responses are graded by a function `module:function` of the user's or of the data."""
    return ":" in reward or data.verifier is not None
