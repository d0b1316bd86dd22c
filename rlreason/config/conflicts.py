"""Every rule between settings: a function for each class of settings that yields a sentence for each broken rule.

A sentence names the settings with their values, the rule and the cure. A class names its function as `rules`, and
`Settings.problems` adds those of its base classes and groups. What a single field says of itself is in config/rules.py.
"""

import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlreason.config.leaves import SUFFIXES, describe_format, locate, may_be_hub_name, unread_format
from rlreason.errors import Absent
from rlreason.runtime.plugins import NotImportableError, load, names_function, no_reward
from rlreason.settings import MADE

if TYPE_CHECKING:
    from rlreason.config import algorithms, data, groups, model, run, training

Broken = Iterator[str]
MOST_RANKS = 1024
OF_THE_RUN = ("model", "messages", "n", "max_tokens")  # parts of a request that the run decides itself


def not_multiple(run: Any, larger: str, smaller: str) -> Broken:
    """Complain if one setting is no positive multiple of another; both by their names."""
    a, b = getattr(run, larger), getattr(run, smaller)
    if b <= 0 or a < b or a % b:
        divisor = next((d for d in range(min(a, b, MADE), 0, -1) if a % d == 0), 1)
        yield f"{larger}={a} must be a positive multiple of {smaller}={b}: try {smaller}={divisor}"


def as_eval(group: str, text: str, settings: Any) -> str:
    """Rewrite a text about `prompt` or `data` settings for `eval.prompt` or `eval.data`, which have the same keys.

    >>> from rlreason.config.data import StoriesConfig
    >>> as_eval("data", "data.n_train=0 in data.jsonl", StoriesConfig())
    'eval.data.n_train=0 in data.jsonl'
    """
    names = "|".join(f.name for f in fields(settings))
    return type(text)(re.sub(rf"(?<![\w./]){group}(?=\.(?:{names})\b|=)", f"eval.{group}", text))


def sampling_key(run: "run.RunConfig", name: str) -> str:
    """Return the setting that a number of evaluations' sampling comes from, as it is typed."""
    return f"{'eval.' if getattr(run.eval.sampling, name) is not None else ''}sampling.{name}"


def of_sampling(sampling: "groups.SamplingConfig") -> Broken:
    """Check the two limits on a response's length."""
    if 1 <= sampling.max_tokens < sampling.min_tokens:
        yield (
            f"sampling.min_tokens={sampling.min_tokens}, sampling.max_tokens={sampling.max_tokens}: min <= max must "
            "hold: lower sampling.min_tokens"
        )


def of_prompt(prompt: "groups.PromptConfig") -> Broken:
    """Check the stop strings and the name of the reward."""
    if "" in prompt.stop:
        yield "prompt.stop holds an empty text, which stands everywhere: give stop strings, or prompt.stop=[]"
    yield from no_reward("prompt.reward", prompt.reward)


def of_rollout(rollout: "groups.RolloutConfig") -> Broken:
    """Check that the engine can sample while the policy is trained, where it must."""
    if rollout.async_level and rollout.engine == "hf":
        yield (
            "rollout.async_level=1 with rollout=hf: the in-process engine samples from the very weights that are "
            "being trained; set it to 0, or choose rollout=vllm"
        )
    if rollout.async_level and rollout.engine == "vllm" and rollout.sleep and rollout.shares_gpu:
        yield (
            "rollout.async_level=1 with rollout.sleep=true: an engine that samples during training cannot give "
            "its memory away; set rollout.sleep=false"
        )


def of_lora(lora: "model.LoRAConfig") -> Broken:
    """Check that adapters have a place."""
    if lora.targets is not None and not lora.targets:
        yield "model.lora.targets=[] adapts nothing: name layers, or null for every linear layer but the head"


def of_model(model: "model.ModelConfig") -> Broken:
    """Check number types against each other, and frozen weights against adapters."""
    if model.weights == "bfloat16" and model.dtype == "float32":
        yield (
            "model.dtype=float32 with model.weights=bfloat16: products cannot be more exact than their weights: "
            "set model.dtype=auto, or model.weights=float32"
        )
    if model.head == "bfloat16" and model.dtype == "float32":
        yield (
            "model.head=bfloat16 with model.dtype=float32: the engine's head multiplies as its other layers do, in "
            "float32: set model.head=auto, or model.dtype=bfloat16"
        )
    if model.freeze and model.lora.rank:
        yield (
            f"model.freeze={list(model.freeze)} with model.lora.rank={model.lora.rank}: adapters leave all weights "
            "of the model frozen already: set model.freeze=[], and say where adapters go by model.lora.targets"
        )


