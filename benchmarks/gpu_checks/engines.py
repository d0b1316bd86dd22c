"""vLLM beside the trainer: parity, sleeping and waking, hand-overs, a GPU of its own."""

import statistics

import torch

from gpu_checks.common import Asked, Found, change_weights, imitated, make_vllm, mismatch, prompts_for, used_gb
from rlreason.config.training import OptimizationConfig
from rlreason.engines.base import Sampling
from rlreason.engines.hf import HFEngine
from rlreason.engines.vllm_server import mismatch_bound
from rlreason.model.policy import load_policy
from rlreason.objectives.objective import Objective
from rlreason.training.learner import Learner

ROUNDS = 20
GROWTH_ALLOWED = 0.1  # GB between an early and the last round; the first rounds still fill allocators


def parity_float32(asked: Asked) -> Found:
    """hf and vllm side by side in float32, with IEEE products in vLLM's attention."""
    return _parity(asked, "float32")


def parity_bfloat16(asked: Asked) -> Found:
    """hf and vllm side by side in bfloat16, the trainer's head as vLLM's."""
    return _parity(asked, "bfloat16")


def _parity(asked: Asked, dtype: str) -> Found:
    half = dtype == "bfloat16"
    policy = load_policy(asked.model, dtype, head_dtype=torch.bfloat16 if half else torch.float32)
    engine, ok, figures = make_vllm(policy, asked.folder / dtype), True, {}
    for temperature in (1.0,) if asked.quick else (0.7, 1.0, 1.3):
        ours, theirs = (mismatch(e, policy, temperature, asked.times(32)) for e in (HFEngine(policy), engine))
        bound = max(mismatch_bound(policy.compute_dtype) / 5, 2 * ours)
        ok &= theirs <= bound
        figures[f"T={temperature}"] = {"hf": ours, "vllm": theirs, "bound": bound}
    engine.close()
    worst = max(figures.values(), key=lambda row: row["vllm"] / row["bound"])
    words = "mean mismatch of vllm {vllm:.2g} nats a token, of hf {hf:.2g} (bound {bound:.2g})".format(**worst)
    return Found(ok, words, figures)


def sleep(asked: Asked) -> Found:
    """Rounds of generate, sleep, wake, weight sync: memory in use must not grow."""
    policy = load_policy(asked.model)
    engine = make_vllm(policy, asked.folder / "sleep", sleep=True)
    prompts, awake, asleep, seconds = prompts_for(policy, asked.times(32)), [], [], []
    rounds = max(6, asked.times(ROUNDS))
    for _ in range(rounds):
        engine.generate(prompts, Sampling(1.0, 0, 32), 4)
        asleep.append(used_gb())
        change_weights(policy)
        seconds.append(engine.load_weights(policy)["time/weight_sync"])
        awake.append(used_gb())
    engine.close()
    growth = awake[-1] - awake[4]
    figures = {"rounds": rounds, "growth_gb": growth, "awake_gb": awake[-1], "asleep_gb": asleep[-1]}
    figures |= {"closed_gb": used_gb(), "sync_s": statistics.median(seconds), "slowest_sync_s": max(seconds)}
    words = "{rounds} rounds: {growth_gb:+.3f} GB; {awake_gb:.2f} GB awake, {asleep_gb:.2f} asleep; sync {sync_s:.2f} s"
    return Found(growth < GROWTH_ALLOWED, words.format(**figures), figures)


def hand_overs(asked: Asked) -> Found:
    """Updates of SFT, each followed at once by a hand-over to an engine that never sleeps; each is attested."""
    policy = load_policy(asked.model)
    engine = make_vllm(policy, asked.folder / "hand_overs")
    learner = Learner(policy, Objective(), OptimizationConfig(1e-5))
    samples, gaps, rounds = imitated(policy, 8, 24, 40), [], asked.times(ROUNDS)
    for _ in range(rounds):
        learner.update(samples, mismatch_from=None)  # nothing after the step waits for the GPU
        gaps.append(engine.load_weights(policy)["rollout/weight_check_mismatch"])  # raises where they differ
    engine.close()
    words = f"{rounds} hand-overs after an update each, all attested; largest mismatch {max(gaps):.2g} nats"
    return Found(True, words, {"rounds": rounds, "largest_mismatch": max(gaps)})


def second_gpu(asked: Asked) -> Found:
    """An engine on a GPU of its own: hand-overs, the mismatch after them, and its end."""
    gpus = torch.cuda.device_count()
    if gpus == 1:
        return Found(None, "left out: one GPU is here, and it takes two")
    policy, seconds, checks = load_policy(asked.model), [], []
    engine = make_vllm(policy, asked.folder / "second_gpu", placement="second_gpu" if gpus else "cpu")
    for _ in range(asked.times(ROUNDS)):
        change_weights(policy)
        metrics = engine.load_weights(policy)  # raises where the weight check fails
        seconds.append(metrics["time/weight_sync"])
        checks.append(metrics["time/weight_check"])
    theirs, bound = mismatch(engine, policy, 1.0, asked.times(32)), mismatch_bound(policy.compute_dtype) / 5
    engine.close()
    left = sum(process.process.poll() is None for process in engine.processes)
    figures = {"rounds": len(seconds), "sync_s": statistics.median(seconds), "check_s": statistics.median(checks)}
    figures |= {"mismatch": theirs, "bound": bound, "processes_left": left, "by": engine.processes[0].place.transfer}
    words = "{rounds} hand-overs by {by}, {sync_s:.2f} s and {check_s:.2f} s of checking; mismatch {mismatch:.2g}"
    return Found(theirs <= bound and not left, words.format(**figures), figures)
