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
    changed,
    first_difference,
    fresh,
    gradient,
    misjudged,
    multiple,
    random,
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
    branch: str = ""  # cases of one branch share a diagnosis, which says so
    meaning: Kind | None = None  # the bug, if no case without a meaning shows one
    as_well: Inputs | None = None  # inputs whose right answer is right here, too


@dataclass(frozen=True, slots=True)
class Subject:
    """All cases and known mistakes of one function of a handout."""

    ours: Function
    cases: Callable[[], Sequence[Case]]
    returns: str | tuple[str, ...] | list[str]  # one result, the items of a tuple, or the keys of a dictionary
    wrong: Callable[[Inputs, Mistake], Any]  # its answer with this mistake

    def right(self, inputs: Inputs) -> Observed:
        """Return what our function is observed to return."""
        return self.observe(lambda i: self.ours(**i), inputs)

    def observe(self, function: Callable[[Inputs], Any], inputs: Inputs) -> Observed:
        """Return the results of a call, and the gradient of its leaf; `Bug` if it does something else.

        Results come without the metadata, rewards before advantages.
        """
        leaf = next((name for name in LEAVES if name in inputs), "")
        arguments = fresh(inputs, leaf)
        results = answer_parts(function(arguments), self.returns)
        if isinstance(self.returns, tuple):
            results = {name: results[name] for name in reversed(self.returns) if name != "metadata"}
        if bug := changed(arguments, inputs):
            raise bug
        if "reward_fn" in inputs:
            pairs = zip(inputs["rollout_responses"], inputs["repeated_ground_truths"], strict=True)
            if bug := misjudged(pairs, arguments["reward_fn"].calls):
                raise bug
        observed = {name: tensor(value, name) for name, value in results.items()}
        name, value = next(iter(results.items()))
        if "gradient_accumulation_steps" in inputs:  # it calls backward
            observed[f"gradient of {leaf}"] = _grad(arguments[leaf])
            function(arguments)
            observed["gradient after a second call"] = _grad(arguments[leaf])
        elif "model" in inputs:
            weight = inputs["model"].get_output_embeddings().weight
            observed["gradient of the model's weights"] = gradient(value, weight)
        elif leaf and isinstance(value, Tensor) and not bool(observed[name].isnan().any()):
            mask = inputs.get("response_mask")  # what a loss is elsewhere is left open
            if mask is None or mask.shape != value.shape:
                mask = torch.ones_like(value)
            observed[name] = observed[name].where(mask.bool(), 0.0)
            observed[f"gradient of {leaf}"] = gradient(value, arguments[leaf], mask)
        return observed


def _grad(leaf: Tensor) -> Tensor:
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone()


@dataclass(frozen=True, slots=True)
class _Trial:
    """One case with both results."""

    case: Case
    yours: Observed
    ours: Observed
    differs: bool


def examine(subject: Subject, function: Function) -> list[Bug]:
    """Return one bug of the user's function, a known mistake if there is one; [] if it agrees with ours in every case.

    `NotWrittenError` if no case is written yet.
    """
    cases = sorted(subject.cases(), key=lambda case: (case.meaning is not None, _size(case.inputs)))
    trials, faults = list[_Trial](), list[Bug]()
    for case in cases:
        try:
            yours = subject.observe(lambda inputs: call(function, inputs), case.inputs)
        except Bug as bug:
            bug.inputs = _as_text(case.inputs) | bug.inputs
            faults.append(bug)
            continue
        ours = subject.right(case.inputs)
        differs = first_difference(yours, ours) is not None
        if differs and case.as_well:
            differs = first_difference(yours, subject.right(case.as_well)) is not None
        trials.append(_Trial(case, yours, ours, differs))
    if not trials and all(isinstance(fault, NotWrittenError) for fault in faults):
        raise NotWrittenError
    if faults:
        return faults[:1]
    unknown: list[Bug] = []
    for branch in dict.fromkeys(trial.case.branch for trial in trials):
        of_branch = [trial for trial in trials if trial.case.branch == branch]
        differing = [trial for trial in of_branch if trial.differs]
        if not differing or (unknown and differing[0].case.meaning):
            continue
        if kind := differing[0].case.meaning or _known(subject, of_branch):
            return [_difference(kind, differing[0])]
        unknown.append(_difference(_described(differing), differing[0]))
    return unknown[:1]


