"""Try each function of the handouts on its cases, and explain where its results differ from ours."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check import mistakes as known
from rlreason.courses.check.calling import (
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
    fresh,
    gradient,
    random,
    refuse_changes,
    refuse_misjudged,
    short_text,
    small_model,
    story_tokenizer,
    tensor,
)
from rlreason.courses.check.mistakes import METHOD_OF, Mistake, options_of

LEAVES = ("policy_log_probs", "per_token_policy_gradient_loss", "tensor")  # inputs whose gradient is observed


@dataclass(frozen=True, slots=True)
class Case:
    """The arguments of one call, by the handout's names."""

    inputs: Inputs
    branch: str = ""  # cases of one branch share a diagnosis
    meaning: Kind | None = None  # the bug, if no case without a meaning shows one
    as_well: Inputs | None = None  # inputs whose right answer is right here, too


@dataclass(frozen=True, slots=True)
class Subject:
    """All cases and known mistakes of one function of a handout."""

    ours: Function
    cases: Callable[[], Sequence[Case]]  # of each branch, the smallest first
    returns: str | tuple[str, ...] | list[str]  # one result, the items of a tuple, or the keys of a dictionary
    wrong: Callable[[Inputs, Mistake], Any]  # its answer with this mistake

    def right(self, inputs: Inputs) -> Observed:
        """Return what our function is observed to return."""
        return self.observe(lambda i: self.ours(**i), inputs)

    def observe(self, function: Callable[[Inputs], Any], inputs: Inputs) -> Observed:
        """Return the results of a call without metadata, and the gradient of its leaf; `Bug` if it does more."""
        leaf = next((name for name in LEAVES if name in inputs), "")
        arguments = fresh(inputs, leaf)
        results = answer_parts(function(arguments), self.returns)
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
                    function(arguments)
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
    trials, faults = list[_Trial](), list[Bug]()
    for case in sorted(subject.cases(), key=lambda case: case.meaning is not None):
        try:
            yours = subject.observe(lambda inputs: call(function, inputs), case.inputs)
        except Bug as bug:
            bug.inputs = _as_text(case.inputs)
            faults.append(bug)
            continue
        rights = [subject.right(inputs) for inputs in (case.as_well, case.inputs) if inputs]
        names = [first_difference(yours, right) for right in rights]
        trials.append(_Trial(case, yours, rights[-1], names[-1] if all(names) else ""))
    if faults:
        if not trials and all(isinstance(fault, NotWrittenError) for fault in faults):
            raise NotWrittenError
        return faults[:1]
    unknown: list[Bug] = []
    for branch in dict.fromkeys(trial.case.branch for trial in trials):
        of_branch = [trial for trial in trials if trial.case.branch == branch]
        differing = [trial for trial in of_branch if trial.differing]
        if not differing or (unknown and differing[0].case.meaning):
            continue
        first, name = differing[0], differing[0].differing
        mistake = known.first_that(partial(_gives, subject, of_branch))
        kind = first.case.meaning or (mistake and mistake.kind)
        yours_text, ours_text = (f"{name} {short_text(results[name])}" for results in (first.yours, first.ours))
        found = Bug(*(kind or _described(differing)), yours_text, ours_text, _as_text(first.case.inputs))
        if kind:
            return [found]
        unknown.append(found)
    return unknown[:1]


def _as_text(inputs: Inputs) -> dict[str, str]:
    return {name: short_text(value) for name, value in inputs.items() if value is not None}


def _gives(subject: Subject, trials: Sequence[_Trial], m: Mistake) -> bool:
    """Return whether the function with this mistake gives the user's results on every trial."""
    guesses = (subject.observe(lambda inputs: subject.wrong(inputs, m), trial.case.inputs) for trial in trials)
    return not any(first_difference(guess, trial.yours) for guess, trial in zip(guesses, trials, strict=True))


def _described(differing: Sequence[_Trial]) -> Kind:
    """Describe a difference that no known mistake explains."""
    first, name = differing[0], differing[0].differing
    agreeing = [n for n in first.ours if not first_difference(first.yours, {n: first.ours[n]})]
    rest = f", with the same {' and '.join(agreeing)}" if agreeing else ""
    pairs = [(trial.yours[name], trial.ours[name]) for trial in differing]
    return described(name, pairs, "the place that the example shows", rest)


