"""The families people bring: grouped heads, untied heads, several end tokens, bfloat16; trainer and engine alike."""

import pytest
import torch
from conftest import random_pairs
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf.engine import HFEngine
from rlreason.model.packing import pack
from rlreason.model.policy import LogProbScorer, Policy

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 128,
}  # fmt: skip


def llama(vocab):
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab, tie_word_embeddings=False, eos_token_id=[0, 7], **SHAPE))


def qwen3(vocab):
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=vocab, head_dim=16, tie_word_embeddings=True, **SHAPE))


def olmo2(vocab):
    return Olmo2ForCausalLM(Olmo2Config(vocab_size=vocab, tie_word_embeddings=False, **SHAPE))


@pytest.mark.parametrize("family", [llama, qwen3, olmo2])
def test_trainer_and_engine_score_as_the_models_own_plain_forward_pass(family, tokenizer):
    torch.manual_seed(0)
    model = family(len(tokenizer)).eval()
    pairs = random_pairs(len(tokenizer), 5)
    model.set_attn_implementation("eager")
    expected = []
    for prompt, response in pairs:
        with torch.no_grad():
            log_probs = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].log_softmax(-1)
        expected += [log_probs[len(prompt) + t - 1, token] for t, token in enumerate(response)]
    policy = Policy(model, tokenizer)
    torch.testing.assert_close(policy.log_probs(pack(pairs))[0], torch.stack(expected), atol=3e-5, rtol=0)
    assert policy.shares_prompts, policy.remarks
    assert policy.end_ids >= ({0, 7} if family is llama else set())
    prompts = [Prompt(str(i), p, seed=i) for i, (p, _) in enumerate(pairs)]
    responses = HFEngine(policy).generate(prompts, Sampling(0.8, 0, 12), n=3)
    scores = LogProbScorer(policy, 256, 0.8).log_probs([(r.prompt_ids, r.token_ids) for r in responses])
    gaps = [abs(a - b) for r, s in zip(responses, scores, strict=True) for a, b in zip(r.log_probs, s, strict=True)]
    assert max(gaps) < 5e-5


def test_bfloat16_products_stay_close_in_trainer_and_engine(tokenizer):
    torch.manual_seed(0)
    policy = Policy(qwen3(len(tokenizer)), tokenizer, torch.bfloat16)
    exact = Policy(policy.model, tokenizer)
    pairs = random_pairs(len(tokenizer), 6)
    half, full = (p.log_probs(pack(pairs))[0] for p in (policy, exact))
    assert half.dtype == torch.float32
    assert 0 < (half - full).abs().mean() < 0.1
    responses = HFEngine(policy).generate([Prompt("p", [3, 4, 5], 0)], Sampling(1.0, 0, 16), n=8)
    scores = LogProbScorer(policy, 256).log_probs([(r.prompt_ids, r.token_ids) for r in responses])
    gaps = [abs(a - b) for r, s in zip(responses, scores, strict=True) for a, b in zip(r.log_probs, s, strict=True)]
    assert sum(gaps) / len(gaps) < 0.05


def test_a_sliding_window_limits_the_context(tokenizer):
    config = MistralConfig(vocab_size=len(tokenizer), sliding_window=24, **SHAPE)
    assert Policy(MistralForCausalLM(config), tokenizer).max_context == 24
    assert Policy(llama(len(tokenizer)), tokenizer).max_context == 128
