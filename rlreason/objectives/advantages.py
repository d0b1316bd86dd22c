"""From rewards to advantages: length rule, baseline and normaliser within groups, and groups without signal."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from rlreason.objectives.terms import subtract_kl_from_rewards

if TYPE_CHECKING:
    from torch import Tensor

    from rlreason.objectives.objective import Objective


class Groups(NamedTuple):
    """The group of each sample. `group_of` (n,) int64 in [0, g), `sizes` (g,) int64."""

    group_of: Tensor
    sizes: Tensor


def group_by_id(group_ids: Tensor) -> Groups:
    """Number the groups 0..g-1 and count their members; ids (n,) may be any integers in any order."""
    _, group_of, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    return Groups(group_of, sizes)


def sums(values: Tensor, groups: Groups) -> Tensor:
    """Sum each group. (n,) -> (g,)"""
    return values.new_zeros(len(groups.sizes)).index_add(0, groups.group_of, values)


def in_groups_with_any(values: Tensor, group_ids: Tensor) -> Tensor:
    """Select samples of groups with any non-zero value. (n,), (n,) int64 -> (n,) bool"""
    groups = group_by_id(group_ids)
    return sums((values != 0).float(), groups)[groups.group_of] > 0


def soft_overlong_penalty(lengths: Tensor, max_length: int, cache_length: int) -> Tensor:
    """DAPO's soft punishment in [-1, 0] (arXiv 2503.14476, equation 13). lengths (n,) in tokens -> (n,) float

    0 up to max_length - cache_length tokens, then falling linearly to -1 at max_length, and -1 beyond.

    >>> import torch
    >>> soft_overlong_penalty(torch.tensor([70, 80, 90, 100, 120]), max_length=100, cache_length=20)
    tensor([ 0.0000,  0.0000, -0.5000, -1.0000, -1.0000])
    """
    if not 0 < cache_length <= max_length:
        rule = "must be above 0 and at most the longest response"
        raise ValueError(f"cache_length={cache_length} with max_length={max_length}: {rule}; a fifth of it is usual")
    return ((max_length - cache_length - lengths) / cache_length).clamp(-1.0, 0.0)


def _raised(rewards: Tensor, groups: Groups) -> Tensor:
    """r - the group's smallest reward, so that equal rewards give exact zeros. (n,) -> (n,)"""
    lowest = rewards.new_zeros(len(groups.sizes))
    lowest = lowest.scatter_reduce(0, groups.group_of, rewards, reduce="amin", include_self=False)
    return rewards - lowest[groups.group_of]


def mean_baseline(rewards: Tensor, groups: Groups) -> Tensor:
    """r - mean(group), exactly 0 if all rewards of a group are equal. (n,) -> (n,). GRPO, arXiv 2402.03300, 4.1.

    The mean of equal floats may differ from them in the last bit, and dividing that by a tiny std would turn
    rounding into a gradient.
    """
    raised = _raised(rewards, groups)
    return raised - (sums(raised, groups) / groups.sizes)[groups.group_of]


def leave_one_out_baseline(rewards: Tensor, groups: Groups) -> Tensor:
    """r_i - mean of the *other* rewards = G / (G - 1) * (r_i - mean). (n,) -> (n,). RLOO, arXiv 2402.14740.

    A group of one has no others to compare with and gives 0.
    """
    size = groups.sizes.to(rewards.dtype)
    return mean_baseline(rewards, groups) * (size / (size - 1).clamp(min=1))[groups.group_of]


def opo_baseline(rewards: Tensor, groups: Groups, lengths: Tensor) -> Tensor:
    """r_i - sum_j l_j r_j / sum_j l_j over the group, l the lengths in tokens. (n,) -> (n,). OPO, arXiv 2505.23585.

    The baseline of least variance where the squared norm of a response's gradient grows with its length. Measured from
    the group's lowest reward, so that equal rewards give exactly 0.
    """
    weights = lengths.to(rewards.dtype)
    raised = _raised(rewards, groups)
    baseline = sums(weights * raised, groups) / sums(weights, groups).clamp(min=1)
    return raised - baseline[groups.group_of]


def group_std_divisor(rewards: Tensor, groups: Groups, advantage_eps: float) -> Tensor:
    """std(group) + eps, unbiased (divisor G - 1; a group of one has std 0). (n,) -> (n,)"""
    squares = sums(mean_baseline(rewards, groups) ** 2, groups)
    return (squares / (groups.sizes - 1).clamp(min=1)).sqrt()[groups.group_of] + advantage_eps


def batch_std_divisor(rewards: Tensor, groups: Groups, advantage_eps: float) -> Tensor:
    """std of all rewards passed in (around their mean, unbiased) + eps. (n,) -> (n,). arXiv 2508.08221."""
    return group_std_divisor(rewards, group_by_id(groups.group_of.new_zeros(groups.group_of.shape)), advantage_eps)


def group_mean_divisor(rewards: Tensor, groups: Groups, advantage_eps: float) -> Tensor:
    """mean(group) + eps, for rewards that are never negative. (n,) -> (n,). MaxRL, arXiv 2602.02710.

    A group with only zero rewards has advantage 0 / eps = 0 under the mean baseline.
    """
    return (sums(rewards, groups) / groups.sizes)[groups.group_of] + advantage_eps