def _size(inputs: Inputs) -> int:
    """Return the number of elements of all tensors and lists."""
    values = inputs.values()
    return sum(v.numel() if isinstance(v, Tensor) else len(v) for v in values if isinstance(v, Tensor | list))


def _as_text(inputs: Inputs) -> dict[str, str]:
    return {name: short_text(value) for name, value in inputs.items() if value is not None}


def _difference(kind: Kind, trial: _Trial) -> Bug:
    """Return a bug with a case in which results differ."""
    case, name = trial.case, first_difference(trial.yours, trial.ours) or ""
    note = f"it shows with {case.branch}" if case.branch and not case.meaning else ""
    yours, ours = (f"{name} {short_text(results[name])}" for results in (trial.yours, trial.ours))
    return Bug(*kind, yours, ours, _as_text(case.inputs), note)


def _known(subject: Subject, trials: Sequence[_Trial]) -> Kind | None:
    """Return the known mistake that gives the user's results on every trial, if there is one."""
    for mistake in known.mistakes():
        if all(_gives(subject, mistake, trial) for trial in trials):
            return mistake.name, mistake.where
    return None


def _gives(subject: Subject, mistake: Mistake, trial: _Trial) -> bool:
    """Return whether the function with this mistake gives the user's results."""
    try:
        guess = subject.observe(lambda inputs: subject.wrong(inputs, mistake), trial.case.inputs)
    except Exception:  # a mistake may make nonsense of some case
        return False
    return guess.keys() == trial.yours.keys() and first_difference(guess, trial.yours) is None


def _described(differing: Sequence[_Trial]) -> Kind:
    """Describe a difference that no known mistake explains."""
    trial = differing[0]
    name = first_difference(trial.yours, trial.ours) or ""
    got, right = trial.yours[name], trial.ours[name]
    if got.shape != right.shape:
        return f"{name}: shape {tuple(got.shape)} where the handout asks for {tuple(right.shape)}", "the return line"
    if not bool(got.isfinite().all()) and bool(right.isfinite().all()):
        where = "divisions by what can be 0, logarithms of 0 and exponentials of large numbers"
        return f"NaN or inf in its {name}", where
    first, *others = (multiple(t.yours[name], t.ours[name]) for t in differing)
    if first is not None and all(f is not None and abs(f - first) <= 1e-3 * abs(first) for f in others):
        return f"{first:.4g} times the right {name}", "what it is divided by or multiplied with"
    agreeing = [n for n in trial.ours if not first_difference(trial.yours, {n: trial.ours[n]})]
    rest = f", with the same {' and '.join(agreeing)}" if agreeing else ""
    return f"other {name} than ours{rest}", "the place that the example shows"


_REWARDS = (
    [1.0, 0.0, 0.5, 0.25],
    [0.5, 1.0, 0.0, 0.25, 2.0, -0.5],
    [0.0, 0.0, 1.0, 0.0, 3.0, 1.0, 2.0, 0.0, 2.0, 2.0, 1.5, 2.0],
)
_SIZES = ((0, 2, 0.5), (1, 3, 0.25), (2, 3, 0.5), (2, 4, 1e-3), (2, 6, 0.125))  # rewards, group_size, advantage_eps
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


def _advantage_case(
    scored: Inputs, size: int, eps: float, options: Inputs, branch: str = "", meaning: Kind | None = None
) -> Case:
    inputs = scored | {"group_size": size, "advantage_eps": eps} | options
    return Case(inputs, branch or ", ".join(f"{name}={value}" for name, value in options.items()), meaning)


def _advantage_cases_2025() -> list[Case]:
    by_std = {"normalize_by_std": True}
    return [
        _advantage_case(_scored([1.0] * 6, 3), 3, 1e-6, by_std, "all rewards equal", _FLAT),
        _advantage_case(_scored(_REWARDS[1], 3, "t0 t0"), 3, 0.5, by_std, "two questions of one answer", _BY_ANSWER),
        *(
            _advantage_case(_scored(_REWARDS[n], size), size, eps, {"normalize_by_std": option})
            for option in (True, False)
            for n, size, eps in _SIZES
        ),
    ]


def _wrong_advantages_2025(i: Inputs, m: Mistake) -> Any:
    rewards = known.wrong_rewards(i, m)
    return known.wrong_advantages(rewards, i["group_size"], options_of(i), m), rewards, {}


