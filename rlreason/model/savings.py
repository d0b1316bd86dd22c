"""The overrides that make a run fit into memory, and a memory plan as text."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from rlreason.config.run import RunConfig
from rlreason.model.fitting import SHARE, Plan, may_be_spread, plan_of, planned_cache
from rlreason.model.memory import Workload, workload_of
from rlreason.model.shapes import ModelShape, shape_of
from rlreason.runtime.machine import Device
from rlreason.runtime.text import size

STEP = 256  # micro_batch_tokens is lowered to multiples of this
LARGEST_ERROR = 0.15  # of a plan, measured on a processor


class Saving(NamedTuple):
    """Settings that save memory."""

    settings: dict[str, Any]
    same_result: bool = True  # the run learns the same, except for rounding


class Fitting(NamedTuple):
    """Overrides that make the plan fit, and its peak with them."""

    overrides: tuple[str, ...]
    peak: int
    same_result: bool


def savings(run: RunConfig, longest: int) -> Iterator[Saving]:
    """Yield all savings, free ones first, those that change the experiment last; `longest`: tokens of a sequence."""
    yield Saving({"rollout.sleep": True})
    for tokens in _halves(run.micro_batch_tokens, -(-(longest + 1) // STEP) * STEP):
        yield Saving({"micro_batch_tokens": tokens})
    yield Saving({"model.gradient_checkpointing": True})
    for rows in _halves(run.rollout.max_rows, 16):
        yield Saving({"rollout.max_rows": rows})
    for gigabytes in (16, 8, 4, 2, 1):
        yield Saving({"rollout.kv_cache_gb": gigabytes})
    if run.rollout.engine == "vllm":  # the engine in process samples from a whole model
        yield Saving({"parallel": "shard"})
    yield Saving({"optimizer": "adamw_8bit"}, False)
    if run.model.dtype != "float32":
        yield Saving({"model.weights": "bfloat16"}, False)
    if not run.model.lora.rank and not run.model.freeze:
        yield Saving({"model.lora.rank": 16}, False)
    yield Saving({"kl_placement": "none", "kl_coef": 0}, False)
    for smaller in _halves(getattr(run, "group_size", 0), 2):
        yield Saving({"group_size": smaller}, False)
    for tokens in _halves(run.sampling.max_tokens, 64):
        yield Saving({"sampling.max_tokens": tokens}, False)


def _halves(number: int, least: int) -> Iterator[int]:
    """Yield number / 2, number / 4, ... down to `least`, inclusive.

    >>> list(_halves(8, 2)), list(_halves(9, 3)), list(_halves(2, 2))
    ([4, 2], [4, 3], [])
    """
    while number > least:
        number = max(number // 2, least)
        yield number


def fitting(run: RunConfig, shape: ModelShape, device: Device, prompt: int | None = None) -> Fitting | None:
    """Return the first savings of the list that make the run fit; None if all of them together do not.

    Those that the run's rules refuse, and those that lower nothing that is too large, are left out.
    """
    work = workload_of(run, shape, device, prompt)
    plan, settings, same_result = plan_of(work, device), dict[str, Any](), True
    for saving in savings(run, work.longest):
        changed = with_changes(run, settings | saving.settings)
        work = workload_of(changed, shape, device, prompt)
        less = plan_of(work, device)
        if changed.problems() or not _reduces_excess(less, plan, device):
            continue
        if work.engine == "vllm" and planned_cache(work, device)[0] < planned_cache(work, device)[1]:
            continue  # not even one sequence
        plan, settings, same_result = less, settings | saving.settings, same_result and saving.same_result
        if plan.fits(device):
            overrides = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in settings.items()]
            return Fitting(tuple(overrides), plan.peak, same_result)
    return None


def _reduces_excess(plan: Plan, before: Plan, device: Device) -> bool:
    """Whether something that does not fit got smaller."""
    pairs = ((before.training, plan.training), (before.sampling, plan.sampling))
    sums = ((sum(then.values()), sum(now.values())) for then, now in pairs)
    return any(SHARE * (device.free or 0) < then and now < then for then, now in sums)


def with_changes(run: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """Copy a run with these settings, by their dotted names."""
    changed = copy.deepcopy(run)
    for key, value in settings.items():
        *groups, name = key.split(".")
        owner: Any = changed
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, name, value)
    return changed


def device_per_rank(device: Device, ranks: int) -> Device:
    """One rank's part of a device: all of its GPU, or a share of a processor's memory, which ranks share."""
    if device.kind != "cpu" or ranks == 1 or device.free is None:
        return device
    return replace(device, name=f"{device.name} for each of {ranks} ranks", free=device.free // ranks)


class Parallel(NamedTuple):
    """What each rank has of the model, and why."""

    mode: str  # replicate: all of it; shard: a part
    why: str


def parallel_mode(run: RunConfig, shape: ModelShape | None, device: Device, world: int) -> Parallel:
    """Return the mode of `world` ranks on devices like this one; `run.parallel` decides unless it is auto.

    `shape`: None if unknown: then the whole model.
    """
    setting = str(getattr(run, "parallel", "auto"))
    if setting != "auto":
        return Parallel(setting, "as asked")
    if world == 1:
        return Parallel("replicate", "one process trains")
    here = device_per_rank(device, world)
    if shape is None or here.free is None:
        return Parallel("replicate", "how much memory the model takes, or is free, is unknown")
    work = replace(workload_of(run, shape, device), ranks=world)
    whole = plan_of(replace(work, parallel="replicate"), here)
    need = f"a whole model takes about {size(whole.peak)} in {whole.when}, and {size(here.free)} are free"
    if not whole.fits(here) and not may_be_spread(work):
        need += "; 8-bit moments, half-precision weights and rollout=hf on a GPU take whole models"
    return Parallel(plan_of(work, here).mode, need)


class Planned(NamedTuple):
    """A run's plan on a device; `plan` is None if the model's shape is unknown, and `source` says why."""

    device: Device
    source: str
    work: Workload | None = None
    plan: Plan | None = None
    cure: Fitting | None = None

    @property
    def verdict(self) -> str:
        """unknown | fits | tight (may run out of memory) | too large."""
        if self.plan is None or self.device.free is None:
            return "unknown"
        if self.plan.fits(self.device):
            return "fits"
        return "tight" if self.plan.peak * (1 - LARGEST_ERROR) <= self.device.free else "too large"


def planned(run: RunConfig, device: Device, prompt: int | None = None) -> Planned:
    """Return a run's plan, and the overrides that make it fit if it does not.

    `prompt`: tokens of the longest prompt; None: assumed.
    """
    shape, source = shape_of(run.model)
    if shape is None:
        return Planned(device, source)
    work = workload_of(run, shape, device, prompt)
    device = device_per_rank(device, work.ranks)
    plan = plan_of(work, device)
    cure = None if plan.fits(device) else fitting(run, shape, device, prompt)
    return Planned(device, source, work, plan, cure)


def table(outcome: Planned) -> list[str]:
    """Format the plan as aligned lines, a part a line, at the peak of training and at that of sampling."""
    if outcome.plan is None or outcome.work is None:
        return [outcome.source]
    plan, work = outcome.plan, outcome.work
    rows = [("", plan.first, "sampling")]
    for part in dict.fromkeys([*plan.training, *plan.sampling]):
        first, second = (size(held[part]) if part in held else "-" for held in (plan.training, plan.sampling))
        rows.append((part, first, second))
    rows.append(("together", size(sum(plan.training.values())), size(sum(plan.sampling.values()))))
    lines = [
        f"{work.shape.numbers / 1e6:.4g} M parameters, by {outcome.source}",
        f"{'float32' if work.products == 4 else 'bfloat16'} products, rows of {work.tokens} tokens, prompts taken as "
        f"{work.prompt}, at most {work.max_rows} responses side by side",
        *(f"{part:<18}{first:>10}{second:>12}" for part, first, second in rows),
    ]
    if plan.ranks > 1:
        copies = f"; rank 0 takes {size(plan.main_memory)} of main memory too" if plan.main_memory else ""
        lines.append(f"the plan is of rank 0 of {plan.ranks}, by parallel={plan.mode}{copies}")
    if plan.other_device:
        lines.append("on the second GPU: " + ", ".join(f"{size(v)} of {k}" for k, v in plan.other_device.items()))
    return lines


def conclusion(outcome: Planned) -> str:
    """Say whether it fits, in a sentence, with the cure if it does not."""
    return ": ".join(filter(None, (verdict(outcome), cure(outcome))))


def verdict(outcome: Planned) -> str:
    """Say whether it fits, and by which numbers."""
    if outcome.plan is None:
        return outcome.source
    words = {"unknown": "takes", "fits": "fits:", "tight": "may not fit:", "too large": "does not fit:"}
    need = f"{words[outcome.verdict]} about {size(outcome.plan.peak)} in {outcome.plan.when}"
    if outcome.device.free is None:
        return f"{need}; how much memory is free here is unknown"
    return f"{need}, and {size(outcome.device.free)} are free on {outcome.device.name}"


def cure(outcome: Planned) -> str:
    """Return the overrides that make it fit; "" if it does."""
    if outcome.plan is None or outcome.verdict in ("fits", "unknown"):
        return ""
    if outcome.cure is None:
        peak = outcome.plan.sampling if outcome.plan.when == "sampling" else outcome.plan.training
        part = max(peak, key=lambda name: peak[name])
        return f"no settings make it fit, the largest part is {part}: choose a smaller model, or a larger machine"
    changes = "" if outcome.cure.same_result else ", which changes what is learned"
    return f"{' '.join(outcome.cure.overrides)} takes {size(outcome.cure.peak)}{changes}"


def figures(outcome: Planned) -> dict[str, Any]:
    """Return the plan for `--json`, all sizes in bytes."""
    known = {"verdict": outcome.verdict, "device": asdict(outcome.device), "shape_from": outcome.source}
    if outcome.plan is None or outcome.work is None:
        return known
    return known | {
        "parameters": outcome.work.shape.numbers,
        "training": outcome.plan.training,
        "sampling": outcome.plan.sampling,
        "second_gpu": outcome.plan.other_device,
        "ranks": outcome.plan.ranks,
        "parallel": outcome.plan.mode,
        "main_memory": outcome.plan.main_memory,
        "peak": outcome.plan.peak,
        "peak_in": outcome.plan.when,
        "share_of_free_used_at_most": SHARE,
        "assumed": {"prompt_tokens": outcome.work.prompt, "row_tokens": outcome.work.tokens},
        "fitting": list(outcome.cure.overrides) if outcome.cure else [],
        "fitting_peak": outcome.cure.peak if outcome.cure else None,
    }
