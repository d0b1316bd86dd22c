"""The sending side of vLLM's weight transfer, as far as a processor shows it: what it reads, and what it tells."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
from vllm.distributed.weight_transfer import ipc_engine, nccl_engine
from vllm.distributed.weight_transfer.packed_tensor import PackedIpcChunk

from rlreason.engines.vllm.process import DirectTransfer, Place

pytestmark = pytest.mark.long


class Told:
    """In place of vLLM's process: keeps what it is told."""

    def __init__(self, transfer: str) -> None:
        self.place = Place("GPU", 0, transfer=transfer)
        self.calls: list[tuple[str, dict]] = []

    def call(self, method: str, name: str, arguments: dict) -> None:
        assert method == "transfer"
        self.calls.append((name, arguments))


def names_and_shapes(policy) -> list[tuple[str, list[int]]]:
    return [(name, list(weight.shape)) for name, weight in policy.engine_weights()]


def test_nccl_sends_every_weight_in_the_order_that_it_announces(policy, monkeypatch):
    """vLLM itself compares what it is given with what was announced."""
    sent = []
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: info)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", lambda iterator, **_: sent.extend(iterator))
    process = Told("nccl")
    DirectTransfer(process, policy).send(policy)
    assert [(name, list(weight.shape)) for name, weight in sent] == names_and_shapes(policy)
    assert {weight.dtype for _, weight in sent} == {policy.compute_dtype}
    name, arguments = process.calls[0]
    assert name == "init_weight_transfer_engine"
    assert arguments["init_info"]["rank_offset"] == 1  # the trainer is rank 0 of two
    assert arguments["init_info"]["world_size"] == 2
    info = dict(process.calls)["update_weights"]["update_info"]
    assert list(zip(info["names"], info["shapes"], strict=True)) == names_and_shapes(policy)
    assert [name for name, _ in process.calls[1:]] == ["start_weight_update", "update_weights", "finish_weight_update"]


def test_ipc_shares_every_weight_in_parts_that_hold_the_largest(policy, monkeypatch):
    sizes = []

    def part(iterator, gpu_uuid, post_iter_func, buffer_size_bytes):
        sizes.append(buffer_size_bytes)
        for name, weight in iterator:
            yield PackedIpcChunk(
                names=[name],
                shapes=[list(weight.shape)],
                dtype_names=["float32"],
                tensor_sizes=[post_iter_func((name, weight)).nbytes],
                ipc_handle={gpu_uuid: ()},
            )

    monkeypatch.setattr(ipc_engine, "packed_ipc_producer", part)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="a card"))
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    process = Told("ipc")
    DirectTransfer(process, policy).send(policy)
    told = [arguments["update_info"] for name, arguments in process.calls if name == "update_weights"]
    assert [(info["names"][0], info["shapes"][0]) for info in told] == names_and_shapes(policy)
    assert process.calls[0] == ("init_weight_transfer_engine", {"init_info": {"packed": True}})
    assert sizes[0] >= max(weight.nbytes for _, weight in policy.engine_weights())
