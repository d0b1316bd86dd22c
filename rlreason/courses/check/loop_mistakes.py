"""Name the mistake that gives the gradient of an optimizer step.

The student's computation is performed again on the ids that the model was called with, each time with one known
mistake. It names a bug and never decides what is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rlreason.courses.check import mistakes as known
from rlreason.courses.check.mistakes import NO_MISTAKE, Mistake, mistakes_in, nth_from_end, step
from rlreason.courses.check.recording import Forward, RecordedSample, Update, gathered, scored
from rlreason.courses.check.records import Bug, Kind, short_text

_TEMPERATURE = "temperature ignored, applied twice or upside down where log-probabilities are computed"
_SHIFTED = "mask shifted by one: response tokens are lost and neighbours are learned instead"


def _of_next_logits(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    return gathered(torch.cat([logits[:, 1:], logits[:, -1:]], 1), labels, temperature)


step("score", "where log-probabilities are computed from logits: the temperature, and the slices of logits and labels",
    gathered,
    (_TEMPERATURE, lambda z, labels, t: gathered(z, labels, 1.0)),
    (_TEMPERATURE, lambda z, labels, t: gathered(z, labels, t * t)),
    (_TEMPERATURE, lambda z, labels, t: gathered(z, labels, 1 / t)),
    ("shifted by one: positions learn their own token again, not the next one",
     lambda z, labels, t: gathered(z, labels.roll(1, 1), t)),
    ("shifted by one: positions learn the token after the next one",
     lambda z, labels, t: gathered(z, labels.roll(-1, 1), t)),
    (_SHIFTED, _of_next_logits),
)  # fmt: skip
step("window", "how the response mask is built", lambda mask: mask,
    ("prompt positions count: every row has as many as the longest response",
     lambda mask: mask | (torch.arange(mask.shape[1]) >= mask.shape[1] - mask.sum(1).max())),
)  # fmt: skip
step("finished mask", "how the mask of response tokens is made: it covers the end token, too", lambda mask: mask,
    ("end tokens have weight 0: nothing teaches the policy to stop", lambda mask: mask & (nth_from_end(mask) > 1)),
)  # fmt: skip
# The weight of a micro-batch of n rows.
step("share", "what the sum over responses is divided by, and where gradient_accumulation_steps divides",
    lambda n, u: n / u.size,
    ("responses are summed, not averaged: their number divides nowhere", lambda n, u: n),
    ("responses to questions whose rewards are all equal are dropped, and the mean is taken over fewer",
     lambda n, u: n / len(u.samples)),
    ("micro-batches are added up without dividing: the gradient grows with their number", lambda n, u: 1),
    ("a micro-batch weighs the same however many rows it has: a smaller one counts too much",
     lambda n, u: 1 / len(u.passes)),
    ("the loss is divided by gradient_accumulation_steps though there are fewer or more micro-batches",
     lambda n, u: 1 / u.session.settings["gradient_accumulation_steps"]),
)  # fmt: skip
step("constant share", "where the loss is divided", lambda u: 1.0,
    ("the loss of a constant normaliser is divided by the micro-batches besides", lambda u: 1 / len(u.passes)),
)  # fmt: skip
step("old", "where old log-probabilities are computed: in which loop, and at which temperature", lambda s, u: s.old,
    ("old log-probabilities are computed again in each epoch, not once with the samples",
     lambda s, u: scored(u.epoch_began, [s], u.options.temperature)[0]),
    ("old log-probabilities are taken at temperature 1, new ones at the sampling temperature",
     lambda s, u: scored(u.sampler, [s], 1.0)[0]),
)  # fmt: skip
step("order", "the order of repeated prompts, and where advantages are computed: before or after the batch is cut",
    lambda u: sorted(u.rollout, key=lambda s: s.prompt),
    ("groups mix questions: neighbours in the list of samples are taken for a group", lambda u: u.rollout),
    ("groups mix questions: groups are formed within a shuffled or cut train batch", lambda u: u.samples),
)  # fmt: skip
step("truth", "how responses are gathered into groups: by their question, never by its ground truth",
    lambda s: s.prompt,
    ("groups mix questions: those that have the same ground truth are taken for one group", lambda s: hash(s.truth)),
)  # fmt: skip
step("max tokens", "what the sum over a response's tokens is divided by", lambda counts: 1.0,
    (known.WIDTH, lambda counts: counts / 6),
)  # fmt: skip
STEPS = (
    "ratio", "score", "finished mask", "mask", "window", "share", "constant share", "old", "order",
    "truth", *known.ADVANTAGES, "read", "sign", *known.LOSSES, "max tokens", "rows", "batch average", "constant",
)  # fmt: skip


def _mistaken_gradient(u: Update, m: Mistake, passes: Sequence[Forward] = ()) -> Tensor:
    """Return the gradient of an update's loss, or of some of its micro-batches, with one mistake."""
    o = u.options
    advantages = m("input", _advantages(u, m), _rewards(u.samples, m))
    of_sample = {s.number: a for s, a in zip(u.samples, advantages, strict=True)}
    total = torch.zeros(())
    for p in passes or u.passes:
        log_probs, mask, old = _laid_out(u, p, m)
        a = torch.stack([of_sample[member.sample.number] for member in p.members])[:, None]
        loss = known.wrong_token_loss(o, a, log_probs, old, mask, m)
        loss = loss * m("max tokens", mask.sum(-1, keepdim=True))
        share = m("share", len(mask), u) if o.loss_normalization == "sequence" else m("constant share", u)
        total = total + share * known.wrong_average(loss, mask, o, m)
    return u.gradient_of(total)


