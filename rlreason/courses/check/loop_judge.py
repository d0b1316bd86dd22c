"""Judge a run of a train loop by its calls, its optimizer steps, their gradients and its metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlreason.courses.check.calling import numbers
from rlreason.courses.check.loop_mistakes import explained
from rlreason.courses.check.observing import misjudged
from rlreason.courses.check.recording import RecordedSample, Recording, Update, find
from rlreason.courses.check.records import Bug, Kind, short_text
from rlreason.objectives.terms import compute_entropy

if TYPE_CHECKING:
    from rlreason.courses.check.loop import Session

_SAMPLING = "the call of generate"
_BATCHES = "how a rollout batch is cut into train batches and micro-batches"
_STEPS = "the calls of optimizer.step(), and the loops around it"
_LEARNED = "how the rows for the forward pass are built from what was sampled"


def in_calls(session: Session) -> Iterator[Bug]:
    """Yield the bugs in the calls of generate, reward_fn and the optimizer. Only the first is meaningful."""
    s, calls = session.settings, session.training_calls()
    weights = zip(session.model.parameters(), session.twin.parameters(), strict=True)
    if not session.updates and any(bool((now != start).any()) for now, start in weights):
        name = "the optimizer that is handed in never steps, though the weights change: the loop makes one of its own"
        yield Bug(Kind(name, "lines that make an optimizer, such as torch.optim.AdamW(...): use the one handed in"))
    if not calls:
        yield Bug(Kind("nothing is sampled: generate is never called", _SAMPLING))
        return
    for name, setting in (("temperature", "sampling_temperature"), ("max_tokens", "sampling_max_tokens")):
        right = getattr(s, setting)
        ignored = "temperature ignored: " if name == "temperature" else ""
        for call in calls:
            if call[name] != right:
                kind = Kind(f"{ignored}{setting} is not passed on to generate", _SAMPLING)
                yield Bug(kind, f"{name} {call[name]:g}", f"{right:g}")
    groups = defaultdict(list)
    for sample in session.samples:
        groups[sample.round, sample.prompt].append(sample)
        if sample.prompt < 0:
            kind = Kind("samples a prompt that is none of the prompts it was given", _SAMPLING)
            yield Bug(kind, repr(session.tokenizer.decode(sample.prompt_ids)))
    if len(session.samples) > s.group_size and len({x.place for x in session.samples}) == 1:
        yield Bug(Kind("the same question is asked for every group", _SAMPLING))
    for group in groups.values():
        distinct = len({tuple(x.token_ids) for x in group})
        if distinct < len(group) and any(call["seed"] is not None for call in calls):
            name = "identical seeds in a group: copies of a prompt get the same sample"
            kind = Kind(name, "the seed that is given to generate for each copy of a prompt")
            yield Bug(kind, f"a group of {short_text([x.text for x in group])}", f"{len(group)} samples")
    yield from of_rewards(session, session.truths)
    sizes = sorted({len(group) for group in groups.values()})
    if sizes != [s.group_size]:
        kind = Kind("a question has more or fewer responses than group_size", _SAMPLING)
        yield Bug(kind, f"{short_text(sizes)} responses to a question", str(s.group_size))
    right, rounds = s.n_grpo_steps * s.rollout_batch_size, len({x.round for x in session.samples})
    if len(session.samples) != right:
        name = "samples more or fewer responses than rollout_batch_size for each step"
        yield Bug(Kind(name, _SAMPLING), f"{len(session.samples)} in all, in {rounds} steps", str(right))
    if rounds < s.n_grpo_steps and len(session.updates) > 1:
        name = "all responses are sampled before the first update: later steps learn from those of an older policy"
        yield Bug(Kind(name, _SAMPLING), "all samples at once", f"{s.rollout_batch_size} before each step")


def of_rewards(recording: Recording, truths: Sequence[str]) -> Iterator[Bug]:
    """Yield the bug in the calls of reward_fn, if there is one."""
    pairs = [(s.text, s.truth) for s in recording.samples]
    if found := misjudged(pairs, recording.reward_calls, truths):
        yield Bug(*found)


def in_counts(session: Session) -> Iterator[Bug]:
    """Yield bugs in the number of optimizer steps, or of updates that a response is learned in; the first counts."""
    s, updates = session.settings, session.updates
    steps = s.n_grpo_steps * s.epochs_per_rollout_batch * -(-s.rollout_batch_size // s.train_batch_size)
    taken, largest = f"{len(updates)} steps", max((len(u.samples) for u in updates), default=0)
    if len(updates) > steps and largest < s.train_batch_size and s.gradient_accumulation_steps > 1:
        name = "the optimizer steps after each micro-batch: gradients are not accumulated"
        yield Bug(Kind(name, _STEPS), taken, f"{steps} steps")
    if 0 < len(updates) < steps and largest > s.train_batch_size:
        kind = Kind("one optimizer step is taken for several train batches, not one after each", _STEPS)
        yield Bug(kind, taken, f"{steps} steps")
    if not updates:
        yield Bug(Kind("no optimizer step is taken", _BATCHES), taken, f"{steps} steps")
    if any(u.strangers for u in updates):
        return
    learned = Counter(sample.number for update in updates for sample in update.samples)
    times = [learned[x.number] for x in _with_advantage(session)]
    if 0 in times:
        kind = Kind("remainder of a batch dropped: some responses are sampled and never learned from", _BATCHES)
        yield Bug(kind, f"{times.count(0)} of {len(session.samples)} are left out", "0")
    if set(times) - {s.epochs_per_rollout_batch}:
        kind = Kind("responses are learned from more or less often than epochs_per_rollout_batch", _BATCHES)
        yield Bug(kind, f"{short_text(sorted(set(times)))} times", f"{s.epochs_per_rollout_batch} times")
    if len(updates) != steps:
        yield Bug(Kind("the number of optimizer steps is wrong", _STEPS), taken, f"{steps} steps")


def _with_advantage(session: Session) -> list[RecordedSample]:
    """Return the responses that have an advantage other than 0."""
    rewards = defaultdict(set)
    for x in session.samples:
        rewards[x.round, x.prompt].add(x.reward)
    return [x for x in session.samples if len(rewards[x.round, x.prompt]) > 1]


def bug_of_updates(updates: Sequence[Update]) -> Bug | None:
    """Return the bug in these updates of one run; None if each has the right gradient."""
    wrong = [u for u in updates if not u.samples or not u.is_right]
    if not wrong:
        return None
    wrong = wrong[:1] + [u for u in wrong[1:] if u.is_finite]
    for update in wrong:
        if update.strangers:
            return _bug_of_stranger(update, update.strangers[0])
    return _bug_of_rows(wrong[0]) or explained(wrong, [u for u in updates if u.is_finite])


def _bug_of_stranger(u: Update, ids: list[int]) -> Bug:
    """Return the bug of a row that was not sampled."""
    tokenizer, text = u.tokenizer, _as_text(ids)
    yours = f"learns from {short_text(ids)}"
    if find(ids, u.recording.samples):
        name = "learns again from responses of earlier steps"
        return Bug(Kind(name, "what is emptied at the beginning of a step"), yours)
    for s in u.rollout:
        again = s.prompt_ids + tokenizer.encode(s.text, add_special_tokens=False)
        jointly = tokenizer.encode(tokenizer.decode(s.prompt_ids) + s.text, add_special_tokens=False)
        name = "learns from other ids than were sampled: the text was tokenized again"
        if not s.truncated and len(s.token_ids) > 2 and _as_text(s.ids[:-2]) in text:
            name = "the end token of a finished response is lost: nothing teaches the policy to stop"
        elif not any(_as_text(form[:-1]) in text for form in (again, jointly)):
            continue
        return Bug(Kind(name, _LEARNED), yours, short_text(s.ids), {"sampled": f"{s.text!r}"})
    name = "learns from token ids that were not sampled"
    return Bug(Kind(name, _LEARNED), yours, "rows of a prompt's ids with all of the sampled token_ids")


def _bug_of_rows(u: Update) -> Bug | None:
    """Return the bug of rows with an end token that was not sampled, or of responses that are in no row."""
    members = [(p.ids[row, start + len(s.ids) :].tolist(), s) for p in u.passes for row, s, start in p.members]
    end, behind = u.tokenizer.eos_token_id, [ids for ids, s in members if s.truncated]
    is_padding = any(ids[:2] == [end, end] for ids, _ in members)
    if behind and all(ids[:1] == [end] for ids in behind) and not is_padding:
        kind = Kind("end token added to truncated samples", _LEARNED)
        return Bug(kind, "rows of truncated responses with an end token", "rows of what was sampled")
    learned = {s.number for _, s in members}
    lost = [s for s, a in zip(u.samples, u.right_advantages(), strict=True) if a and s.number not in learned]
    if not lost:
        return None
    kind = Kind("remainder of a batch dropped: some rows are given and never learned from", _BATCHES)
    return Bug(kind, f"{len(lost)} of {len(u.samples)} left out", "0")


def _as_text(ids: Sequence[int]) -> str:
    return f" {' '.join(map(str, ids))} "


_ENTROPY = {"entropy", "meanentropy", "avgentropy", "tokenentropy", "meantokenentropy", "responseentropy"}
_CLIPPED = {"clipfraction", "clipfrac", "meanclipfraction", "clippedfraction", "fractionclipped", "clipped"}


def in_metrics(row: Any, update: Update, of_one_pass: bool = False) -> Iterator[Bug]:
    """Yield reported entropies and clip fractions that are no mean over response tokens.

    A mean over tokens, of the responses' means and of the micro-batches' means are all right; with `of_one_pass`, the
    mean of one micro-batch too. Other names are left alone.
    """
    for name, value in numbers(row).items():
        letters = "".join(filter(str.isalpha, name.lower()))
        kinds = _entropies(update) if letters in _ENTROPY else _clipped(update) if letters in _CLIPPED else []
        right = [mean for per_token in kinds for mean in _means(per_token, update, of_one_pass)]
        if right and not any(abs(value - r) <= 1e-3 * (1e-2 + abs(r)) for r in right):
            wrong = "is no mean over the update's response tokens: prompt or padding positions, or another divisor"
            kind = Kind(f"the reported {name} {wrong}", f"the mean that makes {name}: which positions it is over")
            yield Bug(kind, f"{name} {short_text(value)}", f"{name} {short_text(right[0])}")


def _means(per_token: Tensor, update: Update, of_one_pass: bool) -> list[float]:
    """Return all means of values (n, places) that are right."""
    rows = {s.number: row[own] for s, row, own in zip(update.samples, per_token, update.mask, strict=True)}
    passes = [torch.cat([rows[member.sample.number] for member in p.members]) for p in update.passes]
    groups = [[torch.cat(passes)], list(rows.values()), passes, *([p] for p in passes if of_one_pass)]
    return [sum(float(values.mean()) for values in group) / len(group) for group in groups]


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
    a = update.right_advantages()[:, None]
    yield ((above & (a > 1e-6)) | (below & (a < -1e-6))).float()
    yield (above | below).float()
