"""The smaller config groups: sampling, prompt, grading, logger, rollout; each key with type and unit."""

import difflib
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from omegaconf import MISSING

from rlreason.config.fields import choice
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
    """The complaint about a setting that names no reward."""
    if reward in NAMED_REWARDS or names_function(reward):
        return []
    of_packages = announced(key)
    if reward in of_packages:  # the command line puts the function in its place; a file names it
        return [f"{key}={reward} is short for {of_packages[reward]} on the command line: write that in a file"]
    known = (*NAMED_REWARDS, *of_packages)
    near = difflib.get_close_matches(reward, known, n=1)
    cure = f"did you mean {key}={near[0]}?" if near else cure
    return [f"{key}={reward} is neither {' nor '.join(known)} nor module:function: {cure}"]


@dataclass
class SamplingConfig:
    """How responses are sampled, in training and evaluation alike. No top-k or top-p: what is sampled is trained on."""

    temperature: float = MISSING  # 0 takes the most likely token, in evaluations only
    min_tokens: int = MISSING  # a response cannot end before it has so many
    max_tokens: int = MISSING  # a response is cut here

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0

    @property
    def distribution(self) -> str:
        """What tokens are drawn from, for a person: T=1."""
        return f"T={self.temperature:g}"

    def describe(self) -> str:
        """For a person: T=1, up to 48 tokens."""
        return f"{self.distribution}, up to {self.max_tokens} tokens"

    def problems(self) -> list[str]:
        """Every violated rule inside the group."""
        if self.min_tokens <= self.max_tokens or self.max_tokens < 1:  # which is out of its range
            return []
        return [
            f"sampling.min_tokens={self.min_tokens}, sampling.max_tokens={self.max_tokens}: min <= max must hold: "
            "lower sampling.min_tokens"
        ]


@dataclass
class EvalSamplingConfig:
    """What of `sampling` is otherwise in an evaluation."""

    temperature: float | None = None  # 0 takes the most likely token; null: sampling.temperature
    min_tokens: int | None = None  # null: sampling.min_tokens
    max_tokens: int | None = None  # null: sampling.max_tokens


@dataclass
class PromptConfig:
    """How a question becomes a prompt, where its response ends, and by which reward it is graded."""

    name: str = MISSING  # of the option, for records
    file: str = MISSING  # the template: a file in prompts/, or a path
    reward: str = MISSING  # r1_zero, question_only, or module:function of one's own, (response, gold) -> score
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
    # behind its last "is", "=" or ":".
    extract: str = choice("strict", "last_number", "sentence", default="strict")
    timeout_s: float = 2.0  # seconds of wall clock for one comparison or one call of a reward of one's own
    start_timeout_s: float = 60.0  # seconds for a worker to start: it imports the symbolic library or one's own reward
    percent: bool = True  # whether 38% equals 38 as well as 0.38
    rel_tol: float = 1e-6  # relative tolerance of a decimal against an exact value
    correct_at: float | None = None  # a reward of one's own counts as correct from here on, less is partial; null: 1
    workers: int = 1  # processes for what the exact rules cannot decide and for rewards of one's own
    memory_mb: int = 1536  # megabytes of memory that each worker may take


@dataclass
class WaitsConfig:
    """How long a run may be silent. Engine and graders have limits of their own: `rollout.timeout_s`, `grading`."""

    # Seconds without a sign of life (a token, a response, an update, a new phase) after which a run writes down what
    # its processes do and is ended, by itself or by its sweep; null: it may hang for ever.
    run_s: float | None = 3600.0


@dataclass
class LoggerConfig:
    """Where else metrics are logged, beside the run folder: in W&B, TensorBoard or Trackio, or in several of them.

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
        """The services that are logged to, by their names."""
        return [name for name in LOGGERS if getattr(self, name)]


INSTALL_VLLM = "pip install 'vllm>=0.26,<0.33' on a GPU machine; docs/vllm.md has the lines for one without"
WITHOUT_VLLM = f"rollout=vllm: vLLM is not installed: {INSTALL_VLLM}; or choose rollout=hf"


def engine_here(path: str | None) -> str:
    """What `rollout=auto` stands for on this machine, told without loading torch. `path`: the setting model.path."""
    return chosen_engine(path, usable_gpus(), _is_installed())


def chosen_engine(path: str | None, gpus: Sequence[str], has_vllm: bool) -> str:
    """vllm for a model in files where torch will find a GPU and vLLM is installed, else hf.

    >>> chosen_engine("Qwen/Qwen3-0.6B", ["H100"], True), chosen_engine(None, ["H100"], True)
    ('vllm', 'hf')
    """
    return "vllm" if path and gpus and has_vllm else "hf"


def usable_gpus() -> list[str]:
    """The GPUs here, unless the environment hides them or the torch that is installed computes on none."""
    hidden = os.environ.get(VISIBLE, "0").strip() in ("", "-1")
    return [] if hidden or not torch_has_gpus() else driver_gpus()


@cache
def _is_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


@dataclass
class RolloutConfig:
    """Which engine samples, and where."""

    engine: str = choice("hf", "vllm")  # chosen by rollout=NAME; by rollout=auto, the one for this machine
    max_rows: int = 256  # sequences decoded side by side, at most
    async_level: int = 0  # 1: the next batch is sampled, with weights one update old, while this one is learned
    # Decoding steps by torch.compile: worth its minutes on long runs; with it a run that goes on may round otherwise.
    compile: bool = False
    # GPUs that sample, with a vLLM each: prompts are dealt among them, and the tokens are those of one.
    gpus: int = 1
    # colocate: on the policy's GPUs, and the next ones where it asks for more; second_gpu: on GPUs behind them, in
    # processes of their own; auto: colocate where there is a GPU, else cpu.
    placement: str = choice("auto", "colocate", "second_gpu", "cpu", default="auto")
    sleep: bool = True  # give the engine's memory to training; false is faster where both fit
    # Gigabytes of the KV cache; null: enough for max_rows, at most 40% of what is free.
    kv_cache_gb: float | None = None
    # When engine and trainer disagree after a weight sync: stop, warn, or off to compare nothing.
    attest: str = choice("stop", "warn", "off", default="stop")
    timeout_s: float = 600.0  # seconds for the start, one decoding step or one weight sync

    @property
    def shares_gpu(self) -> bool:
        """Whether vLLM runs where the policy does, so that its memory may be given back."""
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
