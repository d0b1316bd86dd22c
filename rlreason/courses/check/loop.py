"""Run a train loop, or the train step of 2026, on a small model with recording parts, and judge each run.

`docs/check.md` documents the loop's signature. A run is judged by its calls, its optimizer steps and their gradients.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlreason.courses.check.calling import (
    RAISES,
    Bug,
    Function,
    Kind,
    NotWrittenError,
    answer_parts,
    call,
    misjudged,
    short_text,
    tensor,
    their_error,
)
from rlreason.courses.check.mistakes import NO_MISTAKE, Mistake, mistakes
from rlreason.courses.check.recording import OUTSIDE, Scenario, Session, Update, as_text, find

_SETTINGS: dict[str, Any] = {
    "n_grpo_steps": 2,
    "rollout_batch_size": 12,
    "group_size": 4,
    "train_batch_size": 12,
    "gradient_accumulation_steps": 3,
    "epochs_per_rollout_batch": 1,
    "sampling_temperature": 0.7,
    "sampling_max_tokens": 6,
    "loss_type": "reinforce_with_baseline",
    "cliprange": 0.2,
    "advantage_eps": 1e-6,
    "use_std_normalization": True,
    "max_grad_norm": 1e6,
    "seed": 0,
}
SCENARIOS = (
    Scenario("on-policy, 3 questions x 4 responses, 3 micro-batches, temperature 0.7", _SETTINGS, flat=True),
    Scenario(
        "off-policy: 2 epochs, 2 updates each, grpo_clip 0.1, temperature 1.3, no std, max_grad_norm 0.05",
        _SETTINGS
        | {"train_batch_size": 6, "gradient_accumulation_steps": 2, "epochs_per_rollout_batch": 2, "cliprange": 0.1}
        | {"loss_type": "grpo_clip", "sampling_temperature": 1.3, "use_std_normalization": False}
        | {"max_grad_norm": 0.05, "seed": 1},
        learning_rate=8.0,
    ),
    Scenario(
        "advantage_eps 0.5, 6 questions x 2 responses, 2 updates, no micro-batches, some questions of one answer",
        _SETTINGS
        | {"group_size": 2, "train_batch_size": 6, "gradient_accumulation_steps": 1, "advantage_eps": 0.5}
        | {"sampling_temperature": 0.9, "seed": 2},
        answers=5,
    ),
    Scenario(
        "a rollout batch of 16 in train batches of 12, each in 2 micro-batches: 4 responses are left for the last",
        _SETTINGS | {"rollout_batch_size": 16, "gradient_accumulation_steps": 2, "n_grpo_steps": 1, "seed": 3},
        may_be_refused=True,
    ),
    Scenario(
        "a train batch of 8 in 3 micro-batches, which do not divide it",
        _SETTINGS | {"rollout_batch_size": 8, "train_batch_size": 8, "n_grpo_steps": 1, "seed": 4},
        may_be_refused=True,
    ),
)
_SIZES = ("rollout_batch_size", "group_size", "train_batch_size", "epochs_per_rollout_batch", "sampling_max_tokens")
_BATCH = {name: _SETTINGS[name] for name in (*_SIZES, "max_grad_norm")}
_BATCH |= {"n_grpo_steps": 1, "gradient_accumulation_steps": 2}
STEP_SETTINGS: tuple[dict[str, Any], ...] = (
    {"gradient_accumulation_steps": 1},
    {"gradient_accumulation_steps": 3},
    {"gradient_accumulation_steps": 5},  # does not divide the rows, which a step may refuse
    {"max_grad_norm": 0.05},
    {"advantage_eps": 0.5},
    {"loss_normalization": "constant", "normalization_constant": 40, "advantage_normalizer": "none"},
    {"baseline": "none", "advantage_normalizer": "none"},
    {"advantage_normalizer": "mean", "advantage_eps": 0.1},
    {"importance_reweighting_method": "noclip"},
    {"importance_reweighting_method": "grpo", "cliprange": 0.1},
    {"importance_reweighting_method": "gspo", "cliprange": 0.02},
)


def check_step(function: Function, notes: list[str]) -> list[Bug]:
    """Return the bug of a train step that the first of `STEP_SETTINGS` shows; add settings not tried to `notes`."""
    scenarios = [
        Scenario(
            ", ".join(f"{name}={value}" for name, value in settings.items()),
            _BATCH | settings,
            may_be_refused=12 % settings.get("gradient_accumulation_steps", 1) > 0,
            answers=2,
            is_step=True,
        )
        for settings in STEP_SETTINGS
    ]
    return check_loop(_as_loop(function), notes, scenarios)


def _as_loop(step: Function) -> Function:
    """Return a loop of one step around the train step, which returns the step's loss."""

    def train(
        policy: Any, tokenizer: Any, prompts: Any, ground_truths: Any, reward_fn: Any, generate: Any, optimizer: Any,
        *, n_grpo_steps: int, rollout_batch_size: int, train_batch_size: int, epochs_per_rollout_batch: int,
        sampling_max_tokens: int, group_size: int, **settings: Any,
    ) -> float:  # fmt: skip
        n_prompts = rollout_batch_size // group_size
        rollouts = generate(prompts[:n_prompts], n=group_size, max_tokens=sampling_max_tokens)
        arguments = {
            "model": policy,
            "tokenizer": tokenizer,
            "optimizer": optimizer,
            "reward_fn": reward_fn,
            "repeated_prompts": [r.prompt for r in rollouts],
            "rollout_responses": [r.text for r in rollouts],
            "repeated_ground_truths": [truth for truth in ground_truths[:n_prompts] for _ in range(group_size)],
            "group_size": group_size,
            **settings,
        }
        if "importance_reweighting_method" in settings:
            width = max(len(r.prompt_ids) + len(r.token_ids) for r in rollouts) - 1
            arguments["old_log_probs"] = torch.full((len(rollouts), width), OUTSIDE)
            for row, r in zip(arguments["old_log_probs"], rollouts, strict=True):
                first = len(r.prompt_ids) - 1
                row[first : first + len(r.log_probs)] = torch.tensor(r.log_probs)
        answer = answer_parts(call(step, arguments), ("loss", "metadata"))
        return float(tensor(answer["loss"], "the loss"))

    return train


