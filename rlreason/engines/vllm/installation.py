"""The vLLM that is installed: whether there is one, importing it, and sending its log to a file.

Secrets in that log are hidden as it is written where vLLM in this process logs, and in what its own process and native
code write when the engine is closed. A run that is killed (SIGKILL, or a second Ctrl-C) leaves the latter as it was.
"""

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rlreason.config.rollout import INSTALL_VLLM as INSTALL
from rlreason.config.rollout import WITHOUT_VLLM
from rlreason.errors import ConfigError
from rlreason.runtime.atomic_files import whole
from rlreason.runtime.secrets import redacted

NEWEST = (0, 32)


def require_vllm() -> None:
    """Cheap, for the beginning of a run: looks for vLLM and does not import it. `ConfigError` where there is none."""
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(WITHOUT_VLLM)


def import_vllm(log: Path, oldest: tuple[int, int], exact: bool) -> Any:
    """The module, with its engine in this process and its log in a file.

    `exact`: the model computes in float32. Attention on a GPU is then a kernel of Triton's, which would round what it
    multiplies to TF32: by up to 2e-2 nats of a token's log-probability, emulated for 16 layers. `ConfigError` where
    vLLM cannot be imported, or its version is not between `oldest` and the newest tested one.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # so that the handler below is the only one
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if exact:
        os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")  # read where a kernel is compiled
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
    log_into(log)
    return vllm


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return redacted(super().format(record))


def log_into(log: Path) -> None:
    """What vLLM logs in this process goes to the end of this file alone, without secrets."""
    logger = logging.getLogger("vllm")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    handler = logging.FileHandler(log, encoding="utf-8", delay=True)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
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
    """The end of vLLM's log, for a message about its failure; secrets are hidden."""
    if not log.is_file():
        return ""
    lines = redacted(log.read_text(encoding="utf-8", errors="replace")).splitlines()[-count:]
    return "".join(f"\n  {line[:300]}" for line in [f"last lines of {log}:", *lines])


def hide_secrets(log: Path, say: Callable[[str], None]) -> None:
    """Write the log anew, atomically, where it holds secrets; when vLLM's process has ended, which may write into it.

    What cannot be written is said: the run has ended, and nothing but this file is in danger.
    """
    try:
        text = log.read_bytes().decode("utf-8", "surrogateescape")
        if (shown := redacted(text)) == text:
            return
        for handler in logging.getLogger("vllm").handlers:
            handler.close()  # it opens the new file with the next line
        with whole(log) as partial:
            partial.write_bytes(shown.encode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return
    except OSError as error:
        say(f"! secrets may stand in {log}: {error}")
