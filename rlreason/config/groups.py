"""The smaller config groups: sampling, prompt, grading, logger, rollout; each key with type and unit."""

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any

from omegaconf import MISSING

from rlreason.config.data import DataConfig, StoriesConfig
from rlreason.config.fields import choice
from rlreason.errors import ConfigError
from rlreason.runtime.machine import VISIBLE, driver_gpus, torch_has_gpus
from rlreason.runtime.plugins import announced

NAMED_REWARDS = ("r1_zero", "question_only")
LOGGERS = ("wandb", "tensorboard", "trackio")


def names_function(text: str) -> bool:
    """Whether a text has the form `module:function`.

    >>> names_function("my_rewards:length"), names_function(":f"), names_function("my_rewards")
    (True, False, False)
    """
    return all(text.partition(":"))


def no_reward(key: str, reward: str, cure: str = "choose one") -> list[str]:
    """Return a complaint if a setting names no reward."""
    if reward in NAMED_REWARDS or names_function(reward):
        return []
    of_packages = announced(key)
    if reward in of_packages:  # the command line replaces it by the function; a file names it
        return [f"{key}={reward} is short for {of_packages[reward]} on the command line: write that in a file"]
    known = (*NAMED_REWARDS, *of_packages)
    near = difflib.get_close_matches(reward, known, n=1)
    cure = f"did you mean {key}={near[0]}?" if near else cure
    return [f"{key}={reward} is neither {' nor '.join(known)} nor module:function: {cure}"]


@dataclass
class SamplingConfig:
    """How responses are sampled, in training and evaluation alike. No top-k or top-p: what is sampled is trained on."""

    temperature: float = MISSING  # 0 takes the most likely token, in evaluations only
    min_tokens: int = MISSING  # a response cannot end before this many
    max_tokens: int = MISSING  # responses are truncated here

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature == 0

    @property
    def distribution(self) -> str:
        """The distribution of tokens, as text: T=1."""
        return f"T={self.temperature:g}"

    def describe(self) -> str:
        """Describe it: T=1, up to 48 tokens."""
        return f"{self.distribution}, up to {self.max_tokens} tokens"

    def problems(self) -> list[str]:
        """Every violated rule inside the group."""
        if self.min_tokens <= self.max_tokens or self.max_tokens < 1:  # one of them is out of range
            return []
        return [
            f"sampling.min_tokens={self.min_tokens}, sampling.max_tokens={self.max_tokens}: min <= max must hold: "
            "lower sampling.min_tokens"
        ]


@dataclass
class EvalSamplingConfig:
    """Sampling settings that differ in evaluations."""

    temperature: float | None = None  # 0 takes the most likely token; null: sampling.temperature
    min_tokens: int | None = None  # null: sampling.min_tokens
    max_tokens: int | None = None  # null: sampling.max_tokens


@dataclass
class PromptConfig:
    """How a question becomes a prompt, where its response ends, and by which reward it is graded."""

    name: str = MISSING  # of the option, for records
    file: str = MISSING  # the template: a file in prompts/, or a path
    reward: str = MISSING  # r1_zero, question_only, or module:function of your own, (response, gold) -> score
    stop: list[str] = field(default_factory=list)  # texts that end a response; they stay in it
    trace: str = "{solution}"  # how a response to imitate is written from {solution} and {answer}
    chat: bool = False  # whether the filled file is the user's turn in the model's own chat template
    system: str | None = None  # of a chat: the system message; null: none, or the template's own
    enable_thinking: bool | None = None  # of a chat whose template has this switch; null: the template's default

    def problems(self) -> list[str]:
        """Every violated rule inside the group, one line each: setting, value, rule, cure."""
        bad = []
        if "" in self.stop:
            bad.append("prompt.stop holds an empty text, which stands everywhere: give stop strings, or prompt.stop=[]")
        return bad + no_reward("prompt.reward", self.reward)


