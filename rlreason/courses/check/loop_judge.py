"""Run a train loop on each scenario, and judge its calls, its optimizer steps, its gradients and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.calling import numbers
from rlreason.courses.check.loop_mistakes import explained
from rlreason.courses.check.loop_session import SCENARIOS, Scenario, Session
from rlreason.courses.check.loop_update import RecordedSample, Update, find
from rlreason.courses.check.subject import (
    LOOP,
    Bug,
    Kind,
    LoopBug,
    NotWrittenError,
    TimeUpError,
    short_text,
    their_error,
)
from rlreason.objectives.terms import compute_entropy

_LEARNED = "how the rows for the forward pass are built from what was sampled"
_END_LOST = Kind("the end token of a finished response is lost: nothing teaches the policy to stop", _LEARNED)
_SAMPLING = "the call of generate"
_BATCHES = "how a rollout batch is cut into train batches and micro-batches"
_STEPS = "the calls of optimizer.step(), and the loops around it"
_NOT_SAMPLED = Kind("nothing is sampled: generate is never called", _SAMPLING)
_LOST = Kind("remainder of a batch dropped: some responses are sampled and never learned from", _BATCHES)
_ACCUMULATED = Kind("the optimizer steps after each micro-batch: gradients are not accumulated", _STEPS)


def problems(function: Callable[..., Any], notes: list[str]) -> list[Bug]:
    """Return the bugs of a train loop, from the first scenario that shows any; add scenarios not tried to `notes`."""
    unwritten: list[Bug] = []
    for scenario in SCENARIOS:
        if bugs := _try_scenario(function, scenario, notes, unwritten):
            return bugs
    if len(unwritten) == sum(not scenario.open for scenario in SCENARIOS):
        raise NotWrittenError
    return unwritten[:1]


def _try_scenario(
    function: Callable[..., Any], scenario: Scenario, notes: list[str], unwritten: list[Bug]
) -> list[Bug]:
    """Return the bugs that one scenario shows; if the loop is not written for it, add that to `unwritten`."""
    session = Session(scenario)
    run = {"scenario": scenario.about}
    failure: LoopBug | None = None
    try:
        session.metrics = function(**session.arguments(function))
    except TimeUpError:
        raise
    except BaseException as error:  # also SystemExit: it is the user's loop
        if scenario.open and not session.updates:
            notes.append(f"not tried, as the loop refuses it: {scenario.about} ({their_error(error)})")
            return []
        failure = LoopBug(Kind("it raises an error", "the line that is named"), their_error(error), "a run to its end")
        if isinstance(error, NotImplementedError) and not session.updates:
            unwritten.append(failure.bug(LOOP, run))
            return []
    session.samples, session.calls = session.training(), session.training_calls()
    if failure is None and not session.calls and not session.updates and session.metrics is None:
        if not scenario.open:
            unwritten.append(LoopBug(_NOT_SAMPLED).bug(LOOP, run))
        return []
    return [finding.bug(LOOP, run) for finding in _findings(session, failure, notes)]


def _findings(session: Session, failure: LoopBug | None, notes: list[str]) -> list[LoopBug]:
    """Return the findings of a finished run: of its calls and steps, else of its gradients, else of its counts."""
    if failure is None:
        for look in (_in_optimizer, _in_calls, _in_steps):
            if findings := list(look(session)):
                return findings
    updates = [u for u in session.updates if u.samples or u.strangers]
    if any(f.half for u in updates for f in u.forwards):
        note = "mixed precision: its gradients and metrics are not judged, because they are too coarse"
        if note not in notes:
            notes.append(note)
        return [failure] if failure else list(_in_counts(session))
    updates = [u for u in updates if not u.unclear]
    if session.scenario.open:  # what an uneven batch is divided by is left open, but not how its rows compare
        updates = [u for u in updates if not (u.samples and 0.3 < (u.factor() or 0) < 1.7)]
    if findings := judged(updates):
        return findings
    return [failure] if failure else list(_in_counts(session)) or list(_in_metrics(session))


def judged(updates: Sequence[Update]) -> list[LoopBug]:
    """Return the bug in these updates of one run; [] if each has the right gradient."""
    wrong = [u for u in updates if not u.samples or not u.is_right]
    if not wrong:
        return []
    wrong = wrong[:1] + [u for u in wrong[1:] if u.is_finite]
    for look in (_strangers, _dropped, _end_tokens):
        if findings := list(look(wrong)):
            return findings
    return [explained(wrong, [u for u in updates if u.samples and u.is_finite])]


def _dropped(wrong: Sequence[Update]) -> Iterator[LoopBug]:
    """Find rows given for the step that are not learned from, though they have an advantage."""
    update = wrong[0]
    live = {s.number for s, a in zip(update.samples, update.right_advantages(), strict=True) if a}
    lost = sum(s.number in live for s in update.unseen)
    if lost:
        kind = "remainder of a batch dropped: some rows are given and never learned from"
        where = "how the rows are cut into micro-batches"
        yield LoopBug(Kind(kind, where), f"{lost} of {len(update.samples)} left out", "0")


def _end_tokens(wrong: Sequence[Update]) -> Iterator[LoopBug]:
    """Find rows without the end tokens of finished samples, or with one behind truncated samples that is no padding."""
    update = wrong[0]
    end = update.tokenizer.eos_token_id
    lacks = {True: set[bool](), False: set[bool]()}
    for p in update.passes:
        for _, s, start in p.members:
            lacks[s.truncated].add(start + len(s.ids) > p.ids.shape[1])
    if lacks == {True: {False}, False: {True}}:
        yield LoopBug(_END_LOST, "rows without the end token", "rows with all of token_ids")
        return
    behind = [(s, p.ids[row, start + len(s.ids) :].tolist()) for p in update.passes for row, s, start in p.members]
    cut = [ids[:1] == [end] for s, ids in behind if s.truncated]
    if cut and all(cut) and not any(ids[:2] == [end, end] for _, ids in behind):
        s = next(s for s in update.samples if s.truncated)
        inputs = {"prompt ids": short_text(s.prompt_ids), "sampled ids": short_text(s.token_ids)}
        kind = Kind("end token added to truncated samples", _LEARNED)
        yield LoopBug(kind, f"learns from {short_text([*s.ids, end])}", short_text(s.ids), inputs)


def _strangers(wrong: Sequence[Update]) -> Iterator[LoopBug]:
    """Find rows that were not sampled."""
    update = next((u for u in wrong if u.strangers), None)
    if update is None:
        return
    ids = update.strangers[0]
    kind, sample = _change_of_sample(ids, update)
    ours, inputs = "rows of a prompt's ids with sampled token_ids", {}
    if sample is not None:
        ours = short_text(sample.ids)
        inputs["prompt ids"] = short_text(sample.prompt_ids)
        inputs["sampled"] = f"{sample.text!r} {short_text(sample.token_ids)}"
        if sample.truncated:
            inputs["truncated"] = "True: it was cut at the limit, without an end token"
    yield LoopBug(kind, f"learns from {short_text(ids)}", ours, inputs)


_CHANGES = (
    _END_LOST,
    Kind("learns from other ids than were sampled: the text was tokenized again", _LEARNED),
    Kind("the prompt is left out: responses are scored without it", _LEARNED),
    Kind("only a part of the response is learned from", _LEARNED),
)


def _change_of_sample(ids: list[int], update: Update) -> tuple[Kind, RecordedSample | None]:
    """Return which change of which sample gave this row."""
    text = _as_text(ids)
    changed = [(place, s) for s in update.rollout for place, form in _changed(s, update) if _as_text(form) in text]
    if changed:
        place, sample = min(changed, key=lambda pair: pair[0])
        return _CHANGES[place], sample
    if find(ids, update.recording.samples):
        return Kind("learns again from responses of earlier steps", "what is emptied at the beginning of a step"), None
    return Kind("learns from token ids that were not sampled", _LEARNED), next(iter(update.rollout), None)


def _as_text(ids: Sequence[int]) -> str:
    return f" {' '.join(map(str, ids))} "


def _changed(s: RecordedSample, update: Update) -> Iterator[tuple[int, list[int]]]:
    """Yield what a sample's row begins with under each of `_CHANGES`, by number."""
    tokenizer = update.tokenizer
    if not s.truncated and len(s.token_ids) > 2:
        yield 0, s.ids[:-2]
    yield 1, (s.prompt_ids + tokenizer.encode(s.text, add_special_tokens=False))[:-1]
    yield 1, tokenizer.encode(tokenizer.decode(s.prompt_ids) + s.text, add_special_tokens=False)[:-1]
    yield 2, s.token_ids
    yield 3, s.ids[: len(s.prompt_ids) + 1]


