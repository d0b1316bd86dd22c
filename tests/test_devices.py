"""Which device, number types, threads and engine a run gets; for machines that are not here, by their facts."""

import contextlib
import math
import multiprocessing
import os
import tempfile
from multiprocessing import util
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch

from rlreason.config.model import PretrainedModelConfig
from rlreason.config.rules import complaints
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.model.parameters import choose_dtype, choose_types, machine_remarks, pick_device
from rlreason.runtime import machine
from rlreason.sweeps.state import RunState, refuse_changed
from rlreason.training.build import set_threads
from rlreason.training.preflight import lacking
from tests.run_settings import settings

CPU, A100, T4 = machine.Device("cpu"), machine.Device("cuda", "A100"), machine.Device("cuda", "Tesla T4", bf16=False)
HALF, FULL = torch.bfloat16, torch.float32


def model(**chosen):
    return PretrainedModelConfig("local", path="/m", **chosen)


def test_a_driver_that_is_missing_or_fails_and_memory_that_is_shared_with_the_processor(monkeypatch):
    def memory(handle: str) -> SimpleNamespace:
        if handle == "GB10":
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return SimpleNamespace(free=7, total=8)

    for name, answer in {
        "Init": lambda: None, "Shutdown": lambda: None, "DeviceGetCount": lambda: 2, "DeviceGetName": str,
        "DeviceGetHandleByIndex": ("H100", "GB10").__getitem__, "DeviceGetMemoryInfo": memory,
        "DeviceGetCudaComputeCapability": lambda handle: (9, 0), "SystemGetDriverVersion": lambda: "550.54",
    }.items():  # fmt: skip
        monkeypatch.setattr(pynvml, f"nvml{name}", answer)
    two = machine.Device("cuda", "H100", 7, 8), machine.Device("cuda", "GB10")
    assert machine.query_driver() == machine.Driver(two, "550.54")
    for code, fails in (
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, False),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, True),
    ):
        monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=pynvml.NVMLError(code)))
        assert (machine.query_driver().gpus, bool(machine.query_driver().failure)) == ((), fails)


def test_types_follow_settings_engine_and_card_and_one_that_the_card_lacks_is_said_or_refused():
    assert "Tesla T4" in machine_remarks(model(), T4)[0]
    assert machine_remarks(model(dtype="float32"), T4) == []  # as asked
    for setting in ("dtype", "weights", "head"):
        asked = model(**{setting: "bfloat16"})
        with pytest.raises(ConfigError, match=rf"^model\.{setting}=bfloat16: .*set model\.{setting}=float32"):
            choose_types(asked, "hf", T4)
        choose_types(asked, "hf", A100)
        choose_types(asked, "hf", CPU)  # a processor computes it, if slowly
    assert [choose_dtype("auto", here) for here in (A100, T4, CPU)] == [HALF, FULL, FULL]
    assert choose_types(model(), "vllm", A100) == (HALF, HALF)
    assert choose_types(model(), "hf", A100) == (HALF, FULL)
    assert choose_types(model(), "vllm", CPU) == choose_types(model(), "vllm", T4) == (FULL, FULL)
    assert choose_types(model(dtype="bfloat16"), "vllm", CPU) == (HALF, HALF)
    assert choose_types(model(weights="bfloat16"), "vllm", A100) == (HALF, HALF)
    assert choose_types(model(head="bfloat16"), "hf", CPU) == (FULL, HALF)
    assert choose_types(model(dtype="float16"), "hf", T4) == (torch.float16, FULL)
    (line,) = [line for line in model(head="bfloat16", dtype="float32").problems() if "head" in line]
    assert line.startswith("model.head=bfloat16 ")


def test_apples_gpu_is_taken_where_it_is_and_what_it_lacks_is_one_line(monkeypatch):
    """Bug: a run asks for a device, or a number type, and computes on another, or ends in a traceback."""
    with pytest.raises(ConfigError, match=r"^device=mps: .* set device=auto$"):
        pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert (pick_device("mps").type, pick_device().type) == ("mps", "cpu")
    for words in (("device=mps", "model.dtype=float16"), ("device=mps", "gpus=2"), ("model.dtype=float16", "gpus=2")):
        with pytest.raises(ConfigError, match=words[0]):
            settings(*words)
    assert "PYTORCH_ENABLE_MPS_FALLBACK=1" in str(lacking(settings("device=mps"), NotImplementedError("aten::x")))


