"""What keeps a vLLM engine from changing the trainer's process: temporary files, environment, generators, threads."""

import atexit
import contextlib
import os
import random
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from rlreason.engines.vllm.single_thread import SingleThread
from rlreason.runtime.signals import temporary_folder

FILES = "rlreason-vllm-"  # how folders for an engine's temporary files begin
#: Held while an engine's start changes what belongs to the whole process: the environment, the temporary folder,
#: standard error and the list of its children. In-process engines take it for their whole start, the others until
#: their process runs, so that several of those load side by side.
STARTING = threading.Lock()
#: By which torchrun tells a process its place among others, beside what begins with TORCHELASTIC_.
OF_RANKS = {"MASTER_ADDR", "MASTER_PORT", "ROLE_NAME"} | {
    f"{of}{what}" for of in ("", "LOCAL_", "GROUP_", "ROLE_") for what in ("RANK", "WORLD_SIZE")
}


def folder_for_files() -> contextlib.AbstractContextManager[str]:
    """A folder for all temporary files of an engine: its sockets and the file at which its parts meet stay behind it.

    The path of a socket takes 107 characters at most, so a long name of the temporary folder is left for /tmp.
    """
    return temporary_folder(FILES, Path("/tmp") if len(tempfile.gettempdir()) > 40 else None)


_in_use = contextlib.ExitStack()  # what calls that nobody waits for may still open
atexit.register(_in_use.close)


def remove_files(files: contextlib.ExitStack, thread: SingleThread) -> None:
    """Close what holds an engine's folder: now, or with the process where a start that was given up still runs.

    Such a start would meet its parts in a file there, and where the folder is gone torch waits minutes for that file,
    in C++ with Python's lock held: no signal would be heeded any more.
    """
    if thread.busy:
        _in_use.push(files.pop_all())
    else:
        files.close()


@contextlib.contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Whatever asks for the temporary folder here, or in a process that starts now, gets this one."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    cache_dir()  # of compiled code, which is to outlive a run: named now, it stays where it is
    chosen, tempfile.tempdir = tempfile.gettempdir(), folder
    try:
        with environment({"TMPDIR": folder}):
            yield
    finally:
        tempfile.tempdir = chosen


def alone(names: Iterable[str]) -> dict[str, None]:
    """What `environment` takes to hide from vLLM that the trainer is one of several ranks. `names`: of all variables.

    It would take their place for its own (the GPU of LOCAL_RANK), or wait for a port that torchrun has; and it sets
    some of them for its own processes.

    >>> alone(["PATH", "RANK", "TORCHELASTIC_RUN_ID"]).keys() - OF_RANKS
    {'TORCHELASTIC_RUN_ID'}
    """
    return dict.fromkeys([*OF_RANKS, *(name for name in names if name.startswith("TORCHELASTIC_"))])


@contextlib.contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """These environment variables, here and in every process that starts now; afterwards they are as before.

    None: the variable is not there.
    """
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def generators_kept() -> contextlib.AbstractContextManager[None]:
    """torch's global random generators, the processor's and the current GPU's, are afterwards as they were before.

    Those of other GPUs are left alone: asking for one would take memory there.
    """
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else [])


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """vLLM seeds every global random generator and replaces torch's thread setting as it starts: put both back."""
    python, numpy = random.getstate(), np.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with generators_kept():
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
