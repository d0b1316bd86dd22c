"""The vLLM that is installed: whether there is one, importing it, and sending its log to a file."""

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlreason.config.rollout import INSTALL_VLLM as INSTALL
from rlreason.config.rollout import WITHOUT_VLLM
from rlreason.errors import ConfigError

NEWEST = (0, 32)


def require_vllm() -> None:
    """Cheap, for the beginning of a run: looks for vLLM and does not import it. `ConfigError` where there is none."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(WITHOUT_VLLM)


def import_vllm(log: Path, oldest: tuple[int, int]) -> Any:
    """The module, with its engine in this process and its log in a file.

    `ConfigError` where it cannot be imported, or its version is not between `oldest` and the newest tested one.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # so that the handler below is the only one
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    log.parent.mkdir(parents=True, exist_ok=True)
    try:
        with stderr_into(log):
            import vllm
            import vllm.entrypoints.llm
            import vllm.inputs
            import vllm.sampling_params
    except Exception as error:
        text = f"{type(error).__name__}: {error}".splitlines()[0]
        cure = "pip uninstall torchvision torchaudio torchcodec" if "torchvision" in text else INSTALL
        raise ConfigError(f"rollout=vllm: vLLM cannot be imported ({text}): {cure}; or choose rollout=hf") from error
    version = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:2])
    if not oldest <= version <= NEWEST:
        span = " to ".join("{}.{}".format(*end) for end in (oldest, NEWEST))
        raise ConfigError(f"rollout=vllm: vLLM {vllm.__version__} is outside the versions {span} for this: {INSTALL}")
    _log_to(log)
    return vllm


def _log_to(log: Path) -> None:
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(log, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)


@contextlib.contextmanager
def stderr_into(log: Path) -> Iterator[None]:
    """What libraries write past Python to standard error goes to the end of the log."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with log.open("a") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stderr.flush()
        os.dup2(terminal, 2)
        os.close(terminal)


def last_lines(log: Path, count: int = 5) -> str:
    """The end of vLLM's log, for a message about its failure."""
    if not log.is_file():
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:]
    return "".join(f"\n  {line[:300]}" for line in [f"last lines of {log}:", *lines])
