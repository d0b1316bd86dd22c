"""The families people bring: packed, or one sequence to a pass where layers carry a state; engine and trainer."""

import copy

import pytest
import torch
import transformers as t
from test_learner import RIGHT

from rlreason.config.training import OptimizationConfig
from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf import HFEngine
from rlreason.errors import ConfigError
from rlreason.model.packing import pack
from rlreason.model.policy import LogProbScorer, Policy, load_policy
from rlreason.objectives.objective import Objective
from rlreason.records.files import MANIFEST, write_json
from rlreason.runtime.clock import Clock
from rlreason.training.checkpoint import read_tensors, write_tensors
from rlreason.training.learner import Learner
from rlreason.training.train import measure_flops
from rlreason.types import Sample
from tests.some import some

SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 512, "initializer_range": 0.3, "tie_word_embeddings": True, "pad_token_id": 0,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 16, "num_hidden_layers": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
MIXED = ["linear_attention", "full_attention", "linear_attention"]
PLAIN = {**SHAPE, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
#: Name -> class, without its ending, and the sizes of its config.
FAMILIES = {
    "llama": ("Llama", {**PLAIN, "tie_word_embeddings": False, "eos_token_id": [0, 7]}),
    "qwen3": ("Qwen3", {**PLAIN, "head_dim": 16}),
    "lfm2": ("Lfm2", {**SHAPE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"]}),
    "falcon_h1": (
        "FalconH1", {**SHAPE, **MAMBA, "mamba_d_ssm": 64, "num_hidden_layers": 2, "lm_head_multiplier": 0.5}
    ),
    "granite": (
        "GraniteMoeHybrid",
        {**SHAPE, **MAMBA, "num_hidden_layers": 3, "layer_types": MIXED, "num_local_experts": 0, "logits_scaling": 2.0,
         "shared_intermediate_size": 48},
    ),
    "qwen3_next": ("Qwen3Next", {**SHAPE, **LINEAR}),
    "mamba2": (
        "Mamba2",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    ),
    "minimax": (
        "MiniMax", {**SHAPE, "num_hidden_layers": 2, "head_dim": 16, "num_local_experts": 2, "layer_types": MIXED[:2]}
    ),
    "mistral": ("Mistral", {**PLAIN, "sliding_window": 24}),
}  # fmt: skip


def made(family: str, tokenizer, **options) -> Policy:
    torch.manual_seed(0)
    name, sizes = FAMILIES[family]
    config = getattr(t, f"{name}Config")(vocab_size=len(tokenizer), **sizes)
    return Policy(getattr(t, f"{name}ForCausalLM")(config), tokenizer, **options)


PACKED, HYBRID = ["llama", "qwen3"], ["lfm2", "falcon_h1", "granite", "qwen3_next"]


@pytest.mark.parametrize("family", some([*PACKED, *HYBRID], 2))
def test_what_a_family_samples_is_what_its_own_forward_pass_scores(family, tokenizer):
    """A state that padding or another sequence gets into, or a scale behind the head that is left out."""
    policy = made(family, tokenizer)
    assert policy.packs == policy.shares_prompts == (family in PACKED), policy.remarks
    assert policy.end_ids >= ({0, 7} if family == "llama" else set())
    prompts = [Prompt(str(i), [(5 * i + j) % 90 + 7 for j in range(1 + i % 3)], i) for i in range(7)]
    sampling = Sampling(0.8, 2, 24)
    responses = HFEngine(policy, 9).generate(prompts, sampling, n=3)
    assert len({len(r.token_ids) for r in responses}) > 1, "none ends before another"
    scored = LogProbScorer(policy, 4096, 0.8).log_probs([(r.prompt_ids, r.token_ids) for r in responses])
    plain = copy.deepcopy(policy.model)
    plain.set_attn_implementation("eager")
    for response, scores in zip(responses, scored, strict=True):
        ids = torch.tensor([[*response.prompt_ids, *response.token_ids]])
        with torch.no_grad():
            own = (plain(ids, use_cache=False).logits[0] / 0.8).log_softmax(-1)
        begin = len(response.prompt_ids)
        own = [own[begin + t - 1, token].item() for t, token in enumerate(response.token_ids)]
        assert scores == pytest.approx(own, abs=1e-3)
        assert response.log_probs[2:] == pytest.approx(own[2:], abs=1e-3)  # before, ending is banned
    alone = HFEngine(policy, 9).generate(prompts[4:5], sampling, n=3)
    assert [r.token_ids for r in alone] == [r.token_ids for r in responses[12:15]]


def test_a_hybrid_trains_one_sequence_at_a_time_from_what_it_samples(tokenizer, tmp_path):
    made("lfm2", tokenizer).save(tmp_path / "model")
    policy = load_policy(str(tmp_path / "model"))
    assert "one sequence" in policy.describe()
    with pytest.raises(AssertionError):
        policy.log_probs(pack([([3, 4], [5]), ([6], [7, 8])]))
    with pytest.raises(ConfigError, match="parallel=shard"):
        made("lfm2", tokenizer, in_main_memory=True)
    engine, learner = HFEngine(policy), Learner(policy, Objective(), OptimizationConfig(1e-3))
    for step in range(2):
        prompts = [Prompt(str(i), [3 + i, 4, 5][: 1 + i], step) for i in range(3)]
        responses = engine.generate(prompts, Sampling(max_tokens=16), n=4)
        samples = [Sample(r, RIGHT, advantage=(-1.0) ** i) for i, r in enumerate(responses)]
        assert 0 < learner.update(samples)["rollout/mismatch_max"] < 1e-4


def test_a_model_that_does_not_sample_from_its_cache_as_it_scores_is_refused_and_a_window_limits_the_context(tokenizer):
    for family, named in (("mamba2", "Mamba2Mixer"), ("minimax", "linear_attention")):
        with pytest.raises(ConfigError, match=named):
            made(family, tokenizer)
    windows = made("mistral", tokenizer).max_context, made("llama", tokenizer).max_context
    assert windows == (24, SHAPE["max_position_embeddings"])


def test_a_model_for_pictures_too_has_the_window_and_the_sizes_of_its_text(tokenizer):
    """Bug: the sizes are looked up where there are none: no window bounds a text, and counting FLOPs ends the run."""
    text = {**PLAIN, "vocab_size": len(tokenizer), "head_dim": 16, "sliding_window": 24}
    text |= {"layer_types": ["sliding_attention", "full_attention"], "bos_token_id": 0, "eos_token_id": 0}
    sees = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sees |= {"image_size": 28, "patch_size": 14}
    config = t.Gemma3Config(text_config=text, vision_config=sees)
    policy, clock = Policy(t.AutoModelForCausalLM.from_config(config), tokenizer), Clock()
    measure_flops(clock, policy, 1)
    assert (policy.max_context, clock.model.layers) == (24, 2)


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_weights_are_read_back_into_every_family(family, tokenizer, tmp_path):
    """Bug: a mixture of experts, whose files name its weights otherwise, cannot go on from its checkpoint."""
    first, second = made(family, tokenizer), made(family, tokenizer)
    with torch.no_grad():
        for weight in first.model.parameters():
            weight.add_(1.0)
    learners = [Learner(policy, Objective(), OptimizationConfig(1e-3)) for policy in (first, second)]
    write_tensors(tmp_path, first, learners[0], {"one": torch.ones(1)})
    write_json(tmp_path / MANIFEST, {})
    read_tensors(tmp_path, second, learners[1])
    assert all(torch.equal(p, q) for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True))
