"""The memory plan beside what is measured on the processor: parts by the tensors' bytes, peaks by torch's profiler."""

import dataclasses
import gc
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from test_learner import RIGHT
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig, Olmo2Config, Qwen2Config, Qwen3Config

from rlreason.config.store import typed
from rlreason.data.prepare import read_splits
from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.build import reserve_of
from rlreason.engines.decoding import PROMPT_TOKENS, PreallocatedCache
from rlreason.engines.hf import HFEngine
from rlreason.engines.vllm import llm_arguments
from rlreason.engines.vllm_process import Place
from rlreason.model import memory as f
from rlreason.model import plan as p
from rlreason.model.log_probs import CHUNK
from rlreason.model.memory import PUBLISHED, Sampled, Workload, shape_from, shape_of, workload_of
from rlreason.model.parameters import TAGS, VOCABULARY, checkpoint_layers
from rlreason.model.policy import Policy
from rlreason.runtime.machine import Device, processor
from rlreason.training.build import make_learner, make_policy
from rlreason.types import Response, Sample
from tests.run_settings import altered

CPU = Device("cpu", "processor", 16 << 30, 16 << 30)
CARD = Device("cuda", "a card of 24 GB", int(23.5 * 2**30), 24 << 30)
CARD_40, CARD_80, CARD_140 = (Device("cuda", "a card", int(0.988 * n * 2**30), n << 30) for n in (40, 80, 142))
SIZES = {
    "vocab_size": 600, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "eos_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "llama, biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "olmo2": Olmo2Config(**SIZES, pad_token_id=1),
}
LARGE = ("model=qwen3_0_6b", "data.path=a/b")
KL = ("kl_placement=loss", "kl_coef=0.1")
WITH_KL = {"kl_placement": "loss", "kl_coef": 0.1}  # the same, of a run that is composed
VLLM = ("model=qwen2_5_math_1_5b", "data=gsm8k", "data.path=a/b", "rollout=vllm")
SHAPE = PUBLISHED["Qwen/Qwen2.5-Math-1.5B"]
SIDES = {32, 64, 96, 192, 256}  # rows of the small models' matrices, by which autocast's copies are known
close = partial(math.isclose, rel_tol=0.15)  # what the plan promises