def of_tiny_model(model: "model.TinyModelConfig") -> Broken:
    """Check the width of the heads, and the folder of the cache."""
    if model.heads > 0 and model.width % (2 * model.heads):
        yield (
            f"model.width={model.width} must be a multiple of 2 x model.heads={model.heads}: try model.width=128 "
            "model.heads=4"
        )
    if model.cache == "":
        yield "model.cache= names no folder: give one, or auto, or null to make the model anew each time"


def of_pretrained_model(model: "model.PretrainedModelConfig") -> Broken:
    """Check that a local path is the folder of a model."""
    looks_local = model.name == "local" or model.path.startswith((".", "/", "~"))
    if looks_local and not (Path(model.folder) / "config.json").is_file():
        state = "has no config.json" if Path(model.folder).is_dir() else "is no folder"
        cure = "give a model folder in transformers' format, or a run's folder"
        yield Absent(f"model.path={model.path} {state}: {cure}")


def of_data(data: "data.DataConfig") -> Broken:
    """Check lower against upper bounds, and that the file of pass rates is there."""
    for name in data.bounded:
        low, high = getattr(data, f"min_{name}"), getattr(data, f"max_{name}")
        if low > high:
            yield f"data.min_{name}={low} and data.max_{name}={high}: min <= max must hold: lower the first"
    if data.pass_rates is not None and not Path(data.pass_rates).expanduser().is_file():
        cure = "give the one that algorithm=evaluate wrote"
        yield Absent(f"data.pass_rates={data.pass_rates} is no file: {cure}")


def of_stories(data: "data.StoriesConfig") -> Broken:
    """Check the numbers of the stories, and the habits that the warm start teaches."""
    if not 2 <= data.max_value <= 99:
        yield f"data.max_value={data.max_value} must lie in 2..99: numbers have at most two digits"
    habits = data.habits
    if habits.taught_max_events is not None and habits.taught_max_events < data.min_events:
        yield (
            f"data.habits.taught_max_events={habits.taught_max_events} is below data.min_events={data.min_events}, "
            f"and leaves the warm start no story: set it to {data.min_events} or more, or to null for all"
        )
    if habits.guess_share and data.guess == "none":
        yield (
            f"data.habits.guess_share={habits.guess_share} with data.guess=none: no story tells a guess to repeat: "
            "set it to 0, or data.guess=right_in_training"
        )


def of_countdown(data: "data.CountdownConfig") -> Broken:
    """Check the format of the file."""
    if data.path is not None and (other := unread_format(None, data.path)):
        yield f"data.path={data.path}: {other}"


def of_gym(data: "data.GymConfig") -> Broken:
    """Check the names of the tasks."""
    names = data.tasks
    if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
        yield f"data.task={data.task} must be a task's name or a list of names (data.task=[leg_counting,gcd])"
    elif len(set(names)) < len(names):
        yield f"data.task={names} names a task twice: name it once"


def of_function(data: "data.FunctionDataConfig") -> Broken:
    """Check that the function can be imported and takes its options."""
    try:
        function = load(data.function)
    except NotImportableError as error:
        yield f"data.function={data.function}: {error}"
        return
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have no signature
        return
    try:
        signature.bind(**data.options)
    except TypeError as error:
        yield f"data.options={data.options}: {data.function}{signature} does not take them ({error}): fix them"


def of_files(data: "data.FileDataConfig", evaluated: bool = False) -> Broken:
    """Check that the files are there, as far as they are no hub data set's; `evaluated`: those of an evaluation."""
    folder = None if data.path is None else Path(data.path).expanduser()
    if folder is not None and folder.is_file():
        given = describe_format(Path(str(data.path))) if locate(None, str(data.path)) is None else "is a file"
        yield f"data.path={data.path}: {given}: give files as data.train and data.validation"
        return
    if data.validation is not None and data.n_validation is not None:
        yield f"data.validation={data.validation} and data.n_validation={data.n_validation}: set one of them to null"
    read = ["train", "validation", "ground_truth"]
    if evaluated:
        read.remove("train" if data.n_validation is None else "validation")
    absent = [line for key in read for line in _absent(data, key, getattr(data, key))]
    yield from absent
    if absent or data.validation is not None or data.n_validation is not None:
        return
    if folder is None:
        yield "data.validation has no value: give data.validation=FILE, or hold out with data.n_validation=200"
    elif evaluated and not data.evaluation_file():
        yield from [nothing_to_evaluate(data)] if folder.is_dir() else _absent(data, "path", "validation")


