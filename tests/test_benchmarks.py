"""The benchmarks' own parts: what makes two sides comparable; rlreason's side and the checks for a card run."""

import json
import math
import os
import subprocess
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import grpo_vs_trl  # noqa: E402
import sft_vs_trl  # noqa: E402
from against_trl import Step, digest, gsm8k, save_small, summed_up, table  # noqa: E402
from gpu_check import CHECKS  # noqa: E402

from rlreason.data.tasks import make_stories  # noqa: E402

STEP = Step(2.0, 100.0, 1000, "ab", -2.0, 1.5, 0.3)


def test_ratios_are_those_of_pairs_without_the_first():
    mine = [replace(STEP, seconds=s) for s in (90.0, 1.0, 2.0, 6.0)]
    theirs = [replace(STEP, seconds=s, memory=200.0) for s in (1.0, 4.0, 4.0, 4.0)]
    row = summed_up(mine, theirs, True, True)
    assert (row["ratio"], row["memory"], row["valid"]) == (0.5, 0.5, True)
    assert "| 2.00 | 4.00 | **0.50** | 100 | 200 | 0.50 | yes |" in table({"given": row})
    for same_ids, changed in ((True, {"digest": "cd"}), (True, {"log_prob": -2.0002}), (False, {"tokens": 1021})):
        row = summed_up([STEP] * 3, [replace(STEP, **changed)] * 3, same_ids, True)
        assert (row["valid"], bool(row["wrong"])) == (False, True), "other work is no result"
    assert summed_up([STEP] * 3, [replace(STEP, digest="cd")] * 3, False, True)["valid"]


@pytest.mark.long
def test_every_check_for_a_card_passes_here_or_is_left_out(tmp_path):
    argv = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--quick", "--json", "out.json"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert set(found) == set(CHECKS)
    assert {name for name, row in found.items() if row["passed"] is None} == {"head", "memory", "overlap"}
    assert found["kernels"]["figures"]["sdpa, prompt shared"]["mean"] < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(("script", "work"), [(grpo_vs_trl, "given"), (grpo_vs_trl, "sampling"), (sft_vs_trl, "sft")])
def test_the_side_of_rlreason_runs(script, work, tmp_path):
    """Steps on the same responses have the same tokens; sampled and further ones have not. All tokens are counted."""
    rows = [{"question": p.question, "answer": f"{p.solution}\n#### {p.answer}"} for p in make_stories(60, seed=0)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_small(tmp_path / "model", [f"{p.question} {p.solution}" for p in gsm8k(tmp_path, 60)])
    sizes = {"steps": 2, "micro_batch_tokens": 4096}
    folder, watch = str(tmp_path / "model"), Mock()
    script.ours(Namespace(data=tmp_path, folder=folder, work=[work], dtypes=["float32"], **sizes), watch)
    first, second = (call.args for call in watch.done.call_args_list)
    assert (digest(first[0]) == digest(second[0])) == (work == "given")
    for pairs, log_prob, entropy, norm in (first, second):
        assert sum(len(prompt) + len(response) for prompt, response in pairs) > 1000
        assert (log_prob < 0 < entropy, 0 < norm < math.inf) == (True, True)
