"""The memory plan beside what is measured on the processor: parts by the tensors' bytes, peaks by torch's profiler."""

import dataclasses
import gc
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from typing import NamedTuple

import psutil
import pytest
import torch
import yaml
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
from rlreason.model import memory as head
from rlreason.model.fitting import CONTEXT, Plan, held_later, plan_of, planned_cache
from rlreason.model.log_probs import CHUNK, chunked_log_probs
from rlreason.model.memory import PROMPT, Sampled, Workload, workload_of
from rlreason.model.parameters import TAGS, VOCABULARY, checkpoint_layers
from rlreason.model.policy import Policy
from rlreason.model.savings import conclusion, figures, planned, savings, table, with_changes
from rlreason.model.shapes import PUBLISHED, TINY_VOCABULARY, shape_from, shape_of, tiny_shape
from rlreason.runtime.machine import Device, believed_device, group_limits, processor
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


def kept_for_gradient(policy: Policy, batch, sides: Collection[int] = ()) -> int:
    """Bytes of what autograd keeps of a forward pass, each storage once, without the weights and their copies.

    `sides`: numbers of rows of the weights' matrices, by which copies are known.
    """
    sides = sides or SIDES
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


SIDES = {32, 64, 96, 192, 256}  # of the small models' weights, which autocast's copies have


