"""Whether runs fit into memory, told by the plan before anything slow is loaded."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.memory.fitting import divided
from rlreason.memory.machine import Device
from rlreason.memory.plan import SHARE, plan_of
from rlreason.memory.shapes import shape_of
from rlreason.memory.words import LARGEST_ERROR, Planned, at_start, conclusion, planned
from rlreason.memory.work import work_of
from rlreason.setup.fits import assumed_prompt

GO_ON = "model.check_memory=false starts it all the same (rlreason plan shows the parts)"


def memory_for(runs: Sequence[RunConfig], device: Device, shows: bool = True) -> list[str]:
    """The memory plan where it matters: on a GPU, and where a processor's memory is tight.

    A run that surely needs more than its GPU has is refused, unless model.check_memory=false; of a sweep, whose runs
    may get another GPU than the first, more than that has in all. `shows`: what fits is worth a line, too.
    """
    if device.kind != "cuda":
        return [line for run in different(runs, device) for line in _on_processor(run, device, shows)]
    here = device if len(runs) == 1 else replace(device, free=device.total, second_free=None)
    plans = [(run, planned(run, here, assumed_prompt(run))) for run in different(runs, here)]
    if bad := [told for run, told in plans if run.model.check_memory and told.verdict == "too large"]:
        raise ConfigError("\n".join(dict.fromkeys(f"memory: {conclusion(told)}; {GO_ON}" for told in bad)))
    worth = [told for run, told in plans if told.verdict != "fits" or (shows and not run.model.made_on_the_spot)]
    return ["\n".join(at_start(max(worth, key=_share)))] if worth else []


def different(runs: Sequence[RunConfig], device: Device) -> Iterator[RunConfig]:
    """The first of all runs that take the same memory: those of a sweep mostly do."""
    seen = set[object]()
    for run in runs:
        shape, source = shape_of(run.model)
        key = (source if shape is None else work_of(run, shape, device), run.model.check_memory)
        if key not in seen:
            seen.add(key)
            yield run


def _share(told: Planned) -> float:
    """Of the free memory that a plan takes; an unknown one's is told last."""
    need, free = told.needed
    return need / max(1, free)


def _on_processor(run: RunConfig, device: Device, shows: bool) -> list[str]:
    """A line where a plan surely exceeds the machine's memory, the plan where it is tight; no run is refused for it."""
    shape = shape_of(run.model).shape
    if shape is None or device.total is None:
        return []
    prompt = assumed_prompt(run)
    work = work_of(run, shape, device, prompt)
    peak = plan_of(work, divided(device, work.ranks)).peak
    if peak * (1 - LARGEST_ERROR) * work.ranks > device.total:
        return [f"! memory: {conclusion(planned(run, device, prompt))} (rlreason doctor shows the plan)"]
    tight = device.free is not None and peak * work.ranks > SHARE * device.free
    return (
        ["\n".join(at_start(planned(run, device, prompt)))]
        if tight and shows and not run.model.made_on_the_spot
        else []
    )
