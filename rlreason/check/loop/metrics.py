"""Entropies and clip fractions that a loop or a step reports: means over response tokens, or over other places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from rlreason.check.loop.seeing import find
from rlreason.check.loop.tables import Update
from rlreason.objectives.scoring import compute_entropy

Found = tuple[str, float, float]  # name, as reported, as it should be


def misplaced(reported: Mapping[str, float], update: Update) -> Iterator[Found]:
    """Reported numbers that are means over prompt or padding positions too, where the right mean is another."""
    for name, value in reported.items():
        right, wrong = _candidates(name, update)
        if right and not _near(value, right) and _near(value, wrong):
            yield name, value, right[0]


def unlike(reported: Mapping[str, float], update: Update) -> Iterator[Found]:
    """Reported entropies and clip fractions that are no mean over response tokens at all."""
    for name, value in reported.items():
        right, wrong = _candidates(name, update)
        if right and not _near(value, right) and not _near(value, wrong):
            yield name, value, right[0]


def _near(value: float, candidates: list[float]) -> bool:
    return any(abs(value - c) <= 1e-3 * (1e-2 + abs(c)) for c in candidates)


def _candidates(name: str, update: Update) -> tuple[list[float], list[float]]:
    """(right values, values over wrong places) of what a name stands for; empty where it is neither."""
    lower = name.lower()
    if "entropy" in lower and not any(word in lower for word in ("coef", "bonus", "loss", "std", "max", "min")):
        return _entropies(update)
    if "clip" in lower and not any(word in lower for word in ("range", "grad", "norm", "eps", "high", "low", "upper")):
        return _clipped(update)
    return [], []


def _entropies(update: Update) -> tuple[list[float], list[float]]:
    right: list[float] = []
    wrong: list[float] = []
    temperatures = dict.fromkeys((update.options.temperature, 1.0))
    for t in temperatures:
        everywhere, responses, behind, before = [], [], [], []
        per_row, per_pass = [], []
        for forward in update.forwards:
            if forward.logits is None:
                return [], []
            entropies = compute_entropy(forward.logits / t)
            full = entropies[:, :-1] if forward.ids.shape[1] == entropies.shape[1] else entropies
            everywhere.append(full.flatten())
            inside = []
            for row, ids in enumerate(forward.ids.tolist()):
                for sample, start in find(ids, update.rollout)[:1]:
                    first = start + len(sample.prompt_ids) - 1
                    last = first + len(sample.token_ids)
                    inside.append(entropies[row, first:last])
                    behind.append(entropies[row, first:])
                    before.append(entropies[row, :last])
            responses += inside
            per_row += [float(part.mean()) for part in inside]
            per_pass.append(torch.cat(inside) if inside else torch.zeros(1))
        if not responses:
            return [], []
        tokens, n = torch.cat(responses), sum(len(part) for part in everywhere)
        right += [float(tokens.mean()), _mean(per_row), _mean([float(p.mean()) for p in per_pass])]
        wrong += [
            float(torch.cat(everywhere).mean()),
            _mean([float(part.mean()) for part in everywhere]),
            float(torch.cat(behind).mean()),
            float(torch.cat(before).mean()),
            float(tokens.sum()) / n,
            float(torch.cat(everywhere).sum()) / len(tokens),
            sum(float(compute_entropy(f.logits / t).sum()) for f in update.forwards if f.logits is not None)
            / len(tokens),
            _mean([float(p.sum()) / len(e) for p, e in zip(per_pass, everywhere, strict=True)]),
            _mean([float(f.mean()) for f in behind]),
            _mean([float(f.mean()) for f in before]),
            *_with_cut_column(update, t),
        ]
    return right, wrong


def _with_cut_column(update: Update, t: float) -> list[float]:
    """Means over every position of every pass, the last column included."""
    parts = [compute_entropy(f.logits / t) for f in update.forwards if f.logits is not None]
    return [float(torch.cat([p.flatten() for p in parts]).mean()), _mean([float(p.mean()) for p in parts])]


def _clipped(update: Update) -> tuple[list[float], list[float]]:
    o = update.options
    if o.method not in ("grpo", "gspo"):
        return [], []
    mask, c = update.mask, o.cliprange
    gap = (update.log_probs - update.old()).masked_fill(~mask, 0.0)
    if o.method == "gspo":
        gap = (gap.sum(-1) / mask.sum(-1).clamp(min=1))[:, None].expand_as(gap)
    ratio = gap.exp()
    outside = ((ratio < 1 - c) | (ratio > 1 + c)) & mask
    lost = outside & _bound(update, ratio, c)
    right, wrong = [], []
    for hit in (lost, outside):
        hits = hit.float()
        rows = hits.sum(-1) / mask.sum(-1).clamp(min=1)
        right += [float(hits.sum() / mask.sum()), float(rows.mean())]
        right += [_mean([float(hits[r].sum() / mask[r].sum().clamp(min=1)) for r in update.micro])]
        places = sum(f.ids.numel() for f in update.forwards)
        cut = sum(f.ids.shape[0] * (f.ids.shape[1] - 1) for f in update.forwards)
        by_pass = [float(hits[r].sum()) for r in update.micro]
        for total in (places, cut):
            if total:
                wrong.append(float(hits.sum()) / total)
        if len(by_pass) == len(update.forwards):
            for less in (0, 1):
                shares = [
                    hit_count / (f.ids.shape[0] * (f.ids.shape[1] - less))
                    for hit_count, f in zip(by_pass, update.forwards, strict=True)
                ]
                wrong.append(_mean(shares))
    return right, wrong


def _bound(update: Update, ratio: Tensor, c: float) -> Tensor:
    """Where the bound is the smaller term, by the sign of the advantage that the rewards give."""
    groups = {s.prompt for s in update.rollout}
    means = {p: _mean([s.reward for s in update.rollout if s.prompt == p]) for p in groups}
    a = torch.tensor([s.reward - means[s.prompt] for s in update.samples])[:, None]
    return ((a > 1e-6) & (ratio > 1 + c)) | ((a < -1e-6) & (ratio < 1 - c))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
