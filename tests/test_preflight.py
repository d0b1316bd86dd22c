"""What is found before anything slow is loaded, and what a start that was refused leaves behind."""

import dataclasses
import json

import pytest
import torch

from rlreason.config.groups import LOGGERS, GradingConfig
from rlreason.config.model import TinyModelConfig
from rlreason.config.store import typed
from rlreason.data.prepare import Loaded
from rlreason.errors import ConfigError, DataError, EngineError, ResourceError
from rlreason.grading import Grader
from rlreason.grading.grader import Graders
from rlreason.model.memory import shape_of
from rlreason.model.plan import planned, savings
from rlreason.records.resume import MAY_CHANGE, changed
from rlreason.runtime.machine import Device
from rlreason.training.build import try_own_rewards
from rlreason.training.preflight import (
    memory_for,
    missing_packages,
    needed_by,
    out_of_memory,
    own_functions,
    preflight,
    room_for,
    space_needed,
    unusable,
)
from rlreason.types import Problem
from tests.starts import ROOT, SMALL, rlreason
from tests.waiting import patient

MODULES = {
    "good.py": "number = 3\n",
    "broken.py": "def f(:\n",
    "judge.py": "def one(response):\n    return 1.0\n\ndef raises(response, gold):\n    raise KeyError(gold)\n\n"
                "def none(response, gold):\n    return None\n\n"
                "def slow(response, gold):\n    import time\n    time.sleep(30)\n\n"
                "def number(response, gold, fast=True):\n    return float(int(gold) > 1)\n",
}  # fmt: skip


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Functions of a user's own in the current folder, where Python looks."""
    for name, text in MODULES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("nowhere:f", "nowhere"), ("good:numbre", "good:number?"), ("good:number", "of type int"),
        ("broken:f", "({here}/broken.py, line 1)"), ("judge:number", ""), ("judge:one", "TypeError: "),
        ("judge:raises", "KeyError: '20' ({here}/judge.py"), ("judge:none", "returned None"),
        ("judge:slow", "grading.timeout_s=0.5 s"),
    ],
)  # fmt: skip
def test_a_reward_that_cannot_judge_is_one_line_with_its_own_reason(composed, modules, name, says):
    """Bug: a run learns from a reward that fails on everything."""
    grading, word = GradingConfig(timeout_s=0.5) if name == "judge:slow" else patient(), f"prompt.reward={name}"
    if not (why := unusable(word, name, grading)):
        run = typed(composed(word, f"grading.timeout_s={grading.timeout_s}"))
        with Grader(grading, name) as grader:
            try:
                try_own_rewards(run, Graders(grader, grader, None), Loaded([], [Problem("p", "q", "20")], {}))
            except ConfigError as error:
                why = str(error)
    assert says.format(here=modules) in why
    assert why.startswith(word) == bool(says)
    assert len(why.splitlines()) == bool(says)


def test_every_function_of_the_users_own_is_tried(composed):
    assert own_functions(typed(composed())) == []
    mine = typed(composed("algorithm=best_of_n", "prompt.reward=a:b", "scorer=c:d"))
    assert own_functions(mine) == [("prompt.reward=a:b", "a:b"), ("scorer=c:d", "c:d")]
    countdown = typed(composed("data=countdown", "model=smollm2_135m", "data.verifier=mine.sums"))
    assert own_functions(countdown) == [("data.verifier=mine.sums", "mine.sums:r1_zero")]


def test_runs_that_could_not_begin_are_refused_together(composed, modules):
    """Bug: a sweep is mended and started once for each of its mistakes."""
    (modules / "mine.prompt").write_text("what?")
    words = ("prompt.reward=nowhere:f", f"prompt.file={modules}/mine.prompt")
    with pytest.raises(ConfigError, match=r"mine.prompt.*\nprompt.reward=nowhere:f: [^\n]+$"):
        preflight([typed(composed(*words)), typed(composed(*words, "seed=1")), typed(composed())], modules)