def samples(count: int, group: int, prompt: int, response: int) -> list[Sample]:
    """Samples with gradients, none of a text: memory depends on lengths alone."""
    out = []
    for i in range(count):
        ids = [7 + (13 * i + t) % 200 for t in range(response)]
        told = Response(f"p{i // group}", [5 + i // group] * prompt, ids, [-1.0] * response, "", "stop")
        out.append(Sample(told, Grade(1.0, 1.0, 1.0, "correct"), advantage=1.0 if i % 2 else -1.0))
    return out


class Measured(NamedTuple):
    """Bytes, `peak` above what lies there before the update: weights and moments."""

    tokens: int
    scored: int
    weights: int
    moments: int
    peak: int


def measured_update(learner: Learner, batch: list[Sample]) -> Measured:
    """A real update, whose optimizer has its moments already."""
    first = learner.policy.pack([_pair(batch[i]) for i in learner.micro_batches(batch)[0]])
    assert len(learner.micro_batches(batch)) > 1
    if not learner.optimizer.state:
        learner.update([dataclasses.replace(batch[0], advantage=1.0)], 1e-6)
    named = [pair for state in learner.optimizer.state.values() for pair in state.items()]
    moments = [v for name, v in named if name not in ("step", "qmap1", "qmap2")]
    peak = peak_of(lambda: learner.update(batch, 1e-6))
    weights = bytes_of(learner.policy.model.parameters())
    return Measured(first.input_ids.numel(), len(first.score_at), weights, bytes_of(moments), peak)


def _pair(sample: Sample):
    return sample.response.prompt_ids, sample.response.token_ids


PASSES = ("gradients", "cast weights", "activations", "logits, head")


def agrees(plan: Plan, found: Measured) -> None:
    """Each part that can be told apart, and the whole."""
    assert close(plan.training["weights"], found.weights)
    assert close(plan.training["moments"], found.moments)
    assert close(plan.training["gradients"], found.weights)
    passes = sum(plan.training.get(part, 0) for part in PASSES)
    assert close(passes, found.peak), (plan.training, found)
    whole = sum(plan.training.values()) - plan.training["libraries"]
    assert close(whole, found.weights + found.moments + found.peak)


@pytest.fixture
def tiny_run(composed):
    """A run of the built-in model whose rows are nearly full: groups of 60 + 8 x 48 tokens, four to a row."""
    return lambda *words: typed(
        composed("micro_batch_tokens=1776", "rollout_batch_size=64", "train_batch_size=64", "group_size=8", *words)
    )


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
def test_training_the_built_in_model_takes_what_the_plan_says(tiny_run, words):
    run = tiny_run(*words)
    policy = make_policy(run, read_splits(run.data, lambda line: None, traces=False)[0])
    checkpointing = run.model.gradient_checkpointing
    if checkpointing:
        checkpoint_layers(policy.model)
    shape = dataclasses.replace(shape_of(run.model).shape, vocab=len(policy.tokenizer))
    assert shape.numbers == sum(p.numel() for p in policy.model.parameters())
    found = measured_update(make_learner(run, policy), samples(64, 8, 60, 48))
    agrees(plan_of(workload_of(run, shape, CPU), CPU), found)
    if run.model.dtype == "auto":
        batch = policy.pack([_pair(s) for s in samples(32, 8, 60, 48)])
        kept = f.saved_bytes(shape, f.TokenRow(found.tokens, found.scored, 4, checkpointing=checkpointing))
        # the rotary table is an argument of a layer that is computed again: held, but not by a hook
        assert kept_for_gradient(policy, batch) == pytest.approx(kept, rel=0.1 if checkpointing else 0.03)


@pytest.mark.parametrize("words", [("model.freeze=[*embed_tokens*]",), ("model.freeze=[*layers*]",)], ids=" ".join)
def test_a_large_vocabulary_takes_what_the_plan_says(words, tmp_path, composed, tokenizer):
    sizes = SMALL | {"vocab_size": 40_000, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Qwen2Config(**sizes | {"max_position_embeddings": 4096}, tie_word_embeddings=True, eos_token_id=0)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    run = typed(
        composed(
            "model=local", f"model.path={tmp_path}", "data.path=a/b", "micro_batch_tokens=1440", "group_size=4",
            "rollout_batch_size=8", "train_batch_size=8", "sampling.max_tokens=340", *words,
        )
    )  # fmt: skip
    policy = Policy(AutoModelForCausalLM.from_config(config), tokenizer)
    set_trained(run.model, policy, 0)
    shape = shape_of(run.model).shape
    found = measured_update(make_learner(run, policy), samples(8, 4, 20, 340))
    assert found.scored > 2 * CHUNK  # three chunks
    plan = plan_of(workload_of(run, shape, CPU, 20), CPU)
    passes = sum(plan.training.get(part, 0) for part in PASSES)
    logits = 4 * CHUNK * shape.vocab
    assert abs(passes - found.peak) < 0.4 * logits, (plan.training, found)  # a third copy would be a whole one


@pytest.mark.long
def test_training_a_model_of_135m_takes_what_the_plan_says(tmp_path, composed, tokenizer):
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM))
    run = typed(
        composed(
            "model=local", f"model.path={tmp_path}", "micro_batch_tokens=200", "rollout_batch_size=4",
            "train_batch_size=4", "group_size=2", "sampling.max_tokens=80", "data.path=a/b",
        )
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    shape = shape_of(run.model).shape
    assert shape.numbers == model.num_parameters() == 134_515_008
    policy = Policy(model, tokenizer)
    learner, batch = make_learner(run, policy), samples(4, 2, 40, 80)
    whole = measured_update(learner, batch)
    agrees(plan_of(workload_of(run, shape, CPU), CPU), whole)
    checkpoint_layers(model)
    again = with_changes(run, {"model.gradient_checkpointing": True})
    less = measured_update(learner, batch)
    agrees(plan_of(workload_of(again, shape, CPU), CPU), less)
    both = [f.saved_bytes(shape, f.TokenRow(whole.tokens, whole.scored, 4, checkpointing=on)) for on in (False, True)]
    assert close(both[0] - both[1], whole.peak - less.peak)  # the activations alone
    del learner
    _sampling_agrees(policy, shape, prompts=2, group=4, prompt=60, response=16, rows=8)


@pytest.mark.long
@pytest.mark.parametrize("words", [(), ("model.gradient_checkpointing=true",), ("model.lora.rank=8",)], ids=str)
def test_copies_of_weights_in_half_precision_last_as_long_as_the_plan_says(words, tmp_path, composed, tokenizer):
    """Without checkpointing the graph holds all of them, frozen weights too; with it they end with the forward pass."""
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM | {"num_hidden_layers": 12, "vocab_size": 2000}))
    run = typed(
        composed(
            "model=local", f"model.path={tmp_path}", "micro_batch_tokens=200", "rollout_batch_size=4",
            "train_batch_size=4", "group_size=2", "sampling.max_tokens=80", "data.path=a/b", "model.dtype=bfloat16",
            *words,
        )
    )  # fmt: skip
    policy = Policy(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path)), tokenizer, torch.bfloat16)
    set_trained(run.model, policy, 0)
    shape = shape_of(run.model).shape
    plan = plan_of(workload_of(run, shape, CPU), CPU)
    assert ("cast weights" in plan.training) != run.model.gradient_checkpointing
    found = measured_update(make_learner(run, policy), samples(4, 2, 40, 80))
    passes = sum(plan.training.get(part, 0) for part in PASSES)
    assert close(passes, found.peak), (plan.training, found)


