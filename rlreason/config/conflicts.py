"""Every rule between settings: a function for each class of settings that yields a sentence for each broken rule.

A sentence names the settings with their values, the rule and the cure. A class names its function as `rules`, and
`Settings.problems` adds those of its base classes and groups. What a single field says of itself is in config/rules.py.
"""

import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlreason.config.leaves import locate, may_be_hub_name
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
    low, high = sampling.min_tokens, sampling.max_tokens
    if 1 <= high < low:
        yield f"sampling.min_tokens={low} is above sampling.max_tokens={high}: lower sampling.min_tokens"


def of_prompt(prompt: "groups.PromptConfig") -> Broken:
    """Check the name of the reward."""
    yield from no_reward("prompt.reward", prompt.reward)


def of_rollout(rollout: "groups.RolloutConfig") -> Broken:
    """Check that the engine can sample while the policy is trained, where it must."""
    if rollout.async_level and rollout.engine == "hf":
        yield "rollout.async_level=1 with rollout=hf, which samples from the weights in training: choose rollout=vllm"
    elif rollout.async_level and rollout.sleep and rollout.shares_gpu:
        yield "rollout.async_level=1 needs the engine's memory during training: set rollout.sleep=false"


def of_model(model: "model.ModelConfig") -> Broken:
    """Check number types against each other, and frozen weights against adapters."""
    if model.weights == "bfloat16" and model.dtype == "float32":
        yield "model.dtype=float32 with model.weights=bfloat16 is no more exact: set one of them to the other's type"
    if model.head == "bfloat16" and model.dtype == "float32":
        yield "model.head=bfloat16 with model.dtype=float32: the engine's head would be float32: set model.head=auto"
    if model.freeze and model.lora.rank:
        yield f"model.freeze={list(model.freeze)} with model.lora, which freezes all weights: set model.freeze=[]"


def of_tiny_model(model: "model.TinyModelConfig") -> Broken:
    """Check the width of the heads."""
    if model.heads > 0 and model.width % (2 * model.heads):
        yield f"model.width={model.width} must be a multiple of 2 x model.heads={model.heads}: try 128 and 4"


def of_pretrained_model(model: "model.PretrainedModelConfig") -> Broken:
    """Check that a local path is the folder of a model."""
    looks_local = model.name == "local" or model.path.startswith((".", "/", "~"))
    if looks_local and not (Path(model.folder) / "config.json").is_file():
        yield Absent(f"model.path={model.path} is no model's folder, with a config.json: give one, or a run's folder")


def of_data(data: "data.DataConfig") -> Broken:
    """Check lower against upper bounds, and that the file of pass rates is there."""
    for name in (f.name.removeprefix("min_") for f in fields(data) if f.name.startswith("min_")):
        low, high = getattr(data, f"min_{name}"), getattr(data, f"max_{name}")
        if low > high:
            yield f"data.min_{name}={low} is above data.max_{name}={high}: lower it"
    if data.pass_rates is not None and not Path(data.pass_rates).expanduser().is_file():
        yield Absent(f"data.pass_rates={data.pass_rates} is no file: give the one that algorithm=evaluate wrote")


def of_function(data: "data.FunctionDataConfig") -> Broken:
    """Check that the function can be imported."""
    try:
        load(data.function)
    except NotImportableError as error:
        yield f"data.function={data.function}: {error}"


def of_files(data: "data.FileDataConfig", evaluated: bool = False) -> Broken:
    """Check that the files are there, as far as they are no hub data set's; `evaluated`: those of an evaluation."""
    if data.path is not None and Path(data.path).expanduser().is_file():
        yield f"data.path={data.path} is a file: give .jsonl or .json files as data.train and data.validation"
        return
    held_out = data.n_validation is not None
    if data.validation is not None and held_out:
        yield f"data.validation={data.validation} and data.n_validation={data.n_validation}: set one of them to null"
    unused = "" if not evaluated else "validation" if held_out else "train"
    read = [key for key in ("train", "validation", "ground_truth") if key != unused]
    absent = [line for key in read for line in _absent(data, key, getattr(data, key))]
    yield from absent
    if absent or data.validation is not None or held_out:
        return
    if data.path is None:
        yield "data.validation has no value: give data.validation=FILE, or hold out with data.n_validation=200"
    elif evaluated and not data.evaluation_file():
        is_here = Path(data.path).expanduser().is_dir()
        yield from [nothing_to_evaluate(data)] if is_here else _absent(data, "path", "validation")


def nothing_to_evaluate(data: "data.FileDataConfig") -> str:
    """Return the complaint about a folder of files with nothing to evaluate on."""
    return (
        f"data.path={data.path} holds neither validation nor test: name data.validation, or set data.n_validation=200"
    )


