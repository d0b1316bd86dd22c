"""The memory plan beside what is measured on the processor: parts by the tensors' bytes, peaks by torch's profiler."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import yaml
from cuda_memory import SHAPES
from test_cuda_branches import needs
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Olmo2Config, Qwen2Config, Qwen3Config
from transformers.initialization import no_init_weights

from rlreason.config.store import typed
from rlreason.data.prepare import read_splits
from rlreason.engines.base import Demand, Prompt, Sampling
from rlreason.engines.build import reserve_of, with_planned_cache
from rlreason.engines.hf.decoding import HEADROOM, PROMPT_TOKENS, PreallocatedLayer
from rlreason.engines.hf.engine import HFEngine
from rlreason.model import memory as f
from rlreason.model.fitting import CONTEXT, Plan, held_later, plan_of, planned_cache
from rlreason.model.log_probs import CHUNK, chunked_log_probs
from rlreason.model.memory import PROMPT, Head, Sampled, Workload, workload_of
from rlreason.model.parameters import TAGS, VOCABULARY, checkpoint_layers
from rlreason.model.policy import Policy
from rlreason.model.savings import conclusion, figures, planned, savings, table, with_changes
from rlreason.model.shapes import PUBLISHED, TINY_VOCABULARY, ModelShape, shape_from, shape_of, tiny_shape
from rlreason.runtime.machine import Device, processor
from rlreason.training.build import make_learner, make_policy, set_trained
from rlreason.training.learner import Learner
from rlreason.training.preflight import assumed_prompt
from rlreason.types import Grade, Response, Sample
from tests.starts import ROOT

CPU = Device("cpu", "processor", 16 << 30, 16 << 30)
CARD = Device("cuda", "a card of 24 GB", int(23.5 * 2**30), 24 << 30)
SMALL = {
    "vocab_size": 600, "hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FAMILIES = {
    "llama": LlamaConfig(**SMALL, bos_token_id=None, eos_token_id=0),
    "llama, biased": LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, eos_token_id=0),
    "qwen2": Qwen2Config(**SMALL, tie_word_embeddings=True, eos_token_id=0),
    "qwen3": Qwen3Config(**SMALL, head_dim=32, eos_token_id=0),
    "olmo2": Olmo2Config(**SMALL, eos_token_id=0, pad_token_id=1),
}
SMOLLM = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
LARGE = ("model=qwen3_0_6b", "data.path=a/b")
SIDES = {32, 64, 96, 192, 256}  # rows of the small models' matrices, by which autocast's copies are known


def close(planned_bytes: float, measured: float) -> bool:
    """Within 15%, what the plan promises."""
    return abs(planned_bytes - measured) <= 0.15 * measured


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
    return sum(t.numel() * t.element_size() for t in tensors)


def kept_for_gradient(policy: Policy, batch, sides: Collection[int] = SIDES) -> int:
    """Bytes of what autograd keeps of a forward pass, each storage once, without the weights and their copies."""
    weights = {p.untyped_storage().data_ptr() for p in policy.model.parameters()}
    seen: dict[int, int] = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        cast = tensor.shape[-1:] != batch.input_ids.shape[1:] and tensor.dim() == 2 and len(tensor) in sides
        if storage.data_ptr() not in weights and not (cast and tensor.dtype == torch.bfloat16):
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        found = policy.log_probs(batch)
    del found
    return sum(seen.values())


def samples(count: int, group: int, prompt: int, response: int) -> list[Sample]:
    """Samples with gradients, none of a text: memory depends on lengths alone."""
    out = []
    for i in range(count):
        ids = [7 + (13 * i + t) % 200 for t in range(response)]
        told = Response(f"p{i // group}", [5 + i // group] * prompt, ids, [-1.0] * response, "", "stop")
        out.append(Sample(told, Grade(1.0, 1.0, 1.0, "correct"), advantage=1.0 if i % 2 else -1.0))
    return out


def pair_of(sample: Sample):
    return sample.response.prompt_ids, sample.response.token_ids


class Measured(NamedTuple):
    """Bytes, `peak` above what lies there before the update: weights and moments."""

    tokens: int
    scored: int
    weights: int
    moments: int
    peak: int


def measured_update(learner: Learner, batch: list[Sample]) -> Measured:
    """A real update, whose optimizer has its moments already."""
    first = learner.policy.pack([pair_of(batch[i]) for i in learner.micro_batches(batch)[0]])
    assert len(learner.micro_batches(batch)) > 1
    if not learner.optimizer.state:
        learner.update([dataclasses.replace(batch[0], advantage=1.0)], 1e-6)
    named = [pair for state in learner.optimizer.state.values() for pair in state.items()]
    moments = [v for name, v in named if name not in ("step", "qmap1", "qmap2")]
    peak = peak_of(lambda: learner.update(batch, 1e-6))
    weights = bytes_of(learner.policy.model.parameters())
    return Measured(first.input_ids.numel(), len(first.score_at), weights, bytes_of(moments), peak)


def passes(plan: Plan) -> int:
    return sum(plan.training.get(part, 0) for part in ("gradients", "cast weights", "activations", "logits, head"))


def agrees(plan: Plan, found: Measured) -> None:
    """Each part that can be told apart, and the whole."""
    assert close(plan.training["weights"], found.weights)
    assert close(plan.training["moments"], found.moments)
    assert close(plan.training["gradients"], found.weights)
    assert close(passes(plan), found.peak), (plan.training, found)
    whole = sum(plan.training.values()) - plan.training["libraries"]
    assert close(whole, found.weights + found.moments + found.peak)


@pytest.fixture
def local_run(tmp_path, composed):
    """A run of a model of this config."""

    def make(config: dict, *words: str):
        (tmp_path / "config.json").write_text(json.dumps(config))
        rows = ("train_batch_size=4", "rollout_batch_size=4", "group_size=2", "sampling.max_tokens=80")
        words = ("model=local", f"model.path={tmp_path}", "data.path=a/b", "micro_batch_tokens=200", *rows, *words)
        return typed(composed(*{word.partition("=")[0]: word for word in words}.values()))

    return make


# What is computed


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("model.gradient_checkpointing=true",),
        ("model.dtype=bfloat16", "entropy_coef=0.01"),
        ("optimizer=adamw_8bit",),
    ],
    ids=" ".join,
)
def test_training_the_built_in_model_takes_what_the_plan_says(composed, words):
    """Rows are nearly full: groups of 60 + 8 x 48 tokens, four to a row."""
    sizes = ("micro_batch_tokens=1776", "rollout_batch_size=64", "train_batch_size=64", "group_size=8")
    run = typed(composed(*sizes, *words))
    policy = make_policy(run, read_splits(run.data, lambda line: None, traces=False)[0])
    if checkpointing := run.model.gradient_checkpointing:
        checkpoint_layers(policy.model)
    shape = dataclasses.replace(shape_of(run.model).shape, vocab=len(policy.tokenizer))
    found = measured_update(make_learner(run, policy), samples(64, 8, 60, 48))
    work = workload_of(run, shape, CPU)
    agrees(plan_of(work, CPU), found)
    assert Sampled(64, 8, 48) in work.sampled
    if run.model.dtype == "auto":
        batch = policy.pack([pair_of(s) for s in samples(32, 8, 60, 48)])
        kept = f.saved_bytes(dataclasses.replace(work, tokens=found.tokens, scored=found.scored))
        # the rotary table is an argument of a layer that is computed again: held, but not by a hook
        assert kept_for_gradient(policy, batch) == pytest.approx(kept, rel=0.1 if checkpointing else 0.03)


@pytest.mark.parametrize("words", [("model.freeze=[*embed_tokens*]",), ("model.freeze=[*layers*]",)], ids=" ".join)
def test_a_large_vocabulary_takes_what_the_plan_says(words, local_run, tokenizer):
    sizes = SMALL | {"vocab_size": 20_000, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Qwen2Config(**sizes | {"max_position_embeddings": 4096}, tie_word_embeddings=True, eos_token_id=0)
    rows = ("micro_batch_tokens=1440", "group_size=4", "rollout_batch_size=8", "train_batch_size=8")
    run = local_run(config.to_dict(), *rows, "sampling.max_tokens=340", *words)
    policy = Policy(AutoModelForCausalLM.from_config(config), tokenizer)
    set_trained(run.model, policy, 0)
    shape = shape_of(run.model).shape
    found = measured_update(make_learner(run, policy), samples(8, 4, 20, 340))
    assert found.scored > 2 * CHUNK  # three chunks
    plan = plan_of(workload_of(run, shape, CPU, 20), CPU)
    assert abs(passes(plan) - found.peak) < 0.4 * 4 * CHUNK * shape.vocab, (plan.training, found)  # no third logits


@pytest.mark.long
def test_a_model_of_135m_takes_what_the_plan_says(local_run, tokenizer):
    run = local_run(SMOLLM)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.model.path))
    shape = shape_of(run.model).shape
    policy = Policy(model, tokenizer)
    learner, batch = make_learner(run, policy), samples(4, 2, 40, 80)
    whole = measured_update(learner, batch)
    agrees(plan_of(workload_of(run, shape, CPU), CPU), whole)
    checkpoint_layers(model)
    work = workload_of(with_changes(run, {"model.gradient_checkpointing": True}), shape, CPU)
    less = measured_update(learner, batch)
    agrees(plan_of(work, CPU), less)
    both = [f.saved_bytes(dataclasses.replace(work, tokens=whole.tokens, checkpointing=on)) for on in (False, True)]
    assert close(both[0] - both[1], whole.peak - less.peak)  # the activations alone
    del learner
    sampling_agrees(policy, shape, prompts=2, group=4, prompt=60, response=16, rows=8)


def sampling_agrees(policy: Policy, shape: ModelShape, prompts: int, group: int, prompt: int, response: int, rows: int):
    caches: list[int] = []

    def look(place, ended):
        if not caches:
            layers = [o for o in gc.get_objects() if isinstance(o, PreallocatedLayer)]
            held = [t for o in layers for t in (o.keys, o.values, o.prompt_keys, o.prompt_values)]
            caches.append(bytes_of(t for t in held if t is not None))

    asked = [Prompt(f"p{i}", [5 + i % 50] * prompt, i) for i in range(prompts)]
    sampling = Sampling(1.0, response, response)  # no token before the last one may end it
    peak = peak_of(lambda: HFEngine(policy, rows).generate(asked, sampling, group, look))
    work = Workload(shape, prompt=prompt, max_rows=rows)
    cache, beside = f.in_process_bytes(work, Sampled(prompts * group, group, response))
    assert close(cache, caches[0])
    assert close(cache + beside, peak), (cache + beside, peak)


@pytest.mark.parametrize(
    "asked",
    [
        {"prompts": 16, "group": 8, "prompt": 60, "response": 48, "rows": 256},
        {"prompts": 32, "group": 8, "prompt": 60, "response": 48, "rows": 128},
        {"prompts": 4, "group": 4, "prompt": 100, "response": 200, "rows": 256},
    ],
)
def test_sampling_in_process_takes_what_the_plan_says(policy, asked):
    config = policy.model.config
    shape = tiny_shape(config.hidden_size, config.num_hidden_layers, config.num_attention_heads)
    sampling_agrees(policy, dataclasses.replace(shape, vocab=config.vocab_size), **asked)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("products", ["float32", "bfloat16"])
def test_what_autograd_keeps_is_known_for_every_family(family, products, tokenizer):
    config = FAMILIES[family]
    shape = shape_from(config.to_dict())
    model = AutoModelForCausalLM.from_config(config)
    assert {name: p.numel() for name, p in model.named_parameters()} == shape.parameters()
    dtype = getattr(torch, products)
    for weights in (torch.float32, dtype):
        policy = Policy(AutoModelForCausalLM.from_config(config), tokenizer, dtype, weights=weights)
        batch = policy.pack([pair_of(s) for s in samples(8, 4, 20, 40)])
        sizes = {"weights": weights.itemsize, "products": dtype.itemsize}
        work = Workload(shape, **sizes, tokens=batch.input_ids.numel(), scored=len(batch.score_at))
        assert kept_for_gradient(policy, batch) == pytest.approx(f.saved_bytes(work), rel=0.04)
        assert bytes_of(policy.model.parameters()) == f.weight_bytes(shape, weights.itemsize)


KINDS = {"none": Qwen2Config, "head": Qwen3Config, "whole": Olmo2Config}


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-Math-1.5B", "allenai/OLMo-2-0425-1B", "Qwen/Qwen3-0.6B"])
def test_a_layer_of_a_published_shape_keeps_what_the_formula_says(name, tokenizer):
    """What two layers keep more than one, on the processor; a GPU's kernels save the same tensors, by their source."""
    shape = PUBLISHED[name]
    sizes = {
        "vocab_size": 300, "hidden_size": shape.width, "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "tie_word_embeddings": shape.tied, "eos_token_id": 0, "pad_token_id": 1,
    }  # fmt: skip
    kept = []
    for layers in (1, 2):
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(KINDS[shape.qk_norm](**sizes, num_hidden_layers=layers))
        for weight in model.parameters():
            weight.data.fill_(0.001)
        policy = Policy(model, tokenizer, torch.bfloat16)
        batch = policy.pack([pair_of(s) for s in samples(2, 2, 6, 9)])
        kept.append(kept_for_gradient(policy, batch, {len(p) for p in model.parameters() if p.dim() == 2}))
    measured = (kept[1] - kept[0]) / batch.input_ids.numel()
    assert f.saved_by_layer(shape, 2) == pytest.approx(measured, rel=0.01)