def _sampling_agrees(policy, shape, prompts, group, prompt, response, rows):
    caches: list[int] = []

    def look(place, ended):
        if not caches:
            layers = [o for o in gc.get_objects() if isinstance(o, PreallocatedLayer)]
            held = [t for o in layers for t in (o.keys, o.values, o.prompt_keys, o.prompt_values)]
            caches.append(bytes_of(t for t in held if t is not None))

    asked = [Prompt(f"p{i}", [5 + i % 50] * prompt, i) for i in range(prompts)]
    sampling = Sampling(1.0, response, response)  # no token before the last one may end it
    peak = peak_of(lambda: HFEngine(policy, rows).generate(asked, sampling, group, look))
    count = min(rows, prompts * group)
    decoding = f.Decoding(count, group, prompt, response)
    cache = f.in_process_cache(shape, decoding, 4)
    beside = f.decoding_bytes(shape, decoding, 4, waiting=prompts * group > count)
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
    shape = dataclasses.replace(
        tiny_shape(config.hidden_size, config.num_hidden_layers, config.num_attention_heads), vocab=config.vocab_size
    )
    _sampling_agrees(policy, shape, **asked)


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
        batch = policy.pack([_pair(s) for s in samples(8, 4, 20, 40)])
        residual = 2 if weights == torch.bfloat16 and not shape.tied else 4
        kept = f.saved_bytes(shape, f.TokenRow(batch.input_ids.numel(), len(batch.score_at), dtype.itemsize, residual))
        assert kept_for_gradient(policy, batch) == pytest.approx(kept, rel=0.04)
        assert bytes_of(policy.model.parameters()) == f.weight_bytes(shape, weights.itemsize)


#: KiB of a token in a layer, products in bfloat16 and weights in float32, as an earlier version of this program kept
#: them on the processor by torch's hooks; with gradient checkpointing. Its attention kept what it made once more.
EARLIER = {
    "Qwen/Qwen2.5-Math-1.5B": (118.6, 6),
    "allenai/OLMo-2-0425-1B": (167, 8),
    "Qwen/Qwen3-0.6B": (84, 4),
    "Qwen/Qwen3-1.7B-Base": (134, 8),
}
KINDS = {"none": Qwen2Config, "head": Qwen3Config, "whole": Olmo2Config}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (PUBLISHED[name].width > 1600)) for name in EARLIER]
)
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
        config = KINDS[shape.qk_norm](**sizes, num_hidden_layers=layers)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config)
        for weight in model.parameters():
            weight.data.fill_(0.001)
        policy = Policy(model, tokenizer, torch.bfloat16)
        sides = {len(p) for p in model.parameters() if p.dim() == 2}
        batch = policy.pack([_pair(s) for s in samples(2, 2, 6, 9)])
        kept.append(kept_for_gradient(policy, batch, sides))
    measured = (kept[1] - kept[0]) / batch.input_ids.numel()
    assert f.saved_by_layer(shape, 2) == pytest.approx(measured, rel=0.01)
    whole, checkpointed = EARLIER[name]
    assert f.saved_by_layer(shape, 2) / 1024 == pytest.approx(whole, rel=0.05)
    assert 4 * shape.width / 1024 == checkpointed


HEADS = [(4, 4), (4, 2), (2, 2)]  # bytes of what makes logits, and of the backward pass's products


