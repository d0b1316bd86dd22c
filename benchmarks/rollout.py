"""Tokens per second of `rollout=hf` and `rollout=vllm` on the same prompts: `python benchmarks/rollout.py --model DIR`.

One process, one policy, one Sampling; the engines take turns, so that other programs slow both alike.
Processor seconds are those of this process, all threads together: on a busy machine they vary less than wall time.

Before any speed is printed, both engines' log-probabilities are compared with the trainer's on what they sampled.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from rlreason.config.rollout import RolloutConfig  # noqa: E402
from rlreason.data.prompts import load_template, render  # noqa: E402
from rlreason.data.stories import make_stories  # noqa: E402
from rlreason.engines.base import Demand, Engine, Prompt, Sampling, seed_for  # noqa: E402
from rlreason.engines.hf.engine import HFEngine  # noqa: E402
from rlreason.engines.vllm.engine import VLLMEngine  # noqa: E402
from rlreason.engines.vllm.weight_transfer import InProcessTransfer  # noqa: E402
from rlreason.model.policy import Policy, load_policy  # noqa: E402
from rlreason.model.scoring import LogProbScorer  # noqa: E402
from rlreason.types import Response  # noqa: E402


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rows", type=int, default=256, help="samples decoded in one batch, at most")
    parser.add_argument("--cache-gb", type=float, help="of vLLM; left out: planned from rows and free memory")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine; the median is printed")
    return parser.parse_args()


def prompts_for(policy: Policy, count: int) -> list[Prompt]:
    """The prompts of `count` stories, with their seeds."""
    template = load_template("r1_zero.prompt", ROOT / "prompts")
    stories = make_stories(count, seed=0)
    return [
        Prompt(p.id, policy.encode_prompt(render(template, p.question)), seed_for("rollout", p.id)) for p in stories
    ]


def timed(engine: Engine, prompts: list[Prompt], sampling: Sampling, n: int) -> tuple[list[Response], float, float]:
    """(responses, wall seconds, processor seconds) of `n` samples per prompt."""
    wall, processor = time.monotonic(), time.process_time()
    responses = engine.generate(prompts, sampling, n)
    return responses, time.monotonic() - wall, time.process_time() - processor


def gaps(policy: Policy, responses: list[Response], temperature: float) -> tuple[float, float]:
    """Mean and largest |log p_engine - log p_trainer| over the tokens of up to 32 responses."""
    some = responses[:: max(1, len(responses) // 32)]
    scores = LogProbScorer(policy, temperature, 8192).log_probs([(r.prompt_ids, r.token_ids) for r in some])
    found = [abs(a - b) for r, s in zip(some, scores, strict=True) for a, b in zip(r.log_probs, s, strict=True)]
    return statistics.fmean(found), max(found)


def main() -> None:
    """Load the policy and both engines, and compare them."""
    args = arguments()
    torch.set_num_threads(args.threads)
    policy = load_policy(args.model, args.dtype)
    prompts, sampling = prompts_for(policy, args.prompts), Sampling(1.0, 0, args.max_tokens)
    longest = max(len(p.token_ids) for p in prompts)
    print(f"{policy.describe()}; torch {torch.__version__}")
    print(
        f"{args.prompts} prompts (longest {longest} tokens) x {args.samples} samples x {args.max_tokens} tokens at most"
    )
    with tempfile.TemporaryDirectory() as folder:
        log, room = Path(folder) / "vllm.log", longest + args.max_tokens
        rollout = RolloutConfig("vllm", max_rows=args.rows, kv_cache_gb=args.cache_gb)
        vllm = VLLMEngine(policy, rollout, InProcessTransfer(), log, Demand(room, args.rows))
        engines: dict[str, Engine] = {"hf": HFEngine(policy, args.rows), "vllm": vllm}
        try:
            compare(engines, policy, prompts, sampling, args)
        finally:
            vllm.close()


def compare(
    engines: dict[str, Engine], policy: Policy, prompts: list[Prompt], sampling: Sampling, args: argparse.Namespace
) -> None:
    """Print both engines' mismatch and speed."""
    for name, engine in engines.items():  # the first call of each warms it up
        mean, worst = gaps(policy, engine.generate(prompts[:4], sampling, args.samples), sampling.temperature)
        print(f"{name:5} |log p - trainer's|: mean {mean:.2g}, largest {worst:.2g} nats")
    speed: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(args.rounds):
        for name, engine in engines.items():
            engine.load_weights(policy)  # as after each step, so that no prompt is left in a cache
            responses, wall, processor = timed(engine, prompts, sampling, args.samples)
            tokens = sum(len(r.token_ids) for r in responses)
            speed[name].append((tokens / wall, tokens / processor))
            print(f"{name:5} {tokens} tokens in {wall:.1f} s ({processor:.1f} processor seconds)", flush=True)
    medians = {name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in speed.items()}
    print(f"\n{'engine':8}{'tokens/s':>12}{'ratio':>8}{'tokens/processor s':>22}{'ratio':>8}")
    for name, (wall, processor) in medians.items():
        base_wall, base_processor = medians["hf"]
        print(f"{name:8}{wall:12.0f}{wall / base_wall:8.2f}{processor:22.0f}{processor / base_processor:8.2f}")


if __name__ == "__main__":
    main()