class Comparison(NamedTuple):
    """A baseline or a normaliser with its formula.

    A baseline is function(rewards (n,), groups) -> rewards minus baseline (n,); one with a third parameter `lengths`
    also gets the responses' tokens, (n,) int. A normaliser is function(rewards (n,), groups, advantage_eps) -> divisor
    (n,).
    """

    function: Callable[..., Tensor]
    plain: str = ""
    latex: str = ""
    note: str = ""  # what the card says of it
    notes: tuple[str, ...] = ()  # how libraries or papers of that name differ


BASELINES = {
    "mean": Comparison(mean_baseline, "r - mean(group)", r"r_i - \bar r_{g}"),
    "none": Comparison(lambda rewards, groups: rewards, "r", "r_i"),
    "leave_one_out": Comparison(
        leave_one_out_baseline,
        "r - mean(others of the group)",
        r"r_i - \frac{1}{G-1}\sum_{j \ne i} r_j",
        notes=(
            "RLOO: leave-one-out is G/(G-1) times the mean form, so with groups of one size it differs "
            "from baseline=mean by a constant factor. The paper adds KL to the reward.",
        ),
    ),
    "opo": Comparison(
        opo_baseline,
        "r - sum(length x r) / sum(length) of the group",
        r"r_i - \frac{\sum_j |y_j|\, r_j}{\sum_j |y_j|}",
        notes=("OPO: the paper divides by no normaliser, which is std_norm=none here.",),
    ),
}
STD_NORMS = {
    "group_std": Comparison(
        group_std_divisor, "std(group)", r"\operatorname{std}_{g}(r)", "unbiased std (ddof 1) within the group"
    ),
    # 1: eps is not added without a division (Dr. GRPO, arXiv 2503.20783)
    "none": Comparison(lambda rewards, groups, advantage_eps: rewards.new_ones(rewards.shape)),
    "batch_std": Comparison(
        batch_std_divisor, "std(batch)", r"\operatorname{std}(r)", "unbiased std (ddof 1) over the rollout batch"
    ),
    "group_mean": Comparison(
        group_mean_divisor,
        "mean(group)",
        r"\bar r_{g}",
        "mean of the group's rewards, which must not be negative",
        notes=("MaxRL: eps is added to the mean here, so a group without any reward gives 0.",),
    ),
}


def compute_group_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: str = "mean",
    std_norm: str = "group_std",
    advantage_eps: float = 1e-6,
    lengths: Tensor | None = None,
) -> Tensor:
    """A = baseline(r) / divisor(r), per group id. rewards (n,), group_ids (n,) int64, lengths (n,) int -> (n,)

    >>> import torch
    >>> rewards = torch.tensor([1.0, 0.0, 0.0, 5.0])
    >>> ids = torch.tensor([7, 7, 7, 3])
    >>> compute_group_advantages(rewards, ids, std_norm="none")
    tensor([ 0.6667, -0.3333, -0.3333,  0.0000])
    >>> compute_group_advantages(rewards, ids)
    tensor([ 1.1547, -0.5773, -0.5773,  0.0000])
    """
    if rewards.ndim != 1 or rewards.shape != group_ids.shape:
        shapes = f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)}"
        raise ValueError(f"{shapes} must be two vectors of one length: give each reward its group's id")
    if not rewards.is_floating_point():
        rewards = rewards.float()
    groups, function = group_by_id(group_ids), BASELINES[baseline].function
    more = {"lengths": lengths} if "lengths" in inspect.signature(function).parameters else {}
    if more and lengths is None:
        raise ValueError(f"baseline={baseline} weighs responses by their lengths: give lengths, in tokens")
    return function(rewards, groups, **more) / STD_NORMS[std_norm].function(rewards, groups, advantage_eps)


def assign_advantages(
    rewards: Tensor,
    group_ids: Tensor,
    lengths: Tensor,
    truncated: Tensor,
    objective: Objective,
    kl: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages (n,), kept (n,) bool, live (n,) bool) from rewards (n,), ids (n,) int64, lengths (n,) int,
    truncated (n,) bool.

    `kl` (n, seq) is the sampling policy's KL estimate per token, for KL in the reward. A sample that is not kept has no
    loss but did count in its group's baseline. A sample is live if rewards alone make any advantage of its group
    non-zero: a KL term differs between responses and would make every group seem live.

    >>> import torch
    >>> from rlreason.objectives.objective import Objective
    >>> rewards, ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    >>> objective = Objective(std_norm="none", zero_variance="skip")
    >>> lengths, truncated = torch.full((4,), 5), torch.zeros(4).bool()
    >>> advantages, kept, live = assign_advantages(rewards, ids, lengths, truncated, objective)
    >>> advantages, kept, live.equal(kept)
    (tensor([ 0.5000, -0.5000,  0.0000,  0.0000]), tensor([ True,  True, False, False]), True)
    """
    o = objective
    shaped, kept = rewards, truncated.new_ones(truncated.shape)
    if o.overlong == "penalty":
        shaped = rewards + soft_overlong_penalty(lengths, **o.overlong_limits).to(rewards.dtype)
    elif o.overlong == "mask":  # being cut says little about the quality of the text
        kept = ~truncated
    compare = partial(
        compute_group_advantages,
        group_ids=group_ids,
        baseline=o.baseline,
        std_norm=o.std_norm,
        advantage_eps=0.0 if o.std_norm == "none" else o.advantage_eps,
        lengths=lengths,
    )
    advantages = compare(shaped)
    live = in_groups_with_any(advantages, group_ids)
    if o.zero_variance == "skip":
        kept = kept & live
    if o.kl_placement == "reward" and kl is not None:
        advantages = compare(subtract_kl_from_rewards(shaped, kl, o.kl_coef))
    return advantages, kept, live
