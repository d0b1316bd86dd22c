"""What a run is made of, as far as it is known when its parts are built: for `provenance.json`.

What is known before torch is loaded is in `records.provenance`; here are hashes of data, prompts and weights, what the
engine was told, and the state of torch that decides how it rounds.
"""

import hashlib
import json
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlreason.config.leaves import leaves
from rlreason.config.run import RunConfig
from rlreason.engines.base import Engine, Sampling
from rlreason.engines.stops import Stops
from rlreason.engines.vllm.arguments import sampling_arguments
from rlreason.engines.vllm.engine import VLLMEngine
from rlreason.engines.vllm.many import ManyEngines
from rlreason.model.parameters import model_size
from rlreason.model.policy import Policy
from rlreason.model.weights_hash import weights_hash
from rlreason.runtime.secrets import redacted
from rlreason.setup.components import Components
from rlreason.setup.prompts import asked_how

DIGITS = 16  # of a digest
SEEDS = ("seed", "split_seed")
OF_THE_FILE = ("_name_or_path", "transformers_version")  # in a model's config, without being of the model


def facts_of(run: RunConfig, components: Components) -> dict[str, Any]:
    """The facts by group, plain values alone. Of the weights a sample is hashed: a large model takes about a second.

    To be called before training changes a weight, and before a checkpoint is read.
    """
    policy, evaluator = components.policy, components.evaluator
    prompts = {"prompt": run.asking.prompt} | (
        {} if run.evaluation.prompt is run.asking.prompt else {"eval.prompt": run.evaluation.prompt}
    )
    facts: dict[str, Any] = {
        "data": {"hash": components.data_hash, "sizes": components.sizes},
        "prompts": {key: digest(asked_how(prompt, policy.tokenizer)) for key, prompt in prompts.items()},
        "model": _model(run, policy),
        "tokenizer": tokenizer_digest(policy.tokenizer),
        "sampling": _sampling(components.sampling, policy),
        "eval_sampling": _sampling(evaluator.sampling, policy) | {"samples": evaluator.settings.samples},
        "engine": _engine(run, components.engine, components.sampling, policy),
        "seeds": {leaf.key: leaf.value for leaf in leaves(run) if leaf.key.rpartition(".")[2] in SEEDS},
        "device": device_facts(policy),
    }
    return redacted(facts)


def digest(value: Any) -> str:
    """16 hex digits of a plain value.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}), len(digest("x"))
    (True, 16)
    """
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:DIGITS]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """A digest of how text becomes token ids: vocabulary, rules, special tokens and the chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
    return digest([rules, sorted(tokenizer.all_special_ids), getattr(tokenizer, "chat_template", None)])


def device_facts(policy: Policy) -> dict[str, Any]:
    """Where the model is, and what decides how sums are rounded there."""
    device = policy.device
    facts: dict[str, Any] = {
        "type": device.type,
        "products": str(policy.compute_dtype).removeprefix("torch."),
        "head": str(policy.head_dtype).removeprefix("torch."),
        "weights": str(policy.weights).removeprefix("torch."),
        "attention": policy.attention,
        "threads": torch.get_num_threads(),
        "cpu_instructions": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device.type == "cuda":
        facts |= {
            "name": torch.cuda.get_device_name(device),
            "count": torch.cuda.device_count(),
            "capability": ".".join(map(str, torch.cuda.get_device_capability(device))),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return facts


def _model(run: RunConfig, policy: Policy) -> dict[str, Any]:
    config = policy.model.config
    shape = {key: value for key, value in config.to_dict().items() if key not in OF_THE_FILE}
    revision = getattr(config, "_commit_hash", None)  # of a model from the hub
    return {
        "name": run.model.name,
        **({"path": str(run.model.folder)} if run.model.folder is not None else {}),
        **({"revision": revision} if revision else {}),
        "config": digest(shape),
        "parameters": model_size(policy.model),
        "start_weights": weights_hash(policy.named_weights()),
    }


def _sampling(sampling: Sampling, policy: Policy) -> dict[str, Any]:
    """Every number of it, and the tokens that end a response: the model's own and those of a chat's turn."""
    told = asdict(sampling)
    lists = {"stop": list(sampling.stop), "tags": list(sampling.tags)}
    return told | lists | {"end_ids": sorted(policy.end_ids | sampling.end_ids)}


def _engine(run: RunConfig, engine: Engine, sampling: Sampling, policy: Policy) -> dict[str, Any]:
    """What the engine was told; of vLLM every argument, also those that were left at what they are."""
    facts: dict[str, Any] = {"name": run.rollout.engine, "max_rows": run.rollout.max_rows}
    if isinstance(engine, VLLMEngine | ManyEngines):
        stops = Stops(policy.tokenizer, sampling.stop, sampling.min_tokens, sampling.tags)
        ends = policy.end_ids | sampling.end_ids
        facts |= {"arguments": engine.arguments, "sampling": sampling_arguments(sampling, ends, stops.sees_special)}
    return facts
