"""Compute the right weights of response tokens, and name the mistake that gives the weights of an update."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlreason.courses.check.known_bugs import (
    ADVANTAGE_MISTAKES,
    BATCH_MISTAKES,
    CLIP_MISTAKES,
    CONSTANT_MISTAKES,
    METHOD_MISTAKES,
    RATIO_MISTAKES,
    RESPONSE_MASK_MISTAKES,
    ROW_MISTAKES,
    SEQUENCE_MISTAKES,
    SIGN_MISTAKES,
    TOKEN_ADVANTAGE_MISTAKES,
    WEIGHT_MISTAKES,
    AdvantageOptions,
    LossInputs,
    wrong_advantages,
    wrong_average,
    wrong_token_loss,
)
from rlreason.courses.check.loop_recording import RecordedSample, RecordedUpdate
from rlreason.courses.check.observing import has_nonfinite, multiple
from rlreason.courses.check.subject import Kind, LoopBug, Mistake, known, short_text
from rlreason.objectives.advantages import compute_group_advantages
from rlreason.objectives.aggregation import aggregate_loss
from rlreason.objectives.losses import LOSSES

LOSS_OF = {"none": "reinforce_with_baseline", "noclip": "grpo_no_clip", "grpo": "grpo_clip", "gspo": "gspo"}
NORM_OF = {"std": "group_std", "none": "none", "mean": "group_mean"}


def right_weights(update: RecordedUpdate) -> Tensor:
    """Return d loss / d log-probability (n, width), by `rlreason.objectives`."""
    o = update.options
    groups = [update.group(s) for s in update.rollout]
    a = _advantages_by_group(update, torch.tensor([s.reward for s in update.rollout]), groups)[:, None]
    leaf, mask = update.log_probs.detach().requires_grad_(), update.mask
    clip = {"cliprange_low": o.cliprange, "cliprange_high": o.cliprange} if o.method in ("grpo", "gspo") else {}
    loss, _ = LOSSES[LOSS_OF[o.method]](a, leaf, update.old(), mask, **clip)
    by_row = o.length_norm == "sequence"
    total = aggregate_loss(
        loss,
        mask,
        "masked_mean" if by_row else "constant",
        n_sequences=update.size if by_row else 1,
        n_tokens=0,
        constant=o.constant,
    )
    return torch.autograd.grad(total, leaf)[0]


def _advantages_by_group(update: RecordedUpdate, rewards: Tensor, groups: Sequence[int]) -> Tensor:
    """Return the advantages (n,) of the update's samples, from rewards and groups of its rollout."""
    o = update.options
    advantages = compute_group_advantages(
        rewards,
        torch.tensor(groups),
        baseline=o.baseline,
        std_norm=NORM_OF[o.normalizer],
        advantage_eps=o.advantage_eps,
    )
    return advantages[torch.tensor(update.places())]


