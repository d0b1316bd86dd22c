"""Single, packed and prompt-sharing sequences have the same log-probabilities and gradients, of the right tokens."""

import random
from itertools import pairwise

import pytest
import torch
from conftest import random_pairs
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_learner import OBJECTIVES, RIGHT, gradient_of
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from rlreason.config.training import OptimizationConfig
from rlreason.errors import ConfigError
from rlreason.model import policy as model_policy
from rlreason.model.attention import NAMES, one_by_one, select_kernel
from rlreason.model.packing import attention_by_layout, divide, pack
from rlreason.model.parameters import build_model
from rlreason.model.policy import LogProbScorer, Policy, check_kernel, load_policy
from rlreason.records.console import Console
from rlreason.training.build import build_components
from rlreason.training.learner import Learner
from rlreason.types import Response, Sample
from tests.run_settings import settings


def test_packed_scores_equal_one_sequence_at_a_time_in_the_order_given(policy):
    """The textbook way: one sequence, full logits, position t scored by the logits of t - 1."""
    pairs = random_pairs(len(policy.tokenizer), 9)
    both = LogProbScorer(policy, 40, 0.7)(pairs)  # several packs, longest first
    assert [log_probs for log_probs, _ in both] == LogProbScorer(policy, 40, 0.7).log_probs(pairs)
    flat, entropies = policy.log_probs(pack(pairs), 0.7)
    assert len(flat) == sum(len(r) for _, r in pairs) == len(entropies)
    at = 0
    for (prompt, response), (log_probs, entropy) in zip(pairs, both, strict=True):
        ids = torch.tensor([prompt + response])
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].detach().float() / 0.7
        expected = torch.distributions.Categorical(logits=logits)
        exact = [expected.log_prob(torch.tensor(response)), expected.entropy()]
        here = slice(at, at + len(response))
        for found in ([torch.tensor(log_probs), torch.tensor(entropy)], [flat[here], entropies[here]]):
            torch.testing.assert_close(found, exact, atol=2e-5, rtol=0)
        at += len(response)


