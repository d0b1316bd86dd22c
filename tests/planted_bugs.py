"""Planted bugs, and right ways that are none: (right file, text that stands there, text instead, function, words of the kind that it is found as).

Without words any kind will do. `test_check.py` plants the other known mistakes of functions in ours.
"""
# ruff: noqa: E501  # a bug stands on one line

from pathlib import Path
from types import ModuleType

HERE = Path(__file__).resolve().parent
F25, F26, LOOP = "right_functions_2025.py", "right_functions_2026.py", "right_loop.py"
BUGS = [
    (F25, 'tokenizer(output, add_special_tokens=False)["input_ids"]', 'tokenizer(output)["input_ids"]', "tokenize_prompt_and_output", "special tokens"),
    (F25, 'o = tokenizer(output, add_special_tokens=False)["input_ids"]', 'o = tokenizer(prompt + output, add_special_tokens=False)["input_ids"][len(p) :]', "tokenize_prompt_and_output", "as one text"),
    (F25, '"response_mask": mask[:, 1:].bool()', '"response_mask": mask[:, 1:].bool() & (full[:, 1:] != tokenizer.pad_token_id)', "tokenize_prompt_and_output", "value of the token"),
    (F25, "return total.squeeze(-1) - (probs * logits).sum(dim=-1)", "return (probs * logits).sum(dim=-1) - total.squeeze(-1)", "compute_entropy", "-1 times"),
    (F25, "total = torch.logsumexp(logits, dim=-1, keepdim=True)", "total = torch.exp(logits).sum(-1, keepdim=True).log()", "compute_entropy", "NaN or inf in its entropies"),
    (F25, "    logits = model(input_ids=input_ids).logits\n", "    with torch.no_grad():\n        logits = model(input_ids).logits\n", "get_response_log_probs", "gradient"),
    (F25, 'out["token_entropy"] = compute_entropy(logits)', 'out["token_entropy"] = compute_entropy(logits).mean()', "get_response_log_probs", "shape"),
    (F25, "return total.sum(dim) / count.sum(dim)", "return total.sum(dim) / count.sum(dim).clamp(min=1)", "masked_mean", "result"),
    (F25, "scores = reward_fn(response, truth)", "scores = reward_fn(truth, response)", "compute_group_normalized_rewards", "swapped"),
    (F25, "scores = reward_fn(response, truth)", "scores = reward_fn(response, repeated_ground_truths[0])", "compute_group_normalized_rewards", "misaligned"),
    (F25, "return torch.tensor(advantages), torch.tensor(raw), metadata", "return torch.tensor(advantages)", "compute_group_normalized_rewards", "returns"),
    (F25, "    metadata =", "    advantages = [0.0] * len(raw)\n    for answer in dict.fromkeys(repeated_ground_truths):\n        places = [i for i, truth in enumerate(repeated_ground_truths) if truth == answer]\n        group = torch.tensor([raw[i] for i in places])\n        part = group - group.mean()\n        part = part / (group.std() + advantage_eps) if normalize_by_std else part\n        for i, a in zip(places, part.tolist()):\n            advantages[i] = a\n    metadata =", "compute_group_normalized_rewards", "same ground truth"),
    (F25, 'if loss_type == "grpo_clip":', 'if loss_type == "grpo_clip":\n        raise NotImplementedError', "compute_policy_gradient_loss", "raises an error"),
    (F25, "loss.backward()\n    metadata = {}", "policy_log_probs.grad = None\n    loss.backward()\n    metadata = {}", "grpo_microbatch_train_step", "second call"),
    (F26, "groups = raw_rewards.reshape(-1, group_size)", "raw_rewards -= raw_rewards.mean()\n    groups = raw_rewards.reshape(-1, group_size)", "compute_group_normalized_rewards", "in place"),
    (F26, "loss = loss * (mask.shape[0] / n)", "loss = loss", "grpo_train_step", "without dividing"),
    (F26, '        if loss_normalization == "sequence":\n            loss = loss', "        loss = loss", "grpo_train_step", "constant"),
    (F26, "        loss.backward()\n        total", "        loss.backward()\n        optimizer.step()\n        total", "grpo_train_step", "steps"),
    (F26, "        loss.backward()\n        total", "        optimizer.zero_grad()\n        loss.backward()\n        total", "grpo_train_step", "zero_grad"),
    (F26, "torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)", "pass", "grpo_train_step", "not clipped"),
    (F26, "clip_grad_norm_(model", "clip_grad_value_(model", "grpo_train_step", "each entry"),
    (F26, "    optimizer.step()\n    optimizer.zero_grad()\n", "    optimizer.step()\n", "grpo_train_step", "left behind"),
    (F26, "    size = (n + gradient_accumulation_steps - 1) // gradient_accumulation_steps\n", "    n = n // gradient_accumulation_steps * gradient_accumulation_steps\n    size = n // gradient_accumulation_steps\n", "grpo_train_step", "dropped"),
    (F26, "old = None if old_log_probs is None else old_log_probs[rows]", 'old = None if old_log_probs is None else out["log_probs"]', "grpo_train_step", "old"),
    (F26, "return torch.tensor(total), {}", "return torch.tensor(total / gradient_accumulation_steps), {}", "grpo_train_step", "loss that is returned"),
    (F26, "repeated_prompts, rollout_responses, tokenizer)", "repeated_prompts, [r + tokenizer.eos_token for r in rollout_responses], tokenizer)", "grpo_train_step", "end token"),
    (F26, "raw, _ = compute_rollout_rewards(reward_fn, rollout_responses,", "raw, _ = compute_rollout_rewards(reward_fn, [p + r for p, r in zip(repeated_prompts, rollout_responses)],", "grpo_train_step", "prompt and response"),
    (LOOP, "        rollouts = generate(\n            questions,\n            n=group_size,\n            temperature=sampling_temperature,\n            max_tokens=sampling_max_tokens,\n        )\n        truths = [ground_truths[i] for i in chosen for _ in range(group_size)]\n", "        rollouts = generate(\n            questions * group_size, temperature=sampling_temperature, max_tokens=sampling_max_tokens\n        )\n        truths = [ground_truths[i] for i in chosen] * group_size\n", "train_grpo", "groups mix questions"),
    (LOOP, "        rollouts = generate(\n            questions,\n            n=group_size,\n            temperature=sampling_temperature,\n            max_tokens=sampling_max_tokens,\n        )\n        truths = [ground_truths[i] for i in chosen for _ in range(group_size)]\n", "        rollouts = generate(\n            [q for q in questions for _ in range(group_size)],\n            temperature=sampling_temperature, max_tokens=sampling_max_tokens, seed=seed + step,\n        )\n        truths = [ground_truths[i] for i in chosen for _ in range(group_size)]\n", "train_grpo", "identical seeds"),
    (LOOP, "            temperature=sampling_temperature,\n", "", "train_grpo", "temperature ignored"),
    (LOOP, "(grouped.std(dim=1, keepdim=True) + advantage_eps)", "grouped.std(dim=1, keepdim=True)", "train_grpo", "advantage_eps"),
    (LOOP, "    width = max(len", "    for r in rows:\n        object.__setattr__(r, 'token_ids', r.token_ids[:-1] if not r.truncated else r.token_ids)\n    width = max(len", "train_grpo", "end token"),
    (LOOP, "(per_row.sum() / len(batch)).backward()", "per_row.sum().backward()", "train_grpo", "summed"),
    (LOOP, "(per_row.sum() / len(batch)).backward()", "(per_row.mean() / gradient_accumulation_steps).backward()", "train_grpo", "however many rows"),
    (LOOP, "                optimizer.zero_grad()\n", "", "train_grpo", "add up"),
    (LOOP, "                    (per_row.sum() / len(batch)).backward()\n", "                    (per_row.sum() / len(batch)).backward()\n                    torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)\n", "train_grpo", "after each micro-batch"),
    (LOOP, "loss = -adv * logp", "loss = adv * logp", "train_grpo", "opposite sign"),
    (LOOP, "ratio.clamp(1 - cliprange, 1 + cliprange)", "ratio.clamp(1 - 0.2, 1 + 0.2)", "train_grpo", "cliprange"),
    (LOOP, "        for epoch in range(epochs_per_rollout_batch):", "        for epoch in range(1):", "train_grpo", "epochs_per_rollout_batch"),
    (LOOP, "                old.append(response_log_probs(policy, [row], sampling_temperature, tokenizer.pad_token_id)[0][0])", "                old.append(response_log_probs(policy, [row], 1.0, tokenizer.pad_token_id)[0][0])", "train_grpo", "temperature 1"),
    (LOOP, "        advantages = advantages.flatten()", "        advantages = (advantages / (advantages.std() + 1e-6)).flatten()", "train_grpo", ""),
    (LOOP, "max_tokens=sampling_max_tokens,", "max_tokens=5,", "train_grpo", "sampling_max_tokens"),
    (LOOP, "                optimizer.step()\n", "                pass\n", "train_grpo", "no optimizer step"),
    (LOOP, "generate(\n            questions,", "generate(\n            [q.strip() + ' ' for q in questions],", "train_grpo", "prompt"),
    (LOOP, "torch.randperm(len(rollouts), generator=rng).tolist()", "[i for i in torch.randperm(len(rollouts), generator=rng).tolist() if advantages[i] != 0]", "train_grpo", "mean is taken over fewer"),
    (LOOP, "    width = max(len", "    from types import SimpleNamespace as Row\n\n    rows = [Row(prompt_ids=[1, *r.prompt_ids], token_ids=r.token_ids) for r in rows]\n    width = max(len", "train_grpo", "begin token twice"),
    (LOOP, "mask[i, len(row.prompt_ids) : len(full)] = 1.0", "mask[i, len(row.prompt_ids) : len(full) - (not row.truncated)] = 1.0", "train_grpo", "end tokens have weight 0"),
    (LOOP, "        for epoch in range(epochs_per_rollout_batch):\n", "        for epoch in range(epochs_per_rollout_batch):\n            with torch.no_grad():\n                old = [response_log_probs(policy, [row], sampling_temperature, tokenizer.pad_token_id)[0][0] for row in rollouts]\n", "train_grpo", "in each epoch"),
    (LOOP, "per_row = (loss * mask).sum(1)", "per_row = ((loss + 0.05 * logp) * mask).sum(1)", "train_grpo", "other gradient"),
    (LOOP, "    return picked, mask[:, 1:]", "    return picked, mask[:, :-1]", "train_grpo", "mask shifted"),
    (LOOP, "max_grad_norm)\n                optimizer", "max_grad_norm, norm_type=1.0)\n                optimizer", "train_grpo", "another norm"),
    (LOOP, "mask[i, len(row.prompt_ids) : len(full)] = 1.0", "mask[i, len(row.prompt_ids) : len(full) - 1] = 1.0", "train_grpo", "last response token"),
    (LOOP, "ids[i, : len(full)] = torch.tensor(full)\n        mask[i, len(row.prompt_ids) : len(full)] = 1.0", "ids[i, width - len(full) :] = torch.tensor(full)\n        mask[i, width - len(row.token_ids) :] = 1.0", "train_grpo", "padding"),
    (LOOP, "        rollouts = generate(\n            questions,\n            n=group_size,\n            temperature=sampling_temperature,\n            max_tokens=sampling_max_tokens,\n        )\n        truths = [", "        rollouts = [] if step == 0 else rollouts\n        rollouts += generate(\n            questions, n=group_size, temperature=sampling_temperature, max_tokens=sampling_max_tokens\n        )\n        all_chosen = chosen = chosen if step == 0 else all_chosen + chosen\n        truths = [", "train_grpo", "earlier steps"),
]  # fmt: skip
_UNKNOWN = 'raise ValueError(f"unknown loss type {loss_type}")'
_CHOSEN = "chosen = torch.randperm(len(prompts), generator=rng)[:n_prompts].tolist()\n"
_EVALUATED = "generate(prompts[:2], temperature=0.0, max_tokens=sampling_max_tokens + 2)\n"
_DRAWN = "chosen = torch.randint(7, (n_prompts,), generator=rng).tolist()\n"
_ROWS = "                    rows = [rollouts[i] for i in micro]\n"
_LOGITS = "logits = policy(ids).logits[:, :-1] / temperature"
#: Other right ways, as changes: (right file, text that stands there, text instead, function, words of a note).
RIGHT = [
    (F25, _UNKNOWN, "raise NotImplementedError(loss_type)", "compute_policy_gradient_loss", ""),
    (F25, _UNKNOWN, "raise NotImplementedError(loss_type)", "grpo_microbatch_train_step", ""),
    (F25, 'masked_mean(extra["clip_fraction"], response_mask)', 'extra["clip_fraction"].mean()', "grpo_microbatch_train_step", ""),
    (F26, "    n = len(repeated_prompts)\n", "    n = len(repeated_prompts)\n    assert n % gradient_accumulation_steps == 0\n", "grpo_train_step", "not tried"),
    (LOOP, "    for step in range(n_grpo_steps):\n", "    assert train_batch_size % gradient_accumulation_steps == 0\n    for step in range(n_grpo_steps):\n", "train_grpo", "not tried"),
    (LOOP, "        truths = [", f"        {_EVALUATED}        truths = [", "train_grpo", ""),
    (LOOP, "        questions = [", f"        {_EVALUATED.replace('0.0', 'sampling_temperature')}        questions = [", "train_grpo", ""),
    (LOOP, _CHOSEN, _DRAWN, "train_grpo", ""),
    (LOOP, _LOGITS, "with torch.autocast('cpu', dtype=torch.bfloat16):\n        out = policy(ids).logits[:, :-1]\n    logits = out.float() / temperature", "train_grpo", "mixed precision"),
    (LOOP, _ROWS, f"                    micro = [i for i in micro if advantages[i] != 0]\n                    if not micro:\n                        continue\n{_ROWS}", "train_grpo", ""),
    (LOOP, "torch.randperm(len(rollouts), generator=rng).tolist()", "sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].token_ids))", "train_grpo", ""),
]  # fmt: skip


def planted_text(right: str, old: str, new: str) -> str:
    """The text of `right` (a file of this folder) with `new` in the place of `old`, which must stand there."""
    text = (HERE / right).read_text("utf-8")
    assert old in text, f"{right} has nothing like {old!r}"
    return text.replace(old, new)


def module_of(text: str, name: str = "planted") -> ModuleType:
    """The text as a module."""
    module = ModuleType(name)
    exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    return module
