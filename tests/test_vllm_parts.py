"""What surrounds vLLM and runs without it: where engines run, the memory plan, requests that wait, sent weights."""

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
from rlreason.engines.vllm_process import DirectTransfer, Place, environment
from rlreason.engines.vllm_server import Server, differing_tensors, digest
from rlreason.errors import ConfigError
from rlreason.model.plan import describe_placement, engine_gpus, ranks_here

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
    assert all(str(gpu) in describe_placement(placement, found) for gpu in found)
    with mock.patch("torch.cuda.device_count", return_value=gpus):
        _, places = places_of(RolloutConfig("vllm", placement=placement, gpus=engines), "cuda", ranks)
    for gpu, place in zip(found, places, strict=True):
        assert (place.transfer == "nccl") == (gpu > 0)
        assert (place.transfer == "ipc") == (gpu == 0 and ranks == 1)
        assert place.sleeps == (gpu < ranks)


def test_engines_on_the_processor_get_weights_by_a_file_and_never_sleep():
    """Bug: a processor's engine waits for CUDA IPC, or is woken though it never slept."""
    _, places = places_of(RolloutConfig("vllm", gpus=2), "cpu", 1)
    assert [(place.gpu, place.transfer, place.sleeps) for place in places] == [(None, None, False)] * 2
    assert len({place.name for place in places}) == 2  # messages name the one that failed


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
    four, auto = typed(composed("gpus=4")), typed(composed())
    torchrun = {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    for name in (*torchrun, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (ranks_here(four), ranks_here(auto)) == (4, 1)
    for name, value in (torchrun | {"LOCAL_WORLD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    assert ranks_here(auto) == 8  # the others are on another machine


# Before and during sampling


def test_stacked_layers_are_compared_part_by_part():
    """Bug: a stale part of a stacked matrix, or padding of the vocabulary, misleads the comparison."""
    stacked, table = torch.randn(8, 4), torch.randn(8, 4)
    held = {name: digest(weight) for name, weight in {"embed.weight": table, "attn.qkv.weight": stacked}.items()}
    parts = {"q": stacked[:4], "k": stacked[4:6].clone(), "v": stacked[6:]}
    weights = {f"attn.{name}.weight": part for name, part in parts.items()}
    weights |= {"embed.weight": table[:5], "elsewhere.weight": table}

    def differing():
        return differing_tensors(held, {n: digest(w) for n, w in weights.items()}, {"qkv": ["q", "k", "v"]})

    assert differing() == (4, ())
    weights["attn.k.weight"][1, 2] += 1e-3
    assert differing() == (4, ("attn.k.weight",))


def test_memory_is_planned_before_anything_is_loaded(policy):
    """Bug: a cache that cannot hold one sequence shows itself after minutes of loading."""
    here = Place("the processor")
    given, _ = llm_arguments(policy, here, max_len=100, max_rows=8, cache_gb=None)
    token = 2 * 2 * 4 * 8 * 4  # keys and values, layers, heads, head_dim, bytes
    assert given["kv_cache_memory_bytes"] == token * (100 + 128) * 8
    for gigabytes in (0.0001, 1e6):  # not one sequence; more than there is
        with pytest.raises(ConfigError, match=r"rollout\.kv_cache_gb"):
            llm_arguments(policy, here, max_len=100, max_rows=8, cache_gb=gigabytes)


class Scripted:
    """In place of vLLM and of the pipe to the trainer: each step ends the oldest request."""

    def __init__(self) -> None:
        self.llm_engine, self.waiting, self.messages, self.most = self, list[str](), list[tuple](), 0
        self.send = self.messages.append

    def add_request(self, name, prompt, params) -> None:
        self.waiting.append(name)
        self.most = max(self.most, len(self.waiting))

    def step(self) -> list[SimpleNamespace]:
        log_probs = SimpleNamespace(logprobs=[0.0])
        ended = SimpleNamespace(token_ids=[1], logprobs=log_probs, finish_reason="stop", stop_reason=1)
        return [SimpleNamespace(request_id=self.waiting.pop(0), outputs=[ended])]


def test_samples_that_wait_do_not_wait_in_the_engine():
    """Bug: all requests are given to vLLM at once: 10 kB each, 3 GB for 5,000 problems with 64 samples each."""
    pytest.importorskip("vllm")
    scripted = Scripted()
    server = Server(scripted)
    server.llm = scripted
    server.sample([(i, [5, 6], 7) for i in range(50)], 40, 32, {})
    assert 32 <= scripted.most <= 64
    assert [ended[0] for _, _, ended_now in scripted.messages for ended in ended_now] == list(range(2000))


# The sending side of the weight transfer, as far as a processor shows it


class Told:
    """In place of vLLM's process: keeps what it is told."""

    def __init__(self, transfer: str) -> None:
        self.place, self.calls = Place("GPU", 0, transfer=transfer), list[tuple[str, dict]]()

    def send(self, *asked) -> None:
        *how, name, _, _, arguments = asked
        assert how == ["ask", "collective_rpc"]
        self.calls.append((name, arguments))

    def message(self) -> tuple[str, None]:
        return "done", None


def names_and_shapes(weights) -> list[tuple[str, list[int]]]:
    return [(name, list(weight.shape)) for name, weight in weights]


@pytest.mark.long
def test_nccl_sends_every_weight_in_the_order_that_it_announces(policy, monkeypatch):
    """Bug: what is sent and what is announced differ in order, so that weights get into each other's places."""
    nccl_engine = pytest.importorskip("vllm.distributed.weight_transfer.nccl_engine")
    sent, process = [], Told("nccl")
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: info)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", lambda iterator, **_: sent.extend(iterator))
    DirectTransfer(process, policy).sender.send_weights()
    assert names_and_shapes(sent) == names_and_shapes(policy.engine_weights())
    assert {weight.dtype for _, weight in sent} == {policy.compute_dtype}
    names = ["init_weight_transfer_engine", "start_weight_update", "update_weights", "finish_weight_update"]
    assert [name for name, _ in process.calls] == names
    begun = process.calls[0][1]["init_info"]
    assert (begun["rank_offset"], begun["world_size"]) == (1, 2)  # the trainer is rank 0 of two
    info = process.calls[2][1]["update_info"]
    assert list(zip(info["names"], info["shapes"], strict=True)) == names_and_shapes(sent)


@pytest.mark.long
def test_ipc_shares_every_weight_in_parts_that_hold_the_largest(policy, monkeypatch):
    """Bug: a weight larger than the buffer cannot be sent."""
    ipc_engine = pytest.importorskip("vllm.distributed.weight_transfer.ipc_engine")
    from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

    sizes, process = [], Told("ipc")

    def part(iterator, gpu_uuid, post_iter_func, buffer_size_bytes):
        sizes.append(buffer_size_bytes)
        for name, weight in iterator:
            size = post_iter_func((name, weight)).nbytes
            shape = list(weight.shape)
            yield PackedIpcChunk([name], [shape], ["float32"], [size], {gpu_uuid: ()})

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", part)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="a card"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    DirectTransfer(process, policy).sender.send_weights()
    told = [arguments["update_info"] for name, arguments in process.calls if name == "update_weights"]
    sent = [(info["names"][0], info["shapes"][0]) for info in told]
    assert sent == names_and_shapes(policy.engine_weights())
    assert process.calls[0] == ("init_weight_transfer_engine", {"init_info": {"packed": True}})
    assert sizes[0] >= max(weight.nbytes for _, weight in policy.engine_weights())
