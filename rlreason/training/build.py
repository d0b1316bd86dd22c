"""Build the parts of a run from its settings: problems, policy, engine, graders, loggers, algorithm, learner."""

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlreason.config.algorithms import EIConfig, GRPOConfig, SFTConfig
from rlreason.config.leaves import leaves, template_of
from rlreason.config.model import ModelConfig, TinyModelConfig
from rlreason.config.run import Asking, EvalProtocolConfig, RunConfig, naming_set
from rlreason.config.training import TrainingConfig
from rlreason.data.prepare import Loaded, load_data, read_splits, subset
from rlreason.data.prompts import ProblemSampler, trace_text
from rlreason.data.sources import fingerprint
from rlreason.data.tasks import texts_in
from rlreason.engines.base import Engine, Sampling, tags_in
from rlreason.engines.build import check_engine, demand_of, largest, make_engine
from rlreason.engines.rollouts import Rollouts
from rlreason.errors import ConfigError
from rlreason.evaluation.evaluator import Evaluator, ValidationSet
from rlreason.grading import Grader
from rlreason.grading.grader import Graders, make_graders
from rlreason.model.chat import PromptEncoder, check_prompts, end_of_turn, prompt_facts, remarks
from rlreason.model.memory import shape_of
from rlreason.model.parameters import (
    DTYPES,
    TAGS,
    VOCABULARY,
    add_lora,
    build_model,
    build_tokenizer,
    checkpoint_layers,
    choose_types,
    freeze,
    hardware_here,
    load_model,
    load_tokenizer,
    machine_remarks,
    model_size,
    pick_device,
)
from rlreason.model.plan import parallel_mode
from rlreason.model.policy import LogProbScorer, Policy, weights_hash
from rlreason.records.console import Console
from rlreason.records.files import INCIDENTS
from rlreason.records.loggers import Loggers
from rlreason.records.writer import RunWriter
from rlreason.runtime.clock import Clock
from rlreason.runtime.machine import Device, place_of, processor, usable_processors, world_of
from rlreason.runtime.text import redacted
from rlreason.training.algorithms import GRPO, SFT, Algorithm, ExpertIteration, sft_sample
from rlreason.training.learner import Learner
from rlreason.training.preflight import own_functions
from rlreason.training.warm_start import StartWeights, formats_of, hashed, teach_habits
from rlreason.types import Problem, Sample


def mode_of(run: TrainingConfig, world: int) -> tuple[str, str]:
    """Choose between replicate and shard, and why, by the memory plan.

    `ConfigError` if the engine cannot sample from a sharded model.
    """
    memory = processor()
    if on_gpu := torch.cuda.is_available():
        total = torch.cuda.mem_get_info()[1]  # not the free memory: vLLM already has its part, which the plan counts
        memory = Device("cuda", torch.cuda.get_device_name(), total, total)
    mode, why = parallel_mode(run, shape_of(run.model)[0], memory, world)
    needs_whole = run.rollout.compile or (run.rollout.engine == "hf" and on_gpu)
    if needs_whole and mode == "shard":
        raise ConfigError(
            f"parallel={run.parallel} divides the model ({why}), and rollout=hf or rollout.compile=true "
            "samples from a whole one: choose rollout=vllm without compile, or parallel=replicate"
        )
    return mode, why


T = TypeVar("T")
TINY = 5_000_000  # parameters


def set_threads(run: RunConfig, policy: Policy | None = None) -> None:
    """Set torch's threads: the setting, or 1 for a tiny model, else torch's default within this process's limit.

    Such small matrix products gain a quarter from a second thread, and lose tenfold if another program wants its core.
    Call it before a model is loaded, and again when its size is known.
    """
    if run.threads:
        torch.set_num_threads(run.threads)
    elif policy and model_size(policy.model) < TINY:
        torch.set_num_threads(1)
    else:
        torch.set_num_threads(min(torch.get_num_threads(), usable_processors()))


