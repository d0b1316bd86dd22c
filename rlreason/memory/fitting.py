"""The overrides that make a run fit: found by the plan's own formula, the smallest set of changes first."""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from rlreason.config.run import RunConfig
from rlreason.memory.machine import Device
from rlreason.memory.plan import all_fit, plan_of, planned_cache
from rlreason.memory.shapes import ModelShape
from rlreason.memory.work import ranks_of, work_of

STEP = 256  # micro_batch_tokens is cut in steps of so many
RANK = 16  # of the adapters that are suggested


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that can save memory. `values`: those to try, the dearest last, given the run."""

    key: str
    values: Callable[[RunConfig, int], list[Any]]
    same_result: bool  # the run learns the same, but for roundings
    also: Mapping[str, Any] = field(default_factory=dict)  # what has to be set with it


Offer = tuple[Change, list[Any]]  # a change, and the values to try in this run


def micro_batches(run: RunConfig, longest: int) -> list[int]:
    """Smaller micro-batches, down to one that just holds the longest sequence."""
    least = -(-(longest + 1) // STEP) * STEP
    return [tokens for tokens in _halved(run.micro_batch_tokens, least) if tokens < run.micro_batch_tokens]


def _halved(most: int, least: int) -> list[int]:
    found, tokens = [], most
    while tokens // 2 > least:
        tokens //= 2
        found.append(tokens)
    return [*found, least]


def _checkpointing(run: RunConfig, longest: int) -> list[Any]:
    return [] if run.model.gradient_checkpointing or not run.trains else [True]


def _rows(run: RunConfig, longest: int) -> list[Any]:
    return [rows for rows in (128, 64, 32, 16, 8, 4, 2, 1) if rows < run.rollout.max_rows]


def _cache(run: RunConfig, longest: int) -> list[Any]:
    given = run.rollout.kv_cache_gb
    return [gb for gb in (16, 8, 4, 2, 1, 0.5) if run.rollout.engine == "vllm" and (gb < given if given else gb >= 1)]


def _sleep(run: RunConfig, longest: int) -> list[Any]:
    rollout = run.rollout
    asleep = rollout.engine != "vllm" or rollout.sleep or rollout.async_level or not rollout.shares_gpu
    return [] if asleep else [True]


def _spread(run: RunConfig, longest: int) -> list[Any]:
    whole = getattr(run, "parallel", "") == "replicate" and ranks_of(run) > 1
    return ["shard"] if whole and run.rollout.engine == "vllm" else []


def _eight_bit(run: RunConfig, longest: int) -> list[Any]:
    return ["adamw_8bit"] if run.optimizes_by == "adamw" else []


def _half_weights(run: RunConfig, longest: int) -> list[Any]:
    return ["bfloat16"] if run.model.weights == "float32" and run.model.dtype != "float32" else []


def _adapters(run: RunConfig, longest: int) -> list[Any]:
    return [RANK] if run.trains and not run.model.lora.rank and not run.model.freeze else []


def _no_reference(run: RunConfig, longest: int) -> list[Any]:
    return ["none"] if getattr(run, "kl_placement", "none") != "none" else []


def _groups(run: RunConfig, longest: int) -> list[Any]:
    return _halves(getattr(run, "group_size", 0), 2) if run.samples_to_learn else []


def _lengths(run: RunConfig, longest: int) -> list[Any]:
    return _halves(run.sampling.max_tokens, 64)


def _halves(number: int, least: int) -> list[int]:
    """number / 2, number / 4, ... down to `least`.

    >>> _halves(8, 2), _halves(3, 2)
    ([4, 2], [])
    """
    return [number // 2, *_halves(number // 2, least)] if number // 2 >= least else []


#: From what costs nothing to what changes what is learned.
CHANGES = (
    Change("rollout.sleep", _sleep, True),
    Change("micro_batch_tokens", micro_batches, True),
    Change("model.gradient_checkpointing", _checkpointing, True),
    Change("rollout.max_rows", _rows, True),
    Change("rollout.kv_cache_gb", _cache, True),
    Change("parallel", _spread, True),
    Change("optimizer", _eight_bit, False),
    Change("model.weights", _half_weights, False),
    Change("model.lora.rank", _adapters, False),
)
#: What is tried where all of those are not enough: it changes the experiment itself.
LAST_RESORTS = (
    Change("kl_placement", _no_reference, False, {"kl_coef": 0}),
    Change("group_size", _groups, False),
    Change("sampling.max_tokens", _lengths, False),
)


@dataclass(frozen=True, slots=True)
class Fitting:
    """Overrides with which the plan fits, and the peak that it has then."""

    overrides: tuple[str, ...]
    peak: int
    same_result: bool


def divided(device: Device, ranks: int) -> Device:
    """What each rank has of a device: all of its GPU, and of a processor's memory, which they share, a part."""
    if device.kind != "cpu" or ranks == 1 or device.free is None or device.total is None:
        return device
    return replace(device, name=f"{device.name} for each of {ranks} ranks", free=device.free // ranks)


def fitting(
    run: RunConfig, shape: ModelShape, device: Device, prompt: int | None = None, but: Collection[str] = ()
) -> Fitting | None:
    """A small set of changes with which the run fits; None where none of those tried does.

    The smallest set of what leaves the result as it is, else of all but the last resorts; else all, less what is not
    needed. Of a number, the largest that fits. `but`: settings that stay as they are.
    """
    search = _Search(run, shape, device, prompt)
    usual, last = (
        search.offers([change for change in changes if change.key not in but]) for changes in (CHANGES, LAST_RESORTS)
    )
    for offers in ([offer for offer in usual if offer[0].same_result], usual):
        if search.peak(offers, _dearest(offers)) is not None:
            return next(found for some in _sets(offers) if (found := search.largest(some)))
    return search.largest(search.needed([*usual, *last]))


def next_saving(
    run: RunConfig, shape: ModelShape, device: Device, prompt: int | None, sampling: bool
) -> Fitting | None:
    """The first change of the list that lowers the peak of sampling, or that of training; None where none does."""
    search = _Search(run, shape, device, prompt)

    def peak_with(settings: dict[str, Any]) -> int:
        plan = plan_of(work_of(with_changes(run, settings), shape, device, prompt), device)
        return sum((plan.sampling if sampling else plan.training).values()) + sum(plan.other_device.values())

    now = peak_with({})
    for change, values in search.offers(CHANGES):
        settings = {change.key: values[0], **change.also}
        if (less := peak_with(settings)) < now:
            words = tuple(f"{key}={_word(value)}" for key, value in settings.items())
            return Fitting(words, less, change.same_result)
    return None


def _sets(offers: list[Offer]) -> Iterator[tuple[Offer, ...]]:
    """Every set of them, smaller ones first."""
    for size in range(1, len(offers) + 1):
        yield from combinations(offers, size)


def _dearest(offers: Sequence[Offer]) -> list[Any]:
    return [values[-1] for _, values in offers]


@dataclass(frozen=True, slots=True)
class _Search:
    """Changes of one run, held against one device."""

    run: RunConfig
    shape: ModelShape
    device: Device
    prompt: int | None

    def offers(self, changes: Sequence[Change]) -> list[Offer]:
        """Those of the changes that this run can make, each with its values that the run's rules allow."""
        longest = work_of(self.run, self.shape, self.device, self.prompt).longest
        found = [
            (change, [v for v in change.values(self.run, longest) if self._allowed(change, v)]) for change in changes
        ]
        return [(change, values) for change, values in found if values]

    def _allowed(self, change: Change, value: Any) -> bool:
        return not with_changes(self.run, {change.key: value, **change.also}).problems()

    def peak(self, some: Sequence[Offer], chosen: Sequence[Any]) -> int | None:
        """The plan's peak with these changes; None where it does not fit, or the run is refused."""
        settings: dict[str, Any] = {}
        for (change, _), value in zip(some, chosen, strict=True):
            settings |= {change.key: value, **change.also}
        changed = with_changes(self.run, settings)
        if changed.problems():
            return None
        work = work_of(changed, self.shape, self.device, self.prompt)
        cache, one = planned_cache(work, self.device) if work.engine == "vllm" else (0, 0)
        if cache < one:  # the engine would refuse it
            return None
        plan = plan_of(work, self.device)
        return plan.peak if all_fit(plan, self.device) else None

    def needed(self, some: list[Offer]) -> list[Offer]:
        """Without the changes that are not needed, the last resorts left out first."""
        for offer in reversed(some.copy()):
            fewer = [other for other in some if other is not offer]
            if self.peak(fewer, _dearest(fewer)) is not None:
                some = fewer
        return some

    def largest(self, some: Sequence[Offer]) -> Fitting | None:
        """These changes with the least saving that still fits, one number after the other; None where none fits."""
        chosen = _dearest(some)
        found = self.peak(some, chosen)
        if found is None:
            return None
        for n, (_, values) in enumerate(some):
            for value in values:
                tried = [*chosen[:n], value, *chosen[n + 1 :]]
                if (bytes_ := self.peak(some, tried)) is not None:
                    chosen, found = tried, bytes_
                    break
        words = [
            f"{key}={_word(value)}"
            for (change, _), own in zip(some, chosen, strict=True)
            for key, value in {change.key: own, **change.also}.items()
        ]
        return Fitting(tuple(words), found, all(change.same_result for change, _ in some))


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
