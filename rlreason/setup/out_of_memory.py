"""A run that a GPU's memory did not suffice for ends in one line: what was being done, the plan, and what helps."""

from collections.abc import Iterator
from dataclasses import replace

from rlreason.config.run import RunConfig
from rlreason.errors import EngineError, ResourceError
from rlreason.memory.fitting import next_saving
from rlreason.memory.machine import Device, believed_device, size
from rlreason.memory.words import Planned, cure, planned
from rlreason.setup.fits import assumed_prompt

#: How others say it: torch, and vLLM where its cache has no room, or another program holds the GPU.
SIGNS = ("out of memory", "No available memory for the cache blocks", "less than desired GPU memory utilization")
#: What is done while the engine's memory is in use, as the run's waits call it.
OF_SAMPLING = ("starting the engine", "sampling", "evaluati", "handing the weights", "validation")


def out_of_memory(run: RunConfig, error: BaseException, device: Device | None = None) -> ResourceError | None:
    """The error to end with, in one line; None where this one is no lack of GPU memory.

    `device`: where the run computes; None: as far as can be told without torch.
    """
    causes = list(_causes(error))
    if not any(_is_one(cause) for cause in causes):
        return None
    device = device or believed_device()
    whole = replace(device, free=device.total)  # what is free now is what this very run has left
    doing = next((note for cause in causes for note in getattr(cause, "__notes__", []) if note.startswith(NOTE)), "")
    what = doing.removeprefix(NOTE)
    sampling = any(str(cause).startswith("rollout=vllm") for cause in causes) or _samples(what)
    told = planned(run, whole, assumed_prompt(run))
    words = f"out of memory{f' in {what}' if what else ''}: {_plan_in_words(told)}"
    return ResourceError(f"{words}: {_cure(run, told, sampling)}")


NOTE = "in: "  # how records/console.py notes on an error what was being waited for


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _is_one(error: BaseException) -> bool:
    """Whether it says that a GPU's memory is used up. A processor's MemoryError has a line of its own."""
    named = type(error).__name__ == "OutOfMemoryError"  # torch's, without importing it
    return named or (isinstance(error, EngineError | RuntimeError) and any(sign in str(error) for sign in SIGNS))


def _samples(what: str) -> bool:
    step = what.partition(":")[0].removeprefix("step ")
    return what == f"step {step}" or any(word in what for word in OF_SAMPLING)


def _plan_in_words(told: Planned) -> str:
    if told.plan is None:
        return f"there is no plan ({told.source})"
    there = "" if told.device.total is None else f", and {told.device.name} has {size(told.device.total)}"
    words = f"the plan is about {size(told.plan.peak)} in {told.plan.when}{there}"
    return f"{words}, which would fit" if told.verdict == "fits" else words


def _cure(run: RunConfig, told: Planned, sampling: bool) -> str:
    """The plan's own cure; where it says that all fits, the next saving in its list."""
    if found := cure(told):
        return found
    shape = told.work.shape if told.work else None
    if shape is None or told.work is None:
        return "lower micro_batch_tokens or rollout.max_rows, or set model.gradient_checkpointing=true"
    saving = next_saving(run, shape, told.device, told.work.prompt, sampling)
    others = "end other programs on it (nvidia-smi lists them)" if told.device.kind == "cuda" else ""
    if saving is None:
        return others or "choose a smaller model, or a machine with more memory"
    changes = "" if saving.same_result else ", which changes what is learned"
    return f"{' '.join(saving.overrides)} takes {size(saving.peak)}{changes}" + f"; or {others}" * bool(others)
