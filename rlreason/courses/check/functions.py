"""The functions of both handouts: the cases that each is tried on, and the mistakes that are known of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check import mistakes as known
from rlreason.courses.check.calling import TextReward, call, random, small_model, story_tokenizer, word_tokenizer
from rlreason.courses.check.mistakes import LossInputs, Mistake, mistakes_in
from rlreason.courses.check.observing import Subject, places
from rlreason.courses.check.records import Case, Function, Inputs, Kind

_REWARDS = (
    [1.0, 0.0, 0.5, 0.25],
    [0.5, 1.0, 0.0, 0.25, 2.0, -0.5],
    [0.0, 0.0, 1.0, 0.0, 3.0, 1.0, 2.0, 0.0, 2.0, 2.0, 1.5, 2.0],
)
_SIZES = ((0, 2, 0.5), (1, 3, 0.25), (2, 3, 0.5), (2, 4, 1e-3), (2, 6, 0.125))  # rewards, group_size, advantage_eps
_BY_ANSWER = Kind(
    "groups mix questions: those that have the same ground truth are taken for one group",
    "how responses are gathered into groups: by their place, never by their ground truth",
)
_FLAT = Kind("equal rewards give NaN, or advantages other than 0", "the division where the standard deviation is 0")
_DEFAULTS = Kind(
    "with its options left out, it takes other defaults than the handout's", "the defaults in the def line"
)


def _inputs_2025(values: list[float], truths: list[str], size: int, eps: float, by_std: bool = True) -> Inputs:
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
        for number, size, eps in _SIZES:
            values = _REWARDS[number]
            truths = [f"t{place // size}" for place in range(len(values))]
            cases.append(Case(_inputs_2025(values, truths, size, eps, by_std), branch))
        same_answer = _inputs_2025(_REWARDS[1], ["t0"] * 6, 3, 0.5, by_std)
        cases.append(Case(same_answer, f"{branch}, two questions of one answer", _BY_ANSWER))
    flat = _inputs_2025([1.0] * 6, ["t0"] * 3 + ["t1"] * 3, 3, 1e-6)
    twins = _inputs_2025([0.5, 1.0, 0.5, 0.5, 1.0, 0.0], ["t0"] * 6, 3, 0.5)  # equal responses, right for the first
    twins["repeated_ground_truths"] = ["t0"] * 3 + ["t1"] * 3
    return [*cases, Case(flat, "all rewards equal", _FLAT), Case(twins, "equal texts under two questions")]


def _reward_cases() -> list[Case]:
    names = ("reward_fn", "rollout_responses", "repeated_ground_truths")
    return [Case({name: case.inputs[name] for name in names}) for case in _advantage_cases_2025()]


def _wrong_advantages_2025(i: Inputs, m: Mistake) -> Any:
    rewards = known.wrong_rewards(i, m)
    normalizer = "std" if i["normalize_by_std"] else "none"
    options = known.AdvantageOptions(i["group_size"], "mean", i["advantage_eps"], normalizer)
    return (*m("returned", known.wrong_advantages(rewards, options, m), rewards), {})


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
    i = {"baseline": "mean", "advantage_eps": 1e-6, "advantage_normalizer": "std", **i}
    options = known.AdvantageOptions(i["group_size"], i["baseline"], i["advantage_eps"], i["advantage_normalizer"])
    return known.wrong_advantages(i["raw_rewards"], options, m), {}


def _mixing(function: Function, inputs_of: Callable[[list[float]], Inputs]) -> Kind | None:
    """Return the bug of mixed groups if one group's advantages change with another group's rewards.

    `inputs_of` makes the inputs of six rewards in groups of 3.
    """
    rewards = ([0.0, 1.0, 0.5, 1.0, 0.25, 0.0], [2.0, 0.0, 1.0, 1.0, 0.25, 0.0])  # only the first group differs
    try:
        before, after = (call(function, inputs_of(r))[0] for r in rewards)
    except Exception:  # the function may refuse this
        return None
    if before.shape == after.shape == (6,) and bool(places(after[3:], before[3:]).any()):
        where = "the reshape or loop that forms the groups, and the dim of mean and std"
        return Kind("groups mix questions: one group's advantages change with another group's rewards", where)
    return None


# Log-ratios inside, near and far outside the clip range, on both sides.
GAPS = torch.tensor([0.0, 0.9, -0.7, 0.12, -0.13, 0.35, -1.4, 1.6, -0.3, 0.05, -0.06, 0.22])
SHAPES = ((1, 1, 0), (1, 1, 2), (2, 2, 1), (3, 5, 0), (4, 4, 3), (2, 6, 5), (5, 3, 11))  # rows, positions, seed


def _mask(rows: int) -> Tensor:
    """Return a mask (rows, 7) bool, true on responses of different lengths at different places."""
    mask = torch.zeros(rows, 7, dtype=torch.bool)
    for row, (start, length) in enumerate([(2, 3), (2, 4), (1, 2), (3, 3)][:rows]):
        mask[row, start : start + length] = True
    return mask


def _log_probs(rows: int, width: int, seed: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return (policy, old) log-probabilities (rows, width), with larger ratios where the mask is false."""
    policy = (-0.2 - 2.5 * torch.rand(rows, width, generator=random(seed))).round(decimals=2)
    gap = GAPS[torch.randint(len(GAPS), (rows, width), generator=random(seed + 1))]
    if mask is not None:
        policy, gap = policy.where(mask, policy - 3.0), gap.where(mask, 1.7 * gap + 0.4)
    return policy, policy - gap


