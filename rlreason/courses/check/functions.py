"""Try each function of the handouts on its cases, and explain where its results differ from ours."""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check import mistakes as known
from rlreason.courses.check.calling import (
    TRIALS,
    Bug,
    Function,
    Inputs,
    Kind,
    NotWrittenError,
    Observed,
    TextReward,
    answer_parts,
    call,
    described,
    first_difference,
    gradient,
    random,
    refuse_changes,
    refuse_misjudged,
    short_text,
    small_model,
    story_tokenizer,
    tensor,
)
from rlreason.courses.check.mistakes import Mistake, options_of

LEAVES = ("policy_log_probs", "per_token_policy_gradient_loss", "tensor")  # inputs whose gradient is observed


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of one call, by the handout's names."""

    inputs: Inputs
    meaning: Kind | None = None  # the bug, if no case without a meaning shows one
    branch: str = ""  # cases of one branch share a diagnosis
    as_well: Inputs | None = None  # inputs whose right answer is right here, too


@dataclass(frozen=True, slots=True)
class Subject:
    """All cases and known mistakes of one function of a handout."""

    ours: Function
    trials: Callable[[], Iterable[Case]]  # the smallest first, with arguments of other functions, too
    wrong: Callable[[Inputs, Mistake], Any]  # its answer with this mistake
    returns: str | tuple[str, ...] | list[str] = ("loss", "metadata")  # one result, items of a tuple, keys of a dict

    def cases(self) -> list[Case]:
        """Return the trials for every choice of the function's options, with its own arguments in their order."""
        cases, names = [], inspect.signature(self.ours).parameters
        options = {name: choices for name, choices in TRIALS["choices"].items() if name in names}
        for chosen, trial in product(product(*options.values()), self.trials()):
            inputs = trial.inputs | dict(zip(options, chosen, strict=True))
            if {"no_baseline", "reinforce_with_baseline", "none"}.intersection(
                (inputs.get("loss_type"), inputs.get("importance_reweighting_method"))
            ):
                inputs |= {"old_log_probs": None, "cliprange": None}  # as a loop on its own policy calls it
            inputs = {name: inputs[name] for name in names if name in inputs}
            cases.append(replace(trial, inputs=inputs, branch=f"{chosen} {trial.branch} {trial.meaning}"))
        return cases

    def observe(self, function: Function, inputs: Inputs) -> Observed:
        """Return the results of a call without metadata, and the gradient of its leaf; `Bug` if it does more."""
        shared = ("model", "tokenizer")
        arguments = {name: value if name in shared else copy.deepcopy(value) for name, value in inputs.items()}
        leaf = next((name for name in LEAVES if name in inputs), "")
        if leaf:
            arguments[leaf].requires_grad_()
        without_entropy = inputs.get("return_token_entropy") is False
        results = answer_parts(function(**arguments), ["log_probs"] if without_entropy else self.returns)
        results.pop("metadata", None)
        refuse_changes(arguments, inputs)
        if "reward_fn" in inputs:
            pairs = zip(inputs["rollout_responses"], inputs["repeated_ground_truths"], strict=True)
            refuse_misjudged(pairs, arguments["reward_fn"].calls)
        observed = {name: tensor(value, name) for name, value in results.items()}
        name, value = next(iter(results.items()))
        if "gradient_accumulation_steps" in inputs:  # it calls backward
            for after in ("", " after a second call"):
                if after:
                    function(**arguments)
                grad = arguments[leaf].grad
                grad = torch.zeros_like(inputs[leaf]) if grad is None else grad.clone()
                observed[f"gradient of {leaf}{after}"] = grad
        elif "model" in inputs:
            weight = inputs["model"].get_output_embeddings().weight
            observed["gradient of the model's weights"] = gradient(value, weight)
        elif leaf and isinstance(value, Tensor) and not bool(observed[name].isnan().any()):
            mask = inputs.get("response_mask")  # what a loss is elsewhere is left open
            if mask is not None and mask.shape == value.shape:
                value = value.where(mask.bool(), 0.0)
            observed |= {name: tensor(value, name), f"gradient of {leaf}": gradient(value, arguments[leaf])}
        return observed