@pytest.mark.parametrize(("size", "products"), [(4, 4), (4, 2), (2, 2)])  # bytes of the logits' operands, of products
@pytest.mark.parametrize("trained", [True, False])
def test_the_output_head_takes_what_the_formula_says(size, products, trained, monkeypatch):
    # oneDNN copies a transposed operand
    monkeypatch.setattr("rlreason.model.log_probs._onednn_is_faster", lambda device: False)
    shape = dataclasses.replace(PUBLISHED["Qwen/Qwen3-0.6B"], vocab=2500, width=64)
    dtypes = {4: torch.float32, 2: torch.bfloat16}
    settings = {"head": dtypes[size], "products": dtypes[products]}
    for scored in (200, 2 * CHUNK + 76):
        hidden = torch.randn(scored, shape.width, requires_grad=True)
        weight = torch.randn(shape.vocab, shape.width, requires_grad=trained)
        weight.grad = torch.zeros_like(weight) if trained else None
        labels = torch.randint(shape.vocab, (scored,))
        found, _ = chunked_log_probs(hidden, weight, labels, **settings)
        forward = peak_of(lambda: chunked_log_probs(hidden, weight, labels, **settings))  # noqa: B023
        backward = peak_of(lambda: found.sum().backward())  # noqa: B023
        asked = Head(size, products, trained)
        assert f.head_bytes(shape, scored, asked, with_gradient=False) == pytest.approx(forward, rel=0.02)
        assert f.head_bytes(shape, scored, asked) == pytest.approx(backward, rel=0.02)


