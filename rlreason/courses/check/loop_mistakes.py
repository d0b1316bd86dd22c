"""Name the mistake that gives the gradient of an optimizer step.

The student's computation is performed again on the ids that the model was called with, each time with one known
mistake. It names a bug and never decides what is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rlreason.courses.check import known_bugs as bugs
from rlreason.courses.check.loop_session import Settings
from rlreason.courses.check.loop_update import Forward, RecordedSample, Update, gathered, scored
from rlreason.courses.check.subject import NO_MISTAKE, Kind, LoopBug, Mistake, known, short_text

_DIVIDED = "where the loss is divided"
_OLD = "where old log-probabilities are computed"
_SCORED = "where log-probabilities are computed from logits"
_SLICES = "slices of logits and labels where log-probabilities are gathered"
_MASKED = "how the response mask is built and which positions of the log-probabilities it is put on"
_ROWS = "what the sum over a response's tokens is divided by"
_SHIFTED = "mask shifted by one: response tokens are lost and neighbours are learned instead"
_PROMPT = "prompt positions are learned from"
_EVERYWHERE = "prompt and padding positions are learned from"
_WIDTH = "sums over tokens are divided by the padded width or sampling_max_tokens, not by the response's own tokens"
_TEMPERATURE = "temperature applied twice or upside down where log-probabilities are computed"


def _of_next_logits(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    later = torch.cat([logits[:, 1:], logits[:, -1:]], 1)
    return gathered(later, labels, temperature)


#: Steps: score as in `gathered`; mask; share (number of rows, update) -> the weight of a micro-batch, constant share
#: the same of a constant normaliser; micro the micro-batches; old, order and reward as they are named.
LOOP_MISTAKES = (
    *known("score", _SCORED,
        ("temperature ignored: log-probabilities are not those of the tempered distribution that was sampled",
         lambda z, labels, t: gathered(z, labels, 1.0)),
        (_TEMPERATURE, lambda z, labels, t: gathered(z, labels, t * t)),
        (_TEMPERATURE, lambda z, labels, t: gathered(z, labels, 1 / t)),
    ),
    *known("score", _SLICES,
        ("shifted by one: positions learn their own token again, not the next one",
         lambda z, labels, t: gathered(z, labels.roll(1, 1), t)),
        ("shifted by one: positions learn the token after the next one",
         lambda z, labels, t: gathered(z, labels.roll(-1, 1), t)),
    ),
    *known("score", _MASKED, (_SHIFTED, _of_next_logits)),
    *known("mask", _MASKED,
        (_SHIFTED, lambda mask: bugs.shifted(mask, 1)),
        (_SHIFTED, lambda mask: bugs.shifted(mask, -1)),
        (_SHIFTED, lambda mask: mask.roll(1, 1)),
        (_EVERYWHERE, torch.ones_like),
        (_PROMPT, lambda mask: bugs.nth_from_end(mask) > 0),
        (_PROMPT, lambda mask: mask | (torch.arange(mask.shape[1]) >= mask.shape[1] - mask.sum(1).max())),
        ("padding positions are learned from (behind the end of a response)", lambda mask: bugs.nth(mask) > 0),
    ),
    *known("sequence mean", _MASKED, (_EVERYWHERE, lambda gap, mask: gap.mean(-1, keepdim=True))),
    *known("finished mask", "how the mask of response tokens is made: it covers the end token, too",
           ("end tokens have weight 0: nothing teaches the policy to stop",
            lambda mask: mask & (bugs.nth_from_end(mask) > 1))),
    *known("truncated mask", "how the mask of response tokens is made: it ends with what was sampled",
           ("end token added to truncated samples", lambda mask: mask | bugs.shifted(mask, 1))),
    *known("share", "what the sum over responses is divided by",
           ("responses are summed, not averaged: their number divides nowhere", lambda n, u: n)),
    *known("share", "what is done with groups of equal rewards: they count in the mean, with advantage 0",
           ("responses to questions whose rewards are all equal are dropped, and the mean is taken over fewer",
            lambda n, u: n / len(u.samples))),
    *known("share", "where gradient_accumulation_steps divides the loss",
           ("micro-batches are added up without dividing: the gradient grows with their number", lambda n, u: 1)),
    *known("share", _DIVIDED, ("the loss is divided by the number of micro-batches twice",
                               lambda n, u: n / u.size / len(u.passes))),
    *known("share", "what the loss of a micro-batch is divided by, or multiplied with",
           ("a micro-batch weighs the same however many rows it has: a smaller one counts too much",
            lambda n, u: 1 / len(u.passes))),
    *known("micro", "where gradients are cleared",
           ("only the last micro-batch is learned from", lambda passes: passes[-1:])),
    *known("share", _DIVIDED,
           ("the loss is divided by gradient_accumulation_steps though there are fewer or more micro-batches",
            lambda n, u: 1 / u.accumulation)),
    *known("constant share", _DIVIDED,
           ("the loss of a constant normaliser is divided by the micro-batches besides",
            lambda n, u: 1 / len(u.passes))),
    *known("old", f"{_OLD}: in which loop",
           ("old log-probabilities are computed again in each epoch, not once with the samples",
            lambda s, u: scored(u.epoch_began, [s], u.options.temperature)[0])),
    *known("old", _OLD, ("old log-probabilities are taken at temperature 1, new ones at the sampling temperature",
                         lambda s, u: s.old_untempered)),
    *known("order", "the order of repeated prompts, and the reshape or loop that forms the groups",
           ("groups mix questions: neighbours in the list of samples are taken for a group", lambda u: u.rollout)),
    *known("order", "where advantages are computed: before or after the batch is cut",
           ("groups mix questions: groups are formed within a shuffled or cut train batch", lambda u: u.samples)),
    *known("truth", "how responses are gathered into groups: by their question, never by its ground truth",
           ("groups mix questions: those that have the same ground truth are taken for one group", lambda: True)),
    *known("reward", "the use of reward_fn",
        ("answer_reward is taken where the total, reward, is asked for", lambda s: s.parts["answer_reward"]),
        ("format_reward is taken where the total, reward, is asked for", lambda s: s.parts["format_reward"]),
    ),
    *known("reward", "what is done with the rewards",
           ("rewards are turned into 0 and 1", lambda s: float(s.reward > 0))),
    *known("rows", _ROWS, (_WIDTH, lambda sums, counts, width: sums / Settings.sampling_max_tokens)),
)  # fmt: skip
_OF_WIDTH = tuple(replace(m, kind=Kind(_WIDTH, _ROWS)) for m in bugs.ROW_MISTAKES if "are divided by" in m.kind.name)
MISTAKES = (
    bugs.RATIO_MISTAKES
    + LOOP_MISTAKES
    + bugs.ADVANTAGE_MISTAKES
    + bugs.SIGN_MISTAKES
    + bugs.CLIP_MISTAKES
    + bugs.TOKEN_ADVANTAGE_MISTAKES
    + bugs.WEIGHT_MISTAKES
    + bugs.SEQUENCE_MISTAKES
    + bugs.METHOD_MISTAKES
    + bugs.END_MISTAKES
    + _OF_WIDTH
    + bugs.ROW_MISTAKES
    + bugs.BATCH_MISTAKES
    + bugs.CONSTANT_MISTAKES
)
_EPS_DROPPED = next(m for m in bugs.ADVANTAGE_MISTAKES if m.kind.name.startswith("advantage_eps is dropped"))


def _mistaken_gradient(u: Update, m: Mistake, passes: Sequence[Forward] = ()) -> Tensor:
    """Return the gradient of an update's loss, or of some of its micro-batches, with one mistake."""
    o = u.options
    advantages = m.at("input", lambda right, other: right)(mistaken_advantages(u, m), _rewards(u.samples, m))
    of_sample = {s.number: a for s, a in zip(u.samples, advantages, strict=True)}
    share = m.at("constant share", lambda n, u: 1.0)
    if o.length_norm == "sequence":
        share = m.at("share", lambda n, u: n / u.size)
    total = torch.zeros(())
    for p in passes or m.at("micro", lambda passes: passes)(u.passes):
        log_probs, mask, old = _laid_out(u, p, m)
        a = torch.stack([of_sample[member.sample.number] for member in p.members])[:, None]
        loss = bugs.wrong_token_loss(bugs.LossInputs(o.method, a, log_probs, old, o.cliprange, mask), m)
        total = total + share(len(mask), u) * bugs.wrong_average(loss, mask, o.length_norm, o.constant, m)
    return u.gradient_of(total)


