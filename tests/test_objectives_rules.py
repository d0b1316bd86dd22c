"""Rules between settings, and the named objectives."""

import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import rlreason
from rlreason.objectives.advantages import compute_group_advantages
from rlreason.objectives.aggregation import aggregate_loss
from rlreason.objectives.card import objective_card
from rlreason.objectives.losses import LOSSES
from rlreason.objectives.objective import LengthNormConfig, LossConfig, Objective
from rlreason.objectives.published import NAMED, PUBLISHED, check_objective

GRPO = NAMED["grpo"]
REINFORCE = NAMED["reinforce"]


def test_losses_rules_and_card_are_readable_without_torch():
    program = "import rlreason.objectives.card, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(rlreason.__file__).parents[1])


def test_every_published_objective_breaks_no_rule():
    assert len(NAMED) == 10
    for published in PUBLISHED:
        assert check_objective(published.objective) == [], published
    assert check_objective(Objective()) == []


@pytest.mark.parametrize("name", NAMED)
def test_every_named_objective_computes_a_finite_gradient(name):
    o = NAMED[name]
    policy = torch.full((4, 3), -0.7, dtype=torch.float64, requires_grad=True)
    rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    mask = torch.ones(4, 3).bool()
    advantages = compute_group_advantages(rewards, ids, baseline=o.baseline, std_norm=o.std_norm)
    loss, _ = LOSSES[o.loss.loss_type](advantages[:, None], policy, policy.detach(), mask, **o.loss.numbers())
    aggregate_loss(loss, mask, o.length_norm.kind, n_sequences=4, n_tokens=12, constant=3).backward()
    assert policy.grad.isfinite().all()
    assert (policy.grad[0] < 0).all()  # the only success of its group is pulled up
    assert policy.grad[2:].any() == (name == "rft")  # equal rewards teach only without a baseline


def flat(objective):
    """The settings of an objective under their own names, those of the groups inside it too."""
    groups = asdict(objective)
    numbers = {"cliprange_low": None, "cliprange_high": None, "ratio_cap": None} | objective.loss.numbers()
    return groups | {"loss": objective.loss.loss_type, "length_norm": groups["length_norm"]["kind"]} | numbers


def differing(name, other):
    ours, theirs = flat(NAMED[name]), flat(NAMED[other])
    return {key for key in ours if ours[key] != theirs[key]}


def test_named_objectives_differ_in_exactly_the_axes_of_the_papers():
    assert differing("grpo", "grpo_constant") == {"length_norm"}
    assert differing("grpo_constant", "dr_grpo") == {"std_norm"}
    assert differing("grpo", "gspo") == {"loss", "cliprange_low", "cliprange_high"}
    assert differing("grpo", "dapo") == {"cliprange_high", "length_norm", "overlong", "zero_variance"}
    assert differing("reinforce", "rloo") == {"baseline"}
    assert differing("reinforce", "maxrl") == {"std_norm"}
    assert differing("reinforce", "rft") == {"baseline", "loss"}
    clip = {"cliprange_low", "cliprange_high"}
    assert differing("grpo", "cispo") == {"loss", "ratio_cap", "length_norm"} | clip
    assert differing("dr_grpo", "reinforce") == {"loss"} | clip


#: (objective, changes that break one rule, how the one line starts, a cure it names)
VIOLATIONS = [
    (GRPO, {"loss_type": "ppo"}, "loss_type=ppo: no such option", "grpo_clip"),
    (GRPO, {"cliprange_low": None}, "loss.cliprange_low=null: loss=grpo_clip needs", "leave this out"),
    (NAMED["cispo"], {"ratio_cap": 0.28}, "loss.ratio_cap=0.28", "5.0"),
    (GRPO, {"cliprange_low": 0.0}, "loss.cliprange_low=0.0", "above 0"),
    (GRPO, {"cliprange_low": 1.2}, "loss.cliprange_low=1.2", "at most 1"),
    (GRPO, {"dual_clip": 1.2}, "loss.dual_clip=1.2", "3.0"),
    (NAMED["rft"], {"baseline": "mean"}, "loss_type=no_baseline with baseline=mean", "baseline=none"),
    (REINFORCE, {"baseline": "none"}, "baseline=none: loss_type=reinforce_with_baseline", "no_baseline"),
    (GRPO, {"baseline": "none"}, "std_norm=group_std with baseline=none", "baseline=mean"),
    (NAMED["maxrl"], {"overlong": "penalty"}, "std_norm=group_mean with overlong=penalty", "none"),
    (NAMED["maxrl"], {"kl_placement": "reward", "kl_coef": 0.1}, "std_norm=group_mean with kl_placement=", "group_std"),
    (GRPO, {"advantage_eps": 0.0}, "advantage_eps=0.0", "1e-6"),
    (NAMED["gspo"], {"length_norm": "token"}, "length_norm=token with loss_type=gspo", "masked_mean"),
    (GRPO, {"kl_coef": 0.04}, "kl_coef=0.04: kl_placement=none", "kl_placement=loss"),
    (GRPO, {"kl_placement": "loss"}, "kl_coef=0.0: kl_placement=loss", "kl_placement=none"),
    (GRPO, {"kl_placement": "reward", "kl_coef": -1}, "kl_coef=-1: kl_placement=reward", "above 0"),
    (GRPO, {"kl_placement": "loss", "kl_coef": 0.1, "kl_estimator": "k1"}, "kl_estimator=k1", "k2"),
    (NAMED["rft"], {"zero_variance": "skip"}, "zero_variance=skip with baseline=none", "keep"),
    (GRPO, {"mismatch_cap": 2.0}, "mismatch_cap=2.0: mismatch=none", "mismatch=truncate"),
    (GRPO, {"mismatch": "truncate"}, "mismatch_cap=None: mismatch=truncate", "2.0"),
]  # fmt: skip


def changed(objective, changes):
    """The objective with settings replaced, those of its loss and its length norm under their own names."""
    loss, norm = dict(vars(objective.loss)), dict(vars(objective.length_norm))
    rest = {}
    for key, value in changes.items():
        if key == "length_norm":
            norm["kind"] = value
        else:
            (loss if key in loss else norm if key in norm else rest)[key] = value
    return replace(objective, loss=LossConfig(**loss), length_norm=LengthNormConfig(**norm), **rest)


@pytest.mark.parametrize(("objective", "changes", "start", "cure"), VIOLATIONS)
def test_every_rule_names_setting_value_and_cure_in_one_line(objective, changes, start, cure):
    (line,) = check_objective(changed(objective, changes))
    assert line.startswith(start)
    assert cure in line.removeprefix(start)
    assert "\n" not in line
    with pytest.raises(ValueError, match="no card"):
        objective_card(changed(objective, changes))