@pytest.mark.parametrize(("size", "products"), HEADS)
@pytest.mark.parametrize("trained", [True, False])
def test_the_output_head_takes_what_the_formula_says(size, products, trained, monkeypatch):
    monkeypatch.setattr(
        "rlreason.model.log_probs._onednn_is_faster", lambda device: False
    )  # oneDNN copies a transposed operand
    shape = dataclasses.replace(PUBLISHED["Qwen/Qwen3-0.6B"], vocab=2500, width=64)
    dtypes = {4: torch.float32, 2: torch.bfloat16}
    settings = {"head": dtypes[size], "products": dtypes[products]}
    for scored in (200, 2 * head.CHUNK + 76):
        hidden = torch.randn(scored, shape.width, requires_grad=True)
        weight = torch.randn(shape.vocab, shape.width, requires_grad=trained)
        weight.grad = torch.zeros_like(weight) if trained else None
        labels = torch.randint(shape.vocab, (scored,))
        found, _ = chunked_log_probs(hidden, weight, labels, **settings)
        forward = peak_of(lambda: chunked_log_probs(hidden, weight, labels, **settings))  # noqa: B023
        backward = peak_of(lambda: found.sum().backward())  # noqa: B023
        asked = head.Head(size, products, trained)
        assert head.head_bytes(shape, scored, asked, with_gradient=False) == pytest.approx(forward, rel=0.02)
        assert head.head_bytes(shape, scored, asked) == pytest.approx(backward, rel=0.02)


def test_a_head_in_half_precision_takes_less_on_a_gpu():
    shape, scored = PUBLISHED["Qwen/Qwen2.5-Math-1.5B"], 8192
    here, exact, gpu = (
        head.head_bytes(shape, scored, kind)
        for kind in (head.Head(2, 2), head.Head(4, 2), head.Head(2, 2, on_gpu=True))
    )
    assert gpu < exact < here
    assert gpu == pytest.approx(
        4 * (scored + shape.vocab) * shape.width + 2 * shape.vocab * shape.width + 8 * 512 * shape.vocab
    )


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
    work = Workload(
        shape,
        products=2,
        trained=tuple(f.trained_tensors(shape, 4)),
        tokens=tokens,
        scored=scored,
        several=several,
        casts=f.cast_bytes(shape, 4, 2),
        head=head.Head(4, 2, on_gpu=True),
    )
    parts = plan_of(work, CARD).training
    planned_bytes = sum(parts.values()) - parts["libraries"]
    assert planned_bytes == pytest.approx(measured * 2**30, rel=0.07)


def test_published_shapes_have_the_published_numbers_of_parameters():
    millions = {name: round(shape.numbers / 1e6) for name, shape in PUBLISHED.items()}
    assert millions == {
        "HuggingFaceTB/SmolLM2-135M-Instruct": 135,
        "Qwen/Qwen2.5-Math-1.5B": 1544,
        "Qwen/Qwen3-0.6B": 596,
        "Qwen/Qwen3-0.6B-Base": 596,
        "Qwen/Qwen3-1.7B-Base": 1721,
        "allenai/OLMo-2-0425-1B": 1485,
        "meta-llama/Llama-3.2-1B": 1236,
    }


def test_the_table_of_constants_is_the_programs(composed):
    assert (head.CHUNK, f.HEADROOM, f.PROMPT_TOKENS) == (CHUNK, HEADROOM, PROMPT_TOKENS)
    assert VOCABULARY + len(TAGS) == TINY_VOCABULARY


def test_what_is_held_at_the_same_time(composed):
    base = typed(composed())
    shape = shape_of(base.model).shape

    def plan(*words, device=CARD):
        return plan_of(workload_of(typed(composed(*words)), shape, device), device)

    usual = plan(device=CPU)
    assert "gradients" not in usual.sampling
    assert "KV cache" not in usual.training
    assert "reference model" not in usual.training
    with_kl = plan("kl_placement=loss", "kl_coef=0.1", device=CPU)
    assert with_kl.training["reference model"] == usual.training["weights"] == with_kl.sampling["reference model"]
    again = plan("algorithm=ei", "restart=true", device=CPU)
    assert again.training["first weights"] == again.training["weights"]
    untrained = plan("algorithm=evaluate", device=CPU)
    assert not untrained.training.keys() & {"moments", "gradients", "activations"}
    assert (untrained.first, usual.first) == ("scoring", "training")
    small = plan("optimizer=adamw_8bit", device=CPU)
    assert small.training["moments"] < usual.training["moments"] / 3
    adapters = plan("model.lora.rank=8", device=CPU)
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
    passes = sum(with_kl.training[part] for part in ("gradients", "cast weights", "activations", "logits, head"))
    later = moments + 4 * shape.numbers + passes
    assert with_kl.sampling["KV cache"] == int(0.4 * (free - 2 * shape.numbers - later))
    alone = plan(CARD, "rollout.placement=second_gpu")
    assert alone.other_device["engine's weights"] == 2 * shape.numbers
    assert not {"engine's weights", "KV cache"} & (alone.training.keys() | alone.sampling.keys())
    assert plan(CPU).training["engine's weights"] == 4 * shape.numbers  # where sleep has no effect


