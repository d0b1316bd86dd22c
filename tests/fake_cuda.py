"""A GPU that is not there: shapes, number types and arguments of what would be computed on it, but no numbers.

torch's FakeTensorMode runs a program on tensors of "cuda" that have no memory. Indexing from Python wants a device
guard as well, and a torch for processors has none for CUDA: one that does nothing is compiled here, in about two
seconds. It stays in the process that loads it, so the checks have a process of their own. Autograd's engine asks for
the GPU's streams, which cannot be had, so backward passes are called as functions (`Context`).
"""

import contextlib
import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from rlreason.model.attention import NAMES
from rlreason.model.policy import Policy

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


def load_guard(folder: Path) -> None:
    """Compile and load the device guard; `CalledProcessError` or `FileNotFoundError` where there is no compiler."""
    home, source, library = Path(torch.__file__).parent, folder / "guard.cpp", folder / "guard.so"
    source.write_text(GUARD)
    flags = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", f"-I{home}/include", f"-L{home}/lib", "-lc10"]
    subprocess.run(["g++", str(source), *flags, "-o", str(library)], check=True)
    ctypes.CDLL(str(library))


class FakeCuda(FakeTensorMode):
    """Keeps the arguments of every operation by its name; pinned memory, which it does not know, is ordinary here."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any], Any]] = []
        self._within = False  # an operation that it puts together from others

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._pin_memory.default:
            result = args[0]
        elif self._within:
            return super().__torch_dispatch__(func, types, args, kwargs)
        else:
            self._within = True
            try:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            finally:
                self._within = False
        self.calls.append((str(func), args, kwargs or {}, result))
        return result

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any], Any]]:
        """(arguments, named ones, result) of the calls of this operation, such as aten.mm.dtype."""
        return [(args, kwargs, result) for called, args, kwargs, result in self.calls if called == name]


class Context:
    """What autograd hands to the two parts of a function of ours."""

    def __init__(self, *needs_input_grad: bool) -> None:
        self.needs_input_grad = needs_input_grad

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors

    def set_materialize_grads(self, value: bool) -> None:
        pass


class FakePolicy(Policy):
    """A policy whose model lies on a GPU that is not there: nothing was checked, since that compares numbers."""

    def __init__(
        self, model: PreTrainedModel, compute_dtype: torch.dtype, head_dtype: torch.dtype, kernel: str
    ) -> None:
        self.device, self.model, self.tokenizer = torch.device("cuda"), model.eval(), None
        self.weights, self.compute_dtype, self.head_dtype = torch.float32, compute_dtype, head_dtype
        self._no_mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device="cuda")
        self.in_main_memory = False
        self.attention, self.why_attention, self.remarks = kernel, "", []
        self.shares_prompts = kernel == "varlen"
        model.set_attn_implementation(NAMES[kernel])

    @contextlib.contextmanager
    def autocast(self) -> Iterator[None]:
        """What torch.autocast("cuda") does, which does nothing here: it asks for a GPU first."""
        torch.set_autocast_enabled("cuda", self.compute_dtype != torch.float32)
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.autocast_increment_nesting()
        try:
            yield
        finally:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
            torch.set_autocast_enabled("cuda", False)
