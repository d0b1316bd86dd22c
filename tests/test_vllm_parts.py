"""What surrounds vLLM and runs without it: where engines run, the memory plan, requests that wait.

On a card, benchmarks/gpu_check.py holds the weights that are sent.
"""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreason.config.groups import RolloutConfig
from rlreason.config.store import typed
from rlreason.engines.build import places_of
from rlreason.engines.vllm import llm_arguments
from rlreason.engines.vllm_process import Place, environment
from rlreason.engines.vllm_server import Server, differing_tensors, digest
from rlreason.errors import ConfigError
from rlreason.model.plan import engine_gpus, ranks_here

# Where engines run


@given(st.sampled_from(["auto", "colocate", "second_gpu"]), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_engines_get_gpus_that_are_there_each_its_own(placement, engines, ranks, gpus):
    """Bug: two engines, or an engine and a rank, share a GPU by mistake; or NCCL joins two processes of one GPU."""
    taken = engines + (ranks if placement == "second_gpu" else 0)
    if taken > gpus:
        with pytest.raises(ConfigError, match=f"it takes {taken}"):
            engine_gpus(placement, engines, ranks, gpus)
        return
    found = engine_gpus(placement, engines, ranks, gpus)
    assert len(found) == len(set(found)) == engines
    assert max(found) < gpus
    assert (min(found) >= ranks) == (placement == "second_gpu")
    with mock.patch("torch.cuda.device_count", return_value=gpus):
        places = places_of(RolloutConfig("vllm", placement=placement, gpus=engines), "cuda", ranks)
    slow = places_of(RolloutConfig("vllm", gpus=engines), "cpu", 1)  # a processor waits for no IPC and never sleeps
    assert {(place.gpu, place.transfer, place.sleeps) for place in slow} == {(None, None, False)}
    assert len({place.name for place in slow}) == engines  # messages name the one that failed
    for gpu, place in zip(found, places, strict=True):
        assert (place.transfer == "nccl") == (gpu > 0)
        assert (place.transfer == "ipc") == (gpu == 0 and ranks == 1)
        assert place.sleeps == (gpu < ranks)


def test_an_engines_process_sees_its_gpu_alone_and_not_the_trainers_ranks():
    """Bug: vLLM takes the trainer's rank for its own, or computes on the trainer's GPU."""
    ours = {"PATH": "bin", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "x", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ours |= {"CUDA_VISIBLE_DEVICES": "7,GPU-5, 3,1"}
    theirs = [environment(ours, Place("GPU", gpu), "files", 2, exact=False) for gpu in range(4)]
    assert [v["CUDA_VISIBLE_DEVICES"] for v in theirs] == ["7", "GPU-5", "3", "1"]
    for variables in theirs:
        assert not variables.keys() & {"LOCAL_RANK", "TORCHELASTIC_RUN_ID"}
        assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # whatever the user's shell says
        assert (variables["PATH"], variables["OMP_NUM_THREADS"]) == ("bin", "2")


def test_the_trainers_ranks_on_this_machine_are_those_of_torchrun_or_of_the_setting(composed, monkeypatch):
    """Bug: ranks of another machine count, so engines are given GPUs that are not there."""
    auto = typed(composed())
    assert (ranks_here(typed(composed("gpus=4"))), ranks_here(auto)) == (4, 1)
    torchrun = {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    for name, value in (torchrun | {"LOCAL_WORLD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    assert ranks_here(auto) == 8  # the others are on another machine


# Before and during sampling


def test_stacked_layers_are_compared_part_by_part():
    """Bug: a stale part of a stacked matrix, or padding of the vocabulary, misleads the comparison."""
    stacked, table = torch.randn(8, 4), torch.randn(8, 4)
    held = {"embed.weight": digest(table), "attn.qkv.weight": digest(stacked)}
    parts = {"attn.q": stacked[:4], "attn.k": stacked[4:6].clone(), "attn.v": stacked[6:]}
    for stale, found in ((0, ()), (1e-3, ("attn.k.weight",))):
        parts["attn.k"][1, 2] += stale
        weights = {
            f"{name}.weight": digest(w) for name, w in (parts | {"embed": table[:5], "elsewhere": table}).items()
        }
        assert differing_tensors(held, weights, {"qkv": ["q", "k", "v"]}) == (4, found)


def test_memory_is_planned_before_anything_is_loaded(policy):
    """Bug: a cache that cannot hold one sequence shows itself after minutes of loading."""
    here = Place("the processor")
    given, _ = llm_arguments(policy, here, max_len=100, max_rows=8, cache_gb=None)
    token = 2 * 2 * 4 * 8 * 4  # keys and values, layers, heads, head_dim, bytes
    assert given["kv_cache_memory_bytes"] == token * (100 + 128) * 8
    for gigabytes in (0.0001, 1e6):  # not one sequence; more than there is
        with pytest.raises(ConfigError, match=r"rollout\.kv_cache_gb"):
            llm_arguments(policy, here, max_len=100, max_rows=8, cache_gb=gigabytes)


def test_samples_that_wait_do_not_wait_in_the_engine(monkeypatch):
    """Bug: all requests are given to vLLM at once: 10 kB each, 3 GB for 5,000 problems with 64 samples each."""
    for name in ("vllm", "vllm.inputs", "vllm.sampling_params"):  # which takes seconds to import
        monkeypatch.setitem(sys.modules, name, mock.Mock())
    waiting, most, connection, engine = [], [], mock.Mock(), mock.Mock()  # each step ends the oldest request
    drawn = SimpleNamespace(logprobs=[-1.0])
    engine.add_request = lambda name, prompt, params: waiting.append(name)

    def step():
        most.append(len(waiting))
        one = SimpleNamespace(token_ids=[1], logprobs=drawn, finish_reason="stop", stop_reason=None)
        return [SimpleNamespace(request_id=waiting.pop(0), outputs=[one])]

    engine.step = step
    server = Server(connection)
    server.llm = mock.Mock(llm_engine=engine)
    server.sample([(i, [5, 6], 7) for i in range(20)], 10, 32, {})
    assert 32 <= max(most) <= 64
    assert [ended[0] for call in connection.send.call_args_list for ended in call.args[0][2]] == list(range(200))