def nothing_to_evaluate(data: "data.FileDataConfig") -> str:
    """Return the complaint about a folder of files with nothing to evaluate on."""
    if other := unread_format(data.path, "validation") or unread_format(data.path, "test"):
        return f"data.path={data.path}: {other}"
    return (
        f"data.path={data.path} holds neither validation nor test: name one with data.validation, or hold out some "
        "of train with data.n_validation=200"
    )


def _absent(data: "data.FileDataConfig", key: str, split: str | None) -> Broken:
    """Complain about a missing file; what a hub holds is checked when it is read."""
    if split is None or locate(data.path, split):
        return
    if other := unread_format(data.path, split):
        yield f"data.{key}={split}: {other}"
    elif data.path is None or Path(split).suffix in SUFFIXES[1:]:
        yield Absent(f"data.{key}={split} is no file: give a .jsonl or .json file, or a folder as data.path")
    elif Path(data.path).expanduser().is_dir():
        yield f"data.path={data.path} holds no {split}.jsonl: give another folder, or a file as data.{key}"
    elif not may_be_hub_name(data.path):
        cure = "give a folder with train.jsonl and test.jsonl, a hub name, or files as data.train and data.validation"
        yield Absent(f"data.path={data.path} is no folder: {cure}")


def of_run(run: "run.RunConfig") -> Broken:
    """Check the groups of a run against each other: model, data, prompts, lengths and evaluations."""
    yield from of_evaluation(run)
    if run.monitors.parity == "correct" and not run.corrects_mismatch:
        yield (
            "monitors.parity=correct needs weights that correct: with GRPO set mismatch=truncate mismatch_cap=2, "
            "with another algorithm monitors.parity=warn"
        )
    tiny = run.model.made_on_the_spot
    for key, data in (("data", run.data), ("eval.data", run.eval.data)):
        if tiny and data is not None and not data.has_stories:
            yield (
                f"model=tiny with {key}={data.name}: the tiny model knows nothing but stories: choose "
                f"{key}=stories, or a pretrained model (model=local model.path=DIR)"
            )
    for key, prompt in (("prompt", run.prompt), ("eval.prompt", run.eval.prompt)):
        if tiny and prompt is not None and prompt.chat:
            yield (
                f"{key}.chat=true with model=tiny: a model made on the spot has no chat template: choose a "
                f"pretrained instruct model (model=local model.path=DIR), or {key}=r1_zero_short"
            )
    context = run.model.context
    for key, sampling in (("sampling", run.sampling), ("eval.sampling", run.eval.sampling)):
        longest = sampling.max_tokens
        if longest is not None and context is not None and longest >= context:
            yield (
                f"{key}.max_tokens={longest} must be below {context}, the tiny model's context, which the prompt "
                "shares: lower it"
            )
        elif longest is not None and run.micro_batch_tokens <= longest:
            yield (
                f"micro_batch_tokens={run.micro_batch_tokens} must be above {key}.max_tokens={longest}, so that a "
                f"prompt and its whole response fit: raise it (try {2 * longest}), or lower {key}.max_tokens"
            )


def of_evaluation(run: "run.RunConfig") -> Broken:
    """Check the group `eval` by itself and against the run's other settings."""
    prompt, data = run.eval.prompt, run.eval.data
    if run.eval.reward is not None:
        yield from no_reward("eval.reward", run.eval.reward, "choose one, or null for the prompt's")
    if prompt is not None:
        yield from (as_eval("prompt", line, prompt) for line in prompt.problems())
    if data is not None:
        yield from (as_eval("data", line, data) for line in data.evaluation_problems())
    most, last = run.problem_limit, run.eval.final_problems
    if most is not None and last is not None and last < most:
        key = "eval_problems" if run.eval.problems is None else "eval.problems"  # as it was given
        yield (
            f"eval.final_problems={last} is less than {key}={most}, all of which it asks again: raise it, "
            f"or lower {key}"
        )
    sampling, own = run.evaluation.sampling, run.eval.sampling
    if sampling.greedy and run.answers > 1:
        key, (count, single) = sampling_key(run, "temperature"), run.counted
        yield f"{key}=0 with {count}: the responses to a problem would all be equal: set {key}=1, or {single}"
    shortest, longest = sampling.min_tokens, sampling.max_tokens
    given = own.min_tokens is not None or own.max_tokens is not None
    if given and 1 <= longest < shortest:  # each number by itself has a range
        yield (
            f"{sampling_key(run, 'min_tokens')}={shortest} and {sampling_key(run, 'max_tokens')}={longest}: min <= max "
            f"must hold: set eval.sampling.min_tokens={longest} or less, or raise eval.sampling.max_tokens"
        )


