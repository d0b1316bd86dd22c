"""Optimizers by name. It must not know models, losses or configuration files."""

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from rlreason.errors import ConfigError


def make_optimizer(
    name: str, parameters: Iterable[Tensor], learning_rate: float, betas: tuple[float, float], weight_decay: float
) -> Optimizer:
    """AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101) over all parameters alike, biases and norms included.

    `adamw_8bit` keeps both moments in one byte each, scaled block by block (Dettmers et al. 2022, arXiv:2110.02861):
    2 bytes a parameter where `adamw` takes 8. Tensors of fewer than 4096 numbers keep float32 moments.
    """
    kinds: dict[str, Callable[[], Callable[..., Any]]] = {"adamw": _adamw, "adamw_8bit": _adamw_8bit}
    optimizer: Optimizer = kinds[name]()(parameters, lr=learning_rate, betas=betas, weight_decay=weight_decay)
    return optimizer


def _adamw() -> Callable[..., Any]:
    """In one pass over memory: five times faster than step by step on a processor, where it is a tenth of a step."""
    return partial(torch.optim.AdamW, fused=True)


def _adamw_8bit() -> Callable[..., Any]:
    """bitsandbytes' AdamW. Its updates on a processor begin with version 0.50; torchao's need a compiler there."""
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about a kernel that optimizers do not use
    try:
        from bitsandbytes.optim import AdamW8bit  # type: ignore[attr-defined]
    except ImportError as error:
        raise ConfigError(
            f"optimizer=adamw_8bit needs the bitsandbytes library ({error}): pip install 'rlreason[8bit]', or set "
            "optimizer=adamw"
        ) from error
    finally:
        logger.setLevel(level)
    kind: Callable[..., Any] = AdamW8bit
    return kind
