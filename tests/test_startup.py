"""What a command and a run load before they work: libraries of which a run makes no use stay where they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.starts import ENV, SMALL

#: What a run by default has no use for, but a few settings do.
UNUSED = {
    "IPython", "bitsandbytes", "datasets", "joblib", "latex2sympy2_extended", "math_verify", "matplotlib.pyplot",
    "pandas", "peft", "pyarrow", "reasoning_gym", "sklearn", "submitit", "tensorboard", "torchvision", "trackio",
    "vllm", "wandb",
}  # fmt: skip
#: What only a run has a use for, and no question about settings, check of a sweep or sweep itself.
OF_RUNS = {"accelerate", "matplotlib", "safetensors", "scipy", "sympy", "torch", "transformers"}
TELL = """
import atexit, json, sys
from pathlib import Path
atexit.register(lambda: Path("told").write_text(json.dumps(list(sys.modules))))
from rlreason.__main__ import main
main()
"""


def loaded(place: Path, *words: str, code: int = 0) -> set[str]:
    """The modules of a command's process when it ends."""
    argv = [sys.executable, "-c", TELL, *words]
    done = subprocess.run(argv, cwd=place, env=os.environ | ENV, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    return set(json.loads((place / "told").read_text()))


def test_a_run_loads_nothing_that_it_has_no_use_for_and_a_question_or_mistake_no_library_of_runs(tmp_path):
    for words in (["--cfg", "job"], ["--version"], ["--help"]):
        assert not loaded(tmp_path, *words) & (OF_RUNS | UNUSED), words
    assert not loaded(tmp_path, "std_norm=true", code=2) & (OF_RUNS | UNUSED)
    modules = loaded(tmp_path, *SMALL, "n_steps=1", "hydra.run.dir=run")
    assert "torch" in modules
    assert not modules & UNUSED
