"""The in-process engine: it samples the trainer's distribution, each sample by its own seed, at bounded cost.

tests/test_vllm.py runs what is tested of ends and stop strings with vLLM: the rule is one for both engines.
"""

import random
from contextlib import contextmanager

import pytest
import torch
from conftest import PROMPT

from rlreason.engines.base import Prompt, Sampling, Stops, closing_tokens, seed_for
from rlreason.engines.decoding import BLOCK, HEADROOM, PreallocatedCache, draw
from rlreason.engines.hf import HFEngine
from rlreason.model.parameters import PAD
from rlreason.model.policy import LogProbScorer

LETTERS, STOPS = tuple("aeiou"), ("a", "=")


def prompts_for(policy, problems, count=8) -> list[Prompt]:
    asked = [policy.encode_prompt(PROMPT.format(question=p.question)) for p in problems[:count]]
    return [Prompt(p.id, ids, seed=100 * i) for i, (p, ids) in enumerate(zip(problems, asked, strict=False))]


def ragged_prompts(policy, count=14, longest=90) -> list[Prompt]:
    """Prompts of 1 to `longest` tokens in mixed order."""
    rng, vocab = random.Random(0), policy.head.shape[0]
    sizes = [1, longest] + [rng.randint(1, longest) for _ in range(count - 2)]
    return [Prompt(str(i), [rng.randrange(2, vocab) for _ in range(size)], seed=i) for i, size in enumerate(sizes)]


def watched(policy, look, run):
    """Call `look` with the arguments of every forward pass of the backbone during `run`, whose result is returned."""
    handle = policy.backbone.register_forward_pre_hook(lambda module, args, kwargs: look(kwargs), with_kwargs=True)
    try:
        return run()
    finally:
        handle.remove()


# What is sampled


def test_sampled_frequencies_follow_the_distribution(policy, engine):
    """Bug: another distribution than the model's is sampled. Chi-squared over 4,000 first tokens: 99.9% pass."""
    engine.max_rows, count = 4000, 4000
    responses = engine.generate([Prompt("p", [5, 6, 7], seed=3)], Sampling(max_tokens=1), count)
    with torch.no_grad():
        probs = policy.model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False).logits[0, -1].softmax(-1)
    common = probs > 5 / count
    observed = torch.bincount(torch.tensor([r.token_ids[0] for r in responses]), minlength=len(probs)).float()
    seen = torch.cat([observed[common], observed[~common].sum()[None]])
    expected = count * torch.cat([probs[common], probs[~common].sum()[None]])
    chi2, freedom = ((seen - expected) ** 2 / expected).sum().item(), int(common.sum())
    assert chi2 < freedom + 3.3 * (2 * freedom) ** 0.5 + 8