def _advantage_cases_2026() -> list[Case]:
    cases = []
    for baseline, normalizer in product(("mean", "none"), ("std", "none", "mean")):
        options = {"baseline": baseline, "advantage_normalizer": normalizer}
        for n, size, eps in _SIZES:
            rewards = torch.tensor(_REWARDS[n]).abs() + 0.25 * (normalizer == "mean")
            cases.append(_advantage_case({"raw_rewards": rewards}, size, eps, options))
        if normalizer != "none" and baseline == "mean":
            flat = {"raw_rewards": torch.tensor([1.0, 1.0, 0.0, 0.0])}
            cases.append(_advantage_case(flat, 2, 1e-6, options, f"{normalizer}, all rewards equal", _FLAT))
    return cases


# Log-ratios inside, near and far outside the clip range.
GAPS = torch.tensor([0.0, 0.93, 0.7, 0.12, 0.13, 0.35, 1.4, 1.6, 0.3, 0.05, 0.06, 0.22])
SPANS = ((2, 5), (2, 6), (1, 3), (3, 6))  # of the response in each row of 7 positions
SHAPES = (*[(1, 1)] * 5, (2, 2), (2, 7), (3, 7), (4, 7))  # the single tokens have advantages and gaps of all signs


def _arguments(rows: int, width: int, seed: int) -> Inputs:
    """Return all arguments of losses, by the names of both handouts. Tensors are (rows, width) or (rows, 1)."""
    mask = torch.ones(rows, width, dtype=torch.bool)
    if width == 7:
        place = torch.arange(width)
        mask = torch.stack([(place >= first) & (place < end) for first, end in SPANS[:rows]])
    policy = (-0.2 - 2.5 * torch.rand(rows, width, generator=random(seed))).round(decimals=2)
    gap = GAPS[torch.randint(len(GAPS), (rows, width), generator=random(seed + 1))] if width > 1 else GAPS[1:2, None]
    gap = gap * torch.tensor([1.0, -1.0, 0.4, -0.3]).roll(seed)[:rows, None]  # one sign in a row, so that means are far
    policy, gap = policy.where(mask, policy - 3.0), gap.where(mask, 1.7 * gap + 0.4)  # larger ratios outside
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


def _loss_cases(ours: Function, option: str = "", choices: Sequence[str] = ("",)) -> list[Case]:
    """Return cases of a function with tensors of all shapes, for each choice of an option."""
    cases = []
    for choice, (seed, (rows, width)) in product(choices, enumerate(SHAPES)):
        arguments = _arguments(rows, width, seed) | {option: choice}
        if option == "importance_reweighting_method" and seed % 2:
            arguments["raw_rewards_or_advantages"] = arguments["advantages"].reshape(-1)
        names = [name for name in inspect.signature(ours).parameters if name in arguments]  # in the handout's order
        if width == 7 or not {"mask", "response_mask"} & set(names):  # else it has no prompt and no padding
            cases.append(Case({name: arguments[name] for name in names}, f"{option}={choice}" if option else ""))
    return cases


def _token_loss(i: Inputs, m: Mistake) -> Tensor:
    policy = i["policy_log_probs"]
    if "loss_type" in i:
        names = ("raw_rewards", "advantages") if i["loss_type"] == "no_baseline" else ("advantages", "raw_rewards")
        a = m("input", *(i[name] for name in names))
    else:
        a = i["advantages" if "advantages" in i else "raw_rewards_or_advantages"].reshape(-1, 1)
    old, mask = i.get("old_log_probs", policy.detach()), i.get("response_mask", torch.ones_like(policy))
    return known.wrong_token_loss(options_of(i), a, policy, old, mask, m)


def _wrong_microbatch(i: Inputs, m: Mistake) -> Any:
    loss = _token_loss(i, m) if "loss_type" in i else -i["policy_log_probs"]
    average = known.wrong_average(loss, i["response_mask"], options_of(i), m)
    return known.wrong_step(average, i["gradient_accumulation_steps"], m), {}


def _slice_cases(extra: Inputs) -> list[Case]:
    cases = []
    for number, dim in enumerate((1, 0, None, -1)):
        value = (torch.randn(2, 3, generator=random(number)) * 2).round(decimals=1)
        mask = torch.tensor([[0, 1, 0], [1, 1, 0]]).bool()
        value[1, 1] = 0.0  # a 0 counts like any other value
        cases.append(Case({"tensor": value, "mask": mask, **extra, "dim": dim}, "dim=None" if dim is None else "a dim"))
    return cases


