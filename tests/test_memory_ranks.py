"""The plan of several ranks: whole models or shares of one, and engines on GPUs of their own."""

import dataclasses

import pytest

from rlreason.config.store import typed
from rlreason.model import memory as f
from rlreason.model.fitting import BUCKET, held_later, plan_of, spread_work
from rlreason.model.memory import workload_of
from rlreason.model.savings import device_per_rank, figures, parallel_mode, planned, table
from rlreason.model.shapes import PUBLISHED
from rlreason.runtime.machine import Device
from rlreason.training import ranks

GIB = 1 << 30
MODEL = ("model=qwen2_5_math_1_5b", "data=gsm8k", "data.path=a/b", "rollout=vllm")
SHAPE = PUBLISHED["Qwen/Qwen2.5-Math-1.5B"]
CARD = Device("cuda", "a card", int(79.1 * GIB), 80 * GIB)
SMALL = Device("cuda", "a small card", int(39.4 * GIB), 40 * GIB)


def plan(composed, *words, device=CARD):
    return plan_of(workload_of(typed(composed(*MODEL, *words)), SHAPE, device), device)


def test_whole_models_take_what_one_takes_and_a_bucket(composed):
    assert 4 * ranks.BUCKET == BUCKET
    alone, two = plan(composed), plan(composed, "gpus=2", "parallel=replicate")
    more = two.training.pop("sum over ranks")
    assert more >= max(BUCKET, 4 * SHAPE.vocab * SHAPE.width)  # the embedding is summed in one piece
    assert (two.training, two.sampling) == (alone.training, alone.sampling)
    assert (two.ranks, two.mode, two.main_memory) == (2, "replicate", 0)


@pytest.mark.parametrize("ranks", [2, 8])
def test_shares_divide_what_is_held_and_not_what_is_computed(composed, ranks):
    words = ("kl_placement=loss", "kl_coef=0.1")
    alone = plan(composed, *words)
    one = plan(composed, *words, f"gpus={ranks}", "parallel=shard")
    for part in ("weights", "moments", "reference model", "gradients"):
        assert one.training[part] == pytest.approx(alone.training[part] / ranks, rel=1e-6)
    for part in ("activations", "cast weights", "logits, head"):
        assert one.training[part] == alone.training[part]
    root, layer = SHAPE.vocab * SHAPE.width, (SHAPE.numbers - SHAPE.vocab * SHAPE.width) // SHAPE.layers
    assert one.training["gathered weights"] >= 4 * (root + layer)
    assert one.main_memory == 2 * f.weight_bytes(SHAPE, 4)  # rank 0's whole copies of policy and reference
    assert one.sampling["engine's weights"] == alone.sampling["engine's weights"]


def test_shares_that_the_plan_decides_are_those_that_are_asked_for(composed):
    """The cache of vLLM above all: of shares, the trainer takes less beside it than of whole models."""
    decided = plan(composed, "gpus=4", device=SMALL)
    assert decided.mode == "shard"
    assert decided == plan(composed, "gpus=4", "parallel=shard", device=SMALL)
    one_sequence = plan(composed, "gpus=4", "rollout.max_rows=1", device=SMALL).sampling["KV cache"]
    assert decided.sampling["KV cache"] > 8 * one_sequence


def test_what_is_taken_after_vllm_counts_the_weights_that_are_not_there_yet(composed):
    """A model that is spread is read into main memory: its parts come to the GPUs when vLLM has its cache."""
    work = workload_of(typed(composed(*MODEL, "gpus=4")), SHAPE, SMALL)
    spread = spread_work(work)
    held, root = plan_of(spread, SMALL).training, 4 * SHAPE.vocab * SHAPE.width
    assert held_later(spread) == held["weights"] + held["moments"]
    few = dataclasses.replace(spread, trained=[(1000, 4)])  # as of adapters: then the start takes more
    assert held_later(few) >= held["weights"] + 2 * root
    assert held_later(dataclasses.replace(work, parallel="replicate")) == f.moment_bytes(work.trained, "adamw")
    assert held["cast weights"] == work.casts.every > spread.casts.kept == 0  # kept for a gradient alone


def test_the_mode_is_that_of_the_plan_whatever_the_card(composed):
    def mode(device, world, *words, shape=SHAPE):
        return parallel_mode(typed(composed(*MODEL, *words)), shape, device, world)

    assert mode(CARD, 1).mode == mode(CARD, 2).mode == "replicate"
    assert "57 GiB in training, and 79 GiB are free" in mode(CARD, 2).why
    assert mode(SMALL, 2).mode == "shard"
    assert mode(SMALL, 2, "gpus=2", "parallel=replicate") == ("replicate", "as asked")
    assert mode(CARD, 2, "gpus=2", "parallel=shard") == ("shard", "as asked")
    for words in (["optimizer=adamw_8bit"], ["model.weights=bfloat16"], ["rollout=hf"]):
        assert mode(SMALL, 2, *words, "micro_batch_tokens=32768").mode == "replicate"
    assert mode(dataclasses.replace(CARD, free=None), 2).mode == mode(SMALL, 2, shape=None).mode == "replicate"
    run, modes = typed(composed(*MODEL, "gpus=4")), set()
    for gigabytes in range(16, 90, 12):
        device = Device("cuda", "a card", gigabytes * GIB, gigabytes * GIB)
        told = planned(run, device)
        assert told.plan.mode == parallel_mode(run, SHAPE, device, 4).mode
        whole = plan_of(dataclasses.replace(told.work, parallel="replicate"), device)
        assert (told.plan.mode == "replicate") == whole.fits(device)
        modes.add(told.plan.mode)
    assert modes == {"replicate", "shard"}


def test_ranks_on_a_processor_share_its_memory(composed):
    here = Device("cpu", "the processor", 64 * GIB, 64 * GIB)
    assert device_per_rank(here, 1) is here
    assert device_per_rank(CARD, 4) is CARD
    told = planned(typed(composed(*MODEL, "gpus=4", "rollout=hf")), here)
    assert (told.device.free, "of 4 ranks" in told.device.name) == (16 * GIB, True)


def test_what_each_rank_has_is_said_and_whole_models_may_be_spread_to_fit(composed):
    told = planned(typed(composed(*MODEL, "gpus=2", "parallel=shard")), CARD)
    assert "rank 0 of 2, by parallel=shard; rank 0 takes 5.8 GiB of main memory" in "\n".join(table(told))
    assert (figures(told)["ranks"], figures(told)["parallel"]) == (2, "shard")
    assert "rank" not in "\n".join(table(planned(typed(composed(*MODEL)), CARD)))
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
    assert four.other_device["engine's weights"] == one.other_device["engine's weights"]
    assert four.other_device["KV cache"] < one.other_device["KV cache"]
    assert one.training == four.training
