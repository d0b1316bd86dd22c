"""What makes a model need less memory changes that and nothing else, or says what else it changes."""

import copy
from importlib.util import find_spec

import pytest
import torch
from conftest import random_pairs
from test_learner import RIGHT
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from rlreason.config.model import LoRAConfig, ModelConfig, TinyModelConfig
from rlreason.config.training import OptimizationConfig
from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf import HFEngine
from rlreason.errors import ConfigError
from rlreason.model.packing import pack
from rlreason.model.parameters import add_lora, build_model, checkpoint_layers, freeze
from rlreason.model.policy import LogProbScorer, Policy
from rlreason.objectives.objective import Objective
from rlreason.training.build import frozen_copy, set_trained
from rlreason.training.learner import Learner, learning_rate_at, make_optimizer
from rlreason.types import Response, Sample

BFLOAT16 = torch.bfloat16


def model_of(tokenizer, tied, width, layers=2):
    """A built-in model, with its head tied to the embeddings or not."""
    model = build_model(len(tokenizer), width=width, layers=layers, init_scale=0.3, seed=1)
    if not tied:
        model.config.tie_word_embeddings = False
        with torch.random.fork_rng():
            torch.manual_seed(1)
            model = type(model)(model.config)
    return model


@pytest.fixture
def made(tokenizer):
    """A policy of two layers, with its head tied to the embeddings or not."""
    return lambda tied=True, layers=2, **options: Policy(model_of(tokenizer, tied, 32, layers), tokenizer, **options)


def train(policy, rate=1e-2) -> Learner:
    """One update on samples with gradients."""
    told = [Response("p", *pair, [], "", "stop") for pair in random_pairs(len(policy.tokenizer), 6)]
    samples = [Sample(response, RIGHT, advantage=1.0) for response in told]
    learner = Learner(policy, Objective(), OptimizationConfig(rate))
    assert learner.update(samples)["train/grad_norm"] > 0
    return learner


def scores(policy, count=4):
    return LogProbScorer(policy, 512).log_probs(random_pairs(len(policy.tokenizer), count))


def gradients(policy, pairs):
    policy.model.zero_grad()
    log_probs, entropy = policy.log_probs(pack(pairs))
    (log_probs.sum() + 0.3 * entropy.sum()).backward()
    return log_probs.detach(), {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


def gaps_of(responses, policy, temperature=1.0) -> list[float]:
    """The differences between an engine's log-probabilities and the policy's."""
    scored = LogProbScorer(policy, 4096, temperature).log_probs([(r.prompt_ids, r.token_ids) for r in responses])
    return [abs(a - b) for r, s in zip(responses, scored, strict=True) for a, b in zip(r.log_probs, s, strict=True)]


def engine_gap(policy):
    """The largest of these of the embedded engine."""
    prompts = [Prompt(str(i), p, seed=i) for i, (p, _) in enumerate(random_pairs(len(policy.tokenizer), 4))]
    return max(gaps_of(HFEngine(policy).generate(prompts, Sampling(1.0, 0, 10), n=2), policy))


def test_recomputed_activations_give_the_same_gradient_without_dropout(tokenizer, made):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_embd=32, n_layer=2, n_head=4, n_positions=64, eos_token_id=0,
        resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5, initializer_range=0.3,
    )  # fmt: skip
    pairs = random_pairs(len(tokenizer), 8)
    for policy in (made(layers=6), Policy(GPT2LMHeadModel(config), tokenizer)):
        expected = gradients(policy, pairs)
        checkpoint_layers(policy.model)
        torch.testing.assert_close(gradients(policy, pairs), expected, atol=1e-6, rtol=1e-5)
        assert engine_gap(policy) < 5e-5


def test_a_copy_recomputes_with_its_own_weights(made):
    """A frozen reference is a deepcopy of the policy: training the policy must not move it."""
    policy = made()
    checkpoint_layers(policy.model)
    reference = Policy(copy.deepcopy(policy.model), policy.tokenizer)
    before = scores(reference)
    train(policy)
    assert scores(reference) == before != scores(policy)


def test_a_reference_model_shares_what_adapters_leave_as_it_is(made):
    """Bug: with LoRA a KL term takes the memory of a whole second model, or its reference moves."""
    pytest.importorskip("peft")
    policy = made()
    add_lora(policy.model, 4, 8.0, None, seed=0)
    reference, before = frozen_copy(policy), scores(policy)
    train(policy)
    assert scores(reference) == before != scores(policy)
    ours, its = (dict(one.model.named_parameters()) for one in (policy, reference))
    assert all((ours[name] is its[name]) == (not ours[name].requires_grad) for name in ours)


@pytest.mark.parametrize("tied", [True, False])
def test_half_weights_round_everything_but_the_head(made, tied):
    full, half = made(tied, compute_dtype=BFLOAT16), made(tied, weights=BFLOAT16)
    kept = {name for name, p in half.model.named_parameters() if p.dtype == torch.float32}
    assert kept == ({"model.embed_tokens.weight"} if tied else {"lm_head.weight"})
    assert (half.model.get_input_embeddings().weight is half.head) == tied
    assert half.compute_dtype == BFLOAT16
    for (name, a), (_, b) in zip(full.model.named_parameters(), half.model.named_parameters(), strict=True):
        assert torch.equal(a if name in kept else a.bfloat16(), b)
    assert all(buffer.dtype != BFLOAT16 for buffer in half.model.buffers())
    batch = pack(random_pairs(len(half.tokenizer), 6))
    (expected, _), (found, _) = full.log_probs(batch), half.log_probs(batch)
    assert found.dtype == torch.float32
    assert (found - expected).abs().mean() < 0.05
    assert engine_gap(half) < 0.3  # half-precision products in another order