@pytest.mark.parametrize(
    ("asked", "capability", "dtype", "kernel"),
    [
        ("auto", (8, 0), torch.bfloat16, "varlen"),
        ("auto", None, torch.bfloat16, "sdpa"),
        ("auto", (9, 0), torch.float32, "sdpa"),
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
def test_the_kernel_is_checked_before_anything_slow(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.attention=varlen .*no GPU"):
        build_components(settings("model.attention=varlen"), tmp_path, Console())


@pytest.mark.parametrize(("kv_heads", "scale"), [(1, 8**-0.5), (2, 0.3), (4, 8**-0.5)])
def test_a_row_of_sequences_is_one_causal_call_for_each(kv_heads, scale):
    """A sequence that attends to its neighbour, or heads that get another head's keys."""
    torch.manual_seed(0)
    layout = pack([([1] * 4, [2] * 2), ([1], [2]), ([1] * 8, [2] * 2)]).layout
    q, k, v = (torch.randn(1, heads, 15, 8) for heads in (4, kv_heads, kv_heads))
    expected = one_by_one(q, k, v, list(layout.parts.queries), scale)
    assert expected.shape == (1, 15, 4, 8)
    ours = attention_by_layout(*(x[0].transpose(0, 1) for x in (q, k, v)), layout, scale)
    torch.testing.assert_close(ours[None], expected)
    torch.testing.assert_close(one_by_one(q, k, v, list(layout.parts.queries), scale, repeat=True), expected)


def test_under_every_kernels_name_float32_numbers_are_the_same(policy):
    """The check of a model is in float32, which the flash kernels do not take."""
    pairs = random_pairs(len(policy.tokenizer), 4)
    expected = policy.log_probs(pack(pairs))[0]
    for name in NAMES.values():
        policy.model.set_attn_implementation(name)
        assert torch.equal(policy.log_probs(pack(pairs))[0], expected)
    check_kernel(policy)


def test_a_model_that_learned_a_chats_end_is_saved_with_it(tokenizer, tmp_path):
    """Bug: served, a base model that was trained in a chat template runs on behind its turn."""
    policy = Policy(build_model(len(tokenizer), width=16, layers=1), tokenizer)
    before = policy.end_ids
    policy.ends_turns_with(None)
    assert policy.end_ids == before
    policy.ends_turns_with(7)
    policy.save(tmp_path / "model")
    assert load_policy(str(tmp_path / "model")).end_ids == before | {7}


def test_a_saved_policy_loads_with_transformers_and_scores_alike(policy, tmp_path):
    policy.save(tmp_path / "model")
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
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5, initializer_range=0.5,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="other log-probabilities"):
        Policy(Gemma2ForCausalLM(config), tokenizer)


def test_a_model_is_refused_for_other_numbers_and_not_for_rounding(policy, monkeypatch):
    """Bug: a pretrained model whose large activations round by more in float32 cannot be loaded once it was trained,
    or is compared in float64 but for its norms and its softmax, which round as before.
    """
    packed, before = model_policy._packed_log_probs, {name: w.clone() for name, w in policy.named_weights()}
    compare, apart = model_policy._largest_difference, list[float]()

    def rounded(policy, share=False):
        return packed(policy, share) + (0.01 if policy.head.dtype == torch.float32 else 0.0)

    monkeypatch.setattr(model_policy, "_packed_log_probs", rounded)
    monkeypatch.setattr(model_policy, "_largest_difference", lambda *of: apart.append(compare(*of)) or apart[-1])
    loaded = dict(Policy(policy.model, policy.tokenizer).named_weights())
    assert all(loaded[name].dtype == w.dtype and loaded[name].equal(w) for name, w in before.items())
    assert (0.009 < apart[0] < 0.011, apart[1] < 1e-10, len(apart)) == (True, True, 2)
    monkeypatch.setattr(model_policy, "_packed_log_probs", lambda policy, share=False: packed(policy, share) + 0.01)
    with pytest.raises(ConfigError, match="its own forward pass"):
        Policy(policy.model, policy.tokenizer)


# A prompt that several responses share is computed once, and gives what repeated prompts give


def groups(vocab: int, sizes=(3, 1, 8, 2), seed=0) -> list[tuple[list[int], list[int]]]:
    """Pairs in groups of these sizes, each with one prompt; some responses are a single token."""
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(2, vocab) for _ in range(rng.randint(low, high))]

    return [(prompt, ids(1, 9)) for size in sizes for prompt in [ids(1, 12)] for _ in range(size)]


def samples_of(policy, pairs, old=False) -> list[Sample]:
    rng = random.Random(1)
    scores = LogProbScorer(policy, 512).log_probs(pairs)
    made = []
    for (prompt, response), lp in zip(pairs, scores, strict=True):
        told = Response(str(prompt), prompt, response, lp, "", "stop")
        made.append(Sample(told, RIGHT, advantage=rng.gauss(0, 1), old_log_probs=lp if old else None))
    return made


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_outputs_and_gradients_equal_those_of_repeated_prompts_to_ten_digits(kv_heads):
    """In float64, over groups of several sizes, one response of a single token, and a sequence alone."""
    torch.manual_seed(0)
    pairs = [([1] * 5, [2] * n) for n in (4, 1, 7)] + [([3] * 2, [2] * 3)] + [([4] * 6, [2] * n) for n in (3, 2)]
    layout = pack(pairs, share_prompts=True).layout
    lay = [(0, 5, (3, 0, 6)), (14, 2, (2,)), (18, 6, (2, 1))]  # first token, prompt, responses without their last token
    tokens = sum(layout.parts.queries)
    assert tokens == 27
    q, k, v = (torch.randn(tokens, h, 8, dtype=torch.float64, requires_grad=True) for h in (4, kv_heads, kv_heads))
    ours = attention_by_layout(q, k, v, layout, 8**-0.5)
    weights = torch.randn_like(ours)
    mine = torch.autograd.grad((ours * weights).sum(), (q, k, v))
    loss = torch.zeros((), dtype=torch.float64)
    for first, prompt, responses in lay:  # each pair attends alone, its prompt written out before it
        at = first + prompt
        for number, size in enumerate(responses):
            rows = [*range(first, first + prompt), *range(at, at + size)]
            heads = [x[rows].transpose(0, 1)[None] for x in (q, k, v)]
            out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
            torch.testing.assert_close(out, ours[rows], atol=1e-10, rtol=0)
            new = slice(prompt if number else 0, None)  # the prompt counts once
            loss = loss + (out[new] * weights[rows][new]).sum()
            at += size
    theirs = torch.autograd.grad(loss, (q, k, v))
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


@hypothesis_settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=5),
    st.integers(5, 60),
    st.one_of(st.none(), st.integers(1, 4)),
)
def test_every_pair_is_in_one_bin_within_the_budget_and_a_whole_group_in_one_where_it_fits(sizes, budget, max_rows):
    pairs = [([g] * prompt, [0] * n) for g, (prompt, responses) in enumerate(sizes, 100) for n in responses]
    bins = divide(pairs, budget, max_rows, share_prompts=True)
    assert sorted(i for rows in bins for i in rows) == list(range(len(pairs)))
    for rows in bins:
        prompts = {tuple(pairs[i][0]) for i in rows}
        tokens = sum(map(len, prompts)) + sum(len(pairs[i][1]) for i in rows)
        assert len(rows) == 1 or (tokens <= budget and len(rows) <= (max_rows or len(rows)))
        order = [pairs[i][0] for i in rows]
        assert sum(a != b for a, b in pairwise(order)) == len(prompts) - 1  # neighbours
    for g, (prompt, responses) in enumerate(sizes, 100):
        if prompt + sum(responses) <= budget and len(responses) <= (max_rows or len(responses)):
            assert sum(any(pairs[i][0][0] == g for i in rows) for rows in bins) == 1


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda o: f"{o.loss.loss_type}-{o.length_norm.kind}")
def test_a_step_on_groups_has_the_gradient_of_repeated_prompts_however_it_is_cut(policy, objective):
    samples = samples_of(policy, groups(len(policy.tokenizer)), old=True)
    random.Random(0).shuffle(samples)
    assert policy.shares_prompts

    def gradient(budget, rows=None):
        config = OptimizationConfig(1e-3, micro_batch_size=rows)
        return gradient_of(Learner(policy, objective, config, micro_batch_tokens=budget), samples)

    found = [gradient(*cut) for cut in ((10_000,), (64,), (30,), (10_000, 3), (10_000, 1))]
    policy.shares_prompts = False
    expected = gradient(10_000)
    assert expected.norm() > 0
    for one in found:
        torch.testing.assert_close(one, expected, atol=1e-6, rtol=1e-4)