#: Rewards, group_size and advantage_eps, of several groups; the last earn nothing.
_GROUPS = (
    ([1.0, 0.0, 0.5, 0.25], 2, 0.5),
    ([0.5, 1.0, 0.0, 0.25, 2.0, 0.75], 3, 0.25),
    ([0.0, 0.0, 1.0, 0.0, 3.0, 1.0, 2.0, 0.0, 2.0, 2.0, 1.5, 2.0], 3, 0.5),
    ([0.0, 0.0, 1.0, 0.0, 3.0, 1.0, 2.0, 0.0, 2.0, 2.0, 1.5, 2.0], 4, 1e-3),
    ([0.0, 0.0, 1.0, 0.0, 3.0, 1.0, 2.0, 0.0, 2.0, 2.0, 1.5, 2.0], 6, 0.125),
    ([0.0] * 6, 3, 1e-6),
)
_BY_ANSWER = (
    "groups mix questions: those that have the same ground truth are taken for one group",
    "how responses are gathered into groups: by their place, never by their ground truth",
)
_FLAT = ("equal rewards give NaN, or advantages other than 0", "the division where the standard deviation is 0")


def _scored(values: Sequence[float], size: int, truths: str = "t0 t1 t2 t3 t4 t5") -> Inputs:
    """Return responses that earn these rewards, `size` to each question with its own ground truth."""
    repeated = [truth for truth in truths.split() for _ in range(size)][: len(values)]
    return {
        "reward_fn": TextReward(),
        "rollout_responses": [f"a{value:g}|{truth}" for value, truth in zip(values, repeated, strict=True)],
        "repeated_ground_truths": repeated,
    }


def _advantage_cases(choices: Sequence[Inputs], scored: Callable[[list[float], int], Inputs]) -> list[Case]:
    """Return all groups for each choice of options; `scored` returns the arguments that hold their rewards."""
    cases = []
    for options, (rewards, size, eps) in product(choices, _GROUPS):
        meaning = None if any(rewards) else _FLAT
        inputs = scored(rewards, size) | {"group_size": size, "advantage_eps": eps} | options
        cases.append(Case(inputs, f"{options} {meaning}", meaning))
    return cases


def _advantage_cases_2025() -> list[Case]:
    by_std = {"normalize_by_std": True}
    alike = _scored(_GROUPS[1][0], 3, "t0 t0") | {"group_size": 3, "advantage_eps": 0.5} | by_std
    return [
        *_advantage_cases([by_std, {"normalize_by_std": False}], _scored),
        Case(alike, "two questions of one answer", _BY_ANSWER),
    ]


def _wrong_advantages_2025(i: Inputs, m: Mistake) -> Any:
    rewards = known.wrong_rewards(i, m)
    return known.wrong_advantages(rewards, i["group_size"], options_of(i), m), rewards, {}


SPANS = ((2, 5), (2, 6), (1, 3), (3, 6))  # of the response in each row of 7 positions
SHAPES = (*[(1, 1)] * 5, (2, 2), (2, 7), (3, 7), (4, 7))  # the single tokens have advantages and gaps of all signs


def _arguments(rows: int, width: int, seed: int) -> Inputs:
    """Return all arguments of losses, by the names of both handouts. Tensors are (rows, width) or (rows, 1)."""
    mask = torch.ones(rows, width, dtype=torch.bool)
    if width == 7:
        place = torch.arange(width)
        mask = torch.stack([(place >= first) & (place < end) for first, end in SPANS[:rows]])
    policy = (-0.2 - 2.5 * torch.rand(rows, width, generator=random(seed))).round(decimals=2)
    gap = (0.1 + 1.5 * torch.rand(rows, width, generator=random(seed + 1))).round(decimals=2)
    gap = gap * torch.tensor([1.0, -1.0, 0.4, -0.3]).roll(seed)[:rows, None]  # one sign in a row, so that means are far
    a = torch.tensor([1.3, -0.8, 0.4, -1.7, 0.9]).roll(seed)[:rows, None]
    return {
        "policy_log_probs": policy,
        "per_token_policy_gradient_loss": policy,
        "old_log_probs": policy - gap,
        "advantages": a,
        "raw_rewards_or_advantages": a,
        "raw_rewards": torch.tensor([1.0, 0.5, 0.0, 1.0])[:rows, None],
        "response_mask": mask,
        "mask": mask,
        "cliprange": (0.2, 0.1, 0.5)[seed % 3],
        "gradient_accumulation_steps": seed % 4 + 1,
        "normalize_constant": (1.0, 5.0, 3.0)[seed % 3],
        "normalization_constant": (7, 20, 3)[seed % 3],
    }


