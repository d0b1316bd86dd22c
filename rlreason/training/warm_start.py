"""The start weights of the built-in model: shipped, cached, or taught by a short SFT."""

import hashlib
import json
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file, save_file
from torch import Tensor, uint8

from rlreason.config.data import HabitsConfig, StoriesConfig
from rlreason.config.groups import PromptConfig
from rlreason.config.leaves import prompt_renderer, resource_dir, template_of
from rlreason.config.model import SHARED_WARM_START, TinyModelConfig, WarmStartConfig
from rlreason.config.run import RunConfig
from rlreason.config.training import OptimizationConfig
from rlreason.data.sources import fingerprint
from rlreason.data.tasks import R1_ZERO_TRACE, PromptFormat, habit_trace, taught
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.model.policy import Policy
from rlreason.objectives.objective import LengthNormConfig, Objective
from rlreason.records.console import Console
from rlreason.records.provenance import package_digest
from rlreason.runtime.plugins import NAMED_REWARDS
from rlreason.training.algorithms import sft_sample
from rlreason.training.learner import Learner
from rlreason.types import Problem

#: In one forward pass. Not a setting: the division into micro-batches changes the rounding, and so the weights.
MICRO_BATCH_TOKENS = 8192
SHARES = ("hasty_share", "slip_share")  # of habits: the model's own settings override the task's


@dataclass(frozen=True, slots=True)
class Lessons:
    """What the warm start teaches: newly written traces, the same for the same seed.

    The formats alternate, trace by trace; one listed twice gets two turns.
    """

    problems: Sequence[Problem]
    formats: Sequence[PromptFormat]
    settings: WarmStartConfig
    seed: int
    habits: HabitsConfig  # of the task, with the shares that the model's own settings override

    def batches(self, count: int) -> Iterator[list[tuple[str, str]]]:
        """Yield `count` batches of (prompt, trace)."""
        rng, turns, habits = random.Random(f"warm-up/{self.seed}"), cycle(self.formats), self.habits
        for _ in range(count):
            batch = []
            for problem in rng.choices(self.problems, k=self.settings.batch_size):
                form = next(turns)
                trace = habit_trace(problem, rng, habits, form.trace)
                batch.append((form.prompt(problem.question), trace))
            yield batch


def warm_up(policy: Policy, lessons: Lessons, progress: Callable[[str], None]) -> None:
    """Train on the lessons; the rate rises over 5% of the steps, then falls to a tenth.

    Uses one thread, so that the weights do not depend on the run's number of threads, with which it may be resumed.
    """
    steps, peak = lessons.settings.steps, lessons.settings.learning_rate
    objective, optimization = Objective(length_norm=LengthNormConfig("token")), OptimizationConfig(peak)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        learner = Learner(policy, objective, optimization, micro_batch_tokens=MICRO_BATCH_TOKENS)
        for step, batch in enumerate(lessons.batches(steps)):
            samples = [
                sft_sample(policy.encode_prompt(prompt), policy.encode_response(trace), trace)
                for prompt, trace in batch
            ]
            rate = peak * min(1.0, (step + 1) / (0.05 * steps)) * (1 - 0.9 * step / steps)
            loss = learner.update(samples, learning_rate=rate)["train/loss"]
            progress(f"{step + 1}/{steps}, loss {loss:.3f}")
    finally:
        torch.set_num_threads(threads)


Weights = dict[str, Tensor]
SUFFIX = ".safetensors"


def checksum(weights: Weights) -> str:
    """Return 16 hex digits of names, types, shapes and every bit of the values."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name]
        digest.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def copy_weights(named: Iterable[tuple[str, Tensor]]) -> Weights:
    """Copy the weights to main memory, without gradient."""
    return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in named}


def write_weights(path: Path, weights: Weights) -> None:
    """Write the weights under another name and rename them, so that no reader sees half a file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    save_file(weights, partial)
    partial.chmod(0o644)  # safetensors makes them private, but a package or a shared folder is read by others
    os.replace(partial, path)


Recipe = dict[str, Any]
SHIPPED = Path(__file__).resolve().parents[1] / "model" / "shipped"

