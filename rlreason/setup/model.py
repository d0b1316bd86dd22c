"""The model of a run, from its `model` settings: loaded, or made on the spot and taught habits."""

from collections.abc import Callable, Sequence

import torch

from rlreason.config.data import HabitsConfig, StoriesConfig
from rlreason.config.model import ModelConfig, TinyModelConfig
from rlreason.config.run import RunConfig
from rlreason.data.stories_habits import taught
from rlreason.model.checkpointing import checkpoint_layers
from rlreason.model.devices import DTYPES, check_types, choose_types, hardware_here, pick_device, remarks
from rlreason.model.kernels import select_kernel
from rlreason.model.lora import add_lora
from rlreason.model.parameters import freeze, model_size
from rlreason.model.policy import Policy, load_policy
from rlreason.model.tiny import build_model, build_tokenizer
from rlreason.model.tiny_formats import VOCABULARY, texts_in
from rlreason.model.weight_cache import checksum, copied
from rlreason.records.console import Console
from rlreason.runtime.processors import default_threads
from rlreason.setup.parallel import is_spread
from rlreason.setup.start import Start, find_or_make
from rlreason.setup.warm_start import Lessons, warm_up
from rlreason.setup.warm_start_formats import formats_of
from rlreason.types import Problem

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
