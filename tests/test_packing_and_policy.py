"""Padded, unpadded and packed sequences have the same log-probabilities; the right tokens are scored."""

import pytest
import torch
from conftest import random_pairs
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from rlreason.errors import ConfigError
from rlreason.model.attention import NAMES, end_to_end, one_by_one, select_kernel
from rlreason.model.log_probs import chunked_log_probs
from rlreason.model.packing import pack
from rlreason.model.policy import LogProbScorer, Policy, check_kernel, load_policy
from rlreason.training.build import check_hardware
from tests.run_settings import settings


def plain_log_probs(model, prompt, response, temperature=1.0):
    """The textbook way: one sequence, full logits, position t scored by the logits of t - 1."""
    ids = torch.tensor([prompt + response])
    log_probs = F.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float() / temperature, dim=-1)
    return torch.stack([log_probs[len(prompt) + t - 1, token] for t, token in enumerate(response)])


def test_packed_log_probs_equal_one_sequence_at_a_time(policy):
    pairs = random_pairs(len(policy.tokenizer), 9)
    flat, entropy = policy.log_probs(pack(pairs), 0.6)
    expected = torch.cat([plain_log_probs(policy.model, p, r, 0.6) for p, r in pairs])
    assert len(flat) == sum(len(r) for _, r in pairs) == len(entropy)
    torch.testing.assert_close(flat, expected, atol=2e-5, rtol=0)


def test_scoring_with_entropy_adds_the_entropies_and_keeps_the_order(policy):
    pairs = random_pairs(len(policy.tokenizer), 9)
    both = LogProbScorer(policy, 40, 0.7)(pairs)  # several packs, longest first
    assert [log_probs for log_probs, _ in both] == LogProbScorer(policy, 40, 0.7).log_probs(pairs)
    for (prompt, response), (_, entropy) in zip(pairs, both, strict=True):
        logits = policy.model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].detach() / 0.7
        expected = torch.distributions.Categorical(logits=logits[len(prompt) - 1 : -1]).entropy()
        torch.testing.assert_close(torch.tensor(entropy), expected, atol=2e-5, rtol=0)


def test_first_and_last_response_token_are_scored_end_token_included(policy):
    end = policy.tokenizer.eos_token_id
    batch = pack([([5, 6, 7], [8, 9, end]), ([4], [end])])
    assert batch.labels.tolist() == [8, 9, end, end]
    assert batch.score_at.tolist() == [2, 3, 4, 5]  # position 2 holds the prompt's last token, which predicts 8
    assert batch.input_ids[0].tolist() == [5, 6, 7, 8, 9, 4]


def test_rows_and_flat_are_the_same_numbers():
    batch = pack(random_pairs(50, 6))
    flat = torch.arange(1.0, len(batch.labels) + 1, requires_grad=True)
    rows = batch.to_rows(flat)
    assert torch.equal(rows[batch.response_mask], flat)
    rows.sum().backward()
    assert flat.grad is not None
    assert flat.grad.eq(1).all()


@pytest.mark.parametrize(
    ("asked", "capability", "dtype", "kernel"),
    [
        ("auto", (8, 0), torch.bfloat16, "varlen"),
        ("auto", None, torch.bfloat16, "sdpa"),
        ("auto", (9, 0), torch.float32, "sdpa"),
        ("sdpa", (8, 0), torch.bfloat16, "sdpa"),
        ("flash_attention_2", (9, 0), torch.bfloat16, "flash_attn"),  # not installed here
        ("varlen", (7, 0), torch.bfloat16, r"capability 7\.0.*model\.dtype=bfloat16"),
    ],
)
def test_which_kernel_is_taken_depends_on_hardware_and_number_type(asked, capability, dtype, kernel, monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capability)
    device = torch.device("cuda" if capability else "cpu")
    if kernel in ("sdpa", "varlen"):
        assert select_kernel(asked, device, dtype)[0] == kernel
        return
    with pytest.raises(ConfigError, match=rf"^model\.attention={asked} .*{kernel}"):
        select_kernel(asked, device, dtype)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it can run")
