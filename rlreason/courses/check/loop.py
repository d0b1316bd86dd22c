"""Run a train loop, or the train step of 2026, on a small model with recording parts, and judge each run.

`docs/check.md` documents the loop's signature. A run is judged by its calls, its optimizer steps and their gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch

from rlreason.courses.check.calling import (
    TRIALS,
    Bug,
    Function,
    Kind,
    NotWrittenError,
    answer_parts,
    described,
    multiple,
    refuse_misjudged,
    short_text,
    tensor,
)
from rlreason.courses.check.mistakes import NO_MISTAKE, first_that
from rlreason.courses.check.recording import Scenario, Session, Update, as_text, find

SCENARIOS = [Scenario(**run) for run in TRIALS["loops"]]
STEP_SCENARIOS = [Scenario(**run, answers=2, is_step=True) for run in TRIALS["steps"]]


def check_loop(function: Function, notes: list[str], scenarios: Sequence[Scenario]) -> list[Bug]:
    """Return the bug of a loop, or train step, that the first scenario shows, or []; add those not tried to `notes`.

    `NotWrittenError` if nothing is written yet.
    """
    for scenario in scenarios:
        session, failure, returned = Session(scenario), None, None
        try:
            returned = session.run(function)
        except Bug as bug:
            failure = bug
        if isinstance(failure, NotWrittenError) and scenario is scenarios[0] and not session.updates:
            raise failure
        if failure and scenario.may_be_refused and not session.updates:
            notes.append(f"not tried, as it is refused: {scenario.about} ({failure.yours})")
            continue
        try:
            _judge(session, failure, returned, notes)
        except Bug as bug:
            bug.inputs = {"scenario": scenario.about} | bug.inputs
            return [bug]
    return []


_SAMPLING = "the call of generate"
_BATCHES = "how a rollout batch is cut into train batches and micro-batches"
_STEPS = "the calls of optimizer.step(), and the loops around it"
_LEARNED = "how the rows for the forward pass are built from what was sampled"


def _judge(session: Session, failure: Bug | None, returned: Any, notes: list[str]) -> None:
    """Raise the bug of a run: of its calls and counts, else of its gradients, else of the loss that a step returns."""
    session.samples = session.training()
    if failure is None:
        _judge_counts(session)
    updates = [u for u in session.updates if u.samples or u.strangers]
    if any(f.coarse for u in updates for f in u.forwards):
        note = "mixed precision: its gradients are not judged, because they are too coarse"
        if note not in notes:
            notes.append(note)
        updates = []
    judged = [u for u in updates if u.strangers or not u.asked_twice]
    if session.scenario.may_be_refused and not session.scenario.is_step:  # what an uneven batch is divided by is open
        judged = [u for u in judged if not (u.samples and 0.2 < (multiple(u.at_step, u.right) or 0) < 1.7)]
    wrong = [u for u in judged if not u.samples or not u.is_at_step(u.right)]
    for update in wrong:
        if update.strangers:
            _judge_stranger(update, update.strangers[0])
    if wrong:
        first = wrong[0]
        _judge_rows(first)
        trials = [first, *(u for u in judged if bool(u.right.isfinite().all()))]
        if mistake := first_that(lambda m: all(u.is_at_step(m("step", u, u.gradient_of(m, u.passes))) for u in trials)):
            raise _bug(first, mistake.kind)
        where = "between logits and optimizer.step(): the per-token loss, its mask, what is added to it, backward"
        raise _bug(first, described("gradient at the optimizer step", [(u.at_step, u.right) for u in wrong], where))
    if failure:
        raise failure
    if updates and session.scenario.is_step:
        if bool(session.gradient().any()):
            raise Bug("gradients are left behind after the step", "zero_grad after the step", "gradients", "none")
        loss = tensor(answer_parts(returned, ("loss", "metadata"))["loss"], "the loss")
        right = updates[0].loss(NO_MISTAKE, [updates[0].samples])
        if abs(loss - right) > 1e-3 * (1e-2 + abs(right)):
            raise Bug(
                "the loss that is returned is not the batch's loss before the step",
                "what is added up over the micro-batches",
                short_text(loss),
                short_text(right),
            )


def _judge_counts(session: Session) -> None:
    """Raise the first bug in the calls of generate and reward_fn, and in how often is learned from a response."""
    s, samples, updates = session.settings, session.samples, session.updates
    epochs, size, batch = s["epochs_per_rollout_batch"], s["train_batch_size"], s["rollout_batch_size"]
    if not samples:
        raise Bug("nothing is sampled: generate is never called", _SAMPLING)
    groups = defaultdict(list)
    for sample in samples:
        for name, right in (("temperature", session.options.temperature), ("max_tokens", s["sampling_max_tokens"])):
            if sample.asked[name] != right:
                kind = f"{name} ignored: sampling_{name} is not passed on to generate"
                raise Bug(kind, _SAMPLING, f"{name} {sample.asked[name]}", f"{right}")
        if sample.place < 0:
            prompt = repr(session.tokenizer.decode(sample.prompt_ids))
            raise Bug("samples a prompt that is none of the prompts it was given", _SAMPLING, prompt)
        groups[sample.round, sample.place].append(sample)
    if len(samples) > s["group_size"] and len({x.place for x in samples}) == 1:
        raise Bug("the same question is asked for every group", _SAMPLING)
    for group in groups.values():
        if len({tuple(x.token_ids) for x in group}) < len(group) and any(x.asked["seed"] is not None for x in group):
            raise Bug(
                "identical seeds in a group: copies of a prompt get the same sample",
                "the seed that is given to generate for each copy of a prompt",
                f"a group of {short_text([x.text for x in group])}",
                f"{len(group)} samples",
            )
    refuse_misjudged([(x.text, x.truth) for x in samples], session.reward_calls)
    sizes, rounds = sorted({len(group) for group in groups.values()}), len({x.round for x in samples})
    asked = s["n_grpo_steps"] * batch
    if len(samples) != asked or any(n % s["group_size"] for n in sizes):  # a question asked twice has two groups
        raise Bug(
            "samples more or fewer responses than group_size to a question, or than rollout_batch_size for each step",
            _SAMPLING,
            f"{short_text(sizes)} to a question, {len(samples)} in all, in {rounds} steps",
            f"{s['group_size']} to a question, {asked} in all",
        )
    if rounds < s["n_grpo_steps"] and len(updates) > 1:
        raise Bug(
            "all responses are sampled before the first update: later steps learn from those of an older policy",
            _SAMPLING,
            "all samples at once",
            f"{batch} before each step",
        )
    steps = s["n_grpo_steps"] * epochs * -(-batch // size)
    taken, right = f"{len(updates)} steps", f"{steps} steps"
    if not updates:
        where = "optimizer.step(), and lines that make an optimizer of their own"
        raise Bug("no optimizer step is taken with the optimizer that is handed in", where, taken, right)
    largest = max(len(u.samples) for u in updates)
    if len(updates) > steps and largest < size and s["gradient_accumulation_steps"] > 1:
        kind = "the optimizer steps after each micro-batch: gradients are not accumulated"
        raise Bug(kind, _STEPS, taken, right)
    if any(u.strangers for u in updates):
        return
    learned, times = Counter(sample for update in updates for sample in update.samples), set[int]()
    for group in groups.values():
        rewards = [x.parts["reward"] for x in group]
        center = fmean(rewards) if session.options.baseline == "mean" else 0.0
        if len(group) == s["group_size"]:  # those with advantage 0 need not be learned from
            times |= {learned[x] for x in group if abs(x.parts["reward"] - center) > 1e-6}
    if 0 in times:
        raise Bug("remainder of a batch dropped: some responses are sampled and never learned from", _BATCHES)
    if times - {epochs}:
        kind = "responses are learned from more or less often than epochs_per_rollout_batch"
        raise Bug(kind, _BATCHES, f"{short_text(sorted(times))} times", f"{epochs} times")
    if len(updates) != steps:
        raise Bug("the number of optimizer steps is wrong", _STEPS, taken, right)


def _judge_stranger(u: Update, ids: list[int]) -> None:
    """Raise the bug of a row that was not sampled."""
    encode, decode = u.session.encode, u.session.tokenizer.decode
    text, yours = as_text(ids), f"learns from {short_text(ids)}"
    if find(ids, u.session.samples):
        raise Bug("learns again from responses of earlier steps", "what is emptied at the beginning of a step", yours)
    for s in u.rollout:
        if not s.truncated and len(s.token_ids) > 2 and as_text(s.ids[:-2]) in text:
            kind = "the end token of a finished response is lost: nothing teaches the policy to stop"
            raise Bug(kind, _LEARNED, yours, short_text(s.ids))
        for form in (s.prompt_ids + encode(s.text), encode(decode(s.prompt_ids) + s.text)):
            if len(form) > len(s.prompt_ids) + 1 and as_text(form[:-1]) in text:
                kind = "learns from other ids than were sampled: the text was tokenized again"
                raise Bug(kind, _LEARNED, yours, short_text(s.ids))
    ours = "rows of a prompt's ids with all of the sampled token_ids"
    raise Bug("learns from token ids that were not sampled", _LEARNED, yours, ours)


def _judge_rows(u: Update) -> None:
    """Raise the bug of rows with an end token behind a truncated response, or with another context than sampled."""
    behind = [(f.ids[row, start + len(s.ids) :].tolist(), s) for s, f, row, start in u.members]
    end, head = u.session.tokenizer.eos_token_id, u.model.get_output_embeddings()
    of_truncated = [ids[0] for ids, s in behind if s.truncated and ids]
    is_padding = any(ids[:2] == [end, end] for ids, _ in behind)
    if not is_padding and set(of_truncated) == {end}:
        yours = "rows of truncated responses with an end token"
        raise Bug("end token added to truncated samples", _LEARNED, yours, "rows of what was sampled")
    for sample, f, row, start in u.members:
        seen = sample.log_probs(head(f.hidden[row : row + 1, start:]), 1.0)
        if float((seen - sample.scored_by(u.model, 1.0)).abs().max()) <= 1e-2:
            continue
        kind = "log-probabilities are not those behind the prompt: padding or other rows are attended to"
        where = "attention_mask, position_ids and the side of the padding"
        if min(start for *_, start in u.members) > 0:  # padding leaves out the longest row
            kind = "a token stands before the prompt that was not there when it was sampled (a begin token twice?)"
            where = "how prompt ids are made for the forward pass: prompt_ids are complete as they are"
        raise _bug(u, (kind, where))


def _bug(u: Update, kind: Kind) -> Bug:
    """Return a bug with the norms of both gradients, and the angle between them."""
    cosine = float(torch.nn.functional.cosine_similarity(u.at_step, u.right, 0))
    yours = f"gradient of norm {float(u.at_step.norm()):.4g} at the step, cosine {cosine:.3g} with ours"
    return Bug(*kind, yours, f"norm {float(u.right.norm()):.4g}")
