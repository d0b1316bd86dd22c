"""Which GPU each engine of vLLM gets, for every number of ranks, engines and GPUs."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreason.config.groups import RolloutConfig
from rlreason.config.store import typed
from rlreason.engines.build import place_on, places_of
from rlreason.engines.vllm.process import environment
from rlreason.errors import ConfigError
from rlreason.model.plan import describe_placement, engine_gpus, ranks_here

PLACEMENTS = st.sampled_from(["auto", "colocate", "second_gpu"])
NUMBERS = {"placement": PLACEMENTS, "engines": st.integers(1, 9), "ranks": st.integers(1, 9), "gpus": st.integers(1, 9)}


@given(**NUMBERS)
def test_engines_get_gpus_that_are_there_each_its_own(placement, engines, ranks, gpus):
    taken = engines + (ranks if placement == "second_gpu" else 0)
    if taken > gpus:
        with pytest.raises(ConfigError, match=f"it takes {taken}"):
            engine_gpus(placement, engines, ranks, gpus)
        return
    found = engine_gpus(placement, engines, ranks, gpus)
    assert len(found) == len(set(found)) == engines
    assert max(found) < gpus
    assert (min(found) >= ranks) == (placement == "second_gpu")
    assert all(str(gpu) in describe_placement(placement, found) for gpu in found if engines > 1)


@given(**NUMBERS)
def test_no_two_processes_of_one_gpu_are_joined_by_nccl(placement, engines, ranks, gpus):
    """NCCL cannot do that: rank 0, who sends the weights, computes on the first GPU."""
    if engines + (ranks if placement == "second_gpu" else 0) > gpus:
        return
    for gpu in engine_gpus(placement, engines, ranks, gpus):
        place = place_on(gpu, ranks)
        assert (place.transfer == "nccl") == (gpu > 0)
        assert (place.transfer == "ipc") == (gpu == 0 and ranks == 1)
        assert place.device == torch.device("cuda", gpu)
        assert place.shared == (gpu < ranks)  # and so may sleep


@pytest.mark.parametrize(("engines", "ranks"), [(1, 1), (2, 1), (3, 2)])
def test_engines_on_the_processor_get_weights_by_a_file_and_never_sleep(engines, ranks):
    _, places = places_of(RolloutConfig("vllm", gpus=engines), "cpu", ranks)
    assert [(place.gpu, place.transfer, place.shared) for place in places] == [(None, "file", False)] * engines
    assert len({place.name for place in places}) == engines


def test_an_engines_process_sees_its_gpu_alone_and_not_the_trainers_ranks():
    ours = {"PATH": "bin", "LOCAL_RANK": "3", "TORCHELASTIC_RUN_ID": "x", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    ours |= {"CUDA_VISIBLE_DEVICES": "7,GPU-5, 3,1"}
    theirs = [environment(ours, place_on(gpu, 1), "files", 2, exact=False) for gpu in range(4)]
    assert [v["CUDA_VISIBLE_DEVICES"] for v in theirs] == ["7", "GPU-5", "3", "1"]
    for variables in theirs:
        assert not variables.keys() & {"LOCAL_RANK", "TORCHELASTIC_RUN_ID"}
        assert variables["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"  # whatever the user's shell says
        assert (variables["PATH"], variables["OMP_NUM_THREADS"]) == ("bin", "2")


def test_the_trainers_ranks_on_this_machine_are_those_of_torchrun_or_of_the_setting(composed, monkeypatch):
    four, auto, untrained = (typed(composed(*words)) for words in (["gpus=4"], [], ["algorithm=evaluate"]))
    torchrun = {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    for name in (*torchrun, "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert ranks_here(four) == 4
    assert ranks_here(auto) == ranks_here(untrained) == 1
    for name, value in (torchrun | {"LOCAL_WORLD_SIZE": "8"}).items():
        monkeypatch.setenv(name, value)
    assert ranks_here(auto) == 8  # the others are on another machine