def test_frozen_weights_stay_and_the_rest_moves(made, policy):
    untied = made(tied=False)
    freeze(untied.model, ["model.embed_tokens*", "layers.0.*"])
    before = {name: p.detach().clone() for name, p in untied.model.named_parameters()}
    train(untied)
    moved = {name for name, p in untied.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == {n for n in before if not n.startswith(("model.embed_tokens", "model.layers.0."))}
    assert "lm_head.weight" in moved
    freeze(policy.model, ["lm_head*"])  # of two tied weights both
    assert not policy.head.requires_grad


def test_a_pattern_without_a_match_is_refused_and_all_is_too_much(policy):
    with pytest.raises(ConfigError, match=r"model\.embed_token\.\* matches no name"):
        freeze(policy.model, ["model.embed_token.*"])
    assert all(p.requires_grad for p in policy.model.parameters())
    with pytest.raises(ConfigError, match="leaves nothing to train"):
        freeze(policy.model, ["*"])
    contradictions = {"weights": "bfloat16", "dtype": "float32"}, {"freeze": ["a"], "lora": LoRAConfig(rank=4)}
    assert all(len(ModelConfig("m", **settings).problems()) == 1 for settings in contradictions)
    if find_spec("peft"):
        with pytest.raises(ConfigError, match=r"model\.lora\.targets: q_prj matches no name"):
            add_lora(policy.model, 4, 8.0, ["q_prj"], seed=0)


@pytest.mark.parametrize("tied", [True, False])
def test_adapters_start_as_nothing_are_trained_alone_and_are_saved_as_a_plain_model(made, tied, tmp_path):
    pytest.importorskip("peft")
    policy = made(tied)
    before, weights = scores(policy), {n: w.clone() for n, w in policy.named_weights()}
    layers = [m for n, m in policy.model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    add_lora(policy.model, 4, 8.0, None, seed=0)
    assert scores(policy) == before
    trained = sum(p.numel() for p in policy.model.parameters() if p.requires_grad)
    assert trained == sum(4 * (m.in_features + m.out_features) for m in layers)
    train(policy)
    merged = dict(policy.named_weights())
    assert merged.keys() == weights.keys()
    moved = {n for n in weights if not torch.equal(merged[n], weights[n])}
    assert moved == {n for n in weights if n.endswith("proj.weight")}
    assert engine_gap(policy) < 5e-5
    after = scores(policy)
    policy.save(tmp_path / "model")
    assert scores(policy) == after
    train(policy)  # goes on
    plain, report = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not {*report["missing_keys"], *report["unexpected_keys"]}
    for ours, theirs in zip(after, scores(Policy(plain, policy.tokenizer)), strict=True):
        assert ours == pytest.approx(theirs, abs=2e-5)


def test_adapters_of_half_weights_are_exact_seeded_and_described(made):
    """Bug: adapters of half precision, unseeded ones, or a description that leaves one of the settings out."""
    pytest.importorskip("peft")
    settings = TinyModelConfig("tiny", weights="bfloat16", gradient_checkpointing=True, lora=LoRAConfig(rank=4))
    assert not settings.problems()
    first, again = made(weights=BFLOAT16), made(weights=BFLOAT16)
    for policy in (first, again):
        set_trained(settings, policy, seed=0)
        assert all(p.dtype == torch.float32 for p in policy.model.parameters() if p.requires_grad)
        train(policy, 1e-4)
    assert scores(first) == scores(again)
    assert all(words in first.describe() for words in ("bfloat16", "LoRA rank 4", "computed again"))


@pytest.mark.parametrize(("name", "kind"), [("adamw", "AdamW"), ("adamw_8bit", "AdamW8bit")])
def test_the_optimizer_is_the_one_asked_for_with_its_rate_betas_and_decay(name, kind):
    """Bug: a setting does not reach the library's optimizer, or takes another one's place."""
    pytest.importorskip("bitsandbytes")
    optimizer = make_optimizer(OptimizationConfig(0.05, optimizer=name, weight_decay=0.01), [torch.ones(1)])
    (group,) = optimizer.param_groups
    given = type(optimizer).__name__, group["lr"], group["betas"], group["weight_decay"]
    assert given == (kind, 0.05, (0.9, 0.95), 0.01)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_rates_are_those_of_transformers_but_the_warm_up_is_a_step_ahead(kind):
    from transformers import get_scheduler  # which imports peft: a second in every test process

    name, warmup = "constant_with_warmup" if kind == "constant" else kind, 3
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    (theirs,) = get_scheduler(name, optimizer, num_warmup_steps=warmup, num_training_steps=10).lr_lambdas
    for done in range(10):
        rate = learning_rate_at(done, 1.0, 10.0, 2.0, kind, warmup)
        assert rate == pytest.approx(2.0 * theirs(done + 1 if done < warmup - 1 else max(done, warmup)), abs=1e-12)
    for total, updates, steps in ((1, 1, 0), (1, 3, 1), (7, 2, 3), (5, 3, 5)):  # several updates a step: none is wasted
        rates = [learning_rate_at(u / updates, 1 / updates, total, 0.1, kind, steps) for u in range(total * updates)]
        assert rates[max(steps * updates - 1, 0)] == pytest.approx(0.1) == max(rates)
        assert min(rates) > 0