def check_loop(function: Function, notes: list[str], scenarios: Sequence[Scenario] = SCENARIOS) -> list[Bug]:
    """Return the bug of a train loop that the first scenario shows, or []; add scenarios not tried to `notes`.

    `NotWrittenError` if nothing is written yet.
    """
    for scenario in scenarios:
        session, failure, returned = Session(scenario), None, None
        is_unwritten = False
        try:
            returned = session.run(function)
            is_unwritten = returned is None and not session.calls and not session.updates
        except BaseException as error:  # also SystemExit: it is the user's loop
            is_unwritten = isinstance(error, NotImplementedError | NotWrittenError) and not session.updates
            raised = Bug(*RAISES, their_error(error), "a run to its end")
            failure = error if isinstance(error, Bug) else raised
        if is_unwritten and scenario is scenarios[0]:
            raise NotWrittenError
        if failure and scenario.may_be_refused and not session.updates:
            notes.append(f"not tried, as it is refused: {scenario.about} ({failure.yours})")
        elif bug := _bug_of_run(session, failure, returned, notes):
            bug.inputs = {"scenario": scenario.about} | bug.inputs
            return [bug]
    return []


_SAMPLING = "the call of generate"
_BATCHES = "how a rollout batch is cut into train batches and micro-batches"
_STEPS = "the calls of optimizer.step(), and the loops around it"
_LEARNED = "how the rows for the forward pass are built from what was sampled"
_ZERO = "where zero_grad is called, relative to backward and step"
_CLIP = "the call of clip_grad_norm_: once, on the whole gradient, right before the step"


def _bug_of_run(session: Session, failure: Bug | None, returned: Any, notes: list[str]) -> Bug | None:
    """Return the bug of a run: of its calls and counts, else of its gradients, else of the loss that a step returns."""
    session.samples = session.training()
    if failure is None and (bug := _bug_of_calls(session) or _bug_of_counts(session)):
        return bug
    updates = [u for u in session.updates if u.samples or u.strangers]
    if any(f.logits is not None and f.logits.element_size() < 4 for u in updates for f in u.forwards):
        note = "mixed precision: its gradients are not judged, because they are too coarse"
        notes += [] if note in notes else [note]
        return failure
    judged = [u for u in updates if u.strangers or not u.asked_twice]
    if session.scenario.may_be_refused and not session.scenario.is_step:  # what an uneven batch is divided by is open
        judged = [u for u in judged if not (u.samples and 0.2 < (u.factor or 0) < 1.7)]
    if bug := _bug_of_updates(judged) or failure:
        return bug
    if session.scenario.is_step:
        if bool(session.gradient().any()):
            return Bug("gradients are left behind after the step", "zero_grad after the step", "gradients", "none")
        right = updates[0].right_loss.item()
        if abs(returned - right) > 1e-3 * (1e-2 + abs(right)):
            name = "the loss that is returned is not the batch's loss before the step"
            return Bug(name, "what is added up over the micro-batches", f"{returned:.4g}", f"{right:.4g}")
    return None


