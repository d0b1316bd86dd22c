"""Judge the gradient that reaches the optimizer, and the entropies and clip fractions that are reported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.loop_recording import RecordedUpdate, find, scored
from rlreason.courses.check.loop_weights import right_weights
from rlreason.courses.check.observing import multiple
from rlreason.courses.check.subject import Kind, LoopBug
from rlreason.objectives.terms import compute_entropy

_ZERO = "where zero_grad is called, relative to backward and step"
_CLIP = "the call of clip_grad_norm_: once, on the whole gradient, right before the step"
Gradients = Sequence[Tensor]  # one tensor for each parameter


def with_gradients(update: RecordedUpdate, model: Any, limit: float, before: list[Tensor]) -> None:
    """Fill in the update's gradients: at the step, the right one clipped and not, and of each micro-batch if wrong.

    `limit` is the largest norm; `before` is the gradient that the step before left behind.
    """
    parameters = list(model.parameters())
    table = right_weights(update)
    log_probs, _ = scored(model, update.samples, update.options.temperature, update.width)

    def through(weights: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad((weights * log_probs).sum(), parameters, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]

    full = through(table)
    update.gradients |= {
        "at step": [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters],
        "full": full,
        "right": clipped(full, limit),
        "before": before,
        "limit": [torch.tensor(limit)],
    }
    if not has_right_gradient(update):
        for number, rows in enumerate(update.micro):
            chosen = torch.zeros_like(table)
            chosen[rows] = table[rows]
            update.gradients[f"micro {number}"] = through(chosen)


def _flat(gradients: Gradients) -> Tensor:
    return torch.cat([g.flatten() for g in gradients])


def _norm(gradients: Gradients) -> float:
    return float(_flat(gradients).norm())


def clipped(gradients: Gradients, limit: float) -> list[Tensor]:
    """Return the gradients scaled to a common norm of at most `limit`, as torch clips."""
    factor = min(1.0, limit / (_norm(gradients) + 1e-6))
    return [g * factor for g in gradients]


def same_gradients(a: Gradients, b: Gradients) -> bool:
    """Return whether two gradients are equal up to float32 rounding, relative to the largest entry."""
    left, right = _flat(a), _flat(b)
    if not bool(left.isfinite().all()):
        return False
    gap = float((left - right).abs().max())
    return gap <= 2e-3 * float(right.abs().max()) + 1e-7


def has_right_gradient(update: RecordedUpdate) -> bool:
    """Return whether the gradient at the step is the right one."""
    return same_gradients(update.gradients["at step"], update.gradients["right"])


def is_scaled(update: RecordedUpdate) -> bool:
    """Return whether the gradient is the right one times a number not far from 1."""
    if not update.gradients:
        return False
    factor = multiple(_flat(update.gradients["at step"]), _flat(update.gradients["right"]))
    return factor is not None and 0.3 < factor < 1.7


def findings_of_gradients(wrong: Sequence[RecordedUpdate], updates: Sequence[RecordedUpdate]) -> Iterator[LoopBug]:
    """Yield the known mistake between backward and step that gives the gradient of some wrong update."""
    for update in wrong:
        for kind, guess in _guesses(update):
            if same_gradients(update.gradients["at step"], guess):
                yield LoopBug(kind, *_yours_and_ours(update))
                return


def _guesses(update: RecordedUpdate) -> Iterator[tuple[Kind, Gradients]]:
    """Yield gradients at the step under mistakes of clearing and clipping."""
    full, before, limit = update.gradients["full"], update.gradients["before"], float(update.gradients["limit"][0])
    nothing = [g * 0 for g in full]
    if any(f.foreign for f in update.forwards):
        where = "copies of the policy (deepcopy): the forward pass that is learned from has to be that of `policy`"
        yield Kind("a copy of the policy is learned from, so that nothing reaches the policy itself", where), nothing
    yield Kind("the gradient is not clipped", _CLIP), full
    added = [a + b for a, b in zip(full, before, strict=True)]
    stale = Kind("gradients of two steps add up: zero_grad is missing or at the wrong place", _ZERO)
    yield stale, clipped(added, limit)
    yield stale, added
    yield Kind("each entry of the gradient is clipped, not its norm", _CLIP), [g.clamp(-limit, limit) for g in full]
    scaled = [g * (limit / (_norm(full) + 1e-12)) for g in full]
    yield Kind("the gradient is scaled to the limit even where it is smaller", _CLIP), scaled
    yield Kind("nothing reaches the optimizer: gradients are cleared before the step", _ZERO), nothing
    one_by_one = [clipped([g], limit)[0] for g in full]
    yield Kind("each parameter is clipped by its own norm, not the whole gradient", _CLIP), one_by_one
    micro = [update.gradients[f"micro {i}"] for i in range(len(update.micro)) if f"micro {i}" in update.gradients]
    if len(micro) > 1:
        last = Kind("only the last micro-batch reaches the optimizer: zero_grad is called between micro-batches", _ZERO)
        yield last, clipped(micro[-1], limit)
        yield Kind("only the first micro-batch reaches the optimizer", _ZERO), clipped(micro[0], limit)
        total = [torch.zeros_like(g) for g in full]
        for part in micro:
            total = clipped([a + b for a, b in zip(total, part, strict=True)], limit)
        yield Kind("the gradient is clipped after each micro-batch, not once before the step", _CLIP), total


def unknown_gradient(update: RecordedUpdate) -> LoopBug:
    """Describe a wrong gradient that no known mistake explains."""
    factor = multiple(_flat(update.gradients["at step"]), _flat(update.gradients["right"]))
    name = "the gradient at the optimizer step differs from ours"
    where = "everything between the loss and optimizer.step(): backward, zero_grad, clipping, scaling"
    starts = [start for f in update.forwards for ids in f.ids.tolist() for _, start in find(ids, update.samples)[:1]]
    if update.other_context and starts and min(starts) > 0:  # padding would leave out the longest row
        name = "a token stands before the prompt that was not there when it was sampled (a begin token twice?)"
        where = "how prompt ids are made for the forward pass: prompt_ids are complete as they are"
    elif update.other_context:
        name = "log-probabilities are not those behind the prompt: padding or other rows are attended to"
        where = "attention_mask, position_ids and the side of the padding"
    elif _has_other_norm(update):
        name, where = "the gradient is clipped to another norm than max_grad_norm", _CLIP
    elif factor is not None:
        name = f"the gradient at the optimizer step is {factor:.4g} times what it should be"
    return LoopBug(Kind(name, where), *_yours_and_ours(update))


def _has_other_norm(update: RecordedUpdate) -> bool:
    """Return whether the gradient has the right direction and a smaller norm, as after clipping.

    One over a whole number is the factor of a division, not of a clip, unless the limit applies.
    """
    factor = multiple(_flat(update.gradients["at step"]), _flat(update.gradients["full"]))
    if factor is None or not 0 < factor < 1:
        return False
    is_limited = float(update.gradients["limit"][0]) < _norm(update.gradients["full"])
    return is_limited or abs(1 / factor - round(1 / factor)) >= 1e-2


def _yours_and_ours(update: RecordedUpdate) -> tuple[str, str]:
    """Return the norms of both gradients as text, and the angle between them if these are equal."""
    at_step, right = _flat(update.gradients["at step"]), _flat(update.gradients["right"])
    yours, ours = (f"gradient of norm {float(g.norm()):.4g} at the step" for g in (at_step, right))
    if yours == ours:
        cosine = float(torch.nn.functional.cosine_similarity(at_step, right, 0))
        yours += f", in another direction: cosine {cosine:.3g} with ours"
    return yours, ours


_ENTROPY = {"entropy", "meanentropy", "avgentropy", "tokenentropy", "meantokenentropy", "responseentropy"}
_CLIPPED = {"clipfraction", "clipfrac", "meanclipfraction", "clippedfraction", "fractionclipped", "clipped"}


def not_a_mean(name: str) -> Kind:
    """Return the kind of bug of a reported number that is no mean over response tokens."""
    wrong = "is no mean over the update's response tokens: prompt or padding positions, or another divisor"
    return Kind(f"the reported {name} {wrong}", f"the mean that makes {name}: which positions it is over")


def numbers(row: Any) -> dict[str, float]:
    """Return the numbers in a dictionary of metrics."""
    out = {}
    for name, value in row.items() if isinstance(row, dict) else ():
        with suppress(TypeError, ValueError, RuntimeError):
            out[str(name)] = float(value)
    return out


def unlike(
    reported: Mapping[str, float], update: RecordedUpdate, lenient: bool = False
) -> Iterator[tuple[str, float, float]]:
    """Yield (name, reported, right) of entropies and clip fractions that are no mean over response tokens.

    A mean over tokens, of the responses' means and of the micro-batches' means are all right; if `lenient`, the mean of
    one micro-batch too. Other names are left alone.
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


Parts = list[list[Tensor]]  # micro-batch -> response -> values of its tokens


def _means(parts: Parts, lenient: bool) -> list[float]:
    """Return all means that are right."""
    rows = [row for part in parts for row in part]
    if not rows:
        return []
    passes = [float(torch.cat(part).mean()) for part in parts if part]
    by_row = sum(float(row.mean()) for row in rows) / len(rows)
    return [float(torch.cat(rows).mean()), by_row, sum(passes) / len(passes), *(passes if lenient else [])]


def _entropies(update: RecordedUpdate) -> Iterator[Parts]:
    """Yield the entropies of response tokens at the sampling temperature and at 1; nothing if logits are unknown."""
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
    """Yield where the clipped term is the smaller one, and where the ratio is outside the range."""
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
    """Return rewards (n,) minus their group's mean, which have the signs of the advantages."""
    groups: dict[int, list[float]] = {}
    for s in update.rollout:
        groups.setdefault(update.group(s), []).append(s.reward)
    means = {group: sum(rewards) / len(rewards) for group, rewards in groups.items()}
    return torch.tensor([s.reward - means[update.group(s)] for s in update.samples])
