"""Products by oneDNN are those of torch, with their gradients; where they do not apply nothing changes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rlreason.model.products import Linear, linear, use_fast_products


def tensors(*shape_of_x, out=128, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*shape_of_x, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(out, shape_of_x[-1], generator=g, dtype=dtype).requires_grad_()
    return x, weight, torch.randn(out, generator=g, dtype=dtype).requires_grad_()


@pytest.mark.parametrize("out", [128, 320])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_product_and_its_gradients_are_torchs(out, with_bias):
    x, weight, bias = tensors(2, 64, 256, out=out)
    given = (x, weight, bias) if with_bias else (x, weight)
    ours, theirs = linear(*given), F.linear(*given)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    along = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, given, along), torch.autograd.grad(theirs, given, along), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=0)


def test_a_frozen_weight_gets_no_gradient_and_lets_that_of_its_input_through():
    x, weight, _ = tensors(64, 256)
    linear(x, weight.detach()).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(64, -1), atol=1e-3, rtol=0)


def test_dtypes_are_those_of_torch():
    x, weight, bias = tensors(64, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))


def test_layers_keep_their_names_weights_and_copies():
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4))
    names, x = list(model.state_dict()), torch.randn(64, 256)
    before = model(x)
    use_fast_products(model)
    assert {type(m) for m in model if isinstance(m, nn.Linear)} <= {nn.Linear, Linear}
    assert list(model.state_dict()) == names
    for one in (model, copy.deepcopy(model)):
        torch.testing.assert_close(one(x), before, atol=1e-4, rtol=0)
