"""What is asked of a GPU, tried without one: shapes, number types, layouts and arguments; no number is compared here.

torch's FakeTensorMode runs a program on tensors of "cuda" that have no memory. Indexing from Python wants a device
guard as well, and a torch for processors has none for CUDA: one that does nothing is compiled here, in about two
seconds. It stays in the process that loads it, so all checks run in a fork of this one.
Autograd's engine asks for the GPU's streams, which cannot be had, so backward passes are called as functions
(`context`).
"""

import contextlib
import ctypes
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn import functional as F

from rlreason.config.training import OptimizationConfig
from rlreason.engines.base import Prompt, Sampling
from rlreason.engines.decoding import Batch
from rlreason.model.attention import NAMES
from rlreason.model.log_probs import _ChunkedLogProbs
from rlreason.model.packing import _SharedPromptAttention, pack
from rlreason.model.policy import Policy
from rlreason.objectives.objective import Objective
from rlreason.training.learner import Learner
from rlreason.types import Response, Sample
from tests.starts import forked

HALF, FULL = torch.bfloat16, torch.float32
#: Grouped heads; the sizes are those of no other dimension, so that an exchange of two shows.
HEADS, KV_HEADS, HEAD_DIM, WIDTH, VOCAB, LAYERS = 6, 2, 16, 96, 320, 3
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 144, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 128,
}  # fmt: skip
FAMILIES = {"Qwen2": {"tie_word_embeddings": True}, "Qwen3": {"head_dim": HEAD_DIM}, "Olmo2": {}}
PAIRS = [([3, 5, 7], [11, 13, 2]), ([3, 5, 7], [6, 8, 12, 10]), ([4], [9, 9, 9, 9, 9])]
TOKENS, PARTS, LONGEST = 16, [5, 6, 5], 6  # of these pairs, each behind a prompt of its own
SCORED = 12
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
C10_REGISTER_GUARD_IMPL(MPS, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::MPS>)
"""


def load_guard(folder: Path) -> None:
    """Compile and load the device guard; `CalledProcessError` or `FileNotFoundError` where there is no compiler."""
    home, source, library = Path(torch.__file__).parent, folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    flags = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-lc10"]
    subprocess.run(["g++", str(source), *flags, "-o", str(library)], check=True)
    ctypes.CDLL(str(library))


class FakeCuda(FakeTensorMode):
    """Keeps the arguments of every operation by its name; pinned memory, which it does not know, is ordinary here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self._within = False  # an operation that it puts together from others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        pins, within = func is torch.ops.aten._pin_memory.default, self._within
        with mock.patch.object(self, "_within", True):
            result = args[0] if pins else super().__torch_dispatch__(func, types, args, kwargs)
        if within:
            return result
        self.calls.append((str(func), args, kwargs or {}, result))
        return result

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]]:
        """(arguments, named ones, result) of the calls of this operation, such as aten.mm.dtype."""
        return [(args, kwargs, result) for called, args, kwargs, result in self.calls if called == name]


def context(*needs_input_grad: bool) -> Any:
    """What autograd hands to the two parts of a function of ours."""
    ctx = mock.Mock(needs_input_grad=needs_input_grad)
    ctx.save_for_backward = lambda *tensors: setattr(ctx, "saved_tensors", tensors)
    return ctx


class FakePolicy(Policy):
    """A policy whose model lies on a GPU that is not there: nothing was checked, since that compares numbers."""

    def __init__(self, model, compute_dtype: torch.dtype, head_dtype: torch.dtype, kernel: str) -> None:
        self.device, self.model, self.tokenizer = model.device, model.eval(), None
        self.weights, self.compute_dtype, self.head_dtype = torch.float32, compute_dtype, head_dtype
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device)
        self.in_main_memory = False
        self.attention, self.why_attention, self.remarks = kernel, "", []
        self.shares_prompts = kernel == "varlen"
        model.set_attn_implementation(NAMES[kernel])

    def autocast(self) -> Any:
        """The policy's own, which asks for a GPU first."""
        with mock.patch.multiple(torch.cuda, is_available=lambda: True, is_bf16_supported=lambda: True):
            return super().autocast()


