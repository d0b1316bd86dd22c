"""A whole run: how it is evaluated, the keys common to all algorithms, what follows from them, what it grades with."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Self, TypeGuard

from rlreason.config.data import DataConfig
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
from rlreason.errors import ConfigError
from rlreason.runtime.plugins import no_reward
from rlreason.settings import LARGE, MADE, MAX_SEED, Settings, choice, count, group, number, processors, text

UNKNOWN_PROBLEMS = 1000  # in data of unknown size
#: What device=mps allows: torch's other ways are untried there, or missing.
OF_MPS = {
    "model.dtype": ("auto", "float32"), "model.weights": ("float32",),
    "rollout.engine": ("hf",), "rollout.compile": (False,),
}  # fmt: skip


@dataclass
class EvalSamplingConfig:
    """Sampling settings that differ in evaluations."""

    temperature: float | None = number(None, "0: the likeliest token; null: sampling.temperature", high=LARGE)
    min_tokens: int | None = number(None, "null: sampling.min_tokens")
    max_tokens: int | None = count(None, "null: sampling.max_tokens")


@dataclass
class EvalSetConfig:
    """How problems are asked and graded: null is as in training, and in `eval.sets` as the run's own evaluation."""

    prompt: PromptConfig | None = text(None, "an option of `prompt`, whose settings are then below eval.prompt")
    reward: str | None = text(
        None, "what counts: r1_zero, question_only or module:function; null: the prompt's, reported in any case"
    )
    sampling: EvalSamplingConfig = group(EvalSamplingConfig)
    data: DataConfig | None = text(
        None, "an option of `data`, whose validation problems are asked; its settings are below eval.data"
    )
    problems: int | None = count(None, "validation problems asked; null: eval_problems")
    final_problems: int | None = count(
        None, "those of a training's last evaluation; null: eval.problems, or else all", only_if="trains"
    )
    samples: int | None = count(None, "per problem; null: 1", MADE, only_if="here is not eval or reads_eval_samples")


@dataclass
class EvalConfig(EvalSetConfig):
    """How a model is prompted and graded, apart from how it is trained; null: as in training."""

    score: bool = text(
        True,
        "read responses again, for their entropies and the engine's mismatch; false saves this time",
        only_if="algorithm != 'best_of_n'",
    )
    card: str | None = choice("leaderboard", "compliance.md checks a training by its rules", None, only_if="trains")
    sets: dict[str, EvalSetConfig] | None = text(
        {},
        "more validation sets, as [gsm8k,math]; below eval.sets.NAME stand data, prompt, reward, sampling, problems, "
        "final_problems and samples of each, null: as above",
        takes="list of data, or settings by name",
    )

    @property
    def by_name(self) -> dict[str, EvalSetConfig]:
        """Return the sets; null, as `eval.sets=[]` is read, is none."""
        return self.sets or {}


@dataclass(frozen=True, slots=True)
class EvalProtocolConfig:
    """How a run's evaluations prompt, sample and grade, fully resolved: the basis of their protocol."""

    prompt: PromptConfig
    reward: str  # decides what is correct
    prompt_reward: str | None  # grades as well, if it is another one
    grading: GradingConfig
    sampling: SamplingConfig
    data: DataConfig
    problems: int | None  # of the evaluations on the way; None: all
    final_problems: int | None  # of the last one, or of a job that does not train
    samples: int  # responses per problem
    score: bool  # whether the policy reads responses again


@dataclass
class AnyRunConfig(Settings):
    """Keys of every run."""

    trains = False
    most_spent: ClassVar[Any] = ""  # what a run may spend at most, as overrides; "" if only time
    given = frozenset[str]()  # the keys that were typed: no field, and so no setting

    algorithm: str = text(doc="what the run does")
    seed: int = number(0, "of sampling, problem order, data.limit, adapters; not of made-up data", high=MAX_SEED)
    waits: WaitsConfig = group(WaitsConfig)


