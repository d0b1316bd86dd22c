"""Build a run's policy from its settings."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import cast

import torch
from transformers import AutoConfig

from rlreason.config.data import HabitsConfig, StoriesConfig
from rlreason.config.model import ModelConfig, TinyModelConfig
from rlreason.config.run import RunConfig
from rlreason.config.training import TrainingConfig
from rlreason.data.tasks import taught
from rlreason.errors import ConfigError
from rlreason.model.attention import select_kernel
from rlreason.model.parameters import (
    DTYPES,
    add_lora,
    check_types,
    checkpoint_layers,
    choose_types,
    freeze,
    hardware_here,
    model_size,
    pick_device,
    remarks,
)
from rlreason.model.policy import Policy, load_policy
from rlreason.model.savings import Parallel, parallel_mode
from rlreason.model.shapes import Device, ModelShape, processor, shape_from, shape_of
from rlreason.model.tiny import VOCABULARY, build_model, build_tokenizer, checksum, copy_weights, texts_in
from rlreason.records.console import Console
from rlreason.runtime.machine import default_threads, place_of, world_of
from rlreason.training.warm_start import Lessons, StartWeights, find_or_make, formats_of, warm_up
from rlreason.types import Problem


def is_spread(run: RunConfig) -> bool:
    """Return whether a model from a folder will be sharded over ranks: then it is never whole on a GPU.

    A built-in model is small, and is trained whole first.
    """
    if not run.trains or run.model.made_on_the_spot:
        return False
    training = cast(TrainingConfig, run)
    world = world_of(training.gpus, place_of(), torch.cuda.device_count())
    return world > 1 and mode_of(training, _shape(run.model), pick_device(), world).mode == "shard"


def _shape(model: ModelConfig) -> ModelShape | None:
    """Return the model's shape; of one not yet downloaded, by its config.json."""
    if (shape := shape_of(model).shape) is not None:
        return shape
    with suppress(OSError, ValueError):  # loading the model gives the better message
        return shape_from(AutoConfig.from_pretrained(str(model.folder), trust_remote_code=False).to_dict())
    return None


def mode_of(run: TrainingConfig, shape: ModelShape | None, device: torch.device, world: int) -> Parallel:
    """Choose between replicate and shard, and why, by the memory plan.

    `ConfigError` if the engine cannot sample from a sharded model.
    """
    memory = processor()
    if device.type == "cuda":
        total = torch.cuda.mem_get_info()[1]  # not the free memory: vLLM already has its part, which the plan counts
        memory = Device("cuda", torch.cuda.get_device_name(), total, total)
    parallel = parallel_mode(run, shape, memory, world)
    if parallel.mode == "shard" and run.rollout.engine == "hf" and device.type == "cuda":
        raise ConfigError(
            f"rollout=hf with parallel={run.parallel}, which divides the model ({parallel.why}): the in-process engine "
            "samples from a whole one: choose rollout=vllm, or parallel=replicate"
        )
    if parallel.mode == "shard" and run.rollout.compile:
        raise ConfigError(
            f"rollout.compile=true with parallel={run.parallel}, which divides the model ({parallel.why}): its steps "
            "are compiled from a whole one: set it to false, or choose parallel=replicate"
        )
    return parallel


TINY = 5_000_000  # parameters


def set_threads(run: RunConfig, policy: Policy | None = None) -> None:
    """Set torch's threads: the setting, or 1 for a tiny model, else torch's default within this process's limit.

    Such small matrix products gain a quarter from a second thread, and lose tenfold if another program wants its core.
    Call it before a model is loaded, and again when its size is known.
    """
    if run.threads:
        torch.set_num_threads(run.threads)
    elif policy is not None and model_size(policy.model) < TINY:
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(default_threads(torch.get_num_threads()))


def check_hardware(run: RunConfig, say: Callable[[str], None] = print) -> None:
    """Raise `ConfigError`, before anything slow, if the requested number types or kernel are unavailable here.

    Print a line if the GPU is not used, or lacks what makes it fast.
    """
    hardware = hardware_here()
    products = check_types(run.model, run.rollout.engine, hardware)
    select_kernel(run.model.attention, pick_device(), products)
    for line in remarks(run.model, hardware):
        say(line)


def make_policy(run: RunConfig, train: Sequence[Problem]) -> Policy:
    """Build the untrained model: loaded from a folder, or built in with random weights."""
    model, (products, head) = run.model, choose_types(run.model, run.rollout.engine, hardware_here())
    if model.folder is not None:
        return load_policy(model.folder, model.dtype, model.weights, model.attention, head, is_spread(run))
    assert isinstance(model, TinyModelConfig)
    tokenizer = build_tokenizer(texts_in(formats_of(run), train), VOCABULARY)
    tiny = build_model(len(tokenizer), model.width, model.layers, model.heads, seed=model.seed)
    return Policy(tiny, tokenizer, products, pick_device(), DTYPES[model.weights], model.attention, head)


def teach_habits(run: RunConfig, policy: Policy, train: Sequence[Problem], console: Console) -> StartWeights | None:
    """Load a built-in model's habits, shipped or cached, or teach them by a warm start; None for any other model."""
    tiny = run.model
    if not isinstance(tiny, TinyModelConfig):
        return None
    if tiny.warm_start.steps == 0:
        console.say("model.warm_start.steps=0: the new tiny model keeps its random weights")
        return StartWeights("random", checksum(copy_weights(policy.named_weights())))
    lessons = lessons_of(run, tiny, train)
    shared = f", in the formats of {len(set(lessons.formats))} prompts" if len(lessons.formats) > 1 else ""
    usual = lessons.habits == HabitsConfig()
    habits = "mostly hasty answers, sometimes step by step" if usual else "those of data.habits"

    def make() -> None:
        console.say(f"teaching a new tiny model its habits: {habits}{shared} ...")
        with console.wait("warm start", logged=True):  # the line above announces it
            warm_up(policy, lessons, progress=console.progress)

    start = find_or_make(tiny, policy, lessons, make, console.say)
    origins = {"shipped": "shipped with rlreason", "cache": f"found in the cache (model.cache={tiny.cache})"}
    console.say(f"start      the tiny model, {origins.get(start.source, f'made in {start.seconds:.0f} s')}")
    return start


def lessons_of(run: RunConfig, tiny: TinyModelConfig, train: Sequence[Problem]) -> Lessons:
    """Return what the run's warm start teaches."""
    assert isinstance(run.data, StoriesConfig)  # checked by the run's rules
    habits = run.data.habits
    return Lessons(taught(train, habits, run.data.max_value), formats_of(run), tiny.warm_start, tiny.seed, habits)


def set_trained(model: ModelConfig, policy: Policy, seed: int, trains: bool = True) -> None:
    """Freeze weights or add adapters as the settings say, and describe their cost in the policy's remarks.

    Call it after a tiny model has its habits, which all weights learn.
    """
    lora = model.lora
    if model.weights != "float32":
        rounds = trains and not lora.rank
        cost = ": a change of less than 0.2% of a weight is rounded away" if rounds else ""
        policy.remarks.append(f"weights kept in {model.weights}, output head in float32{cost}")
    if not trains:
        return
    if model.freeze:
        policy.remarks.append(freeze(policy.model, model.freeze))
    if lora.rank:
        policy.remarks.append(add_lora(policy.model, lora.rank, lora.alpha, lora.targets, seed))
    if model.gradient_checkpointing:
        policy.remarks.append(checkpoint_layers(policy.model))
