"""Products of the layers and of the output head: rounded operands, float32 sums, the same in training and sampling."""

import copy
import statistics
from functools import partial
from unittest import mock

import pytest
import torch
from conftest import random_pairs
from test_memory_options import gaps_of
from torch import nn
from torch.nn import functional as F

from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf import HFEngine
from rlreason.model.log_probs import _Linear, chunked_log_probs, linear, use_fast_products
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy

HALF, FULL = torch.bfloat16, torch.float32


def given(positions=48, width=64, vocab=300):
    g = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(positions, width, generator=g), torch.randn(vocab, width, generator=g) / 4
    return hidden, weight, torch.randint(vocab, (positions,), generator=g), torch.randn(positions, generator=g)


def exact(hidden, weight, labels, along, terms=0):
    """Log-probabilities, entropies and the gradients of the weighted log-probabilities (and entropies), in float64."""
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    found = torch.distributions.Categorical(logits=hidden @ weight.t() / 0.7)
    found, entropy = found.log_prob(labels), found.entropy()
    gradients = torch.autograd.grad((found + terms * entropy) @ along.double(), [hidden, weight])
    return found.detach(), entropy.detach(), *gradients


def computed(hidden, weight, labels, along, chunk=16, types=(FULL, FULL), terms=0):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with mock.patch("rlreason.model.log_probs.CHUNK", chunk):
        found, entropy = chunked_log_probs(hidden, weight, labels, 0.7, types)
        gradients = torch.autograd.grad((found + terms * entropy) @ along, [hidden, weight])
    return found.detach(), entropy.detach(), *gradients


def apart(a, b):
    """The distance of a from b as a share of b's norm."""
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


def test_the_error_of_gradients_is_that_of_rounding_and_does_not_grow_with_the_chunks():
    """As the docstring says: about 0.2%, of three roundings to 8 bits, whatever the number of chunks."""
    hidden, weight, labels, along = given(positions=256)
    log_probs, _, *expected = exact(hidden.to(HALF), weight.to(HALF), labels, along)
    rounded = partial(computed, hidden, weight, labels, along, types=(HALF, HALF))
    assert (rounded()[0] - log_probs).abs().max() < 1e-5
    whole, parts = rounded(chunk=256)[2:], rounded(chunk=4)[2:]
    for one, other, theirs in zip(whole, parts, expected, strict=True):
        assert 1e-4 < apart(one, theirs) < 4e-3
        assert apart(one, other) < 1e-6  # summed in float32: sums in bfloat16 lose 1e-2 over 64 chunks


def test_in_float32_nothing_is_rounded():
    tensors = given(positions=50)  # the last of the chunks is a short one
    for mine, theirs in zip(computed(*tensors, terms=0.5), exact(*tensors, 0.5), strict=True):
        assert apart(mine, theirs) < 1e-6
    half, _, *gradients = computed(*tensors, types=(FULL, HALF))
    assert torch.equal(half, computed(*tensors)[0])
    assert [g.dtype for g in gradients] == [FULL, FULL]


def test_the_engine_in_this_process_samples_with_the_trainers_head(tokenizer, policy):
    rounding = Policy(build_model(len(tokenizer), width=32, init_scale=0.3, seed=1), tokenizer, head_dtype=HALF)
    prompts = [Prompt(str(i), p, seed=i) for i, (p, _) in enumerate(random_pairs(policy.head.shape[0], 4))]
    responses = HFEngine(rounding).generate(prompts, Sampling(0.8, 0, 12), n=3)
    # medians: a number that lies between two of bfloat16's is rounded up in one pass and down in the other
    assert statistics.median(gaps_of(responses, rounding, 0.8)) < 5e-5
    assert statistics.median(gaps_of(responses, policy, 0.8)) > 5e-4  # the same weights under the other head


# Products by oneDNN are those of torch, with their gradients; where they do not apply nothing changes

needs_onednn = pytest.mark.skipif(not hasattr(torch.ops.mkldnn, "_linear_pointwise"), reason="torch has no oneDNN")


def tensors(*shape_of_x, out=128):
    g = torch.Generator().manual_seed(0)
    shapes = shape_of_x, (out, shape_of_x[-1]), (out,)
    return [torch.randn(*shape, generator=g).requires_grad_() for shape in shapes]


@needs_onednn
def test_a_product_and_its_gradients_are_torchs_also_of_tensors_with_gaps():
    wide, weight, bias = tensors(2, 64, 512, out=256)
    alone, other, _ = tensors(256, out=320)
    for x, w, b in [
        (wide, weight, bias),
        (alone, other, None),
        (wide[..., ::2], weight[::2, ::2], bias[:1].expand(128)),
    ]:
        given = [one for one in (x, w, b) if one is not None]
        ours, theirs = _Linear.apply(x, w, b), F.linear(x, w, b)
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)
        along = torch.randn_like(ours)
        mine, others = (torch.autograd.grad(found, given, along) for found in (ours, theirs))
        torch.testing.assert_close(mine, others, atol=5e-4, rtol=0)


def test_a_frozen_weight_gets_no_gradient_and_types_and_copies_are_those_of_torch():
    x, weight, bias = tensors(64, 256)
    linear(x, weight.detach()).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(64, -1), atol=1e-3, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4))
    before = model(x)
    use_fast_products(model)
    for one in (model, copy.deepcopy(model)):
        torch.testing.assert_close(one(x), before, atol=1e-4, rtol=0)