@dataclass
class GradingConfig:
    """How answers are compared; part of what makes two accuracies comparable."""

    # strict: the answer itself; last_number: also its number, where it has one only; sentence: also what it states
    # after its last "is", "=" or ":".
    extract: str = choice("strict", "last_number", "sentence", default="strict")
    timeout_s: float = 2.0  # seconds of wall clock for one comparison or one call of your own reward
    start_timeout_s: float = 60.0  # seconds for a worker to start: it imports the symbolic library or your own reward
    percent: bool = True  # whether 38% equals 38 as well as 0.38
    rel_tol: float = 1e-6  # relative tolerance of a decimal against an exact value
    correct_at: float | None = None  # your own reward counts as correct from this score on, less is partial; null: 1
    workers: int = 1  # processes for what the exact rules cannot decide and for your own rewards
    memory_mb: int = 1536  # megabytes of memory for each worker, at most


@dataclass
class WaitsConfig:
    """How long a run may be silent. Engine and graders have limits of their own: `rollout.timeout_s`, `grading`."""

    # Seconds without a sign of life (a token, a response, an update, a new phase) after which a run writes its
    # process's stacks (stacks.txt) and ends at once, to be resumed; null: it may hang for ever.
    run_s: float | None = 3600.0


@dataclass
class LoggerConfig:
    """Where else metrics are logged, besides the run folder: in W&B, TensorBoard or Trackio, or in several of them.

    null leaves a setting to W&B's own variables, such as WANDB_PROJECT.
    """

    wandb: bool = False  # logger=wandb, or one of logger=[wandb,tensorboard]
    tensorboard: bool = False  # logger=tensorboard: event files in the run folder
    trackio: bool = False  # logger=trackio: a local store, which `trackio show` reads
    project: str | None = None  # null: rlreason; in W&B, WANDB_PROJECT first
    group: str | None = None  # null: the sweep that the run is part of; in W&B, WANDB_RUN_GROUP first
    name: str | None = None  # null: the run folder's name; in W&B, WANDB_NAME first
    mode: str | None = choice("online", "offline", "disabled", default=None)  # of W&B; null: WANDB_MODE, else online
    entity: str | None = None  # of W&B: user or team
    tags: list[str] | None = None  # of W&B: labels to find runs by, as in [gsm8k,grpo]
    notes: str | None = None  # of W&B: a longer text about the run

    @property
    def chosen(self) -> list[str]:
        """The names of the chosen services."""
        return [name for name in LOGGERS if getattr(self, name)]


INSTALL_VLLM = "pip install 'vllm>=0.26,<0.33' on a GPU machine; docs/vllm.md has the lines for one without"
WITHOUT_VLLM = f"rollout=vllm: vLLM is not installed: {INSTALL_VLLM}; or choose rollout=hf"


def engine_here(path: str | None) -> str:
    """Resolve `rollout=auto` on this machine, without loading torch. `path`: the setting model.path."""
    return chosen_engine(path, usable_gpus(), _is_installed())


def chosen_engine(path: str | None, gpus: Sequence[str], has_vllm: bool) -> str:
    """Return vllm for a model from files, if torch will find a GPU and vLLM is installed, else hf.

    >>> chosen_engine("Qwen/Qwen3-0.6B", ["H100"], True), chosen_engine(None, ["H100"], True)
    ('vllm', 'hf')
    """
    return "vllm" if path and gpus and has_vllm else "hf"


def usable_gpus() -> list[str]:
    """List the GPUs here, unless the environment hides them or the installed torch supports none."""
    hidden = os.environ.get(VISIBLE, "0").strip() in ("", "-1")
    return [] if hidden or not torch_has_gpus() else list(driver_gpus())


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