@dataclass
class RunConfig(AnyRunConfig):
    """Keys of every algorithm that works on a model, whether it trains it or not."""

    samples_to_learn = False  # whether it learns from responses that it samples and grades
    responses_per_step: ClassVar[Any] = 0  # sampled in a training step
    checkpoints_at_once: ClassVar[Any] = 0  # most in the run folder at one time
    own_loss: ClassVar[Any] = None  # the user's loss, `module:function`
    uses_training_data: ClassVar[Any] = True  # whether training problems are learned from or sampled

    device: str = choice("auto | mps", "auto: an NVIDIA GPU if torch finds one, else the processor; mps: Apple's GPU")
    threads: int | None = processors(None, "null: one for the tiny model, else as many as this process may use")
    model: ModelConfig = group(ModelConfig)
    data: DataConfig = group(DataConfig, only_if="reads_data")
    prompt: PromptConfig = group(PromptConfig)
    grading: GradingConfig = group(GradingConfig)
    rollout: RolloutConfig = group(RolloutConfig)
    monitors: MonitorsConfig = group(MonitorsConfig)
    logger: LoggerConfig = group(LoggerConfig)
    sampling: SamplingConfig = group(SamplingConfig)
    eval: EvalConfig = group(EvalConfig, "how evaluations differ from training")

    micro_batch_tokens: int = count(doc="the memory knob: tokens in a forward pass, above the longest response")
    eval_problems: int | None = count(
        None, "short for eval.problems (always the same ones); null: all", only_if="eval.problems is None"
    )
    log_generations: int = number(3, "responses shown before training, or after an evaluation", high=MADE)

    def rules(self) -> Iterator[str]:
        """Check the groups of a run against each other: model, data, prompts, lengths and evaluations."""
        for name, run in self.by_set().items():
            if self.eval.by_name[name].data is None:
                yield f"eval.sets.{name} has no data: give it some, as eval.sets.{name}.data=gsm8k"
            yield from (of_set(name, line) for line in run.problems())
        prompt, data, last = self.eval.prompt, self.eval.data, self.eval.final_problems
        for key, fit in OF_MPS.items() if self.device == "mps" else ():
            if (value := attrgetter(key)(self)) not in fit:
                yield f"device=mps computes in float32, by rollout=hf: leave {key}={value} out"
        if self.eval.reward is not None:
            yield from no_reward("eval.reward", self.eval.reward, "choose one, or null for the prompt's")
        if prompt is not None:
            yield from (as_eval("prompt", line, prompt) for line in prompt.problems())
        if data is not None:
            yield from (as_eval("data", line, data) for line in data.evaluation_problems())
        for key, asks in self.bounds().items():
            of_scale = key == "interim_eval_problems" and key not in self.given  # an upper bound
            if asks is not None and last is not None and last < asks and not of_scale:
                yield f"eval.final_problems={last} is less than {key}={asks}, all of which it asks again: raise it"
        asked = self.evaluation.sampling
        if asked.temperature == 0 and self.answers > 1:
            key, cure = self.sampling_key("temperature"), "or ask for one each"
            yield f"{key}=0: the {self.answers} responses to a problem would all be equal: set {key}=1, {cure}"
        if asked != self.sampling:
            yield from (as_eval("sampling", line, asked) for line in asked.rules())
        corrects = getattr(self, "mismatch", "none") != "none" or getattr(self, "old_from_engine", False)
        if self.monitors.parity == "correct" and not corrects:
            cure = "with GRPO set mismatch=truncate mismatch_cap=2, with another algorithm monitors.parity=warn"
            yield f"monitors.parity=correct needs weights that correct: {cure}"
        if self.monitors.parity == "stop" and not (self.eval.score or self.trains):
            yield "monitors.parity=stop with eval.score=false, which measures no mismatch: leave one of them out"
        groups = (
            ("", self.data, self.prompt, self.sampling),
            ("eval.", self.eval.data, self.eval.prompt, self.eval.sampling),
        )
        for place, data, prompt, sampling in groups:
            if self.model.made_on_the_spot and data is not None and not data.has_stories:
                cure = f"choose {place}data=stories, or a pretrained model (model=local model.path=DIR)"
                yield f"model=tiny with {place}data={data.name}: the tiny model knows nothing but stories: {cure}"
            if self.model.made_on_the_spot and prompt is not None and prompt.chat:
                cure = f"choose {place}prompt=r1_zero_short, or a pretrained model (model=local model.path=DIR)"
                yield f"{place}prompt.chat=true with model=tiny, which has no chat template: {cure}"
            longest, context, room = sampling.max_tokens, self.model.context, self.micro_batch_tokens
            key = f"{place}sampling.max_tokens={longest}"
            if longest is not None and context is not None and longest >= context:
                yield f"{key} must be below {context}, the tiny model's context, which the prompt shares: lower it"
            elif longest is not None and room <= longest:
                cure = f"raise it (try {2 * longest}), or lower {place}sampling.max_tokens"
                yield f"micro_batch_tokens={room} must be above {key}, to hold a prompt and its whole response: {cure}"

    def sampling_key(self, name: str) -> str:
        """Return the setting that a number of evaluations' sampling comes from, as it is typed."""
        return f"{'eval.' if getattr(self.eval.sampling, name) is not None else ''}sampling.{name}"

    @property
    def samples_training_data(self) -> bool:
        """Whether responses to training problems are sampled, to learn from them or to measure."""
        return self.samples_to_learn if self.trains else self.uses_training_data

    @property
    def judges_to_learn(self) -> bool:
        """Whether the prompt's reward decides what is learned from, besides its use in evaluations."""
        return self.samples_to_learn or (self.uses_training_data and self.data.filter == "correct")

    @property
    def reads_traces(self) -> bool:
        """Whether responses given with the data are graded or imitated."""
        return self.uses_training_data and self.data.filter == "correct"

    def by_set(self) -> dict[str, Self]:
        """Return this run as it measures each of `eval.sets`: with the settings of that set in place of `eval`'s."""
        runs, own = dict[str, Self](), self.eval
        for name, asked in own.by_name.items():
            given, numbers = (
                {one.name: value for one in fields(part) if (value := getattr(part, one.name)) is not None}
                for part in (asked, asked.sampling)
            )
            given |= {"sampling": replace(own.sampling, **numbers), "card": None, "sets": {}}
            given.setdefault("final_problems", None if "problems" in given else own.final_problems)
            runs[name] = run = copy(self)
            vars(run).update(eval=replace(own, **given), split="validation")
            if "samples" in given:
                vars(run)["samples"] = None  # which is short for eval.samples
        return runs

    # What the conditions of settings ask (`only_if`); `here` is one of the groups prompt, eval.prompt, data, eval.data.

    @property
    def reads_eval_samples(self) -> bool:
        """Whether `eval.samples` sets the number of responses of an evaluation."""
        return self.algorithm != "best_of_n" and getattr(self, "samples", None) is None

    @property
    def warms_up(self) -> bool:
        """Whether a model made on the spot is taught its habits."""
        return isinstance(self.model, TinyModelConfig) and self.model.warm_start.steps > 0

    def imitates(self, here: PromptConfig) -> bool:
        """Whether responses are written in this prompt's form: given ones, or those of a warm start for it alone."""
        alone = self.model.made_on_the_spot and Path(here.file).stem not in SHARED_WARM_START
        if here is self.prompt:
            return self.reads_traces or alone
        return alone and here is self.eval.prompt and here.file != self.prompt.file

    @property
    def reads_data(self) -> bool:
        """Whether problems of `data` are learned from, asked, or teach the tiny model."""
        return self.uses_training_data or self.eval.data is None or self.model.made_on_the_spot

    def trains_on(self, here: DataConfig) -> bool:
        """Whether training problems of this data are learned from or sampled."""
        return here is self.data and self.uses_training_data

    def verifies(self, here: DataConfig) -> bool:
        """Whether the verifier of this data, where it has one, grades responses."""
        return any(data is here and ":" not in reward for reward, data in judges(self))

    def compares_ground_truths(self, here: DataConfig) -> bool:
        """Whether the built-in comparison grades the ground truths of this data before they are used."""
        counted = [judges(run)[0] for run in (self, *self.by_set().values())]
        counted += [(self.prompt.reward, self.data)] if self.samples_to_learn else []
        return any(data is here and not is_own(reward, data) for reward, data in counted)

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
        own = self.eval
        prompt = self.prompt if own.prompt is None else own.prompt
        reward = prompt.reward if own.reward is None else own.reward
        numbers = {k: getattr(self.sampling, k) if n is None else n for k, n in asdict(own.sampling).items()}
        last = self.eval.final_problems if self.trains and self.eval.final_problems else self.problem_limit
        bounds = self.problems_on_the_way, last
        return EvalProtocolConfig(
            prompt=prompt,
            reward=reward,
            prompt_reward=None if reward == prompt.reward else prompt.reward,
            grading=self.grading,
            sampling=SamplingConfig(**numbers),
            data=self.data if own.data is None else own.data,
            problems=min((n for n in bounds if n is not None), default=None),  # the last evaluation includes these
            final_problems=last,
            samples=self.answers,
            score=self.algorithm == "best_of_n" or own.score,  # the former chooses by log-probabilities
        )

    @property
    def ranks_requested(self) -> int:
        """Number of training ranks by the settings, outside torchrun."""
        gpus = getattr(self, "gpus", "")
        return int(gpus) if gpus.isdecimal() else 1

    @property
    def optimizes_by(self) -> str | None:
        """The optimizer; None if nothing is trained."""
        return getattr(self, "optimizer", None)

    @property
    def responses_at_the_end(self) -> int:
        """About how many responses the last evaluation samples, without those of `eval.sets`."""
        evaluation = self.evaluation
        return evaluation.samples * (evaluation.final_problems or self.problems_there or UNKNOWN_PROBLEMS)

    def responses_saved(self) -> int:
        """About how many responses are written: those of the last evaluation."""
        return sum(run.responses_at_the_end for run in (self, *self.by_set().values()))

    def data_read(self) -> dict[str, DataConfig]:
        """Every data set that the run reads, by its setting."""
        own = self.eval.data
        trained = {"data": self.data} if own is None or self.uses_training_data else {}
        read = trained if own is None else trained | {"eval.data": own}
        return read | {
            f"eval.sets.{name}.data": of.data for name, of in self.eval.by_name.items() if of.data is not None
        }

    @property
    def problems_on_the_way(self) -> int | None:
        """Number of problems in the evaluations before the last; None: all."""
        return getattr(self, "interim_eval_problems", None) if self.problem_limit is None else self.problem_limit

    @property
    def problem_limit(self) -> int | None:
        """The limit on every evaluation under either of its names; None if there is none."""
        return self.eval_problems if self.eval.problems is None else self.eval.problems

    def bounds(self) -> dict[str, int | None]:
        """The settings that limit the number of evaluation problems, with their values."""
        short = "interim_eval_problems" if self.eval_problems is None else "eval_problems"
        key = short if self.eval.problems is None else "eval.problems"
        return {key: self.problems_on_the_way, "eval.final_problems": self.eval.final_problems if self.trains else None}

    @property
    def answers(self) -> int:
        """Responses per problem in an evaluation."""
        own = getattr(self, "samples", None)
        return (1 if self.eval.samples is None else self.eval.samples) if own is None else own

    @property
    def problems_there(self) -> int | None:
        """How many problems an evaluation can use at most, if the settings say so before any data is read."""
        return getattr(self.data if self.eval.data is None else self.eval.data, "n_validation", None)


