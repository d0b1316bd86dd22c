"""Find bugs in recorded updates: what was learned from, with which weight, and what reached the optimizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from rlreason.courses.check.engine import has_nonfinite
from rlreason.courses.check.loop_gradients import find, has_right_gradient, is_scaled, of_gradients, of_truths, plain
from rlreason.courses.check.loop_recording import RecordedSample, RecordedUpdate, right_weights
from rlreason.courses.check.loop_session import SCENARIOS, Scenario, Session
from rlreason.courses.check.loop_weights import not_a_mean, numbers, of_weights, unlike
from rlreason.courses.check.runner import TimeUpError
from rlreason.courses.check.subject import LOOP, Bug, Kind, NotWrittenError, short_text, their_error

_LEARNED = "how the rows for the forward pass are built from what was sampled"


def judged(function: str, updates: Sequence[RecordedUpdate], about: str) -> list[Bug]:
    """Return the bugs in these updates of one run; [] if each has the right gradient."""
    wrong = [u for u in updates if not has_right_gradient(u)]
    if not wrong:
        return []
    wrong = wrong[:1] + [u for u in wrong[1:] if _is_finite(u)]
    updates = [u for u in updates if u is wrong[0] or _is_finite(u)]
    for look in (_strangers, _dropped, _outside, _temperature, of_weights, of_gradients):
        if found := list(look(function, wrong, updates, about)):
            return found
    return [plain(function, wrong[0], about)]


def _is_finite(update: RecordedUpdate) -> bool:
    """Return whether the model still computed finite numbers."""
    return not has_nonfinite(update.log_probs) and all(not has_nonfinite(g) for g in update.gradients.get("full", []))


def _dropped(
    function: str, wrong: Sequence[RecordedUpdate], updates: Sequence[RecordedUpdate], about: str
) -> Iterator[Bug]:
    """Report rows given for the step that are not learned from, though they have an advantage."""
    update = wrong[0]
    live = {s.number for s, row in zip(update.samples, right_weights(update), strict=True) if bool(row.any())}
    lost = [s for s in update.unseen if s.number in live]
    if lost:
        kind = "remainder of a batch dropped: some rows are given and never learned from"
        where = "how the rows are cut into micro-batches"
        yield Bug(function, kind, where, {"scenario": about}, f"{len(lost)} of {len(update.samples)} left out", "0")


def _strangers(
    function: str, wrong: Sequence[RecordedUpdate], updates: Sequence[RecordedUpdate], about: str
) -> Iterator[Bug]:
    """Report rows that were not sampled."""
    for update in wrong:
        for ids in update.strangers:
            kind, sample = stranger_kind(ids, update)
            told = {"scenario": about}
            if sample is not None:
                told |= {
                    "prompt ids": short_text(sample.prompt_ids),
                    "sampled": f"{sample.text!r} {short_text(sample.token_ids)}",
                }
                if sample.truncated:
                    told["truncated"] = "True: it was cut at the limit, without an end token"
            ours = short_text(sample.ids) if sample else "rows of a prompt's ids with sampled token_ids"
            yield Bug(function, *kind, told, f"learns from {short_text(ids)}", ours)
            return


def stranger_kind(ids: list[int], update: RecordedUpdate) -> tuple[Kind, RecordedSample | None]:
    """Return which change of a sample gave this row."""
    text = f" {' '.join(map(str, ids))} "
    for s in update.rollout:
        prompt = f" {' '.join(map(str, s.prompt_ids))} "
        if prompt not in text:
            continue
        after = list(map(int, text.partition(prompt)[2].split()))
        if after[:1] == s.token_ids[:1] and _all_but_end(after, s):
            return Kind("the end token of a finished response is lost: nothing teaches the policy to stop", _LEARNED), s
    for s in update.rollout:
        forms = _forms(s, update.tokenizer)
        for kind, form in forms:
            if f" {' '.join(map(str, form[:-1]))} " in text:
                return kind, s
    if find(ids, update.earlier):
        return Kind("learns again from responses of earlier steps", "what is emptied at the beginning of a step"), None
    return Kind("learns from token ids that nobody sampled", _LEARNED), next(iter(update.rollout), None)


def _all_but_end(after: list[int], s: RecordedSample) -> bool:
    """Whether a row behind the prompt is a finished response without its end token, alone or before padding."""
    body = s.token_ids[:-1]
    return not s.truncated and len(body) > 1 and after[: len(body) - 1] == body[:-1]


def _forms(s: RecordedSample, tokenizer: Any) -> Iterator[tuple[Kind, list[int]]]:
    again = tokenizer.encode(s.text, add_special_tokens=False)
    retokenized = Kind("learns from other ids than were sampled: the text was tokenized again", _LEARNED)
    yield retokenized, s.prompt_ids + again
    yield retokenized, s.prompt_ids + again + [tokenizer.eos_token_id]
    yield retokenized, tokenizer.encode(tokenizer.decode(s.prompt_ids) + s.text, add_special_tokens=False)
    lost = Kind("the prompt is left out: responses are scored without it", _LEARNED)
    yield lost, [*s.token_ids, -1]
    yield Kind("only a part of the response is learned from", _LEARNED), s.ids[: max(2, len(s.prompt_ids) + 2)]


def _outside(
    function: str, wrong: Sequence[RecordedUpdate], updates: Sequence[RecordedUpdate], about: str
) -> Iterator[Bug]:
    """Report places outside the response that have a gradient."""
    for update in wrong:
        prompt, behind = "prompt" in update.outside, "behind" in update.outside
        if not (prompt or behind):
            continue
        shifted = update.weights is not None and bool(_first_or_last_lost(update.weights, update, prompt))
        mask = "how the response mask is built and which positions of the log-probabilities it is put on"
        if shifted:
            kind = Kind("mask shifted by one: response tokens are lost and neighbours are learned instead", mask)
        elif prompt and behind:
            kind = Kind("prompt and padding positions are learned from", mask)
        elif prompt:
            kind = Kind("prompt positions are learned from", mask)
        elif (
            update.outside.get("token behind truncated") == update.tokenizer.eos_token_id
            and update.outside["places behind"] == 1
        ):
            kind = Kind("end token added to truncated samples", _LEARNED)
        else:
            kind = Kind("padding positions are learned from (behind the end of a response)", mask)
        s = update.samples[0]
        told = {"scenario": about, "prompt ids": short_text(s.prompt_ids), "sampled ids": short_text(s.token_ids)}
        where = " and ".join(name for name, is_it in (("prompt", prompt), ("padding", behind)) if is_it)
        yield Bug(function, *kind, told, f"the loss has a gradient at {where} positions", "0 there")
        return


def _first_or_last_lost(weights: Tensor, update: RecordedUpdate, prompt: bool) -> bool:
    right = right_weights(update)
    for row, s in enumerate(update.samples):
        n = len(s.token_ids)
        lost = 0 if not prompt else n - 1
        if n > 1 and bool(right[row, :n].all()) and float(weights[row, lost].abs()) > 1e-6:
            return False
    return True


def _temperature(
    function: str, wrong: Sequence[RecordedUpdate], updates: Sequence[RecordedUpdate], about: str
) -> Iterator[Bug]:
    """Report log-probabilities of another distribution than was sampled from."""
    for update in wrong:
        t, seen = update.options.temperature, update.temperature_seen
        if update.weights is None or seen == t or not bool(update.weights.any()):
            continue
        told = {"scenario": about}
        if seen is None and update.label_shift:
            words = {-1: "their own token again, not the next one", 1: "the token after the next one"}
            kind = Kind(
                f"shifted by one: positions learn {words.get(update.label_shift, 'a token further off')}",
                "slices of logits and labels where log-probabilities are gathered",
            )
            yield Bug(function, *kind, told)
        elif seen is not None:
            name = "temperature ignored: log-probabilities are not those of the tempered distribution that was sampled"
            if seen != 1:
                name = "temperature applied twice or upside down where log-probabilities are computed"
            kind = Kind(name, "where log-probabilities are computed from logits")
            yield Bug(function, *kind, told, f"log-probabilities at temperature {seen:g}", f"at temperature {t:g}")
        else:
            kind = Kind(
                "the gradient is not that of the sampled tokens' log-probabilities",
                "labels and shifts where log-probabilities are gathered, and what is added to the loss",
            )
            yield Bug(function, *kind, told)
        return


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