#: GiB that torch had allocated at most in updates on one H200 (torch 2.11, AdamW, bfloat16 products, float32 head):
#: docs/performance.md, by benchmarks/gpu_training.py. Of each: the shape, (tokens, scored) of the largest micro-batch,
#: whether it followed another one, and the GiB. Where prompts are repeated, keys were too, for every query's head.
ON_A_CARD = [
    ("HuggingFaceTB/SmolLM2-135M-Instruct", 6573, 5805, False, 8.0),
    ("HuggingFaceTB/SmolLM2-135M-Instruct", 12173, 5805, False, 13.3),
    ("Qwen/Qwen2.5-Math-1.5B", 15710, 14366, True, 77),
    ("Qwen/Qwen2.5-Math-1.5B", 16310, 10539, True, 81),
]


@pytest.mark.parametrize(("name", "tokens", "scored", "several", "measured"), ON_A_CARD)
def test_the_trainers_memory_is_what_a_card_has_measured(name, tokens, scored, several, measured):
    shape = PUBLISHED[name]
    numbers = {"trained": tuple(f.trained_tensors(shape, 4)), "casts": f.cast_bytes(shape, 4, 2), "products": 2}
    sizes = {"tokens": tokens, "scored": scored, "several": several}
    plan = plan_of(Workload(shape, **numbers, **sizes, head=Head(4, 2, on_gpu=True)), CARD)
    assert sum(plan.training.values()) - CONTEXT["cuda"] == pytest.approx(measured * 2**30, rel=0.07)