def peak_of(work: Callable[[], object]) -> int:
    """The most bytes that were allocated at one time during `work`, above those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    live = most = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        most = max(most, live)
    return most


def bytes_of(tensors) -> int:
    return sum(t.nbytes for t in tensors)


def kept_for_gradient(policy: Policy, batch) -> int:
    """Bytes of what autograd keeps of a forward pass, each storage once, without the weights and their copies."""
    weights = {w.untyped_storage().data_ptr() for w in policy.model.parameters()}
    seen: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        cast = tensor.shape[-1:] != batch.input_ids.shape[1:] and tensor.dim() == 2 and len(tensor) in SIDES
        if storage.data_ptr() not in weights and not (cast and tensor.dtype == torch.bfloat16):
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        found = policy.log_probs(batch)
    del found
    return sum(seen.values())


def samples(count: int, group: int, prompt: int, response: int) -> list[Sample]:
    """Samples with gradients, none of a text: memory depends on lengths alone."""
    ids = [[7 + (13 * i + t) % 200 for t in range(response)] for i in range(count)]
    prompts = [[5 + i // group] * prompt for i in range(count)]
    told = [Response(f"p{i // group}", prompts[i], ids[i], [-1.0] * response, "", "stop") for i in range(count)]
    return [Sample(one, RIGHT, advantage=1.0 if i % 2 else -1.0) for i, one in enumerate(told)]


LONG = [pytest.param("optimizer=adamw_8bit", marks=pytest.mark.long)]


@pytest.mark.parametrize("word", [*LONG, "model.gradient_checkpointing=true", "model.dtype=bfloat16"])
def test_training_the_built_in_model_takes_what_the_plan_says(composed, word):
    """Rows are nearly full: groups of 60 + 8 x 48 tokens, four to a row."""
    sizes = ("micro_batch_tokens=1776", "rollout_batch_size=64", "train_batch_size=64", "group_size=8")
    run = typed(composed(*sizes, word))
    policy = make_policy(run, read_splits(run.data, lambda line: None, traces=False)[0])
    if run.model.gradient_checkpointing:
        checkpoint_layers(policy.model)
    shape = dataclasses.replace(shape_of(run.model)[0], vocab=len(policy.tokenizer))
    work, learner, batch = workload_of(run, shape, CPU), make_learner(run, policy), samples(64, 8, 60, 48)
    assert len(learner.micro_batches(batch)) > 1
    learner.update([dataclasses.replace(batch[0], advantage=1.0)], 1e-6)  # the optimizer has its moments from here on
    named = [pair for state in learner.optimizer.state.values() for pair in state.items()]
    weights = bytes_of(policy.model.parameters())
    moments = bytes_of(v for name, v in named if name not in ("step", "qmap1", "qmap2"))
    peak = peak_of(lambda: learner.update(batch, 1e-6))  # above weights and moments
    plan = p.plan_of(work, CPU)
    for part, measured in (("weights", weights), ("moments", moments), ("gradients", weights)):
        assert close(plan.training[part], measured), part
    passes = ("gradients", "cast weights", "activations", "logits, head")
    assert close(sum(plan.training.get(part, 0) for part in passes), peak), (plan.training, peak)
    assert Sampled(64, 8, 48) in work.sampled


@pytest.mark.parametrize("sizes", [pytest.param((32, 8, 60, 48, 128), marks=pytest.mark.long), (4, 4, 100, 120, 256)])
def test_sampling_in_process_takes_what_the_plan_says(policy, sizes):
    prompts, group, prompt, response, rows = sizes
    caches: list[int] = []

    def look(place, ended):
        if not caches:
            (cache,) = [o for o in gc.get_objects() if isinstance(o, PreallocatedCache)]
            caches.append(bytes_of([*cache.keys, *cache.values, *cache.prompt_keys, *cache.prompt_values]))

    asked = [Prompt(f"p{i}", [5 + i % 50] * prompt, i) for i in range(prompts)]
    sampling = Sampling(1.0, response, response)  # no token before the last one may end it
    peak = peak_of(lambda: HFEngine(policy, rows).generate(asked, sampling, group, look))
    work = Workload(shape_from(policy.model.config.to_dict()), prompt=prompt, max_rows=rows)
    cache, beside = f.in_process_bytes(work, Sampled(prompts * group, group, response))
    assert close(cache, caches[0])
    assert close(cache + beside, peak), (cache + beside, peak)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("products", [torch.float32, torch.bfloat16])
def test_what_autograd_keeps_is_known_for_every_family(family, products, tokenizer):
    config = FAMILIES[family]
    shape = shape_from(config.to_dict())
    policy = Policy(AutoModelForCausalLM.from_config(config), tokenizer, products)
    batch = policy.pack([(s.response.prompt_ids, s.response.token_ids) for s in samples(8, 4, 20, 40)])
    work = Workload(shape, products=products.itemsize, tokens=batch.input_ids.numel())
    assert kept_for_gradient(policy, batch) == pytest.approx(f.training_bytes(work)[0], rel=0.04)
    names = {f"{name}.weight": a * b for name, (a, b) in shape.linear_layers().items()}
    assert names.items() <= {name: w.numel() for name, w in policy.model.named_parameters()}.items()
    assert bytes_of(policy.model.parameters()) == pytest.approx(f.weight_bytes(shape, 4), rel=0.01)


def test_the_trainers_memory_is_what_a_card_has_measured_and_shapes_and_constants_are_the_published_ones():
    """GiB that torch had allocated at most in updates on one H200: docs/performance.md, benchmarks/gpu_training.py.

    Of the largest micro-batch its tokens, and whether it followed another one, whose gradients the plan always counts.
    """
    smol, qwen = "HuggingFaceTB/SmolLM2-135M-Instruct", "Qwen/Qwen2.5-Math-1.5B"
    for name, tokens, several, measured in ((smol, 12173, False, 13.3), (qwen, 16310, True, 81)):
        trained, gradients = f.trained_numbers(PUBLISHED[name], 4)
        work = Workload(PUBLISHED[name], products=2, trained=trained, gradients=gradients, tokens=tokens, on_gpu=True)
        planned_bytes = sum(p.plan_of(work, CARD).training.values()) - p.CONTEXT["cuda"]
        assert planned_bytes - (0 if several else gradients) == pytest.approx(measured * 2**30, rel=0.07)
    sizes = [round(shape.numbers / 1e6) for shape in PUBLISHED.values()]
    assert sizes == [134, 1544, 596, 596, 1720, 1485, 1236]
    assert (CHUNK, PROMPT_TOKENS, VOCABULARY + len(TAGS)) == (f.CHUNK, f.PROMPT_TOKENS, f.TINY_VOCABULARY)


def plan_for(run, device: Device, **settings) -> p.Plan:
    """The plan of the run with other settings on a device."""
    return p.planned(altered(run, **settings), device).plan


@pytest.fixture
def of_vllm(composed):
    return typed(composed(*VLLM))


def test_what_is_held_at_the_same_time(composed):
    run = typed(composed())
    plan = partial(plan_for, run, CPU)
    usual = plan()
    assert "gradients" not in usual.sampling
    assert not {"KV cache", "reference model"} & usual.training.keys()
    with_kl = plan(**WITH_KL)
    assert with_kl.training["reference model"] == usual.training["weights"] == with_kl.sampling["reference model"]
    again = plan_for(typed(composed("algorithm=ei", "restart=true")), CPU)
    assert again.training["first weights"] == again.training["weights"]
    untrained = plan_for(typed(composed("algorithm=evaluate")), CPU)
    assert not untrained.training.keys() & {"moments", "gradients", "activations"}
    assert plan(optimizer="adamw_8bit").training["moments"] < usual.training["moments"] / 3
    adapters = plan(model__lora__rank=8)
    assert adapters.training["moments"] < usual.training["moments"] / 5
    assert adapters.training["weights"] == usual.training["weights"] + adapters.training["gradients"]
    assert plan(model__lora__rank=8, **WITH_KL).training["reference model"] == adapters.training["gradients"]


def test_an_engine_of_its_own_is_counted_where_it_is(of_vllm):
    asleep, awake = plan_for(of_vllm, CARD), plan_for(of_vllm, CARD, rollout__sleep=False)
    assert "engine's weights" not in asleep.training
    assert awake.training["engine's weights"] == 2 * SHAPE.numbers == asleep.sampling["engine's weights"]
    roomy = dataclasses.replace(CARD_140, second_free=CARD_140.free)
    apart = altered(of_vllm, rollout__placement="second_gpu", rollout__max_rows=4096)
    alone, four = (plan_for(apart, roomy, rollout__gpus=n) for n in (1, 4))  # which share what is sampled
    assert alone.second_gpu["engine's weights"] == four.second_gpu["engine's weights"] == 2 * SHAPE.numbers
    assert alone.second_gpu["KV cache"] > four.second_gpu["KV cache"]
    assert alone.training == four.training
    assert not {"engine's weights", "KV cache"} & (alone.training.keys() | alone.sampling.keys())
    assert plan_for(of_vllm, CPU).training["engine's weights"] == 4 * SHAPE.numbers  # where sleep has no effect


def test_vllms_cache_leaves_room_for_what_the_plan_says(composed, policy):
    config = policy.model.config.get_text_config()
    plain = typed(composed("rollout=vllm"))
    for run in (plain, altered(plain, **WITH_KL), altered(plain, optimizer="adamw_8bit")):
        longest = 160 + max(run.sampling.max_tokens, run.evaluation.sampling.max_tokens)
        work = workload_of(run, shape_from(config.to_dict()), CPU, 160)
        held = p.plan_of(work, CPU).training
        engine = ("weights", "libraries", "engine's weights", "KV cache")
        later = sum(amount for part, amount in held.items() if part not in engine)
        assert reserve_of(run, policy, longest) == p.held_later(work) == later > 0
        arguments, _ = llm_arguments(policy, Place("here"), longest, 8, None, reserve_of(run, policy, longest))
        assert arguments["kv_cache_memory_bytes"] == 8 * p.planned_cache(work, CPU)[1]  # there is room for every row
    assert f.vllm_cache(10, 50_000, 100, 10**6, None) == (20_000, 2280)


@pytest.mark.parametrize(
    ("words", "kind", "gigabytes", "offered"),
    [
        ((*VLLM, "rollout.sleep=false"), "cuda", 23.5, "rollout.sleep=true"),
        (("model=smollm2_135m", "data.path=a/b", "micro_batch_tokens=16384"), "cpu", 8, "micro_batch_tokens="),
        ((*LARGE, "rollout=vllm", "rollout.kv_cache_gb=20"), "cuda", 23.5, "rollout.kv_cache_gb="),
        ((*LARGE, "sampling.max_tokens=30000", "micro_batch_tokens=40000"), "cuda", 23.5, "sampling.max_tokens="),
        ((*LARGE, *KL, "model.freeze=[*mlp*]", "model.weights=bfloat16"), "cuda", 7, "kl_placement=none kl_coef=0"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_what_is_suggested_can_be_typed_and_fits_by_the_same_plan(words, kind, gigabytes, offered, composed):
    run, device = typed(composed(*words)), Device(kind, "here", int(gigabytes * 2**30), 80 << 30)
    told = p.planned(run, device)
    assert offered in " ".join(told.cure.overrides)
    settings = dict(word.split("=") for word in told.cure.overrides)
    harmless = {key for saved, same in p.savings(run, told.work.longest) if same for key in saved}
    assert told.cure.same_result is (settings.keys() <= harmless)
    last = 2 if "kl_coef=0" in told.cure.overrides[-1] else 1  # what fits with fewer is not given more
    assert p.planned(typed(composed(*words, *told.cure.overrides[:-last])), device).verdict != "fits"
    again = p.planned(typed(composed(*words, *told.cure.overrides)), device)
    assert again.verdict == "fits"
    assert again.plan.peak == told.cure.peak < told.plan.peak


@pytest.mark.parametrize("text", ['{"model_type": "mamba"}', "{", '{"model_type": "llama", "vocab_size": -5}'])
def test_where_the_shape_is_unknown_or_nothing_helps_that_is_said(text, tmp_path, composed):
    (tmp_path / "config.json").write_text(text)
    run = typed(composed("model=local", f"model.path={tmp_path}", "data.path=a/b"))
    told = p.planned(run, CPU)
    assert (told.plan, told.verdict, p.figures(told)["verdict"]) == (None, "unknown", "unknown")
    assert str(tmp_path) in p.conclusion(told)
    told = p.planned(typed(composed(*LARGE)), Device("cpu", "here", 1 << 30, 1 << 30))  # where nothing helps
    assert told.cure is None
    parts = told.plan.training | told.plan.sampling
    assert max(parts, key=parts.get) in p.conclusion(told)


def test_a_control_groups_limit_bounds_the_memory(monkeypatch):
    """Bug: a container's job plans with the memory of the whole machine, or counts cached files as taken."""
    numbers = {"max": "1000000", "current": "300000", "stat": "inactive_file 100000\n"}
    files = {f"/sys/fs/cgroup/job/memory.{name}": text for name, text in numbers.items()}
    monkeypatch.setattr("rlreason.runtime.machine.read_text", (files | {"/proc/self/cgroup": "0::/job"}).get)
    assert processor() == Device("cpu", "the processor", 800_000, 1_000_000)


