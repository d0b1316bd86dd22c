"""What a run in somebody else's process changes in all of it, and puts back."""

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rlreason.runtime.generators import random_states, set_random_states

#: How the variables begin that a run and its libraries set.
VARIABLES = ("GLOO_", "PYTORCH_", "TOKENIZERS_", "TORCHINDUCTOR_", "TRITON_", "VLLM_")


@dataclass
class _Before:
    """The state of the process before the first of the runs that are under way."""

    runs: int = 0
    threads: int = 0
    dtype: Any = None
    variables: dict[str, str] = field(default_factory=dict)
    generators: Any = None


_before, _lock = _Before(), threading.Lock()


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


@contextmanager
def process_state_kept() -> Iterator[None]:
    """A block for a run, of which several may be under way: what they change is put back when the last one ends.

    A run begins as in a process of its own: with gradients, float32 and the number of threads from before the first
    one. That number is torch's for each thread of Python, and a new thread takes the newest that any of them has set.
    """
    import torch

    with _lock:
        if not _before.runs:
            _before.threads, _before.dtype = torch.get_num_threads(), torch.get_default_dtype()
            _before.variables, _before.generators = _variables(), random_states()
            torch.set_default_dtype(torch.float32)
        _before.runs += 1
        torch.set_num_threads(_before.threads)
    try:
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(False))
            modes.enter_context(torch.enable_grad())
            yield
    finally:
        with _lock:
            _before.runs -= 1
            torch.set_num_threads(_before.threads)
            if not _before.runs:
                torch.set_default_dtype(_before.dtype)
                set_random_states(*_before.generators)
                for name in _variables().keys() - _before.variables.keys():
                    del os.environ[name]
                os.environ |= _before.variables