def _bug_of_calls(session: Session) -> Bug | None:
    """Return the first bug in the calls of generate, reward_fn and the optimizer."""
    s, calls, samples = session.settings, session.training_calls(), session.samples
    if not calls:
        return Bug("nothing is sampled: generate is never called", _SAMPLING)
    for asked in calls:
        for name, right in (("temperature", session.options.temperature), ("max_tokens", s["sampling_max_tokens"])):
            if getattr(asked, name) != right:
                kind = f"{name} ignored: sampling_{name} is not passed on to generate"
                return Bug(kind, _SAMPLING, f"{name} {getattr(asked, name)}", f"{right}")
    groups = defaultdict(list)
    for sample in samples:
        groups[sample.round, sample.place].append(sample)
        if sample.place < 0:
            name = "samples a prompt that is none of the prompts it was given"
            return Bug(name, _SAMPLING, repr(session.tokenizer.decode(sample.prompt_ids)))
    if len(samples) > s["group_size"] and len({x.place for x in samples}) == 1:
        return Bug("the same question is asked for every group", _SAMPLING)
    for group in groups.values():
        distinct = len({tuple(x.token_ids) for x in group})
        if distinct < len(group) and any(asked.seed is not None for asked in calls):
            name = "identical seeds in a group: copies of a prompt get the same sample"
            where = "the seed that is given to generate for each copy of a prompt"
            return Bug(name, where, f"a group of {short_text([x.text for x in group])}", f"{len(group)} samples")
    if bug := misjudged([(x.text, x.truth) for x in samples], session.reward_calls):
        return bug
    sizes = sorted({len(group) for group in groups.values()})
    if any(size % s["group_size"] for size in sizes):  # a question that is asked twice has two groups
        name = "a question has more or fewer responses than group_size"
        return Bug(name, _SAMPLING, f"{short_text(sizes)} responses to a question", str(s["group_size"]))
    right, rounds = s["n_grpo_steps"] * s["rollout_batch_size"], len({x.round for x in samples})
    if len(samples) != right:
        name = "samples more or fewer responses than rollout_batch_size for each step"
        return Bug(name, _SAMPLING, f"{len(samples)} in all, in {rounds} steps", str(right))
    if rounds < s["n_grpo_steps"] and len(session.updates) > 1:
        name = "all responses are sampled before the first update: later steps learn from those of an older policy"
        return Bug(name, _SAMPLING, "all samples at once", f"{s['rollout_batch_size']} before each step")
    return None