def _token_cases() -> list[Case]:
    """Return cases without a meaning, and those that show a bug of the handling of text."""
    end = story_tokenizer().eos_token
    prompts, outputs = ["so ?", "is 3 ?"], [f"so 14 = 7 .{end}", f"5{end}"]
    trials: list[tuple[list[str], list[str], Any, str]] = [
        (prompts, outputs, story_tokenizer(), ""),
        ([*prompts, "6 ?"], [*outputs, "."], story_tokenizer(), ""),
        (prompts[1:], outputs[1:], story_tokenizer(), ""),
        (["so"], ["2 plus"], story_tokenizer(pad=end), ""),
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
        begun = {**inputs, "prompt_strs": [f"<think>{p}" for p in prompts]}  # an engine puts the begin token there
        cases.append(Case(inputs, name, meaning, begun if name.startswith("special") else None))
    return cases


def _wrong_tokens(i: Inputs, m: Mistake) -> Any:
    right = cs336_2026.tokenize_prompt_and_output(**i)
    labels = m("tokens", right["labels"], right["input_ids"])
    return {**right, "labels": labels, "response_mask": m("mask", right["response_mask"])}


def _entropy_cases() -> list[Case]:
    cases = [
        Case({"logits": (torch.randn(b, t, v, generator=random(s)) * 2).round(decimals=1)})
        for s, (b, t, v) in enumerate(((1, 2, 3), (2, 3, 5), (3, 3, 3)))
    ]
    large = torch.tensor([[[100.0, 99.0, -100.0], [-100.0, -101.0, -101.0]]])
    return [*cases, Case({"logits": large}, "logits far from 0")]


def _log_prob_cases() -> list[Case]:
    model, cases = small_model(), []
    for seed, shape in enumerate(((1, 3), (2, 5), (3, 4))):
        ids, labels = torch.randint(3, model.config.vocab_size, (2, *shape), generator=random(seed))
        cases.append(Case({"model": model, "input_ids": ids, "labels": labels, "return_token_entropy": True}))
    return cases


def _loss(ours: Function, *choices: Any) -> Subject:
    """Return a loss per token, with the name and the choices of its option."""
    returns = ("loss", "metadata")
    return Subject(ours, partial(_loss_cases, ours, *choices), returns, lambda i, m: (m("sign", _token_loss(i, m)), {}))


def _microbatch(ours: Function, *choices: Any) -> Subject:
    """Return the train step of a micro-batch, with the name and the choices of its option."""
    return Subject(ours, partial(_loss_cases, ours, *choices), ("loss", "metadata"), _wrong_microbatch)


_LOSS_TYPE = ("loss_type", tuple(METHOD_OF))
SUBJECTS: tuple[Subject, ...] = (
    Subject(
        cs336_2025.compute_group_normalized_rewards,
        _advantage_cases_2025,
        ("advantages", "raw_rewards", "metadata"),
        _wrong_advantages_2025,
    ),
    Subject(
        cs336_2026.compute_group_normalized_rewards,
        _advantage_cases_2026,
        ("advantages", "metadata"),
        lambda i, m: (known.wrong_advantages(i["raw_rewards"], i["group_size"], options_of(i), m), {}),
    ),
    Subject(
        cs336_2026.compute_rollout_rewards,
        lambda: [Case(_scored(_REWARDS[n], size)) for n, size, _ in _SIZES],
        ("raw_rewards", "metadata"),
        lambda i, m: (known.wrong_rewards(i, m), {}),
    ),
    Subject(
        cs336_2025.compute_naive_policy_gradient_loss,
        lambda: _loss_cases(cs336_2025.compute_naive_policy_gradient_loss),
        "loss",
        lambda i, m: m("sign", _token_loss(i, m)),
    ),
    _loss(cs336_2025.compute_grpo_clip_loss),
    _loss(cs336_2025.compute_policy_gradient_loss, *_LOSS_TYPE),
    _loss(cs336_2026.compute_policy_gradient_loss, "importance_reweighting_method", ("none", "noclip", "grpo", "gspo")),
    _microbatch(cs336_2025.sft_microbatch_train_step),
    _microbatch(cs336_2025.grpo_microbatch_train_step, *_LOSS_TYPE),
    Subject(
        cs336_2026.aggregate_loss_across_microbatch,
        lambda: _loss_cases(
            cs336_2026.aggregate_loss_across_microbatch, "loss_normalization", ("sequence", "constant")
        ),
        "loss",
        lambda i, m: known.wrong_average(i["per_token_policy_gradient_loss"], i["mask"], options_of(i), m),
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
