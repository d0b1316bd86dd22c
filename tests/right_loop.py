"""A right train loop in plain PyTorch, written without rlreason: `tests/test_check.py` plants bugs in it."""
# ruff: noqa: B905, B007  # as a student writes it

import torch
import torch.nn.functional as F


def response_log_probs(policy, rows, temperature, pad_id):
    """Per-token log-probs and mask of prompt + sampled ids, right-padded. (batch, width - 1) each."""
    width = max(len(row.prompt_ids) + len(row.token_ids) for row in rows)
    ids = torch.full((len(rows), width), pad_id)
    mask = torch.zeros(len(rows), width)
    for i, row in enumerate(rows):
        full = row.prompt_ids + row.token_ids
        ids[i, : len(full)] = torch.tensor(full)
        mask[i, len(row.prompt_ids) : len(full)] = 1.0
    logits = policy(ids).logits[:, :-1] / temperature
    logp = F.log_softmax(logits, dim=-1)
    picked = logp.gather(2, ids[:, 1:].unsqueeze(2)).squeeze(2)
    return picked, mask[:, 1:]


def train_grpo(
    policy, tokenizer, prompts, ground_truths, reward_fn, generate, optimizer, *, n_grpo_steps, rollout_batch_size,
    group_size, train_batch_size, gradient_accumulation_steps, epochs_per_rollout_batch, sampling_temperature,
    sampling_max_tokens, loss_type, cliprange, advantage_eps, use_std_normalization, max_grad_norm, seed,
):  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    n_prompts = rollout_batch_size // group_size
    for step in range(n_grpo_steps):
        chosen = torch.randperm(len(prompts), generator=rng)[:n_prompts].tolist()
        questions = [prompts[i] for i in chosen]
        rollouts = generate(
            questions,
            n=group_size,
            temperature=sampling_temperature,
            max_tokens=sampling_max_tokens,
        )
        truths = [ground_truths[i] for i in chosen for _ in range(group_size)]
        rewards = torch.tensor([reward_fn(r.text, t)["reward"] for r, t in zip(rollouts, truths)])
        grouped = rewards.view(-1, group_size)
        advantages = grouped - grouped.mean(dim=1, keepdim=True)
        if use_std_normalization:
            advantages = advantages / (grouped.std(dim=1, keepdim=True) + advantage_eps)
        advantages = advantages.flatten()
        old = []
        with torch.no_grad():
            for row in rollouts:
                old.append(response_log_probs(policy, [row], sampling_temperature, tokenizer.pad_token_id)[0][0])
        for epoch in range(epochs_per_rollout_batch):
            order = torch.randperm(len(rollouts), generator=rng).tolist()
            for start in range(0, len(order), train_batch_size):
                batch = order[start : start + train_batch_size]
                size = -(-len(batch) // gradient_accumulation_steps)
                optimizer.zero_grad()
                for first in range(0, len(batch), size):
                    micro = batch[first : first + size]
                    rows = [rollouts[i] for i in micro]
                    logp, mask = response_log_probs(policy, rows, sampling_temperature, tokenizer.pad_token_id)
                    adv = advantages[micro].unsqueeze(1)
                    if loss_type == "reinforce_with_baseline":
                        loss = -adv * logp
                    else:
                        before = torch.zeros_like(logp)
                        for k, i in enumerate(micro):
                            before[k, : len(old[i])] = old[i]
                        ratio = torch.exp((logp - before) * mask)
                        bounded = ratio.clamp(1 - cliprange, 1 + cliprange)
                        loss = -torch.minimum(ratio * adv, bounded * adv)
                    per_row = (loss * mask).sum(1) / mask.sum(1)
                    (per_row.sum() / len(batch)).backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), max_grad_norm)
                optimizer.step()
