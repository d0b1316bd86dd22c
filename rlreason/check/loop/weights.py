"""Weights of response tokens that are not right: the mistake that gives them, or what they look like."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from rlreason.check.compare import is_wild, multiple
from rlreason.check.loop.tables import KNOBS, Update, right_weights, wrong_weights
from rlreason.check.subject import Finding, Kind
from rlreason.check.words import shown

SECONDS = 2.0  # of looking for the mistakes that give the weights that were seen


def of_weights(function: str, wrong: Sequence[Update], updates: Sequence[Update], about: str) -> Iterator[Finding]:
    """Weights of response tokens that are not right."""
    visible = [u for u in updates if u.weights is not None]
    bad = [u for u in visible if not _same(u.weights, right_weights(u))]
    if not bad or wrong[0] not in bad:
        return
    knobs = _explaining(visible)
    kinds = [KNOBS[knob][value] for knob, value in knobs.items()] if knobs else [_described(bad)]
    for kind in kinds:
        yield _weight_example(function, bad[0], kind, about)


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is None or is_wild(a):
        return False
    return float((a - b).abs().max()) <= 2e-3 * float(b.abs().max()) + 1e-7


def _explaining(updates: Sequence[Update]) -> dict[str, str] | None:
    """The mistakes, one or two, that give the weights of every update; None where none do."""
    singles = [(knob, value) for knob, values in KNOBS.items() for value in values]
    tries: list[dict[str, str]] = [{knob: value} for knob, value in singles]
    tries += [dict([a, b]) for a, b in combinations(singles, 2) if a[0] != b[0] and a[0] in _PAIRED]
    ordered = sorted(updates, key=lambda u: _same(u.weights, right_weights(u)))
    until = time.monotonic() + SECONDS
    for knobs in tries:
        if time.monotonic() > until:
            return None
        if all(_gives(u, knobs) for u in ordered):
            return knobs
    return None


#: Knobs that are tried together with every other one.
_PAIRED = ("micro", "old", "order", "groups", "spread", "eps")


def _gives(update: Update, knobs: dict[str, str]) -> bool:
    try:
        return _same(update.weights, wrong_weights(update, knobs))
    except Exception:  # a mistake may make nonsense of an update
        return False


def _described(bad: Sequence[Update]) -> Kind:
    """What wrong weights look like that no known mistake explains."""
    first = bad[0]
    assert first.weights is not None
    right = right_weights(first)
    if is_wild(first.weights):
        return Kind("the gradient is not finite", "divisions by what can be 0")
    if not bool(first.weights.any()):
        return Kind("nothing is learned: every token has weight 0", "what is detached, and whether old and new are one")
    factors = [multiple(u.weights, right_weights(u)) for u in bad if u.weights is not None]
    if all(f is not None for f in factors):
        told = ", ".join(f"{f:.4g}" for f in dict.fromkeys(round(f or 0, 5) for f in factors))
        return Kind(f"the loss is a multiple of what it should be ({told} times)", "what the loss is divided by")
    by_row = _row_factors(first, right)
    if by_row is not None:
        if (kind := _of_factors(first, by_row)) is not None:
            return kind
        if _swapped(first, by_row):
            where = "the indices that pick advantages for a micro-batch"
            return Kind("responses get one another's advantages", where)
        if _group_sums(first):
            return Kind(
                "advantages of a group do not add up to 0, as where groups mix questions",
                "how groups are formed and what is subtracted from the rewards",
            )
        return Kind(
            "responses have other weights than they should, the same for all tokens of a response",
            "advantages, and what each response is divided by",
        )
    return Kind("tokens have other weights than they should", "the per-token loss and its mask")


def _row_factors(update: Update, right: Tensor) -> list[float] | None:
    """Of each row, the number that its right weights are multiplied with; None where there is none for some row."""
    assert update.weights is not None
    factors = []
    for seen, should in zip(update.weights, right, strict=True):
        if not bool(should.any()):
            factors.append(float("nan") if not bool(seen.abs().max() > 1e-6) else float("inf"))
            continue
        factor = float((seen @ should) / (should @ should))
        if float((seen - factor * should).abs().max()) > 1e-3 * float(should.abs().max()) * max(1.0, abs(factor)):
            return None
        factors.append(factor)
    return factors


def _of_factors(update: Update, factors: Sequence[float]) -> Kind | None:
    """What rows with these factors have in common: the micro-batch, or their lengths."""
    lengths = update.mask.sum(-1).tolist()
    divided = "what the sum over a response's tokens is divided by"

    def constant(values: Sequence[float]) -> bool:
        known = [v for v in values if v == v]
        return all(abs(v - known[0]) <= 2e-3 * abs(known[0]) for v in known)

    if all(constant([factors[i] for i in rows]) for rows in update.micro) and len(update.micro) > 1:
        where = "what the loss of a micro-batch is divided by, and where gradients are cleared"
        return Kind("the weight of a response depends on the micro-batch that it is in", where)
    by_length = [f / n for f, n in zip(factors, lengths, strict=True)]
    if constant(by_length):
        name = "sums over tokens are not divided by the response's own tokens, but by one number for all"
        return Kind(name, divided)
    if all(constant([by_length[i] for i in rows]) for rows in update.micro):
        name = "sums over tokens are divided by the padded width, or another number of the micro-batch's own"
        return Kind(name, divided)
    return None


def _swapped(update: Update, factors: Sequence[float]) -> bool:
    """Whether every response has the advantage of some response, but not all their own."""
    right = right_weights(update) * update.mask.sum(-1, keepdim=True)
    own = right[:, 0]
    if update.options.method != "none" or bool((own == 0).any()) or any(f != f for f in factors):
        return False
    got = own * torch.tensor(list(factors))
    return all(bool(((own - a).abs() < 2e-3 * own.abs().max()).any()) for a in got)


def _group_sums(update: Update) -> bool:
    """Whether advantages as read from the weights add up to something in a group that is whole in the update."""
    if update.options.method != "none" or update.weights is None:
        return False
    lengths = update.mask.sum(-1)
    read = -(update.weights.sum(-1)) * update.size
    prompts = torch.tensor([s.prompt for s in update.samples])
    if bool((lengths == 0).any()):
        return False
    sums = torch.stack([read[prompts == p].sum() for p in prompts.unique()])
    return bool((sums.abs() > 1e-3 * read.abs().max()).any())


def _weight_example(function: str, update: Update, kind: Kind, about: str) -> Finding:
    """The response whose first weight is furthest off, with its group."""
    assert update.weights is not None
    right = right_weights(update)
    gap = (update.weights - right).nan_to_num(1e9).abs()
    row = int(gap.amax(-1).argmax())
    sample, n = update.samples[row], len(update.samples[row].token_ids)
    group = [s for s in update.rollout if s.prompt == sample.prompt]
    told = {
        "scenario": about,
        "rewards of its question": shown([s.reward for s in group]),
        "its reward": shown(sample.reward),
        "its tokens": str(n),
        "responses in the update": str(len(update.samples)),
    }
    name = "weight (d loss / d log-probability) of its tokens"
    return Finding(function, *kind, told, f"{name} {shown(update.weights[row, :n])}", f"{name} {shown(right[row, :n])}")
