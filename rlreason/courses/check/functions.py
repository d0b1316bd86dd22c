"""The functions of both handouts: the cases that each is tried on, and the mistakes that are known of it."""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check import mistakes as known
from rlreason.courses.check.calling import TextReward, random, small_model, story_tokenizer
from rlreason.courses.check.mistakes import Mistake
from rlreason.courses.check.observing import Subject
from rlreason.courses.check.records import METHOD_OF, Case, Function, Inputs, options_of

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
_DEFAULTS = ("with its options left out, it takes other defaults than the handout's", "the defaults in the def line")


def _inputs_2025(values: list[float], size: int, eps: float, by_std: bool = True) -> Inputs:
    """Return the inputs of rewards of two questions or more, each with its own ground truth."""
    truths = [f"t{place // size}" for place in range(len(values))]
    return {
        "reward_fn": TextReward(),
        "rollout_responses": [f"a{value:g}|{truth}" for value, truth in zip(values, truths, strict=True)],
        "repeated_ground_truths": truths,
        "group_size": size,
        "advantage_eps": eps,
        "normalize_by_std": by_std,
    }


def _advantage_cases_2025() -> list[Case]:
    cases = []
    for by_std in (True, False):
        branch = f"normalize_by_std={by_std}"
        cases += [Case(_inputs_2025(_REWARDS[n], size, eps, by_std), branch) for n, size, eps in _SIZES]
        inputs = _inputs_2025(_REWARDS[1], 3, 0.5, by_std)
        for name in ("rollout_responses", "repeated_ground_truths"):
            inputs[name] = [text.replace("t1", "t0") for text in inputs[name]]
        cases.append(Case(inputs, f"{branch}, two questions of one answer", _BY_ANSWER))
    twins = _inputs_2025([0.5, 1.0, 0.5, 0.5, 1.0, 0.0], 3, 0.5)
    twins["rollout_responses"] = [text.replace("t1", "t0") for text in twins["rollout_responses"]]
    flat = _inputs_2025([1.0] * 6, 3, 1e-6)
    return [*cases, Case(flat, "all rewards equal", _FLAT), Case(twins, "equal texts under two questions")]


def _reward_cases() -> list[Case]:
    names = ("reward_fn", "rollout_responses", "repeated_ground_truths")
    return [Case({name: case.inputs[name] for name in names}) for case in _advantage_cases_2025()]


def _wrong_advantages_2025(i: Inputs, m: Mistake) -> Any:
    rewards = known.wrong_rewards(i, m)
    advantages = known.wrong_advantages(rewards, i["group_size"], options_of(i), m)
    return (*m("returned", advantages, rewards), {})


def _inputs_2026(values: list[float], size: int, *options: Any) -> Inputs:
    """Return the inputs; the options are baseline, eps and normaliser, or left out."""
    names = ("raw_rewards", "group_size", "baseline", "advantage_eps", "advantage_normalizer")
    return dict(zip(names, (torch.tensor(values), size, *options), strict=False))


def _advantage_cases_2026() -> list[Case]:
    cases = []
    for baseline in ("mean", "none"):
        for normalizer in ("std", "none", "mean"):
            branch = f"baseline={baseline}, advantage_normalizer={normalizer}"
            for number, size, eps in _SIZES:
                values = [abs(value) + 0.25 * (normalizer == "mean") for value in _REWARDS[number]]
                cases.append(Case(_inputs_2026(values, size, baseline, eps, normalizer), branch))
    for normalizer in ("std", "mean"):
        flat = _inputs_2026([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], 3, "mean", 1e-6, normalizer)
        cases.append(Case(flat, f"advantage_normalizer={normalizer}, all rewards equal", _FLAT))
    left_out = _inputs_2026([0.0, 1.0, 0.5, 1.0, 1.0, 0.0], 3)
    return [*cases, Case(left_out, "its options left out", _DEFAULTS)]


def _wrong_advantages_2026(i: Inputs, m: Mistake) -> Any:
    return known.wrong_advantages(i["raw_rewards"], i["group_size"], options_of(i), m), {}


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


def _loss_cases(ours: Function, option: str = "", choices: Iterable[str] = ("",)) -> list[Case]:
    """Return cases of a function with tensors of all shapes, for each choice of an option."""
    cases = []
    for choice in choices:
        for seed, (rows, width) in enumerate(SHAPES):
            arguments = _arguments(rows, width, seed) | {option: choice}
            if option == "importance_reweighting_method" and seed % 2:
                arguments["raw_rewards_or_advantages"] = arguments["advantages"].reshape(-1)
            names = [name for name in inspect.signature(ours).parameters if name in arguments]  # in the handout's order
            if width < 7 and {"mask", "response_mask"} & set(names):
                continue  # it has no prompt and no padding
            cases.append(Case({name: arguments[name] for name in names}, f"{option}={choice}" if option else ""))
    return cases


