"""Cases and known mistakes of rewards and advantages, of both years."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check.calling import Yours, answer_parts, tensor
from rlreason.courses.check.engine import first_difference, places, smaller_tensors, without
from rlreason.courses.check.mistakes import ADVANTAGE_KNOBS, KnobKinds, wrong_advantages
from rlreason.courses.check.subject import (
    Bug,
    CallCase,
    Fault,
    Function,
    Inputs,
    Kind,
    Knobs,
    Observed,
    Subject,
    inputs_as_text,
)

_REWARD = "the call of reward_fn, and what is read from the dictionary that it returns"
REWARD_KNOBS: KnobKinds = {
    "reward": {
        "answer_reward": Kind("answer_reward is taken where the total, reward, is asked for", _REWARD),
        "format_reward": Kind("format_reward is taken where the total, reward, is asked for", _REWARD),
        "binary": Kind("rewards are turned into 0 and 1", _REWARD),
    },
    "pairing": {
        "swapped": Kind("reward_fn gets ground truth and response in swapped places", _REWARD),
        "first_truth": Kind("answers are misaligned: every response is judged by the first ground truth", _REWARD),
        "shifted": Kind("answers are misaligned: a response is judged by another one's ground truth", _REWARD),
        "by_group": Kind("answers are misaligned: the ground truth at the place of the group is taken", _REWARD),
        "cached": Kind("a reward is remembered by its response alone: equal texts share it across questions", _REWARD),
        "by_truth": Kind("a reward is remembered by its ground truth alone: a group shares one reward", _REWARD),
    },
}


class TextReward:
    """A reward function that reads the reward from the response: `a0.5|t1` earns 0.5 under the ground truth `t1`.

    Under another ground truth it earns 1.5 less. The parts differ from the total.
    """

    description = "{'reward': r, ...}, r from the table of the responses below"

    def __call__(self, response: str, ground_truth: str, *more: Any, **named: Any) -> dict[str, float]:
        text, truth = str(response), str(ground_truth)
        if text[:1] == "a" and truth[:1] == "t":
            number, _, right_truth = text[1:].partition("|")
            value = float(number)
            total = value if right_truth == truth else value - 1.5
            return {"reward": total, "format_reward": 1.0 - value / 4, "answer_reward": value / 2 + 0.125}
        return {"reward": -0.0625 * (1 + len(text)), "format_reward": 0.25, "answer_reward": 0.75}


def _texts(values: list[float], truths: list[str]) -> list[str]:
    """Return responses that earn these rewards."""
    return [f"a{value:g}|{truth}" for value, truth in zip(values, truths, strict=True)]


def _wrong_rewards(i: Inputs, k: Knobs) -> Tensor:
    """Return the rewards (n,) of the responses, with the mistakes of `k`."""
    how = k.get("pairing", "")
    responses, truths = i["rollout_responses"], i["repeated_ground_truths"]
    pairs = list(zip(responses, truths, strict=True))
    if how == "swapped":
        pairs = [(truth, response) for response, truth in pairs]
    elif how in ("shifted", "first_truth"):
        moved = truths[1:] + truths[:1] if how == "shifted" else truths[:1] * len(truths)
        pairs = list(zip(responses, moved, strict=True))
    elif how == "by_group":
        size = i.get("group_size", 2)
        pairs = [(response, truths[place // size]) for place, response in enumerate(responses)]
    cache: dict[str, dict[str, float]] = {}
    parts = []
    for response, truth in pairs:
        key = {"cached": response, "by_truth": truth}.get(how)
        reward = i["reward_fn"](response, truth)
        parts.append(reward if key is None else cache.setdefault(key, reward))
    part = k.get("reward", "")
    rewards = torch.tensor([p.get(part, p["reward"]) for p in parts])
    return (rewards > 0).float() if part == "binary" else rewards


def _hints(advantages_of: Callable[[Function, Tensor], Tensor]) -> tuple[Callable[[Function], Kind | None], ...]:
    """Return two hints; `advantages_of` calls the user's function on six rewards, in groups of 3."""

    def mixing(function: Function) -> Kind | None:
        before = advantages_of(function, torch.tensor([0.0, 1.0, 0.5, 1.0, 0.25, 0.0]))
        after = advantages_of(function, torch.tensor([2.0, 0.0, 1.0, 1.0, 0.25, 0.0]))  # the first group is another
        if before.shape == after.shape == (6,) and bool(places(after[3:], before[3:]).any()):
            where = "the reshape or loop that forms the groups, and the dim of mean and std"
            return Kind("groups mix questions: one group's advantages change with another group's rewards", where)
        return None

    def equal_rewards(function: Function) -> Kind | None:
        a = advantages_of(function, torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 0.5]))
        if bool(a.isnan().any()):
            return Kind("equal rewards give NaN", "the division where the standard deviation is 0")
        if bool((a.abs() > 1e-4).any()):
            return Kind("equal rewards give advantages other than 0", "what is subtracted and added")
        return None

    return mixing, equal_rewards


