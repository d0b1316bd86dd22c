"""Stanford CS336, assignment 5 of spring 2025: SFT, expert iteration and GRPO on MATH."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from rlreason.courses.shared import (
    consecutive_groups,
    evaluate_vllm,
    get_response_log_probs,
    init_vllm,
    load_policy_into_vllm_instance,
    log_generations,
    required,
    score_rollouts,
    tokenize_prompt_and_output,
)
from rlreason.objectives.advantages import compute_group_advantages
from rlreason.objectives.aggregation import aggregate_loss, masked_mean, masked_normalize
from rlreason.objectives.losses import LOSSES
from rlreason.objectives.terms import compute_entropy

__all__ = [
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "evaluate_vllm",
    "get_response_log_probs",
    "grpo_microbatch_train_step",
    "init_vllm",
    "load_policy_into_vllm_instance",
    "log_generations",
    "masked_mean",
    "masked_normalize",
    "sft_microbatch_train_step",
    "tokenize_prompt_and_output",
]

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"]


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call backward on the negative log-likelihood: masked sum / normalize_constant, mean over rows.

    (batch, seq) log-probabilities and mask -> the scalar loss / `gradient_accumulation_steps`, and metadata.
    """
    loss = aggregate_loss(
        -policy_log_probs,
        response_mask,
        "constant",
        n_sequences=len(response_mask) * gradient_accumulation_steps,
        n_tokens=0,
        constant=normalize_constant,
    )
    loss.backward()
    return loss.detach(), {"response_tokens": response_mask.sum()}


def compute_group_normalized_rewards(
    reward_fn: Callable[[str, str], dict[str, float]],
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return (advantages (n,), raw rewards (n,), metadata); groups are consecutive runs of `group_size`."""
    rewards, metadata = score_rollouts(reward_fn, rollout_responses, repeated_ground_truths)
    advantages = compute_group_advantages(
        rewards,
        consecutive_groups(len(rewards), group_size),
        baseline="mean",
        std_norm="group_std" if normalize_by_std else "none",
        advantage_eps=advantage_eps,
    )
    return advantages, rewards, metadata


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """Return -A log pi: (batch, 1), (batch, seq) -> (batch, seq)."""
    return LOSSES["reinforce_with_baseline"](raw_rewards_or_advantages, policy_log_probs, None, None)[0]


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate per token, and its per-token `ratio` and `clipped`."""
    everywhere = torch.ones_like(policy_log_probs, dtype=torch.bool)
    return LOSSES["grpo_clip"](
        advantages,
        policy_log_probs,
        old_log_probs,
        everywhere,
        cliprange_low=cliprange,
        cliprange_high=cliprange,
    )


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss (batch, seq) of `loss_type`, and metadata.

    `no_baseline` uses the raw rewards, the others the advantages. `ValueError` if an argument it needs is None.
    """
    if loss_type == "no_baseline":
        rewards = required(raw_rewards, "raw_rewards", loss_type)
        return compute_naive_policy_gradient_loss(rewards, policy_log_probs), {}
    advantages = required(advantages, "advantages", loss_type)
    if loss_type == "reinforce_with_baseline":
        return compute_naive_policy_gradient_loss(advantages, policy_log_probs), {}
    old_log_probs = required(old_log_probs, "old_log_probs", loss_type)
    if loss_type == "grpo_no_clip":
        everywhere = torch.ones_like(policy_log_probs, dtype=torch.bool)
        return LOSSES["grpo_no_clip"](advantages, policy_log_probs, old_log_probs, everywhere)
    if loss_type == "grpo_clip":
        cliprange = required(cliprange, "cliprange", loss_type)
        return compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)
    raise ValueError(f"loss_type={loss_type!r}: choose one of {get_args(LossType)}")


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call backward on the mean per response, mean over the rows, / `gradient_accumulation_steps`.

    Returns that loss, and the per-token statistics averaged over response tokens.
    """
    per_token_loss, stats = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    loss = aggregate_loss(
        per_token_loss,
        response_mask,
        "masked_mean",
        n_sequences=len(response_mask) * gradient_accumulation_steps,
        n_tokens=0,
        constant=None,
    )
    loss.backward()
    means = {name: masked_mean(values, response_mask, empty="zero") for name, values in stats.items()}
    return loss.detach(), means
