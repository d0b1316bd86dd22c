"""Packages that only some runs need: what each is called and how to get it or do without, in one table."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlreason.errors import ConfigError

#: By the name that is imported: (what it is called, the cure where it is missing).
PACKAGES = {
    "peft": ("the peft library", "pip install 'rlreason[lora]', or set it to 0"),
    "bitsandbytes": ("the bitsandbytes library", "pip install 'rlreason[8bit]', or set optimizer=adamw"),
    "datasets": (
        "the datasets package",
        "pip install 'rlreason[hub]', or give a folder with train.jsonl and test.jsonl",
    ),
    "reasoning_gym": ("the reasoning-gym package", "pip install 'rlreason[gym]'"),
    "wandb": ("the wandb package", "pip install wandb, or choose logger=none"),
    "tensorboard": ("the tensorboard package", "pip install 'rlreason[tensorboard]', or choose logger=none"),
    "trackio": ("the trackio package", "pip install 'rlreason[trackio]', or choose logger=none"),
}


def needs(asked: str, package: str, reason: object = None) -> str:
    """The complaint where what is asked for takes a package that is missing or, for a `reason`, broken.

    >>> needs("logger=wandb", "wandb")
    'logger=wandb needs the wandb package: pip install wandb, or choose logger=none'
    """
    called, cure = PACKAGES[package]
    return f"{asked} needs {called}{f' ({reason})' if reason else ''}: {cure}"


@contextmanager
def required(asked: str, package: str) -> Iterator[None]:
    """Import a package in this block: `ConfigError` in one line where that fails."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(needs(asked, package, error)) from error