def of_optimization(settings: "training.OptimizationConfig") -> Broken:
    """Check the sizes of batch and micro-batch, and the number of betas."""
    steps, size = settings.gradient_accumulation_steps, settings.micro_batch_size
    if len(settings.adam_betas) != 2:
        yield f"adam_betas={list(settings.adam_betas)} must be two numbers: try [0.9,0.95]"
    if steps is not None and (steps < 1 or settings.train_batch_size % steps):
        yield (
            f"gradient_accumulation_steps={steps} must divide train_batch_size={settings.train_batch_size}: "
            "try a power of two, or leave it out (micro_batch_tokens decides)"
        )
    elif steps is not None and size is not None and size * steps != settings.train_batch_size:
        yield (
            f"gradient_accumulation_steps={steps} x micro_batch_size={size} is not train_batch_size="
            f"{settings.train_batch_size}: set one of the two and leave the other null"
        )


def of_training(run: "training.TrainingConfig") -> Broken:
    """Check the schedule, the ranks, and what learning from samples needs."""
    if run.n_steps is not None:
        yield from of_schedule(run, run.n_steps)
    if run.gpus != "auto" and not (run.gpus.isdecimal() and 1 <= int(run.gpus) <= MOST_RANKS):
        yield f"gpus={run.gpus} must be auto or a number from 1 to {MOST_RANKS}: try gpus=2"
    if run.parallel == "shard" and run.optimizer == "adamw_8bit":
        yield (
            "parallel=shard with optimizer=adamw_8bit: its moments cannot be spread over ranks: choose "
            "optimizer=adamw, whose moments are, or parallel=replicate"
        )
    if run.parallel == "shard" and run.model.weights == "bfloat16":
        yield (
            "parallel=shard with model.weights=bfloat16: the output head stays float32, and the parts of a group "
            "must be of one type: set model.weights=float32, which the ranks divide, or parallel=replicate"
        )
    if run.rollout.async_level and not run.samples_ahead:
        yield f"rollout.async_level=1 with algorithm={run.algorithm}: only GRPO can correct for it: set it to 0"
    if run.budget.tokens is not None and not run.samples_to_learn:
        yield (
            f"budget.tokens={run.budget.tokens} with algorithm={run.algorithm}: it counts sampled tokens, and "
            "here nothing is sampled to learn from: set budget.steps or budget.hours"
        )
    if run.samples_to_learn and run.sampling.greedy:
        yield (
            f"sampling.temperature={run.sampling.temperature}: learning from samples needs different ones, so it "
            "must be above 0: try 1.0"
        )


def of_schedule(run: "training.TrainingConfig", n_steps: int) -> Broken:
    """Complain about a learning rate that never reaches its peak, or never falls, in this many steps."""
    falls = run.lr_schedule in ("linear", "cosine")
    if run.restarts and run.warmup_steps > 1:
        yield (
            f"warmup_steps={run.warmup_steps} with restart=true: each step starts its learning rate anew, so it "
            "would never be reached: set warmup_steps=0, or 1 to let the rate rise over the whole of each step"
        )
    elif run.restarts and run.warmup_steps == 1 and falls:
        yield (
            f"lr_schedule={run.lr_schedule} with warmup_steps=1 and restart=true: the rate rises over the whole "
            "of each step and never falls: set warmup_steps=0, or lr_schedule=constant"
        )
    elif run.warmup_steps > n_steps and not run.restarts:
        many = f"the run's {n_steps} steps" if run.n_steps is None else f"n_steps={n_steps}"
        yield f"warmup_steps={run.warmup_steps} is more than {many}: lower it"
    elif run.warmup_steps == n_steps > 0 and falls and not run.restarts:
        yield (
            f"lr_schedule={run.lr_schedule} with warmup_steps={run.warmup_steps}: the rate rises over all of the "
            f"{n_steps} steps and never falls: lower warmup_steps, or set lr_schedule=constant"
        )


