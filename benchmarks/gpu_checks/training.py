"""The trainer alone: attention kernels against one call per sequence, the output head, memory against the plan."""

import time

import torch

from gpu_checks.common import Asked, Found, gap, imitated, synchronized
from rlreason.config.training import OptimizationConfig
from rlreason.model import memory as f
from rlreason.model.attention import NAMES
from rlreason.model.log_probs import chunked_log_probs
from rlreason.model.memory import Workload, shape_from
from rlreason.model.parameters import checkpoint_layers
from rlreason.model.plan import plan_of
from rlreason.model.policy import LogProbScorer, Policy, load_policy
from rlreason.objectives.objective import Objective
from rlreason.runtime.machine import Device
from rlreason.runtime.text import size
from rlreason.training.learner import Learner
from rlreason.types import Sample

NO_WORSE = 1.5  # a kernel's error in half precision, in errors of one call per sequence
FLOOR = {torch.float32: 1e-4, torch.bfloat16: 2e-3}  # nats: below this nobody is worse than another
WITHIN = 0.15  # of the plan
POSITIONS = 2048  # whose log-probabilities the head is timed on


def kernels(asked: Asked) -> Found:
    """Log-probabilities by each kernel for packed sequences, in the type that training takes, against float32."""
    policy = load_policy(asked.model)
    kernel, dtype, shares = policy.attention, policy.compute_dtype, policy.shares_prompts
    pairs = [(s.response.prompt_ids, s.response.token_ids) for s in imitated(policy, asked.times(32), 90, 130)]

    def scores(name: str, products: torch.dtype, share: bool) -> list[list[float]]:
        policy.model.set_attn_implementation(NAMES[name])
        policy.compute_dtype, policy.shares_prompts = products, share
        return LogProbScorer(policy, 4096).log_probs(pairs)

    exact, plain = scores("sdpa", torch.float32, False), scores("sdpa", dtype, False)
    usual, largest = gap(plain, exact)
    figures = {"sdpa": {"mean": usual, "largest": largest}}
    ways = {kernel: False} if kernel != "sdpa" else {}
    for name, share in [*ways.items(), *([(f"{kernel}, prompt shared", True)] if shares else [])]:
        mean, largest = gap(scores(kernel, dtype, share), exact)
        figures[name] = {"mean": mean, "largest": largest}
    bound = max(FLOOR[dtype], NO_WORSE * usual)
    ok = all(row["mean"] <= bound for row in figures.values())
    told = ", ".join(f"{name} {row['mean']:.2g}" for name, row in figures.items())
    return Found(ok, f"mean distance from float32 in {str(dtype)[6:]}: {told} nats (bound {bound:.2g})", figures)


def head(asked: Asked) -> Found:
    """Milliseconds of the output head for a token, there and back, with operands in float32 and in bfloat16."""
    policy = load_policy(asked.model)
    vocab, width = policy.head.shape
    count = 256 if asked.quick or policy.device.type == "cpu" else POSITIONS
    draw = torch.Generator(policy.device).manual_seed(0)
    hidden = torch.randn(count, width, generator=draw, device=policy.device, requires_grad=True)
    weight = policy.head.detach().float().clone().requires_grad_()
    labels = torch.randint(vocab, (count,), generator=draw, device=policy.device)
    figures, found = {}, {}
    for name in ("float32", "bfloat16"):
        dtype, times = getattr(torch, name), []
        for _ in range(4):
            hidden.grad = weight.grad = None
            synchronized()
            began = time.perf_counter()
            log_probs, _ = chunked_log_probs(hidden, weight, labels, types=(dtype, dtype))
            log_probs.sum().backward()
            synchronized()
            times.append(time.perf_counter() - began)
        found[name] = log_probs.detach()
        figures[f"{name}_ms_per_token"] = 1000 * min(times[1:]) / count
    figures["difference"] = (found["float32"] - found["bfloat16"]).abs().mean().item()
    faster = figures["bfloat16_ms_per_token"] < figures["float32_ms_per_token"]
    judged = faster if policy.device.type == "cuda" else None
    words = "{float32_ms_per_token:.3g} ms a token in float32, {bfloat16_ms_per_token:.3g} in bfloat16; they differ by "
    return Found(judged, (words + "{difference:.2g} nats").format(**figures) + f" ({vocab} tokens)", figures)


def memory(asked: Asked) -> Found:
    """The peak of updates whose rows are full, by torch's own count, against the plan; with and without checkpointing.

    Weights are random, and so are the tokens: memory depends on lengths alone.
    """
    if not torch.cuda.is_available():
        return Found(None, "left out: torch counts a GPU's memory alone (tests/test_memory_plan.py measures here)")
    figures, ok = {}, True
    for checkpointing in (False, True):
        planned, measured, tokens = _one_update(asked, checkpointing)
        share = planned / measured
        ok &= abs(share - 1) <= WITHIN
        name = "checkpointing" if checkpointing else "whole"
        figures[name] = {"planned": planned, "measured": measured, "share": share, "row_tokens": tokens}
    told = ", ".join(
        f"{name}: planned {size(row['planned'])}, measured {size(row['measured'])}" for name, row in figures.items()
    )
    return Found(ok, told, figures)


def _one_update(asked: Asked, checkpointing: bool) -> tuple[int, int, int]:
    """(planned bytes, measured bytes, tokens of a row) of an update of two micro-batches."""
    torch.cuda.empty_cache()
    policy = load_policy(asked.model)
    shape = shape_from(policy.model.config.get_text_config().to_dict())
    if shape is None:
        raise ValueError(f"the plan does not know models of type {policy.model.config.model_type}")
    if checkpointing:
        checkpoint_layers(policy.model)
    free, total = torch.cuda.mem_get_info()
    device = Device("cuda", torch.cuda.get_device_name(), free + torch.cuda.memory_allocated(), total)
    for budget in (8192, 4096, 2048, 1024, 512):
        samples = _full_rows(policy, budget)
        row = policy.pack([(s.response.prompt_ids, s.response.token_ids) for s in samples[:7]])
        tokens = row.input_ids.numel()
        trained, gradients = f.trained_numbers(shape, 4)
        work = Workload(
            shape,
            products=policy.compute_dtype.itemsize,
            trained=trained,
            gradients=gradients,
            checkpointing=checkpointing,
            tokens=tokens,
            on_gpu=True,
        )
        parts = plan_of(work, device).training
        planned = sum(parts.values()) - parts["libraries"]
        if planned < 0.9 * (device.free or 0):
            break
    learner = Learner(policy, Objective(), OptimizationConfig(1e-6), micro_batch_tokens=tokens)
    learner.update(samples[:1])  # so that there are moments
    torch.cuda.reset_peak_memory_stats()
    learner.update(samples)
    return planned, torch.cuda.max_memory_allocated(), tokens


def _full_rows(policy: Policy, budget: int) -> list[Sample]:
    """Two micro-batches of seven responses to one prompt, each just as long as the budget."""
    prompt = budget // 32
    each = (budget - prompt) // 7 if policy.shares_prompts else budget // 7 - prompt
    return imitated(policy, 14, prompt, each, group=7)
