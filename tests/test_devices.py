"""Which device and number types a run gets, and what is said of it; for cards that are not here, by their facts."""

from types import SimpleNamespace

import pynvml
import pytest
import torch

from rlreason.config.model import PretrainedModelConfig
from rlreason.errors import ConfigError
from rlreason.model.parameters import Hardware, choose_dtype, choose_types, machine_remarks
from rlreason.runtime.machine import Device, Driver, divide_memory_finely, query_driver, why_unseen

A100, T4 = Hardware("A100", (8, 0)), Hardware("Tesla T4", (7, 5), bf16=False)
HALF, FULL = torch.bfloat16, torch.float32


def model(**settings):
    return PretrainedModelConfig("local", path="/m", **settings)


@pytest.mark.parametrize(
    ("code", "failure"),
    [(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, ""), (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "mismatch")],
)
def test_without_a_driver_there_is_no_gpu_and_one_that_fails_says_why(code, failure, monkeypatch):
    def broken() -> None:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", broken)
    driver = query_driver()
    assert (driver.gpus, driver.version, bool(driver.failure)) == ((), "", bool(failure))
    assert failure in driver.failure


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
    gpus = (Device("cuda", "H100", 7, 8), Device("cuda", "GB10"))
    assert query_driver() == Driver(gpus, "550.54")


@pytest.mark.parametrize(
    ("visible", "built_for", "says", "cure"),
    [
        ("-1", "13.0", "CUDA_VISIBLE_DEVICES=-1 hides A10, A10: ", "unset CUDA_VISIBLE_DEVICES"),
        ("2,0", "13.0", "CUDA_VISIBLE_DEVICES=2,0 hides", "unset CUDA_VISIBLE_DEVICES"),
        (None, None, "torch 2.13.0 is built for processors alone", "pip install"),
        ("1", "13.0", "does not reach A10, A10", "update the driver"),
    ],
)
def test_a_machine_whose_gpus_are_not_reached_is_told_why(visible, built_for, says, cure, monkeypatch):
    unseen = why_unseen(["A10", "A10"], visible, "2.13.0", built_for)
    assert says in unseen.words
    assert cure in unseen.cure
    monkeypatch.setattr("rlreason.model.parameters.why_unseen", lambda *_: unseen)
    assert machine_remarks(model(), Hardware()) == [f"! {unseen.words}: {unseen.cure}"]
    assert machine_remarks(model(), A100) == []
    assert why_unseen([], visible, "2.13.0", built_for) is None


def test_a_card_without_bfloat16_is_named_where_float32_was_taken_for_it():
    (line,) = machine_remarks(model(), T4)
    assert line.startswith("Tesla T4 (compute capability 7.5) has no bfloat16")
    assert machine_remarks(model(dtype="float32"), T4) == []  # as asked
    assert choose_types(model(), "vllm", T4) == (FULL, FULL)


@pytest.mark.parametrize("setting", ["dtype", "weights", "head"])
def test_bfloat16_is_refused_where_there_is_none(setting):
    asked = model(**{setting: "bfloat16"})
    with pytest.raises(ConfigError, match=rf"^model\.{setting}=bfloat16: Tesla T4") as caught:
        choose_types(asked, "hf", T4)
    assert f"set model.{setting}=float32" in str(caught.value)
    choose_types(asked, "hf", A100)
    choose_types(asked, "hf", Hardware())  # a processor computes it, if slowly


def test_auto_takes_what_the_device_computes():
    assert [choose_dtype("auto", here) for here in (A100, T4, Hardware())] == [HALF, FULL, FULL]
    assert [choose_dtype("float32", here) for here in (A100, T4, Hardware())] == [FULL] * 3


def test_memory_is_divided_finely_where_there_is_a_gpu_and_nobody_has_said_how():
    for given in ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}):
        kept = dict(given)
        divide_memory_finely(kept, ["A100"])
        assert kept == given
    alone: dict[str, str] = {}
    divide_memory_finely(alone, [])
    assert alone == {}
    divide_memory_finely(alone, ["A100"])
    assert alone == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
