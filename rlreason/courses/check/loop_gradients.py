"""Gradients as they stand at the optimizer step: clipped, cleared and added up rightly or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.engine import multiple
from rlreason.courses.check.loop_recording import Forward, RecordedSample, RecordedUpdate, right_weights, scored
from rlreason.courses.check.subject import Bug, Kind


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


_CALL = "the call of reward_fn: what is handed to it as response and as ground truth"


def of_truths(
    function: str,
    samples: Sequence[RecordedSample],
    judgements: Sequence[tuple[str, str]],
    truths: Sequence[str],
    told: dict[str, str],
) -> Iterator[Bug]:
    """Responses that were judged, but never with their own question's ground truth: the first one."""
    asked = set(judgements)
    texts = {text for text, _ in judgements}
    for s in samples:
        if (s.text, s.truth) in asked or (s.text.strip(), s.truth) in asked:
            continue
        kind, yours = _kind(s, judgements, texts, truths), ""
        if s.text in texts and "swapped" not in kind:
            yours = f"judged by {next(truth for text, truth in judgements if text == s.text)!r}"
        elif "swapped" not in kind:
            yours = f"judged text {next((text for text, truth in judgements if truth == s.truth), 'nothing')!r}"
        more = told | {"response": repr(s.text), "its ground truth": repr(s.truth)}
        yield Bug(function, kind, _CALL, more, yours, "this response judged by this ground truth")
        return


def _kind(s: RecordedSample, judgements: Sequence[tuple[str, str]], texts: set[str], truths: Sequence[str]) -> str:
    if any(truth == s.text for _, truth in judgements):
        return "reward_fn gets ground truth and response in swapped places"
    if s.text in texts:
        other = next(truth for text, truth in judgements if text == s.text)
        if other in truths:
            return "answers are misaligned: a response is judged by another question's ground truth"
        return "reward_fn gets something else than the question's ground truth"
    if any(text.endswith(s.text) and len(text) > len(s.text) for text, truth in judgements if truth == s.truth):
        return "the reward is not asked for the text that was sampled: prompt and response are handed over together"
    return "the reward is not asked for the text that was sampled"
