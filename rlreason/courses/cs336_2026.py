"""Stanford CS336, assignment 5 of spring 2026: policy gradients on GSM8K, from REINFORCE to GSPO and MaxRL."""

from collections import Counter
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlreason.courses.cs336_2025 import (
    RewardFn,
    consecutive_groups,
    evaluate_vllm,
    get_response_log_probs,
    init_vllm,
    load_policy_into_vllm_instance,
    log_generations,
    required,
    score_rollouts,
    token_loss,
    tokenize_prompt_and_output,
)
from rlreason.objectives.advantages import compute_group_advantages
from rlreason.objectives.aggregation import aggregate_loss, masked_normalize
from rlreason.objectives.terms import compute_entropy

__all__ = [
    "aggregate_loss_across_microbatch",
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_policy_gradient_loss",
    "compute_rollout_rewards",
    "evaluate_vllm",
    "get_response_log_probs",
    "grpo_train_step",
    "init_vllm",
    "load_policy_into_vllm_instance",
    "log_generations",
    "tokenize_prompt_and_output",
]

Method = Literal["none", "noclip", "grpo", "gspo"]
LossNormalization = Literal["sequence", "constant"]
_LOSSES = {"none": "reinforce_with_baseline", "noclip": "grpo_no_clip", "grpo": "grpo_clip", "gspo": "gspo"}
_STD_NORM = {"std": "group_std", "none": "none", "mean": "group_mean"}


def compute_rollout_rewards(
    reward_fn: RewardFn, rollout_responses: list[str], repeated_ground_truths: list[str]
) -> tuple[Tensor, dict[str, float]]:
    """Return the total rewards (n,), and the means of total, format and answer reward."""
    return score_rollouts(reward_fn, rollout_responses, repeated_ground_truths)


def compute_group_normalized_rewards(
    raw_rewards: Tensor,
    group_size: int,
    baseline: Literal["mean", "none"] = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: Literal["std", "none", "mean"] = "std",
) -> tuple[Tensor, dict[str, float]]:
    """Return (advantages (n,), statistics); groups are consecutive runs of `group_size` rewards."""
    advantages = compute_group_advantages(
        raw_rewards,
        consecutive_groups(len(raw_rewards), group_size).to(raw_rewards.device),
        baseline=baseline,
        std_norm=_STD_NORM[advantage_normalizer],
        advantage_eps=advantage_eps,
    )
    return advantages, {"nonzero_advantage_share": (advantages != 0).float().mean().item()}


def compute_policy_gradient_loss(
    raw_rewards_or_advantages: Tensor,
    policy_log_probs: Tensor,
    importance_reweighting_method: Method = "none",
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss (batch, seq), and per-token statistics.

    Rewards or advantages are (batch,) or (batch, 1). Only `gspo` reads `response_mask`: its ratio is a mean over
    response tokens.
    """
    method, mask = importance_reweighting_method, None
    if method not in _LOSSES:
        raise ValueError(f"importance_reweighting_method={method!r}: choose one of {get_args(Method)}")
    if method == "gspo":
        mask = required(response_mask, "response_mask", method)
    advantages = raw_rewards_or_advantages.reshape(-1, 1)
    return token_loss(_LOSSES[method], advantages, policy_log_probs, old_log_probs, cliprange, mask)


def aggregate_loss_across_microbatch(
    per_token_policy_gradient_loss: Tensor,
    mask: Tensor,
    loss_normalization: LossNormalization = "sequence",
    normalization_constant: int | None = None,
) -> Tensor:
    """Return the mean of the rows' means (`sequence`), or masked sum / normalization_constant (`constant`)."""
    return _part_of_batch_loss(
        per_token_policy_gradient_loss, mask, loss_normalization, normalization_constant, n_rows=len(mask)
    )


def _part_of_batch_loss(
    per_token_loss: Tensor,
    mask: Tensor,
    loss_normalization: str,
    normalization_constant: int | None,
    n_rows: int,
) -> Tensor:
    """Return the share of these rows in the loss of a batch of `n_rows` rows."""
    choices = {"sequence": ("masked_mean", n_rows), "constant": ("constant", 1)}
    if loss_normalization not in choices:
        raise ValueError(f"loss_normalization={loss_normalization!r}: choose one of {list(choices)}")
    length_norm, n = choices[loss_normalization]
    constant = normalization_constant
    return aggregate_loss(per_token_loss, mask, length_norm, n_sequences=n, n_tokens=0, constant=constant)


def grpo_train_step(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    optimizer: torch.optim.Optimizer,
    gradient_accumulation_steps: int,
    max_grad_norm: float | None,
    reward_fn: RewardFn,
    repeated_prompts: list[str],
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    baseline: Literal["mean", "none"] = "mean",
    advantage_eps: float = 1e-6,
    advantage_normalizer: Literal["std", "none", "mean"] = "std",
    importance_reweighting_method: Method = "none",
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    loss_normalization: LossNormalization = "sequence",
    normalization_constant: int | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Take one optimizer step on one batch of scored rollouts; return the loss before the step, and metadata.

    `old_log_probs` has the width of the whole batch's `input_ids`. The gradient does not depend on
    `gradient_accumulation_steps`, is clipped as a whole, and is None for every parameter afterwards.
    """
    device = next(model.parameters()).device
    batch = tokenize_prompt_and_output(repeated_prompts, rollout_responses, tokenizer)
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    rewards, metadata = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
    advantages, advantage_stats = compute_group_normalized_rewards(
        rewards.to(device), group_size, baseline, advantage_eps, advantage_normalizer
    )
    n_rows, loss, stats, n_tokens = len(advantages), torch.zeros((), device=device), Counter[str](), 0
    live = advantages.nonzero().flatten()  # the others add nothing to the gradient and need no forward pass
    if not len(live):  # the optimizer sees a gradient of zero rather than none
        live = torch.arange(n_rows, device=device)
    for rows in live.chunk(gradient_accumulation_steps):
        mask = batch["response_mask"][rows]
        scored = get_response_log_probs(
            model, batch["input_ids"][rows], batch["labels"][rows], return_token_entropy=True
        )
        per_token_loss, token_stats = compute_policy_gradient_loss(
            advantages[rows],
            scored["log_probs"],
            importance_reweighting_method,
            None if old_log_probs is None else old_log_probs.to(device)[rows],
            cliprange,
            mask,
        )
        part = _part_of_batch_loss(per_token_loss, mask, loss_normalization, normalization_constant, n_rows)
        part.backward()
        loss += part.detach()
        token_stats["token_entropy"] = scored["token_entropy"].detach()
        stats.update({name: masked_normalize(values, mask, 1).item() for name, values in token_stats.items()})
        n_tokens += int(mask.sum())
    grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm or float("inf"))
    optimizer.step()
    model.zero_grad(set_to_none=True)
    averages = {name: total / max(n_tokens, 1) for name, total in stats.items()}
    return loss, metadata | advantage_stats | averages | {"loss": loss.item(), "grad_norm": grad_norm.item()}