def make_policy(run: RunConfig, train: Sequence[Problem]) -> Policy:
    """Build the untrained model: loaded from a folder, or built in with random weights."""
    model, (products, head) = run.model, choose_types(run.model, run.rollout.engine, hardware_here())
    spread = False  # over ranks: then the model is never whole on a GPU
    tokenizer: PreTrainedTokenizerBase
    built: PreTrainedModel
    if isinstance(model, TinyModelConfig):
        tokenizer = build_tokenizer(texts_in(formats_of(run), train), VOCABULARY)
        built = build_model(len(tokenizer), model.width, model.layers, model.heads, seed=model.seed)
    else:
        if isinstance(run, TrainingConfig):
            world = world_of(run.gpus, place_of(), torch.cuda.device_count())
            spread = world > 1 and mode_of(run, world)[0] == "shard"
        tokenizer, built = load_tokenizer(str(model.folder)), load_model(str(model.folder))
    device, weights = pick_device(run.device), DTYPES[model.weights]
    return Policy(built, tokenizer, products, device, weights, model.attention, head, spread)


def set_trained(model: ModelConfig, policy: Policy, seed: int) -> None:
    """Freeze weights or add adapters as the settings say, and describe their cost in the policy's remarks.

    Call it after a tiny model has its habits, which all weights learn.
    """
    lora = model.lora
    if model.weights != "float32":
        cost = "" if lora.rank else ": a change of less than 0.2% of a weight is rounded away"
        policy.remarks.append(f"weights kept in {model.weights}{cost}")
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
    graders: Graders
    rollouts: Rollouts
    sampling: Sampling
    scorer: LogProbScorer  # at training's temperature
    evaluator: Evaluator
    sets: list[ValidationSet]  # `eval.sets`
    train_problems: list[Problem]
    eval_problems: list[Problem]  # of the evaluations on the way
    final_problems: list[Problem]  # of the last one, or of a job that does not train; a superset of eval_problems
    start: StartWeights | None  # where the built-in model's weights came from
    data_hash: str
    sizes: dict[str, int]  # problems read, filtered and left

    def close(self) -> None:
        """Close the engine and every grader, even if one of them fails."""
        try:
            self.engine.close()
        finally:
            self.graders.close()


def build_components(run: RunConfig, folder: Path, console: Console, clock: Clock | None = None) -> Components:
    """Build all parts, cheapest checks first, so that mistakes in the settings show before the model is trained.

    `clock`: the run's, which times sampling and grading.
    """
    clock = clock or Clock()
    check_engine(run)
    pick_device(run.device)  # it may not be here
    for line in machine_remarks(run.model, hardware_here()):
        console.say(line)
    set_threads(run)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # else the grading processes warn about it
    check_prompts(run)
    evaluation, asking = run.evaluation, run.asking
    graders = make_graders(run, folder / INCIDENTS)  # their workers start before a GPU is touched
    try:
        with console.wait("reading the data"):
            by_set, judge = graders.sets, graders.evaluation
            loaded = load_data(run, grader=graders.training, judge=judge, judges=by_set, say=console.say)
            try_own_rewards(run, graders, loaded)
            stories = read_splits(run.data, console.say, traces=False)[0] if run.model.made_on_the_spot else []
        train, validation = loaded.train, loaded.validation
        for remark in [*remarks(asking.prompt, train), *remarks(evaluation.prompt, validation)]:
            console.say(remark)
        with console.wait("loading the model, measuring the prompts"):
            policy = make_policy(run, stories)
            set_threads(run, policy)
            prompt_ids = PromptEncoder(policy, asking.prompt)
            if run.samples_to_learn or not run.trains:  # SFT: `make_traces` measures prompts with their traces
                prompt_ids.check(train)
                train = fitting(run, policy, "train", train, [len(prompt_ids(p)) for p in train], console)
            eval_prompt_ids, validation = asked_prompts(run, policy, validation, console)
            sets = dict[str, tuple[RunConfig, PromptEncoder, list[Problem]]]()
            for name, asked_by in run.by_set().items():
                with naming_set(name):
                    sets[name] = (asked_by, *asked_prompts(asked_by, policy, loaded.sets[name], console))
        start = teach_habits(run, policy, stories, console)
        if run.trains:
            set_trained(run.model, policy, run.seed)
            policy.ends_turns_with(end_of_turn(run.prompt, policy.tokenizer))
        with console.wait("starting the engine"):
            asked = [(run, prompt_ids, eval_prompt_ids, train, validation)]
            asked += [(of, ids, ids, [], problems) for of, ids, problems in sets.values()]
            engine = make_engine(run, policy, folder, console.say, lambda: largest(demand_of(*one) for one in asked))
    except BaseException:
        graders.close()
        raise
    common = run.seed, console.part

    def validation_set(
        name: str, of: RunConfig, ids: PromptEncoder, problems: list[Problem], grader: Grader
    ) -> ValidationSet:
        second = None if name else graders.second
        rollouts, asks = Rollouts(engine, grader, ids, *common, second, clock, "eval"), of.evaluation
        evaluator = Evaluator(asks, rollouts, make_sampling(asks, policy), make_scorer(of, asks, policy))
        counts = asks.problems, asks.final_problems
        return ValidationSet(name, evaluator, *(evaluation_problems(asks, problems, count) for count in counts))

    own = validation_set("", run, eval_prompt_ids, validation, graders.evaluation)
    return Components(
        policy=policy,
        engine=engine,
        graders=graders,
        rollouts=Rollouts(engine, graders.training, prompt_ids, *common, clock=clock),
        sampling=make_sampling(asking, policy),
        scorer=make_scorer(run, asking, policy),
        evaluator=own.evaluator,
        sets=[validation_set(name, *of, graders.sets[name]) for name, of in sets.items()],
        train_problems=train,
        eval_problems=own.interim_problems,
        final_problems=own.final_problems,
        start=start,
        data_hash=fingerprint([*train, *validation, *(p for *_, problems in sets.values() for p in problems)]),
        sizes=loaded.sizes | {"train": len(train), "validation": len(validation)},
    )


