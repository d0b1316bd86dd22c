"""What surrounds vLLM and runs without it: the memory plan, requests that wait, how stacked weights are compared."""

from types import SimpleNamespace

import pytest
import torch

from rlreason.engines.vllm.engine import plan_memory
from rlreason.engines.vllm.server import Digest, differing_tensors
from rlreason.errors import ConfigError


def test_stacked_layers_are_compared_part_by_part():
    """What a GPU keeps unpacked: q, k and v in one matrix, and a padded vocabulary."""
    stacked, table = torch.randn(8, 4), torch.randn(8, 4)
    held = {name: Digest.of(weight) for name, weight in {"embed.weight": table, "attn.qkv.weight": stacked}.items()}
    weights = {
        "embed.weight": table[:5],
        "attn.q.weight": stacked[:4],
        "attn.k.weight": stacked[4:6].clone(),
        "attn.v.weight": stacked[6:],
        "elsewhere.weight": table,
    }

    def differing():
        return differing_tensors(held, {n: Digest.of(w) for n, w in weights.items()}, {"qkv": ["q", "k", "v"]})

    assert differing() == (4, ())
    weights["attn.k.weight"][1, 2] += 1e-3
    assert differing() == (4, ("attn.k.weight",))


def test_memory_is_planned_before_anything_is_loaded(policy):
    plan = plan_memory(policy, policy.device, max_len=100, max_rows=8, cache_gb=None)
    token = 2 * 2 * 4 * 8 * 4  # keys and values, layers, heads, head_dim, bytes
    assert plan.cache == token * (100 + 128) * 8
    assert plan.weights == 4 * sum(p.numel() for p in policy.model.parameters())
    for gigabytes in (0.0001, 1e6):  # not one sequence; more than there is
        with pytest.raises(ConfigError, match=r"rollout\.kv_cache_gb"):
            plan_memory(policy, policy.device, max_len=100, max_rows=8, cache_gb=gigabytes)


class Scripted:
    """In place of vLLM and of the pipe to the trainer: each step ends the oldest request."""

    def __init__(self) -> None:
        self.llm_engine = self
        self.waiting: list[str] = []
        self.most, self.messages = 0, list[tuple]()

    def add_request(self, name, prompt, params) -> None:
        self.waiting.append(name)

    def step(self) -> list[SimpleNamespace]:
        self.most = max(self.most, len(self.waiting))
        ended = SimpleNamespace(
            token_ids=[1], logprobs=SimpleNamespace(logprobs=[0.0]), finish_reason="stop", stop_reason=1
        )
        return [SimpleNamespace(request_id=self.waiting.pop(0), outputs=[ended])]

    def send(self, message) -> None:
        self.messages.append(message)


def test_samples_that_wait_do_not_wait_in_the_engine():
    """Each would take about 10 kB there: 3 GB for 5,000 problems with 64 samples each."""
    pytest.importorskip("vllm")
    from rlreason.engines.vllm.server import Server

    server, scripted = Server.__new__(Server), Scripted()
    server.llm = server.connection = scripted
    server.sample([([5, 6], 7)] * 50, 40, 32, {})
    assert 32 <= scripted.most <= 64
    assert [ended.place for _, _, ended_now in scripted.messages for ended in ended_now] == list(range(2000))