def _laid_out(u: Update, p: Forward, m: Mistake) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, response mask and old log-probabilities (members, places), as the student has them."""
    labels, mask = p.labels(u.tokenizer.pad_token_id, any(one.is_cut for one in u.passes))
    log_probs: Tensor = m.at("score", gathered)(u.logits(p), labels, u.options.temperature)
    outside = u.options.old_outside
    old = log_probs.detach().clone() if outside is None else torch.full_like(log_probs.detach(), outside)
    old[mask] = torch.cat([m.at("old", lambda s, u: s.old)(member.sample, u) for member in p.members])
    for i, member in enumerate(p.members):
        step = "truncated mask" if member.sample.truncated else "finished mask"
        mask[i : i + 1] = m.at(step, lambda mask: mask)(mask[i : i + 1])
    if m.step != "sequence mean":  # a mean over the whole row, which reaches all of it
        log_probs = log_probs.where(m.at("mask", lambda mask: mask)(mask), log_probs.detach())
    return log_probs, mask, old


def _rewards(samples: Sequence[RecordedSample], m: Mistake) -> Tensor:
    """Return the rewards (n,), or what is mistaken for them."""
    return torch.tensor([m.at("reward", lambda s: s.reward)(s) for s in samples])


def mistaken_advantages(u: Update, m: Mistake) -> Tensor:
    """Return the advantages (n,) of the update's samples, with one mistake."""
    o = u.options
    if m.step == "truth":
        truths = [s.truth for s in u.rollout]
        return u.advantages(_rewards(u.rollout, m), [truths.index(truth) for truth in truths])
    by_group = sorted(u.rollout, key=lambda s: s.prompt) if m.step != "batch" else u.rollout
    ranked = m.at("order", lambda update: by_group)(u)
    size = max(Counter(s.prompt for s in u.rollout).values())
    advantages = bugs.wrong_advantages(
        _rewards(ranked, m), bugs.AdvantageOptions(size, o.baseline, o.advantage_eps, o.normalizer), m
    )
    place = {s.number: i for i, s in enumerate(ranked)}
    return advantages[torch.tensor([place[s.number] for s in u.samples])]


