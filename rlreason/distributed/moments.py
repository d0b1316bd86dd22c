"""Moments that are spread over ranks, in a checkpoint: each rank writes its part; any number of ranks can read them."""

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save


def write_parts(folder: Path, parts: Mapping[str, Tensor]) -> None:
    """Write this rank's parts of the tensors with these names; to be called by all ranks at the same time.

    What a rank could not write, as on a full disk, is the error of all of them.
    """
    try:
        save(dict(parts), checkpoint_id=folder)
    except CheckpointException as error:  # no `Exception`
        reasons = [failure[0] for failure in error.failures.values()]
        system = next((reason for reason in reasons if isinstance(reason, OSError)), None)
        raise system or RuntimeError(f"moments cannot be written: {reasons[0]}") from None


def read_whole(folder: Path) -> dict[str, Tensor]:
    """The whole tensors by their names, in main memory; in one process, however many have written them."""
    reader = FileSystemReader(folder)
    found = {
        name: torch.empty(tuple(known.size), dtype=known.properties.dtype)
        for name, known in reader.read_metadata().state_dict_metadata.items()
        if isinstance(known, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that one process reads is what is wanted
        load(found, storage_reader=reader, no_dist=True)
    return found