@dataclass
class RolloutConfig:
    """Which engine samples, and where."""

    engine: str = choice("hf", "vllm")  # chosen by rollout=NAME; by rollout=auto, the one for this machine
    max_rows: int = 256  # most sequences decoded at the same time
    async_level: int = 0  # 1: the next batch is sampled, with weights one update old, while this one is learned
    # Decoding steps by torch.compile: worth its minutes on long runs; with it a resumed run may round differently.
    compile: bool = False
    # GPUs that sample, with a vLLM each: prompts are divided among them, and the tokens are those of one.
    gpus: int = 1
    # colocate: on the policy's GPUs, and the next ones if it needs more; second_gpu: on the GPUs after them, in
    # separate processes; auto: colocate if there is a GPU, else cpu.
    placement: str = choice("auto", "colocate", "second_gpu", "cpu", default="auto")
    sleep: bool = True  # give the engine's memory to training; false is faster if both fit
    # Gigabytes of the KV cache; null: enough for max_rows, at most 40% of what is free.
    kv_cache_gb: float | None = None
    # When engine and trainer disagree after a weight sync: stop, warn, or off to compare nothing.
    attest: str = choice("stop", "warn", "off", default="stop")
    timeout_s: float = 600.0  # seconds for the start, one decoding step or one weight sync

    @property
    def shares_gpu(self) -> bool:
        """Whether vLLM runs on the policy's GPUs, so that its memory may be given back."""
        return self.placement in ("auto", "colocate")

    def problems(self) -> list[str]:
        """Every violated rule inside the group, one line each: setting, value, rule, cure."""
        bad = []
        if self.async_level and self.engine == "hf":
            bad.append(
                "rollout.async_level=1 with rollout=hf: the in-process engine samples from the very weights that are "
                "being trained; set it to 0, or choose rollout=vllm"
            )
        if self.async_level and self.engine == "vllm" and self.sleep and self.shares_gpu:
            bad.append(
                "rollout.async_level=1 with rollout.sleep=true: an engine that samples during training cannot give "
                "its memory away; set rollout.sleep=false"
            )
        return bad


IN_A_FILE = "choose one (in a file, off stands in quotes)"
#: Rules that end a run under another name than their monitor's.
RULES = {"loss": "nan", "gradient": "nan", "metric": "nan", "optimizer": "nan", "truncated_evaluation": "truncated"}
WEIGHTS = "weights"  # the rule that cannot be switched off: nothing can be sampled from weights that are not finite


def _mode(default: str, *more: str) -> str:
    word: str = choice("off", "warn", "stop", *more, default=default, cure=IN_A_FILE)
    return word


@dataclass
class MonitorsConfig:
    """Each monitor is off, warns, or stops the run after the step; its thresholds begin with its name."""

    # Loss, gradient, weights, the optimizer's moments or another metric are not finite. Such weights end a run in any
    # case.
    nan: str = _mode("stop")
    skipped_update: str = _mode("warn")  # an update was left out, as its gradient was not finite
    gradient_norm: str = _mode("warn")  # the gradient norm of an update explodes, before it is clipped
    gradient_norm_factor: float = 20.0  # above this many times the median of the steps before
    gradient_norm_after: int = 10  # and after this many steps with a gradient
    kl: str = _mode("warn")  # the KL to the policy that sampled, or to the reference model, explodes
    kl_factor: float = 20.0  # above this many times the median of the steps before
    kl_above: float = 0.1  # and above this many nats per token
    kl_after: int = 10  # and after this many steps that measured it
    # The ratio to the policy that sampled is not 1 in the first update of a step, before anything was learned from it.
    first_ratio: str = _mode("warn")
    first_ratio_bound: float = 0.05  # of |mean ratio - 1| and of the approximate KL; float32 stays below 1e-5
    still_weights: str = _mode("warn")  # updates move hardly any weight that has a gradient
    still_weights_below: float = 0.2  # share of these weights that change, mean over the trained tensors
    still_weights_steps: int = 3  # in this many steps in a row
    entropy: str = _mode("warn")  # the policy's entropy collapses
    entropy_below: float = 0.005  # nats per token, mean over a step's responses
    no_live_group: str = _mode("warn")  # every group has equal rewards in all its responses; warns of every step
    no_live_group_steps: int = 10  # this many in a row stop the run
    zero_reward: str = _mode("warn")  # all rewards are 0
    zero_reward_steps: int = 10  # in this many steps in a row
    identical_samples: str = _mode("warn")  # all responses of every group are equal, or some against all odds
    truncated: str = _mode("warn")  # responses are cut at their limit, in steps or in evaluations
    truncated_above: float = 0.5  # share of the responses
    length: str = _mode("warn")  # the mean length of the responses explodes
    length_factor: float = 4.0  # above this many times the median of the last 30 steps
    length_after: int = 3  # and after this many steps
    round_trip: str = _mode("warn")  # texts change when they are turned into tokens and back
    round_trip_below: float = 0.5  # share of the prompts, or of the responses, that stay the same
    same_answer: str = _mode("warn")  # an evaluation's questions get one and the same answer
    # Share of the questions with the commonest answer, less its share of their ground truths.
    same_answer_above: float = 0.5
    # Rewards rise by something other than right answers: one answer to most questions, reward for responses without the
    # right answer, falling accuracy in evaluations, ever shorter responses that are no better.
    reward_hacking: str = _mode("warn")
    reward_hacking_after: int = 5  # this many of the last steps are compared with the first
    reward_hacking_gain: float = 0.1  # by which the mean reward must have risen
    accuracy: str = _mode("stop")  # two evaluations in a row have certainly lost four fifths of the accuracy before
    grader: str = _mode("warn")  # responses could not be graded
    # Engine and trainer give sampled tokens different probabilities. correct: warn, and let the objective's mismatch
    # weights correct for it.
    parity: str = _mode("warn", "correct")
    parity_bound: float = 0.05  # difference in nats per token, mean over a step; float32 stays below 1e-4
    # The engine's log-probabilities drift away from the trainer's, as they do when weights were not synced.
    engine_weights: str = _mode("warn")
    engine_weights_factor: float = 10.0  # above this many times their difference in the first step
    engine_weights_above: float = 2e-5  # and above this many nats per token
    # Of a sweep: a setting that another one certainly beats is stopped, with all its seeds.
    dominated: str = choice("off", "stop", default="off", cure=IN_A_FILE)