ROUND = [0.5, 1.0, 0.0, 0.25, 2.0, -0.5, 1.0, 0.75, 0.0, 1.5, 0.5, 1.0]
UNEVEN = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 3.0, 0.0, 2.0, 2.0, 2.0, 2.0]
POSITIVE = [1.0, 3.0, 0.0, 0.5, 2.0, 2.0, 0.25, 1.0, 0.0, 0.0, 4.0, 1.0]
_ONE_ANSWER = "two questions of one answer"
_EQUAL_TEXTS = "equal texts under two questions"


def _inputs_2025(responses: list[str], truths: list[str], size: int, eps: float, by_std: bool = True) -> Inputs:
    return {
        "reward_fn": TextReward(),
        "rollout_responses": responses,
        "repeated_ground_truths": truths,
        "group_size": size,
        "advantage_eps": eps,
        "normalize_by_std": by_std,
    }


def _cases_2025() -> list[CallCase]:
    cases = []
    settings = ((ROUND, 3, 0.5), (ROUND, 4, 0.25), (UNEVEN, 4, 1e-6), (ROUND, 2, 0.125), (UNEVEN, 6, 0.5))
    for by_std in (True, False):
        for values, size, eps in settings:
            truths = [f"t{place // size}" for place in range(len(values))]
            inputs = _inputs_2025(_texts(values, truths), truths, size, eps, by_std)
            cases.append(CallCase(inputs, branch=str(by_std), about=f"normalize_by_std={by_std}"))
    one_answer = [f"t{place // 3 % 3}" for place in range(12)]
    for by_std in (True, False):
        shared = _inputs_2025(_texts(ROUND, one_answer), one_answer, 3, 0.5, by_std)
        cases.append(CallCase(shared, branch=str(by_std), about=_ONE_ANSWER))
    truths = [f"t{place // 3}" for place in range(12)]
    same = _inputs_2025(_texts([1.0] * 12, truths), truths, 3, 1e-6)
    twins = _texts([0.5, 1.0, 0.5, 0.5, 1.0, 0.0], ["t0"] * 6)
    again = _inputs_2025(twins, ["t0"] * 3 + ["t1"] * 3, 3, 0.5)
    cases.append(CallCase(same, branch="True", about="all rewards equal"))
    cases.append(CallCase(again, branch="True", about=_EQUAL_TEXTS))
    return cases


def _smaller_texts(inputs: Inputs) -> Iterator[Inputs]:
    names, size = ("rollout_responses", "repeated_ground_truths"), inputs.get("group_size", 1)
    n = len(inputs["rollout_responses"])
    for first in range(n - size, -1, -size):
        if n > size:
            yield without(inputs, names, range(first, first + size), 0)
    if size > 2 and n % size == 0:
        smaller = without(inputs, names, range(size - 1, n, size), 0)
        yield {**smaller, "group_size": size - 1}
    for place, text in enumerate(inputs["rollout_responses"]):
        head, bar, tail = text.partition("|")
        for simple in ("0", "1"):
            if bar and head not in ("a0", "a1"):
                responses = list(inputs["rollout_responses"])
                responses[place] = f"a{simple}|{tail}"
                yield {**inputs, "rollout_responses": responses}


def _observe_2025(function: Function, inputs: Inputs) -> Observed:
    parts = answer_parts(function(**inputs), ("advantages", "raw_rewards", "metadata"))
    return {"raw_rewards": tensor(parts[1], "raw_rewards"), "advantages": tensor(parts[0], "advantages")}


def _wrong_2025(i: Inputs, k: Knobs) -> Any:
    rewards = _wrong_rewards(i, k)
    normalizer = "std" if i["normalize_by_std"] else "none"
    advantages = wrong_advantages(rewards, i["group_size"], "mean", i["advantage_eps"], normalizer, k)
    return (rewards, advantages, {}) if "returned" in k else (advantages, rewards, {})


def _advantages_2025(function: Function, rewards: Tensor) -> Tensor:
    truths = ["t0"] * 3 + ["t1"] * 3
    return _observe_2025(function, _inputs_2025(_texts(rewards.tolist(), truths), truths, 3, 1e-3))["advantages"]


def _groups_by_answer(function: Function) -> Kind | None:
    """Hint at groups by ground truth, if the difference shows only where questions share one."""
    differing = set()
    for case in _cases_2025():
        ours = _observe_2025(cs336_2025.compute_group_normalized_rewards, case.inputs)
        if first_difference(_observe_2025(function, case.inputs), ours) is not None:
            differing.add(case.about)
    if not differing <= {_ONE_ANSWER, _EQUAL_TEXTS} or _ONE_ANSWER not in differing:
        return None
    where = "how responses are gathered into groups: by their place, never by their ground truth"
    return Kind("groups mix questions: those that have the same ground truth are taken for one group", where)


