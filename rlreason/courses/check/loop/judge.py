"""Find bugs in recorded updates: what was learned from, with which weight, and what reached the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from rlreason.courses.check.engine import is_wild
from rlreason.courses.check.loop.gradients import has_right_gradient, of_gradients, plain
from rlreason.courses.check.loop.recording import RecordedSample
from rlreason.courses.check.loop.seeing import find
from rlreason.courses.check.loop.tables import RecordedUpdate, right_weights
from rlreason.courses.check.loop.weights import of_weights
from rlreason.courses.check.subject import Bug, Kind, short_text

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
    return not is_wild(update.log_probs) and all(not is_wild(g) for g in update.gradients.get("full", []))


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