def works_on_a_model(run: AnyRunConfig) -> TypeGuard[RunConfig]:
    """Whether a run loads a model here; else it requests one elsewhere."""
    return isinstance(run, RunConfig)


Asking = RunConfig | EvalProtocolConfig  # what defines `prompt` and `sampling` of problems


def judges(run: RunConfig) -> list[tuple[str, DataConfig]]:
    """Every reward that grades in this run, with the data it grades: first the one that evaluations count."""
    evaluation = run.evaluation
    named = [(evaluation.reward, evaluation.data)]
    named += [(evaluation.prompt_reward, evaluation.data)] if evaluation.prompt_reward else []
    named += [judges(of)[0] for of in run.by_set().values()]
    return named + ([(run.prompt.reward, run.data)] if run.judges_to_learn else [])


def is_own(reward: str, data: DataConfig) -> bool:
    """Whether responses are graded by a function `module:function` of the user's or of the data."""
    return ":" in reward or data.verifier is not None


def as_eval(group: str, text: str, settings: Any) -> str:
    """Rewrite a text about `prompt` or `data` settings for `eval.prompt` or `eval.data`, which have the same keys.

    >>> from rlreason.config.data import StoriesConfig
    >>> as_eval("data", "data.n_train=0 in data.jsonl", StoriesConfig())
    'eval.data.n_train=0 in data.jsonl'
    """
    names = "|".join(f.name for f in fields(settings))
    return type(text)(re.sub(rf"(?<![\w./]){group}(?=\.(?:{names})\b|=)", f"eval.{group}", text))


