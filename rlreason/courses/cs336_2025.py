"""Stanford CS336, assignment 5 of spring 2025: SFT, expert iteration and GRPO on MATH; 2026 shares some functions."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlreason.engines.vllm_server import repack_tied_head
from rlreason.objectives.advantages import compute_group_advantages
from rlreason.objectives.aggregation import aggregate_loss, masked_mean, masked_normalize
from rlreason.objectives.losses import LOSSES
from rlreason.objectives.terms import compute_entropy, gather_log_probs

__all__ = [
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_policy_gradient_loss",
    "evaluate_vllm",
    "get_response_log_probs",
    "grpo_microbatch_train_step",
    "init_vllm",
    "load_policy_into_vllm_instance",
    "log_generations",
    "masked_mean",
    "masked_normalize",
    "sft_microbatch_train_step",
    "tokenize_prompt_and_output",
]

LossType = Literal["no_baseline", "reinforce_with_baseline", "grpo_clip", "grpo_no_clip"]
Value = TypeVar("Value")
RewardFn = Callable[[str, str], dict[str, float]]


def get_response_log_probs(
    model: Any, input_ids: Tensor, labels: Tensor, return_token_entropy: bool = False
) -> dict[str, Tensor]:
    """Return `log_probs` of the labels and, if asked, `token_entropy`; both (batch, seq) float32.

    The labels are already shifted. Prompt and padding positions are scored like any other; the caller masks.
    No attention mask is needed: padding is on the right, and earlier positions of a causal model do not attend to it.
    """
    logits = model(input_ids).logits
    scored = {"log_probs": gather_log_probs(logits, labels)}
    if return_token_entropy:
        scored["token_entropy"] = compute_entropy(logits)
    return scored


def score_rollouts(
    reward_fn: RewardFn, rollout_responses: list[str], repeated_ground_truths: list[str]
) -> tuple[Tensor, dict[str, float]]:
    """Return the total rewards (n,) float32, and the mean of every part of the reward.

    `reward_fn(response, ground truth)` returns the parts by name: `reward` is the total; `format_reward` and
    `answer_reward` are usual. `ValueError` if ground truths are not repeated, one for each response.
    """
    rows = _graded(reward_fn, rollout_responses, rollout_responses, repeated_ground_truths)
    return torch.tensor([row["reward"] for row in rows], dtype=torch.float32), _means(rows)


def consecutive_groups(n_samples: int, group_size: int) -> Tensor:
    """Return the group ids (n,) int64 of samples in runs of `group_size`. `ValueError` for an incomplete group.

    >>> consecutive_groups(6, 3)
    tensor([0, 0, 0, 1, 1, 1])
    """
    if n_samples % group_size:
        raise ValueError(f"group_size={group_size} does not divide {n_samples} responses into groups")
    return torch.arange(n_samples) // group_size


def required(value: Value | None, name: str, option: str) -> Value:
    """Return `value`; `ValueError` that names the option if it is None."""
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
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in prompt_strs]
    outputs = [tokenizer.encode(text, add_special_tokens=False) for text in output_strs]
    pairs = list(zip(prompts, outputs, strict=True))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id  # never trained on
    rows = [torch.tensor(prompt + output, dtype=torch.int64) for prompt, output in pairs]
    flags = [torch.tensor([False] * len(prompt) + [True] * len(output), dtype=torch.bool) for prompt, output in pairs]
    full = pad_sequence(rows, batch_first=True, padding_value=pad)
    is_output = pad_sequence(flags, batch_first=True)
    return {"input_ids": full[:, :-1], "labels": full[:, 1:], "response_mask": is_output[:, 1:]}


def init_vllm(model_id: str, device: str, seed: int, gpu_memory_utilization: float = 0.85, **arguments: Any) -> Any:
    """Return a `vllm.LLM` on `device` ("cuda:1", "cpu"), in this process, in bfloat16 and with a prefix cache.

    `arguments` are further ones of `vllm.LLM`. `gpu_memory_utilization` is a share of the GPU's memory, 0 to 1.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # `load_policy_into_vllm_instance` hands over tensors
    import vllm

    index = torch.device(device).index
    own: dict[str, Any] = {"dtype": "bfloat16", "enable_prefix_caching": True}
    if index is not None:
        own["device_ids"] = [index]
    return vllm.LLM(model_id, seed=seed, gpu_memory_utilization=gpu_memory_utilization, **(own | arguments))


def load_policy_into_vllm_instance(policy: PreTrainedModel, llm: Any) -> None:
    """Copy the current weights of `policy` into `llm`, which `init_vllm` returned.

    The prefix cache is emptied: it holds keys and values of the old weights.
    """
    llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(policy.state_dict().items())})
    llm.apply_model(repack_tied_head)
    llm.reset_prefix_cache()


def evaluate_vllm(
    vllm_model: Any,
    reward_fn: RewardFn,
    prompts: list[str],
    eval_sampling_params: Any,
    ground_truths: list[str],
    path: str | Path,
) -> dict[str, float]:
    """Sample one response a prompt, and write one JSON line for each to `path`: texts and parts of the reward.

    Returns the mean of every part. `ValueError` if there are not as many ground truths as prompts.
    """
    outputs = vllm_model.generate(prompts, eval_sampling_params)
    rows = _graded(reward_fn, prompts, [output.outputs[0].text for output in outputs], ground_truths)
    Path(path).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return _means(rows)


