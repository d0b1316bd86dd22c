"""Functions that both years share: tokenizing, log-probabilities, calls of the reward function, groups."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlreason.objectives.aggregation import masked_mean
from rlreason.objectives.measures import compute_entropy, gather_log_probs


def get_response_log_probs(
    model: Any, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """`log_probs` of the labels and, when asked, `token_entropy`; both (batch, seq) float32.

    The labels are shifted already. Prompt and padding positions are scored like any other; the caller masks.
    No attention mask is needed: padding is on the right, and earlier positions of a causal model do not attend to it.
    """
    logits = model(input_ids).logits
    scored = {"log_probs": gather_log_probs(logits, labels)}
    if return_token_entropy:
        scored["token_entropy"] = compute_entropy(logits)
    return scored


Value = TypeVar("Value")
RewardFn = Callable[[str, str], dict[str, float]]


def score_rollouts(
    reward_fn: RewardFn, rollout_responses: list[str], repeated_ground_truths: list[str]
) -> tuple[Tensor, dict[str, float]]:
    """(total rewards (n,) float32, mean of every part of the reward).

    `reward_fn(response, ground truth)` returns the parts by name: `reward` is the total; `format_reward` and
    `answer_reward` are usual. `ValueError` where there are not as many ground truths as responses.
    """
    if len(rollout_responses) != len(repeated_ground_truths):
        counts = f"{len(rollout_responses)} responses and {len(repeated_ground_truths)} ground truths"
        raise ValueError(f"{counts}: repeat each ground truth group_size times")
    parts = [reward_fn(*pair) for pair in zip(rollout_responses, repeated_ground_truths, strict=True)]
    rewards = torch.tensor([part["reward"] for part in parts], dtype=torch.float32)
    names = sorted({name for part in parts for name in part})
    means = {f"mean_{name}": sum(part.get(name, 0.0) for part in parts) / len(parts) for name in names}
    return rewards, means


def consecutive_groups(n_samples: int, group_size: int) -> Tensor:
    """Group ids of samples that stand in runs of `group_size` -> (n,) int64. `ValueError` for an incomplete group.

    >>> consecutive_groups(6, 3)
    tensor([0, 0, 0, 1, 1, 1])
    """
    if n_samples % group_size:
        raise ValueError(f"group_size={group_size} does not divide {n_samples} responses into groups")
    return torch.arange(n_samples) // group_size


def summarize(stats: dict[str, Tensor], response_mask: Tensor) -> dict[str, Tensor]:
    """Average every per-token statistic over response tokens. Each (batch, seq) -> scalar"""
    return {name: masked_mean(values, response_mask, empty="zero") for name, values in stats.items()}


def required(value: Value | None, name: str, option: str) -> Value:
    """Return `value`; raise a `ValueError` that names the option if it is None."""
    if value is None:
        raise ValueError(f"{name}=None: {option!r} needs it")
    return value


def tokenize_prompt_and_output(
    prompt_strs: list[str], output_strs: list[str], tokenizer: PreTrainedTokenizerBase
) -> dict[str, Tensor]:
    """Tokenize prompts and outputs apart, join, right-pad, and split into inputs and next tokens.

    Returns `input_ids`, `labels` (batch, max_len - 1) int64 and `response_mask` (batch, max_len - 1) bool,
    which is aligned with the labels: true exactly where the label is a token of the output. The mask comes
    from lengths, so an output may contain the pad token. No special tokens are added to either part: a second
    begin token between them would be trained on.
    """
    if len(prompt_strs) != len(output_strs):
        raise ValueError(f"{len(prompt_strs)} prompts and {len(output_strs)} outputs: give as many of each")
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in prompt_strs]
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in output_strs]
    lengths = [len(prompt) + len(output) for prompt, output in zip(prompts, outputs, strict=True)]
    full = torch.full((len(lengths), max(lengths)), _pad_id(tokenizer), dtype=torch.int64)
    is_output = torch.zeros_like(full, dtype=torch.bool)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        full[row, : lengths[row]] = torch.tensor(prompt + output, dtype=torch.int64)
        is_output[row, len(prompt) : lengths[row]] = True
    return {"input_ids": full[:, :-1], "labels": full[:, 1:], "response_mask": is_output[:, 1:]}


def _pad_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the pad token's id, or the end token's if there is none: padding is never trained on."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ValueError("the tokenizer has neither pad_token nor eos_token: set tokenizer.pad_token")
