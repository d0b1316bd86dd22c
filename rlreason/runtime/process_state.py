"""What a run in somebody else's process changes in all of it, and puts back."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from rlreason.runtime.generators import random_states, set_random_states

#: How the variables begin that a run and its libraries set.
VARIABLES = ("GLOO_", "PYTORCH_", "TOKENIZERS_", "TORCHINDUCTOR_", "TRITON_", "VLLM_")


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(VARIABLES)}


@contextmanager
def process_state_kept() -> Iterator[None]:
    """A block for a run, which begins as in a process of its own: with gradients and float32."""
    import torch

    threads, dtype, variables, generators = (
        torch.get_num_threads(), torch.get_default_dtype(), _variables(), random_states(),
    )  # fmt: skip
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        set_random_states(*generators)
        for name in _variables().keys() - variables.keys():
            del os.environ[name]
        os.environ |= variables
