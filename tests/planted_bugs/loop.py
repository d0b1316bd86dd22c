"""Bugs planted in `right_loop.py`: (text that stands there, text instead, function, words of its kind)."""
# ruff: noqa: E501  # a line of code stands on one line

_GENERATE = """        rollouts = generate(
            questions,
            n=group_size,
            temperature=sampling_temperature,
            max_tokens=sampling_max_tokens,
        )
        truths = [ground_truths[i] for i in chosen for _ in range(group_size)]
"""
_TILED = """        rollouts = generate(
            questions * group_size, temperature=sampling_temperature, max_tokens=sampling_max_tokens
        )
        truths = [ground_truths[i] for i in chosen] * group_size
"""
_SEEDED = """        rollouts = generate(
            [q for q in questions for _ in range(group_size)],
            temperature=sampling_temperature, max_tokens=sampling_max_tokens, seed=seed + step,
        )
        truths = [ground_truths[i] for i in chosen for _ in range(group_size)]
"""
_BUGS = [
    (_GENERATE, _TILED, "groups mix questions"),
    ("grouped = rewards.view(-1, group_size)", "grouped = rewards.view(group_size, -1)", "groups mix questions"),
    ("grouped = rewards.view(-1, group_size)", "grouped = rewards.view(1, -1)", "groups mix questions"),
    ("grouped.mean(dim=1, keepdim=True)", "grouped.mean()", "groups mix questions"),
    (_GENERATE, _SEEDED, "identical seeds"),
    ("            temperature=sampling_temperature,\n", "", "temperature ignored"),
    ("logits = policy(ids).logits[:, :-1] / temperature", "logits = policy(ids).logits[:, :-1]", "temperature ignored"),
    ("grouped.std(dim=1, keepdim=True)", "grouped.std(dim=1, keepdim=True, unbiased=False)", "ddof"),
    ("(grouped.std(dim=1, keepdim=True) + advantage_eps)", "grouped.std(dim=1, keepdim=True)", "advantage_eps"),
    ("if use_std_normalization:", "if True:", "switched off"),
    ("return picked, entropy, mask[:, 1:]", "return picked, entropy, mask[:, :-1]", "mask shifted"),
    ("return picked, entropy, mask[:, 1:]", "return picked, entropy, torch.ones_like(picked)", "prompt"),
    ("mask[i, len(row.prompt_ids) : len(full)] = 1.0", "mask[i, len(row.prompt_ids) :] = 1.0", "padding"),
    ("mask[i, len(row.prompt_ids) : len(full)] = 1.0", "mask[i, : len(full)] = 1.0", "prompt"),
    (
        "full = row.prompt_ids + row.token_ids\n",
        "full = row.prompt_ids + row.token_ids + [0] * row.truncated\n"
        "        width = max(width, len(full))\n        ids = torch.nn.functional.pad(ids, (0, width - ids.shape[1]), value=pad_id)\n"
        "        mask = torch.nn.functional.pad(mask, (0, width - mask.shape[1]))\n",
        "end token added",
    ),
    (
        "    width = max(len",
        "    for r in rows:\n        object.__setattr__(r, 'token_ids', r.token_ids[:-1] if not r.truncated else "
        "r.token_ids)\n    width = max(len",
        "end token",
    ),
    ("(per_row.sum() / len(batch)).backward()", "per_row.sum().backward()", "summed"),
    ("(per_row.sum() / len(batch)).backward()", "(per_row.mean()).backward()", "without dividing"),
    (
        "(per_row.sum() / len(batch)).backward()",
        "(per_row.mean() / gradient_accumulation_steps).backward()",
        "same however many",
    ),
    (
        "(per_row.sum() / len(batch)).backward()",
        "((loss * mask).sum() / mask.sum() * len(micro) / len(batch)).backward()",
        "all tokens",
    ),
    ("per_row = (loss * mask).sum(1) / mask.sum(1)", "per_row = (loss * mask).mean(1)", ""),
    (
        "range(0, len(order), train_batch_size)",
        "range(0, len(order) - train_batch_size + 1, train_batch_size)",
        "remainder of a batch dropped",
    ),
    (
        "                size = -(-len(batch) // gradient_accumulation_steps)\n",
        "                size = len(batch) // gradient_accumulation_steps\n                batch = batch[: size * "
        "gradient_accumulation_steps]\n",
        "remainder of a batch dropped",
    ),
    ("                optimizer.zero_grad()\n", "", "add up"),
    (
        "                for first in range(0, len(batch), size):\n",
        "                for first in range(0, len(batch), size):\n                    optimizer.zero_grad()\n",
        "last micro-batch",
    ),
    (
        "                norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)\n",
        "                norm = torch.zeros(())\n",
        "not clipped",
    ),
    (
        "                    (per_row.sum() / len(batch)).backward()\n",
        "                    (per_row.sum() / len(batch)).backward()\n"
        "                    torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)\n",
        "after each micro-batch",
    ),
    (
        "                    (per_row.sum() / len(batch)).backward()\n",
        "                    (per_row.sum() / len(batch)).backward()\n                    optimizer.step()\n",
        "after each micro-batch",
    ),
    (
        "                            before[k, : len(old[i])] = old[i]",
        "                            before[k] = logp[k].detach()",
        "old log-probabilities are not used",
    ),
    (
        "                            before[k, : len(old[i])] = old[i]",
        "                            before[k] = logp[k]",
        "gradient through old",
    ),
    (
        "loss = -torch.minimum(ratio * adv, bounded * adv)",
        "loss = -torch.maximum(ratio * adv, bounded * adv)",
        "min and max",
    ),
    ("loss = -torch.minimum(ratio * adv, bounded * adv)", "loss = -ratio * adv", "clip is not applied"),
    ("loss = -adv * logp", "loss = adv * logp", "opposite sign"),
    ("loss = -adv * logp", "loss = -adv * logp.exp()", ""),
    ("ratio.clamp(1 - cliprange, 1 + cliprange)", "ratio.clamp(1 - 0.2, 1 + 0.2)", "cliprange"),
    (
        "truths = [ground_truths[i] for i in chosen for _ in range(group_size)]",
        "truths = [ground_truths[i] for i in chosen] * group_size",
        "misaligned",
    ),
    (
        "truths = [ground_truths[i] for i in chosen for _",
        "truths = [ground_truths[i] for i in range(n_prompts) for _",
        "misaligned",
    ),
    ('reward_fn(r.text, t)["reward"]', 'reward_fn(t, r.text)["reward"]', "swapped"),
    ('reward_fn(r.text, t)["reward"]', 'reward_fn(r.text, t)["answer_reward"]', ""),
    ('reward_fn(r.text, t)["reward"]', 'reward_fn(r.prompt + r.text, t)["reward"]', ""),
    ('"entropy": entropy_sum / tokens', '"entropy": entropy.mean().item()', "entropy"),
    (
        "entropy_sum += (entropy.detach() * mask).sum().item()",
        "entropy_sum += entropy.mean().item() * mask.sum().item()",
        "prompt or padding",
    ),
    ('"clip_fraction": clip_sum / tokens', '"clip_fraction": clip_sum / mask.numel()', "clip_fraction"),
    (
        "        for epoch in range(epochs_per_rollout_batch):",
        "        for epoch in range(1):",
        "epochs_per_rollout_batch",
    ),
    (
        "                old.append(response_log_probs(policy, [row], sampling_temperature, tokenizer.pad_token_id)[0][0])",
        "                old.append(response_log_probs(policy, [row], 1.0, tokenizer.pad_token_id)[0][0])",
        "temperature 1",
    ),
    ("full = row.prompt_ids + row.token_ids\n", "full = row.prompt_ids + TOKENIZER.encode(row.text)\n", ""),
    (
        "        advantages = advantages.flatten()",
        "        advantages = (advantages / (advantages.std() + 1e-6)).flatten()",
        "",
    ),
    ("max_tokens=sampling_max_tokens,", "max_tokens=5,", "sampling_max_tokens"),
    ("                optimizer.step()\n", "                pass\n", "no optimizer step"),
]
BUGS = [(old, new, "train_grpo", words) for old, new, words in _BUGS]