def _advantages(rows: int, seed: int) -> Tensor:
    """Return advantages (rows, 1) of both signs and different sizes."""
    return torch.tensor([1.3, -0.8, 0.4, -1.7, 0.9, -0.25, 2.1, -1.1]).roll(seed)[:rows, None].clone()


def _token_loss(i: Inputs, m: Mistake, method: str, a: Tensor) -> Tensor:
    """Return the loss of each token by a method and advantages (batch, 1), with one mistake."""
    old, c, mask = i.get("old_log_probs"), i.get("cliprange", 0.0), i.get("response_mask")
    return known.wrong_token_loss(LossInputs(method, a, i["policy_log_probs"], old, c, mask), m)


def _naive_cases() -> list[Case]:
    return [
        Case({"raw_rewards_or_advantages": _advantages(b, s), "policy_log_probs": _log_probs(b, t, s)[0]})
        for b, t, s in SHAPES
    ]


def _clip_cases() -> list[Case]:
    cases = []
    for number, (b, t, s) in enumerate(SHAPES):
        policy, old = _log_probs(b, t, s)
        inputs = {"advantages": _advantages(b, s), "policy_log_probs": policy, "old_log_probs": old}
        cases.append(Case({**inputs, "cliprange": (0.2, 0.1, 0.5)[number % 3]}))
    last = cases[-1].inputs
    cases.append(Case({**last, "advantages": torch.zeros(len(last["advantages"]), 1)}))
    return [*cases, Case({**last, "old_log_probs": last["policy_log_probs"].clone()})]


METHOD_OF = {"no_baseline": "none", "reinforce_with_baseline": "none", "grpo_clip": "grpo"}


def _loss_cases_2025() -> list[Case]:
    cases = []
    for loss_type in METHOD_OF:
        for case in _clip_cases()[:6]:
            rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0])[: len(case.inputs["advantages"]), None].clone()
            first = {"policy_log_probs": None, "loss_type": loss_type, "raw_rewards": rewards}  # in the handout's order
            cases.append(Case(first | case.inputs, f"loss_type={loss_type}"))
    return cases


def _wrong_loss_2025(i: Inputs, m: Mistake) -> Tensor:
    names = ["advantages", "raw_rewards"]
    if i["loss_type"] == "no_baseline":
        names.reverse()
    return _token_loss(i, m, METHOD_OF[i["loss_type"]], m("input", *(i[name] for name in names)))


def _loss_cases_2026() -> list[Case]:
    cases = []
    for method in ("none", "noclip", "grpo", "gspo"):
        for number, (b, c) in enumerate(((1, 0.5), (3, 0.2), (4, 0.05), (3, 0.5), (2, 0.2))):
            mask = _mask(b)
            policy, old = _log_probs(b, 7, 30 + number, mask)
            a = _advantages(b, number)
            if method == "gspo":  # within a row the ratios have one sign, so that their mean leaves the range
                old = policy - torch.tensor([0.5, -0.6, 0.15, -0.1])[:b, None] * (policy - old).abs().clamp(min=0.3)
            inputs: Inputs = {
                "raw_rewards_or_advantages": a.reshape(-1) if number % 2 else a,
                "policy_log_probs": policy,
                "importance_reweighting_method": method,
                "old_log_probs": old,
                "cliprange": c,
                "response_mask": mask,
            }
            cases.append(Case(inputs, f"importance_reweighting_method={method}"))
    return cases


