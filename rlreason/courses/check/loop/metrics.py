"""Compare entropies and clip fractions that a loop or a step reports with means over response tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.loop.seeing import find
from rlreason.courses.check.loop.tables import RecordedUpdate
from rlreason.courses.check.subject import Kind
from rlreason.objectives.measures import compute_entropy

_ENTROPY = {"entropy", "meanentropy", "avgentropy", "tokenentropy", "meantokenentropy", "responseentropy"}
_CLIPPED = {"clipfraction", "clipfrac", "meanclipfraction", "clippedfraction", "fractionclipped", "clipped"}


def not_a_mean(name: str) -> Kind:
    """Return the kind of bug of a number that is no mean over response tokens."""
    wrong = "is no mean over the update's response tokens: prompt or padding positions, or another divisor"
    return Kind(f"the reported {name} {wrong}", f"the mean that makes {name}: which positions it is over")


def numbers(row: Any) -> dict[str, float]:
    """Return the numbers in a dictionary of metrics."""
    found = {}
    for name, value in row.items() if isinstance(row, dict) else ():
        with suppress(TypeError, ValueError, RuntimeError):
            found[str(name)] = float(value)
    return found


def unlike(
    reported: Mapping[str, float], update: RecordedUpdate, lenient: bool = False
) -> Iterator[tuple[str, float, float]]:
    """(name, as reported, as it should be) of entropies and clip fractions that are no mean over response tokens.

    A mean over tokens, a mean of the responses' means and one of the micro-batches' means are all right; where
    `lenient`, that of a single micro-batch is, too. Names that say something else than a mean are left alone.
    """
    for name, value in reported.items():
        letters = "".join(filter(str.isalpha, name.lower()))
        right: list[float] = []
        if letters in _ENTROPY:
            right = [mean for parts in _entropies(update) for mean in _means(parts, lenient)]
        elif letters in _CLIPPED:
            right = [mean for parts in _clipped(update) for mean in _means(parts, lenient)]
        if right and not any(abs(value - r) <= 1e-3 * (1e-2 + abs(r)) for r in right):
            yield name, value, right[0]


Parts = list[list[Tensor]]  # of each micro-batch, of each response, the values of its tokens


def _means(parts: Parts, lenient: bool) -> list[float]:
    rows = [row for part in parts for row in part]
    if not rows:
        return []
    passes = [float(torch.cat(part).mean()) for part in parts if part]
    by_row = sum(float(row.mean()) for row in rows) / len(rows)
    return [float(torch.cat(rows).mean()), by_row, sum(passes) / len(passes), *(passes if lenient else [])]


def _entropies(update: RecordedUpdate) -> Iterator[Parts]:
    """Return entropies of the response tokens at the sampling temperature and at 1; {} if logits are unknown."""
    if any(forward.logits is None for forward in update.forwards):
        return
    for t in dict.fromkeys((update.options.temperature, 1.0)):
        parts: Parts = []
        for forward in update.forwards:
            assert forward.logits is not None
            values = compute_entropy(forward.logits.float() / t)
            parts.append([])
            for row, ids in enumerate(forward.ids.tolist()):
                for sample, start in find(ids, update.rollout)[:1]:
                    first = start + len(sample.prompt_ids) - 1
                    parts[-1].append(values[row, first : first + len(sample.token_ids)])
        yield parts


def _clipped(update: RecordedUpdate) -> Iterator[Parts]:
    """Whether a response token's clipped term is the smaller one, and whether its ratio is outside the range."""
    o = update.options
    if o.method not in ("grpo", "gspo"):
        return
    mask, c = update.mask, o.cliprange
    gap = (update.log_probs - update.old()).masked_fill(~mask, 0.0)
    if o.method == "gspo":
        gap = (gap.sum(-1) / mask.sum(-1).clamp(min=1))[:, None].expand_as(gap)
    ratio = gap.exp()
    above, below = ratio > 1 + c, ratio < 1 - c
    a = _centered(update)[:, None]
    for hits in ((above & (a > 1e-6)) | (below & (a < -1e-6)), above | below):
        yield [[hits[i, : len(update.samples[i].token_ids)].float() for i in rows] for rows in update.micro]


def _centered(update: RecordedUpdate) -> Tensor:
    """Return (n,) rewards minus their group's mean: the signs of the advantages."""

    def mean(rewards: Sequence[float]) -> float:
        return sum(rewards) / len(rewards)

    groups = {update.group(s) for s in update.rollout}
    means = {g: mean([s.reward for s in update.rollout if update.group(s) == g]) for g in groups}
    return torch.tensor([s.reward - means[update.group(s)] for s in update.samples])