def _absent(data: "data.FileDataConfig", key: str, split: str | None) -> Broken:
    """Complain about a missing file; what a hub holds is checked when it is read."""
    if split is None or locate(data.path, split):
        return
    if data.path is None or Path(split).suffix:
        yield Absent(f"data.{key}={split} is no .jsonl or .json file: give one, or a folder as data.path")
    elif Path(data.path).expanduser().is_dir():
        yield f"data.path={data.path} holds no {split}.jsonl: give another folder, or a file as data.{key}"
    elif not may_be_hub_name(data.path):
        cure = "give a folder with train.jsonl and test.jsonl, a hub name, or files as data.train and data.validation"
        yield Absent(f"data.path={data.path} is no folder: {cure}")


def of_run(run: "run.RunConfig") -> Broken:
    """Check the groups of a run against each other: model, data, prompts, lengths and evaluations."""
    yield from of_evaluation(run)
    corrects = getattr(run, "mismatch", "none") != "none" or getattr(run, "old_from_engine", False)
    if run.monitors.parity == "correct" and not corrects:
        cure = "with GRPO set mismatch=truncate mismatch_cap=2, with another algorithm monitors.parity=warn"
        yield f"monitors.parity=correct needs weights that correct: {cure}"
    groups = (("", run.data, run.prompt, run.sampling), ("eval.", run.eval.data, run.eval.prompt, run.eval.sampling))
    for place, data, prompt, sampling in groups:
        if run.model.made_on_the_spot and data is not None and not data.has_stories:
            cure = f"choose {place}data=stories, or a pretrained model (model=local model.path=DIR)"
            yield f"model=tiny with {place}data={data.name}: the tiny model knows nothing but stories: {cure}"
        if run.model.made_on_the_spot and prompt is not None and prompt.chat:
            cure = f"choose {place}prompt=r1_zero_short, or a pretrained model (model=local model.path=DIR)"
            yield f"{place}prompt.chat=true with model=tiny, which has no chat template: {cure}"
        longest, context, room = sampling.max_tokens, run.model.context, run.micro_batch_tokens
        key = f"{place}sampling.max_tokens={longest}"
        if longest is not None and context is not None and longest >= context:
            yield f"{key} must be below {context}, the tiny model's context, which the prompt shares: lower it"
        elif longest is not None and room <= longest:
            cure = f"raise it (try {2 * longest}), or lower {place}sampling.max_tokens"
            yield f"micro_batch_tokens={room} must be above {key}, to hold a prompt and its whole response: {cure}"


def of_evaluation(run: "run.RunConfig") -> Broken:
    """Check the group `eval` by itself and against the run's other settings."""
    prompt, data, last = run.eval.prompt, run.eval.data, run.eval.final_problems
    if run.eval.reward is not None:
        yield from no_reward("eval.reward", run.eval.reward, "choose one, or null for the prompt's")
    if prompt is not None:
        yield from (as_eval("prompt", line, prompt) for line in prompt.problems())
    if data is not None:
        yield from (as_eval("data", line, data) for line in data.evaluation_problems())
    for key, most in run.bounds().items():
        of_scale = key == "interim_eval_problems" and key not in run.given  # an upper bound
        if most is not None and last is not None and last < most and not of_scale:
            yield f"eval.final_problems={last} is less than {key}={most}, all of which it asks again: raise it"
    sampling, own = run.evaluation.sampling, run.eval.sampling
    if sampling.temperature == 0 and run.answers > 1:
        key = sampling_key(run, "temperature")
        yield f"{key}=0: the {run.answers} responses to a problem would all be equal: set {key}=1, or ask for one each"
    shortest, longest = sampling.min_tokens, sampling.max_tokens
    given = own.min_tokens is not None or own.max_tokens is not None
    if given and 1 <= longest < shortest:  # each number by itself has a range
        low, high = sampling_key(run, "min_tokens"), sampling_key(run, "max_tokens")
        yield f"{low}={shortest} is above {high}={longest}: set eval.sampling.min_tokens={longest} or less"


def of_optimization(settings: "training.OptimizationConfig") -> Broken:
    """Check the sizes of batch and micro-batch, and the number of betas."""
    batch, steps, size = settings.train_batch_size, settings.gradient_accumulation_steps, settings.micro_batch_size
    if len(settings.adam_betas) != 2:
        yield f"adam_betas={list(settings.adam_betas)} must be two numbers: try [0.9,0.95]"
    if steps is not None and (steps < 1 or batch % steps):
        yield f"gradient_accumulation_steps={steps} must divide train_batch_size={batch}: try a power of two, or null"
    elif steps is not None and size is not None and size * steps != batch:
        yield f"gradient_accumulation_steps={steps} x micro_batch_size={size} is not train_batch_size={batch}: set one"


