"""What `rlreason doctor` looks at, for this machine and for the run of given settings."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlreason.cli.doctor.findings import (
    FAIL,
    OK,
    TESTED,
    VLLM,
    WARN,
    Finding,
    Installed,
    package_finding,
    version_findings,
)
from rlreason.cli.doctor.machine import disk_findings, gpu_findings, machine_findings, read_machine
from rlreason.cli.doctor.probing import Found, Probe, probe_findings
from rlreason.config.run import AnyRunConfig, RunConfig, works_on_a_model
from rlreason.engines.placement import describe_placement, engine_gpus, ranks_here
from rlreason.errors import ConfigError
from rlreason.model.savings import cure, planned, verdict
from rlreason.model.shapes import Device, Driver, processor, query_driver, shape_of, with_second

if TYPE_CHECKING:
    from rlreason.model.savings import Planned


NO_SETTINGS = {"dtype": "auto", "weights": "float32", "attention": "auto"}


class Looked(NamedTuple):
    """The findings by section, the memory plan if there is a run, and the seconds that each import took."""

    sections: dict[str, list[Finding]]
    plan: "Planned | None"
    seconds: dict[str, float]


@contextmanager
def under_way(probes: dict[str, Probe]) -> Iterator[dict[str, Probe]]:
    """Probes, of which none is left behind."""
    try:
        yield probes
    finally:
        for probe in probes.values():
            if probe.process.poll() is None:
                probe.kill()


def look_at_machine(there: Installed, unread: str, patience_s: float) -> Looked:
    """What can be said where the settings cannot be read because a library is broken; `unread`: how that shows."""
    with under_way({"torch": Probe("torch", NO_SETTINGS)}) as probes:
        driver, results = query_driver(), {name: probe.wait(patience_s) for name, probe in probes.items()}
    lost = Finding("settings", FAIL, f"cannot be read: {unread}", "mend the libraries above first")
    sections = {
        "libraries": libraries_of(there, results, ()),
        "machine": [*gpus_of(results["torch"], driver), *machine_findings(read_machine(), uses_vllm=False)],
        "this run": [lost],
    }
    return Looked(sections, None, seconds_of(results))


def libraries_of(
    there: Installed, results: dict[str, Found], wanted: Sequence[str], idle: Mapping[str, str] | None = None
) -> list[Finding]:
    """Versions and pairs, and what the imports that were tried came to.

    `wanted`: packages that the run needs; `idle`: others, and why they are not needed.
    """
    of_imports = [one for name, found in results.items() for one in probe_findings(name, found, _cure(name, there))]
    return [*version_findings(there, wanted, idle), *of_imports]


def _cure(name: str, there: Installed) -> str:
    """What helps where a package cannot be imported: a version of the range, or the same one again."""
    own = next((one for one in (VLLM if name == "vllm" else (name,)) if one in there.versions), None)
    if own is None or package_finding(name, own, there.versions[own]).state != OK:
        return TESTED[name].cure
    again = f"pip install --force-reinstall --no-deps '{own}=={there.versions[own]}'"
    return again if name == "torch" else f"{again}, or the torch that it was built for"


def gpus_of(torch: Found, driver: Driver, used: str = "") -> list[Finding]:
    """GPUs, by torch and by the driver."""
    has_driver = shutil.which("nvidia-smi") is not None
    return gpu_findings(torch.facts, driver, os.environ.get("CUDA_VISIBLE_DEVICES"), has_driver, used)


def seconds_of(results: dict[str, Found]) -> dict[str, float]:
    """How long each import took."""
    return {name: round(found.seconds, 1) for name, found in results.items()}


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
    from rlreason.training.preflight import too_few_gpus  # what a start asks, too

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
        return Finding("engine", OK, describe_placement(placement, engine_gpus(placement, engines, ranks, gpus), ranks))
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


class AskedRun(NamedTuple):
    """A run and the folder that it would write to."""

    run: RunConfig
    folder: Path


def asked_run(words: Sequence[str], subcommand: str, note: Callable[[str], object]) -> AskedRun:
    """The run of these words, composed and checked as a start would; `ConfigError` in one line for a mistake.

    What only a start refuses (a missing package, a full disk) is left to findings. `subcommand`: named in messages.
    """
    from rlreason.cli.aliases import translated
    from rlreason.cli.check import checked, place_of, quoted
    from rlreason.cli.flags import composing, read, without_sweep_words
    from rlreason.cli.mistakes import in_one_line, mistakes_in
    from rlreason.cli.options import refuse_wrong_choices
    from rlreason.config.store import register

    with mistakes_in(words):
        if wrong := next((word for word in words if "=" not in word and not word.startswith(("~", "-"))), None):
            raise ConfigError(f"{wrong} is no setting of a run: write rlreason {subcommand} key=value ...")
        register()
        asked = read(words)
        if asked.multirun or not asked.starts:
            raise ConfigError(
                f"rlreason {subcommand} looks at one run: leave the flags out, and give each setting one value"
            )
        with composing(asked), in_one_line(asked.overrides, asked.config_name):
            rest, _ = without_sweep_words(asked.overrides, False)
            overrides = translated(quoted(rest, False), note)
            refuse_wrong_choices(overrides)
            run: AnyRunConfig = checked(overrides, asked.config_name)
            folder = place_of(overrides, asked.config_name, "run")
    if not works_on_a_model(run):
        raise ConfigError(
            f"rlreason {subcommand} is about runs that load a model here, and algorithm={run.algorithm} loads none"
        )
    return AskedRun(run, folder)


STATES = {"fits": OK, "tight": WARN, "too large": FAIL, "unknown": WARN}


def look_at_run(asked: AskedRun, there: Installed, patience_s: float) -> Looked:
    """Libraries and machine as a run needs them, what it will use, and its memory."""
    from rlreason.training.fits import assumed_prompt

    run, uses_vllm = asked.run, asked.run.rollout.engine == "vllm"
    with under_way(_probes(run, there)) as probes:
        driver = query_driver()
        results = {name: probe.wait(patience_s) for name, probe in probes.items()}
    torch, model = results["torch"], results.pop("model", None)
    told = planned(run, _device(torch, driver.gpus), assumed_prompt(run))
    wanted = ["flash-attn"] * (run.model.attention == "flash_attention_2") + ["vllm"] * uses_vllm
    idle = {
        "flash-attn": f"model.attention={run.model.attention} takes torch's own kernels",
        "vllm": "the run samples in this process",
    }
    memory = Finding("memory", STATES[told.verdict], verdict(told), cure(told))
    has_vllm = any(name in there.versions for name in VLLM)
    machine = [
        *gpus_of(torch, driver, gpus_used(run, len(torch.facts.get("gpus") or []))),
        *machine_findings(read_machine(), uses_vllm),
        *_disk(asked),
    ]
    sections = {
        "libraries": [*libraries_of(there, results, wanted, idle), *packages(run)],
        "machine": machine,
        "this run": [*run_findings(run, torch, has_vllm), *weight_findings(model), memory],
    }
    return Looked(sections, told, seconds_of(results))


def _probes(run: RunConfig, there: Installed) -> dict[str, Probe]:
    """The imports that are tried: what every run needs, what is broken more often than not, and this run's engine."""
    settings = {"dtype": run.model.dtype, "weights": run.model.weights, "attention": run.model.attention}
    found = {"torch": Probe("torch", settings)}
    if "flash-attn" in there.versions:
        found["flash-attn"] = Probe("flash_attn")
    if run.rollout.engine == "vllm" and any(name in there.versions for name in VLLM):
        found["vllm"] = Probe("vllm")
    if (folder := run.model.folder) and (Path(folder).is_dir() or is_cached(folder)):
        found["model"] = Probe("model", {"path": folder})
    return found


