"""Gradients as they stand at the optimizer step: clipped, cleared and added up rightly or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.engine import multiple
from rlreason.courses.check.loop.recording import scored
from rlreason.courses.check.loop.seeing import find
from rlreason.courses.check.loop.tables import RecordedUpdate, right_weights
from rlreason.courses.check.subject import Bug, Kind

_ZERO = "where zero_grad is called, relative to backward and step"
_CLIP = "the call of clip_grad_norm_: once, on the whole gradient, right before the step"


def same_gradients(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether two gradients are equal up to float32 rounding, measured by the largest entry of all."""
    left, right = torch.cat([x.flatten() for x in a]), torch.cat([x.flatten() for x in b])
    if not bool(left.isfinite().all()):
        return False
    gap = float((left - right).abs().max())
    return gap <= 2e-3 * float(right.abs().max()) + 1e-7


def has_right_gradient(update: RecordedUpdate) -> bool:
    """Whether the gradient at the step is the right one."""
    return same_gradients(update.gradients["at step"], update.gradients["right"])


def of_gradients(
    function: str, wrong: Sequence[RecordedUpdate], updates: Sequence[RecordedUpdate], about: str
) -> Iterator[Bug]:
    """Gradients that go wrong between backward and step: clipping and clearing."""
    for update in wrong:
        for kind, guess in guesses(update):
            if same_gradients(update.gradients["at step"], guess):
                yield Bug(function, *kind, {"scenario": about}, *_apart(update))
                return


def _apart(update: RecordedUpdate) -> tuple[str, str]:
    """Yours and ours: the norms, or the direction where these are equal."""
    at_step, right = (torch.cat([g.flatten() for g in update.gradients[n]]) for n in ("at step", "right"))
    yours, ours = (f"gradient of norm {float(g.norm()):.4g} at the step" for g in (at_step, right))
    if yours == ours:
        cosine = float(torch.nn.functional.cosine_similarity(at_step, right, 0))
        yours += f", in another direction: cosine {cosine:.3g} with ours"
    return yours, ours


def _other_norm(update: RecordedUpdate) -> bool:
    """Whether the gradient has the right direction and another length."""
    factor = multiple(*(torch.cat([g.flatten() for g in update.gradients[n]]) for n in ("at step", "full")))
    limit, factor_is_round = float(update.gradients["limit"][0]), factor is not None and _is_round(factor)
    return factor is not None and 0 < factor < 1 and (limit < _norm(update.gradients["full"]) or not factor_is_round)


def is_scaled(update: RecordedUpdate) -> bool:
    """Whether the gradient is the right one times a number that is not far from 1."""
    if not update.gradients:
        return False
    factor = multiple(*(torch.cat([g.flatten() for g in update.gradients[n]]) for n in ("at step", "right")))
    return factor is not None and 0.3 < factor < 1.7


def _is_round(factor: float) -> bool:
    """Whether a factor is one over a small whole number, as where something is divided once too often."""
    return abs(1 / factor - round(1 / factor)) < 1e-2


