"""Products by oneDNN are those of torch, with their gradients; where they do not apply nothing changes."""

import copy

import pytest
import torch
from test_learner import make_samples
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from rlreason.config.training import OptimizationConfig
from rlreason.model.log_probs import _Linear, _onednn_is_faster, linear, use_fast_products
from rlreason.model.parameters import build_model
from rlreason.model.policy import Policy
from rlreason.objectives.objective import Objective
from rlreason.training.learner import Learner

product = torch.ops.mkldnn._linear_pointwise.default if hasattr(torch.ops.mkldnn, "_linear_pointwise") else None
needs_onednn = pytest.mark.skipif(product is None, reason="this torch has no oneDNN")
needs_gain = pytest.mark.skipif(not _onednn_is_faster("cpu"), reason="oneDNN is not faster on this processor")


class Products(TorchDispatchMode):
    """Counts products by oneDNN."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is product
        return func(*args, **(kwargs or {}))


def tensors(*shape_of_x, out=128, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*shape_of_x, generator=g, dtype=dtype).requires_grad_()
    weight = torch.randn(out, shape_of_x[-1], generator=g, dtype=dtype).requires_grad_()
    return x, weight, torch.randn(out, generator=g, dtype=dtype).requires_grad_()


@needs_onednn
@pytest.mark.parametrize(("shape", "out", "with_bias"), [((2, 64, 256), 128, True), ((256,), 320, False)])
def test_a_product_and_its_gradients_are_torchs(shape, out, with_bias):
    x, weight, bias = tensors(*shape, out=out)
    given = (x, weight, bias) if with_bias else (x, weight)
    ours, theirs = _Linear.apply(x, weight, bias if with_bias else None), F.linear(*given)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    along = torch.randn_like(ours)
    for mine, other in zip(
        torch.autograd.grad(ours, given, along), torch.autograd.grad(theirs, given, along), strict=True
    ):
        torch.testing.assert_close(mine, other, atol=2e-4, rtol=0)


@needs_onednn
def test_tensors_with_gaps_are_read_as_they_are():
    wide, weight, bias = (x.detach() for x in tensors(64, 512, out=256))
    for x, w, b in [
        (wide[:, ::2], weight[:, :256], bias),
        (wide[:1].expand(64, 512), weight, bias),
        (wide, weight[::2], bias[::2]),
        (wide, weight, bias[:1].expand(256)),
    ]:
        torch.testing.assert_close(_Linear.apply(x, w, b), F.linear(x, w, b), atol=2e-4, rtol=0)


@needs_gain
def test_training_multiplies_by_it_there_and_back(tokenizer):
    policy = Policy(build_model(len(tokenizer), width=256), tokenizer, torch.float32)
    layers = sum(isinstance(module, nn.Linear) for module in policy.backbone.modules())
    samples = make_samples(policy)
    with Products() as products:
        micro = Learner(policy, Objective(), OptimizationConfig(1e-3)).update(samples)["train/micro_batches"]
    # Outputs, and gradients of inputs and of weights; the head makes its logits anew in its backward pass.
    assert products.count == (3 * layers + 4) * micro


def test_a_frozen_weight_gets_no_gradient_and_dtypes_are_those_of_torch():
    x, weight, bias = tensors(64, 256)
    linear(x, weight.detach()).sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(x.grad, weight.detach().sum(0).expand(64, -1), atol=1e-3, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert linear(x, weight, bias).dtype == torch.bfloat16
    assert torch.equal(linear(x.double(), weight.double()), F.linear(x.double(), weight.double()))


def test_layers_keep_their_names_weights_and_copies():
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 4))
    names, x = list(model.state_dict()), torch.randn(64, 256)
    before = model(x)
    use_fast_products(model)
    assert list(model.state_dict()) == names
    for one in (model, copy.deepcopy(model)):
        torch.testing.assert_close(one(x), before, atol=1e-4, rtol=0)