_DIVIDED = "where the loss is divided"
_OLD = "where old log-probabilities are computed"
#: Steps: share (number of rows, update) -> the weight of a micro-batch, constant share the same of a constant
#: normaliser; micro the micro-batches; old, order and reward as they are named.
LOOP_MISTAKES = (
    *known("share", "what the sum over responses is divided by",
           ("responses are summed, not averaged: their number divides nowhere", lambda n, u: n)),
    *known("share", "what is done with groups of equal rewards: they count in the mean, with advantage 0",
           ("responses to questions whose rewards are all equal are dropped, and the mean is taken over fewer",
            lambda n, u: n / len(u.samples))),
    *known("share", "where gradient_accumulation_steps divides the loss",
           ("micro-batches are added up without dividing: the gradient grows with their number", lambda n, u: 1)),
    *known("share", _DIVIDED, ("the loss is divided by the number of micro-batches twice",
                               lambda n, u: n / u.size / len(u.micro))),
    *known("share", "what the loss of a micro-batch is divided by, or multiplied with",
           ("a micro-batch weighs the same however many rows it has: a smaller one counts too much",
            lambda n, u: 1 / len(u.micro))),
    *known("micro", "where gradients are cleared",
           ("only the last micro-batch is learned from", lambda micro: micro[-1:])),
    *known("share", _DIVIDED,
           ("the loss is divided by gradient_accumulation_steps though there are fewer or more micro-batches",
            lambda n, u: 1 / u.accumulation)),
    *known("constant share", _DIVIDED,
           ("the loss of a constant normaliser is divided by the micro-batches besides",
            lambda n, u: 1 / len(u.micro))),
    *known("old", f"{_OLD}: in which loop",
           ("old log-probabilities are computed again in each epoch, not once with the samples",
            lambda u: u.old("refreshed"))),
    *known("old", _OLD, ("old log-probabilities are taken at temperature 1, new ones at the sampling temperature",
                         lambda u: u.old("untempered"))),
    *known("order", "the order of repeated prompts, and the reshape or loop that forms the groups",
           ("groups mix questions: neighbours in the list of samples are taken for a group", lambda u: u.rollout)),
    *known("order", "where advantages are computed: before or after the batch is cut",
           ("groups mix questions: groups are formed within a shuffled or cut train batch", lambda u: u.samples)),
    *known("truth", "how responses are gathered into groups: by their question, never by its ground truth",
           ("groups mix questions: those that have the same ground truth are taken for one group", lambda: True)),
    *known("reward", "the use of reward_fn",
        ("answer_reward is taken where the total, reward, is asked for",
         lambda s: s.parts.get("answer_reward", s.reward)),
        ("format_reward is taken where the total, reward, is asked for",
         lambda s: s.parts.get("format_reward", s.reward)),
    ),
    *known("reward", "what is done with the rewards",
           ("rewards are turned into 0 and 1", lambda s: float(s.reward > 0))),
)  # fmt: skip
_WIDTH = Kind(
    "sums over tokens are divided by the padded width or sampling_max_tokens, not by the response's own tokens",
    "what the sum over a response's tokens is divided by",
)
MISTAKES = (
    *RATIO_MISTAKES,
    *LOOP_MISTAKES,
    *ADVANTAGE_MISTAKES,
    *SIGN_MISTAKES,
    *CLIP_MISTAKES,
    *TOKEN_ADVANTAGE_MISTAKES,
    *WEIGHT_MISTAKES,
    *SEQUENCE_MISTAKES,
    *METHOD_MISTAKES,
    *RESPONSE_MASK_MISTAKES,
    *(replace(m, kind=_WIDTH) if "padded width" in m.kind.name else m for m in ROW_MISTAKES),
    *BATCH_MISTAKES,
    *CONSTANT_MISTAKES,
)


_EPS_DROPPED = next(m for m in ADVANTAGE_MISTAKES if m.kind.name.startswith("advantage_eps is dropped"))


def wrong_weights(update: RecordedUpdate, m: Mistake) -> Tensor:
    """Return d loss / d log-probability (n, width), with one mistake."""
    o, how = update.options, update.options.length_norm
    a = m.at("input", lambda right, other: right)(wrong_update_advantages(update, m), _rewards(update.samples, m))
    leaf, mask = update.log_probs.detach().requires_grad_(), update.mask
    old = m.at("old", lambda update: update.old())(update).where(mask, update.log_probs)  # after its end: no ratio
    share = m.at("constant share", lambda n, update: 1.0)
    if how == "sequence":
        share = m.at("share", lambda n, update: n / update.size)
    total = torch.zeros(())
    for rows in m.at("micro", lambda micro: micro)(update.micro):
        inputs = LossInputs(o.method, a[rows, None], leaf[rows], old[rows], o.cliprange, mask[rows])
        part = wrong_average(wrong_token_loss(inputs, m), mask[rows], how, o.constant, m)
        total = total + share(len(rows), update) * part
    return torch.autograd.grad(total, leaf)[0] * mask


def _rewards(samples: Sequence[RecordedSample], m: Mistake) -> Tensor:
    """Return the rewards (n,), or what is mistaken for them."""
    return torch.tensor([m.at("reward", lambda s: s.reward)(s) for s in samples])