def test_a_group_is_trained_and_scored_with_its_prompt_once(policy):
    """Counted at the model's embeddings: forward tokens of an update, of old log-probabilities, of a cut group."""
    fed = []
    policy.model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.append(args[0].numel()))
    pairs = groups(len(policy.tokenizer), sizes=(8, 8))
    prompts = sum(len(pairs[i][0]) for i in (0, 8))
    once = prompts + sum(len(r) - 1 for _, r in pairs)
    samples = samples_of(policy, pairs)
    assert sum(fed) == once  # they were scored
    repeated = sum(len(p) + len(r) - 1 for p, r in pairs)
    for rows, shares, expected in ((None, True, once), (4, True, once + prompts), (None, False, repeated)):
        fed.clear()
        policy.shares_prompts = shares
        Learner(policy, OBJECTIVES[0], OptimizationConfig(1e-3, micro_batch_size=rows)).update(samples)
        assert sum(fed) == expected  # with four rows each group is cut in two


def test_sharing_is_given_up_where_it_computes_something_else(policy, monkeypatch):
    check_kernel(policy)
    assert (policy.shares_prompts, policy.remarks) == (True, [])
    monkeypatch.setattr("rlreason.model.packing.merged", lambda one, other: one)  # without the prompt
    check_kernel(policy)
    assert not policy.shares_prompts
    assert policy.remarks[0] in policy.describe()
