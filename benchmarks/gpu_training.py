"""What only a GPU can show of training and of the in-process engine: `python benchmarks/gpu_training.py --model DIR`.

1. A group's prompt once: seconds and peak memory of an optimizer step on 4 prompts with 8 responses each, with the
   prompt shared and with it repeated, in bfloat16; and how far either gradient is from float32's.
2. How often a step waits for the device.
3. Tokens per second of the engine, step by step and compiled, beside transformers' `generate`.

A folder without weights gives a model of its shape with random ones, which cost the same; --vocabulary, --width and so
on change the shape. Exits with 1 when a check fails. Without a GPU everything runs on the processor.
"""

import argparse
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from rlreason.config.training import OptimizationConfig  # noqa: E402
from rlreason.engines.base import Prompt, Sampling  # noqa: E402
from rlreason.engines.decoding import Batch  # noqa: E402
from rlreason.engines.hf import HFEngine  # noqa: E402
from rlreason.model.parameters import NOTHING_RUNS, load_tokenizer, pick_device  # noqa: E402
from rlreason.model.policy import Policy  # noqa: E402
from rlreason.objectives.objective import LossConfig, Objective  # noqa: E402
from rlreason.runtime.clock import ModelSize, Work, flops, group_work, peak_tflops  # noqa: E402
from rlreason.training.learner import Learner  # noqa: E402
from rlreason.types import Grade, Response, Sample  # noqa: E402

WAITS = 2  # of an update, whatever its micro-batches: the read of its metrics, and one to spare
SHARED_IS_NO_WORSE = 1.5  # the error of its gradient, in errors of the repeated prompt's


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder, with or without weights")
    parser.add_argument("--shape", default="{}", help="JSON of config values that differ from the folder's")
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--response-tokens", type=int, default=300, help="at most; at least a quarter of it")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--new-tokens", type=int, default=128, help="of each sample of the engine; 0: leave it out")
    parser.add_argument("--compile", action="store_true", help="the engine by torch.compile, too")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def make_policy(args: argparse.Namespace, dtype: torch.dtype, attention: str = "auto") -> Policy:
    """The model with products in this dtype; the same weights at every call."""
    torch.manual_seed(0)
    if any(Path(args.model).glob("*.safetensors")) and args.shape == "{}":
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, **NOTHING_RUNS)
    else:
        config = AutoConfig.from_pretrained(args.model)
        for name, value in json.loads(args.shape).items():
            setattr(config, name, value)
        with pick_device():  # random weights of a large model take a processor a minute
            model = AutoModelForCausalLM.from_config(config)
    return Policy(model, load_tokenizer(args.model), dtype, pick_device(), attention=attention)


def make_samples(args: argparse.Namespace) -> list[Sample]:
    """Groups of random tokens, with advantages."""
    g, grade = torch.Generator().manual_seed(0), Grade(1.0, 1.0, 1.0, "correct")

    def ids(size: int) -> list[int]:
        return torch.randint(20, 40_000, (size,), generator=g).tolist()

    found = []
    for group in range(args.groups):
        prompt = ids(args.prompt_tokens)
        for _ in range(args.samples):
            size = int(torch.randint(args.response_tokens // 4, args.response_tokens + 1, (), generator=g))
            response = Response(str(group), prompt, ids(size), [0.0] * size, "", "stop")
            found.append(Sample(response, grade, advantage=float(torch.randn((), generator=g))))
    return found


def synchronized() -> float:
    """The time, when the device has done all that was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


@contextmanager
def waits() -> Iterator[Callable[[], list[str]]]:
    """Where the processor waits for the device in the block, once for each time."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield lambda: [
                f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)
            ]
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")


def gradient(learner: Learner, samples: list[Sample]) -> torch.Tensor:
    """(parameters,) float32 of one step, without the step."""
    return torch.cat([part.flatten().cpu() for part in learner.gradient(samples).parameters])


def learner_for(policy: Policy, args: argparse.Namespace, share: bool) -> Learner:
    """A learner whose responses share their prompt, or have it repeated."""
    policy.shares_prompts = share and policy.shares_prompts
    objective = Objective(loss=LossConfig("grpo_clip", cliprange=0.2))
    return Learner(policy, objective, OptimizationConfig(1e-6), micro_batch_tokens=args.micro_batch_tokens)


def size_of(policy: Policy) -> ModelSize:
    """For FLOPs; the peak is that of the GPU."""
    config, device = policy.model.config, policy.device
    width = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    peak = peak_tflops(torch.cuda.get_device_name()) if device.type == "cuda" else None
    count = sum(p.numel() for p in policy.model.parameters())
    if not config.tie_word_embeddings:
        count -= policy.model.get_input_embeddings().weight.numel()
    return ModelSize(count, config.num_hidden_layers, width, peak)