def _in_optimizer(session: Session) -> Iterator[LoopBug]:
    """Find weights that something else than the given optimizer changed."""
    pairs = zip(session.model.parameters(), session.start, strict=True)
    if session.updates or not any(bool((now != start).any()) for now, start in pairs):
        return
    kind = "the optimizer that is handed in never steps, though the weights change: the loop makes one of its own"
    where = "lines that make an optimizer, such as torch.optim.AdamW(...): use the argument `optimizer` there"
    yield LoopBug(Kind(kind, where), "0 steps of `optimizer`", f"{_right_steps(session)} steps of `optimizer`")


def _in_calls(session: Session) -> Iterator[LoopBug]:
    """Find the first bug in the calls of generate and reward_fn."""
    s = session.settings
    if not session.calls:
        yield LoopBug(_NOT_SAMPLED)
        return
    for call in session.calls:
        for name, setting in (("temperature", "sampling_temperature"), ("max_tokens", "sampling_max_tokens")):
            right = getattr(s, setting)
            if call[name] != right:
                ignored = "temperature ignored: " if name == "temperature" else ""
                kind = Kind(f"{ignored}{setting} is not passed on to generate", _SAMPLING)
                yield LoopBug(kind, f"{name} {call[name]:g}", f"{right:g}")
                return
    unknown = next((x for x in session.samples if x.prompt < 0), None)
    if unknown is not None:
        kind = Kind("samples a prompt that is none of the prompts it was given", _SAMPLING)
        yield LoopBug(kind, repr(session.tokenizer.decode(unknown.prompt_ids)))
        return
    groups: dict[tuple[int, int], list[RecordedSample]] = {}
    for sample in session.samples:
        groups.setdefault((sample.round, sample.prompt), []).append(sample)
    for group in groups.values():
        distinct = len({tuple(x.token_ids) for x in group})
        if distinct < len(group) and any(call["seed"] is not None for call in session.calls):
            name = "identical seeds in a group: copies of a prompt get the same sample"
            kind = Kind(name, "the seed that is given to generate for each copy of a prompt")
            yield LoopBug(kind, f"a group of {short_text([x.text for x in group])}", f"{len(group)} samples")
            return
    if findings := list(findings_of_rewards(session.samples, session.reward_calls, session.truths)):
        yield from findings
        return
    sizes = {len(group) for group in groups.values()}
    if sizes != {s.group_size}:
        kind = Kind("a question has more or fewer responses than group_size", _SAMPLING)
        yield LoopBug(kind, f"{short_text(sorted(sizes))} responses to a question", str(s.group_size))
        return
    right, rounds = s.n_grpo_steps * s.rollout_batch_size, len({x.round for x in session.samples})
    if len(session.samples) != right:
        name = "samples more or fewer responses than rollout_batch_size for each step"
        if len(session.samples) < right and rounds < s.n_grpo_steps:
            name = "responses are not sampled anew in each step: later steps learn from those of an older policy"
        yield LoopBug(Kind(name, _SAMPLING), f"{len(session.samples)} in all", str(right))
    elif rounds < s.n_grpo_steps and len(session.updates) > 1:
        name = "all responses are sampled before the first update: later steps learn from those of an older policy"
        yield LoopBug(Kind(name, _SAMPLING), "all samples at once", f"{s.rollout_batch_size} before each step")


