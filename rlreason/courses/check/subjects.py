"""Cases of rewards, advantages, losses and averages: what is tried, and which mistakes are known."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check import known_bugs as mistakes
from rlreason.courses.check.calling import TextReward, advantages, log_probs, random, response_mask
from rlreason.courses.check.observing import observe, places
from rlreason.courses.check.subject import (
    CallCase,
    Function,
    Inputs,
    Kind,
    Mistake,
    Subject,
    known,
)

ROUND = [0.5, 1.0, 0.0, 0.25, 2.0, -0.5, 1.0, 0.75, 0.0, 1.5, 0.5, 1.0]
UNEVEN = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 3.0, 0.0, 2.0, 2.0, 2.0, 2.0]
POSITIVE = [1.0, 3.0, 0.0, 0.5, 2.0, 2.0, 0.25, 1.0, 0.0, 0.0, 4.0, 1.0]
_BY_ANSWER = Kind(
    "groups mix questions: those that have the same ground truth are taken for one group",
    "how responses are gathered into groups: by their place, never by their ground truth",
)
_EQUAL_TEXTS = "equal texts under two questions"
_FLAT = Kind(
    "equal rewards give NaN, or advantages other than 0",
    "the division where the standard deviation is 0, and what is added",
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


def _advantage_cases_2025() -> list[CallCase]:
    cases = []
    settings = ((ROUND, 3, 0.5), (ROUND, 4, 0.25), (UNEVEN, 4, 1e-6), (ROUND, 2, 0.125), (UNEVEN, 6, 0.5))
    one_answer = [f"t{place // 3 % 3}" for place in range(12)]
    for by_std in (True, False):
        for values, size, eps in settings:
            truths = [f"t{place // size}" for place in range(12)]
            inputs = _inputs_2025(values, truths, size, eps, by_std)
            cases.append(CallCase(inputs, branch=str(by_std), about=f"normalize_by_std={by_std}"))
        shared = _inputs_2025(ROUND, one_answer, 3, 0.5, by_std)
        cases.append(CallCase(shared, branch=str(by_std), about="two questions of one answer", meaning=_BY_ANSWER))
    same = _inputs_2025([1.0] * 12, [f"t{place // 3}" for place in range(12)], 3, 1e-6)
    twins = _inputs_2025([0.5, 1.0, 0.5, 0.5, 1.0, 0.0], ["t0"] * 6, 3, 0.5)
    twins["repeated_ground_truths"] = ["t0"] * 3 + ["t1"] * 3
    cases.append(CallCase(same, branch="True", about="all rewards equal", meaning=_FLAT))
    cases.append(CallCase(twins, branch="True", about=_EQUAL_TEXTS, meaning=_BY_ANSWER))
    return cases


def _reward_cases() -> list[CallCase]:
    names = ("reward_fn", "rollout_responses", "repeated_ground_truths")
    cases = _advantage_cases_2025()
    return [
        CallCase({name: case.inputs[name] for name in names}, about=case.about if case.about == _EQUAL_TEXTS else "")
        for case in [*cases[:3], cases[-1]]
    ]


def _wrong_advantages_2025(i: Inputs, m: Mistake) -> Any:
    rewards = mistakes.wrong_rewards(i, m)
    normalizer = "std" if i["normalize_by_std"] else "none"
    o = mistakes.AdvantageOptions(i["group_size"], "mean", i["advantage_eps"], normalizer)
    a = mistakes.wrong_advantages(rewards, o, m)
    return (*m.at("returned", lambda advantages, rewards: (advantages, rewards))(a, rewards), {})


def _mixing(subject: Callable[[], Subject], inputs_of: Callable[[list[float]], Inputs]) -> Callable[[Function], Any]:
    """Return a hint at mixed groups; `inputs_of` makes the inputs of six rewards in groups of 3."""

    def hint(function: Function) -> Kind | None:
        rewards = ([0.0, 1.0, 0.5, 1.0, 0.25, 0.0], [2.0, 0.0, 1.0, 1.0, 0.25, 0.0])  # only the first group differs
        try:
            before, after = (observe(subject(), function, inputs_of(r))["advantages"] for r in rewards)
        except Exception:  # the function may refuse this, or answer with other shapes
            return None
        if before.shape == after.shape == (6,) and bool(places(after[3:], before[3:]).any()):
            where = "the reshape or loop that forms the groups, and the dim of mean and std"
            return Kind("groups mix questions: one group's advantages change with another group's rewards", where)
        return None

    return hint


ADVANTAGES_2025: Subject = Subject(
    cs336_2025.compute_group_normalized_rewards,
    _advantage_cases_2025,
    ("advantages", "raw_rewards", "metadata"),
    _wrong_advantages_2025,
    (
        *mistakes.ADVANTAGE_MISTAKES,
        *mistakes.REWARD_MISTAKES,
        *known("returned", "the return line",
               ("advantages and raw rewards are returned in swapped places", lambda a, rewards: (rewards, a))),
    ),
    hint=_mixing(lambda: ADVANTAGES_2025, lambda r: _inputs_2025(r, ["t0"] * 3 + ["t1"] * 3, 3, 1e-3)),
)  # fmt: skip
ROLLOUT_REWARDS = Subject(
    cs336_2026.compute_rollout_rewards,
    _reward_cases,
    ("raw_rewards", "metadata"),
    lambda i, m: (mistakes.wrong_rewards(i, m), {}),
    mistakes.REWARD_MISTAKES,
)


def _inputs_2026(rewards: list[float], size: int, baseline: str, eps: float, normalizer: str) -> Inputs:
    return {
        "raw_rewards": torch.tensor(rewards),
        "group_size": size,
        "baseline": baseline,
        "advantage_eps": eps,
        "advantage_normalizer": normalizer,
    }


def _advantage_cases_2026() -> list[CallCase]:
    cases = []
    for baseline in ("mean", "none"):
        for normalizer in ("std", "none", "mean"):
            values = POSITIVE if normalizer == "mean" else ROUND
            for size, eps in ((3, 0.5), (4, 0.25), (4, 1e-3), (2, 0.125), (6, 0.5)):
                about = f"baseline={baseline}, advantage_normalizer={normalizer}"
                inputs = _inputs_2026(values, size, baseline, eps, normalizer)
                cases.append(CallCase(inputs, branch=f"{baseline}/{normalizer}", about=about))
    for normalizer in ("std", "mean"):
        inputs = _inputs_2026([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], 3, "mean", 1e-6, normalizer)
        cases.append(CallCase(inputs, branch=f"mean/{normalizer}", about="all rewards equal", meaning=_FLAT))
    left_out: Inputs = {"raw_rewards": torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 0.0]), "group_size": 3}
    kind = Kind("with its options left out, it takes other defaults than the handout's", "the defaults in the def line")
    return [*cases, CallCase(left_out, branch="mean/std", about="its options left out", meaning=kind)]


def _wrong_advantages_2026(i: Inputs, m: Mistake) -> Any:
    if "baseline" not in i:
        i = {**i, "baseline": "mean", "advantage_eps": 1e-6, "advantage_normalizer": "std"}
    o = mistakes.AdvantageOptions(i["group_size"], i["baseline"], i["advantage_eps"], i["advantage_normalizer"])
    return mistakes.wrong_advantages(i["raw_rewards"], o, m), {}


ADVANTAGES_2026: Subject = Subject(
    cs336_2026.compute_group_normalized_rewards,
    _advantage_cases_2026,
    ("advantages", "metadata"),
    _wrong_advantages_2026,
    mistakes.ADVANTAGE_MISTAKES,
    hint=_mixing(lambda: ADVANTAGES_2026, lambda r: _inputs_2026(r, 3, "mean", 1e-3, "std")),
)


_SHAPES = ((3, 5, 0), (4, 4, 3), (2, 6, 5), (1, 4, 7), (5, 3, 11))  # rows, positions, seed
CLIPPED_MISTAKES = (
    *mistakes.SIGN_MISTAKES,
    *mistakes.CLIP_MISTAKES,
    *mistakes.RATIO_MISTAKES,
    *mistakes.TOKEN_ADVANTAGE_MISTAKES,
    *mistakes.WEIGHT_MISTAKES,
    *mistakes.TIME_MISTAKES,
    *mistakes.METHOD_MISTAKES,
)


def _token_loss(i: Inputs, m: Mistake, method: str, a: Tensor) -> Tensor:
    """Return the loss of each token by a method and advantages (batch, 1), with one mistake."""
    old, c, mask = i.get("old_log_probs"), i.get("cliprange", 0.0), i.get("response_mask")
    return mistakes.wrong_token_loss(mistakes.LossInputs(method, a, i["policy_log_probs"], old, c, mask), m)


def _naive_cases() -> list[CallCase]:
    return [
        CallCase(
            {"raw_rewards_or_advantages": advantages(b, s), "policy_log_probs": log_probs(b, t, s)[0]},
            about="as many rows as positions" if b == t else "",
        )
        for b, t, s in _SHAPES
    ]


NAIVE = Subject(
    cs336_2025.compute_naive_policy_gradient_loss,
    _naive_cases,
    "loss",
    lambda i, m: _token_loss(i, m, "none", i["raw_rewards_or_advantages"]),
    (*mistakes.SIGN_MISTAKES, *mistakes.TOKEN_ADVANTAGE_MISTAKES, *mistakes.WEIGHT_MISTAKES, *mistakes.TIME_MISTAKES),
)


def _clip_cases() -> list[CallCase]:
    cases = []
    for (b, t, s), c in zip(_SHAPES, (0.2, 0.1, 0.5, 0.3, 0.2), strict=True):
        policy, old = log_probs(b, t, s)
        inputs = {"advantages": advantages(b, s), "policy_log_probs": policy, "old_log_probs": old, "cliprange": c}
        cases.append(CallCase(inputs, about="as many rows as positions" if b == t else ""))
    policy, old = log_probs(2, 4, 21)
    zero = {"advantages": torch.zeros(2, 1), "policy_log_probs": policy, "old_log_probs": old, "cliprange": 0.2}
    on_policy = {**cases[0].inputs, "old_log_probs": cases[0].inputs["policy_log_probs"].clone()}
    cases.append(CallCase(zero, about="advantages of 0"))
    cases.append(CallCase(on_policy, about="equal old and new log-probabilities"))
    return cases


CLIP = Subject(
    cs336_2025.compute_grpo_clip_loss,
    _clip_cases,
    ("loss", "metadata"),
    lambda i, m: (_token_loss(i, m, "grpo", i["advantages"]), {}),
    CLIPPED_MISTAKES,
)
METHOD_OF = {"no_baseline": "none", "reinforce_with_baseline": "none", "grpo_no_clip": "noclip", "grpo_clip": "grpo"}


def wrong_loss_2025(i: Inputs, m: Mistake) -> Tensor:
    """Return the loss of each token by 2025's `loss_type`, with one mistake."""
    names = ["advantages", "raw_rewards"]
    if i["loss_type"] == "no_baseline":
        names.reverse()
    a = m.at("input", lambda right, other: right)(*(i[name] for name in names))
    return _token_loss(i, m, METHOD_OF[i["loss_type"]], a)


