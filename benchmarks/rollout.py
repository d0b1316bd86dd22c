"""Tokens per processor second of `rollout=hf`, transformers' `generate` and vLLM on the same prompts, in one run.

`python benchmarks/rollout.py --model DIR --dtype bfloat16 [--peers transformers,vllm] [--json FILE]`

Every side writes exactly --max-tokens tokens for each sample, with one thread unless --threads says otherwise; the
sides take turns, so that other programs slow all alike. Before any speed counts, the work must be equal: the same
number of tokens within 2%, and the same mean log-probability and entropy of the first token (vLLM's are compared with
the trainer's by its own weight check). Processor seconds are those of this process, all threads together: on a busy
machine they vary less than wall time.

In bfloat16 each peer has what serves it best, a copy of the weights in bfloat16; ours multiplies in bfloat16 from the
trainer's float32 weights, head excepted.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
import torch  # noqa: E402

from rlreason.config.groups import RolloutConfig  # noqa: E402
from rlreason.config.leaves import prompt_renderer  # noqa: E402
from rlreason.data.tasks import make_stories  # noqa: E402
from rlreason.engines.base import Demand, Prompt, Sampling, seed_for  # noqa: E402
from rlreason.engines.hf import HFEngine  # noqa: E402
from rlreason.model.policy import Policy, load_policy  # noqa: E402

PEERS = ("transformers", "vllm")
#: How far first-token means may lie apart, in nats: float32 rounding, and what bfloat16 weights do to a distribution.
AGREE = {torch.float32: 2e-3, torch.bfloat16: 0.1}


@dataclass(frozen=True, slots=True)
class Written:
    """What one turn of a side wrote."""

    responses: list[list[int]]  # token ids, prompt by prompt, --samples of each


Write = Callable[[Sampling], Written]


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder, or tiny")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--peers", default=",".join(PEERS), help="of transformers,vllm; empty: ours alone")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=4, help="of each prompt")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each side; medians are printed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser.parse_args()


def load(args: argparse.Namespace) -> Policy:
    """The policy: a model folder's, or the built-in tiny Llama with weights as they are drawn."""
    if args.model != "tiny":
        return load_policy(args.model, args.dtype)
    from rlreason.model.parameters import build_model, build_tokenizer

    tokenizer = build_tokenizer([story.question for story in make_stories(400, seed=0)])
    return Policy(build_model(len(tokenizer)), tokenizer, getattr(torch, args.dtype))


def prompts_for(policy: Policy, count: int) -> list[Prompt]:
    """The prompts of `count` stories, with their seeds."""
    render = prompt_renderer("r1_zero.prompt")
    stories = make_stories(count, seed=0)
    return [Prompt(p.id, policy.encode_prompt(render(p.question)), seed_for("rollout", p.id)) for p in stories]


def ours(policy: Policy, prompts: list[Prompt], n: int) -> Write:
    """The in-process engine."""
    engine = HFEngine(policy)
    return lambda sampling: Written([r.token_ids for r in engine.generate(prompts, sampling, n)])


def transformers(policy: Policy, prompts: list[Prompt], n: int) -> Write:
    """`generate` on left-padded prompts, with its default cache and sdpa."""
    model = copy.deepcopy(policy.model).to(policy.compute_dtype)
    model.set_attn_implementation("sdpa")
    pad = policy.tokenizer.eos_token_id
    rows = [p.token_ids for p in prompts for _ in range(n)]
    width = max(map(len, rows))
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])

    def write(sampling: Sampling) -> Written:
        tokens = {"min_new_tokens": sampling.min_tokens, "max_new_tokens": sampling.max_tokens, "pad_token_id": pad}
        with torch.inference_mode():
            out = model.generate(input_ids=ids, attention_mask=mask, do_sample=True, top_k=0, top_p=1.0, **tokens)
        return Written(out[:, width:].tolist())

    return write


def processor_seconds() -> float:
    """Of this process and of those that it has started: vLLM samples in one of its own."""
    me = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (me, *me.children(recursive=True)))


def compare(sides: dict[str, Write], args: argparse.Namespace) -> dict[str, list[tuple[float, float, int]]]:
    """(wall seconds, processor seconds, tokens) of every turn, after a short one of each that warms it up."""
    sampling = Sampling(1.0, args.max_tokens, args.max_tokens)
    for write in sides.values():
        write(Sampling(1.0, 2, 2))
    turns: dict[str, list[tuple[float, float, int]]] = {name: [] for name in sides}
    for _ in range(args.rounds):
        for name, write in sides.items():
            wall, processor = time.monotonic(), processor_seconds()
            written = write(sampling)
            wall, processor = time.monotonic() - wall, processor_seconds() - processor
            tokens = sum(map(len, written.responses))
            turns[name].append((wall, processor, tokens))
            print(f"{name:13} {tokens} tokens, {processor:.2f} processor seconds ({wall:.1f} s)", flush=True)
    return turns


