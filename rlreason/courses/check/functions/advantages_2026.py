"""The advantages of 2026: groups, baselines and normalisers."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlreason.courses import cs336_2026
from rlreason.courses.check.calling import answer_parts, tensor
from rlreason.courses.check.engine import places, smaller_tensors, without
from rlreason.courses.check.functions.advantage_hints import hints
from rlreason.courses.check.functions.rewards import POSITIVE, ROUND
from rlreason.courses.check.functions.tensors import given
from rlreason.courses.check.subject import Bug, CallCase, Fault, Function, Inputs, Knobs, Seen, Subject
from rlreason.courses.check.wrong.advantages import KNOBS, advantages


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
SUBJECTS = (GROUP_2026,)
