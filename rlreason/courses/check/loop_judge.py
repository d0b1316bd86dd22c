"""Judge a run of a train loop by its calls, its optimizer steps, their gradients and its metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.mistakes import NO_MISTAKE, mistakes
from rlreason.courses.check.observing import misjudged
from rlreason.courses.check.recording import RecordedSample, Session, Update, as_text, find
from rlreason.courses.check.records import Bug, Kind, short_text
from rlreason.objectives.terms import compute_entropy

LOSS = "the loss that is returned"  # its name among the metrics of a train step
_SAMPLING = "the call of generate"
_BATCHES = "how a rollout batch is cut into train batches and micro-batches"
_STEPS = "the calls of optimizer.step(), and the loops around it"
_LEARNED = "how the rows for the forward pass are built from what was sampled"


def bug_of_run(session: Session, failure: Bug | None, metrics: Any, notes: list[str]) -> Bug | None:
    """Return the bug of a run: of its calls and counts, else of its gradients, else of its metrics."""
    session.samples = session.training()
    if failure is None and (bug := next(chain(_in_calls(session), _in_counts(session)), None)):
        return bug
    updates = [u for u in session.updates if u.samples or u.strangers]
    if any(f.half for u in updates for f in u.forwards):
        note = "mixed precision: its gradients and metrics are not judged, because they are too coarse"
        notes += [] if note in notes else [note]
        return failure
    judged = [u for u in updates if not u.is_unclear]
    if session.scenario.any_divisor:
        judged = [u for u in judged if not (u.samples and 0.3 < (u.factor() or 0) < 1.7)]
    if bug := _bug_of_updates(judged) or failure:
        return bug
    if session.scenario.is_step and bool(session.gradient().any()):
        return Bug("gradients are left behind after the step", "zero_grad after the step", "gradients", "none")
    rows = metrics if isinstance(metrics, list | tuple) and len(metrics) == len(updates) else []
    return next((bug for row, update in zip(rows, updates, strict=False) for bug in _in_metrics(row, update)), None)


def _in_calls(session: Session) -> Iterator[Bug]:
    """Yield the bugs in the calls of generate, reward_fn and the optimizer. Only the first is meaningful."""
    s, calls = session.settings, session.training_calls()
    weights = zip(session.model.parameters(), session.twin.parameters(), strict=True)
    if not session.updates and any(bool((now != start).any()) for now, start in weights):
        name = "the optimizer that is handed in never steps, though the weights change: the loop makes one of its own"
        yield Bug(name, "lines that make an optimizer, such as torch.optim.AdamW(...): use the one handed in")
    if not calls:
        yield Bug("nothing is sampled: generate is never called", _SAMPLING)
        return
    for call in calls:
        if call["temperature"] != (right := session.options.temperature):
            name = "temperature ignored: sampling_temperature is not passed on to generate"
            yield Bug(name, _SAMPLING, f"temperature {call['temperature']:g}", f"{right:g}")
        if call["max_tokens"] != (right := s["sampling_max_tokens"]):
            name = "sampling_max_tokens is not passed on to generate"
            yield Bug(name, _SAMPLING, f"max_tokens {call['max_tokens']}", f"{right}")
    groups = defaultdict(list)
    for sample in session.samples:
        groups[sample.round, sample.prompt].append(sample)
        if sample.prompt < 0:
            name = "samples a prompt that is none of the prompts it was given"
            yield Bug(name, _SAMPLING, repr(session.tokenizer.decode(sample.prompt_ids)))
    if len(session.samples) > s["group_size"] and len({x.place for x in session.samples}) == 1:
        yield Bug("the same question is asked for every group", _SAMPLING)
    for group in groups.values():
        distinct = len({tuple(x.token_ids) for x in group})
        if distinct < len(group) and any(call["seed"] is not None for call in calls):
            name = "identical seeds in a group: copies of a prompt get the same sample"
            where = "the seed that is given to generate for each copy of a prompt"
            yield Bug(name, where, f"a group of {short_text([x.text for x in group])}", f"{len(group)} samples")
    if bug := misjudged([(x.text, x.truth) for x in session.samples], session.reward_calls, session.truths):
        yield bug
    sizes = sorted({len(group) for group in groups.values()})
    if sizes != [s["group_size"]]:
        name = "a question has more or fewer responses than group_size"
        yield Bug(name, _SAMPLING, f"{short_text(sizes)} responses to a question", str(s["group_size"]))
    right, rounds = s["n_grpo_steps"] * s["rollout_batch_size"], len({x.round for x in session.samples})
    if len(session.samples) != right:
        name = "samples more or fewer responses than rollout_batch_size for each step"
        yield Bug(name, _SAMPLING, f"{len(session.samples)} in all, in {rounds} steps", str(right))
    if rounds < s["n_grpo_steps"] and len(session.updates) > 1:
        name = "all responses are sampled before the first update: later steps learn from those of an older policy"
        yield Bug(name, _SAMPLING, "all samples at once", f"{s['rollout_batch_size']} before each step")


def _in_counts(session: Session) -> Iterator[Bug]:
    """Yield bugs in the number of optimizer steps, or of updates that a response is learned in; the first counts."""
    s, updates = session.settings, session.updates
    epochs, size = s["epochs_per_rollout_batch"], s["train_batch_size"]
    steps = s["n_grpo_steps"] * epochs * -(-s["rollout_batch_size"] // size)
    largest = max((len(u.samples) for u in updates), default=0)
    taken, right = f"{len(updates)} steps", f"{steps} steps"
    if not updates:
        yield Bug("no optimizer step is taken", _BATCHES, taken, right)
    if len(updates) > steps and largest < size and s["gradient_accumulation_steps"] > 1:
        name = "the optimizer steps after each micro-batch: gradients are not accumulated"
        yield Bug(name, _STEPS, taken, right)
    if len(updates) < steps and largest > size:
        yield Bug("one optimizer step is taken for several train batches, not one after each", _STEPS, taken, right)
    if any(u.strangers for u in updates):
        return
    learned = Counter(sample for update in updates for sample in update.samples)
    times = [learned[x] for x in _with_advantage(session)]
    if 0 in times:
        name = "remainder of a batch dropped: some responses are sampled and never learned from"
        yield Bug(name, _BATCHES, f"{times.count(0)} of {len(session.samples)} are left out", "0")
    if set(times) - {epochs}:
        name = "responses are learned from more or less often than epochs_per_rollout_batch"
        yield Bug(name, _BATCHES, f"{short_text(sorted(set(times)))} times", f"{epochs} times")
    if len(updates) != steps:
        yield Bug("the number of optimizer steps is wrong", _STEPS, taken, right)


def _with_advantage(session: Session) -> list[RecordedSample]:
    """Return the responses that have an advantage other than 0."""
    rewards = defaultdict(set)
    for x in session.samples:
        rewards[x.round, x.prompt].add(x.reward)
    return [x for x in session.samples if len(rewards[x.round, x.prompt]) > 1 or session.options.baseline == "none"]


def _bug_of_updates(updates: Sequence[Update]) -> Bug | None:
    """Return the bug in these updates of one run; None if each has the right gradient."""
    wrong = [u for u in updates if not u.samples or not u.is_right]
    if not wrong:
        return None
    wrong = wrong[:1] + [u for u in wrong[1:] if u.is_finite]
    for update in wrong:
        if update.strangers:
            return _bug_of_stranger(update, update.strangers[0])
    return _end_token_added(wrong[0]) or _explained(wrong, [u for u in updates if u.is_finite])


def _bug_of_stranger(u: Update, ids: list[int]) -> Bug:
    """Return the bug of a row that was not sampled."""
    tokenizer, text = u.session.tokenizer, as_text(ids)
    yours = f"learns from {short_text(ids)}"
    if find(ids, u.session.samples):
        return Bug("learns again from responses of earlier steps", "what is emptied at the beginning of a step", yours)
    for s in u.rollout:
        again = s.prompt_ids + tokenizer.encode(s.text, add_special_tokens=False)
        jointly = tokenizer.encode(tokenizer.decode(s.prompt_ids) + s.text, add_special_tokens=False)
        name = "learns from other ids than were sampled: the text was tokenized again"
        if not s.truncated and len(s.token_ids) > 2 and as_text(s.ids[:-2]) in text:
            name = "the end token of a finished response is lost: nothing teaches the policy to stop"
        elif not any(as_text(form[:-1]) in text for form in (again, jointly)):
            continue
        return Bug(name, _LEARNED, yours, short_text(s.ids), {"sampled": f"{s.text!r}"})
    ours = "rows of a prompt's ids with all of the sampled token_ids"
    return Bug("learns from token ids that were not sampled", _LEARNED, yours, ours)


def _end_token_added(u: Update) -> Bug | None:
    """Return the bug of rows in which an end token stands behind what was sampled and is no padding."""
    behind = [(p.ids[row, start + len(s.ids) :].tolist(), s) for p in u.passes for row, s, start in p.members]
    end = u.session.tokenizer.eos_token_id
    of_truncated = [ids[:1] for ids, s in behind if s.truncated and ids]
    if any(ids[:2] == [end, end] for ids, _ in behind) or not of_truncated or any(x != [end] for x in of_truncated):
        return None
    yours = "rows of truncated responses with an end token"
    return Bug("end token added to truncated samples", _LEARNED, yours, "rows of what was sampled")


_ENTROPY = {"entropy", "meanentropy", "avgentropy", "tokenentropy", "meantokenentropy", "responseentropy"}
_CLIPPED = {"clipfraction", "clipfrac", "meanclipfraction", "clippedfraction", "fractionclipped", "clipped"}


def _in_metrics(row: Any, update: Update) -> Iterator[Bug]:
    """Yield a wrong loss of a step, and entropies and clip fractions that are no mean over response tokens.

    A mean over tokens, of the responses' means, of the micro-batches' means and of one micro-batch are all right. Other
    names are left alone.
    """
    for name, value in row.items() if isinstance(row, Mapping) else ():
        letters = "".join(filter(str.isalpha, str(name).lower()))
        wrong = "is no mean over the update's response tokens: prompt or padding positions, or another divisor"
        bug, where = f"the reported {name} {wrong}", f"the mean that makes {name}: which positions it is over"
        if name == LOSS:
            right = [update.right_loss().item()]
            bug, where = f"{LOSS} is not the batch's loss before the step", "what is added up over the micro-batches"
        elif letters in _ENTROPY:
            right = _means(_entropies(update), update)
        else:
            right = _means(_clipped(update), update) if letters in _CLIPPED else []
        with suppress(TypeError, ValueError, RuntimeError):
            if right and not any(abs(float(value) - r) <= 1e-3 * (1e-2 + abs(r)) for r in right):
                yield Bug(bug, where, f"{name} {short_text(float(value))}", f"{name} {short_text(right[0])}")


def _means(kinds: Iterator[Tensor], update: Update) -> list[float]:
    """Return all means of values (n, places) that are right."""
    means = []
    for per_token in kinds:
        rows = {s: row[own] for s, row, own in zip(update.samples, per_token, update.mask, strict=True)}
        passes = [torch.cat([rows[member.sample] for member in p.members]) for p in update.passes]
        groups = [[torch.cat(passes)], list(rows.values()), passes, *([p] for p in passes)]
        means += [sum(float(values.mean()) for values in group) / len(group) for group in groups]
    return means


def _entropies(update: Update) -> Iterator[Tensor]:
    """Yield the entropies (n, places) at the sampling temperature and at 1."""
    for t in (update.options.temperature, 1.0):
        yield compute_entropy(update.logits(update.own)[:, :-1].detach() / t)


def _clipped(update: Update) -> Iterator[Tensor]:
    """Yield (n, places) where the clipped term is the smaller one, and where the ratio is outside the range."""
    o, mask = update.options, update.mask
    if o.importance_reweighting_method not in ("grpo", "gspo"):
        return
    gap = (update.log_probs.detach() - update.old()).masked_fill(~mask, 0.0)
    if o.importance_reweighting_method == "gspo":
        gap = (gap.sum(-1) / mask.sum(-1).clamp(min=1))[:, None].expand_as(gap)
    above, below = gap.exp() > 1 + o.cliprange, gap.exp() < 1 - o.cliprange
    a = update.advantages()[:, None]
    yield ((above & (a > 1e-6)) | (below & (a < -1e-6))).float()
    yield (above | below).float()


def _explained(wrong: Sequence[Update], updates: Sequence[Update]) -> Bug:
    """Return the bug of the first wrong update: the known mistake that gives the gradients, or what they look like."""
    first = wrong[0]
    if first.has_other_context:
        if min(member.start for p in first.passes for member in p.members) > 0:  # padding leaves out the longest row
            name = "a token stands before the prompt that was not there when it was sampled (a begin token twice?)"
            return _bug(
                first, name, "how prompt ids are made for the forward pass: prompt_ids are complete as they are"
            )
        name = "log-probabilities are not those behind the prompt: padding or other rows are attended to"
        return _bug(first, name, "attention_mask, position_ids and the side of the padding")
    for update in wrong:
        for kind, guess in _wrong_steps(update):
            if update.is_at_step(guess):
                return _bug(update, *kind)
    others = [u for u in updates if u is not first]
    for m in mistakes():
        if all(u.gives(m) for u in (first, *others)):
            weights, right = -first.advantages(m), -first.advantages()
            return _bug_of_response(first, m.name, m.where, weights, right) or _bug(first, m.name, m.where)
    return _bug_of_weights(first) or _bug(first, *_described(first))


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
        "question": repr(u.session.tokenizer.decode(sample.prompt_ids)),
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
    micro = [u.gradient_of(u.loss(NO_MISTAKE, [p])) for p in u.passes]
    name = "only the last micro-batch reaches the optimizer: zero_grad is called between micro-batches"
    yield (name, _ZERO), u.clipped(micro[-1])
    total = full * 0
    for part in micro:
        total = u.clipped(total + part)
    yield ("the gradient is clipped after each micro-batch, not once before the step", _CLIP), total


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
    right = -u.advantages() / u.size
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