def findings_of_rewards(
    samples: Sequence[RecordedSample], calls: Sequence[tuple[str, str]], truths: Sequence[str]
) -> Iterator[LoopBug]:
    """Find the first response that was never judged by its own question's ground truth, in the calls of reward_fn."""
    where = "the call of reward_fn: what is handed to it as response and as ground truth"
    texts = {text for text, _ in calls}
    for s in samples:
        if (s.text, s.truth) in calls or (s.text.strip(), s.truth) in calls:
            continue
        with_truth = [text for text, truth in calls if truth == s.truth]
        yours = f"judged text {next(iter(with_truth), 'nothing')!r}"
        if any(truth == s.text for _, truth in calls):
            kind, yours = "reward_fn gets ground truth and response in swapped places", ""
        elif s.text in texts:
            other = next(truth for text, truth in calls if text == s.text)
            yours = f"judged by {other!r}"
            kind = "reward_fn gets something else than the question's ground truth"
            if other in truths:
                kind = "answers are misaligned: a response is judged by another question's ground truth"
        else:
            kind = "the reward is not asked for the text that was sampled"
            if any(text.endswith(s.text) and len(text) > len(s.text) for text in with_truth):
                kind += ": prompt and response are handed over together"
        inputs = {"response": repr(s.text), "its ground truth": repr(s.truth)}
        yield LoopBug(Kind(kind, where), yours, "this response judged by this ground truth", inputs)
        return