def wrong_update_advantages(update: RecordedUpdate, m: Mistake) -> Tensor:
    """Return the advantages (n,) of the update's samples, with one mistake."""
    o = update.options
    if m.step == "truth":
        truths = [s.truth for s in update.rollout]
        if len(set(truths)) == len({update.group(s) for s in update.rollout}):
            raise ValueError("no two questions have the same ground truth")
        return _advantages_by_group(update, _rewards(update.rollout, m), [truths.index(truth) for truth in truths])
    by_group = sorted(update.rollout, key=update.group) if m.step != "batch" else update.rollout
    ranked = m.at("order", lambda update: by_group)(update)
    size = max(Counter(update.group(s) for s in update.rollout).values())
    if len(ranked) % size:
        raise ValueError("no whole groups")
    options = AdvantageOptions(size, o.baseline, o.advantage_eps, o.normalizer)
    advantages = wrong_advantages(_rewards(ranked, m), options, m)
    number = {s.number: i for i, s in enumerate(ranked)}
    return advantages[torch.tensor([number[s.number] for s in update.samples])]


def findings_of_weights(wrong: Sequence[RecordedUpdate], updates: Sequence[RecordedUpdate]) -> Iterator[LoopBug]:
    """Yield the mistake that gives response tokens wrong weights, if the first wrong update has any."""
    visible = [u for u in updates if u.weights is not None]
    bad = [u for u in visible if not _same(u.weights, right_weights(u))]
    if not bad or wrong[0] not in bad:
        return
    ordered = sorted(visible, key=lambda u: _same(u.weights, right_weights(u)))
    mistake = next((m for m in MISTAKES if all(_gives(u, m) for u in ordered)), None)
    yield _example(bad[0], mistake.kind if mistake else _describe(bad), mistake)


def _same(a: Tensor | None, b: Tensor) -> bool:
    if a is None or has_nonfinite(a):
        return False
    return float((a - b).abs().max()) <= 2e-3 * float(b.abs().max()) + 1e-7


def _gives(update: RecordedUpdate, mistake: Mistake) -> bool:
    try:
        return _same(update.weights, wrong_weights(update, mistake))
    except Exception:  # a mistake may make nonsense of an update
        return False


def _describe(bad: Sequence[RecordedUpdate]) -> Kind:
    """Describe wrong weights that no known mistake explains."""
    first = bad[0]
    assert first.weights is not None
    right = right_weights(first)
    if has_nonfinite(first.weights):
        without_eps = wrong_weights(first, _EPS_DROPPED)
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
    """Return whether exactly the end tokens of finished responses have no weight."""
    assert update.weights is not None
    lost = []
    for row, s in enumerate(update.samples):
        last = len(s.token_ids) - 1
        seen = update.weights[row].abs() > 1e-7
        if bool(right[row].any()) and last > 0:
            if not bool(seen[:last].all()):
                return False
            lost.append((not s.truncated, not bool(seen[last])))
    return bool(lost) and all(finished == gone for finished, gone in lost) and any(gone for _, gone in lost)


def _row_factors(update: RecordedUpdate, right: Tensor) -> list[float] | None:
    """Return each row's factor between its weights and the right ones; None if some row has no single factor."""
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
    """Return the kind of bug where the factors of rows follow from their micro-batch or lengths, else None."""
    lengths = update.mask.sum(-1).tolist()
    where = "what the sum over a response's tokens is divided by"

    def constant(values: Sequence[float]) -> bool:
        numbers = [v for v in values if v == v]
        return all(abs(v - numbers[0]) <= 2e-3 * abs(numbers[0]) for v in numbers)

    if all(constant([factors[i] for i in rows]) for rows in update.micro) and len(update.micro) > 1:
        return Kind(
            "the weight of a response depends on the micro-batch that it is in",
            "what the loss of a micro-batch is divided by, and where gradients are cleared",
        )
    by_length = [f / n for f, n in zip(factors, lengths, strict=True)]
    if constant(by_length):
        name = "sums over tokens are not divided by the response's own tokens, but by one number for all"
        return Kind(name, where)
    if all(constant([by_length[i] for i in rows]) for rows in update.micro):
        name = "sums over tokens are divided by the padded width, or another number of the micro-batch's own"
        return Kind(name, where)
    return None