def _wrong_token_loss(i: Inputs, m: Mistake) -> Tensor:
    policy = i["policy_log_probs"]
    if "loss_type" in i:
        names = ("raw_rewards", "advantages") if i["loss_type"] == "no_baseline" else ("advantages", "raw_rewards")
        a = m("input", *(i[name] for name in names))
    else:
        a = i["advantages" if "advantages" in i else "raw_rewards_or_advantages"].reshape(-1, 1)
    old, mask = i.get("old_log_probs", policy.detach()), i.get("response_mask", torch.ones_like(policy))
    return known.wrong_token_loss(options_of(i), a, policy, old, mask, m)


def _wrong_microbatch(i: Inputs, m: Mistake) -> Any:
    loss = _wrong_token_loss(i, m) if "loss_type" in i else -i["policy_log_probs"]
    average = known.wrong_average(loss, i["response_mask"], options_of(i), m)
    return known.wrong_step(average, i["gradient_accumulation_steps"], i["policy_log_probs"], m), {}


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
    model = small_model()
    cases = []
    for seed, (b, t) in enumerate(((1, 3), (2, 5), (3, 4))):
        ids, labels = torch.randint(3, model.config.vocab_size, (2, b, t), generator=random(seed))
        for want in (True, False):
            cases.append(Case({"model": model, "input_ids": ids, "labels": labels, "return_token_entropy": want}))
    return cases


_LOSS = ("loss", "metadata")


def _losses(ours: Function, *options: Any, returns: str | tuple[str, ...] = _LOSS) -> Subject:
    """Return a loss per token, which returns (loss, metadata) or the loss alone."""

    def wrong(i: Inputs, m: Mistake) -> Any:
        loss = m("sign", _wrong_token_loss(i, m))
        return (loss, {}) if returns is _LOSS else loss

    return Subject(ours, lambda: _loss_cases(ours, *options), returns, wrong)


def _microbatches(ours: Function, *options: Any) -> Subject:
    """Return a micro-batch's train step, which calls backward."""
    cases = lambda: _loss_cases(ours, *options)  # noqa: E731
    return Subject(ours, cases, _LOSS, _wrong_microbatch, scalar=True, calls_backward=True)


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
        _wrong_advantages_2026,
    ),
    Subject(
        cs336_2026.compute_rollout_rewards,
        _reward_cases,
        ("raw_rewards", "metadata"),
        lambda i, m: (known.wrong_rewards(i, m), {}),
    ),
    _losses(cs336_2025.compute_naive_policy_gradient_loss, returns="loss"),
    _losses(cs336_2025.compute_grpo_clip_loss),
    _losses(cs336_2025.compute_policy_gradient_loss, "loss_type", METHOD_OF),
    _losses(
        cs336_2026.compute_policy_gradient_loss, "importance_reweighting_method", ("none", "noclip", "grpo", "gspo")
    ),
    Subject(
        cs336_2025.masked_normalize, lambda: _slice_cases({"normalize_constant": 10.0}), "result", known.wrong_slices
    ),
    Subject(cs336_2025.masked_mean, lambda: _slice_cases({}), "result", known.wrong_slices),
    Subject(
        cs336_2026.aggregate_loss_across_microbatch,
        lambda: _loss_cases(
            cs336_2026.aggregate_loss_across_microbatch, "loss_normalization", ("sequence", "constant")
        ),
        "loss",
        lambda i, m: known.wrong_average(i["per_token_policy_gradient_loss"], i["mask"], options_of(i), m),
        scalar=True,
    ),
    _microbatches(cs336_2025.sft_microbatch_train_step),
    _microbatches(cs336_2025.grpo_microbatch_train_step, "loss_type", METHOD_OF),
    Subject(
        cs336_2026.tokenize_prompt_and_output, _token_cases, ["input_ids", "labels", "response_mask"], _wrong_tokens
    ),
    Subject(cs336_2026.compute_entropy, _entropy_cases, "entropies", lambda i, m: m("entropy", i["logits"])),
    Subject(cs336_2026.get_response_log_probs, _log_prob_cases, ["log_probs", "token_entropy"], known.wrong_log_probs),
)
