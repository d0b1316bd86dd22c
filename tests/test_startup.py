"""What a command and a run load before they work: libraries of which a run makes no use stay where they are."""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

from rlreason.runtime.machine import loading
from tests.starts import SMALL

#: What a run by default has no use for, but a few settings do.
UNUSED = [
    "IPython", "bitsandbytes", "datasets", "joblib", "latex2sympy2_extended", "math_verify", "matplotlib.pyplot",
    "pandas", "peft", "pyarrow", "reasoning_gym", "sklearn", "submitit", "tensorboard", "torchvision", "trackio",
    "vllm", "wandb",
]  # fmt: skip
#: What only a run has a use for, and no question about settings, check of a sweep or sweep itself.
OF_RUNS = ["accelerate", "matplotlib", "safetensors", "scipy", "sympy", "torch", "transformers"]
TELL = """
import atexit, gc, json, sys
from pathlib import Path
def tell():
    told = {"modules": list(sys.modules), "on": gc.isenabled(), "frozen": gc.get_freeze_count()}
    told["old"] = gc.get_stats()[2]["collections"]
    Path("told").write_text(json.dumps(told))
atexit.register(tell)
from rlreason.__main__ import main
main()
"""


def told(place: Path, *words: str) -> dict:
    """What a command tells of its process when it ends."""
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", TELL, *words], cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((place / "told").read_text())


def loaded(names: list[str], modules: list[str]) -> list[str]:
    return sorted(set(names) & set(modules))


def test_a_run_loads_nothing_that_it_has_no_use_for_and_collects_no_garbage_meanwhile(tmp_path):
    after = told(tmp_path, *SMALL, "n_steps=1", "hydra.run.dir=run")
    assert "torch" in after["modules"]
    assert not loaded(UNUSED, after["modules"])
    assert after["on"]
    assert after["frozen"] > 100_000  # the objects of the libraries
    assert after["old"] < 5  # looks through all that lives; eight without care


def test_questions_about_settings_load_no_library_of_runs(tmp_path):
    for words in (["--cfg", "job"], ["--version"], ["--help"]):
        after = told(tmp_path, *words)
        assert not loaded(OF_RUNS + UNUSED, after["modules"]), words
        assert after["on"]


def test_a_block_that_loads_leaves_the_collector_as_it_was():
    frozen = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
        with loading():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen  # whoever calls from Python may have garbage of his own
    gc.disable()
    try:
        with loading():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