def policy_of(family="Qwen2", kernel="varlen", dtype=HALF, head=HALF, device="cuda"):
    config = getattr(transformers, f"{family}Config")(**SHAPE, **FAMILIES[family])
    with torch.device(device):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    return FakePolicy(model, dtype, head, kernel)


def is_laid_out(tensors, dtype, *shapes):
    for tensor, shape in zip(tensors, shapes, strict=True):
        found = (tuple(tensor.shape), tensor.dtype, tensor.is_contiguous(), tensor.device.type)
        assert found == (shape, dtype, True, "cuda"), found


def are_bounds(*several):
    """The kernels read 32-bit numbers there and look no further."""
    for bounds in several:
        assert (bounds.dtype, bounds.dim(), bounds.device.type) == (torch.int32, 1, "cuda"), bounds


def forward(mode: FakeCuda, family: str, kernel: str, shares: bool = False) -> None:
    policy = policy_of(family, kernel)
    policy.shares_prompts = shares
    batch = policy.pack(PAIRS)
    mode.calls.clear()
    found = policy.log_probs(batch)
    for one in found:
        assert (tuple(one.shape), one.dtype, one.device.type, one.requires_grad) == ((SCORED,), FULL, "cuda", True)
    halves = [args for name in ("aten.mm.default", "aten.addmm.default") for args, _, _ in mode.of(name)]
    assert len(halves) == 7 * LAYERS, len(halves)  # the linear layers, each computed by autocast in half precision
    assert {x.dtype for args in halves for x in args} == {HALF}


def check_varlen_forward(mode: FakeCuda) -> None:
    """One call a layer, every part by itself; of a shared prompt also its responses to the prompt, not causally.

    The flash kernel gets contiguous bfloat16, int32 bounds and heads that are not repeated.
    """
    alone = [(TOKENS, TOKENS, LONGEST, LONGEST, True)]  # tokens of queries and keys, their longest stretches, causal
    shared = [(13, 13, 5, 5, True), (5, 3, 5, 3, False)]
    for family, shares, calls in (("Qwen2", False, alone), ("Olmo2", False, alone), ("Qwen3", True, shared)):
        forward(mode, family, "varlen", shares)
        given = mode.of("aten._flash_attention_forward.default")
        for (args, kwargs, _), (queries, keys, *longest, causal) in zip(given, calls * LAYERS, strict=True):
            q, k, v, of_queries, of_keys, *rest = args
            is_laid_out((q, k, v), HALF, (queries, HEADS, HEAD_DIM), *[(keys, KV_HEADS, HEAD_DIM)] * 2)
            are_bounds(of_queries, of_keys)
            assert rest == [*longest, 0.0, causal, False]
            assert kwargs == {"scale": HEAD_DIM**-0.5}


def check_shared_prompts_backward(mode: FakeCuda) -> None:
    """The backward kernel gets the merged outputs and log-sum-exps; gradients have the shapes of their tensors."""
    layout = pack(PAIRS, "cuda", share_prompts=True).layout
    tokens = sum(layout.parts.queries)
    q, k, v = (torch.zeros(tokens, n, HEAD_DIM, dtype=HALF, device="cuda") for n in (HEADS, KV_HEADS, KV_HEADS))
    ctx = context()
    out = _SharedPromptAttention.forward(ctx, q, k, v, layout, 0.25)
    is_laid_out([out], HALF, (tokens, HEADS, HEAD_DIM))
    # What comes in is a view, as transformers' reshape leaves it.
    grads = _SharedPromptAttention.backward(ctx, torch.zeros_like(out).transpose(0, 1).contiguous().transpose(0, 1))
    assert [(g.shape, g.dtype) for g in grads[:3]] == [(x.shape, HALF) for x in (q, k, v)]
    whole, across = mode.of("aten._flash_attention_backward.default")
    for (args, kwargs, _), queries, keys, causal in ((whole, tokens, tokens, True), (across, 5, 3, False)):
        grad, q_in, k_in, v_in, out_in, lse, of_queries, of_keys, *plain, seed, offset = args
        shapes = [(queries, HEADS, HEAD_DIM)] * 2 + [(keys, KV_HEADS, HEAD_DIM)] * 2 + [(queries, HEADS, HEAD_DIM)]
        is_laid_out((grad, q_in, k_in, v_in, out_in), HALF, *shapes)
        is_laid_out([lse], FULL, (HEADS, queries))
        are_bounds(of_queries, of_keys)
        assert plain == [5, 5 if causal else 3, 0.0, causal]
        assert (seed.dtype, tuple(seed.shape), tuple(offset.shape)) == (torch.uint64, (2,), (0,))
        assert kwargs == {"scale": 0.25}


