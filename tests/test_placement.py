"""Which GPU each engine of vLLM gets, for every number of ranks, engines and GPUs."""

import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlreason.config.groups import RolloutConfig
from rlreason.config.store import typed
from rlreason.engines.build import transfer_to, transfers_of
from rlreason.engines.vllm.start import environment
from rlreason.engines.vllm.transfer import InProcessTransfer, NCCLTransfer, ProcessTransfer, visible_gpu
from rlreason.errors import ConfigError
from rlreason.model.fitting import describe_placement, engine_gpus, ranks_here
from rlreason.training.preflight import too_few_gpus

PLACEMENTS = st.sampled_from(["auto", "colocate", "second_gpu"])
NUMBERS = {"placement": PLACEMENTS, "engines": st.integers(1, 9), "ranks": st.integers(1, 9), "gpus": st.integers(1, 9)}


@given(**NUMBERS)
def test_engines_get_gpus_that_are_there_each_its_own(placement, engines, ranks, gpus):
    if why := too_few_gpus(placement, gpus, engines, ranks):
        taken = engines + (ranks if placement == "second_gpu" else 0)
        assert taken > gpus
        assert f"it takes {taken}" in why
        with pytest.raises(ConfigError, match=re.escape(why)):
            engine_gpus(placement, engines, ranks, gpus)
        if cure := re.search(r"set rollout\.gpus=(\d+)$", why):  # it helps, and one more would not
            assert len(engine_gpus(placement, int(cure[1]), ranks, gpus)) == int(cure[1]) > 0
            assert too_few_gpus(placement, gpus, int(cure[1]) + 1, ranks)
        else:
            assert engine_gpus("auto", 1, ranks, gpus) == [0]
        return
    found = engine_gpus(placement, engines, ranks, gpus)
    assert len(found) == len(set(found)) == engines
    assert max(found) < gpus
    assert (min(found) >= ranks) == (placement == "second_gpu")
    assert all(str(gpu) in describe_placement(placement, found, ranks) for gpu in found if engines > 1)


@given(**NUMBERS)
def test_no_two_processes_of_one_gpu_are_joined_by_nccl(placement, engines, ranks, gpus):
    """NCCL cannot do that: rank 0 computes on the first GPU. Beside other ranks no engine is in its process."""
    if too_few_gpus(placement, gpus, engines, ranks):
        return
    for gpu in engine_gpus(placement, engines, ranks, gpus):
        way = transfer_to(gpu, engines, ranks)
        assert isinstance(way, InProcessTransfer) == (gpu == 0 and ranks == 1)
        assert isinstance(way, NCCLTransfer) == (gpu > 0)
        if isinstance(way, ProcessTransfer):
            assert way.device(policy=None) == torch.device("cuda", gpu)
            assert way.shares_gpu(policy=None) == (gpu < ranks)  # and so may sleep


@pytest.mark.parametrize(("engines", "ranks"), [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_engines_on_the_processor_are_apart_where_there_are_several_or_several_ranks(engines, ranks):
    _, ways = transfers_of(RolloutConfig("vllm", gpus=engines), "cpu", ranks)
    assert len(ways) == engines
    assert {isinstance(way, InProcessTransfer) for way in ways.values()} == {engines == ranks == 1}
    assert {way.shares_gpu(SimpleNamespace(device=torch.device("cpu"))) for way in ways.values()} == {False}


@pytest.mark.parametrize("visible", [None, "0,1,2,3", "7,5, 3,1", "GPU-a,GPU-b,GPU-c,MIG-d"])
def test_an_engines_process_sees_its_gpu_alone(visible):
    whole = [part.strip() for part in (visible or "0,1,2,3").split(",")]
    with environment({"CUDA_VISIBLE_DEVICES": visible}):
        seen = [NCCLTransfer(gpu).environment()["CUDA_VISIBLE_DEVICES"] for gpu in range(1, 4)]
    assert seen == whole[1:]
    assert visible_gpu(visible, 0) == whole[0]


def test_the_trainers_ranks_on_this_machine_are_those_of_torchrun_or_of_the_setting(composed):
    four, auto, untrained = (typed(composed(*words)) for words in (["gpus=4"], [], ["algorithm=evaluate"]))
    torchrun = {"RANK": "0", "WORLD_SIZE": "16", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
    with environment(dict.fromkeys([*torchrun, "LOCAL_WORLD_SIZE"])):
        assert ranks_here(four) == 4
        assert ranks_here(auto) == ranks_here(untrained) == 1
    with environment(torchrun | {"LOCAL_WORLD_SIZE": "8"}):
        assert ranks_here(auto) == 8  # the others are on another machine
