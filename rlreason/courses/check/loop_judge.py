"""Run a train loop on each scenario, and find the bugs in its calls, its optimizer steps and its gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from rlreason.courses.check.loop_gradients import (
    findings_of_gradients,
    has_right_gradient,
    is_scaled,
    not_a_mean,
    numbers,
    unknown_gradient,
    unlike,
)
from rlreason.courses.check.loop_recording import RecordedSample, RecordedUpdate, find
from rlreason.courses.check.loop_session import SCENARIOS, Scenario, Session
from rlreason.courses.check.loop_weights import findings_of_weights, right_weights
from rlreason.courses.check.observing import has_nonfinite
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

_LEARNED = "how the rows for the forward pass are built from what was sampled"
_SAMPLING = "the call of generate"
_BATCHES = "how a rollout batch is cut into train batches and micro-batches"
_STEPS = "the calls of optimizer.step(), and the loops around it"
_NOT_SAMPLED = Kind("nothing is sampled: generate is never called", _SAMPLING)
_LOST = Kind("remainder of a batch dropped: some responses are sampled and never learned from", _BATCHES)


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
    updates = [u for u in session.updates if u.gradients or u.strangers]
    if any(f.half for u in updates for f in u.forwards):
        note = "mixed precision: its gradients and metrics are not judged, because they are too coarse"
        if note not in notes:
            notes.append(note)
        return [failure] if failure else list(_in_counts(session))
    updates = [u for u in updates if not u.unclear]
    if session.scenario.open:  # what an uneven batch is divided by is left open, but not how its rows compare
        updates = [u for u in updates if not is_scaled(u)]
    if findings := judged(updates):
        return findings
    return [failure] if failure else list(_in_counts(session)) or list(_in_metrics(session))


def judged(updates: Sequence[RecordedUpdate]) -> list[LoopBug]:
    """Return the findings in these updates of one run; [] if each has the right gradient."""
    wrong = [u for u in updates if not has_right_gradient(u)]
    if not wrong:
        return []
    wrong = wrong[:1] + [u for u in wrong[1:] if _is_finite(u)]
    updates = [u for u in updates if u is wrong[0] or _is_finite(u)]
    for look in (_strangers, _dropped, _outside, _temperature):
        if findings := list(look(wrong)):
            return findings
    for look_at_all in (findings_of_weights, findings_of_gradients):
        if findings := list(look_at_all(wrong, updates)):
            return findings
    return [unknown_gradient(wrong[0])]


def _is_finite(update: RecordedUpdate) -> bool:
    """Return whether the model still computed finite numbers."""
    return not any(has_nonfinite(value) for value in (update.log_probs, *update.gradients.get("full", [])))


def _dropped(wrong: Sequence[RecordedUpdate]) -> Iterator[LoopBug]:
    """Find rows given for the step that are not learned from, though they have an advantage."""
    update = wrong[0]
    live = {s.number for s, row in zip(update.samples, right_weights(update), strict=True) if bool(row.any())}
    lost = sum(s.number in live for s in update.unseen)
    if lost:
        kind = "remainder of a batch dropped: some rows are given and never learned from"
        where = "how the rows are cut into micro-batches"
        yield LoopBug(Kind(kind, where), f"{lost} of {len(update.samples)} left out", "0")


def _strangers(wrong: Sequence[RecordedUpdate]) -> Iterator[LoopBug]:
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


def _change_of_sample(ids: list[int], update: RecordedUpdate) -> tuple[Kind, RecordedSample | None]:
    """Return which change of which sample gave this row."""
    text = f" {' '.join(map(str, ids))} "
    for s in update.rollout:
        prompt = f" {' '.join(map(str, s.prompt_ids))} "
        if prompt not in text:
            continue
        after, body = list(map(int, text.partition(prompt)[2].split())), s.token_ids[:-1]
        finished_but_end = not s.truncated and len(body) > 1 and after[: len(body) - 1] == body[:-1]
        if after[:1] == s.token_ids[:1] and finished_but_end:
            return Kind("the end token of a finished response is lost: nothing teaches the policy to stop", _LEARNED), s
    for s in update.rollout:
        for kind, form in _changed_forms(s, update.tokenizer):
            if f" {' '.join(map(str, form[:-1]))} " in text:
                return kind, s
    if find(ids, update.earlier):
        return Kind("learns again from responses of earlier steps", "what is emptied at the beginning of a step"), None
    return Kind("learns from token ids that nobody sampled", _LEARNED), next(iter(update.rollout), None)


def _changed_forms(s: RecordedSample, tokenizer: Any) -> Iterator[tuple[Kind, list[int]]]:
    """Yield the ids of a sample under mistakes."""
    again = tokenizer.encode(s.text, add_special_tokens=False)
    retokenized = Kind("learns from other ids than were sampled: the text was tokenized again", _LEARNED)
    yield retokenized, s.prompt_ids + again
    yield retokenized, s.prompt_ids + again + [tokenizer.eos_token_id]
    yield retokenized, tokenizer.encode(tokenizer.decode(s.prompt_ids) + s.text, add_special_tokens=False)
    yield Kind("the prompt is left out: responses are scored without it", _LEARNED), [*s.token_ids, -1]
    yield Kind("only a part of the response is learned from", _LEARNED), s.ids[: max(2, len(s.prompt_ids) + 2)]


def _outside(wrong: Sequence[RecordedUpdate]) -> Iterator[LoopBug]:
    """Find gradients at positions outside the responses."""
    update = next((u for u in wrong if u.outside.keys() & {"prompt", "behind"}), None)
    if update is None:
        return
    prompt, behind = "prompt" in update.outside, "behind" in update.outside
    end = update.tokenizer.eos_token_id
    where = "how the response mask is built and which positions of the log-probabilities it is put on"
    if update.weights is not None and _all_rows_lose_a_token(update.weights, update, first=not prompt):
        kind = Kind("mask shifted by one: response tokens are lost and neighbours are learned instead", where)
    elif prompt:
        kind = Kind(f"prompt {'and padding ' if behind else ''}positions are learned from", where)
    elif update.outside.get("token behind truncated") == end and update.outside["places behind"] == 1:
        kind = Kind("end token added to truncated samples", _LEARNED)
    else:
        kind = Kind("padding positions are learned from (behind the end of a response)", where)
    s = update.samples[0]
    inputs = {"prompt ids": short_text(s.prompt_ids), "sampled ids": short_text(s.token_ids)}
    names = " and ".join(name for name, is_it in (("prompt", prompt), ("padding", behind)) if is_it)
    yield LoopBug(kind, f"the loss has a gradient at {names} positions", "0 there", inputs)


def _all_rows_lose_a_token(weights: Tensor, update: RecordedUpdate, first: bool) -> bool:
    """Return whether the first, or last, token of every response with an advantage has no weight."""
    right = right_weights(update)
    for row, s in enumerate(update.samples):
        n = len(s.token_ids)
        if n > 1 and bool(right[row, :n].all()) and float(weights[row, 0 if first else n - 1].abs()) > 1e-6:
            return False
    return True


def _temperature(wrong: Sequence[RecordedUpdate]) -> Iterator[LoopBug]:
    """Find log-probabilities of another distribution than was sampled from."""
    for update in wrong:
        t, seen = update.options.temperature, update.temperature_seen
        if update.weights is None or seen == t or not bool(update.weights.any()):
            continue
        if seen is not None:
            name = "temperature ignored: log-probabilities are not those of the tempered distribution that was sampled"
            if seen != 1:
                name = "temperature applied twice or upside down where log-probabilities are computed"
            kind = Kind(name, "where log-probabilities are computed from logits")
            yield LoopBug(kind, f"log-probabilities at temperature {seen:g}", f"at temperature {t:g}")
        elif update.label_shift:
            tokens = {-1: "their own token again, not the next one", 1: "the token after the next one"}
            name = f"shifted by one: positions learn {tokens.get(update.label_shift, 'a token further off')}"
            yield LoopBug(Kind(name, "slices of logits and labels where log-probabilities are gathered"))
        else:
            name = "the gradient is not that of the sampled tokens' log-probabilities"
            where = "labels and shifts where log-probabilities are gathered, and what is added to the loss"
            yield LoopBug(Kind(name, where))
        return


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
            kind = Kind(
                "identical seeds in a group: copies of a prompt get the same sample",
                "the seed that is given to generate for each copy of a prompt",
            )
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
    kind = ""
    if taken > steps and largest < s.train_batch_size and s.gradient_accumulation_steps > 1:
        kind = "the optimizer steps after each micro-batch: gradients are not accumulated"
    elif 0 < taken < steps and largest > s.train_batch_size:
        kind = "one optimizer step is taken for several train batches, not one after each"
    if kind:
        yield LoopBug(Kind(kind, _STEPS), f"{taken} steps", f"{steps} steps")
    elif session.updates and all(u.micro and u.gradients and not u.strangers for u in session.updates):
        learned = {x.number for u in session.updates for x in u.samples}
        never = [x for x in session.samples if _has_advantage(x, session.samples) and x.number not in learned]
        if 0 < len(never) < len(session.samples):
            yield LoopBug(_LOST, f"{len(never)} of {len(session.samples)} are left out", "0")


def _in_counts(session: Session) -> Iterator[LoopBug]:
    """Find responses learned from too often or too rarely, or a wrong number of optimizer steps."""
    epochs = session.settings.epochs_per_rollout_batch
    learned = Counter(sample.number for update in session.updates for sample in update.samples)
    live = [x for x in session.samples if _has_advantage(x, session.samples)]
    never = [x for x in live if not learned[x.number]]
    if never:
        kind = _LOST if session.updates else Kind("no optimizer step is taken", _BATCHES)
        yield LoopBug(kind, f"{len(never)} of {len(session.samples)} are left out", "0")
        return
    often = {learned[x.number] for x in live}
    if often != {epochs}:
        kind = Kind("responses are learned from more or less often than epochs_per_rollout_batch", _BATCHES)
        yield LoopBug(kind, f"{short_text(sorted(often))} times", f"{epochs} times")
        return
    steps, taken = _right_steps(session), len(session.updates)
    if taken != steps:
        name = "the number of optimizer steps is wrong"
        if taken >= steps * session.settings.gradient_accumulation_steps > steps:
            name = "the optimizer steps after each micro-batch: gradients are not accumulated"
        yield LoopBug(Kind(name, _STEPS), f"{taken} steps", f"{steps} steps")


def _has_advantage(sample: RecordedSample, samples: list[RecordedSample]) -> bool:
    """Return whether a response has an advantage other than 0."""
    group = [x.reward for x in samples if (x.round, x.prompt) == (sample.round, sample.prompt)]
    return abs(sample.reward - sum(group) / len(group)) > 1e-6


def _in_metrics(session: Session) -> Iterator[LoopBug]:
    """Find the first wrong entropy or clip fraction of the returned metrics, if there is a dictionary per update."""
    rows = session.metrics
    if not isinstance(rows, list | tuple) or len(rows) != len(session.updates):
        return
    for row, update in zip(rows, session.updates, strict=True):
        for name, yours, ours in unlike(numbers(row), update):
            yield LoopBug(not_a_mean(name), f"{name} {short_text(yours)}", f"{name} {short_text(ours)}")
            return
