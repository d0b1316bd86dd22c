"""Import in a process of its own what may hang or crash, and print facts: a JSON object a line, as it goes.

    python -m rlreason.cli.doctor.probe MARK torch SETTINGS | flash_attn | vllm | model SETTINGS

MARK begins each of its lines, since imported libraries may print anything.

What ends it, and where, is part of what is found: the last line that came is as far as it got.
"""

import ctypes
import json
import os
import sys
from contextlib import suppress
from typing import Any


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
    from rlreason.model.devices import choose_dtype, hardware_here, pick_device

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