def of_training(run: "training.TrainingConfig") -> Broken:
    """Check the schedule, the ranks, and what learning from samples needs."""
    if run.n_steps is not None:
        yield from of_schedule(run, run.n_steps)
    if run.gpus != "auto" and not (run.gpus.isdecimal() and 1 <= int(run.gpus) <= MOST_RANKS):
        yield f"gpus={run.gpus} must be auto or a number from 1 to {MOST_RANKS}: try gpus=2"
    if run.parallel == "shard" and run.optimizer == "adamw_8bit":
        yield "parallel=shard with optimizer=adamw_8bit, whose moments cannot be spread: choose optimizer=adamw"
    if run.parallel == "shard" and run.model.weights == "bfloat16":
        yield "parallel=shard with model.weights=bfloat16: the head stays float32: set model.weights=float32"
    if run.rollout.async_level and not run.samples_ahead:
        yield f"rollout.async_level=1 with algorithm={run.algorithm}: only GRPO can correct for it: set it to 0"
    if run.budget.tokens is not None and not run.samples_to_learn:
        limit = f"budget.tokens={run.budget.tokens} with algorithm={run.algorithm}"
        yield f"{limit}, which samples none to learn from: set budget.steps or budget.hours"
    if run.samples_to_learn and run.sampling.temperature == 0:
        yield "sampling.temperature=0.0: learning from samples needs different ones, so it must be above 0: try 1.0"


def of_schedule(run: "training.TrainingConfig", n_steps: int) -> Broken:
    """Complain about a learning rate that never reaches its peak in this many steps."""
    whole = 1 if run.restarts else n_steps  # steps of one schedule
    if run.warmup_steps > whole:
        anew = ", and restart=true starts the rate anew in each step" if run.restarts else ""
        yield f"warmup_steps={run.warmup_steps} is more than the {n_steps} steps of the run{anew}: lower it"


def of_sft(run: "algorithms.SFTConfig") -> Broken:
    """Check that the length of the run is given once."""
    if (run.n_steps is None) == (run.epochs is None):
        yield f"n_steps={run.n_steps} and epochs={run.epochs}: one must be null, as in epochs=3 n_steps=null"


def of_grpo(run: "algorithms.GRPOConfig") -> Broken:
    """Check the sizes of batch and group, and what the objective needs from samples."""
    yield from not_multiple(run, "rollout_batch_size", "group_size")
    yield from not_multiple(run, "rollout_batch_size", "train_batch_size")
    if run.group_size < 2 and run.baseline != "none":
        yield f"group_size=1 with baseline={run.baseline} has advantage 0: use group_size=8, or loss=no_baseline"
    if run.max_resampling_rounds and run.baseline == "none":
        rounds = run.max_resampling_rounds
        yield f"max_resampling_rounds={rounds} with baseline=none, where groups of equal rewards count: set it to 0"
    if run.rollout.async_level and run.mismatch == "none" and not run.has_ratio:
        stale = f"rollout.async_level=1 with loss={run.loss.loss_type}, which takes its samples for fresh"
        yield f"{stale}: set mismatch=truncate mismatch_cap=2, or choose loss=grpo_clip"
    if run.rollout.async_level and run.kl_placement == "reward":
        yield "rollout.async_level=1 with kl_placement=reward: the sampler's weights have moved: set kl_placement=loss"
    cache, longest = run.overlong_cache, run.sampling.max_tokens
    if cache is not None and cache > longest:
        yield f"overlong_cache={cache} is more than sampling.max_tokens={longest}: try null"


def of_eval_job(run: "algorithms.EvalJobConfig") -> Broken:
    """Check that the asked split is that of one data set."""
    if run.split == "train" and run.eval.data is not None:
        yield f"split=train with eval.data, whose validation problems are asked: choose data={run.eval.data.name}"


def of_best_of_n(run: "algorithms.BestOfNConfig") -> Broken:
    """Check the numbers N, the number of responses and the scorer."""
    numbers, samples = list(run.n_list), run.samples
    if not numbers or numbers != sorted(set(numbers)):
        yield f"n_list={numbers} must hold numbers in rising order, once each: try [1,4,8]"
    elif samples is not None and 0 < samples < max(numbers):
        yield f"samples={samples} is less than the best of {max(numbers)} in n_list={numbers} needs: set it to null"
    if run.scorer is not None and not names_function(run.scorer):
        yield f"scorer={run.scorer} must be module:function, as in scorer=my_scores:length, or null"


def of_discovery(run: "algorithms.DiscoverConfig") -> Broken:
    """Check the budgets, their prices and the client's request."""
    budget, client = run.budget, run.client
    if all(bound is None for bound in vars(budget).values()):
        yield "budget.calls=null, and no other budget is set: a run needs an end: try budget.calls=20"
    if budget.cost is not None and (client.prompt_price is None or client.completion_price is None):
        yield f"budget.cost={budget.cost:g} needs client.prompt_price and client.completion_price: set both"
    if budget.tokens is not None and budget.tokens <= client.max_tokens:
        yield f"budget.tokens={budget.tokens} is not above client.max_tokens={client.max_tokens}, one reply's: raise it"
    extra = client.extra
    if extra is not None and not isinstance(extra, dict):
        yield f"client.extra={extra} must be a mapping or null: try client.extra={{top_p: 0.95}}"
    elif reserved := [name for name in OF_THE_RUN if (extra or {}).get(name) is not None]:
        yield f"client.extra={extra} sets {reserved[0]}, which the run itself decides: leave it out"