def start_records(run: RunConfig, components: Components, records: RunWriter, console: Console) -> None:
    """Drop the later records of a resumed run, start the loggers, record and print what the run is made of.

    The loggers of a run that resumes from a checkpoint continue its run in each service.
    """
    facts, resumes = run_facts(run, components), records.checkpoint is not None
    if resumes:
        records.resume(facts, console.say)
    records.loggers = Loggers(console.say)
    if run.logger.chosen:
        with console.wait("starting the loggers"):
            records.loggers.start(run.logger, records.folder, asdict(run), resumes)
    records.add_provenance(facts)
    console.say(f"records    {records.folder}")
    console.say(f"model      {run.model.name}: {components.policy.describe()}")
    named = [("evaluates", components.evaluator), *((one.name, one.evaluator) for one in components.sets)]
    for name, asks in ((name, evaluator.settings) for name, evaluator in named):
        evaluated = f"data={asks.data.name}, prompt={asks.prompt.name}, {asks.sampling.describe()}"
        console.say(f"{name:<10} {evaluated}, {asks.samples} per problem")


def try_own_rewards(run: RunConfig, graders: Graders, loaded: Loaded) -> None:
    """Refuse a reward of the user's own that cannot judge a response to the first problem."""
    settings, learned = own_functions(run), loaded.train or loaded.validation
    judged = [(graders.sets[name], problems) for name, problems in loaded.sets.items()]
    judged += [(grader, learned) for grader in (graders.training, graders.second) if grader]
    for grader, problems in dict([*judged, (graders.evaluation, loaded.validation)]).items():
        if grader.plugin:
            answer = problems[0].answer
            (grade,) = grader.grade_batch(["probe"], [answer])
            if grade.outcome in ("timeout", "error"):
                raise ConfigError(
                    f"{settings.get(grader.plugin, grader.plugin)} fails on the response 'probe' and the reference "
                    f"answer {answer[:40]!r}: {grader.why_not(grade)}: fix it, or make it faster than "
                    f"grading.timeout_s={run.grading.timeout_s:g} s"
                )


def asked_prompts(
    run: RunConfig, policy: Policy, problems: list[Problem], console: Console
) -> tuple[PromptEncoder, list[Problem]]:
    """Return the encoder of the prompts of evaluations, and the problems whose prompts fit, all of which it checks."""
    prompt_ids = PromptEncoder(policy, run.evaluation.prompt)
    prompt_ids.check(problems)
    sizes = [len(prompt_ids(p)) for p in problems]
    return prompt_ids, fitting(run, policy, "validation", problems, sizes, console)