def test_ranks_divide_what_is_held_or_add_a_bucket_and_never_what_is_computed(of_vllm):
    plan = partial(plan_for, altered(of_vllm, **WITH_KL), CARD_80)
    alone, whole = plan(), plan(gpus="2", parallel="replicate")
    assert whole.training.pop("sum over ranks") >= 4 * SHAPE.vocab * SHAPE.width  # the embedding, in one piece
    assert (whole.training, whole.sampling, whole.main_memory) == (alone.training, alone.sampling, 0)
    part = plan(gpus="8", parallel="shard")
    for name in ("weights", "moments", "reference model", "gradients"):
        assert part.training[name] == pytest.approx(alone.training[name] / 8, rel=1e-6)
    for name in ("activations", "cast weights", "logits, head"):
        assert part.training[name] == alone.training[name]
    layer = (SHAPE.numbers - SHAPE.outside_layers) // SHAPE.layers
    assert part.training["gathered weights"] >= 4 * (SHAPE.outside_layers + layer)
    assert part.main_memory == 2 * f.weight_bytes(SHAPE, 4)  # rank 0's whole copies of policy and reference
    assert part.sampling["engine's weights"] == alone.sampling["engine's weights"]


def test_the_mode_is_that_of_the_plan_whatever_the_card(of_vllm):
    def mode(device, world, shape=SHAPE, **settings):
        return p.parallel_mode(altered(of_vllm, **settings), shape, device, world)[0]

    assert mode(CARD_40, 2) == mode(CARD_80, 2, gpus="2", parallel="shard") == "shard"
    assert mode(CARD_80, 1) == mode(CARD_80, 2) == mode(CARD_40, 2, gpus="2", parallel="replicate") == "replicate"
    assert mode(dataclasses.replace(CARD_80, free=None), 2) == mode(CARD_40, 2, shape=None) == "replicate"
    run = altered(of_vllm, gpus="4")
    for device in (CARD_40, CARD_80):
        told = p.planned(run, device)
        assert told.plan.parallel == p.parallel_mode(run, SHAPE, device, 4)[0]
        whole = p.plan_of(dataclasses.replace(told.work, parallel="replicate"), device)
        assert (told.plan.parallel == "replicate") == whole.fits(device) == (device is CARD_80)
        held = told.plan.training  # what comes after vLLM: parts of a sharded model too, which is read into main memory
        later = held["moments"] + (0 if device is CARD_80 else held["weights"])
        assert p.held_later(dataclasses.replace(told.work, parallel=told.plan.parallel)) == later


def test_ranks_on_a_processor_share_its_memory_and_parts_are_a_way_to_fit(of_vllm):
    assert p.device_per_rank(CPU, 1) is CPU
    assert p.planned(altered(of_vllm, gpus="4", rollout__engine="hf"), CPU).device.free == 4 << 30
    told = p.figures(p.planned(altered(of_vllm, gpus="2", parallel="shard"), CARD_80))
    assert (told["ranks"], told["parallel"]) == (2, "shard")
    tight = {"gpus": "8", "parallel": "replicate", "micro_batch_tokens": 2048}
    cure = p.planned(altered(of_vllm, model__gradient_checkpointing=True, **tight), CARD).cure
    assert "parallel=shard" in cure.overrides
    assert cure.same_result