def _laid_out(u: Update, p: Forward, m: Mistake) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities, response mask and old log-probabilities (members, places), as the student has them."""
    labels, mask = p.labels(u.tokenizer.pad_token_id, any(one.is_cut for one in u.passes))
    log_probs: Tensor = m("score", u.logits(p), labels, u.options.temperature)
    outside = u.options.old_outside
    old = log_probs.detach().clone() if outside is None else torch.full_like(log_probs.detach(), outside)
    old[mask] = torch.cat([m("old", member.sample, u) for member in p.members])
    finished = torch.tensor([[not member.sample.truncated] for member in p.members])
    mask = m("finished mask", mask).where(finished, mask)
    return log_probs, m("window", mask), old


def _rewards(samples: Sequence[RecordedSample], m: Mistake) -> Tensor:
    """Return the rewards (n,), or what is mistaken for them."""
    return torch.tensor([m("read", s.parts) for s in samples])


def _advantages(u: Update, m: Mistake) -> Tensor:
    """Return the advantages (n,) of the update's samples, with one mistake."""
    if m.step == "truth":
        return u.advantages([m("truth", s) for s in u.rollout])
    ranked = m("order", u) if m.step != "batch" else u.rollout
    size = max(Counter(s.prompt for s in u.rollout).values())
    advantages = known.wrong_advantages(_rewards(ranked, m), size, u.options, m)
    place = {s.number: i for i, s in enumerate(ranked)}
    return advantages[torch.tensor([place[s.number] for s in u.samples])]


def explained(wrong: Sequence[Update], updates: Sequence[Update]) -> Bug:
    """Return the bug of the first wrong update: the known mistake that gives the gradients, or what they look like."""
    first = wrong[0]
    if first.has_other_context:
        return _bug(first, *_other_context(first))
    for update in wrong:
        for kind, guess in _wrong_steps(update):
            if update.is_at_step(guess):
                return _bug(update, *kind)
    others = [u for u in updates if u is not first]
    for m in mistakes_in(*STEPS):
        if all(_gives(u, m) for u in (first, *others)):
            weights, right = -_advantages(first, m), -first.right_advantages()
            return _bug_of_response(first, m.name, m.where, weights, right) or _bug(first, m.name, m.where)
    return _bug_of_weights(first) or _bug(first, *_described(first))


def _gives(u: Update, m: Mistake) -> bool:
    """Return whether the mistake gives the gradient at the step."""
    try:
        return u.is_at_step(u.clipped(_mistaken_gradient(u, m)))
    except Exception:  # a mistake may make nonsense of an update
        return False


def _bug(u: Update, name: str, where: str) -> Bug:
    """Return a bug with the norms of both gradients, and the angle between them."""
    right = u.clipped(u.full)
    cosine = float(torch.nn.functional.cosine_similarity(u.at_step, right, 0))
    yours = f"gradient of norm {float(u.at_step.norm()):.4g} at the step, cosine {cosine:.3g} with ours"
    return Bug(name, where, yours, f"norm {float(right.norm()):.4g}")


def _bug_of_response(u: Update, name: str, where: str, weights: Tensor, right: Tensor) -> Bug | None:
    """Return a bug with the response whose weight (n,) is furthest off; None if none is off."""
    gap = (weights - right).nan_to_num(1e9).abs()
    row = int(gap.argmax())
    if float(gap[row]) < 1e-4:
        return None
    sample = u.samples[row]
    shown = {
        "question": repr(u.tokenizer.decode(sample.prompt_ids)),
        "rewards of its responses": short_text([s.reward for s in u.rollout if s.prompt == sample.prompt]),
        "this response": f"{sample.text!r}, {len(sample.token_ids)} tokens, reward {short_text(sample.reward)}",
    }
    yours = f"its mean log-probability weighs {float(weights[row]):.4g} in the loss"
    return Bug(name, where, yours, f"{float(right[row]):.4g}", shown)


