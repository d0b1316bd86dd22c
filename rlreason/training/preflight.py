"""Check a run before anything slow is loaded: templates, packages, the user's functions, disk, memory."""

import importlib.util
import math
import shutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rlreason.config.data import GymConfig
from rlreason.config.groups import WITHOUT_VLLM
from rlreason.config.leaves import leaves, needs, template_of
from rlreason.config.run import RunConfig, each_prompt, judges
from rlreason.data.prepare import load_data
from rlreason.errors import ConfigError, EngineError, ResourceError
from rlreason.grading import Grader
from rlreason.grading.grader import reward_name_of
from rlreason.model.memory import PROMPT, moment_bytes, shape_of, trained_numbers, weight_bytes
from rlreason.model.plan import conclusion, planned
from rlreason.objectives.losses import broken_contract
from rlreason.runtime.machine import Device, believed_device
from rlreason.runtime.plugins import written_source
from rlreason.runtime.text import first_line, size

CHARACTERS = 3  # at least, in a token of prose


def assumed_prompt(run: RunConfig) -> int | None:
    """Estimate the tokens of a prompt not yet measured: of a question and of its template.

    None for a built-in model, whose prompts are short.
    """
    if run.model.made_on_the_spot:
        return None
    prompts = [run.asking.prompt, *(one.evaluation.prompt for one in (run, *run.by_set().values()))]
    return PROMPT + max(math.ceil(len(template_of(prompt.file)) / CHARACTERS) for prompt in prompts)


#: Messages of torch, and of vLLM if its cache has no room or another program holds the GPU.
SIGNS = ("out of memory", "No available memory for the cache blocks", "less than desired GPU memory utilization")


def lacking(run: RunConfig, error: BaseException) -> ConfigError | None:
    """Return the one-line error to end with; None if `error` is not about memory, or an operation of Apple's GPU."""
    if run.device == "mps" and isinstance(error, NotImplementedError):
        cure = "set PYTORCH_ENABLE_MPS_FALLBACK=1, with which the processor computes it, or device=auto"
        return ConfigError(f"device=mps: {first_line(error).rstrip('.')}: {cure}")
    text = "".join(traceback.format_exception(error))  # with the errors behind it
    # Also torch's OutOfMemoryError, without importing torch; a processor's MemoryError has its own message.
    if not isinstance(error, EngineError | RuntimeError) or not any(sign in text for sign in SIGNS):
        return None
    return ResourceError(
        f"out of memory: lower micro_batch_tokens={run.micro_batch_tokens} or rollout.max_rows={run.rollout.max_rows}, "
        "set model.gradient_checkpointing=true, or end other programs on the GPU (rlreason plan shows what takes how "
        "much)"
    )


RECORDS = 2**20  # bytes of config, metrics and curves, which every run writes

PER_TOKEN = 30  # bytes of a response token in a record: its id, two log-probabilities, its text
PER_RESPONSE = 2000  # bytes besides them: question, prompt, grade


class Space(NamedTuple):
    """Bytes on disk: of the saved model, which is certain; and at most, while the run is going and after its end."""

    model: int
    peak: int
    left: int


