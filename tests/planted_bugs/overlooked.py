"""Bugs that the checker once let pass or misnamed: (right file, text that stands there, text instead, function, words)."""
# ruff: noqa: E501  # a line of code stands on one line

F25, F26, LOOP = "right_functions_2025.py", "right_functions_2026.py", "right_loop.py"
_UNKNOWN = '    raise ValueError(f"unknown loss type {loss_type}")'
_REMAINDER = "range(0, len(order), train_batch_size)"
_MICRO = "                    per_row = (loss * mask).sum(1) / mask.sum(1)\n"
_BACKWARD = "(per_row.sum() / len(batch)).backward()"
_LOOPS = "            for start in range(0, len(order), train_batch_size):"
_GROUPED = "        advantages = advantages.flatten()\n"
_BY_TRUTH = """        advantages = advantages.flatten()
        for answer in set(truths):
            same = torch.tensor([t == answer for t in truths])
            part = rewards[same] - rewards[same].mean()
            advantages[same] = part / (rewards[same].std() + advantage_eps) if use_std_normalization else part
"""
_BY_TRUTH_2025 = """    advantages = [0.0] * len(raw)
    for answer in dict.fromkeys(repeated_ground_truths):
        places = [i for i, truth in enumerate(repeated_ground_truths) if truth == answer]
        group = torch.tensor([raw[i] for i in places])
        part = group - group.mean()
        part = part / (group.std() + advantage_eps) if normalize_by_std else part
        for i, a in zip(places, part.tolist()):
            advantages[i] = a
    metadata ="""
_BY_TRUTH_2026 = """    for answer in set(repeated_ground_truths):
        same = torch.tensor([t == answer for t in repeated_ground_truths])
        advantages[same] = (raw[same] - raw[same].mean()) / (raw[same].std() + advantage_eps)
    n = len(repeated_prompts)
"""
BUGS = [
    (F25, "return -(weights * policy_log_probs)", "return weights * policy_log_probs", "compute_policy_gradient_loss", "opposite sign"),
    (F25, _UNKNOWN, "    raise NotImplementedError\n\n\nright = compute_policy_gradient_loss\n\n\ndef compute_policy_gradient_loss(*a, **k):\n    loss, extra = right(*a, **k)\n    return -loss, extra", "compute_policy_gradient_loss", "opposite sign"),
    (F25, 'if loss_type == "grpo_clip":', 'if loss_type == "grpo_clip":\n        raise NotImplementedError', "compute_policy_gradient_loss", "raises an error"),
    (F25, "    metadata =", _BY_TRUTH_2025, "compute_group_normalized_rewards", "same ground truth"),
    (F25, "return total / normalize_constant", "return total / normalize_constant * torch.rand(())", "masked_normalize", "twice"),
    (F25, "return total.sum(dim) / count.sum(dim)", "return total.sum(dim)", "masked_mean", "not a mean"),
    (
        F25,
        'out = {"log_probs": torch.gather(log_probs, 2, labels.unsqueeze(-1)).squeeze(-1)}',
        'out = {"log_probs": F.pad(torch.gather(log_probs[:, :-1], 2, labels[:, 1:].unsqueeze(-1)).squeeze(-1), (0, 1))}',
        "get_response_log_probs",
        "shifted already",
    ),
    (F26, "    n = len(repeated_prompts)\n", _BY_TRUTH_2026, "grpo_train_step", ""),
    (F26, 'clipped += (extra["clipped"] * mask).sum().item()', 'clipped += extra["clipped"].mean().item() * mask.sum().item()', "grpo_train_step", "no mean over"),
    (F26, "raw, _ = compute_rollout_rewards(reward_fn, rollout_responses,", "raw, _ = compute_rollout_rewards(reward_fn, [p + r for p, r in zip(repeated_prompts, rollout_responses)],", "grpo_train_step", "prompt and response"),
    (F26, "raw, _ = compute_rollout_rewards(reward_fn, rollout_responses, repeated_ground_truths)", "raw, _ = compute_rollout_rewards(reward_fn, repeated_ground_truths, rollout_responses)", "grpo_train_step", "swapped"),
    (LOOP, _REMAINDER, "range(0, len(order) // train_batch_size * train_batch_size, train_batch_size if train_batch_size % gradient_accumulation_steps == 0 else 1 // 0)", "train_grpo", "remainder of a batch dropped"),
    (LOOP, _GROUPED, _BY_TRUTH, "train_grpo", "same ground truth"),
    (LOOP, "torch.randperm(len(rollouts), generator=rng).tolist()", "[i for i in torch.randperm(len(rollouts), generator=rng).tolist() if advantages[i] != 0]", "train_grpo", "mean is taken over fewer"),
    (LOOP, "    metrics = []\n", "    metrics = []\n    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)\n", "train_grpo", "one of its own"),
    (LOOP, "    metrics = []\n", "    import copy\n\n    metrics = []\n    policy = copy.deepcopy(policy)\n", "train_grpo", "a copy of the policy"),
    (LOOP, "    width = max(len", "    from types import SimpleNamespace as Row\n\n    rows = [Row(prompt_ids=[1, *r.prompt_ids], token_ids=r.token_ids) for r in rows]\n    width = max(len", "train_grpo", "begin token twice"),
    (LOOP, "mask[i, len(row.prompt_ids) : len(full)] = 1.0", "mask[i, len(row.prompt_ids) : len(full) - (not row.truncated)] = 1.0", "train_grpo", "end tokens have weight 0"),
    (LOOP, _MICRO, "                    per_row = (loss * mask).sum(1) / sampling_max_tokens\n", "train_grpo", "sampling_max_tokens"),
    (LOOP, _BACKWARD, "per_row.sum().backward()", "train_grpo", "summed"),
    (LOOP, 'reward_fn(r.text, t)["reward"]', 'reward_fn(r.prompt + r.text, t)["reward"]', "train_grpo", "prompt and response"),
]  # fmt: skip
