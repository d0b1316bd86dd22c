"""Import in a process of its own what may hang or crash, and print facts: a JSON object a line, as it goes.

    python -m rlreason.cli.doctor_probes MARK torch SETTINGS | flash_attn | vllm | model SETTINGS

MARK begins each of its lines, since imported libraries may print anything.

What ends it, and where, is part of what is found: the last line that came is as far as it got.
"""

import ctypes
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

from rlreason.cli.doctor_findings import FAIL, DoctorFinding


def print_facts(**facts: Any) -> None:
    """Print facts immediately: the next import may crash."""
    print(f"\n{sys.argv[1]}{json.dumps(facts)}", flush=True)


def torch_facts(settings: dict[str, Any]) -> None:
    """Print facts on torch, its GPUs, transformers, and the attention kernel that `settings` get here."""
    import torch

    print_facts(torch=torch.__version__, built_for=torch.version.cuda, driver_cuda=_driver_cuda(), reached="torch")
    available = torch.cuda.is_available()
    gpus = [_gpu(n) for n in range(torch.cuda.device_count())] if available else []
    count = len(gpus)
    pairs = [[a, b] for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    print_facts(cuda=available, gpus=gpus, apart=apart, threads=torch.get_num_threads(), reached="GPUs")
    import transformers
    from transformers import AutoModelForCausalLM  # noqa: F401  # loads what a broken torchvision breaks

    print_facts(transformers=transformers.__version__, reached="transformers")
    from rlreason.errors import ConfigError
    from rlreason.model.attention import select_kernel
    from rlreason.model.parameters import choose_dtype, hardware_here, pick_device

    device, here, products, kernel = pick_device(), hardware_here(), "float32", ""
    try:
        weights = choose_dtype(settings["weights"], here, "model.weights")
        dtype = choose_dtype(settings["dtype"], here) if weights == torch.float32 else weights
        products = str(dtype).removeprefix("torch.")
        kernel, why = select_kernel(settings["attention"], device, dtype)
    except ConfigError as error:
        why = str(error)
    print_facts(device=device.type, products=products, kernel=kernel, why=why, reached="end")


def _driver_cuda() -> str:
    """Return the newest CUDA that the driver supports, by cuDriverGetVersion; "" without a driver."""
    number = ctypes.c_int(0)
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    return f"{number.value // 1000}.{number.value % 1000 // 10}" if number.value else ""


def _gpu(n: int) -> dict[str, Any]:
    import torch

    about, (free, total) = torch.cuda.get_device_properties(n), torch.cuda.mem_get_info(n)
    half = about.major >= 8
    return {"name": about.name, "free": free, "total": total, "capability": [about.major, about.minor], "bf16": half}


def flash_attn_facts() -> None:
    """Print whether flash-attn's compiled part loads with this torch."""
    import torch  # noqa: F401  # first, as in a run

    print_facts(reached="torch")
    from flash_attn import __version__, flash_attn_varlen_func  # noqa: F401

    print_facts(flash_attn=__version__, reached="end")


def vllm_facts() -> None:
    """Print whether vLLM's engine can be imported, as `rollout=vllm` does."""
    import torch  # noqa: F401  # first, as in a run

    print_facts(reached="torch")
    import vllm
    import vllm.entrypoints.llm

    print_facts(vllm=vllm.__version__, reached="vllm")
    from vllm.platforms import current_platform

    print_facts(platform=current_platform.device_name or current_platform.device_type, reached="end")


def model_facts(path: str) -> None:
    """Print whether the weights in a folder, or in the hub's cache, are those of the model in its config."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # never download here
    from rlreason.errors import ConfigError
    from rlreason.model.loading import look_into

    print_facts(reached="transformers")
    try:
        print_facts(holds=look_into(path), reached="end")
    except ConfigError as error:
        print_facts(refused=str(error), reached="end")


def main(words: list[str]) -> None:
    """Run the probe that the first word names; print an error in its own words."""
    print_facts(reached="Python")
    kinds = {
        "torch": lambda: torch_facts(json.loads(words[1])),
        "flash_attn": flash_attn_facts,
        "vllm": vllm_facts,
        "model": lambda: model_facts(json.loads(words[1])["path"]),
    }
    try:
        kinds[words[0]]()
    except Exception as error:
        print_facts(error=f"{type(error).__name__}: {' '.join(str(error).split())}"[:400])
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[2:])


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
                "rlreason.cli.doctor_probes",
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
