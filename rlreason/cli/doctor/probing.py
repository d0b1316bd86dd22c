"""Start the probes side by side, and wait for each within its time limit."""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rlreason.cli.doctor.findings import FAIL, DoctorFinding

KILLED_S = 2.0  # for a killed process to end; one stuck in the driver never does


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The facts that a probe printed before it ended, and how it ended."""

    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""  # "": it ended normally
    seconds: float = 0.0


class Probe:
    """A running probe: see `doctor.probe`."""

    def __init__(self, kind: str, settings: dict[str, Any] | None = None) -> None:
        self.began = time.monotonic()
        self.mark = secrets.token_hex(16)  # begins its lines; unknown to the libraries that it imports
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the probe is waited for
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rlreason.cli.doctor.probe",
                self.mark,
                kind,
                *([json.dumps(settings)] if settings else []),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": _path()},
            start_new_session=True,
        )

    def wait(self, patience_s: float) -> ProbeResult:
        """Return its result; a probe that has not ended `patience_s` seconds after its start is killed."""
        left = max(0.1, patience_s - (time.monotonic() - self.began))
        with self.errors:
            told, ended = self._output(left)
            facts, code = _facts(told, self.mark), self.process.returncode
            failure = facts.pop("error", "") or (self._crashed(code) if code else "")
        if not ended:
            failure = f"has not ended after {patience_s:g} s"
        return ProbeResult(facts, failure, time.monotonic() - self.began)

    def _output(self, left: float) -> tuple[bytes, bool]:
        try:
            return self.process.communicate(timeout=left)[0], True
        except subprocess.TimeoutExpired:
            self.kill()
        with suppress(subprocess.TimeoutExpired):
            return self.process.communicate(timeout=KILLED_S)[0], False
        return b"", False

    def kill(self) -> None:
        """Kill it with all its descendants."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _crashed(self, code: int) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:300]}" if lines else ""
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process ended by {name}{last}"


def _path() -> str:
    """Return the search path of modules, for processes that start in the same folder."""
    return os.pathsep.join(part or os.getcwd() for part in sys.path)


def _facts(told: bytes, mark: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in told.decode(errors="replace").splitlines():
        if line.startswith(mark):  # else a library printed it
            with suppress(ValueError):  # the last one may be cut off
                facts |= json.loads(line[len(mark) :])
    return facts


def probe_findings(name: str, found: ProbeResult, cure: str) -> list[DoctorFinding]:
    """Return the finding on a probe that failed; `cure`: what helps if nothing else is known."""
    if not found.failure:
        return []
    where = found.facts.get("reached")
    if found.failure.startswith("has not"):
        reached = f" (it got as far as {where})" if where else ""
        cure = "rlreason doctor --patience 180 ...; where that is not enough, look at the disk that it is installed on"
        return [DoctorFinding(name, FAIL, f"importing it {found.failure}{reached}", cure)]
    behind = f" (behind {where})" if where else ""
    if "torchvision" in found.failure:
        cure = "pip uninstall torchvision torchaudio torchcodec"
    return [DoctorFinding(name, FAIL, f"importing it fails: {found.failure}{behind}", cure)]