NAMES = tuple(f.name for f in fields(MonitorsConfig))
MODES = tuple(name for name in NAMES if not any(name.startswith(f"{other}_") for other in NAMES))  # no thresholds
OF_JOBS = ("truncated", "same_answer", "grader", "parity")  # also checked in runs without steps
OF_SWEEPS = ("dominated",)


def monitor_of(rule: str) -> str:
    """Return the monitor that a rule belongs to, as named in a status.

    >>> monitor_of("loss"), monitor_of("entropy")
    ('nan', 'entropy')
    """
    return RULES.get(rule, rule)


def limits_of(monitor: str) -> tuple[str, ...]:
    """Return the names of a monitor's thresholds.

    >>> limits_of("entropy"), limits_of("nan")
    (('entropy_below',), ())
    """
    return tuple(name for name in NAMES if name.startswith(f"{monitor}_"))


def settings_of(rule: str) -> tuple[str, ...]:
    """Return the settings that let a run ended by this rule resume; none for weights that are not finite.

    >>> settings_of("entropy"), settings_of("weights")
    (('monitors.entropy', 'monitors.entropy_below'), ())
    """
    monitor = monitor_of(rule)
    return tuple(f"monitors.{name}" for name in (monitor, *limits_of(monitor)) if name in NAMES)


@dataclass
class EvalConfig:
    """How a model is prompted and graded, apart from how it is trained; null: as in training.

    Typed as `eval=leaderboard`, `eval.prompt=r1_zero`, `eval.data=gsm8k`, `eval.sampling.temperature=0` ...
    """

    prompt: PromptConfig | None = None  # an option of `prompt`, whose settings are then below eval.prompt
    # What counts: r1_zero, question_only or module:function; the prompt's is reported too.
    reward: str | None = None
    sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    # An option of `data`, whose validation problems are used; its settings are then below eval.data.
    data: DataConfig | None = None
    problems: int | None = None  # validation problems of every evaluation; null: eval_problems, its short name
    # Those of a training's last evaluation; null: eval.problems, or else all.
    final_problems: int | None = None
    samples: int | None = None  # responses per problem; null: 1
    # A training ends with compliance.md, which checks it against these rules, one by one; null: none is written.
    card: str | None = choice("leaderboard", default=None)

    def problems_of(self) -> list[str]:
        """Return complaints within the group, whatever it is combined with."""
        cure = "choose one, or null for the prompt's"
        bad = [] if self.reward is None else no_reward("eval.reward", self.reward, cure)
        if self.prompt is not None:
            bad += [as_eval("prompt", line, self.prompt) for line in self.prompt.problems()]
        if self.data is not None:
            bad += [as_eval("data", line, self.data) for line in self.data.evaluation_problems()]
        return bad


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


