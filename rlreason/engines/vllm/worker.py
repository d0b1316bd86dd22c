"""Code that runs in vLLM's own process; vLLM's worker there imports this module."""

import contextlib
import os
import select
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlreason.engines.vllm.start import FILES

TRAINER = "RLREASON_TRAINER"  # environment variable: the process id of the trainer, with which the engine ends
ENDING_S = 5.0


def row_digests(weight: Tensor) -> Tensor:
    """Digest each row, (rows, ...) -> (rows,): the sum over a row's indices j of bits_j * odd_j, modulo 2^64.

    An odd factor is invertible modulo 2^64, so one changed number always changes the digest; the factors differ, so
    exchanged numbers do too.

    >>> row_digests(torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])).unique().numel()
    2
    """
    bits = weight.detach().contiguous().view({2: torch.int16, 4: torch.int32}[weight.dtype.itemsize])
    bits = bits.reshape(len(weight), -1)
    odd = torch.arange(bits.shape[1], device=bits.device) * -7046029254386353131 | 1  # int64 wraps around
    return torch.cat([(part.long() * odd).sum(1) for part in bits.split(1024)])  # a slice at a time: 8 bytes a number


class WorkerExtension:
    """Methods that vLLM adds to its worker."""

    def row_digests(self) -> tuple[dict[str, bytes], dict[str, list[str]]]:
        """Return row digests of every weight in the model's number format, and which layers are stacked of which."""
        worker: Any = self
        model = worker.get_model()
        kept = {n: p for n, p in model.named_parameters() if p.dtype == worker.model_config.dtype and p.numel()}
        fused = getattr(model, "packed_modules_mapping", {})
        return {name: row_digests(p).cpu().numpy().tobytes() for name, p in kept.items()}, dict(fused)


def end_with(trainer: int) -> None:
    """End the engine when the trainer's process is gone, however it ended, since vLLM does not watch it.

    This runs in vLLM's worker: a child of the engine's process, or the engine's process itself.
    """
    engine, files = os.getpid() if os.getppid() == trainer else os.getppid(), tempfile.gettempdir()

    def watch() -> None:
        with contextlib.suppress(ProcessLookupError):
            select.select([os.pidfd_open(trainer)], [], [])
        if Path(files).name.startswith(FILES):
            shutil.rmtree(files, ignore_errors=True)
        for number in (signal.SIGTERM, signal.SIGKILL):  # on the first it frees its shared memory
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, number)
            time.sleep(ENDING_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


if TRAINER in os.environ and os.environ[TRAINER] != str(os.getpid()):
    end_with(int(os.environ[TRAINER]))
