"""Import in a process of its own what may hang or crash, and write down facts: a JSON object a line, as it goes.

    python -m rlreason.cli.doctor_probe FILE SECONDS '{"torch": SETTINGS, "flash-attn": MODULE}'

Each part may take SECONDS. The last line of FILE tells how far the process got, whatever ended it.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

Facts = dict[str, Any]
SPARE_S = 5.0  # after which a process that no signal ends, stuck in a driver, is left alone


def torch_facts(settings: dict[str, Any]) -> Facts:
    """Return facts on torch, its GPUs, transformers, and the attention kernel that `settings` get here."""
    import torch
    from transformers import AutoModelForCausalLM  # noqa: F401  # loads what a broken torchvision breaks

    from rlreason.errors import ConfigError
    from rlreason.model.attention import select_kernel
    from rlreason.model.parameters import choose_dtype, hardware_here, pick_device

    gpus = []
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about, (free, total) = torch.cuda.get_device_properties(number), torch.cuda.mem_get_info(number)
        capability = [about.major, about.minor]
        half = about.major >= 8
        gpus.append({"name": about.name, "free": free, "total": total, "capability": capability, "bf16": half})
    facts = {"torch": torch.__version__, "built_for": torch.version.cuda, "gpus": gpus}
    device, here, products, kernel = pick_device(), hardware_here(), "float32", ""
    try:
        weights = choose_dtype(settings["weights"], here, "model.weights")
        dtype = choose_dtype(settings["dtype"], here) if weights == torch.float32 else weights
        products = str(dtype).removeprefix("torch.")
        kernel, why = select_kernel(settings["attention"], device, dtype)
    except ConfigError as error:
        why = str(error)
    return facts | {"device": device.type, "products": products, "kernel": kernel, "why": why}


def import_facts(module: str) -> Facts:
    """Import a library behind torch, as a run does."""
    import torch  # noqa: F401

    import_module(module)
    return {}


def main(file: str, patience_s: float, wanted: Mapping[str, Any]) -> None:
    """Probe one part after the other; an error in one of them is a fact in its own words."""
    with open(file, "w", encoding="utf-8", buffering=1) as lines:  # the next import may crash
        for part, argument in wanted.items():
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, patience_s)  # SIGALRM ends the process, whatever it is doing
            lines.write(json.dumps({"part": part}) + "\n")
            try:
                found = torch_facts(argument) if part == "torch" else import_facts(argument)
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]}
            lines.write(json.dumps({"part": part, "seconds": time.monotonic() - began} | found) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3]))


class ProbeResult(NamedTuple):
    """The facts that a probe found about one part, and how that ended."""

    facts: Facts
    failure: str = ""  # "": it ended normally
    seconds: float = 0.0


def probe(wanted: Mapping[str, Any], patience_s: float) -> dict[str, ProbeResult]:
    """Probe some parts in a process; return the result of each part that it came to."""
    path = os.pathsep.join(part or os.getcwd() for part in sys.path)
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": path}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+", errors="replace") as output:
        file = Path(folder) / "facts"
        argv = [sys.executable, "-m", "rlreason.cli.doctor_probe", str(file), str(patience_s), json.dumps(wanted)]
        ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = subprocess.run(
                argv, **ends, env=os.environ | quiet, timeout=patience_s * len(wanted) + SPARE_S, check=False
            ).returncode
        found = {next(iter(wanted)): Facts()}
        for line in file.read_text().splitlines() if file.exists() else []:
            with suppress(ValueError):  # the last one may be cut off
                facts = json.loads(line)
                found.setdefault(facts.pop("part"), {}).update(facts)
        output.seek(0)
        crash = how_ended(code, output.read(), patience_s)
    return {
        part: ProbeResult(facts, facts.pop("error", "" if "seconds" in facts else crash), facts.pop("seconds", 0.0))
        for part, facts in found.items()
    }


def how_ended(code: int | None, output: str, patience_s: float) -> str:
    """Return how a process ended that did not come to its end."""
    if code in (None, -signal.SIGALRM):
        return f"has not ended after {patience_s:g} s"
    name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    return f"the process ended by {name}: {' '.join(output.split())[-300:]}".rstrip(": ")
