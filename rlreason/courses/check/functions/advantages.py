"""Rewards of both years, and the advantages of 2025, which are computed from them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2025, cs336_2026
from rlreason.courses.check.calling import answer_parts, tensor
from rlreason.courses.check.engine import first_difference, places, smaller_tensors, without
from rlreason.courses.check.functions.scoring import given
from rlreason.courses.check.subject import Bug, CallCase, Fault, Function, Inputs, Kind, Knobs, Seen, Subject
from rlreason.courses.check.wrong.averages import ADVANTAGE_KNOBS as KNOBS
from rlreason.courses.check.wrong.averages import advantages


def _mixing(call: Any) -> Kind | None:
    """Whether the second group's advantages move with the first group's rewards; `call(rewards (6,))` -> (6,)."""
    start = torch.tensor([0.0, 1.0, 0.5, 1.0, 0.25, 0.0])
    other = torch.tensor([2.0, 0.0, 1.0, 1.0, 0.25, 0.0])
    a, b = call(start), call(other)
    if a.shape == b.shape == start.shape and bool(places(b[3:], a[3:]).any()):
        where = "the reshape or loop that forms the groups, and the dim of mean and std"
        return Kind("groups mix questions: one group's advantages change with another group's rewards", where)
    return None


def _unequal(call: Any) -> Kind | None:
    """Whether equal rewards give other advantages than 0."""
    a = call(torch.tensor([1.0, 1.0, 1.0, 0.5, 0.5, 0.5]))
    if bool(a.isnan().any()):
        return Kind("equal rewards give NaN", "the division where the standard deviation is 0")
    if bool((a.abs() > 1e-4).any()):
        return Kind("equal rewards give advantages other than 0", "what is subtracted and added")
    return None


def hints(caller: Any) -> tuple[Any, ...]:
    """The hints of a function; `caller(function)` gives a call(rewards (6,), eps) -> advantages, of groups of 3."""

    def of(property_: Any) -> Any:
        return lambda function: property_(caller(function))

    return tuple(map(of, (_mixing, _unequal)))


_REWARD = "the call of reward_fn, and what is read from the dictionary that it returns"
REWARD_KNOBS = {
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


RETURN_KNOBS = {
    "returned": {"swapped": Kind("advantages and raw rewards are returned in swapped places", "the return line")}
}


class TableReward:
    """A reward function whose answer depends on the pair (response, ground truth), and shows what it is."""

    told = "{'reward': r, ...}, r from the table of the responses below"

    def __init__(self, table: dict[tuple[str, str], dict[str, float]]) -> None:
        self.table = table

    def __call__(self, response: str, ground_truth: str, *more: Any, **named: Any) -> dict[str, float]:
        """The parts of the reward of a pair."""
        return dict(reward_parts(response, ground_truth))


def reward_parts(response: str, ground_truth: str) -> dict[str, float]:
    """A reward with its parts, all of them different: `a3` judged by `t3` earns 0.3, any other pair -0.05 x length."""
    text, truth = str(response), str(ground_truth)
    if text[:1] == "a" and truth[:1] == "t":
        known = _value(text)
        right = text.rpartition("|")[2] == truth
        return {
            "reward": known if right else known - 1.5,
            "format_reward": 1.0 - known / 4,
            "answer_reward": known / 2 + 0.125,
        }
    return {"reward": -0.0625 * (1 + len(text)), "format_reward": 0.25, "answer_reward": 0.75}


def _value(text: str) -> float:
    return float(text[1:].partition("|")[0])


def _texts(values: list[float], group_size: int) -> tuple[list[str], list[str]]:
    """Responses that spell their own reward and ground truth, and the ground truths, one a group."""
    truths = [f"t{place // group_size}" for place in range(len(values))]
    return [f"a{value:g}|{truth}" for value, truth in zip(values, truths, strict=True)], truths


def rewards_of(function: Any, responses: list[str], truths: list[str], k: Knobs, size: int = 2) -> Tensor:
    """(n,) rewards as a function reads them, with the mistakes of `k`."""
    how = k.get("pairing", "")
    pairs = list(zip(responses, truths, strict=True))
    if how == "swapped":
        pairs = [(truth, response) for response, truth in pairs]
    elif how in ("shifted", "first_truth"):
        moved = truths[1:] + truths[:1] if how == "shifted" else truths[:1] * len(truths)
        pairs = list(zip(responses, moved, strict=True))
    elif how == "by_group":
        pairs = [(response, truths[place // size]) for place, response in enumerate(responses)]
    known: dict[str, dict[str, float]] = {}
    parts = []
    for response, truth in pairs:
        key = {"cached": response, "by_truth": truth}.get(how)
        if key is None:
            parts.append(function(response, truth))
        else:
            parts.append(known.setdefault(key, function(response, truth)))
    part = k.get("reward", "")
    out = torch.tensor([p[part if part in p else "reward"] for p in parts])
    return (out > 0).float() if part == "binary" else out


ROUND = [0.5, 1.0, 0.0, 0.25, 2.0, -0.5, 1.0, 0.75, 0.0, 1.5, 0.5, 1.0]
UNEVEN = [0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 3.0, 0.0, 2.0, 2.0, 2.0, 2.0]
POSITIVE = [1.0, 3.0, 0.0, 0.5, 2.0, 2.0, 0.25, 1.0, 0.0, 0.0, 4.0, 1.0]


_ONE_ANSWER = "two questions of one answer"


def _cases_2025() -> list[CallCase]:
    cases = []
    settings = ((ROUND, 3, 0.5), (ROUND, 4, 0.25), (UNEVEN, 4, 1e-6), (ROUND, 2, 0.125), (UNEVEN, 6, 0.5))
    for by_std in (True, False):
        for values, size, eps in settings:
            responses, truths = _texts(values, size)
            inputs: Inputs = {
                "reward_fn": TableReward({}),
                "rollout_responses": responses,
                "repeated_ground_truths": truths,
                "group_size": size,
                "advantage_eps": eps,
                "normalize_by_std": by_std,
            }
            cases.append(CallCase(inputs, branch=str(by_std), about=f"normalize_by_std={by_std}"))
    same = {**cases[0].inputs, "rollout_responses": [f"a1|t{i // 3}" for i in range(12)], "advantage_eps": 1e-6}
    twins = ["a0.5|t0", "a1|t0", "a0.5|t0", "a0.5|t0", "a1|t0", "a0|t0"]
    again = {**cases[0].inputs, "rollout_responses": twins, "repeated_ground_truths": ["t0"] * 3 + ["t1"] * 3}
    one_answer = [f"t{place // 3 % 3}" for place in range(12)]
    shared = {
        **cases[0].inputs,
        "rollout_responses": [f"a{value:g}|{truth}" for value, truth in zip(ROUND, one_answer, strict=True)],
        "repeated_ground_truths": one_answer,
    }
    return [
        *cases,
        CallCase(shared, branch="True", about=_ONE_ANSWER),
        CallCase(shared | {"normalize_by_std": False}, branch="False", about=_ONE_ANSWER),
        CallCase(same, branch="True", about="all rewards equal"),
        CallCase(again, branch="True", about="equal texts under two questions"),
    ]


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
        for simple in ("0", "1"):
            head, bar, tail = text.partition("|")
            if bar and head not in ("a0", "a1"):
                responses = list(inputs["rollout_responses"])
                responses[place] = f"a{simple}|{tail}"
                yield {**inputs, "rollout_responses": responses}


def _observe_2025(function: Function, inputs: Inputs) -> Seen:
    parts = answer_parts(function(**given(inputs)), ("advantages", "raw_rewards", "metadata"))
    return {"raw_rewards": tensor(parts[1], "raw_rewards"), "advantages": tensor(parts[0], "advantages")}


def _wrong_2025(knobs: Knobs) -> Function:
    def wrong(
        reward_fn: Any,
        rollout_responses: list[str],
        repeated_ground_truths: list[str],
        group_size: int,
        advantage_eps: float,
        normalize_by_std: bool,
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        rewards = rewards_of(reward_fn, rollout_responses, repeated_ground_truths, knobs, group_size)
        normalizer = "std" if normalize_by_std else "none"
        found = advantages(rewards, group_size, "mean", advantage_eps, normalizer, knobs)
        return (rewards, found, {}) if "returned" in knobs else (found, rewards, {})

    return wrong


def _caller_2025(function: Function) -> Any:
    def call(rewards: Tensor, eps: float = 1e-3) -> Tensor:
        responses, truths = _texts(rewards.tolist(), 3)
        inputs = {
            "reward_fn": TableReward({}),
            "rollout_responses": responses,
            "repeated_ground_truths": truths,
            "group_size": 3,
            "advantage_eps": eps,
            "normalize_by_std": True,
        }
        return _observe_2025(function, inputs)["advantages"]

    return call


def _by_answer(function: Function) -> Kind | None:
    """A hint: whether only questions that share an answer show the difference."""
    differing = set()
    for case in _cases_2025():
        ours = _observe_2025(cs336_2025.compute_group_normalized_rewards, case.inputs)
        if first_difference(_observe_2025(function, case.inputs), ours) is not None:
            differing.add(case.about)
    if not differing <= {_ONE_ANSWER, "equal texts under two questions"} or _ONE_ANSWER not in differing:
        return None
    where = "how responses are gathered into groups: by their place, never by their ground truth"
    return Kind("groups mix questions: those that have the same ground truth are taken for one group", where)


GROUP_2025 = Subject(
    "compute_group_normalized_rewards",
    "cs336_2025",
    (
        "reward_fn",
        "rollout_responses",
        "repeated_ground_truths",
        "group_size",
        "advantage_eps",
        "normalize_by_std",
    ),
    cs336_2025.compute_group_normalized_rewards,
    _cases_2025,
    _observe_2025,
    _wrong_2025,
    {**{name: KNOBS[name] for name in KNOBS if name != "mean_divisor"}, **REWARD_KNOBS, **RETURN_KNOBS},
    _smaller_texts,
    hints=(_by_answer, *hints(_caller_2025)),
)


def _observe_rewards(function: Function, inputs: Inputs) -> Seen:
    parts = answer_parts(function(**given(inputs)), ("raw_rewards", "metadata"))
    return {"raw_rewards": tensor(parts[0], "raw_rewards")}


def _wrong_rewards(knobs: Knobs) -> Function:
    def wrong(
        reward_fn: Any, rollout_responses: list[str], repeated_ground_truths: list[str]
    ) -> tuple[Tensor, dict[str, float]]:
        return rewards_of(reward_fn, rollout_responses, repeated_ground_truths, knobs), {}

    return wrong


def _reward_cases() -> list[CallCase]:
    names = ("reward_fn", "rollout_responses", "repeated_ground_truths")
    return [
        CallCase({name: case.inputs[name] for name in names}, about=case.about if "equal texts" in case.about else "")
        for case in [*_cases_2025()[:3], _cases_2025()[-1]]
    ]


ROLLOUT_REWARDS = Subject(
    "compute_rollout_rewards",
    "cs336_2026",
    ("reward_fn", "rollout_responses", "repeated_ground_truths"),
    cs336_2026.compute_rollout_rewards,
    _reward_cases,
    _observe_rewards,
    _wrong_rewards,
    REWARD_KNOBS,
    _smaller_texts,
)
REWARDS = (GROUP_2025, ROLLOUT_REWARDS)


def _caller_2026(function: Function) -> Any:
    def call(rewards: Tensor, eps: float = 1e-3) -> Tensor:
        inputs = {
            "raw_rewards": rewards.clone(),
            "group_size": 3,
            "baseline": "mean",
            "advantage_eps": eps,
            "advantage_normalizer": "std",
        }
        return observe_2026(function, inputs)["advantages"]

    return call


def observe_2026(function: Function, inputs: Inputs) -> Seen:
    """Advantages of the 2026 function."""
    parts = answer_parts(function(**given(inputs)), ("advantages", "metadata"))
    return {"advantages": tensor(parts[0], "advantages")}


def _cases_2026() -> list[CallCase]:
    cases = []
    for baseline in ("mean", "none"):
        for normalizer in ("std", "none", "mean"):
            values = POSITIVE if normalizer == "mean" else ROUND
            for size, eps in ((3, 0.5), (4, 0.25), (4, 1e-3), (2, 0.125), (6, 0.5)):
                inputs: Inputs = {
                    "raw_rewards": torch.tensor(values),
                    "group_size": size,
                    "baseline": baseline,
                    "advantage_eps": eps,
                    "advantage_normalizer": normalizer,
                }
                about = f"baseline={baseline}, advantage_normalizer={normalizer}"
                cases.append(CallCase(inputs, branch=f"{baseline}/{normalizer}", about=about))
    equal = {
        "raw_rewards": torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0]),
        "group_size": 3,
        "baseline": "mean",
        "advantage_eps": 1e-6,
        "advantage_normalizer": "std",
    }
    by_mean = {**equal, "advantage_normalizer": "mean"}
    return [
        *cases,
        CallCase(equal, branch="mean/std", about="all rewards equal"),
        CallCase(by_mean, branch="mean/mean", about="all rewards equal"),
    ]


def _wrong_2026(knobs: Knobs) -> Function:
    def wrong(
        raw_rewards: Tensor, group_size: int, baseline: str, advantage_eps: float, advantage_normalizer: str
    ) -> tuple[Tensor, dict[str, float]]:
        return advantages(raw_rewards, group_size, baseline, advantage_eps, advantage_normalizer, knobs), {}

    return wrong


def _smaller_rewards(inputs: Inputs) -> Iterator[Inputs]:
    rewards, size = inputs["raw_rewards"], inputs["group_size"]
    yield from smaller_tensors(inputs, ["raw_rewards"], (), ["raw_rewards"], group=size)
    if size > 2:
        kept = without(inputs, ["raw_rewards"], range(size - 1, len(rewards), size), 0)
        yield {**kept, "group_size": size - 1}
    for place, value in enumerate(rewards.tolist()):
        for simple in (0.0, 1.0):
            if value not in (0.0, 1.0):
                changed = rewards.clone()
                changed[place] = simple
                yield {**inputs, "raw_rewards": changed}


def _defaults_2026(function: Function) -> Iterator[Any]:
    """A property: left out, the options are those of the handout."""
    defaults: set[str] = getattr(function, "defaults", set())
    if not {"baseline", "advantage_eps", "advantage_normalizer"} <= defaults:
        return
    rewards = torch.tensor([0.0, 1.0, 0.5, 1.0, 1.0, 0.0])
    inputs = {"raw_rewards": rewards, "group_size": 3}
    try:
        got = observe_2026(function, inputs)["advantages"]
    except Fault:
        return
    ours = observe_2026(cs336_2026.compute_group_normalized_rewards, inputs)["advantages"]
    if got.shape != ours.shape or bool(places(got, ours).any()):
        kind = "with its options left out, it takes other defaults than the handout's"
        shown = {name: str(value.tolist() if isinstance(value, Tensor) else value) for name, value in inputs.items()}
        yield Bug(
            "compute_group_normalized_rewards",
            kind,
            "the defaults in the def line",
            shown,
            f"advantages {got.tolist()}",
            f"advantages {ours.tolist()}",
        )


GROUP_2026 = Subject(
    "compute_group_normalized_rewards",
    "cs336_2026",
    ("raw_rewards", "group_size", "baseline", "advantage_eps", "advantage_normalizer"),
    cs336_2026.compute_group_normalized_rewards,
    _cases_2026,
    observe_2026,
    _wrong_2026,
    KNOBS,
    _smaller_rewards,
    properties=(_defaults_2026,),
    hints=hints(_caller_2026),
)
ADVANTAGES = (GROUP_2026,)
