"""The functions of both handouts: the cases that each is tried on, and the mistakes that are known of it."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check import known_bugs as bugs
from rlreason.courses.check.calling import (
    TextReward,
    Yours,
    advantages,
    answer_parts,
    fresh,
    log_probs,
    numbers,
    random,
    response_mask,
)
from rlreason.courses.check.observing import observe, places
from rlreason.courses.check.scoring import SCORING
from rlreason.courses.check.subject import Bug, CallCase, Fault, Function, Inputs, Kind, Mistake, Subject, known

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
    for by_std in (True, False):
        branch, about = str(by_std), f"normalize_by_std={by_std}"
        for values, size, eps in settings:
            truths = [f"t{place // size}" for place in range(12)]
            cases.append(CallCase(_inputs_2025(values, truths, size, eps, by_std), branch, about))
        shared = _inputs_2025(ROUND, [f"t{place // 3 % 3}" for place in range(12)], 3, 0.5, by_std)
        cases.append(CallCase(shared, branch, "two questions of one answer", _BY_ANSWER))
    same = _inputs_2025([1.0] * 12, [f"t{place // 3}" for place in range(12)], 3, 1e-6)
    return [
        *cases,
        CallCase(same, "True", "all rewards equal", _FLAT),
        CallCase(_twins(), "True", _EQUAL_TEXTS, _BY_ANSWER),
    ]


def _twins() -> Inputs:
    """Return inputs where two questions have equal responses, which are right for the first."""
    inputs = _inputs_2025([0.5, 1.0, 0.5, 0.5, 1.0, 0.0], ["t0"] * 6, 3, 0.5)
    return inputs | {"repeated_ground_truths": ["t0"] * 3 + ["t1"] * 3}


def _reward_cases() -> list[CallCase]:
    names = ("reward_fn", "rollout_responses", "repeated_ground_truths")
    cases = [*_advantage_cases_2025()[:3], CallCase(_twins(), about=_EQUAL_TEXTS)]
    return [CallCase({name: case.inputs[name] for name in names}, about=case.about) for case in cases]


def _wrong_advantages_2025(i: Inputs, m: Mistake) -> Any:
    rewards = bugs.wrong_rewards(i, m)
    normalizer = "std" if i["normalize_by_std"] else "none"
    options = bugs.AdvantageOptions(i["group_size"], "mean", i["advantage_eps"], normalizer)
    a = bugs.wrong_advantages(rewards, options, m)
    return (*m.at("returned", lambda advantages, rewards: (advantages, rewards))(a, rewards), {})


_RETURNED = known("returned", "the return line",
    ("advantages and raw rewards are returned in swapped places", lambda a, rewards: (rewards, a)),
)  # fmt: skip


def _inputs_2026(rewards: list[float], size: int, *options: Any) -> Inputs:
    """Return the inputs; the options are baseline, eps and normaliser, or left out."""
    names = ("raw_rewards", "group_size", "baseline", "advantage_eps", "advantage_normalizer")
    return dict(zip(names, (torch.tensor(rewards), size, *options), strict=False))


def _advantage_cases_2026() -> list[CallCase]:
    cases = []
    for baseline in ("mean", "none"):
        for normalizer in ("std", "none", "mean"):
            values = POSITIVE if normalizer == "mean" else ROUND
            for size, eps in ((3, 0.5), (4, 0.25), (4, 1e-3), (2, 0.125), (6, 0.5)):
                about = f"baseline={baseline}, advantage_normalizer={normalizer}"
                inputs = _inputs_2026(values, size, baseline, eps, normalizer)
                cases.append(CallCase(inputs, f"{baseline}/{normalizer}", about))
    for normalizer in ("std", "mean"):
        inputs = _inputs_2026([1.0, 1.0, 1.0, 0.0, 0.0, 0.0], 3, "mean", 1e-6, normalizer)
        cases.append(CallCase(inputs, f"mean/{normalizer}", "all rewards equal", _FLAT))
    left_out = _inputs_2026([0.0, 1.0, 0.5, 1.0, 1.0, 0.0], 3)
    kind = Kind("with its options left out, it takes other defaults than the handout's", "the defaults in the def line")
    return [*cases, CallCase(left_out, "mean/std", "its options left out", kind)]


def _wrong_advantages_2026(i: Inputs, m: Mistake) -> Any:
    i = {"baseline": "mean", "advantage_eps": 1e-6, "advantage_normalizer": "std", **i}
    options = bugs.AdvantageOptions(i["group_size"], i["baseline"], i["advantage_eps"], i["advantage_normalizer"])
    return bugs.wrong_advantages(i["raw_rewards"], options, m), {}


def _mixing(inputs_of: Callable[[list[float]], Inputs]) -> Callable[[Subject, Function], Kind | None]:
    """Return a hint at mixed groups; `inputs_of` makes the inputs of six rewards in groups of 3."""

    def hint(subject: Subject, function: Function) -> Kind | None:
        rewards = ([0.0, 1.0, 0.5, 1.0, 0.25, 0.0], [2.0, 0.0, 1.0, 1.0, 0.25, 0.0])  # only the first group differs
        try:
            before, after = (observe(subject, function, inputs_of(r))["advantages"] for r in rewards)
        except Exception:  # the function may refuse this, or answer with other shapes
            return None
        if before.shape == after.shape == (6,) and bool(places(after[3:], before[3:]).any()):
            where = "the reshape or loop that forms the groups, and the dim of mean and std"
            return Kind("groups mix questions: one group's advantages change with another group's rewards", where)
        return None

    return hint


_SHAPES = ((3, 5, 0), (4, 4, 3), (2, 6, 5), (1, 4, 7), (5, 3, 11))  # rows, positions, seed


def _token_loss(i: Inputs, m: Mistake, method: str, a: Tensor) -> Tensor:
    """Return the loss of each token by a method and advantages (batch, 1), with one mistake."""
    old, c, mask = i.get("old_log_probs"), i.get("cliprange", 0.0), i.get("response_mask")
    return bugs.wrong_token_loss(bugs.LossInputs(method, a, i["policy_log_probs"], old, c, mask), m)


def _naive_cases() -> list[CallCase]:
    cases = []
    for b, t, s in _SHAPES:
        inputs = {"raw_rewards_or_advantages": advantages(b, s), "policy_log_probs": log_probs(b, t, s)[0]}
        cases.append(CallCase(inputs, about="as many rows as positions" if b == t else ""))
    return cases


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


METHOD_OF = {"no_baseline": "none", "reinforce_with_baseline": "none", "grpo_no_clip": "noclip", "grpo_clip": "grpo"}


def _loss_cases_2025() -> list[CallCase]:
    cases = []
    for loss_type in METHOD_OF:
        for case in _clip_cases()[:4]:
            rewards = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0])[: len(case.inputs["advantages"]), None].clone()
            first = {"policy_log_probs": None, "loss_type": loss_type, "raw_rewards": rewards}  # in the handout's order
            cases.append(CallCase(first | case.inputs, loss_type, f"loss_type={loss_type}"))
    return cases


def _wrong_loss_2025(i: Inputs, m: Mistake) -> Tensor:
    names = ["advantages", "raw_rewards"]
    if i["loss_type"] == "no_baseline":
        names.reverse()
    a = m.at("input", lambda right, other: right)(*(i[name] for name in names))
    return _token_loss(i, m, METHOD_OF[i["loss_type"]], a)


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
            cases.append(CallCase(inputs, method, f"importance_reweighting_method={method}, {shape}"))
    return cases


def _wrong_loss_2026(i: Inputs, m: Mistake) -> Any:
    a = i["raw_rewards_or_advantages"].reshape(-1, 1)
    return _token_loss(i, m, i["importance_reweighting_method"], a), {}


def _slice_cases(extra: Inputs) -> list[CallCase]:
    cases = []
    for number, dim in enumerate((1, 0, None, -1)):
        value = (torch.randn(3, 5, generator=random(number)) * 2).round(decimals=2)
        mask = torch.tensor([[1, 1, 0, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 0]]).bool()
        value[0, 0] = value[2, 1] = 0.0  # a 0 counts like any other value
        inputs: Inputs = {"tensor": value, "mask": mask, **extra, "dim": dim}
        cases.append(CallCase(inputs, "all" if dim is None else "dim", f"dim={dim}"))
    return cases


def _wrong_slices(i: Inputs, m: Mistake) -> Tensor:
    return bugs.wrong_slices(i["tensor"], i["mask"], i.get("normalize_constant"), i["dim"], m)


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
            cases.append(CallCase(inputs, how, f"loss_normalization={how}"))
    return cases


def _wrong_aggregate(i: Inputs, m: Mistake) -> Tensor:
    return bugs.wrong_average(i[_PER_TOKEN], i["mask"], i["loss_normalization"], i["normalization_constant"], m)


def _sft_cases() -> list[CallCase]:
    cases = []
    for number, (accumulation, constant) in enumerate(((2, 1.0), (4, 5.0), (1, 3.0), (3, 1.0))):
        rows = 3 if number < 3 else 2
        mask = response_mask(rows, 6)
        inputs: Inputs = {
            "policy_log_probs": log_probs(rows, 6, 50 + number, mask)[0],
            "response_mask": mask,
            "gradient_accumulation_steps": accumulation,
            "normalize_constant": constant,
        }
        about = f"gradient_accumulation_steps={accumulation}, normalize_constant={constant}"
        cases.append(CallCase(inputs, about=about))
    return cases


def _wrong_sft(i: Inputs, m: Mistake) -> Any:
    how = "sequence" if m.step == "rows" else "constant_mean"
    loss = bugs.wrong_average(-i["policy_log_probs"], i["response_mask"], how, i["normalize_constant"], m)
    return bugs.wrong_step(loss, i["gradient_accumulation_steps"], i["policy_log_probs"], m), {}


def _grpo_cases() -> list[CallCase]:
    cases = []
    for loss_type in METHOD_OF:
        for number, (accumulation, c) in enumerate(((2, 0.2), (1, 0.1), (4, 0.5))):
            rows = 4 - number
            mask = response_mask(rows, 6)
            policy, old = log_probs(rows, 6, 60 + number, mask)
            inputs: Inputs = {
                "policy_log_probs": policy,
                "response_mask": mask,
                "gradient_accumulation_steps": accumulation,
                "loss_type": loss_type,
                "raw_rewards": torch.tensor([1.0, 0.0, 0.5, 1.0])[:rows, None].clone(),
                "advantages": advantages(rows, number),
                "old_log_probs": old,
                "cliprange": c,
            }
            about = f"loss_type={loss_type}, gradient_accumulation_steps={accumulation}"
            cases.append(CallCase(inputs, loss_type, about))
    return cases


def _wrong_grpo(i: Inputs, m: Mistake) -> Any:
    loss = bugs.wrong_average(_wrong_loss_2025(i, m), i["response_mask"], "sequence", 1.0, m)
    return bugs.wrong_step(loss, i["gradient_accumulation_steps"], i["policy_log_probs"], m), {}


def _note_metadata(function: Yours) -> Iterator[Bug]:
    """Note which numbers of the metadata masked positions change. The handout leaves that open, so it is no bug."""
    case = next(c for c in _grpo_cases() if c.branch == "grpo_clip")
    mask, old = case.inputs["response_mask"], case.inputs["old_log_probs"]
    others = (case.inputs["policy_log_probs"], old + 2)
    try:
        before, *after = (
            numbers(answer_parts(function(**fresh(inputs, "policy_log_probs")), ("loss", "metadata"))[1])
            for inputs in (case.inputs, *({**case.inputs, "old_log_probs": old.where(mask, o)} for o in others))
        )
    except Fault:
        return
    for name, value in before.items():
        if any(abs(value - changed[name]) > 1e-5 * (1 + abs(value)) for changed in after if name in changed):
            function.notes.append(f"prompt or padding positions count in {name} of its metadata: is that meant?")
    yield from ()


_OF_RATIOS = (
    bugs.CLIP_MISTAKES
    + bugs.RATIO_MISTAKES
    + bugs.TOKEN_ADVANTAGE_MISTAKES
    + bugs.WEIGHT_MISTAKES
    + bugs.TIME_MISTAKES
    + bugs.METHOD_MISTAKES
)
_OF_AVERAGES = bugs.MASK_MISTAKES + bugs.ROW_MISTAKES + bugs.BATCH_MISTAKES
_OF_NAIVE = bugs.SIGN_MISTAKES + bugs.TOKEN_ADVANTAGE_MISTAKES + bugs.WEIGHT_MISTAKES + bugs.TIME_MISTAKES
_LOSS = ("loss", "metadata")
_MAY_BE_UNKNOWN = frozenset({"grpo_no_clip"})
SUBJECTS: tuple[Subject, ...] = (
    Subject(
        cs336_2025.compute_group_normalized_rewards, _advantage_cases_2025, ("advantages", "raw_rewards", "metadata"),
        _wrong_advantages_2025, bugs.ADVANTAGE_MISTAKES + bugs.REWARD_MISTAKES + _RETURNED,
        hint=_mixing(lambda rewards: _inputs_2025(rewards, ["t0"] * 3 + ["t1"] * 3, 3, 1e-3)),
    ),
    Subject(
        cs336_2026.compute_group_normalized_rewards, _advantage_cases_2026, ("advantages", "metadata"),
        _wrong_advantages_2026, bugs.ADVANTAGE_MISTAKES,
        hint=_mixing(lambda rewards: _inputs_2026(rewards, 3, "mean", 1e-3, "std")),
    ),
    Subject(
        cs336_2026.compute_rollout_rewards, _reward_cases, ("raw_rewards", "metadata"),
        lambda i, m: (bugs.wrong_rewards(i, m), {}), bugs.REWARD_MISTAKES,
    ),
    Subject(
        cs336_2025.compute_naive_policy_gradient_loss, _naive_cases, "loss",
        lambda i, m: _token_loss(i, m, "none", i["raw_rewards_or_advantages"]), _OF_NAIVE,
    ),
    Subject(
        cs336_2025.compute_grpo_clip_loss, _clip_cases, _LOSS,
        lambda i, m: (_token_loss(i, m, "grpo", i["advantages"]), {}), bugs.SIGN_MISTAKES + _OF_RATIOS,
    ),
    Subject(
        cs336_2025.compute_policy_gradient_loss, _loss_cases_2025, _LOSS,
        lambda i, m: (_wrong_loss_2025(i, m), {}), bugs.SIGN_MISTAKES + _OF_RATIOS, optional=_MAY_BE_UNKNOWN,
    ),
    Subject(
        cs336_2026.compute_policy_gradient_loss, _loss_cases_2026, _LOSS,
        _wrong_loss_2026, bugs.SIGN_MISTAKES + _OF_RATIOS + bugs.SEQUENCE_MISTAKES,
    ),
    Subject(
        cs336_2025.masked_normalize, lambda: _slice_cases({"normalize_constant": 10.0}), "result",
        _wrong_slices, bugs.NORMALIZE_MISTAKES,
    ),
    Subject(cs336_2025.masked_mean, lambda: _slice_cases({}), "result", _wrong_slices, bugs.MEAN_MISTAKES),
    Subject(
        cs336_2026.aggregate_loss_across_microbatch, _aggregate_cases, "loss",
        _wrong_aggregate, _OF_AVERAGES + bugs.CONSTANT_MISTAKES + bugs.LOSS_SIGN_MISTAKES, scalar=True,
    ),
    Subject(
        cs336_2025.sft_microbatch_train_step, _sft_cases, _LOSS, _wrong_sft,
        bugs.MASK_MISTAKES + bugs.BATCH_MISTAKES + bugs.CONSTANT_MISTAKES + bugs.STEP_MISTAKES + bugs.ROW_MISTAKES,
        scalar=True, calls_backward=True,
    ),
    Subject(
        cs336_2025.grpo_microbatch_train_step, _grpo_cases, _LOSS, _wrong_grpo,
        _OF_AVERAGES + bugs.STEP_MISTAKES + _OF_RATIOS,
        scalar=True, calls_backward=True, properties=(_note_metadata,), optional=_MAY_BE_UNKNOWN,
    ),
    *SCORING,
)  # fmt: skip