def _loss_cases_2025() -> list[CallCase]:
    cases = []
    for loss_type in METHOD_OF:
        for case in _clip_cases()[:4]:
            rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0])[: len(case.inputs["advantages"]), None].clone()
            first = {"policy_log_probs": None, "loss_type": loss_type, "raw_rewards": rewards}  # in the handout's order
            cases.append(CallCase(first | case.inputs, branch=loss_type, about=f"loss_type={loss_type}"))
    return cases


LOSS_2025 = Subject(
    cs336_2025.compute_policy_gradient_loss,
    _loss_cases_2025,
    ("loss", "metadata"),
    lambda i, m: (wrong_loss_2025(i, m), {}),
    CLIPPED_MISTAKES,
    optional=frozenset({"grpo_no_clip"}),
)


def _loss_cases_2026() -> list[CallCase]:
    cases = []
    for method in ("none", "noclip", "grpo", "gspo"):
        for number, (b, t, c) in enumerate(((3, 6, 0.2), (4, 6, 0.05), (3, 6, 0.5), (4, 4, 0.2))):
            mask = response_mask(b, t)
            policy, old = log_probs(b, t, 30 + number, mask)
            a = advantages(b, number)
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
            shape = "rewards of shape (batch,)" if number % 2 else "rewards of shape (batch, 1)"
            cases.append(CallCase(inputs, branch=method, about=f"importance_reweighting_method={method}, {shape}"))
    return cases


