"""Where a run computes and in which number types."""

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

    card: str = ""  # the GPU that torch uses; empty: it reaches none
    capability: tuple[int, int] = (0, 0)  # compute capability of that GPU
    bf16: bool = True  # bfloat16 is computed natively there
    gpus: tuple[str, ...] = ()  # that the driver lists, whether torch reaches them or not
    visible: str | None = None  # CUDA_VISIBLE_DEVICES
    torch_version: str = str(torch.__version__)
    built_for: str | None = torch.version.cuda  # of CUDA; None: torch is built for processors alone


def hardware_here() -> Hardware:
    """The facts of this process."""
    gpus, visible = tuple(driver_gpus()), os.environ.get(VISIBLE)
    if not torch.cuda.is_available():
        return Hardware(gpus=gpus, visible=visible)
    half = torch.cuda.is_bf16_supported(including_emulation=False)
    return Hardware(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), half, gpus, visible)


def pick_device() -> torch.device:
    """The GPU where torch reaches one, else the processor: `remarks` says where a machine's GPUs are not reached."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type of matrix products on this machine's `device`; see `choose_dtype`."""
    return choose_dtype(name, hardware_here() if device.type == "cuda" else Hardware())


def choose_dtype(name: str, hardware: Hardware, setting: str = "model.dtype") -> torch.dtype:
    """The type of numbers that `setting` names; `auto`: bfloat16 on a GPU that computes it natively, else float32.

    `ConfigError` where it is bfloat16 and the GPU has none: torch would compute it in float32 and round.

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
    """(type of matrix products, type of what the output head multiplies) of a run that samples by `engine`.

    `ConfigError` where they cannot be had here.
    """
    weights = choose_dtype(model.weights, hardware, "model.weights")
    products = choose_dtype(model.dtype, hardware) if weights == torch.float32 else weights
    head = type_of_head(model.head, engine, str(products).removeprefix("torch."))
    return products, choose_dtype(head, hardware, "model.head")


def check_types(model: ModelConfig, engine: str, hardware: Hardware) -> torch.dtype:
    """The type of matrix products. `ConfigError` where a type cannot be had, or the engine's head is another one."""
    products, head = choose_types(model, engine, hardware)
    if engine == "vllm" and head == torch.bfloat16 and products == torch.float32:
        raise ConfigError(
            "model.head=bfloat16 with rollout=vllm: products are float32 here, and so is the output head that vLLM "
            "samples with: set model.head=auto, or model.dtype=bfloat16"
        )
    return products


def remarks(model: ModelConfig, hardware: Hardware) -> list[str]:
    """What a run is to be told of the device it gets: a GPU that torch does not reach, or one without bfloat16.

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
    """A tensor (length,) on the device for each list of numbers; they share one memory, so change none in place.

    >>> [part.tolist() for part in lists_on_device([[1, 2], [], [3]], "cpu")]
    [[1, 2], [], [3]]
    """
    together = torch.tensor(list(chain.from_iterable(lists)), dtype=dtype)
    return list(on_device(together, device).split([len(one) for one in lists]))


def on_device(values: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the processor on the device; work that is asked for later finds it there."""
    if torch.device(device).type == "cuda":
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def give_back(device: torch.device) -> None:
    """What torch has kept of a GPU's memory for itself, to whoever else needs it there."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
