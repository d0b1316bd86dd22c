"""The handouts' helpers around generation: start vLLM, give it a policy's weights, evaluate, log what was generated."""

import json
import os
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlreason.courses.shared import RewardFn, get_response_log_probs, tokenize_prompt_and_output
from rlreason.engines.vllm.weight_transfer import repack_tied_head
from rlreason.objectives.aggregation import masked_mean


def init_vllm(model_id: str, device: str, seed: int, gpu_memory_utilization: float = 0.85, **arguments: Any) -> Any:
    """A `vllm.LLM` on `device` ("cuda:1", "cpu"), in this process, in bfloat16 and with a prefix cache.

    `arguments` are more of `vllm.LLM`'s. `gpu_memory_utilization` is a share of the GPU's memory, 0 to 1.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # `load_policy_into_vllm_instance` hands over tensors
    import vllm

    index = torch.device(device).index
    own: dict[str, Any] = {
        "dtype": "bfloat16",
        "enable_prefix_caching": True,
        "gpu_memory_utilization": gpu_memory_utilization,
    }
    own |= {} if index is None else {"device_ids": [index]}
    return vllm.LLM(model_id, seed=seed, **(own | arguments))


def load_policy_into_vllm_instance(policy: PreTrainedModel, llm: Any) -> None:
    """Copy the current weights of `policy` into `llm`, made by `init_vllm`.

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

    Returns the mean of every part. `ValueError` where there are not as many ground truths as prompts.
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
    """(a row for each response, averages over them).

    A row has the texts, the parts of the reward, `token_entropy` (nats, mean over response tokens) and `length`
    (tokens). The averages are of all numbers, and of the length where the reward is positive and where it is not.
    """
    rows = _graded(reward_fn, prompts, rollout_responses, ground_truths)
    training = model.training
    model.eval()  # entropies are without dropout
    for row in rows:
        if not tokenizer.encode(row["response"], add_special_tokens=False):
            row |= {"token_entropy": 0.0, "length": 0}
            continue
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


def _means(rows: list[dict[str, Any]]) -> dict[str, float]:
    numbers = sorted({name for row in rows for name in row} - {"prompt", "response", "ground_truth"})
    return {f"mean_{name}": fmean(row.get(name, 0.0) for row in rows) for name in numbers}