LOSS_2026 = Subject(
    cs336_2026.compute_policy_gradient_loss,
    _loss_cases_2026,
    ("loss", "metadata"),
    lambda i, m: (
        _token_loss(i, m, i["importance_reweighting_method"], i["raw_rewards_or_advantages"].reshape(-1, 1)),
        {},
    ),
    (*CLIPPED_MISTAKES, *mistakes.SEQUENCE_MISTAKES),
)


def _slice_cases(extra: Inputs) -> list[CallCase]:
    cases = []
    for number, dim in enumerate((1, 0, None, -1)):
        value = (torch.randn(3, 5, generator=random(number)) * 2).round(decimals=2)
        mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 0]]).bool()
        value[0, 0] = value[2, 1] = 0.0  # a 0 counts like any other value
        inputs: Inputs = {"tensor": value, "mask": mask, **extra, "dim": dim}
        cases.append(CallCase(inputs, branch="all" if dim is None else "dim", about=f"dim={dim}"))
    return cases


NORMALIZE = Subject(
    cs336_2025.masked_normalize,
    lambda: _slice_cases({"normalize_constant": 10.0}),
    "result",
    lambda i, m: mistakes.wrong_slices(i["tensor"], i["mask"], i["normalize_constant"], i["dim"], m),
    mistakes.NORMALIZE_MISTAKES,
)
MEAN = Subject(
    cs336_2025.masked_mean,
    lambda: _slice_cases({}),
    "result",
    lambda i, m: mistakes.wrong_slices(i["tensor"], i["mask"], None, i["dim"], m),
    mistakes.MEAN_MISTAKES,
)