def test_memory_is_divided_finely_where_there_is_a_gpu_and_no_one_has_said_how(monkeypatch):
    here, without, told = {}, {}, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}
    for given, gpus in ((here, ["A100"]), (without, []), (told, ["A100"])):
        monkeypatch.setattr(os, "environ", given)
        monkeypatch.setattr(machine, "driver_gpus", lambda gpus=gpus: gpus)
        machine.divide_memory_finely()
    assert (here, without, len(told)) == ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {}, 1)


def test_sockets_have_a_place_where_the_path_of_the_temporary_folder_is_too_long(tmp_path, monkeypatch):
    """Bug: with a long TMPDIR every sweep and check fails: AF_UNIX path too long."""
    (long := tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    monkeypatch.setattr(multiprocessing.current_process(), "_config", {})
    machine.place_sockets()
    assert tempfile.gettempdir() == str(long)
    assert Path(util.get_temp_dir()).parent == Path("/tmp")


def test_threads_are_as_many_as_asked_or_as_affinity_and_the_smallest_quota_of_a_group_and_all_above_it(monkeypatch):
    for group, files, quota in (
        ("", {}, math.inf),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),  # in a container, which sees its own group as the root
        ("0::/\n", {"cpu.max": "a mess of words"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),  # bound from above
    ):
        there = {f"/sys/fs/cgroup/{path}": text for path, text in files.items()} | {"/proc/self/cgroup": group}
        monkeypatch.setattr(machine, "read_text", there.get)
        assert machine.cgroup_quota() == quota
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert machine.usable_processors() == 1
    set_threads(settings("threads=2"))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


@pytest.mark.parametrize("missing", ["", "files", "gpu", "vllm"])
def test_vllm_takes_a_model_in_files_a_gpu_and_vllm(missing, composed, monkeypatch):
    monkeypatch.setattr("rlreason.config.groups.finds_gpus", lambda: missing != "gpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if missing != "vllm" else None)
    words = () if missing == "files" else ("model=qwen3_0_6b", "data.path=a/b")
    run = typed(composed(*words))
    assert run.rollout.engine == ("hf" if missing else "vllm")
    assert typed(composed(*words, f"rollout={run.rollout.engine}")) == run
    assert complaints(run) == {}


def test_a_sweep_whose_nodes_chose_another_engine_goes_on_where_it_was_started(tmp_path):
    """As behind a login node without a GPU; an engine that the words name is a setting like any other."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.yaml").write_text("rollout: {engine: vllm}\nn_steps: 3\n")
    (tmp_path / "a/summary.json").write_text("{}")
    for word, n_steps, refused in (("seed=0", 3, ""), ("rollout=hf", 3, "rollout.engine"), ("seed=0", 4, "n_steps")):
        config = f"rollout: {{engine: hf}}\nn_steps: {n_steps}\n"
        with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
            refuse_changed(tmp_path, [RunState("a", [word], {}, 0)], lambda run, config=config: config)


def test_a_machine_whose_gpus_are_not_reached_is_told_why(monkeypatch):
    why = {"2,0": "unset CUDA_VISIBLE_DEVICES", None: "pip install", "GPU-5e1c": "update the driver"}
    for visible, cure in why.items():
        unseen = machine.why_unseen(["A10", "A10"], visible, "2.13.0", visible and "13.0")
        assert cure in unseen[1]
    assert machine.why_unseen([], "2,0", "2.13.0", "13.0") is None
    monkeypatch.setattr("rlreason.model.parameters.why_unseen", lambda *_: unseen)
    assert machine_remarks(model(), CPU) == [f"! {unseen[0]}: {unseen[1]}"]
    assert machine_remarks(model(), A100) == []
