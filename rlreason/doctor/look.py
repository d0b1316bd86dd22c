"""What `rlreason doctor` looks at in any case, whether settings can be read or not: libraries, GPUs, the machine.

Nothing here, nor in what it imports, loads Hydra or OmegaConf: they may be what is broken.
"""

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rlreason.doctor.finding import FAIL, OK, Finding
from rlreason.doctor.gpus import gpu_findings
from rlreason.doctor.machine import machine_findings, read_machine
from rlreason.doctor.probing import Found, Probe, probe_findings
from rlreason.doctor.tested import TESTED, VLLM
from rlreason.doctor.versions import Installed, package_finding, version_findings
from rlreason.memory.machine import Driver, asked_driver

if TYPE_CHECKING:
    from rlreason.memory.words import Planned

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
        driver, results = asked_driver(), {name: probe.wait(patience_s) for name, probe in probes.items()}
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
