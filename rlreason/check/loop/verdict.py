"""The bugs of a train loop: what its records show, before and besides the gradients of its updates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from rlreason.check.limit import TimeUpError
from rlreason.check.loop.gradients import is_scaled
from rlreason.check.loop.judge import judged
from rlreason.check.loop.metrics import misplaced, unlike
from rlreason.check.loop.recording import Sample
from rlreason.check.loop.session import SCENARIOS, Scenario, Session
from rlreason.check.names import LOOP
from rlreason.check.subject import Finding, Kind, NotWrittenError
from rlreason.check.words import shown
from rlreason.plugins.load import described

_SAMPLING = "the call of generate"
_BATCHES = "how a rollout batch is cut into train batches and micro-batches"


def problems(function: Callable[..., Any]) -> list[Finding]:
    """The bugs of a train loop, by the first scenario that shows any."""
    for scenario in SCENARIOS:
        if found := tried(function, scenario):
            return found
    return []


def tried(function: Callable[..., Any], scenario: Scenario) -> list[Finding]:
    """The bugs that one scenario shows."""
    session = Session(scenario)
    told = {"scenario": scenario.about}
    failed: Finding | None = None
    try:
        session.run(function)
    except NotImplementedError as error:
        raise NotWrittenError(str(error)) from None
    except TimeUpError:
        raise
    except BaseException as error:  # whatever a stranger's loop does
        if scenario.open and not session.updates:
            return []
        kind = Kind("it raises an error", "the line that is named")
        failed = Finding(LOOP, *kind, told, described(error), "a run to its end")
    early = [] if failed else list(_of_calls(session, told))
    if early:
        return early
    if failed is None and (found := list(_of_steps(session, told))):
        return found
    if failed is None or session.updates:
        updates = [u for u in session.updates if u.gradients or u.strangers]
        if scenario.open:  # what an uneven batch is divided by is left open, too, but not how its rows compare
            updates = [u for u in updates if not is_scaled(u)]
        found = judged(LOOP, updates, scenario.about)
        if found:
            return found
    if failed:
        return [failed]
    return list(_of_counts(session, told)) or list(_of_metrics(session, told))


def _of_calls(session: Session, told: dict[str, str]) -> Iterator[Finding]:
    """What the calls of generate and reward_fn show by themselves."""
    s = session.settings
    if not session.calls:
        yield Finding(LOOP, "nothing is sampled: generate is never called", _SAMPLING, told)
        return
    for call in session.calls:
        if call["temperature"] != s.sampling_temperature:
            kind = "temperature ignored: sampling_temperature is not passed on to generate"
            yield Finding(
                LOOP, kind, _SAMPLING, told, f"temperature {call['temperature']:g}", f"{s.sampling_temperature:g}"
            )
            return
        if call["max_tokens"] != s.sampling_max_tokens:
            kind = "sampling_max_tokens is not passed on to generate"
            yield Finding(LOOP, kind, _SAMPLING, told, f"{call['max_tokens']}", f"{s.sampling_max_tokens}")
            return
    yield from _of_groups(session, told)


def _of_groups(session: Session, told: dict[str, str]) -> Iterator[Finding]:
    s = session.settings
    unknown = next((x for x in session.samples if x.prompt < 0), None)
    if unknown is not None:
        kind = "samples a prompt that is none of the prompts it was given"
        yield Finding(LOOP, kind, _SAMPLING, told, repr(session.tokenizer.decode(unknown.prompt_ids)))
        return
    for group in _groups(session.samples):
        distinct = len({tuple(x.token_ids) for x in group})
        if distinct < len(group) and any(call["seed"] is not None for call in session.calls):
            kind = "identical seeds in a group: copies of a prompt get the same sample"
            where = "the seed that is given to generate for each copy of a prompt"
            shown_group = [x.text for x in group]
            yield Finding(LOOP, kind, where, told, f"a group of {shown(shown_group)}", f"{len(group)} samples")
            return
    yield from _of_truths(session, told)
    sizes = Counter(len(group) for group in _groups(session.samples))
    if set(sizes) != {s.group_size}:
        kind = "a question has more or fewer responses than group_size"
        yield Finding(LOOP, kind, _SAMPLING, told, f"{shown(sorted(sizes))} responses to a question", str(s.group_size))
        return
    wanted = s.n_grpo_steps * s.rollout_batch_size
    if len(session.samples) != wanted:
        kind = "samples more or fewer responses than rollout_batch_size for each step"
        if len(session.samples) < wanted and len({x.round for x in session.samples}) < s.n_grpo_steps:
            kind = "responses are not sampled anew in each step: later steps learn from those of an older policy"
        yield Finding(LOOP, kind, _SAMPLING, told, f"{len(session.samples)} in all", str(wanted))
        return
    if len({x.round for x in session.samples}) < s.n_grpo_steps and len(session.updates) > 1:
        kind = "all responses are sampled before the first update: later steps learn from those of an older policy"
        yield Finding(LOOP, kind, _SAMPLING, told, "all samples at once", f"{s.rollout_batch_size} before each step")


def _groups(samples: list[Sample]) -> list[list[Sample]]:
    groups: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        groups.setdefault((sample.round, sample.prompt), []).append(sample)
    return list(groups.values())


def _of_truths(session: Session, told: dict[str, str]) -> Iterator[Finding]:
    """Responses that were judged, but never with their own question's ground truth."""
    judgedly = Counter(session.judgements)
    texts = {text for text, _ in judgedly}
    for s in session.samples:
        if (s.text, s.truth) in judgedly or (s.text.strip(), s.truth) in judgedly:
            continue
        if s.text in texts:
            other = next(truth for text, truth in judgedly if text == s.text)
            kind = "answers are misaligned: a response is judged by another question's ground truth"
            where = "how prompts, responses and ground truths are repeated and zipped"
            if other == s.text or other not in session.truths:
                kind = "reward_fn gets something else than the question's ground truth"
            if (s.truth, s.text) in judgedly:
                kind = "reward_fn gets ground truth and response in swapped places"
            more = told | {"response": repr(s.text), "its ground truth": s.truth}
            yield Finding(LOOP, kind, where, more, f"judged by {other!r}", f"judged by {s.truth!r}")
            return
        if any(truth == s.text for _, truth in judgedly):
            kind = "reward_fn gets ground truth and response in swapped places"
            yield Finding(LOOP, kind, "the call of reward_fn", told | {"response": repr(s.text)})
            return
        kind = "the reward is not asked for the text that was sampled"
        where = "what is handed to reward_fn as the response"
        near = next((text for text, truth in judgedly if truth == s.truth), "nothing")
        yield Finding(LOOP, kind, where, told, f"judged text {near!r}", repr(s.text))
        return


