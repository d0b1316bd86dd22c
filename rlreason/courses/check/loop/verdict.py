"""Find the bugs of a train loop that its records show, before and besides the gradients of its updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rlreason.courses.check.loop.gradients import is_scaled
from rlreason.courses.check.loop.judge import judged
from rlreason.courses.check.loop.metrics import not_a_mean, numbers, unlike
from rlreason.courses.check.loop.recording import RecordedSample
from rlreason.courses.check.loop.scenarios import SCENARIOS, Scenario
from rlreason.courses.check.loop.session import Session
from rlreason.courses.check.loop.truths import of_truths
from rlreason.courses.check.runner import TimeUpError
from rlreason.courses.check.subject import LOOP, Bug, Kind, NotWrittenError, short_text, their_error

_SAMPLING = "the call of generate"
_BATCHES = "how a rollout batch is cut into train batches and micro-batches"
_STEPS = "the calls of optimizer.step(), and the loops around it"
_LOST = "remainder of a batch dropped: some responses are sampled and never learned from"


def problems(function: Callable[..., Any], notes: list[str]) -> list[Bug]:
    """Return the bugs of a train loop, from the first scenario that shows any; untried ones go into `notes`."""
    unwritten: list[Bug] = []
    for scenario in SCENARIOS:
        if found := tried(function, scenario, notes, unwritten):
            return found
    if len(unwritten) == sum(not scenario.open for scenario in SCENARIOS):
        raise NotWrittenError
    return unwritten[:1]


def tried(function: Callable[..., Any], scenario: Scenario, notes: list[str], unwritten: list[Bug]) -> list[Bug]:
    """Return the bugs that one scenario shows; a loop that is not written yet is added to `unwritten`."""
    session = Session(scenario)
    told = {"scenario": scenario.about}
    failed: Bug | None = None
    try:
        session.run(function)
    except TimeUpError:
        raise
    except BaseException as error:  # whatever a stranger's loop does
        if scenario.open and not session.updates:
            notes.append(f"not tried, as the loop refuses it: {scenario.about} ({their_error(error)})")
            return []
        kind = Kind("it raises an error", "the line that is named")
        failed = Bug(LOOP, *kind, told, their_error(error), "a run to its end")
        if isinstance(error, NotImplementedError) and not session.updates:
            unwritten.append(failed)
            return []
    session.leave_out_evaluations()
    if not failed and not session.calls and not session.updates and session.metrics is None:
        if not scenario.open:
            unwritten.append(Bug(LOOP, "nothing is sampled: generate is never called", _SAMPLING, told))
        return []
    return _found(session, failed, told, notes)


def _found(session: Session, failed: Bug | None, told: dict[str, str], notes: list[str]) -> list[Bug]:
    """Return the bugs of a finished run; those of its calls and steps come before those of its gradients."""
    if failed is None:
        for look in (_of_optimizer, _of_calls, _of_steps):
            if found := list(look(session, told)):
                return found
    if failed is None or session.updates:
        updates = [u for u in session.updates if u.gradients or u.strangers]
        if any(f.half for u in updates for f in u.forwards):
            note = "mixed precision: its gradients and metrics are not judged, because they are too coarse"
            notes += [] if note in notes else [note]
            return [failed] if failed else list(_of_counts(session, told))
        updates = [u for u in updates if not u.unclear]
        if session.scenario.open:  # what an uneven batch is divided by is left open, but not how its rows compare
            updates = [u for u in updates if not is_scaled(u)]
        found = judged(LOOP, updates, session.scenario.about)
        if found:
            return found
    if failed:
        return [failed]
    return list(_of_counts(session, told)) or list(_of_metrics(session, told))


def _of_optimizer(session: Session, told: dict[str, str]) -> Iterator[Bug]:
    """Weights that were changed by something else than the optimizer that was handed in."""
    if session.updates or not session.has_moved():
        return
    kind = "the optimizer that is handed in never steps, though the weights change: the loop makes one of its own"
    where = "lines that make an optimizer, such as torch.optim.AdamW(...): use the argument `optimizer` there"
    yield Bug(LOOP, kind, where, told, "0 steps of `optimizer`", f"{_steps(session)} steps of `optimizer`")


def _of_calls(session: Session, told: dict[str, str]) -> Iterator[Bug]:
    """Find bugs in the calls of generate and reward_fn."""
    s = session.settings
    if not session.calls:
        yield Bug(LOOP, "nothing is sampled: generate is never called", _SAMPLING, told)
        return
    for call in session.calls:
        for name, setting in (("temperature", "sampling_temperature"), ("max_tokens", "sampling_max_tokens")):
            asked = getattr(s, setting)
            if call[name] != asked:
                ignored = "temperature ignored: " if name == "temperature" else ""
                kind = f"{ignored}{setting} is not passed on to generate"
                yield Bug(LOOP, kind, _SAMPLING, told, f"{name} {call[name]:g}", f"{asked:g}")
                return
    yield from _of_groups(session, told)


def _of_groups(session: Session, told: dict[str, str]) -> Iterator[Bug]:
    s = session.settings
    unknown = next((x for x in session.samples if x.prompt < 0), None)
    if unknown is not None:
        kind = "samples a prompt that is none of the prompts it was given"
        yield Bug(LOOP, kind, _SAMPLING, told, repr(session.tokenizer.decode(unknown.prompt_ids)))
        return
    for group in _groups(session.samples):
        distinct = len({tuple(x.token_ids) for x in group})
        if distinct < len(group) and any(call["seed"] is not None for call in session.calls):
            kind = "identical seeds in a group: copies of a prompt get the same sample"
            where = "the seed that is given to generate for each copy of a prompt"
            shown_group = [x.text for x in group]
            yield Bug(LOOP, kind, where, told, f"a group of {short_text(shown_group)}", f"{len(group)} samples")
            return
    if found := list(of_truths(LOOP, session.samples, session.judgements, session.truths, told)):
        yield from found
        return
    sizes = Counter(len(group) for group in _groups(session.samples))
    if set(sizes) != {s.group_size}:
        kind = "a question has more or fewer responses than group_size"
        yield Bug(
            LOOP, kind, _SAMPLING, told, f"{short_text(sorted(sizes))} responses to a question", str(s.group_size)
        )
        return
    wanted = s.n_grpo_steps * s.rollout_batch_size
    if len(session.samples) != wanted:
        kind = "samples more or fewer responses than rollout_batch_size for each step"
        if len(session.samples) < wanted and len({x.round for x in session.samples}) < s.n_grpo_steps:
            kind = "responses are not sampled anew in each step: later steps learn from those of an older policy"
        yield Bug(LOOP, kind, _SAMPLING, told, f"{len(session.samples)} in all", str(wanted))
        return
    if len({x.round for x in session.samples}) < s.n_grpo_steps and len(session.updates) > 1:
        kind = "all responses are sampled before the first update: later steps learn from those of an older policy"
        yield Bug(LOOP, kind, _SAMPLING, told, "all samples at once", f"{s.rollout_batch_size} before each step")


def _groups(samples: list[RecordedSample]) -> list[list[RecordedSample]]:
    groups: dict[tuple[int, int], list[RecordedSample]] = {}
    for sample in samples:
        groups.setdefault((sample.round, sample.prompt), []).append(sample)
    return list(groups.values())


def _steps(session: Session) -> int:
    """Return the requested number of optimizer steps."""
    s = session.settings
    return s.n_grpo_steps * s.epochs_per_rollout_batch * -(-s.rollout_batch_size // s.train_batch_size)


def _of_steps(session: Session, told: dict[str, str]) -> Iterator[Bug]:
    """Too many or too few optimizer steps, or samples that no step was for: named before gradients are judged."""
    s, steps, taken = session.settings, _steps(session), len(session.updates)
    largest = max((len(u.samples) for u in session.updates), default=0)
    kind = ""
    if taken > steps and largest < s.train_batch_size and s.gradient_accumulation_steps > 1:
        kind = "the optimizer steps after each micro-batch: gradients are not accumulated"
    elif 0 < taken < steps and largest > s.train_batch_size:
        kind = "one optimizer step is taken for several train batches, not one after each"
    if kind:
        yield Bug(LOOP, kind, _STEPS, told, f"{taken} steps", f"{steps} steps")
    elif session.updates and all(u.micro and u.gradients and not u.strangers for u in session.updates):
        learned = {x.number for u in session.updates for x in u.samples}
        never = [x for x in session.samples if _deviates(x, session.samples) and x.number not in learned]
        if 0 < len(never) < len(session.samples):
            yield Bug(LOOP, _LOST, _BATCHES, told, f"{len(never)} of {len(session.samples)} are left out", "0")


def _of_counts(session: Session, told: dict[str, str]) -> Iterator[Bug]:
    """How often each sample was learned from, and how many optimizer steps there were."""
    epochs = session.settings.epochs_per_rollout_batch
    learned = Counter(sample.number for update in session.updates for sample in update.samples)
    live = [x for x in session.samples if _deviates(x, session.samples)]
    never = [x for x in live if not learned[x.number]]
    if never:
        kind = _LOST if session.updates else "no optimizer step is taken"
        yield Bug(LOOP, kind, _BATCHES, told, f"{len(never)} of {len(session.samples)} are left out", "0")
        return
    often = Counter(learned[x.number] for x in live)
    if set(often) != {epochs}:
        kind = "responses are learned from more or less often than epochs_per_rollout_batch"
        yield Bug(LOOP, kind, _BATCHES, told, f"{short_text(sorted(often))} times", f"{epochs} times")
        return
    steps, taken = _steps(session), len(session.updates)
    if taken != steps:
        kind = "the number of optimizer steps is wrong"
        if taken >= steps * session.settings.gradient_accumulation_steps > steps:
            kind = "the optimizer steps after each micro-batch: gradients are not accumulated"
        yield Bug(LOOP, kind, _STEPS, told, f"{taken} steps", f"{steps} steps")


def _deviates(sample: RecordedSample, samples: list[RecordedSample]) -> bool:
    """Return whether a response has an advantage other than 0."""
    group = [x.reward for x in samples if (x.round, x.prompt) == (sample.round, sample.prompt)]
    return abs(sample.reward - sum(group) / len(group)) > 1e-6


def _of_metrics(session: Session, told: dict[str, str]) -> Iterator[Bug]:
    """Entropies and clip fractions of the returned metrics, where there is a dictionary for each update."""
    rows = session.metrics
    if not isinstance(rows, list | tuple) or len(rows) != len(session.updates):
        return
    for row, update in zip(rows, session.updates, strict=True):
        for name, yours, ours in unlike(numbers(row), update):
            yield Bug(LOOP, *not_a_mean(name), told, f"{name} {short_text(yours)}", f"{name} {short_text(ours)}")
            return
