"""What a step costs, in counts: no micro-batch waits for the device, and weights are not copied."""

import pytest
import torch
from test_engine import waits
from test_learner import make_samples
from torch.utils._python_dispatch import TorchDispatchMode

from rlreason.config.training import OptimizationConfig
from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.hf import HFEngine
from rlreason.model.policy import Policy
from rlreason.objectives.objective import LossConfig, Objective
from rlreason.training.learner import ELEMENTS, Learner

aten = torch.ops.aten
COPY = {aten.copy_.default, aten._to_copy.default, aten.clone.default}


@pytest.mark.parametrize("loss", ["reinforce_with_baseline", "grpo_clip", "gspo"])
def test_no_micro_batch_waits_for_the_device(policy, loss):
    clip = {} if loss == "reinforce_with_baseline" else {"cliprange": 0.2}
    samples, counts = make_samples(policy, old=bool(clip)), []
    for tokens in (10_000, 40):
        objective = Objective(LossConfig(loss, **clip))
        learner = Learner(policy, objective, OptimizationConfig(1e-3), micro_batch_tokens=tokens)
        with waits() as calls:
            micro = learner.update(samples)["train/micro_batches"]
        counts.append(calls.count)
        assert (micro > 3) == (tokens == 40)
    assert counts[0] == counts[1]


class Copies(TorchDispatchMode):
    """Counts copies of the weights, in any dtype, but for the few elements that are looked at behind an update."""

    def __init__(self, policy):
        super().__init__()
        self.weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters() if p.dim() == 2}
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        source = args[1] if func is aten.copy_.default else args[0] if args else None
        if func in COPY and isinstance(source, torch.Tensor) and source.numel() > ELEMENTS:
            self.count += source.untyped_storage().data_ptr() in self.weights
        return func(*args, **(kwargs or {}))


def test_weights_are_never_copied_in_float32_and_cast_once_a_pass_in_half_precision(policy, tokenizer):
    samples = make_samples(policy)
    prompts = [Prompt(str(i), s.response.prompt_ids, seed=i) for i, s in enumerate(samples)]
    layers = sum(p.dim() == 2 for p in policy.model.parameters()) - 1  # the head's products are never in half precision
    for dtype in (torch.float32, torch.bfloat16):
        here = Policy(policy.model, tokenizer, dtype)
        learner = Learner(here, Objective(), OptimizationConfig(1e-3), micro_batch_tokens=40)
        engine, casts = HFEngine(here), layers * (dtype == torch.bfloat16)
        with Copies(here) as sampling:
            engine.load_weights(here)
            engine.generate(prompts, Sampling(1.0, 20, 20), n=2)
        with Copies(here) as training:
            micro = learner.update(samples)["train/micro_batches"]
        assert engine.counts.steps == 19
        assert micro > 3
        assert sampling.count == casts  # not one for each step
        assert training.count == micro * (casts + (dtype == torch.bfloat16))  # the head's backward pass casts its own
