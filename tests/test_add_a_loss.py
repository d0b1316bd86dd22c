"""CONTRIBUTING's example "Add a loss", performed word for word on a copy of the project."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.starts import ROOT, SMALL


def block(language: str) -> str:
    section = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a loss")[1]
    (code,) = re.findall(rf"```{language}\n(.*?)```", section, re.DOTALL)
    return code


@pytest.fixture
def project(tmp_path) -> Path:
    """A copy of the project in which the two places are written."""
    for part in ("rlreason", "conf", "prompts", "multirun_sweeps"):
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "rlreason/objectives/losses.py").open("a") as losses:
        losses.write("\n\n" + block("python"))
    (tmp_path / "conf/loss/gmpo.yaml").write_text(block("yaml"))
    return tmp_path


#: Commands one after the other in one process, which imports torch once.
COMMANDS = """
import json, sys
from rlreason.__main__ import main
codes = []
for words in json.loads(sys.argv[1]):
    sys.argv = ["rlreason", *words]
    try:
        main()
    except SystemExit as end:
        codes.append(end.code)
sys.exit(codes != [0, 2, 0, 0])
"""


@pytest.mark.long
def test_the_example_is_an_option_like_any_other(project):
    commands = [
        ["--help"],
        ["loss=gmpo", "loss.log_clip_low=-1"],
        ["loss=gmpo", "loss.log_clip_low=0.3", *SMALL, "epochs_per_rollout=2", "logger=none", "hydra.run.dir=run"],
        ["inspect", "run", "--gradients"],
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(project)}
    argv = [sys.executable, "-c", COMMANDS, json.dumps(commands)]
    done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search("^loss: .*gmpo", done.stdout, re.MULTILINE)
    assert re.fullmatch("rlreason: loss.log_clip_low=-1.0 .*\n", done.stderr)
    assert "GMPO (arXiv 2507.20673) with other numbers" in " ".join(done.stdout.split())
    rows = [json.loads(line) for line in (project / "run/metrics.jsonl").read_text().splitlines()]
    assert any("train/ratio" in row and "train/clip_fraction" in row for row in rows)
    assert re.search(r"^this run .* gmpo, masked_mean, mean/group_std$", done.stdout, re.MULTILINE)
    assert re.search(r"^loss=gmpo .* gmpo, masked_mean, mean/group_std$", done.stdout, re.MULTILINE)
