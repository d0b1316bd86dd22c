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

    # Seconds without a sign of life (a token, a response, an update, a new phase) after which a run writes down what
    # its processes do and is ended, by itself or by its sweep; null: it may hang for ever.
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
    return [] if hidden or not torch_has_gpus() else driver_gpus()


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
