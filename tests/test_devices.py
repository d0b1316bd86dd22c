"""Which device and number types a run gets, and what is said of it; for cards that are not here, by their facts."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

from rlreason.config.model import PretrainedModelConfig
from rlreason.errors import ConfigError
from rlreason.model.parameters import Hardware, choose_dtype, choose_types, machine_remarks
from rlreason.runtime.machine import Device, Driver, divide_memory_finely, query_driver, why_unseen

CPU, A100, T4 = Hardware(), Hardware("A100"), Hardware("Tesla T4", bf16=False)
HALF, FULL = torch.bfloat16, torch.float32


def model(**settings):
    return PretrainedModelConfig("local", path="/m", **settings)


def test_without_a_driver_there_is_no_gpu_and_one_that_fails_says_why(monkeypatch):
    for code, failure in ((pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, ""), (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "m")):

        def broken(code=code) -> None:
            raise pynvml.NVMLError(code)

        monkeypatch.setattr(pynvml, "nvmlInit", broken)
        assert (query_driver().gpus, bool(query_driver().failure)) == ((), bool(failure))


def test_memory_shared_with_the_processor_is_not_known(monkeypatch):
    def memory(handle: str) -> SimpleNamespace:
        if handle == "GB10":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(free=7, total=8)

    answers = {
        "nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: 2,
        "nvmlDeviceGetHandleByIndex": ("H100", "GB10").__getitem__, "nvmlDeviceGetName": str,
        "nvmlDeviceGetMemoryInfo": memory, "nvmlDeviceGetCudaComputeCapability": lambda handle: (9, 0),
        "nvmlSystemGetDriverVersion": lambda: "550.54",
    }  # fmt: skip
    for name, answer in answers.items():
        monkeypatch.setattr(pynvml, name, answer)
    assert query_driver() == Driver((Device("cuda", "H100", 7, 8), Device("cuda", "GB10")), "550.54")


@pytest.mark.parametrize(
    ("visible", "built_for", "cure"),
    [
        ("-1", "13.0", "unset CUDA_VISIBLE_DEVICES"),
        ("2,0", "13.0", "unset CUDA_VISIBLE_DEVICES"),
        (None, None, "pip install"),
        ("GPU-5e1c", "13.0", "update the driver"),
    ],
)
def test_a_machine_whose_gpus_are_not_reached_is_told_why(visible, built_for, cure, monkeypatch):
    unseen = why_unseen(["A10", "A10"], visible, "2.13.0", built_for)
    assert cure in unseen.cure
    monkeypatch.setattr("rlreason.model.parameters.why_unseen", lambda *_: unseen)
    assert machine_remarks(model(), CPU) == [f"! {unseen.words}: {unseen.cure}"]
    assert machine_remarks(model(), A100) == []
    assert why_unseen([], visible, "2.13.0", built_for) is None


def test_a_card_without_bfloat16_is_named_where_float32_was_taken_for_it_and_refused_where_it_was_asked_for():
    assert "Tesla T4" in machine_remarks(model(), T4)[0]
    assert machine_remarks(model(dtype="float32"), T4) == []  # as asked
    for setting in ("dtype", "weights", "head"):
        asked = model(**{setting: "bfloat16"})
        with pytest.raises(ConfigError, match=rf"^model\.{setting}=bfloat16: .*set model\.{setting}=float32"):
            choose_types(asked, "hf", T4)
        choose_types(asked, "hf", A100)
        choose_types(asked, "hf", CPU)  # a processor computes it, if slowly


def test_types_follow_settings_engine_and_card():
    assert [choose_dtype("auto", here) for here in (A100, T4, CPU)] == [HALF, FULL, FULL]
    assert choose_types(model(), "vllm", A100) == (HALF, HALF)
    assert choose_types(model(), "hf", A100) == (HALF, FULL)
    assert choose_types(model(), "vllm", CPU) == choose_types(model(), "vllm", T4) == (FULL, FULL)
    assert choose_types(model(dtype="bfloat16"), "vllm", CPU) == (HALF, HALF)
    assert choose_types(model(weights="bfloat16"), "vllm", A100) == (HALF, HALF)
    assert choose_types(model(head="bfloat16"), "hf", CPU) == (FULL, HALF)
    (line,) = [line for line in model(head="bfloat16", dtype="float32").problems() if "head" in line]
    assert line.startswith("model.head=bfloat16 ")


def test_memory_is_divided_finely_where_there_is_a_gpu_and_no_one_has_said_how():
    given = {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    divide_memory_finely(given, ["A100"])
    assert given == {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    alone: dict[str, str] = {}
    divide_memory_finely(alone, [])
    assert alone == {}
    divide_memory_finely(alone, ["A100"])
    assert alone == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