#: Settings of the model that only change how numbers are rounded.
ROUNDING = ("dtype", "head", "attention")
#: Settings of the model that apply after its warm start, or not to its weights.
AFTERWARDS = ("name", "cache", "gradient_checkpointing", "check_memory", "freeze", "lora")


@dataclass(frozen=True, slots=True)
class StartWeights:
    """The weights that a run starts from, and where they came from."""

    source: str  # shipped | cache | made | random
    weights: str  # checksum of all of them
    key: str  # of the recipe and its maker; "" if they are random
    seconds: float  # to make or load them


def recipe_of(tiny: TinyModelConfig, policy: Policy, lessons: Lessons) -> Recipe:
    """Return everything about the start model that a user can change, in plain values.

    The tokenizer, the data, the formats and the first batch of lessons enter by their content.
    """
    settings = {f.name: getattr(tiny, f.name) for f in fields(tiny) if f.name not in (*ROUNDING, *AFTERWARDS)}
    default, habits = asdict(HabitsConfig()), asdict(lessons.habits)
    habits = {name: value for name, value in habits.items() if name in SHARES or value != default[name]}
    settings["warm_start"] = asdict(tiny.warm_start) | habits
    if tiny.dtype in ("bfloat16", "float16"):  # requested; auto takes what the device supports
        settings["dtype"] = tiny.dtype
    vocabulary = json.loads(policy.tokenizer.backend_tokenizer.to_str())["model"]
    return {
        **settings,
        "tokenizer": hashed(vocabulary["vocab"], vocabulary["merges"], policy.tokenizer.get_vocab()),
        "data": fingerprint(lessons.problems),
        "formats": hashed([(form.prompt("{question}"), form.trace) for form in lessons.formats]),
        "lessons": hashed(next(lessons.batches(1))),
    }