def evaluation_problems(evaluation: EvalProtocolConfig, split: list[Problem], count: int | None) -> list[Problem]:
    """Return `count` problems of a split, always the same: files may be sorted by subject, so a fixed draw of them."""
    return split[:count] if evaluation.data.has_stories else subset(split, count, seed=0)


def make_sampling(asking: Asking, policy: Policy) -> Sampling:
    """Build the engine's sampling settings for training or evaluations, with the prompt's ends and stop strings."""
    end, stop = end_of_turn(asking.prompt, policy.tokenizer), tuple(asking.prompt.stop)
    ends = frozenset() if end is None else frozenset({end})
    tags = tags_in(policy.tokenizer, (template_of(asking.prompt.file), *stop), always=TAGS)
    return Sampling(**asdict(asking.sampling), stop=stop, tags=tags, end_ids=ends)


def make_scorer(run: RunConfig, asking: Asking, policy: Policy) -> LogProbScorer:
    """Build a scorer at the sampling temperature; greedy responses are scored at temperature 1."""
    return LogProbScorer(policy, run.micro_batch_tokens, asking.sampling.temperature or 1.0)


def fitting(
    run: RunConfig, policy: Policy, part: str, items: Sequence[T], sizes: Sequence[int], console: Console
) -> list[T]:
    """Return the items that fit into a pass and the model's context; others are refused, or left out (bad_rows).

    `part`: `train` or `validation`, of problems, whose prompts have these sizes, or `traces`, with their prompts.
    """
    key, most, cure = "data", 0, ""
    if part == "validation" and run.eval.data:
        key = "eval.data"
    if part != "traces":
        most = (run.evaluation if part == "validation" else run.asking).sampling.max_tokens
        length = "sampling.max_tokens" if part == "train" and run.trains else run.sampling_key("max_tokens")
        part, cure = f"{part} prompts with {length}={most}", f"lower {length}, "
    room, limit = min((run.micro_batch_tokens, "micro_batch_tokens"), (policy.max_context, "the model's context"))
    kept = [item for item, size in zip(items, sizes, strict=True) if size + most <= room]
    if left_out := len(items) - len(kept):
        found = f"{left_out} of {len(items)} {part} are over {limit}={room} tokens"
        if not kept or run.data_read()[key].bad_rows != "skip":
            cure += f"raise micro_batch_tokens if it is the limit, or set {key}.bad_rows=skip"
            raise ConfigError(f"{found}: {cure}")
        console.say(f"! left out: {found}")
    return kept


def make_traces(
    run: RunConfig,
    policy: Policy,
    problems: Sequence[Problem],
    prompt_ids: Callable[[Problem], list[int]],
    console: Console,
) -> list[Sample]:
    """Return the traces as samples with advantage 1; one too long is refused, or left out (data.bad_rows)."""
    end, traces = end_of_turn(run.prompt, policy.tokenizer), []
    for problem in problems:
        text = trace_text(problem, run.prompt.trace)
        traces.append(sft_sample(prompt_ids(problem), policy.encode_response(text, end), text, problem.id))
    sizes = [len(trace.response.prompt_ids) + trace.length for trace in traces]
    return fitting(run, policy, "traces", traces, sizes, console)


def make_algorithm(run: TrainingConfig, components: Components, console: Console) -> Algorithm:
    """Build the run's algorithm; the one place that knows which settings make which algorithm."""
    if why := run.too_few(len(components.train_problems)):  # every batch would silently be smaller
        raise ConfigError(why)
    if isinstance(run, SFTConfig):
        prompt_ids = components.rollouts.prompt_ids
        traces = make_traces(run, components.policy, components.train_problems, prompt_ids, console)
        total = max(1, round((run.epochs or 0) * len(traces)))
        if run.n_steps:  # one of the two is given
            total = run.n_steps * run.train_batch_size
        sft = SFT(traces, run.train_batch_size, run.seed, total)
        if bad := list(run.schedule_rules(sft.n_steps)):  # the number of traces has decided what `epochs` means
            raise ConfigError("\n".join(bad))
        return sft
    assert isinstance(run, EIConfig | GRPOConfig)
    questions = ProblemSampler(components.train_problems, run.seed, run.skip_solved)
    parts = components.rollouts, questions, components.sampling
    if isinstance(run, EIConfig):
        return ExpertIteration(run, *parts)
    if run.scores_old and components.policy.compute_dtype != torch.float32:
        components.policy.shares_prompts = False  # shared prompts round otherwise: a ratio would not begin at 1
    reference = None if run.kl_placement == "none" else make_scorer(run, run, frozen_copy(components.policy))
    return GRPO(run, *parts, components.scorer, reference)