def _wrong_loss_2026(i: Inputs, m: Mistake) -> Any:
    a = i["raw_rewards_or_advantages"].reshape(-1, 1)
    return m("sign", _token_loss(i, m, i["importance_reweighting_method"], a)), {}


def _slice_cases(extra: Inputs) -> list[Case]:
    cases = []
    for number, dim in enumerate((1, 0, None, -1)):
        value = (torch.randn(3, 5, generator=random(number)) * 2).round(decimals=1)
        mask = torch.tensor([[0, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 0]]).bool()
        value[2, 2] = 0.0  # a 0 counts like any other value
        cases.append(Case({"tensor": value, "mask": mask, **extra, "dim": dim}, "dim=None" if dim is None else "a dim"))
    return cases


def _wrong_slices(i: Inputs, m: Mistake) -> Tensor:
    return known.wrong_slices(i["tensor"], i["mask"], i.get("normalize_constant"), i["dim"], m)


_PER_TOKEN = "per_token_policy_gradient_loss"


def _aggregate_cases() -> list[Case]:
    return [
        Case(
            {
                _PER_TOKEN: torch.randn(rows, 7, generator=random(40 + rows)).round(decimals=2),
                "mask": _mask(rows),
                "loss_normalization": how,
                "normalization_constant": constant,
            },
            f"loss_normalization={how}",
        )
        for how in ("sequence", "constant")
        for rows, constant in ((2, 3), (3, 20), (4, 7))
    ]


def _wrong_aggregate(i: Inputs, m: Mistake) -> Tensor:
    return known.wrong_average(i[_PER_TOKEN], i["mask"], i["loss_normalization"], i["normalization_constant"], m)


def _sft_cases() -> list[Case]:
    return [
        Case(
            {
                "policy_log_probs": _log_probs(rows, 7, 50 + accumulation, _mask(rows))[0],
                "response_mask": _mask(rows),
                "gradient_accumulation_steps": accumulation,
                "normalize_constant": constant,
            }
        )
        for rows, accumulation, constant in ((2, 3, 1.0), (3, 2, 1.0), (3, 4, 5.0), (3, 1, 3.0))
    ]


def _wrong_sft(i: Inputs, m: Mistake) -> Any:
    loss = known.wrong_average(-i["policy_log_probs"], i["response_mask"], "constant_mean", i["normalize_constant"], m)
    return known.wrong_step(loss, i["gradient_accumulation_steps"], i["policy_log_probs"], m), {}


def _grpo_cases() -> list[Case]:
    cases = []
    for loss_type in METHOD_OF:
        for rows, accumulation, c in ((2, 4, 0.5), (3, 1, 0.1), (4, 2, 0.2)):
            policy, old = _log_probs(rows, 7, 60 + rows, _mask(rows))
            inputs: Inputs = {
                "policy_log_probs": policy,
                "response_mask": _mask(rows),
                "gradient_accumulation_steps": accumulation,
                "loss_type": loss_type,
                "raw_rewards": torch.tensor([1.0, 0.0, 0.5, 1.0])[:rows, None].clone(),
                "advantages": _advantages(rows, accumulation),
                "old_log_probs": old,
                "cliprange": c,
            }
            cases.append(Case(inputs, f"loss_type={loss_type}"))
    return cases


def _wrong_grpo(i: Inputs, m: Mistake) -> Any:
    loss = known.wrong_average(_wrong_loss_2025(i, m), i["response_mask"], "sequence", 1.0, m)
    return known.wrong_step(loss, i["gradient_accumulation_steps"], i["policy_log_probs"], m), {}


def _token_cases() -> list[Case]:
    prompts, outputs = ["so ?", "what is two plus three ?"], ["so four plus two is six . <eos>", "five . <eos>"]
    begins, merge = word_tokenizer(adds_begin=True), "tokens that would merge across the border of prompt and output"
    trials: list[tuple[list[str], list[str], Any, str]] = [
        (prompts, outputs, word_tokenizer(), ""),
        ([*prompts, "what is six ?"], [*outputs, "."], word_tokenizer(), ""),
        (prompts[1:], outputs[1:], word_tokenizer(), ""),
        (prompts, outputs, word_tokenizer("<eos>"), "a pad token equal to the end token"),
        (["so"], ["two plus"], word_tokenizer("<eos>"), ""),
        (prompts, outputs, begins, "a tokenizer that puts a begin token before every text"),
        (["How m", "Lea ha", "ban"], ["any apples", "s 3 app", "anas 数é 😀"], story_tokenizer(), merge),
        (["the apples ", "so\n"], [" are red\n", " 7+3=10 "], story_tokenizer(), "white space at the borders"),
    ]
    cases = [Case({"prompt_strs": p, "output_strs": o, "tokenizer": t}, branch) for p, o, t, branch in trials]
    return [_also_with_begin(case) if case.inputs["tokenizer"] is begins else case for case in cases]