def test_the_kernel_is_checked_before_anything_slow():
    with pytest.raises(ConfigError, match=r"model\.attention=varlen .*no GPU"):
        check_hardware(settings("model.attention=varlen"))


def plain_kernel(q, k, v, bounds, longest, scale):
    """What a variable-length kernel computes, written out: (tokens, heads, head_dim) of sequences end to end."""
    assert bounds.dtype == torch.int32
    assert longest == int(bounds.diff().max())
    times, out = q.shape[1] // k.shape[1], torch.empty_like(q)
    for start, end in bounds.unfold(0, 2, 1).tolist():
        for head in range(q.shape[1]):
            scores = q[start:end, head] @ k[start:end, head // times].t() * (scale or q.shape[-1] ** -0.5)
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
            out[start:end, head] = scores.softmax(-1) @ v[start:end, head // times]
    return out


@pytest.mark.parametrize(("kv_heads", "scale"), [(1, None), (2, 0.3), (4, None)])
def test_a_kernel_over_sequences_end_to_end_is_one_causal_call_for_each(kv_heads, scale):
    torch.manual_seed(0)
    sizes = [5, 1, 9]
    bounds = torch.tensor([0, 5, 6, 15], dtype=torch.int32)
    q, k, v = (torch.randn(1, heads, 15, 8) for heads in (4, kv_heads, kv_heads))
    expected = one_by_one(q, k, v, sizes, scale)
    assert expected.shape == (1, 15, 4, 8)
    torch.testing.assert_close(end_to_end(plain_kernel, q, k, v, bounds, 9, scale), expected)
    torch.testing.assert_close(one_by_one(q, k, v, sizes, scale, repeat=True), expected)


def test_under_every_kernels_name_float32_numbers_are_the_same(policy):
    """The check of a model is in float32, which the flash kernels do not take."""
    pairs = random_pairs(len(policy.tokenizer), 4)
    expected = policy.log_probs(pack(pairs))[0]
    for name in NAMES.values():
        policy.model.set_attn_implementation(name)
        assert torch.equal(policy.log_probs(pack(pairs))[0], expected)
    check_kernel(policy)


def test_chunked_log_probs_match_full_logits_in_value_and_gradient():
    torch.manual_seed(0)
    h, w = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (10, 30))
    labels, weight = torch.randint(30, (10,)), torch.randn(10)
    full = F.log_softmax(h @ w.t() / 0.7, -1)
    expected = torch.autograd.grad((full.gather(1, labels[:, None])[:, 0] * weight).sum(), [h, w], retain_graph=True)
    log_probs, entropy = chunked_log_probs(h, w, labels, 0.7, 3)
    for mine, theirs in zip(torch.autograd.grad((log_probs * weight).sum(), [h, w]), expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy.double(), -(full.exp() * full).sum(-1).detach(), atol=1e-5, rtol=1e-5)


def test_a_saved_policy_loads_with_transformers_and_scores_alike(policy, tmp_path):
    policy.save(tmp_path / "model")
    assert not (tmp_path / "model.partial").exists()
    pairs = random_pairs(len(policy.tokenizer), 3)
    again = load_policy(str(tmp_path / "model"), "float32")
    torch.testing.assert_close(again.log_probs(pack(pairs))[0], policy.log_probs(pack(pairs))[0])
    for text in ("7+3=10 10-4=6 </think> <answer>6</answer>", "\\frac{1}{2} é 漢字 🙂\n\t x", " a  b "):
        assert again.tokenizer.decode(again.tokenizer.encode(text)) == text
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert plain.config._attn_implementation == "sdpa"  # nothing of ours is needed to load it
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "User: Max has 18 apples, gets 13. How many?\n <think> 18+13=31 </think> <answer>31</answer>"
    assert tokenizer.encode(text) == again.encode_prompt(text) == policy.encode_prompt(text)


def test_a_model_that_caps_its_logits_is_refused(tokenizer):
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="other log-probabilities"):
        Policy(Gemma2ForCausalLM(config), tokenizer)
