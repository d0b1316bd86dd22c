"""Models that stand for one that is too large to be whole in a place: without numbers, or with one layer."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, Olmo2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from rlreason.model.parameters import add_lora, materialize, one_layer_of, skeleton_of, with_one_layer
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.training.build import is_spread, make_policy
from tests.run_settings import settings

SIZES = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": 0,
}  # fmt: skip
IDS = torch.tensor([[3, 1, 4, 1, 5]])
PAIRS = [([3, 5, 7], [11, 13, 2]), ([4], [9, 9, 9])]
FAMILIES = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**SIZES)),
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True)),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_one_layer_computes_what_the_whole_one_does_without_its_other_layers(family, tokenizer):
    whole = FAMILIES[family]().eval()
    short = with_one_layer(whole)
    assert (short.config.num_hidden_layers, whole.config.num_hidden_layers) == (1, 3)
    mixed = Qwen3Config(**SIZES, head_dim=16, layer_types=["full_attention", "sliding_attention", "full_attention"])
    assert one_layer_of(mixed).layer_types == ["full_attention"]
    cut = copy.deepcopy(whole)
    cut.model.layers = cut.model.layers[:1]
    with torch.no_grad():
        torch.testing.assert_close(short(IDS).logits, cut(IDS, use_cache=False).logits)
        add_lora(whole, 4, 8.0, None, seed=0)
        for name, parameter in whole.named_parameters():
            if ".lora_" in name:
                parameter.normal_(std=0.1)
        short = with_one_layer(whole)  # adapters are added in
        whole.model.layers = whole.model.layers[:1]
        torch.testing.assert_close(short(IDS).logits, whole(IDS, use_cache=False).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_skeleton_takes_no_memory_until_it_gets_some_part_by_part(family):
    whole = FAMILIES[family]().eval()
    bones = skeleton_of(whole.config)
    named = {name: tensor.shape for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]}
    own = dict([*bones.named_parameters(), *bones.named_buffers()])
    assert {name: tensor.shape for name, tensor in own.items()} == named
    assert all(tensor.is_meta for tensor in own.values())
    materialize(bones.model.layers[0], torch.device("cpu"))
    there = {name for name, tensor in bones.named_parameters() if not tensor.is_meta}
    assert there == {name for name in named if name.startswith("model.layers.0.")}
    materialize(bones, torch.device("cpu"))
    tied = bones.get_output_embeddings().weight is bones.get_input_embeddings().weight
    assert tied == whole.config.tie_word_embeddings
    with torch.no_grad():
        for tensor, source in zip(
            [*bones.parameters(), *bones.buffers()], [*whole.parameters(), *whole.buffers()], strict=True
        ):
            tensor.copy_(source)
        torch.testing.assert_close(bones(IDS).logits, whole(IDS).logits)


def test_in_main_memory_nothing_is_brought_to_the_device(tokenizer, monkeypatch, tmp_path):
    """Which is one without memory: whatever is mixed with the model ends in an error."""
    model = FAMILIES["llama"]()
    model.resize_token_embeddings(len(tokenizer))
    expected = LogProbScorer(Policy(copy.deepcopy(model), tokenizer, head_dtype=torch.bfloat16), 64).log_probs(PAIRS)
    here = Policy(copy.deepcopy(model), tokenizer, head_dtype=torch.bfloat16, in_main_memory=True)
    assert LogProbScorer(here, 64).log_probs(PAIRS) == expected
    here.save(tmp_path / "model")
    monkeypatch.setattr(Policy, "_check_first_layer", lambda self: None)  # on such a device nothing can be compared
    there = {"device": torch.device("meta"), "in_main_memory": True}
    policy = Policy(model, tokenizer, head_dtype=torch.bfloat16, **there)
    assert LogProbScorer(policy, 64).log_probs(PAIRS) == expected
    assert policy.copy().weights_device == torch.device("cpu")
    monkeypatch.undo()
    words = ("model=local", f"model.path={tmp_path / 'model'}", "rollout=hf", "gpus=2")
    for parallel in ("shard", "replicate"):
        run = settings(*words, f"parallel={parallel}")
        assert is_spread(run) == make_policy(run, []).in_main_memory == (parallel == "shard")
    assert not is_spread(settings("gpus=2", "parallel=shard"))  # made on the spot, and taught as a whole
