"""The 2026 handout's functions in plain PyTorch, without rlreason: `tests/test_check.py` plants bugs in them."""
# as a student writes it

import torch

from tests.right_functions_2025 import compute_entropy, get_response_log_probs, tokenize_prompt_and_output

__all__ = ["compute_entropy", "get_response_log_probs", "tokenize_prompt_and_output"]


def compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths):
    scores = list(map(reward_fn, rollout_responses, repeated_ground_truths))
    rewards = torch.tensor([score["reward"] for score in scores], dtype=torch.float64)
    return rewards, {"reward_mean": rewards.mean().item()}


def compute_group_normalized_rewards(
    raw_rewards, group_size, baseline="mean", advantage_eps=1e-6, advantage_normalizer="std"
):
    groups = raw_rewards.reshape(-1, group_size)
    mean = groups.mean(dim=1, keepdim=True)
    advantages = groups - mean if baseline == "mean" else groups.clone()
    if advantage_normalizer == "std":
        advantages = advantages / (groups.std(dim=1, keepdim=True) + advantage_eps)
    elif advantage_normalizer == "mean":
        advantages = advantages / (mean + advantage_eps)
    return advantages.reshape(-1), {}


def compute_policy_gradient_loss(
    raw_rewards_or_advantages, policy_log_probs, importance_reweighting_method="none", old_log_probs=None,
    cliprange=None, response_mask=None,
):  # fmt: skip
    a = raw_rewards_or_advantages.reshape(-1)[:, None]
    if importance_reweighting_method == "none":
        return torch.einsum("bi,bt->bt", -a, policy_log_probs), {}
    log_ratio = policy_log_probs - old_log_probs
    if importance_reweighting_method == "gspo":
        m = response_mask.to(log_ratio.dtype)
        log_ratio = ((log_ratio * m).sum(1) / m.sum(1)).unsqueeze(1).repeat(1, log_ratio.shape[1])
    ratio = log_ratio.exp()
    if importance_reweighting_method == "noclip":
        return -a * ratio, {}
    bounded = torch.clip(ratio, 1 - cliprange, 1 + cliprange)
    loss = torch.maximum(-a * ratio, -a * bounded)
    return loss, {"clipped": (a * bounded < a * ratio).float()}


def aggregate_loss_across_microbatch(
    per_token_policy_gradient_loss, mask, loss_normalization="sequence", normalization_constant=None
):
    kept = per_token_policy_gradient_loss * mask
    if loss_normalization == "constant":
        return kept.sum() / normalization_constant
    return (kept.sum(dim=-1) / mask.sum(dim=-1)).mean()


def grpo_train_step(
    model, tokenizer, optimizer, gradient_accumulation_steps, max_grad_norm, reward_fn, repeated_prompts,
    rollout_responses, repeated_ground_truths, group_size, baseline="mean", advantage_eps=1e-6,
    advantage_normalizer="std", importance_reweighting_method="none", old_log_probs=None, cliprange=None,
    loss_normalization="sequence", normalization_constant=None,
):  # fmt: skip
    model.train()
    optimizer.zero_grad()
    data = tokenize_prompt_and_output(repeated_prompts, rollout_responses, tokenizer)
    raw, _ = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)
    advantages, _ = compute_group_normalized_rewards(
        raw.float(), group_size, baseline, advantage_eps, advantage_normalizer
    )
    n = len(repeated_prompts)
    size = (n + gradient_accumulation_steps - 1) // gradient_accumulation_steps
    total = 0.0
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        mask = data["response_mask"][rows]
        out = get_response_log_probs(model, data["input_ids"][rows], data["labels"][rows], return_token_entropy=True)
        old = None if old_log_probs is None else old_log_probs[rows]
        per_token, _ = compute_policy_gradient_loss(
            advantages[rows], out["log_probs"], importance_reweighting_method, old, cliprange, mask
        )
        loss = aggregate_loss_across_microbatch(per_token, mask, loss_normalization, normalization_constant)
        if loss_normalization == "sequence":
            loss = loss * (mask.shape[0] / n)
        loss.backward()
        total += loss.item()
    if max_grad_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return torch.tensor(total), {}