_PER_TOKEN = "per_token_policy_gradient_loss"


def _aggregate_cases() -> list[CallCase]:
    cases = []
    for how in ("sequence", "constant"):
        for number, constant in enumerate((7, 20, 3)):
            rows = 4 - number
            inputs: Inputs = {
                _PER_TOKEN: torch.randn(4, 6, generator=random(40 + number)).round(decimals=2)[:rows].clone(),
                "mask": response_mask(rows, 6),
                "loss_normalization": how,
                "normalization_constant": constant,
            }
            cases.append(CallCase(inputs, branch=how, about=f"loss_normalization={how}"))
    return cases


AGGREGATE = Subject(
    cs336_2026.aggregate_loss_across_microbatch,
    _aggregate_cases,
    "loss",
    lambda i, m: mistakes.wrong_average(
        i[_PER_TOKEN], i["mask"], i["loss_normalization"], i["normalization_constant"], m
    ),
    (
        *mistakes.MASK_MISTAKES,
        *mistakes.ROW_MISTAKES,
        *mistakes.BATCH_MISTAKES,
        *mistakes.CONSTANT_MISTAKES,
        *mistakes.LOSS_SIGN_MISTAKES,
    ),
    scalar=True,
)


CASES = (
    ADVANTAGES_2025, ROLLOUT_REWARDS, ADVANTAGES_2026, NAIVE, CLIP, LOSS_2025, LOSS_2026, NORMALIZE, MEAN, AGGREGATE,
)  # fmt: skip