def of_sft(run: "algorithms.SFTConfig") -> Broken:
    """Check that the length of the run is given once."""
    if (run.n_steps is None) == (run.epochs is None):
        yield (
            f"n_steps={run.n_steps} and epochs={run.epochs}: set one and leave the other null "
            "(epochs=3 n_steps=null, or n_steps=100 epochs=null)"
        )


def of_grpo(run: "algorithms.GRPOConfig") -> Broken:
    """Check the sizes of batch and group, and what the objective needs from samples."""
    yield from not_multiple(run, "rollout_batch_size", "group_size")
    yield from not_multiple(run, "rollout_batch_size", "train_batch_size")
    if run.group_size < 2 and run.baseline != "none":
        yield (
            f"group_size={run.group_size} with baseline={run.baseline}: a response is compared with its "
            "group, and a group of one always gives advantage 0: use group_size=8, or loss=no_baseline"
        )
    if run.max_resampling_rounds and run.baseline == "none":
        yield (
            f"max_resampling_rounds={run.max_resampling_rounds} with baseline=none: groups of equal rewards have "
            "advantages there and need no replacement: set it to 0"
        )
    if run.rollout.async_level and run.mismatch == "none" and not run.has_ratio:
        yield (
            f"rollout.async_level=1 with loss={run.loss.loss_type}: samples are one weight sync old, and this "
            "loss takes them for fresh: set mismatch=truncate mismatch_cap=2, or choose loss=grpo_clip"
        )
    if run.rollout.async_level and run.kl_placement == "reward":
        yield (
            "rollout.async_level=1 with kl_placement=reward: the policy that sampled cannot be scored while its "
            "weights move: set kl_placement=loss, or rollout.async_level=0"
        )
    cache = run.overlong_cache
    if cache is not None and cache > run.sampling.max_tokens:
        yield f"overlong_cache={cache} is more than sampling.max_tokens={run.sampling.max_tokens}: try null"


def of_eval_job(run: "algorithms.EvalJobConfig") -> Broken:
    """Check that the asked split is that of one data set."""
    if run.split == "train" and run.eval.data is not None:
        yield (
            f"split=train with eval.data={run.eval.data.name}: eval.data says whose validation problems are "
            f"asked: choose data={run.eval.data.name} instead, or split=validation"
        )


def of_best_of_n(run: "algorithms.BestOfNConfig") -> Broken:
    """Check the numbers N, the number of responses and the scorer."""
    sound = [n for n in run.n_list if n >= 1]
    if sound != sorted(set(run.n_list)) or not sound:
        cure = f"[{','.join(map(str, sorted(set(sound)) or [1, 4, 8]))}]"
        rule = "must hold numbers from 1 on, in rising order, once each"
        yield f"n_list={list(run.n_list)} {rule}: try n_list={cure}"
    elif run.samples is not None and 0 < run.samples < max(sound):
        most = max(sound)
        yield (
            f"n_list={list(run.n_list)} asks for the best of {most}, and samples={run.samples} gives fewer: "
            f"set samples={most} or null, or take {most} out of n_list"
        )
    if run.scorer is not None and not names_function(run.scorer):
        yield f"scorer={run.scorer} must be module:function, as in scorer=my_scores:length, or null"


def of_discovery(run: "algorithms.DiscoverConfig") -> Broken:
    """Check the budgets, their prices and the client's request."""
    budget, client = run.budget, run.client
    if all(bound is None for bound in vars(budget).values()):
        yield "budget.calls=null, and no other budget is set: a run needs an end: try budget.calls=20"
    if budget.cost is not None and (client.prompt_price is None or client.completion_price is None):
        yield (
            f"budget.cost={budget.cost:g} needs client.prompt_price and client.completion_price, the prices "
            "of a million tokens: set both"
        )
    if budget.tokens is not None and budget.tokens <= client.max_tokens:
        yield (
            f"budget.tokens={budget.tokens} must be above client.max_tokens={client.max_tokens}, which one reply may "
            "take: raise it, or lower client.max_tokens"
        )
    url, extra = client.base_url, client.extra
    if url is not None and not url.startswith(("http://", "https://")):
        yield f"client.base_url={url} must begin with http:// or https://: try client.base_url=http://{url}"
    if extra is not None and not isinstance(extra, dict):
        yield f"client.extra={extra} must be a mapping or null: try client.extra={{top_p: 0.95}}"
    elif reserved := sorted(name for name in OF_THE_RUN if (extra or {}).get(name) is not None):
        yield f"client.extra={extra} sets {reserved[0]}, which the run itself decides: leave it out"
