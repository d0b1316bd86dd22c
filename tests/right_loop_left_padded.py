"""A right loop in another style: left padding with attention mask and positions, one question at a time, one backward."""
# ruff: noqa: B905, E501  # as a student writes it

import random

import torch


def scores(policy, rollouts, temperature, pad):
    """Log-probs (n, longest response) of right-aligned responses and their mask."""
    rows = [r.prompt_ids + r.token_ids for r in rollouts]
    longest, response = max(map(len, rows)), max(len(r.token_ids) for r in rollouts)
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
    attention = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    logits = policy(input_ids=ids, attention_mask=attention, position_ids=positions)["logits"]
    logits = logits[:, -response - 1 : -1].div(temperature)
    picked = torch.take_along_dim(logits, ids[:, -response:, None], -1)[..., 0] - logits.logsumexp(-1)
    mask = torch.tensor([[False] * (response - len(r.token_ids)) + [True] * len(r.token_ids) for r in rollouts])
    return picked, mask


def train_grpo(
    policy, tokenizer, prompts, ground_truths, reward_fn, generate, optimizer, *, n_grpo_steps, rollout_batch_size,
    group_size, train_batch_size, epochs_per_rollout_batch, sampling_temperature, sampling_max_tokens, loss_type,
    cliprange, advantage_eps, use_std_normalization, max_grad_norm, seed, **others,
):  # fmt: skip
    rng = random.Random(seed)
    assert rollout_batch_size % train_batch_size == 0
    for step in range(n_grpo_steps):
        everything = []
        for i in rng.sample(range(len(prompts)), rollout_batch_size // group_size):
            group = []
            for g in range(group_size):
                group += generate([prompts[i]], n=1, temperature=sampling_temperature, max_tokens=sampling_max_tokens,
                                  seed=hash((seed, step, i, g)) % 2**31)  # fmt: skip
            rewards = torch.tensor([reward_fn(r.text, ground_truths[i])["reward"] for r in group], dtype=torch.float64)
            spread = rewards.var().sqrt() + advantage_eps if use_std_normalization else torch.ones(())
            everything += list(zip(group, ((rewards - rewards.mean()) / spread).tolist()))
        rng.shuffle(everything)
        with torch.no_grad():
            old, _ = scores(policy, [r for r, _ in everything], sampling_temperature, tokenizer.eos_token_id)
        for _ in range(epochs_per_rollout_batch):
            for at in range(0, len(everything), train_batch_size):
                part = everything[at : at + train_batch_size]
                lp, mask = scores(policy, [r for r, _ in part], sampling_temperature, tokenizer.eos_token_id)
                a = torch.tensor([a for _, a in part])[:, None]
                before = old[at : at + train_batch_size, -lp.shape[1] :]
                ratio = torch.exp(lp - before)
                if loss_type == "reinforce_with_baseline":
                    objective = a * lp
                else:
                    low, high = 1 - cliprange, 1 + cliprange
                    objective = torch.where(a > 0, ratio.clamp(max=high), ratio.clamp(min=low)) * a
                objective = torch.where(mask, objective, 0.0)
                loss = -torch.stack([row.sum() / m.sum() for row, m in zip(objective, mask)]).mean()
                for parameter in policy.parameters():
                    parameter.grad = None
                loss.backward()
                torch.nn.utils.clip_grad_norm_(list(policy.parameters()), max_grad_norm, norm_type=2.0)
                optimizer.step()