@pytest.mark.parametrize("vocab", [5, 8 * BLOCK + 1, 40 * BLOCK, 151_936])
def test_draws_follow_the_cumulative_distribution_whatever_the_vocabulary(vocab):
    """Bug: the search over blocks is off by a token at a block's end, or draws one of probability 0."""
    g = torch.Generator().manual_seed(vocab)
    logits = torch.randn(64, vocab, generator=g) * 3
    logits[torch.rand(64, vocab, generator=g) < 0.3] = float("-inf")
    logits[:, vocab // 2] = 1.0
    uniforms = torch.rand(64, generator=g, dtype=torch.float64)
    uniforms[:3] = torch.tensor([0.0, 1 - 2**-53, 0.5])
    ids, log_probs = draw(logits, uniforms, 0.7)
    exact = (logits.double() / 0.7).softmax(-1)
    above = exact.cumsum(-1).gather(1, ids[:, None])[:, 0]
    mass = exact.gather(1, ids[:, None])[:, 0]
    assert bool((mass > 0).all())
    assert bool((above > uniforms - 2e-6).all() and (above - mass < uniforms + 2e-6).all())
    # softmax adds its terms in float32, eight or sixteen side by side: with AVX2 151,936 of them are 3e-5 off.
    torch.testing.assert_close(log_probs.double(), mass.log(), atol=2e-5 if vocab < 50_000 else 1e-4, rtol=0)


@pytest.mark.parametrize(
    ("n", "sampling"),
    [
        (2, Sampling(1.0, 0, 40, STOPS)),
        (3, Sampling(1.3, 5, 24, STOPS)),
        (1, Sampling(0.6, 0, 150, ("</answer>", "</think>"))),
    ],
)
def test_samples_of_a_running_batch_are_those_of_a_large_one(policy, n, sampling, monkeypatch):
    """Bug: a compaction shifts a row's cache, mask, position or random numbers; a prompt meets another of its row."""
    monkeypatch.setattr("rlreason.engines.decoding.PROMPT_TOKENS", 200)  # prompts are read in several rows
    prompts, order = ragged_prompts(policy), list[tuple[int, object]]()
    small = HFEngine(policy, max_rows=4).generate(prompts, sampling, n, finished=lambda *ended: order.append(ended))
    large = HFEngine(policy, max_rows=256).generate(prompts, sampling, n)
    assert len({len(r.token_ids) for r in large}) > 3  # rows did end at different times
    assert [r.problem_id for r in small] == [p.problem_id for p in prompts for _ in range(n)]
    assert sorted(place for place, _ in order) == list(range(len(small)))
    assert all(small[place] is response for place, response in order)  # each is handed out with its place
    alone = HFEngine(policy).generate(prompts[-1:], sampling, n)
    assert [r.token_ids for r in alone] == [r.token_ids for r in small[-n:]]
    scores = LogProbScorer(policy, 1024, sampling.temperature).log_probs([(r.prompt_ids, r.token_ids) for r in small])
    for a, b, score in zip(small, large, scores, strict=True):
        assert (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason)
        assert max(abs(x - y) for x, y in zip(a.log_probs, b.log_probs, strict=True)) < 2e-5  # rounding: 1e-5
        if not sampling.min_tokens:  # which takes the end tokens out of the distribution
            assert max(abs(x - y) for x, y in zip(a.log_probs, score, strict=True)) < 5e-5


def test_seeds_are_the_same_everywhere_and_differ_by_any_part():
    """Bug: two steps or two problems draw the same numbers."""
    parts = [(0, "train/1", "p"), (1, "train/1", "p"), (0, "train/2", "p"), (0, "train/1", "q")]
    assert seed_for(*parts[0]) == seed_for(*parts[0]) >= 0
    assert len({seed_for(*one) for one in parts}) == 4


# Where a response ends


def check_stopped_texts(responses, tokenizer, sampling, special=False) -> bool:
    """Each text is that of its tokens up to the stop string in the last one. Returns whether one was held back."""

    def text_of(ids, special=special) -> str:
        return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    held = False
    for r in responses:
        whole, sought = text_of(r.token_ids, special=False), text_of(r.token_ids)
        early = len(text_of(r.token_ids[: sampling.min_tokens]).rstrip("\ufffd"))
        ends = [at + len(s) for s in sampling.stop for at in range(len(sought)) if sought.startswith(s, at)]
        late = [end for end in ends if end > early]
        before_last = text_of(r.token_ids[:-1]).rstrip("\ufffd")
        assert not [end for end in late if end <= len(before_last)]  # nothing is written after a stop string
        if late and r.token_ids[-1] != tokenizer.eos_token_id:
            assert r.finish_reason == "stop"
            hidden = r.token_ids[-1] in tokenizer.all_special_ids
            assert r.text == (whole if hidden else whole[: len(whole) - (len(sought) - min(late))])
        else:
            assert r.text == whole
        held = held or min(ends, default=early + 1) <= early
    return held


@contextmanager
def made_likely(engine, token: int, logit: float):
    """Add to a token's logit wherever it is drawn: its head grows along the mean direction of the hidden states."""
    policy, head = engine.policy, engine.policy.head.detach().clone()
    ids = torch.randint(2, len(policy.tokenizer), (8, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mean = policy.backbone(input_ids=ids).last_hidden_state.mean((0, 1))
        policy.head[token] += mean * logit / (mean @ mean)
    engine.load_weights(policy)
    yield
    with torch.no_grad():
        policy.head.copy_(head)
    engine.load_weights(policy)


def check_greedy(engine, prompts, sampling) -> None:
    """Either engine's greedy responses are those of the in-process one."""
    both = [made.generate(prompts, sampling, 1) for made in (engine, HFEngine(engine.policy))]
    ours, theirs = ([(r.token_ids, r.text, r.finish_reason) for r in responses] for responses in both)
    assert ours == theirs


def test_min_tokens_bans_the_end_and_max_tokens_cuts(engine):
    """Bug: an end token slips in among the first tokens, or a cut response counts as ended."""
    end, prompts = engine.policy.tokenizer.eos_token_id, [Prompt(str(i), [5, 6, 7 + i], seed=100 * i) for i in range(8)]
    with made_likely(engine, end, 8.0):
        free, held = (engine.generate(prompts, Sampling(1.0, least, 10), n=4) for least in (0, 6))
        check_greedy(engine, prompts, Sampling(0.0, 6, 10))
    assert min(len(r.token_ids) for r in free) < 6
    assert all((r.token_ids[-1] == end) == (r.finish_reason == "stop") for r in free)  # the end token is kept
    for r in held:
        assert end not in r.token_ids[:6]
        assert r.truncated == (len(r.token_ids) == 10 and r.token_ids[-1] != end)


@pytest.mark.parametrize("min_tokens", [0, 4, 59])
def test_a_stop_string_that_min_tokens_switched_off_neither_ends_nor_cuts(engine, problems, min_tokens):
    """Bug: the text is cut at an earlier stop string than the one that ended it; one of several tokens is missed."""
    prompts = prompts_for(engine.policy, problems)
    free = engine.generate(prompts, Sampling(1.0, 0, 60), n=4)
    spelt = max(free, key=lambda r: len(r.text)).text[4:7]
    sampling = Sampling(1.0, min_tokens, 60, LETTERS if min_tokens else (spelt,))
    responses = engine.generate(prompts, sampling, n=4)
    held = check_stopped_texts(responses, engine.policy.tokenizer, sampling)
    assert held == bool(min_tokens)  # the case was there
    if min_tokens:
        assert min_tokens < min(len(r.token_ids) for r in responses) <= min_tokens + 4
    else:
        assert any(r.text.endswith(spelt) for r in responses)
    check_greedy(engine, prompts, Sampling(0.0, min_tokens, 60, LETTERS))


AFTER_TEXT = tuple(f"{character}{PAD}" for character in "aeinorst 0123456789+-=")  # one of them comes soon


@pytest.mark.parametrize(("stop", "min_tokens"), [(("zzz", PAD), 0), ((PAD,), 6), (AFTER_TEXT, 0)])
def test_a_special_token_that_is_a_stop_string_ends_the_response(engine, problems, stop, min_tokens):
    """Bug: it is sought in text from which special tokens were taken, or only where it is one as a whole."""
    tokenizer, sampling = engine.policy.tokenizer, Sampling(1.0, min_tokens, 40, stop)
    with made_likely(engine, pad := tokenizer.pad_token_id, 6.0):
        responses = engine.generate(prompts_for(engine.policy, problems), sampling, n=8)
    assert check_stopped_texts(responses, tokenizer, sampling, special=True) == bool(min_tokens)
    ended = [r for r in responses if r.token_ids[-1] == pad and len(r.token_ids) < 40]
    assert ended
    assert all(r.finish_reason == "stop" and PAD not in r.text for r in ended)
    assert not any(PAD in stop and pad in r.token_ids[min_tokens:-1] for r in responses)
    assert any(pad in r.token_ids[:min_tokens] for r in responses) == bool(min_tokens)


def test_the_boundary_is_what_vllm_checks(tokenizer):
    """Bug: a stop string is sought before there are more tokens than min_tokens, or in what the first have written."""
    ids = tokenizer.encode("so </answer> 4 </answer>", add_special_tokens=False)
    first, last = (i for i, token in enumerate(ids, 1) if tokenizer.decode([token]) == "</answer>")
    for min_tokens, end in ((first - 1, first), (first, last), (last, None)):
        stops = Stops(tokenizer, Sampling(min_tokens=min_tokens, stop=("</answer>",)))
        ends = [n for n in range(1, len(ids) + 1) if stops.overhang(ids[:n]) is not None]
        assert ends[:1] == ([end] if end else [])
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert len(ids) == 2  # a character whose bytes are missing has not been written
    assert Stops(tokenizer, Sampling(min_tokens=1, stop=("é",))).overhang(ids) == 0
    assert Stops(tokenizer, Sampling(stop=("é",))).overhang(ids[:1]) is None
    vocabulary = tokenizer.get_vocab()  # all of it may close what is no plain text
    assert closing_tokens(vocabulary, ("。",)) == closing_tokens(vocabulary, ("\n",)) == set(vocabulary.values())
    assert all(">" in tokenizer.convert_ids_to_tokens(i) for i in closing_tokens(vocabulary, ("</answer>",)))


# What it costs, in counts rather than seconds


def test_a_step_is_one_forward_pass_and_one_small_read(policy, monkeypatch):
    """Bug: a step waits for the device once more, or reads a prompt again."""
    prompts, shapes, engine, steps, reads = ragged_prompts(policy, 6), [], HFEngine(policy), 100, []
    monkeypatch.setattr(torch.Tensor, "cpu", lambda values: reads.append(values) or values)
    watched(
        policy,
        lambda given: shapes.append(tuple(given["input_ids"].shape)),
        lambda: engine.generate(prompts, Sampling(1.0, steps, steps), n=8),
    )
    assert shapes[0] == (1, sum(len(p.token_ids) for p in prompts))  # each group's prompt once, in one pass
    assert shapes[1:] == [(48, 1)] * (steps - 1)  # the last token is not read
    assert len(reads) == steps + 1  # which rows may have ended, each step; what they have drawn, once


def test_memory_and_positions_stay_within_the_rows_and_the_longest_sequence(policy):
    """Bug: the cache grows with all that was ever sampled, or ended rows walk out of the context."""
    prompts, max_tokens = ragged_prompts(policy, 28, longest=1), 2 * HEADROOM
    longest, shapes, positions = 1 + max_tokens, [], []

    def look(given) -> None:
        positions.append(int(given["position_ids"].max()))
        if isinstance(cache := given["past_key_values"], PreallocatedCache):
            shapes.append(cache.keys[0].shape)

    sampling = Sampling(1.0, HEADROOM, max_tokens, ("=",))
    watched(policy, look, lambda: HFEngine(policy, max_rows=11).generate(prompts, sampling, 2))
    assert len(shapes) > 2 * longest  # the columns written are many more than the room
    assert max(shape[0] for shape in shapes) <= 11
    assert max(shape[2] for shape in shapes) <= longest + HEADROOM
    assert max(positions) < longest


@pytest.mark.long
def test_a_compiled_step_survives_changing_rows_and_lengths(policy):
    """Bug: compiled code keeps a length of the compaction before."""
    prompts = ragged_prompts(policy, 12)
    plain, compiled = HFEngine(policy, max_rows=8), HFEngine(policy, max_rows=8, compile=True)
    for sampling in (Sampling(1.0, 0, 40, ("=", "a")), Sampling(0.8, 5, 150, ("e",))):
        ours, theirs = compiled.generate(prompts, sampling, 3), plain.generate(prompts, sampling, 3)
        assert [r.token_ids for r in ours] == [r.token_ids for r in theirs]
    assert compiled.compiled is not None
