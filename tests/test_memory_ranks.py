"""The plan of several ranks: whole models or parts of one, and engines on GPUs of their own."""

import dataclasses

import pytest

from rlreason.config.store import typed
from rlreason.model import memory as f
from rlreason.model.memory import PUBLISHED, workload_of
from rlreason.model.plan import BUCKET, device_per_rank, figures, held_later, parallel_mode, plan_of, planned, table
from rlreason.runtime.machine import Device
from rlreason.training import ranks

GIB = 1 << 30
MODEL = ("model=qwen2_5_math_1_5b", "data=gsm8k", "data.path=a/b", "rollout=vllm")
SHAPE = PUBLISHED["Qwen/Qwen2.5-Math-1.5B"]
CARD = Device("cuda", "a card", int(79.1 * GIB), 80 * GIB)
SMALL = Device("cuda", "a small card", int(39.4 * GIB), 40 * GIB)


def plan(composed, *words, device=CARD):
    return plan_of(workload_of(typed(composed(*MODEL, *words)), SHAPE, device), device)


def test_ranks_divide_what_is_held_or_add_a_bucket_and_never_what_is_computed(composed):
    words = ("kl_placement=loss", "kl_coef=0.1")
    alone, whole = plan(composed, *words), plan(composed, *words, "gpus=2", "parallel=replicate")
    assert 4 * ranks.BUCKET == BUCKET
    assert whole.training.pop("sum over ranks") >= 4 * SHAPE.vocab * SHAPE.width  # the embedding, in one piece
    assert (whole.training, whole.sampling, whole.main_memory) == (alone.training, alone.sampling, 0)
    part = plan(composed, *words, "gpus=8", "parallel=shard")
    for name in ("weights", "moments", "reference model", "gradients"):
        assert part.training[name] == pytest.approx(alone.training[name] / 8, rel=1e-6)
    for name in ("activations", "cast weights", "logits, head"):
        assert part.training[name] == alone.training[name]
    layer = (SHAPE.numbers - SHAPE.outside_layers) // SHAPE.layers
    assert part.training["gathered weights"] >= 4 * (SHAPE.outside_layers + layer)
    assert part.main_memory == 2 * f.weight_bytes(SHAPE, 4)  # rank 0's whole copies of policy and reference
    assert part.sampling["engine's weights"] == alone.sampling["engine's weights"]


def test_the_mode_is_that_of_the_plan_whatever_the_card(composed):
    def mode(device, world, *words, shape=SHAPE):
        return parallel_mode(typed(composed(*MODEL, *words)), shape, device, world)[0]

    assert mode(CARD, 1) == mode(CARD, 2) == "replicate"
    assert mode(SMALL, 2) == mode(CARD, 2, "gpus=2", "parallel=shard") == "shard"
    assert mode(SMALL, 2, "gpus=2", "parallel=replicate") == "replicate"
    for words in (["optimizer=adamw_8bit"], ["model.weights=bfloat16"], ["rollout=hf"]):
        assert mode(SMALL, 2, *words, "micro_batch_tokens=32768") == "replicate"
    assert mode(dataclasses.replace(CARD, free=None), 2) == mode(SMALL, 2, shape=None) == "replicate"
    run, modes = typed(composed(*MODEL, "gpus=4")), set()
    for gigabytes in range(16, 90, 12):
        device = Device("cuda", "a card", gigabytes * GIB, gigabytes * GIB)
        told = planned(run, device)
        assert told.plan.parallel == parallel_mode(run, SHAPE, device, 4)[0]
        whole = plan_of(dataclasses.replace(told.work, parallel="replicate"), device)
        assert (told.plan.parallel == "replicate") == whole.fits(device)
        modes.add(told.plan.parallel)
    assert modes == {"replicate", "shard"}
    assert plan(composed, "gpus=4", device=SMALL) == plan(composed, "gpus=4", "parallel=shard", device=SMALL)


def test_what_is_taken_after_vllm_counts_the_weights_that_are_not_there_yet(composed):
    """A sharded model is read into main memory: its parts come to the GPUs when vLLM has its cache."""
    work = workload_of(typed(composed(*MODEL, "gpus=4")), SHAPE, SMALL)
    part = dataclasses.replace(work, parallel="shard")
    held = plan_of(part, SMALL).training
    assert held_later(part) == held["weights"] + held["moments"]
    whole = dataclasses.replace(work, parallel="replicate")
    assert held_later(whole) == f.moment_bytes(work.trained, work.gradients, "adamw")


def test_ranks_on_a_processor_share_its_memory(composed):
    here = Device("cpu", "the processor", 64 * GIB, 64 * GIB)
    assert device_per_rank(here, 1) is here
    assert device_per_rank(CARD, 4) is CARD
    told = planned(typed(composed(*MODEL, "gpus=4", "rollout=hf")), here)
    assert told.device.free == 16 * GIB


def test_what_each_rank_has_is_said_and_parts_are_a_way_to_fit(composed):
    told = planned(typed(composed(*MODEL, "gpus=2", "parallel=shard")), CARD)
    assert "rank 0 of 2, by parallel=shard" in "\n".join(table(told))
    assert (figures(told)["ranks"], figures(told)["parallel"]) == (2, "shard")
    words = ("gpus=8", "parallel=replicate", "model.gradient_checkpointing=true", "micro_batch_tokens=2048")
    cure = planned(typed(composed(*MODEL, *words)), dataclasses.replace(SMALL, free=24 * GIB)).cure
    assert "parallel=shard" in cure.overrides
    assert cure.same_result


def test_several_engines_share_what_is_sampled(composed):
    roomy = Device("cuda", "a card", 140 * GIB, 141 * GIB, second_free=140 * GIB)
    one, four = (
        plan(composed, "rollout.placement=second_gpu", "rollout.max_rows=4096", f"rollout.gpus={n}", device=roomy)
        for n in (1, 4)
    )
    assert four.second_gpu["engine's weights"] == one.second_gpu["engine's weights"]
    assert four.second_gpu["KV cache"] < one.second_gpu["KV cache"]
    assert one.training == four.training