def weight_findings(looked: Found | None) -> list[Finding]:
    """Whether the weights are those of the model; nothing where it is made on the spot or not downloaded yet."""
    if looked is None:
        return []
    if refused := looked.facts.get("refused"):
        words, _, helps = refused.rpartition(": ")
        return [Finding("weights", FAIL, words, helps)]
    if looked.failure:
        return [Finding("weights", WARN, f"cannot be looked at: {looked.failure}", "start the run, which says more")]
    return [Finding("weights", OK, looked.facts["holds"])]


def packages(run: RunConfig) -> list[Finding]:
    """Packages that the settings ask for and that are missing; vLLM has findings of its own."""
    from rlreason.training.preflight import missing_packages

    found = []
    for line in missing_packages(run):
        words, _, helps = line.partition(": ")
        if not words.startswith("rollout=vllm"):
            found.append(Finding("packages", FAIL, words, helps))
    return found


def _device(torch: Found, driver: Sequence[Device]) -> Device:
    """Where the run computes; where torch could not tell, as the driver says."""
    if gpus := torch.facts.get("gpus"):
        return with_second([Device("cuda", one["name"], one["free"], one["total"], one["bf16"]) for one in gpus])
    return with_second(list(driver)) if driver and "cuda" not in torch.facts else processor()


def _disk(asked: AskedRun) -> list[Finding]:
    from huggingface_hub import constants

    from rlreason.training.preflight import RECORDS, space_needed

    run, folder = asked.run, asked.run.model.folder
    download = 0
    if folder and not Path(folder).is_dir() and not is_cached(folder):
        shape = shape_of(run.model).shape
        download = 2 * shape.numbers if shape else 0
    space = space_needed(run)
    writes = RECORDS + space.model, RECORDS + space.peak
    return disk_findings(asked.folder, writes, Path(constants.HF_HUB_CACHE), download)


def is_cached(name: str) -> bool:
    """Whether a model's config and its weights have been downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    weights = ("model.safetensors", "model.safetensors.index.json")
    try:
        there = [isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", *weights)]
    except HFValidationError:
        return False
    return there[0] and any(there[1:])
