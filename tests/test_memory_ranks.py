"""The plan of several ranks: whole models or shares of one, and engines on GPUs of their own."""

import dataclasses

import pytest

from rlreason.config.store import typed
from rlreason.model import memory as f
from rlreason.model.fitting import BUCKET, all_fit, held_later, plan_of, spread_work
from rlreason.model.memory import workload_of
from rlreason.model.savings import device_per_rank, figures, parallel_mode, planned, start_lines, table
from rlreason.model.shapes import PUBLISHED
from rlreason.runtime.machine import Device
from rlreason.training import ranks

GIB = 1 << 30
MODEL = ("model=qwen2_5_math_1_5b", "data=gsm8k", "data.path=a/b", "rollout=vllm")
SHAPE = PUBLISHED["Qwen/Qwen2.5-Math-1.5B"]
CARD = Device("cuda", "a card", int(79.1 * GIB), 80 * GIB)
SMALL = Device("cuda", "a small card", int(39.4 * GIB), 40 * GIB)


def test_the_plan_counts_the_bucket_that_gradients_are_summed_in():
    assert 4 * ranks.BUCKET == BUCKET


def plan(composed, *words, device=CARD):
    return plan_of(workload_of(typed(composed(*MODEL, *words)), SHAPE, device), device)


def test_whole_models_take_what_one_takes_and_a_bucket(composed):
    alone, two = plan(composed), plan(composed, "gpus=2", "parallel=replicate")
    more = two.training.pop("sum over ranks")
    assert more >= max(BUCKET, 4 * SHAPE.vocab * SHAPE.width)  # the embedding is summed in one piece
    assert (two.training, two.sampling) == (alone.training, alone.sampling)
    assert (two.ranks, two.mode, two.main_memory) == (2, "replicate", 0)


@pytest.mark.parametrize("ranks", [2, 4, 8])
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
    run = typed(composed(*MODEL, "gpus=4"))
    work = workload_of(run, SHAPE, SMALL)
    spread = dataclasses.replace(work, parallel="shard")
    held, root = plan_of(spread, SMALL).training, 4 * SHAPE.vocab * SHAPE.width
    assert held_later(spread) == held["weights"] + held["moments"]
    few = dataclasses.replace(spread, trained=[(1000, 4)])  # as of adapters: then the start takes more
    assert held_later(few) >= held["weights"] + 2 * root
    assert held_later(dataclasses.replace(work, parallel="replicate")) == f.moment_bytes(work.trained, "adamw")


def test_half_precision_copies_of_a_spread_model_are_kept_for_a_gradient_alone(composed):
    run = typed(composed(*MODEL, "gpus=4", "parallel=shard"))
    work = workload_of(run, SHAPE, CARD)
    assert spread_work(work).casts == work.casts._replace(kept=0)
    assert plan_of(work, CARD).training["cast weights"] == work.casts.every > 0
    again = plan(composed, "gpus=4", "parallel=shard", "model.gradient_checkpointing=true")
    assert again.training.get("cast weights", 0) == 0
    assert again.training["activations"] < plan_of(work, CARD).training["activations"]


def test_the_mode_is_that_of_the_plan(composed):
    def mode(device, world, *words):
        return parallel_mode(typed(composed(*MODEL, *words)), SHAPE, device, world)

    assert mode(CARD, 1) == ("replicate", "one process trains")
    fits = mode(CARD, 2)
    assert fits.mode == "replicate"
    assert fits.why.startswith("a whole model takes about 57 GiB in training, and 79 GiB are free")
    assert mode(SMALL, 2).mode == "shard"
    assert mode(SMALL, 2, "gpus=2", "parallel=replicate") == ("replicate", "as asked")
    assert mode(CARD, 2, "gpus=2", "parallel=shard") == ("shard", "as asked")
    whole = mode(SMALL, 2, "optimizer=adamw_8bit")
    assert whole.mode == "replicate"
    assert whole.why.endswith("; optimizer=adamw_8bit cannot be spread")
    in_process = mode(SMALL, 2, "rollout=hf")
    assert in_process.mode == "replicate"
    assert in_process.why.endswith("; rollout=hf samples from a whole one")
    unknown = dataclasses.replace(CARD, free=None, total=None)
    assert mode(unknown, 2) == ("replicate", "nobody can tell how much memory is free")
    assert parallel_mode(typed(composed(*MODEL)), None, CARD, 2).mode == "replicate"


def test_the_plan_and_the_mode_agree_whatever_the_card(composed):
    run = typed(composed(*MODEL, "gpus=4"))
    modes = set()
    for gigabytes in range(16, 90, 6):
        device = Device("cuda", "a card", gigabytes * GIB, gigabytes * GIB)
        told, mode = planned(run, device), parallel_mode(run, SHAPE, device, 4).mode
        assert told.plan.mode == mode
        whole = plan_of(dataclasses.replace(told.work, parallel="replicate"), device)
        assert (mode == "replicate") == all_fit(whole, device)
        modes.add(mode)
    assert modes == {"replicate", "shard"}


def test_ranks_on_a_processor_share_its_memory(composed):
    here = Device("cpu", "the processor", 64 * GIB, 64 * GIB)
    assert device_per_rank(here, 4).free == 16 * GIB
    assert device_per_rank(here, 1) is here
    assert device_per_rank(CARD, 4) is CARD
    told = planned(typed(composed(*MODEL, "gpus=4", "rollout=hf")), here)
    assert "for each of 4 ranks" in told.device.name
    assert told.device.free == 16 * GIB


def test_what_each_rank_has_is_said(composed):
    told = planned(typed(composed(*MODEL, "gpus=2", "parallel=shard")), CARD)
    words = "each of 2 ranks has a part of the model; rank 0 takes 5.8 GiB of main memory too"
    assert words in start_lines(told)[0]
    assert f"the plan is of rank 0; {words}" in table(told)
    assert (figures(told)["ranks"], figures(told)["parallel"]) == (2, "shard")
    alone = planned(typed(composed(*MODEL)), CARD)
    assert "rank" not in "\n".join([*table(alone), *start_lines(alone)])


def test_a_model_that_is_said_to_be_whole_may_be_spread_to_fit(composed):
    told = planned(typed(composed(*MODEL, "gpus=8", "parallel=replicate", "model.gradient_checkpointing=true")), SMALL)
    small = dataclasses.replace(SMALL, free=24 * GIB)
    assert told.verdict == "fits"
    cure = planned(typed(composed(*MODEL, "gpus=8", "parallel=replicate", "micro_batch_tokens=2048")), small).cure
    assert cure is not None
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
