"""Where memory does not suffice: refused before anything loads, and in one line where it runs out all the same."""

import dataclasses
import json
import sys

import pytest
import torch

from rlreason.config.store import typed
from rlreason.errors import ConfigError, EngineError, ResourceError
from rlreason.model.plan import planned, savings
from rlreason.records.resume import MAY_CHANGE, changed
from rlreason.runtime.machine import Device
from rlreason.training.preflight import memory_for, out_of_memory
from tests.starts import ROOT, SMALL, rlreason

sys.path.insert(0, str(ROOT / "benchmarks"))

from plans_by_card import CARDS, EXPERIMENTS, put_between, table

GIB = 1 << 30
LARGE = ("model=qwen2_5_math_1_5b", "data=gsm8k", "data.path=a/b", "rollout=vllm")
ROOMY = Device("cuda", "a card of 80 GB", int(79.1 * GIB), 80 * GIB)
SMALLER = Device("cuda", "a card of 24 GB", int(23.5 * GIB), 24 * GIB)


def test_a_run_that_surely_does_not_fit_its_gpu_is_refused_unless_asked_otherwise(composed):
    run = typed(composed(*LARGE))
    assert memory_for([run], ROOMY) == []
    (tight,) = memory_for([run], dataclasses.replace(ROOMY, free=57 * GIB))
    assert tight.startswith("memory: may not fit: ")
    assert "micro_batch_tokens=4096 takes " in tight
    with pytest.raises(ConfigError, match="memory: does not fit: ") as refused:
        memory_for([run], SMALLER)
    overrides = [
        word for word in str(refused.value).split() if "=" in word and not word.startswith("model.check_memory")
    ]
    assert planned(typed(composed(*LARGE, *overrides)), SMALLER).verdict == "fits"
    (said,) = memory_for([typed(composed(*LARGE, "model.check_memory=false"))], SMALLER)
    assert said.startswith("memory: does not fit")


def test_the_runs_of_a_sweep_are_held_against_the_whole_card_and_what_surely_fits_is_worth_no_word(composed):
    runs = [typed(composed(*LARGE, f"seed={seed}")) for seed in range(3)]
    busy = dataclasses.replace(ROOMY, free=GIB)  # by the runs that are under way
    assert memory_for(runs, busy) == []
    with pytest.raises(ConfigError, match="does not fit"):
        memory_for([*runs, typed(composed(*LARGE, "micro_batch_tokens=32768"))], busy)
    assert memory_for([typed(composed())], ROOMY) == []  # the built-in model
    assert memory_for(runs[:1], Device("cpu", "here", 200 * GIB, 256 * GIB)) == []
    (said,) = memory_for(runs[:1], Device("cpu", "here", 20 * GIB, 256 * GIB))
    assert said.startswith("memory: does not fit")  # and is not refused: pages can be swapped


def test_whatever_runs_out_of_memory_is_said_with_its_cure_and_no_other_error_is(composed):
    run = typed(composed(*LARGE))
    behind = EngineError("rollout=vllm failed")
    behind.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    for error in (
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.9 GiB"),
        EngineError("training on 2 ranks ended: rank 1 failed: OutOfMemoryError: CUDA out of memory"),
        EngineError("rollout=vllm failed: ValueError: No available memory for the cache blocks."),
        behind,
    ):
        line = out_of_memory(run, error)
        assert isinstance(line, ResourceError)
        assert str(line).startswith("out of memory: lower micro_batch_tokens=8192")
    for error in (RuntimeError("shapes differ"), ConfigError("out of memory is no word of it")):
        assert out_of_memory(run, error) is None


HEAVY = """
import torch

def heavy(advantages, policy_log_probs):
    "-A log p"
    if len(policy_log_probs) > 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.90 GiB.")
    return -advantages * policy_log_probs
"""


def test_a_real_run_that_runs_out_of_memory_ends_in_one_line_and_keeps_the_traceback(tmp_path):
    (tmp_path / "heavy_loss.py").write_text(HEAVY)
    words = ("loss=heavy_loss:heavy", *SMALL, "hydra.run.dir=out")
    done = rlreason(*words, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == ResourceError.exit_code
    (line,) = done.stderr.splitlines()
    assert line.startswith("rlreason: out of memory: ")
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert (status["status"], status["reason"]) == ("failed", line.removeprefix("rlreason: "))
    log = (tmp_path / "out/log.txt").read_text()
    assert all(part in log for part in ("Traceback", "heavy_loss.py", "Tried to allocate 2.90 GiB"))


def test_an_interrupted_run_goes_on_with_the_settings_that_save_memory(composed):
    """With all that the plan offers of what leaves the result as it is, and with no other."""
    run = typed(composed(*LARGE, "kl_placement=loss", "kl_coef=0.1"))
    offered = {(key, same) for saved, same in savings(run, 1024) for key in saved}
    assert len(offered) == len({key for key, _ in offered})
    for key, same_result in offered:
        before = {key: 1, "learning_rate": 1}
        assert (changed(before, before | {key: 2}, MAY_CHANGE) == "") == same_result, key
    assert changed({"learning_rate": 1}, {"learning_rate": 2}, MAY_CHANGE)


def test_the_page_holds_todays_table_where_whoever_does_not_fit_has_a_cure():
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert put_between(page, table()) == page, "python benchmarks/plans_by_card.py docs/scale.md writes it again"
    rows = [line.strip("|").split("|") for line in table()[2:]]
    assert len(rows) == len(EXPERIMENTS) * len(CARDS)
    for row in rows:
        assert ("fits" in row[2]) == (row[3].strip() == "-")
        assert "none" not in row[3]
