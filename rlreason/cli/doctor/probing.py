"""Start the probes side by side, and wait for each no longer than it may take."""

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

from rlreason.cli.doctor.findings import FAIL, Finding

KILLED_S = 2.0  # that a killed process may take to go; one that the driver holds may never


@dataclass(frozen=True, slots=True)
class Found:
    """What a probe found before it ended, and how that was."""

    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""  # empty: it came to its end
    seconds: float = 0.0


class Probe:
    """A probe under way: see `doctor.probe`."""

    def __init__(self, kind: str, settings: dict[str, Any] | None = None) -> None:
        self.began = time.monotonic()
        self.mark = secrets.token_hex(16)  # begins its lines: the libraries that it imports cannot know it
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

    def wait(self, patience_s: float) -> Found:
        """What it found. A probe that has not ended `patience_s` seconds after its start is killed."""
        left = max(0.1, patience_s - (time.monotonic() - self.began))
        with self.errors:
            told, ended = self._output(left)
            facts, code = _facts(told, self.mark), self.process.returncode
            failure = facts.pop("error", "") or (self._crashed(code) if code else "")
        if not ended:
            failure = f"has not ended after {patience_s:g} s"
        return Found(facts, failure, time.monotonic() - self.began)

    def _output(self, left: float) -> tuple[bytes, bool]:
        try:
            return self.process.communicate(timeout=left)[0], True
        except subprocess.TimeoutExpired:
            self.kill()
        with suppress(subprocess.TimeoutExpired):
            return self.process.communicate(timeout=KILLED_S)[0], False
        return b"", False

    def kill(self) -> None:
        """End it with everything that it has started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def _crashed(self, code: int) -> str:
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:300]}" if lines else ""
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the process ended by {name}{last}"


def _path() -> str:
    """Where Python looks for modules here, for processes that begin in the same folder."""
    return os.pathsep.join(part or os.getcwd() for part in sys.path)


def _facts(told: bytes, mark: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for line in told.decode(errors="replace").splitlines():
        if line.startswith(mark):  # else a library printed it
            with suppress(ValueError):  # the last one may be cut off
                facts |= json.loads(line[len(mark) :])
    return facts


def probe_findings(name: str, found: Found, cure: str) -> list[Finding]:
    """The finding about a probe that did not come to its end; `cure`: what helps where nothing else is known."""
    if not found.failure:
        return []
    where = found.facts.get("reached")
    if found.failure.startswith("has not"):
        reached = f" (it got as far as {where})" if where else ""
        cure = "rlreason doctor --patience 180 ...; where that is not enough, look at the disk that it is installed on"
        return [Finding(name, FAIL, f"importing it {found.failure}{reached}", cure)]
    behind = f" (behind {where})" if where else ""
    if "torchvision" in found.failure:
        cure = "pip uninstall torchvision torchaudio torchcodec"
    return [Finding(name, FAIL, f"importing it fails: {found.failure}{behind}", cure)]
