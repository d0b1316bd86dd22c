"""The overrides that make a run fit, and a memory plan as a person reads it."""

import copy
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rlreason.config.run import RunConfig
from rlreason.model.memory import Work, work_of
from rlreason.model.plan import SHARE, Plan, all_fit, enough, plan_of, planned_cache
from rlreason.model.shapes import Device, ModelShape, shape_of, size

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


class Parallel(NamedTuple):
    """What each rank has of the model, and why."""

    mode: str  # replicate: all of it; shard: a part
    why: str


def parallel_mode(
    run: RunConfig, shape: ModelShape | None, device: Device, world: int, prompt: int | None = None
) -> Parallel:
    """The mode of `world` ranks on devices like this one. `run.parallel` decides where it is not auto.

    `shape`: None where nobody can tell it: then the whole model. `prompt`: tokens of the longest prompt, where they are
    known.
    """
    asked = str(getattr(run, "parallel", "auto"))
    if asked != "auto":
        return Parallel(asked, "as asked")
    if world == 1:
        return Parallel("replicate", "one process trains")
    if shape is None:
        return Parallel("replicate", "the plan does not know the model's shape")
    work, here = replace(work_of(run, shape, device, prompt), ranks=world), divided(device, world)
    whole = plan_of(replace(work, parallel="replicate"), here)
    if here.free is None:
        return Parallel("replicate", "nobody can tell how much memory is free")
    need = f"a whole model takes about {size(whole.peak)} in {whole.when}, and {size(here.free)} are free"
    if plan_of(work, here).mode == "replicate":
        return Parallel("replicate", need if work.may_be_spread else f"{need}; {_why_whole(work)}")
    return Parallel("shard", need)


def _why_whole(work: Work) -> str:
    """Why a model cannot be spread."""
    if work.engine == "hf" and work.head.on_gpu:
        return "rollout=hf samples from a whole one"
    setting = "optimizer=adamw_8bit" if work.optimizer != "adamw" else "model.weights=bfloat16"
    return f"{setting} cannot be spread"


LARGEST_ERROR = 0.15  # of a plan, as measured on the processor


class Planned(NamedTuple):
    """The plan of a run on a device; `plan` is None where the model's shape is unknown, and `source` says why."""

    device: Device
    source: str
    work: Work | None = None
    plan: Plan | None = None
    cure: Fitting | None = None

    @property
    def verdict(self) -> str:
        """unknown | fits | tight (may run out of memory) | too large."""
        if self.plan is None or (self.device.free is None and not self.on_second):
            return "unknown"
        if all_fit(self.plan, self.device):
            return "fits"
        need, free = self.needed
        return "tight" if need * (1 - LARGEST_ERROR) <= free else "too large"

    @property
    def on_second(self) -> bool:
        """Whether it is the second GPU, which vLLM has for itself, that is too small."""
        if self.plan is None or self.device.second_free is None or not self.plan.other_device:
            return False
        return not enough(sum(self.plan.other_device.values()), self.device.second_free)

    @property
    def needed(self) -> tuple[int, int]:
        """(bytes needed, bytes free) on the GPU that decides."""
        if self.plan is None:
            return 0, 0
        if self.on_second:
            return sum(self.plan.other_device.values()), self.device.second_free or 0
        return self.plan.peak, self.device.free or 0


def planned(run: RunConfig, device: Device, prompt: int | None = None) -> Planned:
    """The plan of a run, and the overrides that make it fit where it does not.

    `prompt`: tokens of the longest prompt; None: they are assumed.
    """
    shape, source = shape_of(run.model)
    if shape is None:
        return Planned(device, source)
    work = work_of(run, shape, device, prompt)
    device = divided(device, work.ranks)
    plan = plan_of(work, device)
    cure = None if all_fit(plan, device) else fitting(run, shape, device, prompt)
    return Planned(device, source, work, plan, cure)


def in_one_line(told: Planned) -> str:
    """The plan in a line: the peak, when, and what there is."""
    if told.plan is None:
        return f"unknown: {told.source}"
    there = "" if told.device.free is None else f", {size(told.device.free)} free on {told.device.name}"
    return f"about {size(told.plan.peak)} in {told.plan.when}{there}"


def at_start(told: Planned) -> list[str]:
    """The plan as a run says it before it begins, in four lines at most; the cure stands in the last one."""
    if told.plan is None:
        return [f"memory: {in_one_line(told)}"]
    lines = [f"memory: {verdict(told)}{_of_ranks(told.plan)}"]
    for name, parts in ((told.plan.first, told.plan.training), ("sampling", told.plan.sampling)):
        held = ", ".join(f"{part} {size(amount)}" for part, amount in parts.items())
        lines.append(f"  {name} takes {size(sum(parts.values()))}: {held}")
    return [*lines, *(f"  cure: {line}" for line in [cure(told)] if line)]