def explained(wrong: Sequence[Update], updates: Sequence[Update]) -> LoopBug:
    """Return the bug of the first wrong update: the known mistake that gives the gradients, or what they look like."""
    first = wrong[0]
    if first.has_other_context:
        return LoopBug(_other_context(first), *_yours_and_ours(first))
    for update in wrong:
        for kind, guess in _wrong_steps(update):
            if update.is_at_step(guess):
                return LoopBug(kind, *_yours_and_ours(update))
    others = [u for u in updates if u is not first]
    for m in MISTAKES:
        if all(_gives(u, m) for u in (first, *others)):
            return _example(first, m)
    described = _described(first)
    if described is None and (weights := _row_weights(first)) is not None:
        return _of_rows(first, *weights)
    where = "between logits and optimizer.step(): the per-token loss, its mask, what is added to it, backward"
    differs = Kind("the gradient at the optimizer step differs from ours", where)
    return LoopBug(described or differs, *_yours_and_ours(first))


def _gives(u: Update, m: Mistake) -> bool:
    """Return whether the mistake gives the gradient at the step."""
    try:
        return u.is_at_step(u.clipped(_mistaken_gradient(u, m)))
    except Exception:  # a mistake may make nonsense of an update
        return False


_ZERO = "where zero_grad is called, relative to backward and step"
_CLIP = "the call of clip_grad_norm_: once, on the whole gradient, right before the step"


