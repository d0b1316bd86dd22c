"""What recorded gradients of logits say: which tokens were learned, and with which weight.

A loss that reaches the logits through log pi alone has
d loss / d logits = weight / T x (one-hot of the token - softmax(logits / T)) at the token's place, and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.loop.recording import Forward, RecordedSample


def seen_weights(
    forwards: Sequence[Forward], known: Sequence[RecordedSample], width: int, temperature: float
) -> dict[str, Any]:
    """What the recorded gradients of logits say: samples, micro-batches, weights, and what else got a gradient."""
    places: dict[int, int] = {}
    samples: list[RecordedSample] = []
    micro: list[list[int]] = []
    rows: list[Tensor] = []
    outside: dict[str, float] = {}
    strangers: list[list[int]] = []
    temperatures = tuple(dict.fromkeys((temperature, 1.0, temperature**2, 1 / temperature)))
    misfit = dict.fromkeys(temperatures, 0.0)
    shifts: list[dict[int, int]] = []
    visible = True
    for forward in forwards:
        if not forward.backward:
            continue
        members = []
        for row, ids in enumerate(forward.ids.tolist()):
            hits = list(find(ids, known))
            if not hits and (forward.gradient is None or bool(forward.gradient[row].any())):
                strangers.append(ids)
            for sample, start in hits:
                if sample.number not in places:
                    places[sample.number] = len(samples)
                    samples.append(sample)
                    rows.append(torch.zeros(width))
                members.append(places[sample.number])
                if forward.gradient is None or forward.logits is None:
                    visible = False
                    continue
                gradient, logits = forward.gradient[row], forward.logits[row]
                weights, misses = _read(gradient, logits, sample, start, temperatures)
                shifts.append(_shifts(gradient, ids, sample, start))
                rows[places[sample.number]][: len(weights)] += weights
                for t, miss in misses.items():
                    misfit[t] = max(misfit[t], miss)
                if len(hits) == 1:
                    _note_outside(outside, gradient, sample, start)
        micro.append(members)
    fits = [t for t, miss in misfit.items() if miss < 1e-2]
    return {
        "samples": samples,
        "micro": [m for m in micro if m],
        "weights": torch.stack(rows) if rows and visible else None,
        "outside": outside,
        "strangers": strangers,
        "temperature_seen": fits[0] if fits else None,
        "label_shift": next((d for d in (-1, 1, -2) if shifts and all(s.get(d) for s in shifts)), 0),
    }


def other_context(forwards: Sequence[Forward], samples: Sequence[RecordedSample], there: Tensor) -> bool:
    """Whether recorded logits differ from those of the samples by themselves, `there` (n, width, vocab)."""
    place = {s.number: i for i, s in enumerate(samples)}
    for forward in forwards:
        for row, ids in enumerate(forward.ids.tolist() if forward.logits is not None else []):
            for sample, start in find(ids, samples):
                first = start + len(sample.prompt_ids) - 1
                assert forward.logits is not None
                seen = forward.logits[row, first : first + len(sample.token_ids)]
                ours = there[place[sample.number], : len(seen)]
                if float((seen - ours).abs().max()) > 1e-2 * float(ours.abs().max()):
                    return True
    return False


def find(ids: Sequence[int], known: Sequence[RecordedSample]) -> list[tuple[RecordedSample, int]]:
    """The samples that stand in a row of ids, all but perhaps their last token, and where each begins."""
    text = f" {' '.join(map(str, ids))} "
    found = []
    for sample in known:
        needle = f" {' '.join(map(str, sample.ids[:-1]))} "
        at = text.find(needle)
        if at >= 0:
            found.append((sample, text[: at + 1].count(" ") - 1))
    if len(found) > 1:  # a sample that begins like a longer one which is there
        longest = max(len(s.ids) for s, _ in found)
        inside = [(s, at) for s, at in found if at == found[0][1]]
        if len(inside) == len(found):
            found = [(s, at) for s, at in found if len(s.ids) == longest]
    return found


def _read(
    gradient: Tensor, logits: Tensor, sample: RecordedSample, start: int, temperatures: Sequence[float]
) -> tuple[Tensor, dict[float, float]]:
    """The weights of a sample's tokens, and how badly each temperature explains the gradient (0: exactly)."""
    first = start + len(sample.prompt_ids) - 1
    n = min(len(sample.token_ids), len(gradient) - first)
    g, z = gradient[first : first + n], logits[first : first + n]
    labels = torch.tensor(sample.token_ids[:n])
    misses, weights = {}, torch.zeros(n)
    for t in reversed(temperatures):  # the weights are those at the first
        direction = -(z / t).softmax(-1)
        direction[torch.arange(n), labels] += 1
        along = (g * direction).sum(-1) / direction.square().sum(-1)
        rest = (g - along[:, None] * direction).norm(dim=-1)
        sizes, least = g.norm(dim=-1), 1e-3 * gradient.norm(dim=-1).max()
        counted = sizes > max(float(least), 1e-7)  # the gradient of advantage 0 is rounding
        misses[t] = float((rest / sizes)[counted].max()) if bool(counted.any()) else 0.0
        weights = along * t
    return weights, misses


def _shifts(gradient: Tensor, ids: Sequence[int], sample: RecordedSample, start: int) -> dict[int, int]:
    """Whether the tokens that are learned at a response's places stand `shift` places off the right ones."""
    first = start + len(sample.prompt_ids) - 1
    at = [p for p in range(first, min(first + len(sample.token_ids), len(gradient))) if bool(gradient[p].any())]
    learned = {p: trained_token(gradient[p]) for p in at}
    found = {}
    for shift in (-1, 1, -2):
        known = [p for p in at if 0 <= p + 1 + shift < len(ids)]
        found[shift] = int(len(known) > 0 and all(ids[p + 1 + shift] == learned[p] for p in known))
    return found


def trained_token(gradient: Tensor) -> int:
    """The token whose log-probability a gradient of logits (vocab,) is of: the one with a sign of its own."""
    for sign in (1, -1):
        if int((sign * gradient > 0).sum()) == 1:
            return int((sign * gradient).argmax())
    return int(gradient.abs().argmax())


def _note_outside(outside: dict[str, float], gradient: Tensor, sample: RecordedSample, start: int) -> None:
    """Gradients before the response and behind it."""
    first = start + len(sample.prompt_ids) - 1
    last = first + len(sample.token_ids)
    largest = float(gradient.abs().max())
    if sample.truncated and last < len(gradient) and bool(gradient[last].any()):
        outside["token behind truncated"] = trained_token(gradient[last])
    behind = int(gradient[last:].any(-1).sum()) if last < len(gradient) else 0
    outside["places behind"] = max(outside.get("places behind", 0), behind)
    for name, part in (("prompt", gradient[:first]), ("behind", gradient[last:])):
        found = float(part.abs().max()) if part.numel() else 0.0
        if found > 1e-3 * largest and found > 0:
            outside[name] = max(outside.get(name, 0.0), found)