@dataclass(frozen=True, slots=True)
class _Trial:
    """One case with both results."""

    case: Case
    yours: Observed
    ours: Observed
    differing: str  # the first result that differs, or ""


def examine(subject: Subject, function: Function) -> list[Bug]:
    """Return one bug of the user's function, a known mistake if there is one; [] if it agrees with ours in every case.

    `NotWrittenError` if no case is written yet.
    """
    branches, faults = defaultdict[str, list[_Trial]](list), list[Bug]()
    for case in sorted(subject.cases(), key=lambda case: case.meaning is not None):
        try:
            yours = subject.observe(lambda **inputs: call(function, inputs), case.inputs)
        except Bug as bug:
            bug.inputs = _as_text(case.inputs)
            faults.append(bug)
            continue
        rights = [subject.observe(subject.ours, inputs) for inputs in (case.as_well, case.inputs) if inputs]
        names = [first_difference(yours, right) for right in rights]
        branches[case.branch].append(_Trial(case, yours, rights[-1], names[-1] if all(names) else ""))
    if faults and not branches and all(isinstance(fault, NotWrittenError) for fault in faults):
        raise faults[0]
    if faults:
        return faults[:1]
    unknown: list[Bug] = []
    for trials in branches.values():
        differing = [trial for trial in trials if trial.differing]
        if not differing or (unknown and differing[0].case.meaning):
            continue
        first, name = differing[0], differing[0].differing
        mistake = known.first_that(partial(_gives, subject, trials))
        kind = first.case.meaning or (mistake and mistake.kind)
        yours_text, ours_text = (f"{name} {short_text(results[name])}" for results in (first.yours, first.ours))
        if kind:
            return [Bug(*kind, yours_text, ours_text, _as_text(first.case.inputs))]
        agreeing = [n for n in first.ours if not first_difference(first.yours, {n: first.ours[n]})]
        rest = f", with the same {' and '.join(agreeing)}" if agreeing else ""
        pairs = [(trial.yours[name], trial.ours[name]) for trial in differing]
        kind = described(name, pairs, "the place that the example shows", rest)
        unknown.append(Bug(*kind, yours_text, ours_text, _as_text(first.case.inputs)))
    return unknown[:1]


def _as_text(inputs: Inputs) -> dict[str, str]:
    return {name: short_text(value) for name, value in inputs.items() if value is not None}


def _gives(subject: Subject, trials: Sequence[_Trial], m: Mistake) -> bool:
    """Return whether the function with this mistake gives the user's results on every trial."""
    guesses = (subject.observe(lambda **inputs: subject.wrong(inputs, m), trial.case.inputs) for trial in trials)
    return not any(first_difference(guess, trial.yours) for guess, trial in zip(guesses, trials, strict=True))


def _groups() -> Iterator[Case]:
    """Yield all arguments of functions of rewards; each question has its own ground truth, unless they have one."""
    for row in TRIALS["groups"]:
        rewards, size = row["raw_rewards"], row["group_size"]
        truths = [f"t{0 if 'one_answer' in row else place // size}" for place in range(len(rewards))]
        inputs = row | {
            "reward_fn": TextReward(),
            "rollout_responses": [f"a{reward:g}|{truth}" for reward, truth in zip(rewards, truths, strict=True)],
            "repeated_ground_truths": truths,
            "raw_rewards": torch.tensor(rewards),
        }
        yield Case(inputs, row.get("bug"))


def _wrong_advantages(i: Inputs, m: Mistake) -> Any:
    rewards = i["raw_rewards"] if "raw_rewards" in i else known.wrong_rewards(i, m)
    advantages = known.wrong_advantages(rewards, i["group_size"], options_of(i), m)
    return (advantages, rewards, {}) if "reward_fn" in i else (advantages, {})