def _right_steps(session: Session) -> int:
    """Return the requested number of optimizer steps."""
    s = session.settings
    return s.n_grpo_steps * s.epochs_per_rollout_batch * -(-s.rollout_batch_size // s.train_batch_size)


def _in_steps(session: Session) -> Iterator[LoopBug]:
    """Find a wrong number of optimizer steps whose cause is clear, or responses that no step was for."""
    s, steps, taken = session.settings, _right_steps(session), len(session.updates)
    largest = max((len(u.samples) for u in session.updates), default=0)
    if taken > steps and largest < s.train_batch_size and s.gradient_accumulation_steps > 1:
        yield LoopBug(_ACCUMULATED, f"{taken} steps", f"{steps} steps")
    elif 0 < taken < steps and largest > s.train_batch_size:
        kind = Kind("one optimizer step is taken for several train batches, not one after each", _STEPS)
        yield LoopBug(kind, f"{taken} steps", f"{steps} steps")
    elif session.updates and all(u.samples and not u.strangers for u in session.updates):
        learned = {x.number for u in session.updates for x in u.samples}
        never = [x for x in _with_advantage(session) if x.number not in learned]
        if 0 < len(never) < len(session.samples):
            yield LoopBug(_LOST, f"{len(never)} of {len(session.samples)} are left out", "0")


def _in_counts(session: Session) -> Iterator[LoopBug]:
    """Find responses learned from too often or too rarely, or a wrong number of optimizer steps."""
    epochs = session.settings.epochs_per_rollout_batch
    learned = Counter(sample.number for update in session.updates for sample in update.samples)
    live = _with_advantage(session)
    never = [x for x in live if not learned[x.number]]
    often = {learned[x.number] for x in live}
    steps, taken = _right_steps(session), len(session.updates)
    if never:
        kind = _LOST if session.updates else Kind("no optimizer step is taken", _BATCHES)
        yield LoopBug(kind, f"{len(never)} of {len(session.samples)} are left out", "0")
    elif often != {epochs}:
        kind = Kind("responses are learned from more or less often than epochs_per_rollout_batch", _BATCHES)
        yield LoopBug(kind, f"{short_text(sorted(often))} times", f"{epochs} times")
    elif taken != steps:
        accumulated = taken >= steps * session.settings.gradient_accumulation_steps > steps
        kind = _ACCUMULATED if accumulated else Kind("the number of optimizer steps is wrong", _STEPS)
        yield LoopBug(kind, f"{taken} steps", f"{steps} steps")


def _with_advantage(session: Session) -> list[RecordedSample]:
    """Return the responses that have an advantage other than 0."""
    rewards: dict[tuple[int, int], list[float]] = {}
    for x in session.samples:
        rewards.setdefault((x.round, x.prompt), []).append(x.reward)
    means = {group: sum(values) / len(values) for group, values in rewards.items()}
    return [x for x in session.samples if abs(x.reward - means[x.round, x.prompt]) > 1e-6]


def _in_metrics(session: Session) -> Iterator[LoopBug]:
    """Find the first wrong entropy or clip fraction of the returned metrics, if there is a dictionary per update."""
    rows = session.metrics
    if not isinstance(rows, list | tuple) or len(rows) != len(session.updates):
        return
    for row, update in zip(rows, session.updates, strict=True):
        for name, yours, ours in unlike(row, update):
            yield LoopBug(not_a_mean(name), f"{name} {short_text(yours)}", f"{name} {short_text(ours)}")
            return


_ENTROPY = {"entropy", "meanentropy", "avgentropy", "tokenentropy", "meantokenentropy", "responseentropy"}
_CLIPPED = {"clipfraction", "clipfrac", "meanclipfraction", "clippedfraction", "fractionclipped", "clipped"}


def not_a_mean(name: str) -> Kind:
    """Return the kind of bug of a reported number that is no mean over response tokens."""
    wrong = "is no mean over the update's response tokens: prompt or padding positions, or another divisor"
    return Kind(f"the reported {name} {wrong}", f"the mean that makes {name}: which positions it is over")


def unlike(row: Any, update: Update, lenient: bool = False) -> Iterator[tuple[str, float, float]]:
    """Yield (name, reported, right) of entropies and clip fractions that are no mean over response tokens.

    A mean over tokens, of the responses' means and of the micro-batches' means are all right; if `lenient`, the mean of
    one micro-batch too. Other names are left alone.
    """
    for name, value in numbers(row).items():
        letters = "".join(filter(str.isalpha, name.lower()))
        kinds = _entropies(update) if letters in _ENTROPY else _clipped(update) if letters in _CLIPPED else []
        right = [mean for per_token in kinds for mean in _means(per_token, update, lenient)]
        if right and not any(abs(value - r) <= 1e-3 * (1e-2 + abs(r)) for r in right):
            yield name, value, right[0]


def _means(per_token: Tensor, update: Update, lenient: bool) -> list[float]:
    """Return all means of values (n, places) that are right."""
    rows = {s.number: row[own] for s, row, own in zip(update.samples, per_token, update.mask, strict=True)}
    parts = [torch.cat([rows[member.sample.number] for member in p.members]) for p in update.passes]
    passes = [float(part.mean()) for part in parts]
    by_row = sum(float(row.mean()) for row in rows.values()) / len(rows)
    return [float(torch.cat(parts).mean()), by_row, sum(passes) / len(passes), *(passes if lenient else [])]


def _entropies(update: Update) -> Iterator[Tensor]:
    """Yield the entropies (n, places) at the sampling temperature and at 1."""
    for t in dict.fromkeys((update.options.temperature, 1.0)):
        yield compute_entropy(update.logits(update.own)[:, :-1].detach() / t)


def _clipped(update: Update) -> Iterator[Tensor]:
    """Yield (n, places) where the clipped term is the smaller one, and where the ratio is outside the range."""
    o, mask = update.options, update.mask
    if o.method not in ("grpo", "gspo"):
        return
    gap = (update.log_probs.detach() - update.old()).masked_fill(~mask, 0.0)
    if o.method == "gspo":
        gap = (gap.sum(-1) / mask.sum(-1).clamp(min=1))[:, None].expand_as(gap)
    above, below = gap.exp() > 1 + o.cliprange, gap.exp() < 1 - o.cliprange
    a = update.right_advantages()[:, None]
    yield ((above & (a > 1e-6)) | (below & (a < -1e-6))).float()
    yield (above | below).float()
