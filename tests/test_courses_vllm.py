"""The handouts' vLLM helpers with the real vLLM on the processor."""

import pytest
import torch

from rlreason.courses import cs336_2025 as course
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy

pytest.importorskip("vllm")
pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore::FutureWarning")]


def test_an_instance_samples_from_the_policy_that_was_loaded_last(tokenizer, tmp_path):
    """Weights that do not arrive, a tied head that stays as it was, or a prefix cache with the old weights' keys."""
    from vllm import SamplingParams

    first, second = (build_model(len(tokenizer), width=128, init_scale=0.3, seed=seed).eval() for seed in (1, 2))
    Policy(first, tokenizer).save(tmp_path / "model")
    small = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "kv_cache_memory_bytes": 2**26}
    llm = course.init_vllm(
        str(tmp_path / "model"), "cpu", seed=0, block_size=32, generation_config="vllm", max_num_seqs=4, **small
    )
    prompt = tokenizer.encode("What is 17 + 25? " * 5, add_special_tokens=False)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)

    def sampled() -> list[int]:
        return list(llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)[0].outputs[0].token_ids)

    def greedy(model: torch.nn.Module) -> list[int]:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(12):
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    assert sampled() == greedy(first)
    for policy in (second, first):
        course.load_policy_into_vllm_instance(policy, llm)
        assert sampled() == greedy(policy)
    assert greedy(first) != greedy(second)