#: The option of a function -> its choices.
CHOICES = {
    "loss_type": tuple(METHOD_OF),
    "importance_reweighting_method": ("none", "noclip", "grpo", "gspo"),
    "loss_normalization": ("sequence", "constant"),
}


def _loss_cases(ours: Function) -> list[Case]:
    """Return cases of a function with tensors of all shapes, for each choice of its option."""
    cases, names = [], list(inspect.signature(ours).parameters)  # in the handout's order
    option = next((name for name in CHOICES if name in names), "")
    for choice, (seed, (rows, width)) in product(CHOICES.get(option, ("",)), enumerate(SHAPES)):
        arguments = _arguments(rows, width, seed) | {option: choice}
        if option == "importance_reweighting_method" and seed % 2:
            arguments["raw_rewards_or_advantages"] = arguments["advantages"].reshape(-1)
        if width == 7 or not {"mask", "response_mask"} & set(names):  # else it has no prompt and no padding
            cases.append(Case({name: arguments[name] for name in names if name in arguments}, choice))
    return cases


def _token_loss(i: Inputs, m: Mistake) -> Tensor:
    right, other = i.get("raw_rewards_or_advantages", i.get("advantages")), i.get("raw_rewards")
    if i.get("loss_type") == "no_baseline":
        right, other = other, right
    a, policy = m("input", right, other).reshape(-1, 1), i["policy_log_probs"]
    old, mask = i.get("old_log_probs", policy.detach()), i.get("response_mask", torch.ones_like(policy))
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


def _slice_cases(extra: Inputs) -> list[Case]:
    cases = []
    for number, dim in enumerate((1, 0, None, -1)):
        value, mask = _numbers(number, 2, 3), torch.tensor([[0, 1, 0], [1, 1, 0]]).bool()
        value[1, 1] = 0.0  # a 0 counts like any other value
        cases.append(Case({"tensor": value, "mask": mask, **extra, "dim": dim}, "dim=None" if dim is None else "a dim"))
    return cases


def _token_cases() -> list[Case]:
    """Return cases without a meaning, and those that show a bug of the handling of text."""
    end = story_tokenizer().eos_token
    prompts, outputs = ["is 3 ?", "so ?"], [f"5{end}", f"so 14 = 7 .{end}"]
    trials: list[tuple[list[str], list[str], Any, str]] = [
        (prompts[:1], outputs[:1], story_tokenizer(), ""),
        (["so"], ["2 plus"], story_tokenizer(pad=end), ""),
        ([*prompts, "6 ?"], [*outputs, "."], story_tokenizer(), ""),
        (
            prompts, outputs, story_tokenizer(pad=end),
            "the mask comes from the value of the token: an end token equal to the pad is lost",
        ),
        (
            prompts, outputs, story_tokenizer(begin="<think>"),
            "special tokens are added to the output: a begin token lies before it",
        ),
        (
            ["How m", "Lea ha", "ban"], ["any apples", "s 3 app", "anas 数é 😀"], story_tokenizer(),
            "prompt and output are tokenized as one text: tokens merge across the border",
        ),
        (
            ["the apples ", "so\n"], [" are red\n", " 7+3=10 "], story_tokenizer(),
            "white space at the ends of the texts is stripped",
        ),
    ]  # fmt: skip
    cases = []
    for prompts, outputs, tokenizer, name in trials:
        inputs = {"prompt_strs": prompts, "output_strs": outputs, "tokenizer": tokenizer}
        meaning = (name, "the calls of the tokenizer, and how response_mask is made") if name else None
        begun = inputs | {"prompt_strs": [f"<think>{p}" for p in prompts]}  # an engine puts the begin token there
        cases.append(Case(inputs, name, meaning, begun))
    return cases


