"""Find wrong weights of response tokens: the mistake that gives them, or a description."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.engine import has_nonfinite, multiple
from rlreason.courses.check.loop_gradients import find
from rlreason.courses.check.loop_recording import (
    KNOBS,
    RecordedSample,
    RecordedUpdate,
    advantages_with,
    right_weights,
    wrong_weights,
)
from rlreason.courses.check.subject import Bug, Kind, short_text
from rlreason.objectives.measures import compute_entropy


def of_weights(
    function: str, wrong: Sequence[RecordedUpdate], updates: Sequence[RecordedUpdate], about: str
) -> Iterator[Bug]:
    """Report wrong weights of response tokens."""
    visible = [u for u in updates if u.weights is not None]
    bad = [u for u in visible if not _same(u.weights, right_weights(u))]
    if not bad or wrong[0] not in bad:
        return
    knobs = _explaining(visible)
    if knobs is None:
        yield _weight_example(function, bad[0], _described(bad), about, None)
        return
    ((knob, value),) = knobs.items()
    yield _weight_example(function, bad[0], KNOBS[knob][value], about, knobs)


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is None or has_nonfinite(a):
        return False
    return float((a - b).abs().max()) <= 2e-3 * float(b.abs().max()) + 1e-7


def _explaining(updates: Sequence[RecordedUpdate]) -> dict[str, str] | None:
    """Return the mistake that gives the weights of every update, or None."""
    ordered = sorted(updates, key=lambda u: _same(u.weights, right_weights(u)))
    for knob, values in KNOBS.items():
        for value in values:
            if all(_gives(u, {knob: value}) for u in ordered):
                return {knob: value}
    return None


def _gives(update: RecordedUpdate, knobs: dict[str, str]) -> bool:
    try:
        return _same(update.weights, wrong_weights(update, knobs))
    except Exception:  # a mistake may make nonsense of an update
        return False


def _described(bad: Sequence[RecordedUpdate]) -> Kind:
    """Describe wrong weights that no known mistake explains."""
    first = bad[0]
    assert first.weights is not None
    right = right_weights(first)
    if has_nonfinite(first.weights):
        without_eps = wrong_weights(first, {"eps": "dropped"})
        if has_nonfinite(without_eps) and torch.equal(
            *(w.isfinite() | ~first.mask for w in (without_eps, first.weights))
        ):
            where = "where advantage_eps enters the division: equal rewards have a standard deviation of 0"
            return Kind("the gradient is not finite: advantage_eps is dropped, and equal rewards give 0 / 0", where)
        return Kind("the gradient is not finite", "divisions by what can be 0")
    if _ends_lost(first, right):
        where = "how the mask of response tokens is made: it covers the end token, too"
        return Kind("end tokens have weight 0: nothing teaches the policy to stop", where)
    if not bool(first.weights.any()):
        return Kind("nothing is learned: every token has weight 0", "what is detached, and whether old and new are one")
    factors = [multiple(u.weights, right_weights(u)) or 0.0 for u in bad if u.weights is not None]
    if factors[0] and all(abs(f - factors[0]) <= 1e-3 * abs(factors[0]) for f in factors):
        name = f"the loss is a multiple of what it should be ({factors[0]:.4g} times)"
        return Kind(name, "what the loss is divided by")
    by_row = _row_factors(first, right)
    if by_row is not None:
        if (kind := _of_factors(first, by_row)) is not None:
            return kind
        if _swapped(first, right):
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


def _ends_lost(update: RecordedUpdate, right: Tensor) -> bool:
    """Whether exactly the end tokens of finished responses have no weight."""
    lost = []
    for row, s in enumerate(update.samples):
        seen, last = (
            update.weights[row].abs() > 1e-7 if update.weights is not None else right[row],
            len(s.token_ids) - 1,
        )
        if bool(right[row].any()) and last > 0:
            if not bool(seen[:last].all()):
                return False
            lost.append((not s.truncated, not bool(seen[last])))
    return bool(lost) and all(finished == gone for finished, gone in lost) and any(gone for _, gone in lost)


def _row_factors(update: RecordedUpdate, right: Tensor) -> list[float] | None:
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


def _of_factors(update: RecordedUpdate, factors: Sequence[float]) -> Kind | None:
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


def _swapped(update: RecordedUpdate, right: Tensor) -> bool:
    """Whether every response has the advantage of some response, but not all their own."""
    assert update.weights is not None
    if update.options.method != "none":
        return False
    got, own = update.weights.sum(-1), right.sum(-1)
    return all(bool(((own - a).abs() < 2e-3 * own.abs().max()).any()) for a in got)


def _group_sums(update: RecordedUpdate) -> bool:
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


def _weight_example(function: str, update: RecordedUpdate, kind: Kind, about: str, knobs: dict[str, str] | None) -> Bug:
    """The response whose weights are furthest off: its question, its group's rewards, and a token's weight."""
    assert update.weights is not None
    right = right_weights(update)
    gap = (update.weights - right).nan_to_num(1e9).abs()
    telling = torch.tensor([_is_live(update, s) for s in update.samples])
    gap = gap * telling[:, None].float() if bool((gap[telling] > 1e-6).any()) else gap
    row = int(gap.amax(-1).argmax())
    sample, place = update.samples[row], int(gap[row].argmax())
    group = [s for s in update.rollout if update.group(s) == update.group(sample)]
    told = {
        "scenario": about,
        "question": repr(update.tokenizer.decode(sample.prompt_ids)) if update.tokenizer else str(sample.prompt),
        "rewards of its responses": short_text([s.reward for s in group]),
        "this response": f"{sample.text!r}, {len(sample.token_ids)} tokens, reward {short_text(sample.reward)}",
    }
    if (mixed := _mixed_group(update, sample, knobs)) is not None:
        questions = len({update.group(s) for s in mixed})
        yours = f"its group is responses to {questions} questions, with rewards of mean {_mean(mixed):.3g}"
        if len(mixed) <= 6:
            yours += f": {short_text([s.reward for s in mixed])}"
        return Bug(function, *kind, told, yours, f"the responses to its own question, of mean {_mean(group):.3g}")
    token = repr(update.tokenizer.decode([sample.token_ids[place]])) if update.tokenizer else sample.token_ids[place]
    told["its token"] = f"number {place + 1}, {token}"
    name = "it pulls with weight"  # d loss / d log-probability
    pulls = [f"{name} {float(w[row, place]):.4g}" for w in (update.weights, right)]
    return Bug(function, *kind, told, f"{pulls[0]} (d loss / d its log-probability)", pulls[1])


def _is_live(update: RecordedUpdate, sample: RecordedSample) -> bool:
    """Whether the rewards of its question differ."""
    return len({s.reward for s in update.rollout if update.group(s) == update.group(sample)}) > 1


def _mean(samples: Sequence[RecordedSample]) -> float:
    return sum(s.reward for s in samples) / len(samples)


def _mixed_group(
    update: RecordedUpdate, sample: RecordedSample, knobs: dict[str, str] | None
) -> list[RecordedSample] | None:
    """The responses whose rewards move this one's advantage under a mistake, where they are of several questions."""
    if knobs is None:
        return None
    row = update.samples.index(sample)
    before, found = advantages_with(update, knobs)[row], []
    for s in update.rollout:
        kept, s.reward = s.reward, s.reward + 0.37
        moved = abs(float(advantages_with(update, knobs)[row] - before)) > 1e-6
        s.reward = kept
        found += [s] if moved else []
    return found if len({update.group(s) for s in found}) > 1 else None


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
