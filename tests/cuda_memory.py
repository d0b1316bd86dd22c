"""What autograd keeps of a forward pass on a GPU that is not there: `python tests/cuda_memory.py FOLDER`.

A line of JSON for each model of a published shape, in bfloat16: bytes kept, counted once for each storage,
with the copies that autocast makes. tests/test_memory_plan.py holds the memory plan's formula against them.
"""

import dataclasses
import json
import sys
from pathlib import Path

import torch
from fake_cuda import FakeCuda, FakePolicy, load_guard
from transformers import Olmo2Config, Olmo2ForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlreason.model.memory import PUBLISHED, ModelShape
from rlreason.model.parameters import checkpoint_layers

KINDS = {
    "none": (Qwen2Config, Qwen2ForCausalLM),
    "head": (Qwen3Config, Qwen3ForCausalLM),
    "whole": (Olmo2Config, Olmo2ForCausalLM),
}
PROMPT, RESPONSES = 100, (150, 180, 90, 200)  # of two groups; rows hold the prompt once for four responses
LAYERS = 4  # of each model: those behind them keep the same
SHAPES = {
    name: dataclasses.replace(PUBLISHED[name], layers=LAYERS)
    for name in ("Qwen/Qwen2.5-Math-1.5B", "Qwen/Qwen3-0.6B", "allenai/OLMo-2-0425-1B")
}


def model_of(shape: ModelShape):
    """A model of this shape on the GPU that is not there, without weights."""
    config, kind = KINDS[shape.qk_norm]
    sizes = {
        "vocab_size": shape.vocab, "hidden_size": shape.width, "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads, "head_dim": shape.head_dim,
        "num_key_value_heads": shape.kv_heads, "tie_word_embeddings": shape.tied, "pad_token_id": 1,
    }  # fmt: skip
    with torch.device("cuda"):
        return kind(config(**sizes))


def kept(policy: FakePolicy, batch) -> int:
    """Bytes that autograd keeps, without the weights."""
    weights = {p.untyped_storage()._cdata for p in policy.model.parameters()}
    seen: dict[int, int] = {}
    alive = []  # so that no storage takes the place of another

    def note(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            seen[storage._cdata] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.log_probs(batch)
    return sum(seen.values())


def measured(name: str, head: torch.dtype, shares: bool, checkpointing: bool) -> dict[str, object]:
    """Of one model: what was kept, and of how many tokens."""
    with FakeCuda():
        policy = FakePolicy(model_of(SHAPES[name]), torch.bfloat16, head, "varlen")
        policy.shares_prompts = shares
        if checkpointing:
            checkpoint_layers(policy.model)
        pairs = [([3] * PROMPT, [5 + i] * n) for i in range(2) for n in RESPONSES]
        pairs = [([3 + i // 4] * PROMPT, ids) for i, (_, ids) in enumerate(pairs)]
        batch = policy.pack(pairs)
        found = {"tokens": batch.input_ids.numel(), "scored": len(batch.score_at), "kept": kept(policy, batch)}
    asked = {"name": name, "head": head.itemsize, "shares": shares, "checkpointing": checkpointing}
    return found | asked


if __name__ == "__main__":
    load_guard(Path(sys.argv[1]))
    for shape in SHAPES:
        for head, shares, checkpointing in ((2, True, False), (4, False, False), (2, True, True)):
            dtype = torch.bfloat16 if head == 2 else torch.float32
            print(json.dumps(measured(shape, dtype, shares, checkpointing)), flush=True)