def guesses(update: RecordedUpdate) -> Iterator[tuple[Kind, list[Tensor]]]:
    """Gradients at the step under mistakes of clearing and clipping."""
    full, limit = update.gradients["full"], float(update.gradients["limit"][0])
    if any(f.foreign for f in update.forwards):
        where = "copies of the policy (deepcopy): the forward pass that is learned from has to be that of `policy`"
        yield (
            Kind("a copy of the policy is learned from, so that nothing reaches the policy itself", where),
            [g * 0 for g in full],
        )
    before = update.gradients["before"]
    yield Kind("the gradient is not clipped", _CLIP), full
    added = [a + b for a, b in zip(full, before, strict=True)]
    stale = Kind("gradients of two steps add up: zero_grad is missing or at the wrong place", _ZERO)
    yield stale, clipped(added, limit)
    yield stale, added
    yield Kind("each entry of the gradient is clipped, not its norm", _CLIP), [g.clamp(-limit, limit) for g in full]
    yield Kind("the gradient is scaled to the limit even where it is smaller", _CLIP), _scaled(full, limit)
    yield Kind("nothing reaches the optimizer: gradients are cleared before the step", _ZERO), [g * 0 for g in full]
    yield (
        Kind("each parameter is clipped by its own norm, not the whole gradient", _CLIP),
        [clipped([g], limit)[0] for g in full],
    )
    micro = [update.gradients[f"micro {i}"] for i in range(len(update.micro)) if f"micro {i}" in update.gradients]
    if len(micro) > 1:
        yield (
            Kind("only the last micro-batch reaches the optimizer: zero_grad is called between micro-batches", _ZERO),
            clipped(micro[-1], limit),
        )
        yield Kind("only the first micro-batch reaches the optimizer", _ZERO), clipped(micro[0], limit)
        total = [torch.zeros_like(g) for g in full]
        for part in micro:
            total = clipped([a + b for a, b in zip(total, part, strict=True)], limit)
        yield Kind("the gradient is clipped after each micro-batch, not once before the step", _CLIP), total


def clipped(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    """The gradients with a norm of at most `limit` together, as torch clips."""
    factor = min(1.0, limit / (_norm(gradients) + 1e-6))
    return [g * factor for g in gradients]


def _scaled(gradients: Sequence[Tensor], limit: float) -> list[Tensor]:
    return [g * (limit / (_norm(gradients) + 1e-12)) for g in gradients]


def _norm(gradients: Sequence[Tensor]) -> float:
    return float(torch.cat([g.flatten() for g in gradients]).norm())


def with_gradients(update: RecordedUpdate, model: Any, limit: float, before: list[Tensor]) -> None:
    """Fill in the update's gradients: as they stand at the step, as they should, and what guesses need."""
    parameters = list(model.parameters())
    update.gradients["at step"] = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
    table = right_weights(update)
    log_probs, _ = scored(model, update.samples, update.options.temperature, update.width)

    def through(weights: Tensor) -> list[Tensor]:
        found = torch.autograd.grad((weights * log_probs).sum(), parameters, retain_graph=True, allow_unused=True)
        return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, found, strict=True)]

    full = through(table)
    update.gradients |= {"full": full, "right": clipped(full, limit), "before": before}
    update.gradients["limit"] = [torch.tensor(limit)]
    if not has_right_gradient(update):
        for number, rows in enumerate(update.micro):
            chosen = torch.zeros_like(table)
            chosen[rows] = table[rows]
            update.gradients[f"micro {number}"] = through(chosen)


def plain(function: str, update: RecordedUpdate, about: str) -> Bug:
    """A wrong gradient of which nothing else is known."""
    at_step, right = update.gradients["at step"], update.gradients["right"]
    factor = multiple(torch.cat([g.flatten() for g in at_step]), torch.cat([g.flatten() for g in right]))
    name = "the gradient at the optimizer step differs from ours"
    where = "everything between the loss and optimizer.step(): backward, zero_grad, clipping, scaling"
    if update.other_context and _begun_twice(update):
        name = "a token stands before the prompt that was not there when it was sampled (a begin token twice?)"
        where = "how prompt ids are made for the forward pass: prompt_ids are complete as they are"
    elif update.other_context:
        name = "log-probabilities are not those behind the prompt: padding or other rows are attended to"
        where = "attention_mask, position_ids and the side of the padding"
    elif _other_norm(update):
        name, where = "the gradient is clipped to another norm than max_grad_norm", _CLIP
    elif factor is not None:
        name = f"the gradient at the optimizer step is {factor:.4g} times what it should be"
    return Bug(function, name, where, {"scenario": about}, *_apart(update))


def _begun_twice(update: RecordedUpdate) -> bool:
    """Whether every row begins with something else than its prompt: padding would leave out the longest row."""
    starts = [start for f in update.forwards for ids in f.ids.tolist() for _, start in find(ids, update.samples)[:1]]
    return bool(starts) and min(starts) > 0
