"""The 2025 handout's functions in plain PyTorch, without rlreason: `tests/test_check.py` plants bugs in them."""
# ruff: noqa: B905  # as a student writes it

import torch
import torch.nn.functional as F


def tokenize_prompt_and_output(prompt_strs, output_strs, tokenizer):
    rows, starts = [], []
    for prompt, output in zip(prompt_strs, output_strs):
        p = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        o = tokenizer(output, add_special_tokens=False)["input_ids"]
        rows.append(p + o)
        starts.append(len(p))
    longest = max(len(row) for row in rows)
    full, mask = [], []
    for row, start in zip(rows, starts):
        full.append(row + [tokenizer.pad_token_id] * (longest - len(row)))
        mask.append([0] * start + [1] * (len(row) - start) + [0] * (longest - len(row)))
    full, mask = torch.tensor(full), torch.tensor(mask)
    return {"input_ids": full[:, :-1], "labels": full[:, 1:], "response_mask": mask[:, 1:].bool()}


def compute_entropy(logits):
    total = torch.logsumexp(logits, dim=-1, keepdim=True)
    probs = torch.exp(logits - total)
    return total.squeeze(-1) - (probs * logits).sum(dim=-1)


def get_response_log_probs(model, input_ids, labels, return_token_entropy=False):
    logits = model(input_ids=input_ids).logits
    log_probs = F.log_softmax(logits, dim=-1)
    out = {"log_probs": torch.gather(log_probs, 2, labels.unsqueeze(-1)).squeeze(-1)}
    if return_token_entropy:
        with torch.no_grad():
            out["token_entropy"] = compute_entropy(logits)
    return out


def masked_normalize(tensor, mask, normalize_constant, dim=None):
    kept = torch.where(mask, tensor, torch.zeros_like(tensor))
    total = kept.sum() if dim is None else kept.sum(dim=dim)
    return total / normalize_constant


def masked_mean(tensor, mask, dim=None):
    total, count = (tensor * mask), mask.to(tensor.dtype)
    if dim is None:
        return total.sum() / count.sum()
    return total.sum(dim) / count.sum(dim)


def sft_microbatch_train_step(policy_log_probs, response_mask, gradient_accumulation_steps, normalize_constant=1.0):
    per_row = masked_normalize(policy_log_probs, response_mask, normalize_constant, dim=-1)
    loss = -per_row.mean() / gradient_accumulation_steps
    loss.backward()
    return loss.detach(), {"tokens": response_mask.sum().item()}


def compute_group_normalized_rewards(
    reward_fn, rollout_responses, repeated_ground_truths, group_size, advantage_eps, normalize_by_std
):
    raw = []
    for response, truth in zip(rollout_responses, repeated_ground_truths):
        scores = reward_fn(response, truth)
        raw.append(scores["reward"])
    advantages = []
    for start in range(0, len(raw), group_size):
        group = raw[start : start + group_size]
        mean = sum(group) / group_size
        variance = sum((r - mean) ** 2 for r in group) / (group_size - 1)
        divisor = variance**0.5 + advantage_eps if normalize_by_std else 1.0
        for r in group:
            advantages.append((r - mean) / divisor)
    metadata = {"mean": sum(raw) / len(raw)}
    return torch.tensor(advantages), torch.tensor(raw), metadata


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages, policy_log_probs):
    weights = raw_rewards_or_advantages.expand(-1, policy_log_probs.shape[1])
    return -(weights * policy_log_probs)


def compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange):
    ratio = torch.exp(policy_log_probs - old_log_probs)
    high = torch.full_like(ratio, 1 + cliprange)
    low = torch.full_like(ratio, 1 - cliprange)
    limited = torch.where(advantages >= 0, torch.minimum(ratio, high), torch.maximum(ratio, low))
    outside = (ratio > high) | (ratio < low)
    return -advantages * limited, {"clip_fraction": outside.float()}


def compute_policy_gradient_loss(
    policy_log_probs, loss_type, raw_rewards=None, advantages=None, old_log_probs=None, cliprange=None
):
    if loss_type == "no_baseline":
        return compute_naive_policy_gradient_loss(raw_rewards, policy_log_probs), {}
    if loss_type == "reinforce_with_baseline":
        return compute_naive_policy_gradient_loss(advantages, policy_log_probs), {}
    if loss_type == "grpo_clip":
        return compute_grpo_clip_loss(advantages, policy_log_probs, old_log_probs, cliprange)
    raise ValueError(f"unknown loss type {loss_type}")


def grpo_microbatch_train_step(
    policy_log_probs, response_mask, gradient_accumulation_steps, loss_type, raw_rewards=None, advantages=None,
    old_log_probs=None, cliprange=None,
):  # fmt: skip
    per_token, extra = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    per_row = masked_mean(per_token, response_mask, dim=1)
    loss = per_row.mean() / gradient_accumulation_steps
    loss.backward()
    metadata = {}
    if "clip_fraction" in extra:
        metadata["clip_fraction"] = masked_mean(extra["clip_fraction"], response_mask)
    return loss, metadata