@contextmanager
def naming_eval_settings(run: Any, group: str) -> Iterator[None]:
    """Attribute errors in `prompt` or `data` of evaluations to the settings that gave them."""
    try:
        yield
    except ConfigError as error:
        own = getattr(run.eval, group)
        if own is None:
            raise
        raise type(error)(as_eval(group, str(error), own)) from error


def of_set(name: str, text: str) -> str:
    """Rewrite a text about settings of `eval` for `eval.sets.NAME`, which has the same keys.

    >>> of_set("math", "eval.data.limit=0: lower it")
    'eval.sets.math.data.limit=0: lower it'
    """
    return type(text)(re.sub(r"(?<![\w./])eval\.(?!sets\.)", f"eval.sets.{name}.", text))


@contextmanager
def naming_set(name: str) -> Iterator[None]:
    """Attribute errors in settings of `eval` to those of `eval.sets.NAME`."""
    try:
        yield
    except ConfigError as error:
        raise type(error)(of_set(name, str(error))) from error


def each_prompt(run: RunConfig, check: Callable[[PromptConfig], object]) -> None:
    """Check the prompts of training and of evaluations; errors name the settings that gave them."""
    if run.asking.prompt is run.prompt:
        check(run.prompt)
    if run.eval.prompt is not None:
        with naming_eval_settings(run, "prompt"):
            check(run.eval.prompt)
    for name, asked in run.by_set().items():
        with naming_set(name), naming_eval_settings(asked, "prompt"):
            check(asked.evaluation.prompt)