def _wrong_steps(u: Update) -> Iterator[tuple[Kind, Tensor]]:
    """Yield gradients at the step under mistakes of clearing and clipping."""
    full, limit = u.full, u.options.max_grad_norm
    nothing = full * 0
    if any(f.foreign for f in u.forwards):
        where = "copies of the policy (deepcopy): the forward pass that is learned from has to be that of `policy`"
        yield Kind("a copy of the policy is learned from, so that nothing reaches the policy itself", where), nothing
    yield Kind("the gradient is not clipped", _CLIP), full
    stale = Kind("gradients of two steps add up: zero_grad is missing or at the wrong place", _ZERO)
    yield stale, u.clipped(full + u.before)
    yield stale, full + u.before
    yield Kind("each entry of the gradient is clipped, not its norm", _CLIP), full.clamp(-limit, limit)
    yield (
        Kind("the gradient is scaled to the limit even where it is smaller", _CLIP),
        full * (limit / (float(full.norm()) + 1e-12)),
    )
    if any(f.learned for f in u.forwards):
        yield Kind("nothing reaches the optimizer: gradients are cleared before the step", _ZERO), nothing
    parts = full.split([p.numel() for p in u.parameters])
    one_by_one = Kind("each parameter is clipped by its own norm, not the whole gradient", _CLIP)
    yield one_by_one, torch.cat([u.clipped(part) for part in parts])
    if len(u.passes) < 2:
        return
    micro = [_mistaken_gradient(u, NO_MISTAKE, [p]) for p in u.passes]
    last = Kind("only the last micro-batch reaches the optimizer: zero_grad is called between micro-batches", _ZERO)
    yield last, u.clipped(micro[-1])
    yield Kind("only the first micro-batch reaches the optimizer", _ZERO), u.clipped(micro[0])
    total = nothing
    for part in micro:
        total = u.clipped(total + part)
    yield Kind("the gradient is clipped after each micro-batch, not once before the step", _CLIP), total


def _described(u: Update) -> Kind | None:
    """Describe a wrong gradient that no known mistake explains, by its size; None if that says nothing."""
    factor = u.factor()
    if not bool(u.at_step.isfinite().all()):
        if not bool(_mistaken_gradient(u, _EPS_DROPPED).isfinite().all()):
            where = "where advantage_eps enters the division: equal rewards have a standard deviation of 0"
            return Kind("the gradient is not finite: advantage_eps is dropped, and equal rewards give 0 / 0", where)
        return Kind("the gradient is not finite", "divisions by what can be 0")
    if not bool(u.at_step.any()):
        return Kind("nothing is learned: every token has weight 0", "what is detached, and whether old and new are one")
    if _has_other_norm(u):
        return Kind("the gradient is clipped to another norm than max_grad_norm", _CLIP)
    if factor is not None:
        name = f"the gradient at the optimizer step is {factor:.4g} times what it should be"
        return Kind(name, "what the loss is divided by, and what scales gradients between backward and step")
    return None


def _other_context(u: Update) -> Kind:
    """Describe logits of responses that are not those behind their prompts alone."""
    if min(member.start for p in u.passes for member in p.members) > 0:  # padding leaves out the longest row
        name = "a token stands before the prompt that was not there when it was sampled (a begin token twice?)"
        return Kind(name, "how prompt ids are made for the forward pass: prompt_ids are complete as they are")
    name = "log-probabilities are not those behind the prompt: padding or other rows are attended to"
    return Kind(name, "attention_mask, position_ids and the side of the padding")