def test_the_program_leaves_room_in_vllms_cache_for_what_the_plan_says(tiny_run, policy):
    config = policy.model.config.get_text_config()
    for words in ((), ("kl_placement=loss", "kl_coef=0.1"), ("optimizer=adamw_8bit",)):
        run = tiny_run("rollout=vllm", *words)
        longest = 160 + max(run.sampling.max_tokens, run.evaluation.sampling.max_tokens)
        work = workload_of(run, shape_from(config.to_dict()), CPU, 160)
        held = plan_of(work, CPU).training
        engine = ("weights", "libraries", "engine's weights", "KV cache")
        later = sum(amount for part, amount in held.items() if part not in engine)
        assert reserve_of(run, policy, longest) == held_later(work) == later > 0
        given = with_planned_cache(run, policy, policy.device, Demand(longest, 8)).kv_cache_gb * 2**30
        assert given == 8 * planned_cache(work, CPU)[1]  # there is room for every row
    cache, one = f.vllm_cache(10, 50_000, 100, 10**6, None)
    assert (cache, one) == (20_000, 2280)
    chosen = tiny_run("rollout=vllm", "rollout.kv_cache_gb=2")
    assert with_planned_cache(chosen, policy, policy.device, Demand(300, 8)) is chosen.rollout


def test_the_second_gpu_is_held_against_its_own_memory(composed):
    words = ("model=qwen3_0_6b", "data.path=a/b", "rollout=vllm", "rollout.placement=second_gpu")
    run = typed(composed(*words, "micro_batch_tokens=2048", "rollout.kv_cache_gb=100"))
    two = dataclasses.replace(CARD, second_free=CARD.free)
    told = planned(run, two)
    assert told.verdict == "too large"
    assert "for vLLM on the second GPU, and 24 GiB are free there" in conclusion(told)
    assert told.cure.overrides == ("rollout.kv_cache_gb=16",)
    assert planned(with_changes(run, {"rollout.kv_cache_gb": 8}), two).verdict == "fits"
    small = dataclasses.replace(CARD, second_free=4 << 30)
    by_itself = plan_of(workload_of(with_changes(run, {"rollout.kv_cache_gb": None}), told.work.shape, small), small)
    assert by_itself.other_device["KV cache"] < 1 << 30
    assert "libraries" in by_itself.other_device


LARGE = ("model=qwen3_0_6b", "data.path=a/b")
LATE = [
    (("rollout=vllm", "rollout.kv_cache_gb=20"), 23.5, "rollout.kv_cache_gb="),
    (("sampling.max_tokens=30000", "micro_batch_tokens=40000"), 23.5, "sampling.max_tokens="),
    (
        ("kl_placement=loss", "kl_coef=0.1", "model.freeze=[*mlp*]", "model.weights=bfloat16"),
        6.0,
        "kl_placement=none kl_coef=0",
    ),
]


@pytest.mark.parametrize(("words", "gigabytes", "offered"), LATE, ids=lambda x: str(x)[:40])
def test_more_is_offered_before_nothing_is_said_to_fit(words, gigabytes, offered, composed):
    run = typed(composed(*LARGE, *words))
    device = Device("cuda", "here", int(gigabytes * 2**30), 80 << 30)
    told = planned(run, device)
    assert told.cure is not None, told.plan
    assert offered in conclusion(told)
    assert "changes what is learned" in conclusion(told) or told.cure.same_result
    again = planned(typed(composed(*LARGE, *words, *told.cure.overrides)), device)
    assert (again.verdict, again.plan.peak) == ("fits", told.cure.peak)


def test_where_nothing_helps_the_largest_part_is_named(composed):
    told = planned(typed(composed(*LARGE)), Device("cpu", "here", 1 << 30, 1 << 30))
    assert told.cure is None
    part = max(told.plan.training | told.plan.sampling, key=(told.plan.training | told.plan.sampling).get)
    assert f"none of the settings tried makes it fit; the largest part is {part} (" in conclusion(told)


