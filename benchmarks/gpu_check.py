"""What only a GPU can show of rollout=vllm, in one command: `python benchmarks/gpu_check.py --model DIR`.

1. hf and vllm side by side: train-inference mismatch, in float32 and bfloat16.
2. Twenty rounds of generate, sleep, wake, weight sync: seconds of each sync, and memory in use, which must not grow.
3. vLLM in a process and on a GPU of its own (`rollout.placement=second_gpu`), where there are two: twenty weight syncs,
   each verified, and the mismatch after them.
4. Two short GRPO runs, `rollout.async_level=0` and `1`: seconds per step.

Exits with 1 when a check fails. It has not been run on a GPU yet; without one it prints that and does the first three
on the CPU, where sleeping frees no memory and weights reach the other process through a memory file.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil  # noqa: E402
import torch  # noqa: E402

from rlreason.config.rollout import RolloutConfig  # noqa: E402
from rlreason.engines.base import Demand, Engine, Prompt, Sampling, seed_for  # noqa: E402
from rlreason.engines.hf.engine import HFEngine  # noqa: E402
from rlreason.engines.vllm.engine import VLLMEngine  # noqa: E402
from rlreason.engines.vllm.process import NCCLTransfer, engine_processes  # noqa: E402
from rlreason.engines.vllm.weight_transfer import InProcessTransfer, WeightTransfer  # noqa: E402
from rlreason.engines.weight_check import mismatch_bound  # noqa: E402
from rlreason.model.policy import Policy, load_policy  # noqa: E402
from rlreason.model.scoring import LogProbScorer  # noqa: E402

ROUNDS = 20
GROWTH_ALLOWED = 0.1  # GB between the fifth and the last round; the first rounds still fill allocators


def used_gb() -> float:
    """GPU memory in use by all processes; without a GPU, this process's main memory."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**30
    return psutil.Process().memory_info().rss / 2**30


def prompts_for(policy: Policy, count: int = 32) -> list[Prompt]:
    """`count` different prompts with their seeds."""
    texts = [f"Question: What is {i} + {2 * i + 3}? Let us think step by step." for i in range(count)]
    return [Prompt(str(i), policy.encode_prompt(text), seed_for("gpu check", i)) for i, text in enumerate(texts)]


def make_vllm(policy: Policy, transfer: WeightTransfer, log: Path, sleep: bool = False) -> VLLMEngine:
    return VLLMEngine(policy, RolloutConfig("vllm", sleep=sleep, kv_cache_gb=2), transfer, log, Demand(512, 128))


def mismatch(engine: Engine, policy: Policy, temperature: float) -> float:
    """Mean |log p_engine - log p_trainer|, nats per sampled token."""
    responses = engine.generate(prompts_for(policy), Sampling(temperature, 0, 64), 4)
    scores = LogProbScorer(policy, temperature, 8192).log_probs([(r.prompt_ids, r.token_ids) for r in responses])
    pairs = zip(responses, scores, strict=True)
    return statistics.fmean(abs(a - b) for r, score in pairs for a, b in zip(r.log_probs, score, strict=True))


def check_mismatch(model: str, dtype: str, log: Path) -> bool:
    """Whether vllm's mismatch is within the bound, or at most twice that of hf, at three temperatures."""
    policy, ok = load_policy(model, dtype), True
    engine = make_vllm(policy, InProcessTransfer(), log)
    for temperature in (0.7, 1.0, 1.3):
        ours, theirs = (mismatch(e, policy, temperature) for e in (HFEngine(policy), engine))
        bound = max(mismatch_bound(policy.compute_dtype) / 5, 2 * ours)
        ok &= theirs <= bound
        print(f"{dtype:9} T={temperature}: mean mismatch, hf {ours:.2g}, vllm {theirs:.2g} (bound {bound:.2g})")
    engine.close()
    return ok


def change_weights(policy: Policy) -> None:
    """A small change of every weight, in place of an optimizer step."""
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.0001)


def check_sleep(model: str, log: Path) -> bool:
    """Whether memory in use stays the same over rounds of sleeping and waking."""
    policy = load_policy(model)
    engine = make_vllm(policy, InProcessTransfer(), log, sleep=True)
    prompts, memory, asleep, seconds = prompts_for(policy), [], [], []
    for _ in range(ROUNDS):
        engine.generate(prompts, Sampling(1.0, 0, 32), 4)
        asleep.append(used_gb())
        change_weights(policy)
        seconds.append(engine.load_weights(policy)["time/weight_sync"])
        memory.append(used_gb())
    engine.close()
    growth = memory[-1] - memory[4]
    print(f"{ROUNDS} rounds: weight sync {statistics.median(seconds):.2f} s (largest {max(seconds):.2f})")
    print(f"GB in use: {memory[-1]:.2f} awake, {asleep[-1]:.2f} asleep, {used_gb():.2f} closed; growth {growth:+.3f}")
    return growth < GROWTH_ALLOWED


def check_process(model: str, log: Path) -> bool:
    """Whether an engine in a process of its own gets every weight sync, and ends with its process."""
    from host_transport import HostTransfer  # imports vLLM

    policy, seconds, checks = load_policy(model), [], []
    transfer = NCCLTransfer() if torch.cuda.is_available() else HostTransfer()
    engine = make_vllm(policy, transfer, log)
    for _ in range(ROUNDS):
        change_weights(policy)
        metrics = engine.load_weights(policy)  # raises when the weight check fails
        seconds.append(metrics["time/weight_sync"])
        checks.append(metrics["time/weight_check"])
    theirs, bound = mismatch(engine, policy, 1.0), mismatch_bound(policy.compute_dtype) / 5
    engine.close()
    print(f"own process, {transfer.backend}: {ROUNDS} weight syncs of {statistics.median(seconds):.2f} s and", end=" ")
    print(f"{statistics.median(checks):.2f} s of checking; mean mismatch {theirs:.2g} (bound {bound:.2g})")
    return theirs <= bound and not engine_processes()


def time_async(model: str, folder: Path) -> bool:
    """Seconds per step of two short runs; whether both ran."""
    for steps in (0, 1):
        run = folder / f"async_{steps}"
        chosen = ["model=local", f"model.path={model}", "rollout=vllm", "rollout.sleep=false", "data=stories"]
        sizes = [f"rollout.async_level={steps}", "n_steps=6", "eval_problems=16", f"hydra.run.dir={run}"]
        command = [sys.executable, "-m", "rlreason", *chosen, *sizes]
        if subprocess.run(command, cwd=ROOT).returncode:
            return False
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        ends = [row["time/total"] for row in rows if "train_step" in row]
        seconds = statistics.median(b - a for a, b in pairwise(ends))
        print(f"rollout.async_level={steps}: {seconds:.2f} s per step")
    return True


def main() -> None:
    """Run the checks; exit code 1 where one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder")
    model = str(Path(parser.parse_args().model).resolve())
    gpu = torch.cuda.is_available()
    print(torch.cuda.get_device_name() if gpu else "no GPU here: the CPU, and no fourth check")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checks = {
            "mismatch float32": lambda: check_mismatch(model, "float32", folder / "float32.log"),
            "mismatch bfloat16": lambda: check_mismatch(model, "bfloat16", folder / "bfloat16.log"),
            "sleep": lambda: check_sleep(model, folder / "sleep.log"),
        }
        if torch.cuda.device_count() != 1:
            checks["own process"] = lambda: check_process(model, folder / "process.log")
        if gpu:
            checks["async"] = lambda: time_async(model, folder)
        failed = [name for name, check in checks.items() if not check()]
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
