"""Single, packed and prompt-sharing sequences have the same log-probabilities and gradients, of the right tokens."""

from itertools import pairwise

import pytest
import torch
from conftest import random_pairs
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from test_learner import compared, grouped_samples
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma2Config, Gemma2ForCausalLM

from rlreason.config.training import OptimizationConfig
from rlreason.errors import ConfigError
from rlreason.model.attention import one_by_one, select_kernel
from rlreason.model.packing import divide, pack
from rlreason.model.policy import LogProbScorer, Policy, check_kernel, load_policy
from rlreason.objectives.objective import Objective
from rlreason.training.learner import Learner


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
        ("varlen", None, torch.bfloat16, "no GPU"),
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


def test_heads_that_are_repeated_get_their_own_keys():
    q, k, v = (torch.randn(1, heads, 15, 8) for heads in (4, 2, 2))
    grouped, repeated = (one_by_one(q, k, v, [6, 2, 7], 0.3, repeat) for repeat in (False, True))
    torch.testing.assert_close(grouped, repeated)


def test_a_saved_policy_loads_with_transformers_and_scores_alike(policy, tmp_path):
    policy.save(tmp_path / "model")
    pairs = random_pairs(len(policy.tokenizer), 3)
    again = load_policy(str(tmp_path / "model"), "float32")
    torch.testing.assert_close(again.log_probs(pack(pairs))[0], policy.log_probs(pack(pairs))[0])
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert plain.config._attn_implementation == "sdpa"  # nothing of ours is needed to load it
    text = "User: Max has 18 apples.\n <think> 18+13=31 </think> <answer>31</answer> \\frac{1}{2} é 漢字 🙂\n\t x a  b "
    ids = AutoTokenizer.from_pretrained(tmp_path / "model").encode(text)
    assert ids == again.encode_prompt(text) == policy.encode_prompt(text)
    assert again.tokenizer.decode(ids) == text


def test_a_model_that_caps_its_logits_is_refused(tokenizer):
    config = Gemma2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, final_logit_softcapping=0.5,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="other log-probabilities"):
        Policy(Gemma2ForCausalLM(config), tokenizer)


# A prompt that several responses share is computed once, and gives what repeated prompts give


@hypothesis_settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5)), min_size=1, max_size=5),
    st.integers(5, 60),
    st.one_of(st.none(), st.integers(1, 4)),
    st.booleans(),
)
def test_every_pair_is_in_one_bin_within_the_budget_and_a_whole_group_in_one_where_it_fits(
    sizes, budget, max_rows, shares
):
    pairs = [([g] * prompt, [0] * n) for g, (prompt, responses) in enumerate(sizes, 100) for n in responses]
    bins = divide(pairs, budget, max_rows, shares)
    assert sorted(i for rows in bins for i in rows) == list(range(len(pairs)))
    for rows in bins:
        order = [tuple(pairs[i][0]) for i in rows]
        prompts = set(order) if shares else order
        tokens = sum(map(len, prompts)) + sum(len(pairs[i][1]) for i in rows)
        assert len(rows) == 1 or (tokens <= budget and len(rows) <= (max_rows or len(rows)))
        assert not shares or sum(a != b for a, b in pairwise(order)) == len(prompts) - 1  # neighbours
    for g, (prompt, responses) in enumerate(sizes, 100) if shares else ():
        if prompt + sum(responses) <= budget and len(responses) <= (max_rows or len(responses)):
            assert sum(any(pairs[i][0][0] == g for i in rows) for rows in bins) == 1


def test_a_group_is_trained_and_scored_with_its_prompt_once(policy):
    """Counted at the model's embeddings: forward tokens of an update, of old log-probabilities, of a cut group."""
    fed = []
    policy.model.get_input_embeddings().register_forward_hook(lambda module, args, out: fed.append(args[0].numel()))
    samples = compared(grouped_samples(policy, [0.0, 1.0] * 8))  # four groups of four
    pairs = [(s.response.prompt_ids, s.response.token_ids) for s in samples]
    prompts = sum(len(p) for p, _ in pairs[::4])
    once = prompts + sum(len(r) - 1 for _, r in pairs)
    assert sum(fed) == once  # they were scored
    repeated = sum(len(p) + len(r) - 1 for p, r in pairs)
    for rows, shares, expected in ((None, True, once), (2, True, once + prompts), (None, False, repeated)):
        fed.clear()
        policy.shares_prompts = shares
        Learner(policy, Objective(), OptimizationConfig(1e-3, micro_batch_size=rows)).update(samples)
        assert sum(fed) == expected  # with two rows each group is cut in two


def test_sharing_is_given_up_where_it_computes_something_else(policy, monkeypatch):
    check_kernel(policy)
    assert (policy.shares_prompts, policy.remarks) == (True, [])
    monkeypatch.setattr("rlreason.model.packing.merged", lambda one, other: one)  # without the prompt
    check_kernel(policy)
    assert not policy.shares_prompts
    assert policy.remarks[0] in policy.describe()