SPANS = ((2, 5), (2, 6), (1, 3), (3, 6))  # of the response in each row of 7 positions
SHAPES = (*[(1, 1)] * 5, (2, 2), (2, 7), (3, 7), (4, 7))  # the single tokens have advantages and gaps of all signs


def _tokens(masked: bool = False) -> Iterator[Case]:
    """Yield all arguments of losses; tensors are (rows, width) or (rows, 1). `masked`: with prompt and padding, too."""
    for seed, (rows, width) in enumerate(SHAPES):
        if masked and width < 7:
            continue
        place = torch.arange(width)
        mask = torch.stack([(place >= first) & (place < end) for first, end in SPANS[:rows]])
        policy = (-0.2 - 2.5 * torch.rand(rows, width, generator=random(seed))).round(decimals=2)
        gap = (0.1 + 1.5 * torch.rand(rows, width, generator=random(seed + 1))).round(decimals=2)
        signs = torch.tensor([1.0, -1.0, 0.4, -0.3]).roll(seed)  # one sign in a row, so that means are far
        a = torch.tensor([1.3, -0.8, 0.4, -1.7, 0.9]).roll(seed)[:rows, None]
        inputs = {
            "policy_log_probs": policy,
            "per_token_policy_gradient_loss": policy,
            "old_log_probs": policy - gap * signs[:rows, None],
            "advantages": a,
            "raw_rewards_or_advantages": a.reshape(-1) if masked and seed % 2 else a,
            "raw_rewards": torch.tensor([1.0, 0.5, 0.0, 1.0])[:rows, None],
            "response_mask": mask,
            "mask": mask,
            "cliprange": (0.2, 0.1, 0.5)[seed % 3],
            "gradient_accumulation_steps": seed % 4 + 1,
            "normalize_constant": (1.0, 5.0, 3.0)[seed % 3],
            "normalization_constant": (7, 20, 3)[seed % 3],
        }
        yield Case(inputs)


_rows = partial(_tokens, masked=True)


def _token_loss(i: Inputs, m: Mistake) -> Tensor:
    right, other = i.get("raw_rewards_or_advantages", i.get("advantages")), i.get("raw_rewards")
    if i.get("loss_type") == "no_baseline":
        right, other = other, right
    a, policy = m("input", right, other).reshape(-1, 1), i["policy_log_probs"]
    old, mask = i.get("old_log_probs"), i.get("response_mask", torch.ones_like(policy))
    old = policy.detach() if old is None else old
    return known.wrong_token_loss(options_of(i), a, policy, old, mask, m)


def _wrong_microbatch(i: Inputs, m: Mistake) -> Any:
    loss = _token_loss(i, m) if "loss_type" in i else m("sign", -i["policy_log_probs"])
    average = known.wrong_average(loss, i["response_mask"], options_of(i), m)
    backward, returned = m("backward", average, i["gradient_accumulation_steps"])
    if backward is not None:
        backward.backward()
    return returned.detach(), {}


def _numbers(seed: int, *shape: int) -> Tensor:
    """Return normal numbers of one decimal."""
    return (torch.randn(shape, generator=random(seed)) * 2).round(decimals=1)


def _slices() -> Iterator[Case]:
    for number, dim in enumerate((1, 0, None, -1)):
        value, mask = _numbers(number, 2, 3), torch.tensor([[0, 1, 0], [1, 1, 0]]).bool()
        value[1, 1] = 0.0  # a 0 counts like any other value
        inputs = {"tensor": value, "mask": mask, "normalize_constant": 10.0, "dim": dim}
        yield Case(inputs, branch="dim=None" if dim is None else "a dim")


