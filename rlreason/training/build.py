"""Build the parts of a run from its settings: problems, policy, engine, graders, loggers."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from transformers import AutoConfig

from rlreason.config.conflicts import sampling_key
from rlreason.config.data import HabitsConfig, StoriesConfig
from rlreason.config.evaluation import EvalProtocolConfig
from rlreason.config.leaves import template_of
from rlreason.config.model import ModelConfig, TinyModelConfig
from rlreason.config.run import Asking, RunConfig
from rlreason.config.training import TrainingConfig
from rlreason.data.prepare import Loaded, load_data, read_splits, subset
from rlreason.data.sources import fingerprint
from rlreason.data.tasks import taught, texts_in
from rlreason.engines.base import Engine, Sampling, tags_in
from rlreason.engines.build import check_engine, demand_of, make_engine
from rlreason.engines.rollouts import Rollouts
from rlreason.errors import ConfigError
from rlreason.evaluation.evaluator import Evaluator
from rlreason.grading import Grader
from rlreason.grading.grader import Graders, make_graders
from rlreason.model.attention import select_kernel
from rlreason.model.chat import PromptEncoder, check_prompts, encoder, end_of_turn, remarks
from rlreason.model.parameters import (
    DTYPES,
    TAGS,
    VOCABULARY,
    add_lora,
    build_model,
    build_tokenizer,
    check_types,
    checkpoint_layers,
    choose_types,
    freeze,
    hardware_here,
    machine_remarks,
    model_size,
    pick_device,
)
from rlreason.model.policy import LogProbScorer, Policy, load_policy
from rlreason.model.savings import Parallel, parallel_mode
from rlreason.model.shapes import ModelShape, shape_from, shape_of
from rlreason.records.console import Console
from rlreason.records.files import INCIDENTS
from rlreason.records.loggers import Loggers, Resumed
from rlreason.runtime.clock import Clock, ModelSize, peak_tflops
from rlreason.runtime.machine import Device, default_threads, place_of, processor, world_of
from rlreason.training.preflight import own_functions, refusal
from rlreason.training.warm_start import (
    Lessons,
    StartWeights,
    checksum,
    copy_weights,
    find_or_make,
    formats_of,
    warm_up,
)
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
    for line in machine_remarks(run.model, hardware):
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


@dataclass(frozen=True, slots=True)
class Components:
    """The parts of a run, ready to use."""

    policy: Policy
    engine: Engine
    grader: Grader
    rollouts: Rollouts
    sampling: Sampling
    scorer: LogProbScorer  # at training's temperature
    evaluator: Evaluator
    train_problems: list[Problem]
    truths: dict[str, str]  # problem id -> ground truth, of these
    eval_problems: list[Problem]  # of the evaluations on the way
    final_problems: list[Problem]  # of the last one, or of a job that does not train; a superset of eval_problems
    start: StartWeights | None  # where the built-in model's weights came from
    data_hash: str
    sizes: dict[str, int]  # problems read, filtered and left
    loggers: Loggers  # where metrics are sent besides the run folder
    seconds_to_build: float

    def graders(self) -> list[Grader]:
        """List each grader once, in a fixed order."""
        graders = (self.grader, self.evaluator.grader, self.evaluator.second_grader)
        return list({id(grader): grader for grader in graders if grader is not None}.values())

    def close(self) -> None:
        """Close the engine and every grader, even if one of them fails."""
        try:
            self.engine.close()
        finally:
            for grader in self.graders():
                grader.close()


def build_components(
    run: RunConfig, folder: Path, console: Console, logs: bool = True, clock: Clock | None = None
) -> Components:
    """Build all parts, cheapest checks first, so that mistakes in the settings show before the model is trained.

    `logs`: start the loggers; a resumed run starts them once its records are cut back (`start_loggers`).
    `clock`: the run's, which times sampling and grading.
    """
    began, clock = time.monotonic(), clock or Clock()
    check_engine(run)
    check_hardware(run, console.say)
    set_threads(run)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else the grading processes warn about it
    check_prompts(run)
    loggers = Loggers(console.say)
    graders = make_graders(run, folder / INCIDENTS)  # their workers start before a GPU is touched
    with closing_on_error(graders, loggers):
        if logs:
            start_loggers(run, loggers, folder, console)
        loaded, stories = read_all(run, graders, console)
        with console.wait("loading the model"):
            policy = make_policy(run, stories)
        set_threads(run, policy)
        prompt_ids, eval_prompt_ids = encoder(policy, run.asking.prompt), encoder(policy, run.evaluation.prompt)
        with console.wait("measuring the prompts"):
            train, validation = loaded.train, loaded.validation
            if run.samples_to_learn or not run.trains:  # SFT: `make_traces` measures prompts with their traces
                train = fitting(run, policy, Part("train", train, run.asking.sampling.max_tokens), prompt_ids, console)
            part = Part("validation", validation, run.evaluation.sampling.max_tokens)
            loaded = Loaded(train, fitting(run, policy, part, eval_prompt_ids, console), loaded.sizes)
        start = teach_habits(run, policy, stories, console)
        set_trained(run.model, policy, run.seed, run.trains)
        demand = partial(demand_of, run, prompt_ids, eval_prompt_ids, loaded.train, loaded.validation)
        with console.wait("starting the engine", logged=True):
            engine = make_engine(run, policy, folder, console.say, demand)
    evaluation = run.evaluation
    return Components(
        policy=policy,
        engine=engine,
        grader=graders.training,
        rollouts=Rollouts(engine, graders.training, prompt_ids, run.seed, console.part, clock=clock),
        sampling=make_sampling(run.asking, policy),
        scorer=make_scorer(run, run.asking, policy),
        evaluator=Evaluator(
            settings=evaluation,
            rollouts=Rollouts(
                engine, graders.evaluation, eval_prompt_ids, run.seed, console.part, graders.second, clock, "eval"
            ),
            sampling=make_sampling(evaluation, policy),
            scorer=make_scorer(run, evaluation, policy),
            grader=graders.evaluation,
            second_grader=graders.second,
        ),
        train_problems=loaded.train,
        truths={problem.id: problem.answer for problem in loaded.train},
        eval_problems=evaluation_problems(evaluation, loaded.validation, evaluation.problems),
        final_problems=evaluation_problems(evaluation, loaded.validation, evaluation.final_problems),
        start=start,
        data_hash=fingerprint([*loaded.train, *loaded.validation]),
        sizes=loaded.sizes | {"train": len(loaded.train), "validation": len(loaded.validation)},
        loggers=loggers,
        seconds_to_build=time.monotonic() - began,
    )


def start_loggers(
    run: RunConfig, loggers: Loggers, folder: Path, console: Console, resumed: Resumed | None = None
) -> None:
    """Start the chosen loggers; `resumed`: the id of the run in each service that it continues."""
    if run.logger.chosen:
        with console.wait("starting the loggers"):
            loggers.start(run.logger, folder, asdict(run), resumed)


@contextmanager
def closing_on_error(graders: Graders, loggers: Loggers) -> Iterator[None]:
    """Close graders and loggers if an error prevents the rest from being built."""
    try:
        yield
    except BaseException as error:
        graders.close()
        loggers.abandon()
        if isinstance(error, KeyboardInterrupt):
            raise type(error)(f"{error} before the first step".strip()) from None
        raise


def read_all(run: RunConfig, graders: Graders, console: Console) -> tuple[Loaded, list[Problem]]:
    """Read the problems, try the user's own rewards on them, and read the stories that teach a built-in model."""
    with console.wait("reading the data"):
        loaded = load_data(run, grader=graders.training, judge=graders.evaluation, say=console.say)
        for grader in graders.all():
            if not grader.plugin:
                continue
            learned = grader is graders.training and grader is not graders.evaluation
            problems = loaded.train if learned and loaded.train else loaded.validation
            setting = next((key for key, name in own_functions(run) if name == grader.plugin), grader.plugin)
            if why := refusal(setting, grader, problems[0].answer, run.grading.timeout_s):
                raise ConfigError(why)
        for remark in [*remarks(run.asking.prompt, loaded.train), *remarks(run.evaluation.prompt, loaded.validation)]:
            console.say(remark)
        stories: list[Problem] = []
        if run.model.made_on_the_spot:
            stories = read_splits(run.data, console.say, traces=False)[0]
        return loaded, stories


