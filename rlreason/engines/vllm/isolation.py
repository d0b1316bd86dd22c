"""What keeps a vLLM engine from changing the trainer's process: its temporary files, random generators, threads."""

import atexit
import contextlib
import os
import random
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch

from rlreason.engines.vllm.single_thread import SingleThread
from rlreason.runtime.signals import temporary_folder

FILES = "rlreason-vllm-"  # how folders for an engine's temporary files begin


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


@contextlib.contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """These environment variables, here and in every process that starts now; afterwards they are as before."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ |= variables
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def generators_kept() -> contextlib.AbstractContextManager[None]:
    """torch's global random generators are afterwards as they were before."""
    return torch.random.fork_rng(devices=range(torch.cuda.device_count()))


@contextlib.contextmanager
def process_state_kept() -> Iterator[None]:
    """vLLM seeds every global random generator and replaces torch's thread setting as it starts: put both back."""
    python, numpy = random.getstate(), np.random.get_state()
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        # Without the variable vLLM turns torch down to one thread for good.
        with environment({"OMP_NUM_THREADS": str(threads)}), generators_kept():
            yield
    finally:
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)
        random.setstate(python)
        np.random.set_state(numpy)