def _texts() -> Iterator[Case]:
    """Yield texts without a meaning, and those that show a bug of the handling of text."""
    for row in TRIALS["texts"]:
        tokenizer, prompts = story_tokenizer(**row.get("tokenizer", {})), row["prompt_strs"]
        inputs = {"prompt_strs": prompts, "output_strs": row["output_strs"], "tokenizer": tokenizer}
        begun = inputs | {"prompt_strs": [f"<think>{p}" for p in prompts]}  # an engine puts the begin token there
        yield Case(inputs, row.get("bug"), as_well=begun)


def _wrong_tokens(i: Inputs, m: Mistake) -> Any:
    right = cs336_2026.tokenize_prompt_and_output(**i)
    labels = m("labels", right["labels"], right["input_ids"])
    return {**right, "labels": labels, "response_mask": m("mask", right["response_mask"])}


def _logits() -> Iterator[Case]:
    """Yield all arguments of functions of logits or of a model; the last logits are far from 0."""
    model = small_model()
    for seed, (rows, places) in enumerate(((1, 2), (2, 5), (3, 3), (1, 2))):
        ids, labels = torch.randint(3, model.config.vocab_size, (2, rows, places), generator=random(seed))
        inputs = {"model": model, "input_ids": ids, "labels": labels}
        if seed < 3:
            yield Case(inputs | {"logits": _numbers(seed, rows, places, 3)})
        else:
            far = torch.tensor([[[100.0, 99.0, -100.0], [-100.0, -101.0, -101.0]]])
            yield Case(inputs | {"logits": far}, branch="far")


def _wrong_log_probs(i: Inputs, m: Mistake) -> Any:
    right = cs336_2026.get_response_log_probs(**i)
    logits, labels = i["model"](i["input_ids"]).logits, m("labels", i["labels"], i["input_ids"])
    return right | {"log_probs": known.gather(m("log", logits), labels)}


def _wrong_loss(i: Inputs, m: Mistake) -> Any:
    return _token_loss(i, m), {}


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        cs336_2025.compute_group_normalized_rewards,
        _groups,
        _wrong_advantages,
        ("advantages", "raw_rewards", "metadata"),
    ),
    Subject(cs336_2026.compute_group_normalized_rewards, _groups, _wrong_advantages, ("advantages", "metadata")),
    Subject(
        cs336_2026.compute_rollout_rewards,
        _groups,
        lambda i, m: (known.wrong_rewards(i, m), {}),
        ("raw_rewards", "metadata"),
    ),
    Subject(cs336_2025.compute_naive_policy_gradient_loss, _tokens, _token_loss, "loss"),
    Subject(cs336_2025.compute_grpo_clip_loss, _tokens, _wrong_loss),
    Subject(cs336_2025.compute_policy_gradient_loss, _tokens, _wrong_loss),
    Subject(cs336_2026.compute_policy_gradient_loss, _rows, _wrong_loss),
    Subject(cs336_2025.sft_microbatch_train_step, _rows, _wrong_microbatch),
    Subject(cs336_2025.grpo_microbatch_train_step, _rows, _wrong_microbatch),
    Subject(
        cs336_2026.aggregate_loss_across_microbatch,
        _rows,
        lambda i, m: m("sign", known.wrong_average(i["per_token_policy_gradient_loss"], i["mask"], options_of(i), m)),
        "loss",
    ),
    Subject(cs336_2025.masked_normalize, _slices, known.wrong_slices, "result"),
    Subject(cs336_2025.masked_mean, _slices, known.wrong_slices, "result"),
    Subject(cs336_2026.tokenize_prompt_and_output, _texts, _wrong_tokens, ["input_ids", "labels", "response_mask"]),
    Subject(cs336_2026.compute_entropy, _logits, lambda i, m: cs336_2026.compute_entropy(**i), "entropies"),
    Subject(cs336_2026.get_response_log_probs, _logits, _wrong_log_probs, ["log_probs", "token_entropy"]),
)
