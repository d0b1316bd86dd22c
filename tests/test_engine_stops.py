"""Stop strings: what ends a response is what its text ends with, whatever `min_tokens` holds back or a token is called.

The checks of responses are used by tests/test_vllm.py too: the rule is one for both engines.
"""

import pytest
import torch
from conftest import PROMPT

from rlreason.engines.base import Prompt, Sampling, Stops, special_tokens
from rlreason.model.parameters import PAD

LETTERS = tuple("aeiou")


def text_of(tokenizer, ids, special=False) -> str:
    return tokenizer.decode(ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def check_stopped_texts(responses, tokenizer, sampling, special=False) -> list[int]:
    """Each text is that of its tokens up to the stop string in the last one. Returns where held-back ones ended."""
    held = []
    for r in responses:
        whole, by_end = text_of(tokenizer, r.token_ids), r.token_ids[-1] == tokenizer.eos_token_id
        sought = text_of(tokenizer, r.token_ids, special)
        early = text_of(tokenizer, r.token_ids[: sampling.min_tokens], special).rstrip("\ufffd")
        ends = [at + len(s) for s in sampling.stop for at in range(len(sought)) if sought.startswith(s, at)]
        late = [end for end in ends if end > len(early)]
        before_last = text_of(tokenizer, r.token_ids[:-1], special).rstrip("\ufffd")
        assert not [end for end in late if end <= len(before_last)]  # nothing is written after a stop string
        if late and not by_end:
            assert r.finish_reason == "stop"
            hidden = r.token_ids[-1] in tokenizer.all_special_ids
            assert r.text == (whole if hidden else whole[: len(whole) - (len(sought) - min(late))])
        else:
            assert r.text == whole
        held += [end for end in ends if end <= len(early)]
    return held


def likely(policy, token: int, logit: float) -> None:
    """Add to a token's logit wherever it is drawn: its head grows along the mean direction of the hidden states."""
    ids = torch.randint(2, len(policy.tokenizer), (8, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        mean = policy.backbone(input_ids=ids).last_hidden_state.mean((0, 1))
        policy.head[token] += mean * logit / (mean @ mean)


def prompts_for(policy, problems, count=8) -> list[Prompt]:
    asked = [policy.encode_prompt(PROMPT.format(question=p.question)) for p in problems[:count]]
    return [Prompt(p.id, ids, seed=100 * i) for i, (p, ids) in enumerate(zip(problems, asked, strict=False))]


@pytest.mark.parametrize("min_tokens", [0, 4, 59])
def test_a_stop_string_that_min_tokens_switched_off_neither_ends_nor_cuts(policy, engine, problems, min_tokens):
    sampling = Sampling(1.0, min_tokens, 60, LETTERS)
    responses = engine.generate(prompts_for(policy, problems), sampling, n=4)
    held = check_stopped_texts(responses, policy.tokenizer, sampling)
    assert bool(held) == bool(min_tokens)  # the case was there
    assert all(len(r.token_ids) > min_tokens for r in responses)
    assert min(len(r.token_ids) for r in responses) <= min_tokens + 4


@pytest.mark.parametrize(
    ("stop", "min_tokens"), [((PAD,), 0), ((f"a{PAD}", f"e{PAD}"), 0), (("zzz", PAD), 0), ((PAD,), 6)]
)
def test_a_special_token_that_is_a_stop_string_ends_the_response(policy, engine, problems, stop, min_tokens):
    pad, sampling = policy.tokenizer.pad_token_id, Sampling(1.0, min_tokens, 40, stop)
    likely(policy, pad, 6.0)
    responses = engine.generate(prompts_for(policy, problems), sampling, n=8)
    assert bool(check_stopped_texts(responses, policy.tokenizer, sampling, special=True)) == bool(min_tokens)
    ended = [r for r in responses if r.token_ids[-1] == pad and len(r.token_ids) < 40]
    assert ended
    assert all(r.finish_reason == "stop" and PAD not in r.text for r in ended)
    assert not any(PAD in stop and pad in r.token_ids[min_tokens:-1] for r in responses)
    assert any(pad in r.token_ids[:min_tokens] for r in responses) == bool(min_tokens)


def test_the_boundary_is_what_vllm_checks(tokenizer):
    """vLLM looks when there are more tokens than min_tokens, in what those beyond have written."""
    ids = tokenizer.encode("so </answer> 4 </answer>", add_special_tokens=False)
    (first, last) = (i for i, token in enumerate(ids, 1) if tokenizer.decode([token]) == "</answer>")
    for min_tokens, end in ((0, first), (first - 1, first), (first, last), (last - 1, last), (last, None)):
        stops = Stops(tokenizer, ("</answer>",), min_tokens)
        ends = [n for n in range(1, len(ids) + 1) if stops.overhang(ids[:n]) is not None]
        assert ends[:1] == ([end] if end else [])


def test_a_character_whose_bytes_are_missing_has_not_been_written(tokenizer):
    """Two tokens for one character: the stop string ends when the second is there, and not with the first."""
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert len(ids) == 2
    assert Stops(tokenizer, ("é",), 1).overhang(ids) == 0
    assert Stops(tokenizer, ("é",), 0).overhang(ids[:1]) is None
    assert Stops(tokenizer, ("é",), 2).overhang(ids) is None


def test_tokens_flagged_special_are_special_whether_or_not_they_have_a_role(tokenizer):
    assert special_tokens(tokenizer) == {0: tokenizer.eos_token, 1: PAD}
    assert not Stops(tokenizer, ("</answer>",), 0).sees_special
    assert Stops(tokenizer, ("</answer>", f"x{PAD}y"), 0).sees_special