def _of_steps(session: Session, told: dict[str, str]) -> Iterator[Finding]:
    """Far too many optimizer steps, or samples that no step was for: named before their gradients are judged."""
    s = session.settings
    steps = s.n_grpo_steps * s.epochs_per_rollout_batch * -(-s.rollout_batch_size // s.train_batch_size)
    largest = max((len(u.samples) for u in session.updates), default=0)
    if len(session.updates) > steps and largest < s.train_batch_size and s.gradient_accumulation_steps > 1:
        kind = "the optimizer steps after each micro-batch: gradients are not accumulated"
        where = "the calls of optimizer.step(), and the loops around it"
        yield Finding(LOOP, kind, where, told, f"{len(session.updates)} steps", f"{steps} steps")
        return
    if session.updates and not any(u.strangers for u in session.updates):
        learned = {x.number for u in session.updates for x in u.samples}
        never = [x for x in session.samples if _deviates(x, session.samples) and x.number not in learned]
        if never and len(never) < len(session.samples) and all(u.micro and u.gradients for u in session.updates):
            kind = "remainder of a batch dropped: some responses are sampled and never learned from"
            yield Finding(LOOP, kind, _BATCHES, told, f"{len(never)} of {len(session.samples)} are left out", "0")


def _of_counts(session: Session, told: dict[str, str]) -> Iterator[Finding]:
    """How often each sample was learned from, and how many optimizer steps there were."""
    s = session.settings
    learned: Counter[int] = Counter()
    for update in session.updates:
        learned.update({sample.number for sample in update.samples})
    live = [x for x in session.samples if _deviates(x, session.samples)]
    never = [x for x in live if not learned[x.number]]
    if never:
        kind = "remainder of a batch dropped: some responses are sampled and never learned from"
        if len(session.updates) == 0:
            kind = "no optimizer step is taken"
        yield Finding(LOOP, kind, _BATCHES, told, f"{len(never)} of {len(session.samples)} are left out", "0")
        return
    often = Counter(learned[x.number] for x in live)
    if set(often) != {s.epochs_per_rollout_batch}:
        kind = "responses are learned from more or less often than epochs_per_rollout_batch"
        yield Finding(
            LOOP, kind, _BATCHES, told, f"{shown(sorted(often))} times", f"{s.epochs_per_rollout_batch} times"
        )
        return
    per_step = -(-s.rollout_batch_size // s.train_batch_size)
    steps = s.n_grpo_steps * s.epochs_per_rollout_batch * per_step
    if len(session.updates) != steps:
        kind = "the number of optimizer steps is wrong"
        if len(session.updates) >= steps * s.gradient_accumulation_steps > steps:
            kind = "the optimizer steps after each micro-batch: gradients are not accumulated"
        where = "the calls of optimizer.step(), and the loops around it"
        yield Finding(LOOP, kind, where, told, f"{len(session.updates)} steps", f"{steps} steps")


def _deviates(sample: Sample, samples: list[Sample]) -> bool:
    """Whether a response has an advantage other than 0."""
    group = [x.reward for x in samples if (x.round, x.prompt) == (sample.round, sample.prompt)]
    return abs(sample.reward - sum(group) / len(group)) > 1e-6


def _of_metrics(session: Session, told: dict[str, str]) -> Iterator[Finding]:
    """Entropies and clip fractions of the returned metrics, where there is a dictionary for each update."""
    rows = session.metrics
    if not isinstance(rows, list | tuple) or len(rows) != len(session.updates):
        return
    for row, update in zip(rows, session.updates, strict=True):
        if not isinstance(row, dict):
            return
        numbers = {}
        for name, value in row.items():
            try:
                numbers[str(name)] = float(value)
            except (TypeError, ValueError):
                continue
        for name, yours, ours in misplaced(numbers, update):
            kind = f"prompt or padding positions in the reported {name}"
            where = f"the mean that makes {name}: which positions it is over"
            yield Finding(LOOP, kind, where, told, f"{name} {shown(yours)}", f"{name} {shown(ours)}")
            return
        exact = {name: value for name, value in numbers.items() if name in ("entropy", "clip_fraction")}
        for name, yours, ours in unlike(exact, update):
            kind = f"the reported {name} is no mean over the update's response tokens"
            where = f"the mean that makes {name}"
            yield Finding(LOOP, kind, where, told, f"{name} {shown(yours)}", f"{name} {shown(ours)}")
            return