_ZERO = "where zero_grad is called, relative to backward and step"
_CLIP = "the call of clip_grad_norm_: once, on the whole gradient, right before the step"


def _wrong_steps(u: Update) -> Iterator[tuple[Kind, Tensor]]:
    """Yield gradients at the step under mistakes of clearing and clipping."""
    full, limit = u.full, u.options.max_grad_norm
    yield ("the gradient is not clipped", _CLIP), full
    stale = "gradients of two steps add up: zero_grad is missing or at the wrong place", _ZERO
    yield stale, u.clipped(full + u.before)
    yield stale, full + u.before
    yield ("each entry of the gradient is clipped, not its norm", _CLIP), full.clamp(-limit, limit)
    if any(f.learned for f in u.forwards):
        name = (
            "nothing reaches the optimizer: gradients are cleared before the step, or are those of a copy of the policy"
        )
        yield (name, f"{_ZERO}; copies of the policy (deepcopy)"), full * 0
    if len(u.passes) < 2:
        return
    micro = [_mistaken_gradient(u, NO_MISTAKE, [p]) for p in u.passes]
    name = "only the last micro-batch reaches the optimizer: zero_grad is called between micro-batches"
    yield (name, _ZERO), u.clipped(micro[-1])
    total = full * 0
    for part in micro:
        total = u.clipped(total + part)
    yield ("the gradient is clipped after each micro-batch, not once before the step", _CLIP), total


def _other_context(u: Update) -> Kind:
    """Describe logits of responses that are not those behind their prompts alone."""
    if min(member.start for p in u.passes for member in p.members) > 0:  # padding leaves out the longest row
        name = "a token stands before the prompt that was not there when it was sampled (a begin token twice?)"
        return name, "how prompt ids are made for the forward pass: prompt_ids are complete as they are"
    name = "log-probabilities are not those behind the prompt: padding or other rows are attended to"
    return name, "attention_mask, position_ids and the side of the padding"


def _described(u: Update) -> Kind:
    """Describe a wrong gradient that no known mistake explains."""
    factor = u.factor()
    if not bool(u.at_step.isfinite().all()):
        name = "the gradient is not finite: 0 / 0, as where advantage_eps is dropped and rewards are equal"
        return name, "divisions by what can be 0"
    if not bool(u.at_step.any()):
        where = "what is detached, and whether old and new are one"
        return "nothing is learned: every token has weight 0", where
    if factor is not None and u.options.max_grad_norm < float(u.full.norm()):
        return "the gradient is clipped to another norm than max_grad_norm", _CLIP
    if factor is not None:
        name = f"the gradient at the optimizer step is {factor:.4g} times what it should be"
        return name, "what the loss is divided by, and what scales gradients between backward and step"
    where = "between logits and optimizer.step(): the per-token loss, its mask, what is added to it, backward"
    return "the gradient at the optimizer step differs from ours", where


def _bug_of_weights(u: Update) -> Bug | None:
    """Return the bug of wrong weights of whole responses; None if the gradient is no sum of their mean log-probs."""
    o, factor = u.options, u.factor()
    is_sum = o.importance_reweighting_method == "none" and o.loss_normalization == "sequence" and u.at_step.any()
    if not is_sum or factor is not None or not bool(u.at_step.isfinite().all()):
        return None
    means = (u.log_probs * u.mask).sum(1) / u.mask.sum(1)
    each = torch.stack([u.gradient_of(mean) for mean in means]).double()
    weights = torch.linalg.lstsq(each.T, u.at_step.double()[:, None]).solution[:, 0].float()
    if not u.is_at_step(weights @ each.float()):
        return None
    right = -u.right_advantages() / u.size
    tolerance = 2e-3 * right.abs().max()
    groups = torch.tensor([s.prompt for s in u.samples])
    sums = torch.stack([weights[groups == group].sum() for group in groups.unique()])
    where = "advantages: how groups are formed, and what each response or micro-batch is divided by"
    if bool(((weights.abs() < tolerance) | ((weights - right).abs() < tolerance)).all()):
        name = "remainder of a batch dropped, or masked out: some responses have weight 0"
    elif all(bool(((right - weight).abs() < tolerance).any()) for weight in weights):
        name = "responses get one another's advantages"
    elif bool((sums.abs() > 1e-3 * weights.abs().max()).any()):
        name = "advantages of a group do not add up to 0, as where groups mix questions"
    else:
        name = "responses have other weights than they should, the same for all tokens of a response"
    return _bug_of_response(u, name, where, weights, right)
