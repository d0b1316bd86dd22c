"""The overrides that make a run fit: found by the plan's own formula, the smallest set of changes first."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from rlreason.config.run import RunConfig
from rlreason.memory.machine import Device
from rlreason.memory.plan import plan_of, work_of
from rlreason.memory.shapes import ModelShape

SHARE = 0.9  # of the free memory that a plan may take: allocators keep pieces that are too small
STEP = 256  # micro_batch_tokens is cut in steps of so many
RANK = 16  # of the adapters that are suggested


@dataclass(frozen=True, slots=True)
class Change:
    """One setting that can save memory. `values`: those to try, the dearest last, given the run."""

    key: str
    values: Callable[[RunConfig, int], list[Any]]
    same_result: bool  # the run learns the same, but for roundings


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
    return [rows for rows in (128, 64, 32, 16, 8) if rows < run.rollout.max_rows]


def _cache(run: RunConfig, longest: int) -> list[Any]:
    return [16, 8, 4, 2, 1] if run.rollout.engine == "vllm" and run.rollout.kv_cache_gb is None else []


def _sleep(run: RunConfig, longest: int) -> list[Any]:
    rollout = run.rollout
    asleep = rollout.engine != "vllm" or rollout.sleep or rollout.async_level or not rollout.shares_gpu
    return [] if asleep else [True]


def _eight_bit(run: RunConfig, longest: int) -> list[Any]:
    return ["adamw_8bit"] if run.optimizes_by == "adamw" else []


def _half_weights(run: RunConfig, longest: int) -> list[Any]:
    return ["bfloat16"] if run.model.weights == "float32" and run.model.dtype != "float32" else []


def _adapters(run: RunConfig, longest: int) -> list[Any]:
    return [RANK] if run.trains and not run.model.lora.rank and not run.model.freeze else []


#: From what costs nothing to what changes what is learned.
CHANGES = (
    Change("rollout.sleep", _sleep, True),
    Change("micro_batch_tokens", micro_batches, True),
    Change("model.gradient_checkpointing", _checkpointing, True),
    Change("rollout.max_rows", _rows, True),
    Change("rollout.kv_cache_gb", _cache, True),
    Change("optimizer", _eight_bit, False),
    Change("model.weights", _half_weights, False),
    Change("model.lora.rank", _adapters, False),
)


@dataclass(frozen=True, slots=True)
class Fitting:
    """Overrides with which the plan fits, and the peak that it has then."""

    overrides: tuple[str, ...]
    peak: int
    same_result: bool


def fits(peak: int, device: Device) -> bool:
    """Whether a peak leaves a tenth of the free memory; true where nobody knows how much is free."""
    return device.free is None or peak <= SHARE * device.free


def fitting(run: RunConfig, shape: ModelShape, device: Device, prompt: int | None = None) -> Fitting | None:
    """The smallest set of changes with which the run fits; None where no set does.

    Sets that leave the result as it is come before all others, whatever their size. Of a number, the largest that fits.
    """
    longest = work_of(run, shape, device, prompt).longest
    offers = [(change, values) for change in CHANGES if (values := change.values(run, longest))]
    harmless = [offer for offer in offers if offer[0].same_result]
    for some in (*_sets(harmless), *_sets(offers)):
        if found := _largest(run, shape, device, prompt, some):
            return found
    return None


def _sets(offers: list[Offer]) -> Iterator[tuple[Offer, ...]]:
    """Every set of them, smaller ones first."""
    for size in range(1, len(offers) + 1):
        yield from combinations(offers, size)


def _largest(
    run: RunConfig,
    shape: ModelShape,
    device: Device,
    prompt: int | None,
    some: tuple[Offer, ...],
) -> Fitting | None:
    """These changes with the least saving that still fits, one number after the other; None where none fits."""

    def peak(chosen: list[Any]) -> int | None:
        changed = with_changes(run, dict(zip([c.key for c, _ in some], chosen, strict=True)))
        return None if changed.problems() else plan_of(work_of(changed, shape, device, prompt), device).peak

    chosen = [values[-1] for _, values in some]
    found = peak(chosen)
    if found is None or not fits(found, device):
        return None
    for n, (_, values) in enumerate(some):
        for value in values:
            tried = [*chosen[:n], value, *chosen[n + 1 :]]
            if (bytes_ := peak(tried)) is not None and fits(bytes_, device):
                chosen, found = tried, bytes_
                break
    keys = [change.key for change, _ in some]
    return Fitting(
        tuple(f"{key}={_word(value)}" for key, value in zip(keys, chosen, strict=True)),
        found,
        all(change.same_result for change, _ in some),
    )


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