def evaluation_problems(evaluation: EvalProtocolConfig, validation: list[Problem], count: int | None) -> list[Problem]:
    """Return `count` validation problems, always the same: files may be sorted by subject, so a fixed draw of them."""
    return validation[:count] if evaluation.data.in_random_order else subset(validation, count, seed=0)


def make_sampling(asking: Asking, policy: Policy) -> Sampling:
    """Build the engine's sampling settings for training or evaluations, with the prompt's ends and stop strings."""
    end = end_of_turn(asking.prompt, policy.tokenizer)
    ends = frozenset() if end is None else frozenset({end})
    stop = tuple(asking.prompt.stop)
    tags = tags_in(policy.tokenizer, (template_of(asking.prompt.file), *stop), always=TAGS)
    return Sampling(**asdict(asking.sampling), stop=stop, tags=tags, end_ids=ends)


def make_scorer(run: RunConfig, asking: Asking, policy: Policy) -> LogProbScorer:
    """Build a scorer at the sampling temperature; greedy responses are scored at temperature 1."""
    return LogProbScorer(policy, run.micro_batch_tokens, asking.sampling.temperature or 1.0)


@dataclass(frozen=True, slots=True)
class Part:
    """Problems with a common limit on response tokens."""

    name: str  # train or validation
    problems: list[Problem]
    max_tokens: int  # of a response