def evaluation_of(run: Any) -> EvalProtocolConfig:
    """Resolve the settings of a run's evaluations. `run` is a `RunConfig`, which has a group `eval`."""
    own: EvalConfig = run.eval
    prompt = run.prompt if own.prompt is None else own.prompt
    reward = prompt.reward if own.reward is None else own.reward
    bounds = run.problems_on_the_way, run.problems_at_the_end
    return EvalProtocolConfig(
        prompt=prompt,
        reward=reward,
        prompt_reward=None if reward == prompt.reward else prompt.reward,
        grading=run.grading,
        sampling=sampling_of(run),
        data=run.data if own.data is None else own.data,
        problems=min((n for n in bounds if n is not None), default=None),  # the last evaluation includes these
        final_problems=run.problems_at_the_end,
        samples=run.answers,
    )


def sampling_of(run: Any) -> SamplingConfig:
    """Return evaluations' sampling: the numbers set in `eval.sampling`, else those of `sampling`."""
    own = asdict(run.eval.sampling)  # not `replace`, which would check training's numbers that are not used here
    return SamplingConfig(**{k: getattr(run.sampling, k) if number is None else number for k, number in own.items()})


def sampling_key(run: Any, name: str) -> str:
    """Return the setting that a number of evaluations' sampling comes from, as it is typed."""
    return f"{'eval.' if getattr(run.eval.sampling, name) is not None else ''}sampling.{name}"


def as_eval(group: str, text: str, settings: DataConfig | PromptConfig) -> str:
    """Rewrite a text about `prompt` or `data` settings for `eval.prompt` or `eval.data`, which have the same keys.

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


def complaints(run: Any) -> Iterator[str]:
    """Yield conflicts with the other settings of the run, one line each."""
    own: EvalConfig = run.eval
    yield from own.problems_of()
    if own.data is not None and run.model.made_on_the_spot and not isinstance(own.data, StoriesConfig):
        yield (
            f"model=tiny with eval.data={own.data.name}: the tiny model knows nothing but stories: choose "
            "eval.data=stories or stories_hard, or a pretrained model (model=local model.path=DIR)"
        )
    if own.prompt is not None and own.prompt.chat and run.model.made_on_the_spot:
        yield (
            "eval.prompt.chat=true with model=tiny: a model made on the spot has no chat template: choose a pretrained "
            "model, or another eval.prompt"
        )
    most, last = run.problem_limit, own.final_problems
    if most is not None and last is not None and last < most:
        key = "eval_problems" if own.problems is None else "eval.problems"  # as it was given
        yield (
            f"eval.final_problems={last} is less than {key}={most}, all of which it asks again: raise it, "
            f"or lower {key}"
        )
    evaluation = sampling_of(run)
    given = {f.name for f in fields(own.sampling) if getattr(own.sampling, f.name) is not None}
    if evaluation.greedy and run.answers > 1:
        key = sampling_key(run, "temperature")
        count, single = run.counted
        yield (f"{key}=0 with {count}: the responses to a problem would all be equal: set {key}=1, or {single}")
    shortest, longest = evaluation.min_tokens, evaluation.max_tokens
    if given & {"min_tokens", "max_tokens"} and 1 <= longest < shortest:  # each number by itself has a range
        yield (
            f"{sampling_key(run, 'min_tokens')}={shortest} and {sampling_key(run, 'max_tokens')}={longest}: min <= max "
            f"must hold: set eval.sampling.min_tokens={longest} or less, or raise eval.sampling.max_tokens"
        )