def _swapped(update: RecordedUpdate, right: Tensor) -> bool:
    """Return whether responses have one another's advantages."""
    assert update.weights is not None
    if update.options.method != "none":
        return False
    got, own = update.weights.sum(-1), right.sum(-1)
    return all(bool(((own - a).abs() < 2e-3 * own.abs().max()).any()) for a in got)


def _group_sums(update: RecordedUpdate) -> bool:
    """Return whether the advantages that the weights imply do not add up to 0 in some group."""
    if update.options.method != "none" or update.weights is None:
        return False
    lengths = update.mask.sum(-1)
    read = -(update.weights.sum(-1)) * update.size
    prompts = torch.tensor([s.prompt for s in update.samples])
    if bool((lengths == 0).any()):
        return False
    sums = torch.stack([read[prompts == p].sum() for p in prompts.unique()])
    return bool((sums.abs() > 1e-3 * read.abs().max()).any())


def _example(update: RecordedUpdate, kind: Kind, mistake: Mistake | None) -> LoopBug:
    """Return the finding with the response whose weights are furthest off: its question, group and token."""
    assert update.weights is not None
    right = right_weights(update)
    gap = (update.weights - right).nan_to_num(1e9).abs()
    live = torch.tensor([len({x.reward for x in _group_of(update, s)}) > 1 for s in update.samples])
    if bool((gap[live] > 1e-6).any()):
        gap = gap * live[:, None].float()
    row = int(gap.amax(-1).argmax())
    sample, place = update.samples[row], int(gap[row].argmax())
    group = _group_of(update, sample)
    inputs = {
        "question": repr(update.tokenizer.decode(sample.prompt_ids)),
        "rewards of its responses": short_text([s.reward for s in group]),
        "this response": f"{sample.text!r}, {len(sample.token_ids)} tokens, reward {short_text(sample.reward)}",
    }
    if (mixed := _mixed_group(update, sample, mistake)) is not None:
        questions = len({update.group(s) for s in mixed})
        yours = f"its group is responses to {questions} questions, with rewards of mean {_mean(mixed):.3g}"
        if len(mixed) <= 6:
            yours += f": {short_text([s.reward for s in mixed])}"
        return LoopBug(kind, yours, f"the responses to its own question, of mean {_mean(group):.3g}", inputs)
    inputs["its token"] = f"number {place + 1}, {update.tokenizer.decode([sample.token_ids[place]])!r}"
    yours, ours = (f"it pulls with weight {float(w[row, place]):.4g}" for w in (update.weights, right))
    return LoopBug(kind, f"{yours} (d loss / d its log-probability)", ours, inputs)


def _group_of(update: RecordedUpdate, sample: RecordedSample) -> list[RecordedSample]:
    return [s for s in update.rollout if update.group(s) == update.group(sample)]


def _mean(samples: Sequence[RecordedSample]) -> float:
    return sum(s.reward for s in samples) / len(samples)


def _mixed_group(
    update: RecordedUpdate, sample: RecordedSample, mistake: Mistake | None
) -> list[RecordedSample] | None:
    """Return the responses whose rewards change this one's advantage under a mistake; None if of one question only."""
    if mistake is None:
        return None
    row = update.samples.index(sample)
    before, mixed = wrong_update_advantages(update, mistake)[row], []
    for s in update.rollout:
        reward, s.reward = s.reward, s.reward + 0.37
        if abs(float(wrong_update_advantages(update, mistake)[row] - before)) > 1e-6:
            mixed.append(s)
        s.reward = reward
    return mixed if len({update.group(s) for s in mixed}) > 1 else None