@torch.no_grad()
def log_generations(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    reward_fn: RewardFn,
    prompts: list[str],
    rollout_responses: list[str],
    ground_truths: list[str],
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return a row for each response, and averages over them.

    A row has the texts, the parts of the reward, `token_entropy` (nats, mean over response tokens) and `length`
    (tokens). The averages are of all numbers, and of the length with a positive reward and without one.
    """
    rows = _graded(reward_fn, prompts, rollout_responses, ground_truths)
    training = model.training
    model.eval()  # entropies are without dropout
    for row in rows:
        one = tokenize_prompt_and_output([row["prompt"]], [row["response"]], tokenizer)
        ids, labels, mask = (one[name].to(model.device) for name in ("input_ids", "labels", "response_mask"))
        entropy = get_response_log_probs(model, ids, labels, return_token_entropy=True)["token_entropy"]
        row["token_entropy"] = masked_mean(entropy, mask, empty="zero").item()
        row["length"] = int(mask.sum())
    model.train(training)
    metadata = _means(rows)
    for name, right in (("mean_length_correct", True), ("mean_length_incorrect", False)):
        if lengths := [row["length"] for row in rows if (row["reward"] > 0) == right]:
            metadata[name] = fmean(lengths)
    return rows, metadata


def _graded(reward_fn: RewardFn, prompts: list[str], responses: list[str], truths: list[str]) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt, "response": response, "ground_truth": truth, **reward_fn(response, truth)}
        for prompt, response, truth in zip(prompts, responses, truths, strict=True)
    ]


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    numbers = sorted({name for row in rows for name in row} - {"prompt", "response", "ground_truth"})
    return {f"mean_{name}": fmean(row.get(name, 0.0) for row in rows) for name in numbers}


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call backward on the negative log-likelihood: masked sum / normalize_constant, mean over rows.

    (batch, seq) log-probabilities and mask -> the scalar loss / `gradient_accumulation_steps`, and metadata.
    """
    loss = _backward(-policy_log_probs, response_mask, gradient_accumulation_steps, "constant", normalize_constant)
    return loss, {"response_tokens": response_mask.sum()}


def _backward(
    per_token_loss: Tensor, mask: Tensor, accumulation: int, length_norm: str, constant: float | None = None
) -> Tensor:
    """Call backward on the rows' share of a batch of `accumulation` parts; return that loss."""
    n_rows = len(mask) * accumulation
    loss = aggregate_loss(per_token_loss, mask, length_norm, n_sequences=n_rows, n_tokens=0, constant=constant)
    loss.backward()
    return loss.detach()


def compute_group_normalized_rewards(
    reward_fn: RewardFn,
    rollout_responses: list[str],
    repeated_ground_truths: list[str],
    group_size: int,
    advantage_eps: float,
    normalize_by_std: bool,
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return (advantages (n,), raw rewards (n,), metadata); groups are consecutive runs of `group_size`."""
    rewards, metadata = score_rollouts(reward_fn, rollout_responses, repeated_ground_truths)
    advantages = compute_group_advantages(
        rewards,
        consecutive_groups(len(rewards), group_size),
        baseline="mean",
        std_norm="group_std" if normalize_by_std else "none",
        advantage_eps=advantage_eps,
    )
    return advantages, rewards, metadata


def token_loss(
    name: str,
    advantages: Tensor,
    policy_log_probs: Tensor,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
    response_mask: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of this name per token, and per-token statistics; without a mask, of all positions.

    `ValueError` if an argument that the loss needs is None.
    """
    loss, clip = LOSSES[name], dict[str, float]()
    if loss.has_ratio:
        required(old_log_probs, "old_log_probs", name)
    if "cliprange_low" in loss.numbers:
        bound = required(cliprange, "cliprange", name)
        clip = {"cliprange_low": bound, "cliprange_high": bound}
    if response_mask is None:
        response_mask = torch.ones_like(policy_log_probs, dtype=torch.bool)
    return loss(advantages, policy_log_probs, old_log_probs, response_mask, **clip)


def compute_naive_policy_gradient_loss(raw_rewards_or_advantages: Tensor, policy_log_probs: Tensor) -> Tensor:
    """Return -A log pi: (batch, 1), (batch, seq) -> (batch, seq)."""
    return token_loss("reinforce_with_baseline", raw_rewards_or_advantages, policy_log_probs)[0]


def compute_grpo_clip_loss(
    advantages: Tensor, policy_log_probs: Tensor, old_log_probs: Tensor, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped surrogate per token, and its per-token `ratio` and `clipped`."""
    return token_loss("grpo_clip", advantages, policy_log_probs, old_log_probs, cliprange)


def compute_policy_gradient_loss(
    policy_log_probs: Tensor,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the per-token loss (batch, seq) of `loss_type`, and metadata.

    `no_baseline` uses the raw rewards, the others the advantages. `ValueError` if an argument it needs is None.
    """
    if loss_type not in get_args(LossType):
        raise ValueError(f"loss_type={loss_type!r}: choose one of {get_args(LossType)}")
    name, given = ("raw_rewards", raw_rewards) if loss_type == "no_baseline" else ("advantages", advantages)
    a = required(given, name, loss_type)
    return token_loss(loss_type, a, policy_log_probs, old_log_probs, cliprange)


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: LossType,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Call backward on the mean per response, mean over the rows, / `gradient_accumulation_steps`.

    Returns that loss, and the per-token statistics averaged over response tokens.
    """
    per_token_loss, stats = compute_policy_gradient_loss(
        policy_log_probs, loss_type, raw_rewards, advantages, old_log_probs, cliprange
    )
    loss = _backward(per_token_loss, response_mask, gradient_accumulation_steps, "masked_mean")
    return loss, {name: masked_mean(values, response_mask, empty="zero") for name, values in stats.items()}
