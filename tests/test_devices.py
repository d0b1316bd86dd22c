"""Which device, number types, threads and engine a run gets; for machines that are not here, by their facts."""

import contextlib
import json
import math
import os
import shutil
from types import SimpleNamespace
from unittest.mock import Mock

import pynvml
import pytest
import torch
import yaml

from rlreason import compose as train_config
from rlreason.config.groups import engine_here
from rlreason.config.model import PretrainedModelConfig
from rlreason.config.rules import complaints
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.model.parameters import Hardware, choose_dtype, choose_types, machine_remarks
from rlreason.runtime.machine import (
    Device,
    Driver,
    cgroup_quota,
    divide_memory_finely,
    query_driver,
    usable_processors,
    why_unseen,
)
from rlreason.sweeps.state import RunState, refuse_changed
from rlreason.training.build import set_threads
from tests.run_settings import settings

CPU, A100, T4 = Hardware(), Hardware("A100"), Hardware("Tesla T4", bf16=False)
HALF, FULL = torch.bfloat16, torch.float32


def model(**chosen):
    return PretrainedModelConfig("local", path="/m", **chosen)


def test_a_driver_that_is_missing_or_fails_and_memory_that_is_shared_with_the_processor(monkeypatch):
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
    missing, broken = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    for code, fails in ((missing, False), (broken, True)):
        monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=pynvml.NVMLError(code)))
        assert (query_driver().gpus, bool(query_driver().failure)) == ((), fails)


@pytest.mark.parametrize(
    ("visible", "built_for", "cure"),
    [
        ("2,0", "13.0", "unset CUDA_VISIBLE_DEVICES"), (None, None, "pip install"),
        ("GPU-5e1c", "13.0", "update the driver"),
    ],
)  # fmt: skip
def test_a_machine_whose_gpus_are_not_reached_is_told_why(visible, built_for, cure, monkeypatch):
    unseen = why_unseen(["A10", "A10"], visible, "2.13.0", built_for)
    assert cure in unseen[1]
    monkeypatch.setattr("rlreason.model.parameters.why_unseen", lambda *_: unseen)
    assert machine_remarks(model(), CPU) == [f"! {unseen[0]}: {unseen[1]}"]
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


@pytest.mark.parametrize(
    ("given", "gpus", "becomes"),
    [
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, ["A100"], {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}),
        ({}, [], {}), ({}, ["A100"], {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    ],
)  # fmt: skip
def test_memory_is_divided_finely_where_there_is_a_gpu_and_no_one_has_said_how(given, gpus, becomes):
    divide_memory_finely(given, gpus)
    assert given == becomes


# The default number of threads: affinity, and the quota of control groups


@pytest.mark.parametrize(
    ("memberships", "files", "quota"),
    [
        ("", {}, math.inf),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),  # in a container, which sees its own group as the root
        ("0::/\n", {"cpu.max": "max 100000\n"}, math.inf),
        ("0::/\n", {"cpu.max": "a mess of words"}, math.inf),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000"}, 0.5),  # bound from above
        ("0::/../../host/path\n", {"cpu.max": "100000 100000"}, 1.0),
    ],
)
def test_the_quota_is_the_smallest_of_a_group_and_all_above_it(memberships, files, quota):
    there = {f"/sys/fs/cgroup/{path}": text for path, text in files.items()} | {"/proc/self/cgroup": memberships}
    assert cgroup_quota(there.get) == quota


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_affinity_bounds_the_default_and_an_explicit_number_wins(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert usable_processors() == 1
    try:
        set_threads(settings("threads=2"))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# `rollout=auto`, the default: a run, its records and its resumption see the engine that was chosen


@pytest.mark.parametrize("missing", ["", "files", "gpu", "vllm"])
def test_vllm_takes_a_model_in_files_a_gpu_and_vllm(missing, monkeypatch):
    monkeypatch.setattr("rlreason.config.groups.finds_gpus", lambda: missing != "gpu")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if missing != "vllm" else None)
    assert engine_here(None if missing == "files" else "a/b") == ("hf" if missing else "vllm")


def test_the_settings_of_a_run_hold_the_engine_that_was_chosen(composed):
    pretrained = ("model=qwen3_0_6b", "data.path=a/b")
    for words, path in (((), None), (pretrained, "Qwen/Qwen3-0.6B")):
        run = typed(composed(*words))
        assert run.rollout.engine == engine_here(path)
        assert typed(composed(*words, f"rollout={run.rollout.engine}")) == run
        assert complaints(run) == {}
    assert typed(composed()).rollout.engine == "hf"  # the built-in model, whatever there is
    assert typed(composed(*pretrained, "rollout=vllm")).rollout.engine == "vllm"


def test_a_run_records_its_engine_and_goes_on_with_it(finished_run, tmp_path, monkeypatch):
    """Also on a machine that has, or lacks, a GPU."""
    finished = shutil.copytree(finished_run.folder, tmp_path / "run")
    recorded = yaml.safe_load((finished / "config.yaml").read_text())
    assert recorded["rollout"]["engine"] == "hf"
    assert " rollout=" not in json.loads((finished / "provenance.json").read_text())["command"]
    monkeypatch.chdir(finished.parent)
    recorded["rollout"]["engine"] = other = {"hf": "vllm", "vllm": "hf"}[engine_here(None)]
    (finished / "config.yaml").write_text(yaml.safe_dump(recorded))
    assert train_config(f"resume={finished}").rollout.engine == other
    assert train_config(f"resume={finished}", "rollout=hf").rollout.engine == "hf"


@pytest.mark.parametrize(
    ("word", "config", "refused"),
    [
        ("seed=0", "rollout: {engine: hf}\nn_steps: 3\n", ""),
        ("rollout=hf", "rollout: {engine: hf}\nn_steps: 3\n", "rollout.engine"),
        ("seed=0", "rollout: {engine: hf}\nn_steps: 4\n", "n_steps"),
    ],
)
def test_a_sweep_whose_nodes_chose_another_engine_goes_on_where_it_was_started(word, config, refused, tmp_path):
    """As behind a login node without a GPU; an engine that the words name is a setting like any other."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.yaml").write_text("rollout: {engine: vllm}\nn_steps: 3\n")
    (tmp_path / "a/summary.json").write_text("{}")
    with pytest.raises(ConfigError, match=refused) if refused else contextlib.nullcontext():
        refuse_changed(tmp_path, [RunState("a", [word], {}, 0)], lambda run: config)