def test_data_that_is_no_use_is_found_early_where_reading_is_quick(composed, modules):
    rows = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(4)]
    for half, part in (("train", rows[:2]), ("test", rows[2:])):
        (modules / f"{half}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    own = ("model=smollm2_135m", "prompt.reward=judge:number", f"data.path={modules}")
    assert preflight([typed(composed(*own, "eval_problems=2"))], modules) == []
    with pytest.raises(ConfigError, match="eval_problems=3 is more than"):
        preflight([typed(composed(*own, "eval_problems=3"), ["eval_problems"])], modules)
    (modules / "test.jsonl").write_text('{"question": "1+1?", "answer": "#### 2"}\nnonsense\n')
    with pytest.raises(DataError, match="line 2 "):
        preflight([typed(composed(*own))], modules)
    (modules / "train.jsonl").write_bytes(b" " * 30_000_000)
    assert preflight([typed(composed(*own))], modules) == []  # read when the run has begun
    assert not typed(composed("model=smollm2_135m", "data.path=openai/gsm8k")).data.quickly_read
    assert not typed(composed("data.n_train=1000000")).data.quickly_read


def test_the_packages_that_a_run_needs_and_no_other(composed, gsm8k):
    model, files = "model=smollm2_135m", f"data.path={gsm8k}"
    for name, words in {
        "": (model, files),
        "vllm": ("rollout=vllm",),
        "peft": ("model.lora.rank=2",),
        "bitsandbytes": ("optimizer=adamw_8bit",),
        "datasets": (model, files, "data@eval.data=gsm8k", "eval.data.path=openai/gsm8k"),
        "reasoning_gym": (model, "data=reasoning_gym", "data.task=gcd"),
        **{name: (f"logger={name}",) for name in LOGGERS},
    }.items():
        needed = dict(needed_by(typed(composed(*words))))
        assert [*needed] == [name] * bool(name)
        assert all("install" in message for message in needed.values())
    assert missing_packages(typed(composed(model, files))) == []
    asks = typed(composed(model, "data@eval.data=gsm8k", f"eval.data.path={gsm8k}", "algorithm=evaluate"))
    asks.data.path = "openai/gsm8k"  # which an evaluation of other data does not read
    assert "datasets" not in dict(needed_by(asks))


# What does not fit


def test_the_disk_must_hold_what_a_run_surely_writes(composed, tmp_path):
    run, model = typed(composed()), 4 * shape_of(TinyModelConfig("tiny"))[0].numbers
    need = space_needed(run)
    assert need.model == model
    without = space_needed(typed(composed("checkpoint.every=0")))
    assert need.peak - without.peak == 4 * 3 * model  # two are kept, the best, and one is being written
    assert without.peak - model > 80 * 256 * 2000  # 80 steps of 256 responses
    assert space_needed(typed(composed("save_rollouts_every=0"))).left < need.left / 2
    assert space_needed(typed(composed("algorithm=evaluate", "eval_problems=10"))).peak == 10 * (2000 + 30 * 24)
    assert room_for([run], tmp_path / "not/there/yet") == []
    thousand = [typed(composed("scale=paper", "model=smollm2_135m", "n_steps=1000000000", "data.path=a/b"))]
    assert len(room_for(thousand, tmp_path)) == 1
    big = composed("model.width=1024", "model.layers=32", "model.heads=64")
    with pytest.raises(ResourceError, match="save_model"):
        room_for([typed(big)] * 2000, tmp_path)


# What a start that was refused leaves


def test_a_refused_start_leaves_no_folder_of_its_own_and_that_of_another_run_as_it_was(finished_run, tmp_path):
    """The latter is held by the fixture, which compares the folder at its end."""
    done = rlreason("-m", "prompt.reward=r1_zero,nowhere:f", *SMALL, cwd=tmp_path)
    assert done.returncode == ConfigError.exit_code
    assert "prompt.reward=nowhere:f" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    done = rlreason(*SMALL, "seed=7", f"hydra.run.dir={finished_run.folder}", cwd=tmp_path)
    assert done.returncode == ConfigError.exit_code


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
    words = [word for word in str(refused.value).split() if "=" in word]
    overrides = [word for word in words if not word.startswith("model.check_memory")]
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
    assert said.startswith("memory: does not fit: about ")  # and is not refused: pages can be swapped
    assert "micro_batch_tokens=" in said
    assert memory_for(runs[:1], Device("cpu", "a machine that tells nothing")) == []


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
    """Bug: all that a user sees is torch's traceback, or nobody ever sees it."""
    (tmp_path / "heavy_loss.py").write_text(HEAVY)
    words = ("loss=heavy_loss:heavy", *SMALL, "hydra.run.dir=out")
    done = rlreason(*words, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == ResourceError.exit_code
    assert done.stderr.startswith("rlreason: out of memory: ")
    assert done.stderr.count("\n") == 1
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert (status["status"], f"rlreason: {status['reason']}\n") == ("failed", done.stderr)
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


def test_the_page_holds_todays_table_where_whoever_does_not_fit_has_a_cure(monkeypatch):
    """Bug: docs/scale.md promises that an experiment fits a card, and the plan has changed since."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from plans_by_card import CARDS, EXPERIMENTS, put_between, table

    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert put_between(page, table()) == page, "python benchmarks/plans_by_card.py docs/scale.md writes it again"
    rows = [line.strip("|").split("|") for line in table()[2:]]
    assert len(rows) == len(EXPERIMENTS) * len(CARDS)
    for row in rows:
        assert ("fits" in row[2]) == (row[3].strip() == "-")
        assert "none" not in row[3]
