"""A micro-batch never waits for the device: a step reads what it measured once, however it is cut."""

import pytest
import torch
from test_engine_cost import Waits
from test_learner import make_samples

from rlreason.config.optimization import OptimizationConfig
from rlreason.learner import Learner
from rlreason.objectives.objective import LossConfig, Objective


@pytest.mark.parametrize("loss", ["reinforce_with_baseline", "grpo_clip", "gspo"])
def test_no_micro_batch_waits_for_the_device(policy, loss):
    clip = {} if loss == "reinforce_with_baseline" else {"cliprange": 0.2}
    samples, counts = make_samples(policy, old=bool(clip)), []
    for tokens in (10_000, 40):
        learner = Learner(
            policy, Objective(LossConfig(loss, **clip)), OptimizationConfig(1e-3), micro_batch_tokens=tokens
        )
        with Waits() as waits:
            micro = learner.update(samples)["train/micro_batches"]
        counts.append(waits.count)
        assert (micro > 3) == (tokens == 40)
    assert counts[0] == counts[1]


def test_a_wait_in_a_backward_pass_is_seen():
    x, mask = torch.ones(3, requires_grad=True), torch.tensor([[True, True], [True, False]])
    with Waits() as waits:
        torch.zeros(2, 2).masked_scatter(mask, x).sum().backward()
    assert waits.count == 1
