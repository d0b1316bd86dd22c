"""The in-process engine: the sampled distribution is the trainer's, samples are independent and repeatable."""

import pytest
import torch
from conftest import PROMPT

from rlreason.engines.base import Prompt, Sampling, closing_tokens, seed_for
from rlreason.engines.hf.engine import HFEngine


def prompts_for(policy, problems, count=6):
    return [
        Prompt(p.id, policy.encode_prompt(PROMPT.format(question=p.question)), seed_for(0, p.id))
        for p in problems[:count]
    ]


def test_sampled_frequencies_follow_the_distribution(policy, engine):
    """Chi-squared over the first token of 4,000 samples: 99.9% of right samplers pass."""
    prompt = Prompt("p", [5, 6, 7], seed=3)
    engine.max_rows = 4000
    first = torch.tensor([r.token_ids[0] for r in engine.generate([prompt], Sampling(1.0, 0, 1), n=4000)])
    with torch.no_grad():
        probs = policy.model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits[0, -1].softmax(-1)
    common = probs > 5 / 4000
    observed = torch.bincount(first, minlength=len(probs)).float()
    seen = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = 4000 * torch.cat([probs[common], probs[~common].sum()[None]])
    chi2, freedom = ((seen - expected) ** 2 / expected).sum().item(), int(common.sum())
    assert chi2 < freedom + 3.3 * (2 * freedom) ** 0.5 + 8


def test_greedy_equals_the_argmax_of_a_plain_forward(policy, engine):
    response = engine.generate([Prompt("p", [5, 6], 0)], Sampling(0.0, 0, 8), n=1)[0]
    ids = [5, 6]
    for token in response.token_ids:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        assert token == int(logits.argmax())
        ids.append(token)


def test_min_tokens_bans_the_end_and_max_tokens_cuts(policy, engine):
    with torch.no_grad():  # make ending the likeliest thing to do
        policy.model.get_output_embeddings().weight[policy.tokenizer.eos_token_id] *= 30
    prompts = [Prompt(str(i), [5, 6, 7], seed=i) for i in range(16)]
    free = engine.generate(prompts, Sampling(1.0, 0, 10), n=2)
    held = engine.generate(prompts, Sampling(1.0, 6, 10), n=2)
    end = policy.tokenizer.eos_token_id
    assert min(len(r.token_ids) for r in free) < 6
    for r in held:
        assert end not in r.token_ids[:6]
        assert r.truncated == (len(r.token_ids) == 10 and r.token_ids[-1] != end)
    assert all((r.token_ids[-1] == end) == (r.finish_reason == "stop") for r in free)


@pytest.mark.parametrize("kind", ["text", " ", "e"])
def test_a_stop_string_ends_the_response_and_stays_in_it(policy, engine, tokenizer, kind):
    """A stop string that spans several tokens, found in text that the tokens really spell."""
    prompts = [Prompt(str(i), [5, 6, 7], seed=i) for i in range(8)]
    free = engine.generate(prompts, Sampling(1.0, 0, 24), n=4)
    longest = max(free, key=lambda r: len(r.text))
    stop = longest.text[4:7] if kind == "text" else kind
    assert any(stop in r.text for r in free)
    stopped = engine.generate(prompts, Sampling(1.0, 0, 24, stop=(stop,)), n=4)
    assert any(r.text.endswith(stop) for r in stopped)
    for before, after in zip(free, stopped, strict=True):
        assert after.token_ids == before.token_ids[: len(after.token_ids)]  # the same random numbers, cut earlier
        if stop in before.text:
            assert after.finish_reason == "stop"
            assert after.text == before.text[: before.text.index(stop) + len(stop)]
        decoded = tokenizer.decode(after.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert decoded.startswith(after.text)


def test_finished_responses_are_handed_out_at_once_with_their_place(policy, problems):
    prompts, sampling = prompts_for(policy, problems, 5), Sampling(1.0, 0, 24, stop=("=",))
    seen: list[tuple[int, object]] = []
    engine = HFEngine(policy, max_rows=8)
    responses = engine.generate(prompts, sampling, 3, finished=lambda place, response: seen.append((place, response)))
    assert sorted(place for place, _ in seen) == list(range(15))
    assert all(responses[place] is response for place, response in seen)
    first = {p.problem_id for p in sorted(prompts, key=lambda p: len(p.token_ids))[:2]}  # 8 rows hold two groups of 3
    lengths = [len(response.token_ids) for _, response in seen if response.problem_id in first]
    assert lengths == sorted(lengths)  # of rows that begin together, the short ones come first


def test_a_weight_sync_is_counted_and_stamped(policy, engine):
    assert engine.generate([Prompt("p", [5], 0)], Sampling(1.0, 0, 2), 1)[0].weight_version == 0
    assert engine.load_weights(policy) == {}
    assert engine.generate([Prompt("p", [5], 0)], Sampling(1.0, 0, 2), 1)[0].weight_version == 1


def test_closing_tokens(policy):
    vocabulary = policy.tokenizer.get_vocab()
    closing = closing_tokens(vocabulary, ("</answer>",))
    assert closing is not None
    assert all(">" in policy.tokenizer.convert_ids_to_tokens(i) for i in closing)
    assert closing_tokens(vocabulary, ("。",)) is None
    assert closing_tokens(vocabulary, ("\n",)) is None


def test_seeds_are_the_same_everywhere_and_differ_by_any_part():
    parts = [(0, "train/1", "p"), (1, "train/1", "p"), (0, "train/2", "p"), (0, "train/1", "q")]
    assert seed_for(*parts[0]) == seed_for(*parts[0]) >= 0
    assert len({seed_for(*one) for one in parts}) == 4