def maker_of(tiny: TinyModelConfig, policy: Policy) -> dict[str, Any]:
    """Return the code, libraries and device that make the model: others round differently."""
    device = f"{policy.device.type} {torch.backends.cpu.get_cpu_capability()}"
    if policy.device.type == "cuda":
        device = torch.cuda.get_device_name()
    return {
        "code": package_digest(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "device": device,
        "products": str(policy.compute_dtype),
        "head": str(policy.head_dtype),
        "attention": tiny.attention,
    }


def lessons_of(run: RunConfig, tiny: TinyModelConfig, train: Sequence[Problem]) -> Lessons:
    """Return what the run's warm start teaches."""
    assert isinstance(run.data, StoriesConfig)  # checked by the run's rules
    own = {name: share for name in SHARES if (share := getattr(tiny.warm_start, name)) is not None}
    problems, habits = taught(train, run.data.habits, run.data.max_value), replace(run.data.habits, **own)
    return Lessons(problems, formats_of(run), tiny.warm_start, tiny.seed, habits)


def teach_habits(run: RunConfig, policy: Policy, train: Sequence[Problem], console: Console) -> StartWeights | None:
    """Load a built-in model's start weights, or teach them if there are none, and keep them in the cache.

    None for any other model.
    """
    if not isinstance(tiny := run.model, TinyModelConfig):
        return None
    began, key, source = time.monotonic(), "", "random"
    if tiny.warm_start.steps:
        lessons = lessons_of(run, tiny, train)
        recipe, weights = recipe_of(tiny, policy, lessons), None
        key, source = hashed(recipe, maker_of(tiny, policy)), "made"
        folder = Path(tiny.cache or "").expanduser()
        if tiny.cache == "auto":
            folder = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlreason"
        kept = folder / f"{key}{SUFFIX}" if tiny.cache else None
        if kept:
            if weights := find_shipped(recipe):
                source, key = "shipped", hashed(recipe)
            elif kept.exists():
                weights, source = load_file(kept), "cache"
        if weights:
            with torch.no_grad():
                for name, live in policy.named_weights():
                    live.copy_(weights[name])
        else:
            console.say("teaching a new tiny model its habits (data.habits) ...")
            with console.wait("warm start"):
                warm_up(policy, lessons, console.part)
            if kept:
                try:
                    kept.parent.mkdir(parents=True, exist_ok=True)
                    write_weights(kept, copy_weights(policy.named_weights()))
                except OSError as error:
                    console.say(f"! model.cache={tiny.cache}: this model is not kept ({error})")
    console.say(f"start      the tiny model, its weights: {source}")
    taught = {form.prompt("") for form in formats_of(run)}
    for name, asked in run.by_set().items() if tiny.warm_start.steps else ():
        if format_of(prompt := asked.evaluation.prompt).prompt("") not in taught:
            why = "the tiny model is taught other prompts: its accuracy there says nothing"
            console.say(f"! eval.sets.{name}.prompt={prompt.name}: {why}; leave it out, or set eval.prompt")
    seconds = round(time.monotonic() - began, 1)
    return StartWeights(source, checksum(copy_weights(policy.named_weights())), key, seconds)


def find_shipped(recipe: Recipe, folder: Path = SHIPPED) -> Weights | None:
    """Return the weights shipped with the package for this recipe, on any machine."""
    for description in sorted(folder.glob("*.json")):
        if json.loads(description.read_text(encoding="utf-8"))["recipe"] == json.loads(json.dumps(recipe)):
            return load_file(description.with_suffix(SUFFIX))
    return None


def hashed(*values: Any) -> str:
    """Return 16 hex digits of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16]


#: Prompt options that share a warm start, one per turn. A prompt with three worked examples is many times as long
#: as a bare question and ends like r1_zero's: one turn in sixteen suffices to learn it, and keeps the warm start short.
SHARED = 5 * SHARED_WARM_START[:3] + SHARED_WARM_START[3:]


def formats_of(run: RunConfig) -> list[PromptFormat]:
    """Return one format per turn; an evaluation's own prompt gets half of them, unless training's bring it along."""
    both, evaluated = [formats_with(run.prompt)], run.eval.prompt
    if evaluated and template_of(evaluated.file) != template_of(run.prompt.file):
        both.append(formats_with(evaluated))
    if all(len(formats) > 1 for formats in both):  # the shared warm start teaches both
        return both[0]
    turns = max(map(len, both))
    return [formats[turn % len(formats)] for turn in range(turns) for formats in both]


def formats_with(prompt: PromptConfig) -> list[PromptFormat]:
    """Return one format per turn: those of the shared warm start if this prompt is one of them, else its own alone."""
    shared = {name: shipped(name) for name in SHARED_WARM_START}
    same = [other for other in shared.values() if template_of(other.file) == template_of(prompt.file)]
    taught = format_of(same[0] if same else prompt)
    check_readable(prompt, taught.trace)
    formats = {name: format_of(other) for name, other in shared.items()}
    return [formats[name] for name in SHARED] if same else [taught]


def shipped(name: str) -> PromptConfig:
    """Load a prompt option as it is in `conf/`, whatever the run has overridden."""
    file = resource_dir("conf") / "prompt" / f"{name}.yaml"
    prompt = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(PromptConfig), OmegaConf.load(file)))
    assert isinstance(prompt, PromptConfig)
    return prompt


def format_of(prompt: PromptConfig) -> PromptFormat:
    """Return how this prompt asks, and how a trace answers it: its own trace, if it has a place for the answer."""
    trace = prompt.trace if "{answer}" in prompt.trace else R1_ZERO_TRACE
    return PromptFormat(prompt_renderer(prompt.file), trace)


def check_readable(prompt: PromptConfig, trace: str) -> None:
    """Raise `ConfigError` if the prompt's reward could find no answer in what the warm start teaches."""
    if prompt.reward not in NAMED_REWARDS:  # what the user's own reward reads is unknown
        return
    if Grader(reward=prompt.reward).read(trace.format(solution="1+1=2", answer="2")).answer != "2":
        raise ConfigError(
            f"prompt.reward={prompt.reward} with model=tiny: the tiny model is taught to answer in the form {trace!r}, "
            "where this reward finds no answer: choose prompt.reward and prompt.trace of one form, as every prompt has"
        )