def room_of(run: RunConfig, context: int) -> tuple[int, str]:
    """Return (tokens for a prompt and its response together, the setting that limits them)."""
    return min((run.micro_batch_tokens, "micro_batch_tokens"), (context, "the model's context"))


def fitting(run: RunConfig, policy: Policy, part: Part, prompt_ids: PromptEncoder, console: Console) -> list[Problem]:
    """Return the problems that fit; one that does not is refused, or left out with a message (data.bad_rows)."""
    prompt_ids.check(part.problems)
    evaluates = part.name == "validation"
    data_key, data = ("data", run.data)
    if evaluates and run.eval.data is not None:
        data_key, data = ("eval.data", run.eval.data)
    skip = data.bad_rows == "skip"
    room, limit = room_of(run, policy.max_context)
    longest = room - part.max_tokens
    sizes = [len(prompt_ids(problem)) for problem in part.problems]
    kept = [problem for problem, size in zip(part.problems, sizes, strict=True) if size <= longest]
    count, total = len(part.problems) - len(kept), len(part.problems)
    if count == 0:
        return kept
    if skip and kept:
        left_out = f"{count} of {total} {part.name} problems"
        console.say(f"! left out: {left_out}, whose prompts are too long for {limit}={room}")
        return kept
    key = sampling_key(run, "max_tokens") if evaluates or not run.trains else "sampling.max_tokens"
    needed = max(sizes) + part.max_tokens
    cures = [f"lower {key}"]
    if limit == "micro_batch_tokens":
        cures.append(f"set {limit}={needed}")
    if kept:
        cures.append(f"leave them out with {data_key}.bad_rows=skip")
    raise ConfigError(
        f"{key}={part.max_tokens} and the longest prompt need {needed} tokens, more than {limit}={room} "
        f"({count} of {total} {part.name} prompts): {', or '.join(cures)}"
    )


def measure_flops(clock: Clock, policy: Policy, ranks: int) -> None:
    """Make the clock count this model's FLOPs and, on a GPU, its memory; `ranks` processes train it."""
    config, device = policy.model.config, torch.device(policy.device)
    on_gpu = device.type == "cuda"
    peak = peak_tflops(torch.cuda.get_device_name(device)) if on_gpu else None
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    looked_up = 0 if config.tie_word_embeddings else policy.model.get_input_embeddings().weight.numel()
    parameters = sum(p.numel() for p in policy.model.parameters()) - looked_up
    clock.model = ModelSize(parameters, config.num_hidden_layers, heads * width, peak, ranks)
    if on_gpu:

        def gauge() -> float:
            peak_bytes = float(torch.cuda.max_memory_allocated(device))
            torch.cuda.reset_peak_memory_stats(device)
            return peak_bytes

        clock.gauge = gauge