def training(args: argparse.Namespace) -> dict[str, Any]:
    """Steps with the prompt shared, and with it repeated."""
    samples, rows = make_samples(args), {}
    exact = gradient(learner_for(make_policy(args, torch.float32), args, share=False), samples)
    work = Work()
    for at in range(0, len(samples), args.samples):
        group = [s.response for s in samples[at : at + args.samples]]
        work = work.plus(group_work(len(group[0].prompt_ids), [len(r.token_ids) for r in group], passes=3))
    for share in (True, False):
        policy = make_policy(args, torch.bfloat16)
        learner = learner_for(policy, args, share)
        if share:
            print(policy.describe(), flush=True)
        found = gradient(learner, samples)
        learner.update(samples)
        if policy.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(args.steps):
            began = synchronized()
            learner.update(samples)
            seconds.append(synchronized() - began)
        with waits() as places:
            learner.update(samples)
        rows["shared" if share else "repeated"] = row = {
            "shares": policy.shares_prompts,
            "positions": policy.pack(
                [(s.response.prompt_ids, s.response.token_ids) for s in samples]
            ).input_ids.numel(),
            "seconds": statistics.median(seconds),
            "peak_gb": torch.cuda.max_memory_allocated() / 2**30 if policy.device.type == "cuda" else None,
            "gradient_error": float((found - exact).norm() / exact.norm()),
            "waits": places(),
            "micro_batches": len(learner.micro_batches(samples)),
        }
        size = size_of(policy)
        if size.peak_tflops:
            row["mfu"] = flops(work, size) / row["seconds"] / size.peak_tflops / 1e12
        print(json.dumps(row), flush=True)
        del policy, learner
    return rows


def sampling(args: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of the engine and of `generate`, on the same prompts."""
    policy = make_policy(args, torch.bfloat16)
    responses = [s.response for s in make_samples(args)][:: args.samples]
    prompts = [Prompt(str(i), r.prompt_ids, seed=i) for i, r in enumerate(responses)]
    wanted = Sampling(1.0, args.new_tokens, args.new_tokens)
    tokens = len(prompts) * args.samples * args.new_tokens

    def rate(write: Callable[[], object]) -> float:
        write()
        began = synchronized()
        write()
        return tokens / (synchronized() - began)

    engine = HFEngine(policy)
    found = {"ours": rate(lambda: engine.generate(prompts, wanted, args.samples))}
    with waits() as places, mock.patch.object(Batch, "step", autospec=True, side_effect=Batch.step) as steps:
        engine.generate(prompts, wanted, args.samples)
    found["steps"], found["waits_per_step"] = float(steps.call_count), len(places()) / steps.call_count
    print(json.dumps(found), flush=True)
    if args.compile:
        compiled = HFEngine(policy, compile=True)
        found["compiled"] = rate(lambda: compiled.generate(prompts, wanted, args.samples))
        print(json.dumps(found), flush=True)
    ids = torch.tensor([p.token_ids for p in prompts for _ in range(args.samples)], device=policy.device)
    pad = {"pad_token_id": policy.tokenizer.eos_token_id, "attention_mask": torch.ones_like(ids)}
    exactly = {"min_new_tokens": args.new_tokens, "max_new_tokens": args.new_tokens, "do_sample": True, "top_k": 0}
    policy.model.to(torch.bfloat16).set_attn_implementation("sdpa")  # what serves it best
    with torch.inference_mode():
        found["transformers"] = rate(lambda: policy.model.generate(input_ids=ids, **pad, **exactly))
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """Print, write down, and fail where sharing is worse than repeating, given up on a GPU, or a micro-batch waits."""
    args = arguments()
    figures: dict[str, Any] = {"settings": vars(args), "torch": torch.__version__, "training": training(args)}
    if args.new_tokens:
        figures["sampling"] = sampling(args)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2, default=str) + "\n")
    shared, repeated = figures["training"]["shared"], figures["training"]["repeated"]
    if not shared["gradient_error"] < SHARED_IS_NO_WORSE * repeated["gradient_error"]:
        sys.exit(f"sharing the prompt gives a worse gradient: {shared['gradient_error']:.3g} from float32's")
    if torch.cuda.is_available() and not shared["shares"]:
        sys.exit("this GPU does not share prompts: its kernel was tried and is not there, or not exact")
    if len(shared["waits"]) > WAITS:
        sys.exit(f"{len(shared['waits'])} waits for the device in an update: {'; '.join(shared['waits'])}")


if __name__ == "__main__":
    main()