def _has_other_norm(u: Update) -> bool:
    """Return whether the gradient has the right direction and a smaller norm, as after clipping.

    One over a whole number is the factor of a division, not of a clip, unless the limit applies.
    """
    factor = u.factor()
    is_limited = u.options.max_grad_norm < float(u.full.norm())
    if factor is None or (not is_limited and not 0 < factor < 1):
        return False
    return is_limited or abs(1 / factor - round(1 / factor)) >= 1e-2


def _row_weights(u: Update) -> tuple[Tensor, Tensor] | None:
    """Return the weights (n,) of the responses' mean log-probabilities in the step's gradient, and the right ones.

    None if the gradient is no sum of theirs, or if a ratio weighs the tokens.
    """
    if u.options.method != "none" or u.options.length_norm != "sequence":
        return None
    means = (u.log_probs * u.mask).sum(1) / u.mask.sum(1)
    each = torch.stack([u.gradient_of(mean) for mean in means]).double()
    weights = torch.linalg.lstsq(each.T, u.at_step.double()[:, None]).solution[:, 0].float()
    if not u.is_at_step(weights @ each.float()):
        return None
    return weights, -u.right_advantages() / u.size


def _of_rows(u: Update, weights: Tensor, right: Tensor) -> LoopBug:
    """Return the bug of wrong weights of whole responses, with the response whose weight is furthest off."""
    groups = torch.tensor([s.prompt for s in u.samples])
    sums = torch.stack([weights[groups == group].sum() for group in groups.unique()])
    if all(bool(((right - weight).abs() < 2e-3 * right.abs().max()).any()) for weight in weights):
        kind = Kind("responses get one another's advantages", "the indices that pick advantages for a micro-batch")
    elif bool((sums.abs() > 1e-3 * weights.abs().max()).any()):
        name = "advantages of a group do not add up to 0, as where groups mix questions"
        kind = Kind(name, "how groups are formed and what is subtracted from the rewards")
    else:
        name = "responses have other weights than they should, the same for all tokens of a response"
        kind = Kind(name, "advantages, and what each response or micro-batch is divided by")
    row = int((weights - right).abs().argmax())
    pulls = (f"its mean log-probability weighs {float(weights[row]):.4g} in the loss", f"{float(right[row]):.4g}")
    return LoopBug(kind, *pulls, _response(u, u.samples[row]))


def _example(u: Update, m: Mistake) -> LoopBug:
    """Return the bug; if the mistake changes advantages, with the response whose advantage is furthest off."""
    right, got = u.right_advantages(), mistaken_advantages(u, m)
    gap = (got - right).nan_to_num(1e9).abs()
    if float(gap.max()) < 1e-4:
        return LoopBug(m.kind, *_yours_and_ours(u))
    row = int(gap.argmax())
    yours = f"its advantage is {float(got[row]):.4g}"
    return LoopBug(m.kind, yours, f"{float(right[row]):.4g}", _response(u, u.samples[row]))


def _response(u: Update, sample: RecordedSample) -> dict[str, str]:
    """Return one response in words, with its question and the rewards of its group."""
    return {
        "question": repr(u.tokenizer.decode(sample.prompt_ids)),
        "rewards of its responses": short_text([s.reward for s in u.rollout if s.prompt == sample.prompt]),
        "this response": f"{sample.text!r}, {len(sample.token_ids)} tokens, reward {short_text(sample.reward)}",
    }


def _yours_and_ours(u: Update) -> tuple[str, str]:
    """Return the norms of both gradients as text, and the angle between them if these are equal."""
    right = u.clipped(u.full)
    yours, ours = (f"gradient of norm {float(g.norm()):.4g} at the step" for g in (u.at_step, right))
    if yours == ours:
        cosine = float(torch.nn.functional.cosine_similarity(u.at_step, right, 0))
        yours += f", in another direction: cosine {cosine:.3g} with ours"
    return yours, ours
