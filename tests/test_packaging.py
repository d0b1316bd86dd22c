"""What a newcomer gets: all of the package, in a wheel that is built from the sdist and can be installed."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

import rlreason

ROOT = Path(__file__).resolve().parents[1]
PATHS = sysconfig.get_paths()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """An sdist, the wheel that is built from it, as `make dist` makes them, without network, and its `content`."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    shutil.unpack_archive(next(folder.glob("*.whl")), folder / "content", "zip")
    return folder


def files_under(folder: Path) -> set[str]:
    """Relative paths of all files but what Python itself writes."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {path.as_posix() for path in paths if "__pycache__" not in path.parts}


@pytest.mark.long
def test_the_wheel_holds_every_file_of_the_package_and_of_its_resources(dist) -> None:
    """Bug: a pattern of .gitignore takes a file out of the wheel."""
    included = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    for source, target in {"rlreason": "rlreason", "hydra_plugins": "hydra_plugins", **included}.items():
        of_tree, of_wheel = files_under(ROOT / source), files_under(dist / "content" / target)
        assert of_tree, f"{source}/ is empty"
        assert not of_tree - of_wheel, "does a pattern of .gitignore match them? Begin it with a slash"
    assert list((dist / "content/rlreason").rglob("shipped/*.safetensors")), "the shipped start model is missing"


def run(*argv: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A program that knows nothing of this checkout."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(list(map(str, argv)), cwd=cwd, env=env, capture_output=True, text=True)


@pytest.mark.long
def test_the_installed_program_runs_from_an_empty_folder(dist, tmp_path) -> None:
    """Bug: what pip installs from the wheel lacks a file or a package. The libraries are those of the tests."""
    place, (wheel,) = tmp_path / "env", dist.glob("*.whl")
    venv.create(place)
    rlreason_, python = place / "bin/rlreason", place / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    (site,) = place.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text("".join(f"{path}\n" for path in {PATHS["purelib"], PATHS["platlib"]}))
    said = run(python, "-c", "import rlreason; print(rlreason.__file__)", cwd=tmp_path).stdout
    assert said.startswith(str(place))
    assert run(rlreason_, "--version", cwd=tmp_path).stdout == f"rlreason {rlreason.__version__}\n"
    shown = run(rlreason_, "--help", cwd=tmp_path).stdout
    assert re.search(r"^sweep: .*grpo_learning_rate", shown, re.MULTILINE)
    small = ["n_steps=2", "rollout_batch_size=16", "group_size=4", "eval_problems=8", "sampling.max_tokens=16"]
    done = run(rlreason_, *small, "hydra.run.dir=demo", cwd=tmp_path)  # the demo's own model and prompt, both shipped
    assert (done.returncode, done.stderr) == (0, "")
    assert run(python, "-m", "rlreason", "inspect", "demo", cwd=tmp_path).returncode == 0