def check_flash_attn_forward(mode: FakeCuda) -> None:
    """model.attention=flash_attention_2: the arguments by the package's own names, in each layer.

    The package cannot be had without CUDA: its function is one with the signature of versions 2.6 to 2.8.
    """
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
    ):
        is_laid_out((q, k, v), HALF, (TOKENS, HEADS, HEAD_DIM), *[(TOKENS, KV_HEADS, HEAD_DIM)] * 2)
        are_bounds(cu_seqlens_q, cu_seqlens_k)
        calls.append((max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal))
        return torch.empty_like(q)

    with mock.patch.dict(sys.modules, flash_attn=mock.Mock(flash_attn_varlen_func=flash_attn_varlen_func)):
        forward(mode, "Qwen2", "flash_attention_2")
    assert calls == [(LONGEST, LONGEST, 0.0, HEAD_DIM**-0.5, True)] * LAYERS


def check_attention_in_float32(mode: FakeCuda) -> None:
    """A card without bfloat16: one call per sequence, heads repeated, so that a kernel without grouped heads runs."""
    policy = policy_of("Qwen2", "sdpa", FULL, FULL)
    batch = policy.pack(PAIRS)
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=F.scaled_dot_product_attention) as spy:
        found, _ = policy.log_probs(batch)
    assert found.dtype == FULL
    shapes = [tuple(x.shape) for call in spy.call_args_list for x in call.args]
    assert shapes == [(1, HEADS, size, HEAD_DIM) for _ in range(LAYERS) for size in PARTS for _ in range(3)]


def check_head(mode: FakeCuda) -> None:
    """The output head: bfloat16 operands into float32, the weight cast once a call, gradients summed in float32.

    With model.head=float32 beside bfloat16 products, logits are in float32.
    """
    hidden, weight = torch.zeros(40, WIDTH, device="cuda"), torch.zeros(VOCAB, WIDTH, device="cuda")
    labels, ones = torch.zeros(40, dtype=torch.int64, device="cuda"), torch.ones(40, device="cuda")
    for head in (HALF, FULL):
        mode.calls.clear()
        ctx = context(True, True)
        found = _ChunkedLogProbs.forward(ctx, hidden, weight, labels, 0.7, (head, HALF), None)
        assert [(tuple(x.shape), x.dtype) for x in found] == [((40,), FULL)] * 2
        products = mode.of("aten.mm.dtype" if head is HALF else "aten.mm.default")
        assert [(tuple(r.shape), r.dtype) for *_, r in products] == [((n, VOCAB), FULL) for n in (16, 16, 8)]
        assert {x.dtype for args, *_ in products for x in args[:2]} == {head}
        grads = _ChunkedLogProbs.backward(ctx, ones, ones if head is HALF else None)
        assert [(tuple(g.shape), g.dtype) for g in grads[:2]] == [((40, WIDTH), FULL), ((VOCAB, WIDTH), FULL)]
        back, sums = mode.of("aten.mm.dtype"), mode.of("aten.addmm.dtype_out")
        assert (len(back), len(sums)) == (3 * 3 if head is HALF else 3, 3)  # of half precision logits twice
        operands = [args[:2] for args, *_ in back] + [args[1:3] for args, *_ in sums]
        assert {x.dtype for pair in operands for x in pair} == {HALF}
        for args, kwargs, _ in sums:
            assert kwargs["out"] is args[0]
            is_laid_out([args[0]], FULL, (VOCAB, WIDTH))
        if head is HALF:
            cast = [tuple(r.shape) == (VOCAB, WIDTH) and r.dtype == HALF for *_, r in mode.of("aten._to_copy.default")]
            assert sum(cast) == 2  # once forward, once backward
            assert not mode.of("aten.mm.default")  # nothing is multiplied in float32


