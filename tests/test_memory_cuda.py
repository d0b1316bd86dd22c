"""The memory plan beside what autograd keeps on a GPU that is not there: published shapes, bfloat16, its kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_memory import SHAPES
from test_cuda_branches import needs

from rlreason.model import memory as f
from rlreason.model.memory import Head
from tests.starts import ROOT


@pytest.mark.long
@needs
def test_a_gpu_keeps_for_the_gradient_what_the_plan_says(tmp_path):
    words = [sys.executable, str(Path(__file__).with_name("cuda_memory.py")), str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(rows) == 3 * len(SHAPES)
    for row in rows:
        shape = SHAPES[row["name"]]
        casts = f.cast_bytes(shape, weights=4, products=2)
        tokens = f.TokenRow(row["tokens"], row["scored"], 2, checkpointing=row["checkpointing"])
        kept, held, _ = f.training_bytes(shape, tokens, Head(row["head"], 2, on_gpu=True), casts)
        # an argument of layers that are computed again: held, but not by a hook
        rotary = 4 * row["tokens"] * 2 * shape.head_dim if row["checkpointing"] else 0
        assert kept + held - rotary == pytest.approx(row["kept"], rel=0.002), row
