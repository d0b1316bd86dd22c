"""Every number that can be set has a range: within it a run starts, outside it is refused in one line."""

import functools
import itertools
import math
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest

from rlreason.config.groups import GradingConfig
from rlreason.config.leaves import leaves, metadata_of
from rlreason.config.rules import broken_rules
from rlreason.config.store import SCHEMAS, typed
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from tests.some import some

CLOUD = "model=smollm2_135m"
#: Words that compose, and between them have every setting there is.
RUNS = {
    "clip": ["loss=grpo_clip", "loss.dual_clip=3", "overlong=penalty", "length_norm=constant", "kl_placement=loss",
             "kl_coef=0.1", "mismatch=truncate", "mismatch_cap=2", "max_resampling_rounds=1", "rollout=vllm"],
    "ei": ["algorithm=ei"],
    "sft": ["algorithm=sft", CLOUD, "model.lora.rank=8", "data.n_validation=9", "data.validation=null"],
    "best_of_n": ["algorithm=best_of_n"],
    "countdown": [CLOUD, "data=countdown"],
    "gym": [CLOUD, "data=reasoning_gym", "data.task=gcd"],
}  # fmt: skip
EXTREMES = (0, -1, 1, 10**6, 10**9 + 1, 10**12, 2**63, 10**20)
FRACTIONS = (0.0, -1.0, 1e-9, 1e-320, 0.5, 1.0, 1.5, 1e12, 1e38, 1e308, math.nan, math.inf, -math.inf)


def numeric(annotation: Any) -> set[type]:
    """The kinds of numbers in an annotation: int, float, or none of them."""
    inner = get_args(annotation)
    return set().union(*map(numeric, inner)) if inner else {annotation} & {int, float}


def numbers_of(settings: Any, prefix: str = "") -> dict[str, set[type]]:
    """Key -> kinds of numbers that it takes, of every setting that takes any."""
    hints, found = get_type_hints(type(settings)), dict[str, set[type]]()
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            found |= numbers_of(value, f"{prefix}{field.name}.")
        elif kinds := numeric(hints[field.name]):
            found[f"{prefix}{field.name}"] = kinds
    return found


def test_every_number_has_a_range():
    for group, nodes in SCHEMAS.items():
        prefix = "" if group == "schema" else f"{group.removeprefix('schema/')}."
        for node in nodes.values():
            ranged = {leaf.key for leaf in leaves(node(), prefix) if "range" in leaf.metadata}
            assert sorted(numbers_of(node(), prefix).keys() - ranged) == [], "say number(...) on these fields"


@pytest.mark.parametrize("name", some(RUNS))
def test_an_extreme_value_is_accepted_or_one_line(composed, gsm8k, name):
    """Whatever number is given, checking ends at once and says at most one line on the setting itself.

    What is not finite is refused by its range: no comparison of another rule can be trusted to see it.
    """
    run = typed(composed(*RUNS[name], *([f"data.path={gsm8k}"] if name == "sft" else [])))
    ranges = {leaf.key: leaf.metadata.get("range") for leaf in leaves(run)}
    for key, kinds in numbers_of(run).items():
        *path, last = key.split(".")
        holder = functools.reduce(getattr, path, run)
        before = getattr(holder, last)
        for number in (*map(float, EXTREMES), *FRACTIONS) if float in kinds else EXTREMES:
            setattr(holder, last, [number, 0.9] if isinstance(before, list) else number)
            bad, out = broken_rules(run), ranges[key].broken_by(number)
            assert all(len(line.splitlines()) == 1 and len(line) < 400 for line in bad)
            about = [line for line in bad if line.startswith((f"{key}=", f"{last}="))]
            assert not out or (len(about) == 1 and out in about[0]), (key, number, bad)
            held = math.isfinite(number) if isinstance(number, float) else abs(number) < 2**63
            assert held or out, (key, number)
        setattr(holder, last, before)
    assert broken_rules(run) == []


def test_the_grader_and_the_config_have_the_same_ranges():
    """What the config accepts the grader takes, and what it refuses the grader refuses."""
    names = ("timeout_s", "start_timeout_s", "rel_tol", "workers", "memory_mb")
    for name, number in itertools.product(names, (0, 1, 0.05, 0.5, 50, 256, 10**6, 10**9)):
        refused = bool(metadata_of(GradingConfig, name)["range"].broken_by(number))
        with pytest.raises(ConfigError, match=rf"grading\.{name}={number}") if refused else nullcontext():
            Grader(GradingConfig(**{name: number}))