def check_tokens(turns: dict[str, list[tuple[float, float, int]]]) -> None:
    """`SystemExit` where a side wrote another number of tokens."""
    most, least = (f(tokens for rows in turns.values() for *_, tokens in rows) for f in (max, min))
    if most > 1.02 * least:
        raise SystemExit(f"the sides wrote between {least} and {most} tokens, which is not the same work")


@torch.inference_mode()
def first_step(policy: Policy, prompts: list[Prompt], model: torch.nn.Module | None) -> tuple[float, float]:
    """Mean log-probability of the likeliest first token, and mean entropy, in nats: of `model`, or of our engine."""
    if model is None:
        best = [r.log_probs[0] for r in HFEngine(policy).generate(prompts, Sampling(0.0, 0, 1), 1)]
        with policy.autocast():
            hidden = [policy.backbone(input_ids=torch.tensor([p.token_ids])).last_hidden_state[0, -1] for p in prompts]
        log_probs = policy.logits(torch.stack(hidden)).log_softmax(-1)
        return statistics.fmean(best), float(-(log_probs.exp() * log_probs).sum(-1).mean())
    rows = [model(input_ids=torch.tensor([p.token_ids])).logits[0, -1].float() for p in prompts]
    log_probs = torch.stack(rows).log_softmax(-1)
    return float(log_probs.amax(-1).mean()), float(-(log_probs.exp() * log_probs).sum(-1).mean())


def check_first_step(policy: Policy, prompts: list[Prompt]) -> dict[str, tuple[float, float]]:
    """`SystemExit` where our engine and the model's own forward pass begin with other distributions."""
    plain = copy.deepcopy(policy.model).to(policy.compute_dtype)
    plain.set_attn_implementation("sdpa")
    found = {"ours": first_step(policy, prompts, None), "transformers": first_step(policy, prompts, plain)}
    apart = max(abs(a - b) for a, b in zip(*found.values(), strict=True))
    if not apart < AGREE[policy.compute_dtype]:
        raise SystemExit(f"first tokens have log-probability and entropy {found}: not the same distribution")
    return found


def report(turns: dict[str, list[tuple[float, float, int]]]) -> dict[str, dict[str, float]]:
    """Print and return the medians: tokens per processor second and per second, and ours against each peer."""
    speed = {
        name: {
            "tokens_per_processor_second": statistics.median(tokens / processor for _, processor, tokens in rows),
            "tokens_per_second": statistics.median(tokens / wall for wall, _, tokens in rows),
        }
        for name, rows in turns.items()
    }
    print(f"\n{'side':14}{'tokens/processor s':>20}{'tokens/s':>12}{'ours/side':>12}")
    for name, row in speed.items():
        rate = row["tokens_per_processor_second"]
        row["ours_over_side"] = speed["ours"]["tokens_per_processor_second"] / rate
        print(f"{name:14}{rate:20.0f}{row['tokens_per_second']:12.0f}{row['ours_over_side']:12.2f}")
    return speed


def main() -> None:
    """Load every side, compare, print, and write the figures down."""
    args = arguments()
    torch.set_num_threads(args.threads)
    peers = [peer for peer in args.peers.split(",") if peer]
    if unknown := set(peers) - set(PEERS):
        raise SystemExit(f"--peers {','.join(sorted(unknown))}: not known; choose of {','.join(PEERS)}")
    policy = load(args)
    prompts = prompts_for(policy, args.prompts)
    print(f"{policy.describe()}; torch {torch.__version__}")
    print(f"{args.prompts} prompts x {args.samples} samples x {args.max_tokens} tokens")
    first = check_first_step(policy, prompts)
    sides: dict[str, Write] = {"ours": ours(policy, prompts, args.samples)}
    if "transformers" in peers:
        sides["transformers"] = transformers(policy, prompts, args.samples)
    with tempfile.TemporaryDirectory() as folder:
        close = add_vllm(sides, policy, prompts, args, Path(folder)) if "vllm" in peers else None
        try:
            turns = compare(sides, args)
        finally:
            if close is not None:
                close()
    check_tokens(turns)
    figures = {"settings": vars(args), "first_step": first, "turns": turns, "medians": report(turns)}
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2, default=str) + "\n")


def add_vllm(
    sides: dict[str, Write], policy: Policy, prompts: list[Prompt], args: argparse.Namespace, folder: Path
) -> Callable[[], None]:
    """Start vLLM as a run does, which compares its log-probabilities with the trainer's; how to stop it."""
    from rlreason.engines.build import places_of
    from rlreason.engines.vllm import VLLMEngine

    longest, rows = max(len(p.token_ids) for p in prompts) + args.max_tokens, args.prompts * args.samples
    rollout = RolloutConfig("vllm", max_rows=rows)
    places = places_of(rollout, policy.device.type, ranks=1)
    engine = VLLMEngine(policy, rollout, places, folder, Demand(longest, rows))

    def write(sampling: Sampling) -> Written:
        return Written([r.token_ids for r in engine.generate(prompts, sampling, args.samples)])

    engine.load_weights(policy)
    sides["vllm"] = write
    return engine.close


if __name__ == "__main__":
    main()
