"""The device a run computes on, and its number types."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from rlreason.config.model import ModelConfig, type_of_head
from rlreason.errors import ConfigError
from rlreason.runtime.machine import VISIBLE, driver_gpus, why_unseen

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What this process can compute on."""

    card: str = ""  # the GPU that torch uses; "" if none is accessible
    capability: tuple[int, int] = (0, 0)  # compute capability of that GPU
    bf16: bool = True  # computes bfloat16 natively
    gpus: tuple[str, ...] = ()  # listed by the driver, accessible to torch or not
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    torch_version: str = str(torch.__version__)
    built_for: str | None = torch.version.cuda  # of CUDA; None: torch is built for processors only


def hardware_here() -> Hardware:
    """Detect this process's hardware."""
    gpus, visible = tuple(driver_gpus()), os.environ.get(VISIBLE)
    if not torch.cuda.is_available():
        return Hardware(gpus=gpus, visible=visible)
    half = torch.cuda.is_bf16_supported(including_emulation=False)
    return Hardware(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), half, gpus, visible)


def pick_device() -> torch.device:
    """Return torch's GPU if there is one, else the processor; `remarks` reports GPUs that torch cannot access."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type of matrix products on this machine's `device`; see `choose_dtype`."""
    return choose_dtype(name, hardware_here() if device.type == "cuda" else Hardware())


def choose_dtype(name: str, hardware: Hardware, setting: str = "model.dtype") -> torch.dtype:
    """Return the dtype that `setting` names; `auto`: bfloat16 on a GPU that computes it natively, else float32.

    `ConfigError` for bfloat16 on a GPU without it: torch would compute in float32 and round.

    >>> choose_dtype("auto", Hardware("H100", (9, 0))), choose_dtype("auto", Hardware("T4", (7, 5), bf16=False))
    (torch.bfloat16, torch.float32)
    """
    if name == "auto":
        return torch.bfloat16 if hardware.card and hardware.bf16 else torch.float32
    if name == "bfloat16" and hardware.card and not hardware.bf16:
        raise ConfigError(
            f"{setting}=bfloat16: {_card(hardware)} has no bfloat16: set {setting}=float32, or choose a GPU of compute "
            "capability 8.0 or more (Ampere: A100, A10, RTX 30)"
        )
    return DTYPES[name]


def choose_types(model: ModelConfig, engine: str, hardware: Hardware) -> tuple[torch.dtype, torch.dtype]:
    """Return (dtype of matrix products, dtype of the output head's operands) of a run that samples by `engine`.

    `ConfigError` if they are unavailable here.
    """
    weights = choose_dtype(model.weights, hardware, "model.weights")
    products = choose_dtype(model.dtype, hardware) if weights == torch.float32 else weights
    head = type_of_head(model.head, engine, str(products).removeprefix("torch."))
    return products, choose_dtype(head, hardware, "model.head")


def check_types(model: ModelConfig, engine: str, hardware: Hardware) -> torch.dtype:
    """Return the dtype of matrix products. `ConfigError` if a type is unavailable, or the engine's head differs."""
    products, head = choose_types(model, engine, hardware)
    if engine == "vllm" and head == torch.bfloat16 and products == torch.float32:
        raise ConfigError(
            "model.head=bfloat16 with rollout=vllm: products are float32 here, and so is the output head that vLLM "
            "samples with: set model.head=auto, or model.dtype=bfloat16"
        )
    return products


def remarks(model: ModelConfig, hardware: Hardware) -> list[str]:
    """Warn about a GPU that torch cannot access, or one without bfloat16.

    >>> from rlreason.config.model import PretrainedModelConfig
    >>> remarks(PretrainedModelConfig("local", path="m"), Hardware("Tesla T4", (7, 5), bf16=False))
    ['Tesla T4 (compute capability 7.5) has no bfloat16: products in float32, which take several times as long']
    """
    if hardware.card:
        lacks = not hardware.bf16 and model.dtype == "auto" and model.weights == "float32"
        words = f"{_card(hardware)} has no bfloat16: products in float32, which take several times as long"
        return [words] if lacks else []
    unseen = why_unseen(hardware.gpus, hardware.visible, hardware.torch_version, hardware.built_for)
    return [f"! {unseen.words}: {unseen.cure}"] if unseen else []


def _card(hardware: Hardware) -> str:
    return "{} (compute capability {}.{})".format(hardware.card, *hardware.capability)


def lists_on_device(
    lists: Sequence[Sequence[float]], device: torch.device | str, dtype: torch.dtype = torch.int64
) -> list[Tensor]:
    """Return a tensor (length,) on the device for each list; they share one memory, so change none in place.

    >>> [part.tolist() for part in lists_on_device([[1, 2], [], [3]], "cpu")]
    [[1, 2], [], [3]]
    """
    together = torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)
    return list(on_device(together, device).split([len(one) for one in lists]))


def on_device(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy a CPU tensor to the device without waiting; later work on the device finds it there."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def free_cached_memory(device: torch.device) -> None:
    """Free torch's cached GPU memory, for other users of the GPU."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