def frozen_copy(policy: Policy, whole: bool = False) -> Policy:
    """Copy the policy, never to be trained; what was checked of the original holds for the copy.

    Weights that are not trained are shared, as under LoRA, unless the copy is to be `whole`.
    """
    frozen = policy.copy(() if whole else [p for p in policy.model.parameters() if not p.requires_grad])
    frozen.model.requires_grad_(False)
    return frozen


def learner_settings(run: TrainingConfig) -> dict[str, Any]:
    """Return the learner's arguments besides its policy."""
    return {
        "objective": run.objective(),
        "optimization": run,
        "temperature": run.learning_temperature,
        "micro_batch_tokens": run.micro_batch_tokens,
        "can_restart": run.restarts,
    }


def make_learner(run: TrainingConfig, policy: Policy) -> Learner:
    """Build a learner in this process from the run's objective and optimisation settings."""
    return Learner(policy, **learner_settings(run))


OF_THE_FILE = ("_name_or_path", "transformers_version")  # in a model's config, but not part of the model


def run_facts(run: RunConfig, components: Components) -> dict[str, Any]:
    """Return what a run is made of, in plain values by group; of the weights a sample is hashed, in about a second.

    Call it before training changes a weight, and before a checkpoint is read.
    """
    policy, tokenizer, config = components.policy, components.policy.tokenizer, components.policy.model.config
    prompts = {"prompt": run.asking.prompt}
    if run.evaluation.prompt is not run.asking.prompt:
        prompts["eval.prompt"] = run.evaluation.prompt
    prompts |= {f"eval.sets.{one.name}": one.evaluator.settings.prompt for one in components.sets}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend else sorted(tokenizer.get_vocab().items())
    types = {"products": policy.compute_dtype, "head": policy.head_dtype, "weights": policy.weights}
    facts: dict[str, Any] = {
        "data": {"hash": components.data_hash, "sizes": components.sizes},
        "prompts": {key: hashed(prompt_facts(prompt, tokenizer)) for key, prompt in prompts.items()},
        "model": {
            "name": run.model.name,
            "path": run.model.folder and str(run.model.folder),
            "revision": getattr(config, "_commit_hash", None),  # of one from the hub
            "config": hashed({key: value for key, value in config.to_dict().items() if key not in OF_THE_FILE}),
            "parameters": model_size(policy.model),
            "start_weights": weights_hash(policy.named_weights()),
        },
        "tokenizer": hashed([rules, sorted(tokenizer.all_special_ids), getattr(tokenizer, "chat_template", None)]),
        "engine": {
            "name": run.rollout.engine,
            "max_rows": run.rollout.max_rows,
            "arguments": getattr(components.engine, "arguments", {}),  # of vLLM, defaults included
        },
        "seeds": {leaf.key: leaf.value for leaf in leaves(run) if leaf.key.endswith("seed")},
        "device": {  # and what decides how sums are rounded there
            "type": policy.device.type,
            **{name: str(dtype).removeprefix("torch.") for name, dtype in types.items()},
            "attention": policy.attention,
            "threads": torch.get_num_threads(),
            "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
            "name": torch.cuda.get_device_name(policy.device) if policy.device.type == "cuda" else "",
            "count": torch.cuda.device_count(),
            "cuda": torch.version.cuda,
        },
    }
    for key, sampling in (("sampling", components.sampling), ("eval_sampling", components.evaluator.sampling)):
        ends = sorted(policy.end_ids | sampling.end_ids)  # the model's own, and that of a chat's turn
        facts[key] = asdict(sampling) | {"end_ids": ends}
    facts["eval_sampling"]["samples"] = run.evaluation.samples
    return redacted(facts)
