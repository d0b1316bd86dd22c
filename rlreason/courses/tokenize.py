"""Prompt and output strings to one right-padded batch of next-token pairs, as the courses define it.

The trainer does not use it: it learns on the sampled ids themselves, because tokenizing decoded text again may give
other ids.
"""

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase


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
    """The pad token's id, or the end token's where there is none: padding is never trained on."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    raise ValueError("the tokenizer has neither pad_token nor eos_token: set tokenizer.pad_token")