def check_decoding(mode: FakeCuda) -> None:
    """The in-process engine: prompts are read, kept once, and two steps of two samples each decoded behind them."""
    policy = policy_of("Qwen3", head=FULL)
    may_end = torch.zeros(VOCAB, dtype=torch.bool, device="cuda")
    prompts = [Prompt("a", [3, 5, 7], seed=0), Prompt("b", [4], seed=1)]
    with torch.no_grad(), policy.autocast():
        batch = Batch(policy, Sampling(1.0, 0, 8), prompts, 2, may_end)
        batch.compact_and_admit([0, 1])
        assert len(mode.of("aten._flash_attention_forward.default")) == LAYERS
        for _ in range(2):
            mode.calls.clear()
            batch.step()
    assert (tuple(batch.logits.shape), batch.logits.dtype) == ((4, VOCAB), FULL)
    kept = [(tuple(x.shape), x.dtype) for x in (*batch.cache.prompt_keys, *batch.cache.prompt_values)]
    assert kept == [((2, KV_HEADS, 3, HEAD_DIM), HALF)] * (2 * LAYERS)
    attended = [args for args, _, _ in mode.of("aten.bmm.default")]
    assert len(attended) == 4 * LAYERS  # queries with the keys, weights with the values: of prompts, and of responses
    assert {x.dtype for args in attended for x in args} == {HALF}


def check_apples_gpu(mode: FakeCuda) -> None:
    """device=mps: scoring, an update and decoding hand it no float64, which it lacks, and no kernel of CUDA's."""
    policy = policy_of("Qwen3", "sdpa", FULL, FULL, "mps")
    samples = [Sample(Response("p", *pair, [-1.0] * len(pair[1]), "", "stop"), None, advantage=1.0) for pair in PAIRS]
    with (
        mock.patch.object(F, "scaled_dot_product_attention", lambda q, k, v, **_: (q @ k.mT).softmax(-1) @ v),
        mock.patch("rlreason.training.learner.step_divisors", return_value=(3, SCORED)),
        mock.patch.object(torch.Tensor, "backward"),
        mock.patch.object(torch.Tensor, "numpy", lambda x: np.ones(x.shape, np.bool_)),
    ):
        _, sums = Learner(policy, Objective(), OptimizationConfig(1e-3))._backward(samples, 0)
        with contextlib.suppress(DataDependentOutputException):  # a fake tensor has no numbers
            sums.read(samples)
        with torch.no_grad():
            may_end = torch.ones(VOCAB, dtype=torch.bool, device="mps")
            batch = Batch(policy, Sampling(1.0, 0, 8), [Prompt("a", [3, 5, 7], seed=0)], 2, may_end)
            batch.compact_and_admit([0])
            batch.step()
            assert batch.draw(torch.zeros(1, dtype=torch.int64, device="mps"))
    results = [x for *_, result in mode.calls for x in (result if isinstance(result, tuple) else [result])]
    there = {x.dtype for x in results if isinstance(x, torch.Tensor) and x.device.type == "mps"}
    assert there == {torch.float32, torch.int64, torch.int32, torch.bool}


@pytest.mark.skipif(
    torch.version.cuda is not None or shutil.which("g++") is None,
    reason="for a torch without CUDA, which a device guard is compiled for: needs g++",
)
def test_a_gpu_is_asked_for_the_right_thing(tmp_path):
    assert forked(run_checks, tmp_path) == 0, "its traceback is on standard error"


def run_checks(folder: Path) -> None:
    """Run every check, each with a GPU of its own."""
    warnings.simplefilter("ignore")
    load_guard(folder)
    for name, check in sorted(globals().items()):
        if name.startswith("check_"):
            with FakeCuda() as mode, mock.patch("rlreason.model.log_probs.CHUNK", 16):
                check(mode)