def _bug_of_counts(session: Session) -> Bug | None:
    """Return the first bug in the number of optimizer steps, or of updates that a response is learned in."""
    s, updates = session.settings, session.updates
    epochs, size = s["epochs_per_rollout_batch"], s["train_batch_size"]
    steps = s["n_grpo_steps"] * epochs * -(-s["rollout_batch_size"] // size)
    largest = max((len(u.samples) for u in updates), default=0)
    taken, right = f"{len(updates)} steps", f"{steps} steps"
    if not updates:
        where = "optimizer.step(), and lines that make an optimizer of their own"
        return Bug("no optimizer step is taken with the optimizer that is handed in", where, taken, right)
    if len(updates) > steps and largest < size and s["gradient_accumulation_steps"] > 1:
        name = "the optimizer steps after each micro-batch: gradients are not accumulated"
        return Bug(name, _STEPS, taken, right)
    if any(u.strangers for u in updates):
        return None
    learned = Counter(sample for update in updates for sample in update.samples)
    groups = defaultdict(list)
    for x in session.samples:
        groups[x.round, x.place].append(x)
    times = []
    for group in groups.values():
        rewards = [x.parts["reward"] for x in group]
        center = fmean(rewards) if session.options.baseline == "mean" else 0.0
        if len(group) == s["group_size"]:  # those with advantage 0 need not be learned from
            times += [learned[x] for x in group if abs(x.parts["reward"] - center) > 1e-6]
    if 0 in times:
        name = "remainder of a batch dropped: some responses are sampled and never learned from"
        return Bug(name, _BATCHES, f"{times.count(0)} of {len(session.samples)} are left out", "0")
    if set(times) - {epochs}:
        name = "responses are learned from more or less often than epochs_per_rollout_batch"
        return Bug(name, _BATCHES, f"{short_text(sorted(set(times)))} times", f"{epochs} times")
    if len(updates) != steps:
        return Bug("the number of optimizer steps is wrong", _STEPS, taken, right)
    return None


def _bug_of_updates(updates: Sequence[Update]) -> Bug | None:
    """Return the bug in these updates of one run; None if each has the right gradient."""
    wrong = [u for u in updates if not u.is_right]
    if not wrong:
        return None
    for update in wrong:
        if update.strangers:
            return _bug_of_stranger(update, update.strangers[0])
    first, others = wrong[0], [u for u in updates if bool(u.full.isfinite().all())]
    if bug := _bug_of_rows(first):
        return bug
    for update in (first, *(u for u in wrong if u in others)):
        for kind, guess in _wrong_steps(update):
            if update.is_at_step(guess):
                return _bug(update, kind)
    for m in mistakes():
        if all(u.gives(m) for u in (first, *others)):
            return _bug_of_response(first, m) or _bug(first, (m.name, m.where))
    return _bug(first, _described(first))


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


def _bug_of_rows(u: Update) -> Bug | None:
    """Return the bug of rows with an end token behind a truncated response, or with another context than sampled."""
    behind = [(f.ids[row, start + len(s.ids) :].tolist(), s) for f in u.forwards for s, row, start in f.members]
    end = u.session.tokenizer.eos_token_id
    of_truncated = [ids[:1] for ids, s in behind if s.truncated and ids]
    is_padding = any(ids[:2] == [end, end] for ids, _ in behind)
    if of_truncated and not is_padding and all(ids == [end] for ids in of_truncated):
        yours = "rows of truncated responses with an end token"
        return Bug("end token added to truncated samples", _LEARNED, yours, "rows of what was sampled")
    if not u.has_other_context:
        return None
    if min(start for f in u.forwards for _, _, start in f.members) > 0:  # padding leaves out the longest row
        name = "a token stands before the prompt that was not there when it was sampled (a begin token twice?)"
        return _bug(u, (name, "how prompt ids are made for the forward pass: prompt_ids are complete as they are"))
    name = "log-probabilities are not those behind the prompt: padding or other rows are attended to"
    return _bug(u, (name, "attention_mask, position_ids and the side of the padding"))


def _bug(u: Update, kind: Kind) -> Bug:
    """Return a bug with the norms of both gradients, and the angle between them."""
    right = u.clipped(u.full)
    cosine = float(torch.nn.functional.cosine_similarity(u.at_step, right, 0))
    yours = f"gradient of norm {float(u.at_step.norm()):.4g} at the step, cosine {cosine:.3g} with ours"
    return Bug(*kind, yours, f"norm {float(right.norm()):.4g}")


def _bug_of_response(u: Update, m: Mistake) -> Bug | None:
    """Return a bug with the response whose advantage is furthest off; None if none is off."""
    wrong, right = u.advantages(m), u.advantages()
    gap = (wrong - right).nan_to_num(1e9).abs()
    row = int(gap.argmax())
    if float(gap[row]) < 1e-4:
        return None
    sample = u.samples[row]
    shown = {
        "question": repr(u.session.tokenizer.decode(sample.prompt_ids)),
        "rewards of its responses": short_text([s.parts["reward"] for s in u.rollout if s.place == sample.place]),
        "this response": f"{sample.text!r}, reward {short_text(sample.parts['reward'])}",
    }
    return Bug(m.name, m.where, f"its advantage is {float(wrong[row]):.4g}", f"{float(right[row]):.4g}", shown)


def _wrong_steps(u: Update) -> Iterator[tuple[Kind, Tensor]]:
    """Yield gradients at the step under mistakes of clearing and clipping."""
    full, limit = u.full, u.options.max_grad_norm
    yield ("the gradient is not clipped", _CLIP), full
    stale = "gradients of two steps add up: zero_grad is missing or at the wrong place", _ZERO
    yield stale, u.clipped(full + u.before)
    yield stale, full + u.before
    yield ("each entry of the gradient is clipped, not its norm", _CLIP), full.clamp(-limit, limit)
    if any(f.learned for f in u.forwards):
        name = "nothing reaches the optimizer: gradients are cleared before the step, or a copy of the policy has them"
        yield (name, f"{_ZERO}; copies of the policy (deepcopy)"), full * 0
    if len(u.passes) < 2:
        return
    micro = [u.gradient_of(u.loss(NO_MISTAKE, [samples])) for samples in u.passes]
    name = "only the last micro-batch reaches the optimizer: zero_grad is called between micro-batches"
    yield (name, _ZERO), u.clipped(micro[-1])
    total = full * 0
    for part in micro:
        total = u.clipped(total + part)
    yield ("the gradient is clipped after each micro-batch, not once before the step", _CLIP), total


def _described(u: Update) -> Kind:
    """Describe a wrong gradient that no known mistake explains."""
    factor = u.factor
    if not bool(u.at_step.isfinite().all()):
        name = "the gradient is not finite: 0 / 0, as where advantage_eps is dropped and rewards are equal"
        return name, "divisions by what can be 0"
    if not bool(u.at_step.any()):
        return "nothing is learned: every token has weight 0", "what is detached, and whether old and new are one"
    if factor is not None and u.options.max_grad_norm < float(u.full.norm()):
        return "the gradient is clipped to another norm than max_grad_norm", _CLIP
    if factor is not None:
        name = f"the gradient at the optimizer step is {factor:.4g} times what it should be"
        return name, "what the loss is divided by, and what scales gradients between backward and step"
    where = "between logits and optimizer.step(): the per-token loss, its mask, what is added to it, backward"
    return "the gradient at the optimizer step differs from ours", where
