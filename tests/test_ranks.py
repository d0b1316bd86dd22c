"""Training on several ranks, here processes that meet by gloo: the same gradient, weights and metrics as in one."""

import copy
from dataclasses import replace

import pytest
import torch
import transformers as hf
from conftest import random_pairs

from rlreason.errors import ConfigError
from rlreason.model.parameters import Hardware, choose_dtype, materialize, skeleton_of
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.runtime.machine import Place, place_of, world_of
from rlreason.training.build import frozen_copy, learner_settings, make_policy, set_trained
from rlreason.training.distributed import make_ranked_learner
from rlreason.training.learner import Learner
from rlreason.types import Grade, Response, Sample
from tests.run_settings import settings
from tests.test_trainer import run_of

SIZES = {
    "vocab_size": 400, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "eos_token_id": 0,
}  # fmt: skip
RIGHT = Grade(1.0, 1.0, 1.0, "correct")
#: Seven micro-batches that need a gradient and one that needs none: no number of ranks divides them evenly.
WORDS = (
    "gpus=2", "micro_batch_tokens=48", "train_batch_size=16", "max_grad_norm=1000", "learning_rate=0.01",
    "waits.run_s=120",
)  # fmt: skip


def samples_for(policy: Policy) -> list[Sample]:
    """Ragged ones: some of advantage 0, some without loss, and some that carry neither."""
    pairs = random_pairs(len(policy.tokenizer), 24, seed=3)
    advantages = [0.0 if i % 5 == 0 else (-1.0) ** i * (0.3 + i / 24) for i in range(24)]
    responses = [Response(f"p{i // 4}", p, r, [-1.0] * len(r), "", "stop") for i, (p, r) in enumerate(pairs)]
    zipped = enumerate(zip(responses, advantages, strict=True))
    return [Sample(one, RIGHT, advantage=a, has_loss=i % 7 != 0) for i, (one, a) in zipped]


def grouped_policy(tokenizer, tied: bool, products: torch.dtype, head: str, spread: bool) -> Policy:
    """Keys with fewer heads than queries, and two layers."""
    torch.manual_seed(0)
    sizes = SIZES | {"vocab_size": len(tokenizer), "num_hidden_layers": 2, "initializer_range": 0.1}
    config = hf.Qwen2Config(**sizes, tie_word_embeddings=tied, bos_token_id=None)
    heads = torch.bfloat16 if head == "bfloat16" else torch.float32
    return Policy(hf.Qwen2ForCausalLM(config), tokenizer, products, head_dtype=heads, in_main_memory=spread)


KL, CHECKPOINTING = ("kl_placement=loss", "kl_coef=0.1"), "model.gradient_checkpointing=true"
HALF = ("model.dtype=bfloat16", "model.head=bfloat16")
CASES = {  # name -> whether the head is tied, overrides
    "replicate": (True, ("parallel=replicate", *KL, "entropy_coef=0.01")),
    "shard, checkpointing": (True, ("parallel=shard", CHECKPOINTING)),
    "replicate, checkpointing, LoRA": (True, ("parallel=replicate", CHECKPOINTING, "model.lora.rank=4")),
    "shard, half precision": (False, ("parallel=shard", *HALF, CHECKPOINTING)),
    "replicate, four ranks": (True, ("parallel=replicate", "gpus=4")),
    "shard, untied, LoRA": (False, ("parallel=shard", "model.lora.rank=4", *KL)),
}
QUICK = ("replicate", "shard, checkpointing")