GROUP_2025 = Subject(
    cs336_2025.compute_group_normalized_rewards,
    "cs336_2025",
    _cases_2025,
    _observe_2025,
    _wrong_2025,
    {
        **{name: ADVANTAGE_KNOBS[name] for name in ADVANTAGE_KNOBS if name != "mean_divisor"},
        **REWARD_KNOBS,
        "returned": {
            "swapped": Kind("advantages and raw rewards are returned in swapped places", "the return line"),
        },
    },
    _smaller_texts,
    hints=(_groups_by_answer, *_hints(_advantages_2025)),
)


def _observe_rewards(function: Function, inputs: Inputs) -> Observed:
    parts = answer_parts(function(**inputs), ("raw_rewards", "metadata"))
    return {"raw_rewards": tensor(parts[0], "raw_rewards")}


def _reward_cases() -> list[CallCase]:
    names = ("reward_fn", "rollout_responses", "repeated_ground_truths")
    return [
        CallCase({name: case.inputs[name] for name in names}, about=case.about if case.about == _EQUAL_TEXTS else "")
        for case in [*_cases_2025()[:3], _cases_2025()[-1]]
    ]


ROLLOUT_REWARDS = Subject(
    cs336_2026.compute_rollout_rewards,
    "cs336_2026",
    _reward_cases,
    _observe_rewards,
    lambda i, k: (_wrong_rewards(i, k), {}),
    REWARD_KNOBS,
    _smaller_texts,
)


def _inputs_2026(rewards: Tensor, size: int, baseline: str, eps: float, normalizer: str) -> Inputs:
    return {
        "raw_rewards": rewards,
        "group_size": size,
        "baseline": baseline,
        "advantage_eps": eps,
        "advantage_normalizer": normalizer,
    }


def _cases_2026() -> list[CallCase]:
    cases = []
    for baseline in ("mean", "none"):
        for normalizer in ("std", "none", "mean"):
            values = POSITIVE if normalizer == "mean" else ROUND
            for size, eps in ((3, 0.5), (4, 0.25), (4, 1e-3), (2, 0.125), (6, 0.5)):
                about = f"baseline={baseline}, advantage_normalizer={normalizer}"
                inputs = _inputs_2026(torch.tensor(values), size, baseline, eps, normalizer)
                cases.append(CallCase(inputs, branch=f"{baseline}/{normalizer}", about=about))
    for normalizer in ("std", "mean"):
        inputs = _inputs_2026(torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]), 3, "mean", 1e-6, normalizer)
        cases.append(CallCase(inputs, branch=f"mean/{normalizer}", about="all rewards equal"))
    return cases


def _observe_2026(function: Function, inputs: Inputs) -> Observed:
    parts = answer_parts(function(**inputs), ("advantages", "metadata"))
    return {"advantages": tensor(parts[0], "advantages")}


def _wrong_2026(i: Inputs, k: Knobs) -> Any:
    advantages = wrong_advantages(
        i["raw_rewards"], i["group_size"], i["baseline"], i["advantage_eps"], i["advantage_normalizer"], k
    )
    return advantages, {}


def _advantages_2026(function: Function, rewards: Tensor) -> Tensor:
    return _observe_2026(function, _inputs_2026(rewards.clone(), 3, "mean", 1e-3, "std"))["advantages"]


def _smaller_rewards(inputs: Inputs) -> Iterator[Inputs]:
    rewards, size = inputs["raw_rewards"], inputs["group_size"]
    yield from smaller_tensors(inputs, ["raw_rewards"], (), ["raw_rewards"], group=size)
    if size > 2:
        smaller = without(inputs, ["raw_rewards"], range(size - 1, len(rewards), size), 0)
        yield {**smaller, "group_size": size - 1}
    for place, value in enumerate(rewards.tolist()):
        for simple in (0.0, 1.0):
            if value not in (0.0, 1.0):
                changed = rewards.clone()
                changed[place] = simple
                yield {**inputs, "raw_rewards": changed}


def _check_defaults(function: Yours) -> Iterator[Bug]:
    """Yield a bug if the options have other defaults than the handout's."""
    if not {"baseline", "advantage_eps", "advantage_normalizer"} <= function.defaults:
        return
    inputs: Inputs = {"raw_rewards": torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 0.0]), "group_size": 3}
    try:
        yours = _observe_2026(function, inputs)["advantages"]
    except Fault:
        return
    ours = _observe_2026(cs336_2026.compute_group_normalized_rewards, inputs)["advantages"]
    if yours.shape != ours.shape or bool(places(yours, ours).any()):
        kind = Kind(
            "with its options left out, it takes other defaults than the handout's", "the defaults in the def line"
        )
        results = (f"advantages {yours.tolist()}", f"advantages {ours.tolist()}")
        yield Bug("compute_group_normalized_rewards", *kind, inputs_as_text(inputs), *results)


GROUP_2026 = Subject(
    cs336_2026.compute_group_normalized_rewards,
    "cs336_2026",
    _cases_2026,
    _observe_2026,
    _wrong_2026,
    ADVANTAGE_KNOBS,
    _smaller_rewards,
    properties=(_check_defaults,),
    hints=_hints(_advantages_2026),
)
ADVANTAGES = (GROUP_2025, ROLLOUT_REWARDS, GROUP_2026)
