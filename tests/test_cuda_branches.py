"""What is asked of a GPU, tried without one: shapes, number types, layouts and arguments; no number is compared here.

The checks are in cuda_branches.py and run in one process, on a GPU that is not there.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cuda_branches import CHECKS

needs = pytest.mark.skipif(
    torch.version.cuda is not None or shutil.which("g++") is None,
    reason="for a torch without CUDA, which a device guard is compiled for: needs g++",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Name of each check -> its traceback, empty where all was as it should be."""
    words = [sys.executable, str(Path(__file__).with_name("cuda_branches.py")), str(tmp_path_factory.mktemp("guard"))]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    return {told["check"]: told["failed"] for told in map(json.loads, ended.stdout.splitlines())}


@needs
@pytest.mark.parametrize("name", CHECKS)
def test_a_gpu_is_asked_for_the_right_thing(outcomes, name):
    assert outcomes[name] == "", outcomes[name]
