"""What a run of these settings will use here, and why: device, engine, attention, weight sync, graders."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rlreason.config.run import RunConfig
from rlreason.doctor.finding import FAIL, OK, WARN, Finding
from rlreason.doctor.probing import Found
from rlreason.errors import ConfigError
from rlreason.setup.placement import engine_gpus, in_words, ranks_here

FAST = "rollout=vllm, which decodes several times faster on a GPU"


def run_findings(run: RunConfig, torch: Found, has_vllm: bool) -> list[Finding]:
    """`torch`: what torch's probe found; `has_vllm`: it is installed."""
    device = torch.facts.get("device")
    if device is None:  # the probe ended before it could tell, which a finding of its own says
        return [grader_finding(run)]
    return [
        device_finding(torch.facts),
        engine_finding(run, device, has_vllm, len(torch.facts.get("gpus") or [])),
        attention_finding(run, torch.facts),
        sync_finding(run, device, len(torch.facts.get("gpus") or [])),
        grader_finding(run),
    ]


def device_finding(facts: Mapping[str, Any]) -> Finding:
    """Where the model is computed, and in which precision."""
    if facts["device"] == "cuda":
        return Finding("device", OK, f"{facts['gpus'][0]['name']}, products in {facts['products']}")
    return Finding("device", OK, f"processor, products in {facts['products']}: torch sees no GPU")


def engine_finding(run: RunConfig, device: str, has_vllm: bool, gpus: int) -> Finding:
    """Which engine samples, where and why."""
    rollout = run.rollout
    if rollout.engine == "hf":
        words = "hf, in this process: needs nothing but transformers (rollout=auto takes vLLM where there is a GPU)"
        if run.model.made_on_the_spot:
            words = "hf, in this process: the built-in model is sampled there"
        elif device == "cuda":
            return Finding("engine", WARN, words, FAST + ("" if has_vllm else ", after pip install 'vllm>=0.26,<0.33'"))
        return Finding("engine", OK, words)
    if not has_vllm:
        cure = "pip install 'vllm>=0.26,<0.33' on a GPU machine; docs/vllm.md has the lines for one without"
        return Finding("engine", FAIL, "rollout=vllm, and vLLM is not installed", f"{cure}; or rollout=hf")
    return placed(rollout.placement, device, gpus, rollout.gpus, ranks_here(run))


def placed(placement: str, device: str, gpus: int = 0, engines: int = 1, ranks: int = 1) -> Finding:
    """Where vLLM runs; `gpus`: how many are visible; `ranks`: of the trainer.

    >>> placed("auto", "cpu").words, placed("second_gpu", "cpu").state
    ('vllm, in this process on the processor (rollout.placement=auto, and there is no GPU)', 'fail')
    """
    from rlreason.setup.preflight import too_few_gpus  # what a start asks, too

    if why := too_few_gpus(placement, gpus, engines, ranks):
        words, _, helps = why.rpartition(": ")
        return Finding("engine", FAIL, words, helps)
    if device != "cuda" and placement in ("colocate", "second_gpu"):
        words = f"rollout.placement={placement}, and the policy is not on a GPU"
        return Finding("engine", FAIL, words, "rollout.placement=auto")
    if device == "cuda" and placement == "cpu":
        words = "rollout.placement=cpu, and the policy is on the GPU, where vLLM belongs too"
        return Finding("engine", FAIL, words, "rollout.placement=auto")
    if engines > 1 or ranks > 1:
        return Finding("engine", OK, in_words(placement, engine_gpus(placement, engines, ranks, gpus), ranks))
    if placement == "second_gpu":
        return Finding("engine", OK, "vllm, in a process and on a GPU of its own (rollout.placement=second_gpu)")
    if device == "cuda":
        return Finding("engine", OK, f"vllm, in this process on the policy's GPU (rollout.placement={placement})")
    words = f"vllm, in this process on the processor (rollout.placement={placement}, and there is no GPU)"
    return Finding("engine", OK, words)


def gpus_used(run: RunConfig, visible: int) -> str:
    """Which of several GPUs the run uses, and for what; empty where it is the first alone."""
    rollout, ranks = run.rollout, ranks_here(run)
    trained = f"{_numbers(range(ranks))} for training (gpus={ranks})" if ranks > 1 else "0 for training"
    engines = list[int]()
    if rollout.engine == "vllm":
        with suppress(ConfigError):  # too few, which a finding of the engine says
            engines = engine_gpus(rollout.placement, rollout.gpus, ranks, visible)
    if not engines:
        return trained if ranks > 1 else ""
    if ranks == 1 and engines == [0]:
        return ""
    return (
        f"{trained}, {_numbers(engines)} for vLLM (rollout.gpus={rollout.gpus} rollout.placement={rollout.placement})"
    )


def _numbers(gpus: Sequence[int]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, gpus[:-1])), str(gpus[-1]))))


def attention_finding(run: RunConfig, facts: Mapping[str, Any]) -> Finding:
    """Which kernel computes attention in training."""
    if not facts["kernel"]:
        words, _, cure = str(facts["why"]).rpartition(": ")
        return Finding("attention", FAIL, words, cure)
    why = f"model.attention={run.model.attention}: {facts['why']}"
    meaning = {"sdpa": "sdpa, one call per sequence", "varlen": "varlen, torch's own kernel for packed sequences"}
    return Finding("attention", OK, f"{meaning.get(facts['kernel'], facts['kernel'])} ({why})")


def sync_finding(run: RunConfig, device: str, gpus: int) -> Finding:
    """How new weights reach the engine."""
    rollout = run.rollout
    if rollout.engine == "hf":
        return Finding("weight sync", OK, "none: the engine samples from the very weights that are trained")
    if rollout.placement == "second_gpu":
        if gpus < 2:
            words = "NCCL, to vLLM's process on a second GPU, which is not here"
            return Finding("weight sync", FAIL, words, "rollout.placement=auto")
        return Finding(
            "weight sync", OK, "NCCL, to vLLM's process on the second GPU; digests of the weights are compared"
        )
    how = "copied within this process after each update and compared bit by bit"
    if device == "cuda" and rollout.sleep:
        how += "; vLLM's memory is given to training in between (rollout.sleep=true)"
    return Finding("weight sync", OK, how)


def grader_finding(run: RunConfig) -> Finding:
    """Who grades."""
    workers, memory = run.grading.workers, run.grading.memory_mb
    several = "processes" if workers > 1 else "process"
    own = run.prompt.reward if ":" in run.prompt.reward else "answers that the exact rules cannot decide"
    return Finding("grader", OK, f"{workers} {several} of at most {memory} MB for {own}")