def space_needed(run: RunConfig) -> Space:
    """Estimate what a run writes besides small files. A model of unknown shape counts as 0."""
    shape, checkpoint = shape_of(run.model)[0], getattr(run, "checkpoint", None)
    model = moments = 0
    if shape:
        per_weight, lora = 2 if run.model.weights == "bfloat16" else 4, run.model.lora
        model = weight_bytes(shape, per_weight)
        if run.optimizes_by:
            trained = trained_numbers(shape, per_weight, run.model.freeze, lora.rank, lora.targets)
            moments = moment_bytes(*trained, run.optimizes_by)
    longest = max(one.evaluation.sampling.max_tokens for one in (run, *run.by_set().values()))
    longest = max(run.sampling.max_tokens, longest)
    saved, most = model if getattr(run, "save_model", False) else 0, run.checkpoints_at_once
    # Most responses end before the limit.
    certain = saved + run.responses_saved() * (PER_RESPONSE + PER_TOKEN * (longest // 2))
    kept = min(2, most) * (model + (moments if checkpoint and checkpoint.keep_final else 0))
    return Space(saved, certain + most * (model + moments), certain + max(kept - saved, 0))  # the newest shares files


GO_ON = "model.check_memory=false starts it all the same (rlreason plan shows the parts)"


def memory_for(runs: Sequence[RunConfig], device: Device) -> list[str]:
    """Return the memory plan where it is tight.

    A run that certainly needs more than its GPU has is refused, unless model.check_memory=false; of a sweep, whose runs
    may get another GPU than the first, more than that has in total.
    """
    on_gpu = device.kind == "cuda"
    if on_gpu and len(runs) > 1:
        device = replace(device, free=device.total, second_free=None)
    tight = list[str]()
    for run in runs:
        plan = planned(run, device, assumed_prompt(run))
        text = f"memory: {conclusion(plan)}"
        if on_gpu and run.model.check_memory and plan.verdict == "too large":
            raise ConfigError(f"{text}; {GO_ON}")
        if plan.verdict != "fits" and (on_gpu or plan.verdict != "unknown") and text not in tight:
            tight.append(text)
    return tight


def own_functions(run: RunConfig) -> dict[str, str]:
    """Return `module:function` -> the setting that names it, of every function of the user's own."""
    keys = {leaf.value: leaf.key for leaf in reversed([*leaves(run)]) if leaf.key.endswith(".reward")}  # the first
    functions = {}
    for reward, data in judges(run):
        if ":" in reward:  # it also grades data with a verifier
            functions[reward] = f"{keys[reward]}={reward}"
        elif data.verifier:
            key = next(key for key, read in {"data": run.data, **run.data_read()}.items() if read is data)
            functions[reward_name_of(reward, data)] = f"{key}.verifier={data.verifier}"
    if scorer := getattr(run, "scorer", None):
        functions[scorer] = f"scorer={scorer}"
    return functions


def own_sources(run: RunConfig) -> dict[str, str]:
    """Return setting -> source of every function recorded with a run: graders, the loss, data generators."""
    named = own_functions(run)
    for key, data in run.data_read().items():
        if hasattr(data, "function"):
            named.setdefault(data.function, f"{key}={data.function}")
    if run.own_loss:
        named[run.own_loss] = f"loss={run.own_loss}"
    return {setting: written_source(name) for name, setting in named.items() if not name.startswith("rlreason.")}


def missing_packages(run: RunConfig) -> list[str]:
    """Return a message for each package that this run needs and that is not installed. Nothing is imported."""
    needed = {name: needs(f"logger={name}", name) for name in run.logger.chosen}  # package -> message
    if run.rollout.engine == "vllm":
        needed["vllm"] = WITHOUT_VLLM
    if run.trains and run.model.lora.rank > 0:
        needed["peft"] = needs(f"model.lora.rank={run.model.lora.rank}", "peft")
    if run.optimizes_by == "adamw_8bit":
        needed["bitsandbytes"] = needs("optimizer=adamw_8bit", "bitsandbytes")
    for key, data in run.data_read().items():
        if data.on_hub:
            setting = f"{key}.path={getattr(data, 'path', '')} is no folder here, and reading it from the hub"
            needed["datasets"] = needs(setting, "datasets")
        if isinstance(data, GymConfig):
            needed["reasoning_gym"] = needs(f"{key}={data.name}", "reasoning_gym")
    return [message for package, message in needed.items() if importlib.util.find_spec(package) is None]


def preflight(runs: Sequence[RunConfig], folder: Path) -> list[str]:
    """Refuse runs that could not start, those of a sweep together; return warnings.

    `folder` is where they will write; it need not exist.
    """
    bad = [line for run in runs for line in mistakes_of(run)]
    named = {
        pair: run.grading for run in runs for pair in own_functions(run).items()
    }  # each is tried once for all runs
    for (name, setting), grading in named.items():
        with Grader(replace(grading, workers=1), name) as grader:  # loaded in a process of its own
            if why := grader.wait():
                bad.append(f"{setting}: {why}")
    if bad:
        raise ConfigError("\n".join(dict.fromkeys(bad)))
    for run in {repr((run.data, run.eval)): run for run in reversed(runs)}.values():  # data of each kind once
        if run.data.filter == "none" and all(data.quickly_read for data in run.data_read().values()):
            load_data(run, say=lambda line: None)  # for its errors; messages are printed when the run itself reads it
    return room_for(runs, folder) + memory_for(runs, believed_device())


def mistakes_of(run: RunConfig) -> list[str]:
    """Return errors in the prompts' templates, what the machine lacks, what is wrong with the user's own loss."""
    errors = missing_packages(run)
    if run.device == "mps" and sys.platform != "darwin":
        errors.append("device=mps: no GPU of Apple's is here: set device=auto")
    try:
        template_of(run.prompt.file)  # also for a warm start alone
        each_prompt(run, lambda prompt: template_of(prompt.file))
    except ConfigError as error:
        errors.insert(0, str(error))
    loss = getattr(run, "loss", None)
    if run.own_loss and loss and (why := broken_contract(loss.loss_type, loss.numbers())):
        errors.append(why)
    return errors


def room_for(runs: Sequence[RunConfig], folder: Path) -> list[str]:
    """Refuse runs that certainly do not fit on the disk; warn about those that may not."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free, spaces = shutil.disk_usage(place).free, [space_needed(run) for run in runs]
    surely = sum(space.model + RECORDS for space in spaces)
    at_most = sum(space.left + RECORDS for space in spaces) + max((s.peak - s.left for s in spaces), default=0)
    cure = "free some space, choose another hydra.run.dir, or keep less (save_model, checkpoint.keep)"
    if free < surely:
        raise ResourceError(f"{place} has {size(free)} free, and this writes at least {size(surely)}: {cure}")
    if free < at_most:
        return [f"{place} has {size(free)} free, and this may write {size(at_most)}: {cure}"]
    return []
