"""The overrides that make a run fit: a fixed list of savings, each added to those before, up to the first that fits."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from rlreason.config.run import RunConfig
from rlreason.memory.machine import Device
from rlreason.memory.plan import Plan, all_fit, enough, plan_of, planned_cache
from rlreason.memory.shapes import ModelShape
from rlreason.memory.work import Work, work_of

STEP = 256  # micro_batch_tokens is cut in steps of so many


@dataclass(frozen=True, slots=True)
class Saving:
    """Settings that save memory."""

    settings: dict[str, Any]
    same_result: bool = True  # the run learns the same, but for roundings


@dataclass(frozen=True, slots=True)
class Fitting:
    """Overrides with which the plan fits, and the peak that it has then."""

    overrides: tuple[str, ...]
    peak: int
    same_result: bool


def savings(run: RunConfig, longest: int) -> Iterator[Saving]:
    """The list, from what costs nothing to what changes the experiment; `longest`: tokens of the longest sequence."""
    yield Saving({"rollout.sleep": True})
    for tokens in _halves(run.micro_batch_tokens, -(-(longest + 1) // STEP) * STEP):
        yield Saving({"micro_batch_tokens": tokens})
    yield Saving({"model.gradient_checkpointing": True})
    for rows in _halves(run.rollout.max_rows, 16):
        yield Saving({"rollout.max_rows": rows})
    for gigabytes in (16, 8, 4, 2, 1):
        yield Saving({"rollout.kv_cache_gb": gigabytes})
    if run.rollout.engine == "vllm":
        yield Saving({"parallel": "shard"})
    yield Saving({"optimizer": "adamw_8bit"}, same_result=False)
    if run.model.dtype != "float32":
        yield Saving({"model.weights": "bfloat16"}, same_result=False)
    if not run.model.lora.rank and not run.model.freeze:
        yield Saving({"model.lora.rank": 16}, same_result=False)
    yield Saving({"kl_placement": "none", "kl_coef": 0}, same_result=False)
    for smaller in _halves(getattr(run, "group_size", 0), 2):
        yield Saving({"group_size": smaller}, same_result=False)
    for tokens in _halves(run.sampling.max_tokens, 64):
        yield Saving({"sampling.max_tokens": tokens}, same_result=False)


def _halves(number: int, least: int) -> Iterator[int]:
    """number / 2, number / 4, ... down to `least`, which is the last.

    >>> list(_halves(8, 2)), list(_halves(9, 3)), list(_halves(2, 2))
    ([4, 2], [4, 3], [])
    """
    while number > least:
        number = max(number // 2, least)
        yield number


def fitting(run: RunConfig, shape: ModelShape, device: Device, prompt: int | None = None) -> Fitting | None:
    """The first savings of the list with which the run fits; None where all of them do not suffice.

    Left out is what the run's rules refuse, and what lowers nothing that does not fit.
    """
    plan, settings, same_result = plan_of(work_of(run, shape, device, prompt), device), dict[str, Any](), True
    for saving in savings(run, work_of(run, shape, device, prompt).longest):
        changed = with_changes(run, settings | saving.settings)
        work = work_of(changed, shape, device, prompt)
        less = plan_of(work, device)
        if changed.problems() or not _helps(less, plan, device) or _refused_by_vllm(work, device):
            continue
        plan, settings, same_result = less, settings | saving.settings, same_result and saving.same_result
        if all_fit(plan, device):
            return Fitting(tuple(f"{key}={_word(value)}" for key, value in settings.items()), plan.peak, same_result)
    return None


def _helps(plan: Plan, before: Plan, device: Device) -> bool:
    """Whether something that does not fit is smaller."""
    for part, free in (("training", device.free), ("sampling", device.free), ("other_device", device.second_free)):
        now, then = (sum(getattr(one, part).values()) for one in (plan, before))
        if not enough(then, free) and now < then:
            return True
    return False


def _refused_by_vllm(work: Work, device: Device) -> bool:
    cache, of_one_sequence = planned_cache(work, device) if work.engine == "vllm" else (0, 0)
    return cache < of_one_sequence


def divided(device: Device, ranks: int) -> Device:
    """What each rank has of a device: all of its GPU, and of a processor's memory, which they share, a part."""
    if device.kind != "cpu" or ranks == 1 or device.free is None or device.total is None:
        return device
    return replace(device, name=f"{device.name} for each of {ranks} ranks", free=device.free // ranks)


def with_changes(run: RunConfig, settings: dict[str, Any]) -> RunConfig:
    """A copy of a run with these settings, by their dotted names."""
    changed = copy.deepcopy(run)
    for key, value in settings.items():
        *groups, name = key.split(".")
        owner: Any = changed
        for group in groups:
            owner = getattr(owner, group)
        setattr(owner, name, value)
    return changed


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