SIZES = [
    ("num_hidden_layers", "20000000", "num_hidden_layers=20000000 must be a whole number from 1 to 1000"),
    ("hidden_size", "-576", "hidden_size=-576 must be"),
    ("vocab_size", "Infinity", "vocab_size=inf must be"),
    ("intermediate_size", "1e400", "intermediate_size=inf must be"),
    ("num_attention_heads", '"9"', "num_attention_heads=9 must be"),
    ("max_position_embeddings", "true", "max_position_embeddings=True must be"),
    ("hidden_size", "null", "hidden_size is missing"),
]


@pytest.mark.parametrize(("key", "value", "says"), SIZES)
def test_a_size_that_no_model_has_is_named(key, value, says, tmp_path, composed):
    text = json.dumps(SMOLLM | {key: "HERE"}).replace('"HERE"', value)
    (tmp_path / "config.json").write_text(text)
    run = typed(composed("model=local", f"model.path={tmp_path}", "data.path=a/b"))
    assert says in conclusion(planned(run, CPU))
    assert "is of type" not in conclusion(planned(run, CPU))


SETS = [
    ("model=qwen2_5_math_1_5b", "data.path=a/b"),
    ("model=olmo2_1b", "data.path=a/b"),
    ("model=smollm2_135m", "data.path=a/b", "micro_batch_tokens=16384"),
    ("model=qwen2_5_math_1_5b", "data.path=a/b", "rollout=vllm", "rollout.sleep=false"),
    ("model.width=1024", "model.layers=32", "model.heads=16"),
]


@pytest.mark.parametrize("words", SETS, ids=" ".join)
def test_what_is_suggested_can_be_typed_and_fits_by_the_same_plan(words, composed):
    data = ("data=gsm8k",) if "model=qwen2_5_math_1_5b" in words else ()
    run = typed(composed(*words, *data))
    suggested = {}
    for kind, gigabytes in itertools.product(("cuda", "cpu"), (8, 23.5)):
        device = Device(kind, "here", int(gigabytes * 2**30), 80 << 30)
        told = planned(run, device)
        if told.cure is None:
            continue
        suggested[device] = told
        settings = dict(word.split("=") for word in told.cure.overrides)
        settings = {key: yaml.safe_load(value) for key, value in settings.items()}
        harmless = {key for saving in savings(run, told.work.longest) if saving.same_result for key in saving.settings}
        assert told.cure.same_result is (settings.keys() <= harmless)
        assert planned(with_changes(run, settings), device).verdict == "fits"
        *before, last = settings  # what fits with fewer of the list is not given more
        assert planned(with_changes(run, {key: settings[key] for key in before}), device).verdict != "fits", last
        assert all(word in conclusion(told) for word in told.cure.overrides)
    assert suggested
    for device, told in [*suggested.items()][:2]:
        typed_again = planned(typed(composed(*words, *data, *told.cure.overrides)), device)
        assert typed_again.plan.peak == told.cure.peak < told.plan.peak


def test_more_of_anything_takes_more(composed):
    run = typed(composed("model=qwen3_0_6b", "data.path=a/b"))
    peaks = [
        plan_of(workload_of(with_changes(run, {"micro_batch_tokens": n}), PUBLISHED["Qwen/Qwen3-0.6B"], CARD), CARD)
        for n in (2048, 4096, 8192)
    ]
    assert sorted(sum(plan.training.values()) for plan in peaks) == [sum(plan.training.values()) for plan in peaks]
    assert peaks[0].training["activations"] * 4 == pytest.approx(peaks[2].training["activations"], rel=0.01)


def test_a_shape_that_nobody_can_tell_is_said_to_be_unknown(tmp_path, composed):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    run = typed(composed("model=local", f"model.path={tmp_path}", "data.path=a/b"))
    told = planned(run, CPU)
    assert (told.plan, told.verdict) == (None, "unknown")
    assert "is of type mamba, and the plan knows llama" in conclusion(told)
    assert table(told) == [f"unknown: {told.source}"]
    assert figures(told)["verdict"] == "unknown"
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read" in conclusion(planned(run, CPU))
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
    assert processor({}.get).total == psutil.virtual_memory().total
    first = {"/proc/self/cgroup": "5:memory:/", "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    assert list(group_limits(first.get)) == []
    assert believed_device().kind in ("cpu", "cuda")


def test_what_a_step_samples_at_once_is_counted(tiny_run):
    assert Sampled(64, 8, 48) in planned(tiny_run(), CPU).work.sampled


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