def _of_ranks(plan: Plan) -> str:
    """What each of several ranks has; empty where one process trains."""
    if plan.ranks == 1:
        return ""
    has = "a part of the model" if plan.mode == "shard" else "the whole model"
    copy = f"; rank 0 takes {size(plan.main_memory)} of main memory too" if plan.main_memory else ""
    return f"; each of {plan.ranks} ranks has {has}{copy}"


def table(told: Planned) -> list[str]:
    """The plan in aligned lines: a part a line, what is held at the peak of training and at that of sampling."""
    if told.plan is None or told.work is None:
        return [f"unknown: {told.source}"]
    plan, shape = told.plan, told.work.shape
    rows = [("", plan.first, "sampling")]
    for part in dict.fromkeys([*plan.training, *plan.sampling]):
        first, second = (size(held[part]) if part in held else "-" for held in (plan.training, plan.sampling))
        rows.append((part, first, second))
    rows.append(("together", size(sum(plan.training.values())), size(sum(plan.sampling.values()))))
    lines = [f"{shape.numbers / 1e6:.4g} M parameters, by {told.source}", described(told.work)]
    lines += [f"{part:<18}{first:>10}{second:>12}" for part, first, second in rows]
    if plan.ranks > 1:
        lines.append(f"the plan is of rank 0{_of_ranks(plan)}")
    if plan.other_device:
        lines.append("on the second GPU: " + ", ".join(f"{size(v)} of {k}" for k, v in plan.other_device.items()))
    return lines


def described(work: Work) -> str:
    """What the plan takes for granted: the precision, the longest micro-batch and the rows that are decoded."""
    precision = f"float{8 * work.products}" if work.products == 4 else "bfloat16"
    return (
        f"{precision} products, rows of {work.tokens} tokens, prompts taken as {work.prompt}, at most "
        f"{work.max_rows} responses side by side"
    )


def conclusion(told: Planned) -> str:
    """Whether it fits, in a sentence; with what makes it fit, where that is needed."""
    return ": ".join(filter(None, (verdict(told), cure(told))))


def verdict(told: Planned) -> str:
    """Whether it fits, and by which numbers."""
    if told.plan is None:
        return told.source
    need = f"about {size(told.plan.peak)} in {told.plan.when}"
    if told.verdict == "unknown":
        return f"takes {need}; nobody can tell how much memory is free here"
    start = {"fits": "fits", "tight": "may not fit", "too large": "does not fit"}[told.verdict]
    if told.on_second:
        need, free = (size(number) for number in told.needed)
        return f"{start}: about {need} for vLLM on the second GPU, and {free} are free there"
    return f"{start}: {need}, and {size(told.needed[1])} are free on {told.device.name}"


def cure(told: Planned) -> str:
    """What to type so that it fits; empty where nothing is needed."""
    if told.verdict in ("fits", "unknown"):
        return ""
    if told.cure is None:
        part, amount = largest_part(told)
        return (
            f"none of the settings tried makes it fit; the largest part is {part} ({size(amount)}): choose a smaller "
            "model, or a machine with more memory"
        )
    changes = "" if told.cure.same_result else ", which changes what is learned"
    return f"{' '.join(told.cure.overrides)} takes {size(told.cure.peak)}{changes}"


def largest_part(told: Planned) -> tuple[str, int]:
    """The largest part of what is held where the plan is at its peak."""
    if told.plan is None:
        return "", 0
    peak = told.plan.sampling if told.plan.when == "sampling" else told.plan.training
    return max((told.plan.other_device if told.on_second else peak).items(), key=lambda pair: pair[1])


def figures(told: Planned) -> dict[str, Any]:
    """The plan for `--json`, all sizes in bytes."""
    found: dict[str, Any] = {"verdict": told.verdict, "device": asdict(told.device), "shape_from": told.source}
    if told.plan is None or told.work is None:
        return found
    return found | {
        "parameters": told.work.shape.numbers,
        "training": told.plan.training,
        "sampling": told.plan.sampling,
        "second_gpu": told.plan.other_device,
        "ranks": told.plan.ranks,
        "parallel": told.plan.mode,
        "main_memory": told.plan.main_memory,
        "peak": told.plan.peak,
        "peak_in": told.plan.when,
        "share_of_free_used_at_most": SHARE,
        "assumed": {"prompt_tokens": told.work.prompt, "row_tokens": told.work.tokens},
        "fitting": list(told.cure.overrides) if told.cure else [],
        "fitting_peak": told.cure.peak if told.cure else None,
    }
