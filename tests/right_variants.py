"""Other right ways, as changes of a right file: (file, text that stands there, text instead, function, words of a note).

None of them is a bug; where words stand, the check says so much beside "no bug found".
"""
# ruff: noqa: E501  # a line of code stands on one line

from pathlib import Path

F25, F26, LOOP = "right_functions_2025.py", "right_functions_2026.py", "right_loop.py"
_UNKNOWN = 'raise ValueError(f"unknown loss type {loss_type}")'
_CHOSEN = "chosen = torch.randperm(len(prompts), generator=rng)[:n_prompts].tolist()\n"
_EVALUATED = "generate(prompts[:2], temperature=0.0, max_tokens=sampling_max_tokens + 2)\n"
_GROUPED = "        advantages = advantages.flatten()\n"
_MERGED = """        advantages = advantages.flatten()
        for i in set(chosen):
            same = torch.tensor([c == i for c in chosen for _ in range(group_size)])
            part = rewards[same] - rewards[same].mean()
            advantages[same] = part / (rewards[same].std() + advantage_eps) if use_std_normalization else part
"""
_DRAWN = "chosen = torch.randint(7, (n_prompts,), generator=rng).tolist()\n"
_TEXT = (Path(__file__).parent / LOOP).read_text("utf-8")
_PART = _TEXT[_TEXT.index(_CHOSEN) : _TEXT.index(_GROUPED) + len(_GROUPED)]
_LOGITS = "logits = policy(ids).logits[:, :-1] / temperature"
RIGHT = [
    (F25, _UNKNOWN, "raise NotImplementedError(loss_type)", "compute_policy_gradient_loss", ""),
    (F25, _UNKNOWN, "raise NotImplementedError(loss_type)", "grpo_microbatch_train_step", ""),
    (F25, 'masked_mean(extra["clip_fraction"], response_mask)', 'extra["clip_fraction"].mean()', "grpo_microbatch_train_step", ""),
    (F26, "    n = len(repeated_prompts)\n", "    n = len(repeated_prompts)\n    assert n % gradient_accumulation_steps == 0\n", "grpo_train_step", "not tried"),
    (LOOP, "    metrics = []\n", "    metrics = []\n    assert train_batch_size % gradient_accumulation_steps == 0\n", "train_grpo", "not tried"),
    (LOOP, "        truths = [", f"        {_EVALUATED}        truths = [", "train_grpo", ""),
    (LOOP, "        questions = [", f"        {_EVALUATED.replace('0.0', 'sampling_temperature')}        questions = [", "train_grpo", ""),
    (LOOP, _CHOSEN, _DRAWN, "train_grpo", ""),
    (LOOP, _PART, _PART.replace(_CHOSEN, _DRAWN).replace(_GROUPED, _MERGED), "train_grpo", ""),
    (LOOP, _LOGITS, "with torch.autocast('cpu', dtype=torch.bfloat16):\n        out = policy(ids).logits[:, :-1]\n    logits = out.float() / temperature", "train_grpo", "mixed precision"),
    (LOOP, "torch.randperm(len(rollouts), generator=rng).tolist()", "sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].token_ids))", "train_grpo", ""),
]  # fmt: skip