@pytest.mark.parametrize("case", [pytest.param(name, marks=[pytest.mark.long] * (name not in QUICK)) for name in CASES])
def test_ranks_follow_the_gradient_of_one_process_in_update_after_update(tokenizer, tmp_path, case):
    tied, words = CASES[case]
    run, _ = run_of(*WORDS, *words)
    products = choose_dtype(run.model.dtype, Hardware())
    policy = grouped_policy(tokenizer, tied, products, run.model.head, spread="parallel=shard" in words)
    set_trained(run.model, policy, run.seed)
    alone = Learner(policy.copy(), **learner_settings(run))
    reference = LogProbScorer(frozen_copy(policy), 96) if run.kl_placement != "none" else None
    samples = samples_for(policy)
    pairs = [(s.response.prompt_ids, s.response.token_ids) for s in samples]
    if reference:
        scores = reference.log_probs(pairs)
        samples = [replace(s, reference_log_probs=found) for s, found in zip(samples, scores, strict=True)]
    with_gradient = [needs for needs, _ in alone.step_micro_batches(samples)].count(True)
    assert with_gradient % int(run.gpus)  # some ranks have one more than others
    ranked = make_ranked_learner(run, policy, reference, int(run.gpus), tmp_path)
    try:
        if reference:  # which the ranks score together from now on
            assert_close(reference.log_probs(pairs), scores)
        for number in range(3):
            expected, found = alone.update(samples), ranked.update(samples)
            assert found.keys() == expected.keys()
            for name in expected:
                assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), (number, name)
            if number == 0:  # the first moment of Adam is a tenth of the first gradient
                gradients, ours = ([10 * state["exp_avg"] for state in by.moments()] for by in (alone, ranked))
                assert max(g.abs().max() for g in gradients) > 1e-3
                torch.testing.assert_close(ours, gradients, atol=1e-6, rtol=0)
            weights = dict(alone.policy.named_weights())
            for name, weight in policy.named_weights():  # of the whole copy, where the model is in parts
                differ = (weight - weights[name]).abs()  # Adam takes a gradient of rounding alone for a whole one
                assert differ.mean() < 1e-5, (number, name)  # a wrong gradient moves them by the rate, 0.01
                assert differ.max() < 1e-3, (number, name)
        assert_close(LogProbScorer(policy, 96).log_probs(pairs), LogProbScorer(alone.policy, 96).log_probs(pairs), 1e-3)
        assert (ranked.weights_are_finite(), ranked.broken_moments()) == (True, set())
    finally:
        ranked.ranks.close()
    lines = [line for path in tmp_path.glob("ranks.log") for line in path.read_text().splitlines()]
    assert not [line for line in lines if "gemm_4bit" not in line]  # which bitsandbytes lacks where peft imports it


def assert_close(found, expected, most: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=most)


def test_a_process_knows_its_place():
    """Bug: a rank trains on another's GPU, or a run on another number of ranks than was asked for."""
    env = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert place_of(env) == Place(3, 4, 3)
    assert place_of(env | {"WORLD_SIZE": "1", "RANK": "0"}) is None  # torchrun with one process
    with pytest.raises(ConfigError, match="gpus=3, and torchrun"):
        world_of("3", Place(0, 2, 0), 2)
    with pytest.raises(ConfigError, match="gpus=4, and 2 GPUs"):
        world_of("4", None, 2)
    for words in ("gpus=0", "gpus=many", "parallel=shard with optimizer=adamw_8bit"):
        with pytest.raises(ConfigError, match=words):
            run_of(*words.split(" with "))


PAIRS = [([3, 5, 7], [11, 13, 2]), ([4], [9, 9, 9])]


def test_a_skeleton_takes_no_memory_until_it_gets_some_part_by_part():
    """Bug: a model that is to be spread lies whole in memory first."""
    bones = skeleton_of(hf.Olmo2Config(**SIZES))
    assert all(tensor.is_meta for tensor in [*bones.parameters(), *bones.buffers()])
    materialize(bones.model.layers[0], torch.device("cpu"))
    for name, tensor in bones.named_parameters():
        assert tensor.is_meta != name.startswith("model.layers.0.")


def test_in_main_memory_nothing_is_brought_to_the_device(tokenizer, monkeypatch, tmp_path):
    """Which is one without memory: whatever is mixed with the model ends in an error."""
    model = hf.Olmo2ForCausalLM(hf.Olmo2Config(**SIZES))
    model.resize_token_embeddings(len(tokenizer))
    expected = LogProbScorer(Policy(copy.deepcopy(model), tokenizer, head_dtype=torch.bfloat16), 64).log_probs(PAIRS)
    here = Policy(copy.deepcopy(model), tokenizer, head_dtype=torch.bfloat16, in_main_memory=True)
    assert LogProbScorer(here, 64).log_probs(PAIRS) == expected
    here.save(tmp_path / "model")
    monkeypatch.setattr(Policy, "_check_first_layer", lambda self: None)  # on such a device nothing can be compared
    policy = Policy(model, tokenizer, head_dtype=torch.bfloat16, device=torch.device("meta"), in_main_memory=True)
    assert LogProbScorer(policy, 64).log_probs(PAIRS) == expected
    assert policy.copy().weights_device == torch.device("cpu")
    monkeypatch.undo()
    words = ("model=local", f"model.path={tmp_path / 'model'}", "rollout=hf", "gpus=2")
    for parallel in ("shard", "replicate"):
        assert make_policy(settings(*words, f"parallel={parallel}"), []).in_main_memory == (parallel == "shard")