def _wrong_tokens(i: Inputs, m: Mistake) -> Any:
    right = cs336_2026.tokenize_prompt_and_output(**i)
    labels = m("tokens", right["labels"], right["input_ids"])
    return {**right, "labels": labels, "response_mask": m("mask", right["response_mask"])}


def _entropy_cases() -> list[Case]:
    cases = [Case({"logits": _numbers(seed, *shape)}) for seed, shape in enumerate(((1, 2, 3), (2, 3, 5), (3, 3, 3)))]
    large = torch.tensor([[[100.0, 99.0, -100.0], [-100.0, -101.0, -101.0]]])
    return [*cases, Case({"logits": large}, "logits far from 0")]


def _log_prob_cases() -> list[Case]:
    model, cases = small_model(), []
    for seed, shape in enumerate(((1, 3), (2, 5), (3, 4))):
        ids, labels = torch.randint(3, model.config.vocab_size, (2, *shape), generator=random(seed))
        cases.append(Case({"model": model, "input_ids": ids, "labels": labels, "return_token_entropy": True}))
    return cases


def _losses(ours: Function, wrong: Callable[[Inputs, Mistake], Any], *returns: str) -> Subject:
    """Return a function of a loss."""
    return Subject(ours, partial(_loss_cases, ours), returns or ("loss", "metadata"), wrong)


def _wrong_loss(i: Inputs, m: Mistake) -> Any:
    return _token_loss(i, m), {}


SUBJECTS: tuple[Subject, ...] = (
    Subject(
        cs336_2025.compute_group_normalized_rewards,
        _advantage_cases_2025,
        ("advantages", "raw_rewards", "metadata"),
        _wrong_advantages_2025,
    ),
    Subject(
        cs336_2026.compute_group_normalized_rewards,
        lambda: _advantage_cases(
            [
                {"baseline": baseline, "advantage_normalizer": normalizer}
                for baseline, normalizer in product(("mean", "none"), ("std", "none", "mean"))
            ],
            lambda rewards, size: {"raw_rewards": torch.tensor(rewards)},
        ),
        ("advantages", "metadata"),
        lambda i, m: (known.wrong_advantages(i["raw_rewards"], i["group_size"], options_of(i), m), {}),
    ),
    Subject(
        cs336_2026.compute_rollout_rewards,
        lambda: [Case(_scored(rewards, size)) for rewards, size, _ in _GROUPS],
        ("raw_rewards", "metadata"),
        lambda i, m: (known.wrong_rewards(i, m), {}),
    ),
    Subject(
        cs336_2025.compute_naive_policy_gradient_loss,
        lambda: _loss_cases(cs336_2025.compute_naive_policy_gradient_loss),
        "loss",
        _token_loss,
    ),
    _losses(cs336_2025.compute_grpo_clip_loss, _wrong_loss),
    _losses(cs336_2025.compute_policy_gradient_loss, _wrong_loss),
    _losses(cs336_2026.compute_policy_gradient_loss, _wrong_loss),
    _losses(cs336_2025.sft_microbatch_train_step, _wrong_microbatch),
    _losses(cs336_2025.grpo_microbatch_train_step, _wrong_microbatch),
    Subject(
        cs336_2026.aggregate_loss_across_microbatch,
        lambda: _loss_cases(cs336_2026.aggregate_loss_across_microbatch),
        "loss",
        lambda i, m: m("sign", known.wrong_average(i["per_token_policy_gradient_loss"], i["mask"], options_of(i), m)),
    ),
    Subject(
        cs336_2025.masked_normalize, lambda: _slice_cases({"normalize_constant": 10.0}), "result", known.wrong_slices
    ),
    Subject(cs336_2025.masked_mean, lambda: _slice_cases({}), "result", known.wrong_slices),
    Subject(
        cs336_2026.tokenize_prompt_and_output, _token_cases, ["input_ids", "labels", "response_mask"], _wrong_tokens
    ),
    Subject(cs336_2026.compute_entropy, _entropy_cases, "entropies", lambda i, m: m("entropy", i["logits"])),
    Subject(cs336_2026.get_response_log_probs, _log_prob_cases, ["log_probs", "token_entropy"], known.wrong_log_probs),
)