@pytest.mark.long
@needs
def test_a_gpu_keeps_for_the_gradient_what_the_plan_says(tmp_path):
    """Published shapes on a GPU that is not there."""
    words = [sys.executable, str(Path(__file__).with_name("cuda_memory.py")), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(rows) == 3 * len(SHAPES)
    for row in rows:
        shape = SHAPES[row["name"]]
        sizes = {key: row[key] for key in ("tokens", "scored", "checkpointing")}
        head, casts = Head(row["head"], 2, on_gpu=True), f.cast_bytes(shape, weights=4, products=2)
        kept, held, _ = f.training_bytes(Workload(shape, products=2, **sizes, casts=casts, head=head))
        # an argument of layers that are computed again: held, but not by a hook
        rotary = 4 * row["tokens"] * 2 * shape.head_dim if row["checkpointing"] else 0
        assert kept + held - rotary == pytest.approx(row["kept"], rel=0.002), row


def test_shapes_and_constants_are_the_published_ones():
    sizes = {name.partition("/")[2]: round(shape.numbers / 1e6) for name, shape in PUBLISHED.items()}
    assert list(sizes.values()) == [135, 1544, 596, 596, 1721, 1485, 1236], sizes
    assert (f.CHUNK, f.HEADROOM, f.PROMPT_TOKENS) == (CHUNK, HEADROOM, PROMPT_TOKENS)
    assert VOCABULARY + len(TAGS) == TINY_VOCABULARY


# What is held at the same time


def test_what_is_held_at_the_same_time(composed):
    def plan(*words):
        run = typed(composed(*words))
        return plan_of(workload_of(run, shape_of(run.model).shape, CPU), CPU)

    usual = plan()
    assert "gradients" not in usual.sampling
    assert "KV cache" not in usual.training
    assert "reference model" not in usual.training
    with_kl = plan("kl_placement=loss", "kl_coef=0.1")
    assert with_kl.training["reference model"] == usual.training["weights"] == with_kl.sampling["reference model"]
    again = plan("algorithm=ei", "restart=true")
    assert again.training["first weights"] == again.training["weights"]
    untrained = plan("algorithm=evaluate")
    assert not untrained.training.keys() & {"moments", "gradients", "activations"}
    assert plan("optimizer=adamw_8bit").training["moments"] < usual.training["moments"] / 3
    adapters = plan("model.lora.rank=8")
    assert adapters.training["moments"] < usual.training["moments"] / 5
    assert adapters.training["weights"] == usual.training["weights"] + adapters.training["gradients"]


def test_an_engine_of_its_own_is_counted_where_it_is(composed):
    shape = PUBLISHED["Qwen/Qwen2.5-Math-1.5B"]

    def plan(device, *words):
        run = typed(composed("model=qwen2_5_math_1_5b", "data=gsm8k", "data.path=a/b", "rollout=vllm", *words))
        return plan_of(workload_of(run, shape, device), device)

    asleep, awake = plan(CARD), plan(CARD, "rollout.sleep=false")
    assert "engine's weights" not in asleep.training
    assert awake.training["engine's weights"] == 2 * shape.numbers == asleep.sampling["engine's weights"]
    free = CARD.free - CONTEXT["cuda"] - 4 * shape.numbers  # when the weights are loaded
    moments, kv = 8 * shape.numbers, 28 * 2 * 2 * 256  # bytes of a token: 28 layers, keys and values, bfloat16
    one = kv * (384 + 1024 + 128)
    assert asleep.sampling["KV cache"] == max(one, int(0.4 * (free - 2 * shape.numbers - moments)))
    roomy = Device("cuda", "a large card", 140 << 30, 141 << 30)
    free = roomy.free - CONTEXT["cuda"] - 4 * shape.numbers
    with_kl = plan(roomy, "kl_placement=loss", "kl_coef=0.1", "rollout.sleep=false", "rollout.max_rows=4096")
    later = moments + 4 * shape.numbers + passes(with_kl)
    assert with_kl.sampling["KV cache"] == int(0.4 * (free - 2 * shape.numbers - later))
    alone = plan(dataclasses.replace(CARD, second_free=4 << 30), "rollout.placement=second_gpu")
    assert alone.other_device["engine's weights"] == 2 * shape.numbers
    assert alone.other_device["KV cache"] < 1 << 30
    assert not {"engine's weights", "KV cache"} & (alone.training.keys() | alone.sampling.keys())
    assert plan(CPU).training["engine's weights"] == 4 * shape.numbers  # where sleep has no effect


def test_vllms_cache_leaves_room_for_what_the_plan_says(composed, policy):
    config = policy.model.config.get_text_config()
    for words in ((), ("kl_placement=loss", "kl_coef=0.1"), ("optimizer=adamw_8bit",)):
        run = typed(composed("rollout=vllm", *words))
        longest = 160 + max(run.sampling.max_tokens, run.evaluation.sampling.max_tokens)
        work = workload_of(run, shape_from(config.to_dict()), CPU, 160)
        held = plan_of(work, CPU).training
        engine = ("weights", "libraries", "engine's weights", "KV cache")
        later = sum(amount for part, amount in held.items() if part not in engine)
        assert reserve_of(run, policy, longest) == held_later(work) == later > 0
        given = with_planned_cache(run, policy, policy.device, Demand(longest, 8)).kv_cache_gb * 2**30
        assert given == 8 * planned_cache(work, CPU)[1]  # there is room for every row
    assert f.vllm_cache(10, 50_000, 100, 10**6, None) == (20_000, 2280)
    chosen = typed(composed("rollout=vllm", "rollout.kv_cache_gb=2"))
    assert with_planned_cache(chosen, policy, policy.device, Demand(300, 8)) is chosen.rollout


# What makes a run fit

QWEN = ("model=qwen2_5_math_1_5b", "data=gsm8k", "data.path=a/b")
SETS = [
    (QWEN, "cuda", 23.5, ""),
    ((*QWEN, "rollout=vllm", "rollout.sleep=false"), "cuda", 23.5, "rollout.sleep=true"),
    (("model=olmo2_1b", "data.path=a/b"), "cuda", 23.5, ""),
    (("model=smollm2_135m", "data.path=a/b", "micro_batch_tokens=16384"), "cpu", 8, "micro_batch_tokens="),
    (("model.width=1024", "model.layers=32", "model.heads=16"), "cuda", 8, ""),
    ((*LARGE, "rollout=vllm", "rollout.kv_cache_gb=20"), "cuda", 23.5, "rollout.kv_cache_gb="),
    ((*LARGE, "sampling.max_tokens=30000", "micro_batch_tokens=40000"), "cuda", 23.5, "sampling.max_tokens="),
    (
        (*LARGE, "kl_placement=loss", "kl_coef=0.1", "model.freeze=[*mlp*]", "model.weights=bfloat16"), "cuda", 6,
        "kl_placement=none kl_coef=0",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("words", "kind", "gigabytes", "offered"), SETS, ids=lambda x: str(x)[:40])
def test_what_is_suggested_can_be_typed_and_fits_by_the_same_plan(words, kind, gigabytes, offered, composed):
    run, device = typed(composed(*words)), Device(kind, "here", int(gigabytes * 2**30), 80 << 30)
    told = planned(run, device)
    assert offered in " ".join(told.cure.overrides)
    settings = dict(word.split("=") for word in told.cure.overrides)
    harmless = {key for saving in savings(run, told.work.longest) if saving.same_result for key in saving.settings}
    assert told.cure.same_result is (settings.keys() <= harmless)
    *before, _ = settings  # what fits with fewer of the list is not given more
    fewer = with_changes(run, {key: yaml.safe_load(settings[key]) for key in before})
    assert planned(fewer, device).verdict != "fits"
    assert all(word in conclusion(told) for word in told.cure.overrides)
    again = planned(typed(composed(*words, *told.cure.overrides)), device)
    assert again.verdict == "fits"
    assert again.plan.peak == told.cure.peak < told.plan.peak


def test_where_nothing_helps_the_largest_part_is_named(composed):
    told = planned(typed(composed(*LARGE)), Device("cpu", "here", 1 << 30, 1 << 30))
    assert told.cure is None
    parts = told.plan.training | told.plan.sampling
    assert max(parts, key=parts.get) in conclusion(told)


@pytest.mark.parametrize(
    "text",
    ['{"model_type": "mamba"}', "{", "[]", json.dumps(SMOLLM | {"hidden_size": -576})],
)
def test_a_shape_that_cannot_be_read_is_unknown(text, tmp_path, composed):
    (tmp_path / "config.json").write_text(text)
    run = typed(composed("model=local", f"model.path={tmp_path}", "data.path=a/b"))
    told = planned(run, CPU)
    assert (told.plan, told.verdict, figures(told)["verdict"]) == (None, "unknown", "unknown")
    assert str(tmp_path) in conclusion(told)
    assert table(told) == [told.source]
    run.model.path = "nobody/has-this"
    assert "hf download nobody/has-this config.json" in conclusion(planned(run, CPU))


def test_a_control_groups_limit_bounds_the_memory():
    files = {
        "/proc/self/cgroup": "0::/job",
        "/sys/fs/cgroup/job/memory.max": "1000000",
        "/sys/fs/cgroup/job/memory.current": "300000",
        "/sys/fs/cgroup/job/memory.stat": "inactive_file 100000\n",
    }
    assert processor(files.get) == Device("cpu", "the processor", 800_000, 1_000_000)


def test_a_template_counts_before_prompts_are_measured(tmp_path, composed):
    lengths = {}
    for name, text in (("short", "{question}"), ("long", "word " * 300 + "{question}")):
        (tmp_path / f"{name}.prompt").write_text(text)
        lengths[name] = assumed_prompt(typed(composed(*LARGE, f"prompt.file={tmp_path}/{name}.prompt")))
    assert lengths["short"] >= PROMPT
    assert lengths["long"] - lengths["short"] == pytest.approx(500, abs=4)  # characters / 3


@pytest.mark.long
def test_the_memory_that_a_real_run_has_at_its_peak_is_about_the_plans(tmp_path):
    """Of the whole process, libraries and all, which the tests above leave out."""
    words = [
        "n_steps=1", "micro_batch_tokens=4096", "rollout_batch_size=64", "train_batch_size=64", "group_size=8",
        "eval.final_problems=8", "save_model=false",
    ]  # fmt: skip
    start = [sys.executable, "-m", "rlreason"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    told = subprocess.run([*start, "plan", *words, "--json"], cwd=tmp_path, env=env, capture_output=True, check=True)
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen([*start, *words], cwd=tmp_path, env=env, stdout=log, stderr=log)
        _, status, used = os.wait4(child.pid, 0)
    assert status == 0, (tmp_path / "log").read_text()
    peak = json.loads(told.stdout)["memory"]["peak"]
    assert peak == pytest.approx(used.ru_maxrss * 1024, rel=0.3)