def _also_with_begin(case: Case) -> Case:
    """Return a case in which a begin token before the prompts is right too: an engine puts it there."""
    prompts = [f"<bos> {prompt}" for prompt in case.inputs["prompt_strs"]]
    return Case(case.inputs, case.branch, case.meaning, {**case.inputs, "prompt_strs": prompts})


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
_SIGNED = mistakes_in("sign", *known.LOSSES)
SUBJECTS: tuple[Subject, ...] = (
    Subject(
        cs336_2025.compute_group_normalized_rewards, _advantage_cases_2025, ("advantages", "raw_rewards", "metadata"),
        _wrong_advantages_2025, mistakes_in(*known.ADVANTAGES, "read", "returned"),
        hint=lambda f: _mixing(f, lambda rewards: _inputs_2025(rewards, ["t0"] * 3 + ["t1"] * 3, 3, 1e-3)),
    ),
    Subject(
        cs336_2026.compute_group_normalized_rewards, _advantage_cases_2026, ("advantages", "metadata"),
        _wrong_advantages_2026, mistakes_in(*known.ADVANTAGES),
        hint=lambda f: _mixing(f, lambda rewards: _inputs_2026(rewards, 3, "mean", 1e-3, "std")),
    ),
    Subject(
        cs336_2026.compute_rollout_rewards, _reward_cases, ("raw_rewards", "metadata"),
        lambda i, m: (known.wrong_rewards(i, m), {}), mistakes_in("read"),
    ),
    Subject(
        cs336_2025.compute_naive_policy_gradient_loss, _naive_cases, "loss",
        lambda i, m: m("sign", _token_loss(i, m, "none", i["raw_rewards_or_advantages"])), _SIGNED,
    ),
    Subject(
        cs336_2025.compute_grpo_clip_loss, _clip_cases, _LOSS,
        lambda i, m: (m("sign", _token_loss(i, m, "grpo", i["advantages"])), {}), _SIGNED,
    ),
    Subject(
        cs336_2025.compute_policy_gradient_loss, _loss_cases_2025, _LOSS,
        lambda i, m: (m("sign", _wrong_loss_2025(i, m)), {}), _SIGNED,
    ),
    Subject(cs336_2026.compute_policy_gradient_loss, _loss_cases_2026, _LOSS, _wrong_loss_2026, _SIGNED),
    Subject(
        cs336_2025.masked_normalize, lambda: _slice_cases({"normalize_constant": 10.0}), "result",
        _wrong_slices, mistakes_in("mask", "divisor", "dim"),
    ),
    Subject(
        cs336_2025.masked_mean, lambda: _slice_cases({}), "result",
        _wrong_slices, mistakes_in("mask", "count", "dim"),
    ),
    Subject(
        cs336_2026.aggregate_loss_across_microbatch, _aggregate_cases, "loss",
        _wrong_aggregate, mistakes_in(*known.AVERAGES), scalar=True,
    ),
    Subject(
        cs336_2025.sft_microbatch_train_step, _sft_cases, _LOSS, _wrong_sft,
        mistakes_in(*known.AVERAGES, "backward", "earlier gradient"), scalar=True, calls_backward=True,
    ),
    Subject(
        cs336_2025.grpo_microbatch_train_step, _grpo_cases, _LOSS, _wrong_grpo,
        mistakes_in(*known.AVERAGES, "backward", "earlier gradient", *known.LOSSES), scalar=True, calls_backward=True,
    ),
    Subject(
        cs336_2026.tokenize_prompt_and_output, _token_cases, ["input_ids", "labels", "response_mask"],
        known.wrong_tokens, mistakes_in("encode", "start", "pad", "labels", "response"),
    ),
    Subject(
        cs336_2026.compute_entropy, _entropy_cases, "entropies",
        lambda i, m: m("entropy", i["logits"]), mistakes_in("entropy"),
    ),
    Subject(
        cs336_2026.get_response_log_probs, _log_prob_cases, ["log_probs", "token_entropy"],
        known.wrong_log_probs, mistakes_in("gather", "log", "result", "entropy"),
    ),
)  # fmt: skip
