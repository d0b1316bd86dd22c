"""Making, loading and saving a model as if alone in the process."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils import logging as hf_logging


@contextmanager
def alone(seed: int = 0) -> Iterator[None]:
    """A block with torch's generator on the processor seeded and no progress bars.

    transformers draws weights from the generator of the whole process and replaces torch's functions while it loads
    some; both, and the bars, are afterwards as they were before.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not `torch.manual_seed`, which seeds every GPU too
        bars = hf_logging.is_progress_bar_enabled()
        hf_logging.disable_progress_bar()  # a run shows its own progress
        try:
            yield
        finally:
            if bars:
                hf_logging.enable_progress_bar()
