"""The policy of a run from its settings, and what each rank holds of it."""

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
from rlreason.model.devices import DTYPES, check_types, choose_types, hardware_here, pick_device, remarks
from rlreason.model.parameters import add_lora, checkpoint_layers, freeze, model_size
from rlreason.model.policy import Policy, load_policy
from rlreason.model.savings import Parallel, parallel_mode
from rlreason.model.shapes import Device, ModelShape, processor, shape_from, shape_of
from rlreason.model.tiny import VOCABULARY, build_model, build_tokenizer, checksum, copied, texts_in
from rlreason.records.console import Console
from rlreason.runtime.machine import default_threads
from rlreason.runtime.process import place_of, world_of
from rlreason.training.warm_start import Lessons, Start, find_or_make, formats_of, warm_up
from rlreason.types import Problem


def is_spread(run: RunConfig) -> bool:
    """Whether a model from a folder will be spread over ranks: then it is never whole on a GPU.

    One made on the spot is small, and is trained as a whole before.
    """
    if not run.trains or run.model.made_on_the_spot:
        return False
    training = cast(TrainingConfig, run)
    world = world_of(training.gpus, place_of(), torch.cuda.device_count())
    return world > 1 and mode_of(training, _shape(run.model), pick_device(), world).mode == "shard"


def _shape(model: ModelConfig) -> ModelShape | None:
    """Also of a model that is still to be downloaded: its config.json is, now."""
    if (shape := shape_of(model).shape) is not None:
        return shape
    with suppress(OSError, ValueError):  # which the one who loads it says better
        return shape_from(AutoConfig.from_pretrained(str(model.folder), trust_remote_code=False).to_dict())
    return None


def mode_of(run: TrainingConfig, shape: ModelShape | None, device: torch.device, world: int) -> Parallel:
    """replicate or shard, and why, by the memory plan.

    `ConfigError` where the engine cannot sample from a model in parts.
    """
    here = processor()
    if device.type == "cuda":
        total = torch.cuda.mem_get_info()[1]  # of what is free now, vLLM has its part already, which the plan counts
        here = Device("cuda", torch.cuda.get_device_name(), total, total)
    found = parallel_mode(run, shape, here, world)
    if found.mode == "shard" and run.rollout.engine == "hf" and device.type == "cuda":
        raise ConfigError(
            f"rollout=hf with parallel={run.parallel}, which divides the model ({found.why}): the in-process engine "
            "samples from a whole one: choose rollout=vllm, or parallel=replicate"
        )
    if found.mode == "shard" and run.rollout.compile:
        raise ConfigError(
            f"rollout.compile=true with parallel={run.parallel}, which divides the model ({found.why}): its steps are "
            "compiled from a whole one: set it to false, or choose parallel=replicate"
        )
    return found


TINY = 5_000_000  # parameters


def choose_threads(run: RunConfig, policy: Policy | None = None) -> None:
    """As asked; otherwise one for a tiny model, and for others torch's own choice within what this process may use.

    Products this small gain a quarter from a second thread, and lose tenfold when another program wants its core.
    To be called before a model is loaded, and again when its size is known.
    """
    if run.threads:
        torch.set_num_threads(run.threads)
    elif policy is not None and model_size(policy.model) < TINY:
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(default_threads(torch.get_num_threads()))


def check_hardware(run: RunConfig, say: Callable[[str], None] = print) -> None:
    """`ConfigError`, before anything slow, where number types or a kernel that are asked for cannot be had here.

    Says where the GPU is not used, or lacks what makes it fast.
    """
    here = hardware_here()
    products = check_types(run.model, run.rollout.engine, here)
    select_kernel(run.model.attention, pick_device(), products)
    for line in remarks(run.model, here):
        say(line)


def make_policy(run: RunConfig, train: Sequence[Problem]) -> Policy:
    """The model as it is before any training: loaded, or made on the spot with random weights."""
    model, (products, head) = run.model, choose_types(run.model, run.rollout.engine, hardware_here())
    if model.folder is not None:
        return load_policy(model.folder, model.dtype, model.weights, model.attention, head, is_spread(run))
    assert isinstance(model, TinyModelConfig)
    tiny, device = model, pick_device()
    tokenizer = build_tokenizer(texts_in(formats_of(run), train), VOCABULARY)
    built = build_model(len(tokenizer), tiny.width, tiny.layers, tiny.heads, seed=tiny.seed)
    return Policy(built, tokenizer, products, device, DTYPES[tiny.weights], tiny.attention, head)


def teach_habits(run: RunConfig, policy: Policy, train: Sequence[Problem], console: Console) -> Start | None:
    """Give a model made on the spot its habits: as they were shipped or kept, or by a warm start here.

    Any other model stays as it is: None.
    """
    tiny = run.model
    if not isinstance(tiny, TinyModelConfig):
        return None
    if tiny.warm_start.steps == 0:
        console.say("model.warm_start.steps=0: the new tiny model keeps its random weights")
        return Start("random", checksum(copied(policy.named_weights())))
    lessons = lessons_of(run, tiny, train)
    shared = f", in the formats of {len(set(lessons.formats))} prompts" if len(lessons.formats) > 1 else ""
    usual = lessons.habits == HabitsConfig()
    habits = "mostly hasty answers, sometimes step by step" if usual else "those of data.habits"

    def make() -> None:
        console.say(f"teaching a new tiny model its habits: {habits}{shared} ...")
        with console.wait("warm start", logged=True):  # it was just said
            warm_up(policy, lessons, progress=console.progress)

    found = find_or_make(tiny, policy, lessons, make, console.say)
    came = {"shipped": "shipped with rlreason", "cache": f"found in the cache (model.cache={tiny.cache})"}
    console.say(f"start      the tiny model, {came.get(found.source, f'made in {found.seconds:.0f} s')}")
    return found


def lessons_of(run: RunConfig, tiny: TinyModelConfig, train: Sequence[Problem]) -> Lessons:
    """What the warm start teaches in this run."""
    assert isinstance(run.data, StoriesConfig)  # a rule of the run's
    habits = run.data.habits
    return Lessons(taught(train, habits, run.data.max_value), formats_of(run), tiny.warm_start, tiny.seed, habits)


def choose_trained(model: ModelConfig, policy: Policy, seed: int, trains: bool = True) -> None:
    """What of the model the run trains, if anything, and at what cost in memory; the policy's description says it.

    To be called after a tiny model has its habits, which every weight takes part in.
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
