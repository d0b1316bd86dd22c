"""What `rlreason doctor` looks at for the run of given settings: what it needs, what it will use, and its memory."""

from collections.abc import Sequence
from pathlib import Path

from rlreason.config.run import RunConfig
from rlreason.doctor.finding import FAIL, OK, WARN, Finding
from rlreason.doctor.look import Looked, gpus_of, libraries_of, seconds_of, under_way
from rlreason.doctor.machine import disk_findings, machine_findings, read_machine
from rlreason.doctor.probing import Found, Probe
from rlreason.doctor.settings import AskedRun
from rlreason.doctor.tested import VLLM
from rlreason.doctor.this_run import gpus_used, run_findings
from rlreason.doctor.versions import Installed
from rlreason.memory.machine import Device, asked_driver, processor, with_second
from rlreason.memory.shapes import shape_of
from rlreason.memory.words import cure, planned, verdict

STATES = {"fits": OK, "tight": WARN, "too large": FAIL, "unknown": WARN}


def look_at_run(asked: AskedRun, there: Installed, patience_s: float) -> Looked:
    """Libraries and machine as a run needs them, what it will use, and its memory."""
    from rlreason.setup.fits import assumed_prompt

    run, uses_vllm = asked.run, asked.run.rollout.engine == "vllm"
    with under_way(_probes(run, there)) as probes:
        driver = asked_driver()
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
    from rlreason.setup.preflight import missing_packages

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

    from rlreason.setup.space import RECORDS, space_needed

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
