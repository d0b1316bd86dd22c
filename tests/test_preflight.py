"""What is found before anything slow is loaded, and what a start that was refused leaves behind."""

import dataclasses
import json

import pytest
import torch

from rlreason.cli.check import check_command_line
from rlreason.config.groups import LOGGERS
from rlreason.config.model import TinyModelConfig
from rlreason.config.store import typed
from rlreason.data.prepare import Loaded
from rlreason.errors import ConfigError, DataError, EngineError, ResourceError
from rlreason.grading import Grader
from rlreason.grading.grader import Graders
from rlreason.model.memory import shape_of
from rlreason.model.plan import savings
from rlreason.records.reader import exit_code
from rlreason.records.resume import MAY_CHANGE, changed
from rlreason.runtime.machine import Device
from rlreason.training import preflight as pre
from rlreason.training.build import try_own_rewards
from rlreason.types import Problem
from tests.run_settings import altered
from tests.small_runs import words_of
from tests.starts import ROOT, rlreason

MODULES = {
    "good.py": "number = 3\n",
    "broken.py": "def f(:\n",
    "judge.py": "def one(response):\n    return 1.0\ndef raises(response, gold):\n    raise KeyError(gold)\n"
                "def none(response, gold):\n    return None\n"
                "def slow(response, gold):\n    import time\n    time.sleep(30)\n"
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


#: A reward -> what is said of it.
REWARDS = {
    "nowhere:f": "nowhere", "good:numbre": "good:number?", "good:number": "of type int",
    "broken:f": "(broken.py, line 1)", "judge:number": "", "judge:one": "two texts",
    "judge:raises": "KeyError: '20' ({here}/judge.py", "judge:none": "returned None",
    "judge:slow": "grading.timeout_s=0.5 s",
}  # fmt: skip


def test_a_reward_that_cannot_judge_is_one_line_with_its_own_reason(composed, modules):
    """Bug: a run learns from a reward that fails on everything."""
    base = typed(composed("prompt.reward=judge:number", "grading.workers=1"))
    for name, says in REWARDS.items():
        why, limit_s = "", 0.5 if name == "judge:slow" else 60
        run = altered(base, prompt__reward=name, grading__timeout_s=limit_s, grading__start_timeout_s=600)
        with Grader(run.grading, name) as grader:
            try:
                pre.preflight([run], modules)
                try_own_rewards(run, Graders(grader, grader, None), Loaded([], [Problem("p", "q", "20")], {}))
            except ConfigError as error:
                why = str(error)
        assert says.format(here=modules) in why
        assert why.startswith(f"prompt.reward={name}") == bool(says)
        assert len(why.splitlines()) == bool(says)


def test_a_set_whose_reward_cannot_judge_is_refused(modules):
    """Bug: one of eval.sets gets the accuracy 0 by a reward that fails on everything."""
    run = check_command_line(["eval.sets=[stories]", "eval.sets.stories.reward=judge:raises"], note=str).one.run
    problems = [Problem("p", "q", "20")]
    says = r"\Aeval\.sets\.stories\.reward=judge:raises fails"
    own, other = (Grader(run.grading, name) for name in ("r1_zero", "judge:raises"))
    with own, other, pytest.raises(ConfigError, match=says):
        try_own_rewards(
            run, Graders(own, own, None, {"stories": other}), Loaded([], problems, {}, {"stories": problems})
        )


def test_a_template_that_is_not_there_is_blamed_on_the_setting_that_names_it():
    """Bug: a wrong template of one of eval.sets is called a mistake in prompt.file, which is right."""
    words = ["eval.sets=[stories]", "eval.sets.stories.prompt=question_only", "eval.sets.stories.prompt.file=nope"]
    with pytest.raises(ConfigError, match=r"\Aeval\.sets\.stories\.prompt\.file=nope"):
        check_command_line(words, note=str)


def test_runs_that_could_not_begin_are_refused_together(composed, modules, monkeypatch):
    """Bug: a sweep is mended and started once for each of its mistakes."""
    (modules / "mine.prompt").write_text("what?")
    sound = typed(composed())
    lost = altered(sound, prompt__reward="nowhere:f", prompt__file=f"{modules}/mine.prompt")
    scored = typed(composed("algorithm=best_of_n", "prompt.reward=good:number", "scorer=nowhere:d"))
    verified = typed(composed("data=countdown", "model=smollm2_135m", "data.verifier=nowhere.sums"))
    monkeypatch.setattr("sys.platform", "linux")
    runs = [altered(sound, device="mps"), lost, altered(lost, seed=1), sound, scored, verified]
    with pytest.raises(ConfigError, match=r"\Adevice=mps: .*\n.*mine.prompt.*") as refused:
        pre.preflight(runs, modules)
    starts = ("prompt.reward=nowhere:f: ", "prompt.reward=good:number: ", "scorer=nowhere:d: ", "data.verifier=nowhere")
    lines = str(refused.value).split("\n")[2:]
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_data_that_is_no_use_is_found_early_where_reading_is_quick(composed, modules):
    row = '{"question": "1+1?", "answer": "#### 2"}\n'
    for half, one, other in (("train", "4+0", "3+1"), ("test", "1+1", "2+0")):
        (modules / f"{half}.jsonl").write_text(row.replace("1+1", one) + row.replace("1+1", other))
    own = ("model=smollm2_135m", "prompt.reward=judge:number", f"data.path={modules}")
    run = typed(composed(*own, "eval_problems=2"))
    assert pre.preflight([run], modules) == []
    with pytest.raises(ConfigError, match="eval_problems=3 is more than"):
        pre.preflight([altered(run, eval_problems=3, given=frozenset({"eval_problems"}))], modules)
    (modules / "test.jsonl").write_text(f"{row}nonsense\n")
    with pytest.raises(DataError, match="line 2 "):
        pre.preflight([run], modules)
    assert not altered(run, data__path="openai/gsm8k").data.quickly_read


def test_the_packages_that_a_run_needs_and_no_other(composed, gsm8k, monkeypatch):
    """Bug: a run ends in an import error after an hour, or asks for a package that it never uses."""
    model, files = "model=smollm2_135m", f"data.path={gsm8k}"
    plain = typed(composed(model, files))
    for name, run in {
        "": plain, "vllm": altered(plain, rollout__engine="vllm"), "peft": altered(plain, model__lora__rank=2),
        "bitsandbytes": altered(plain, optimizer="adamw_8bit"),
        "datasets": typed(composed(model, files, "data@eval.data=gsm8k", "eval.data.path=openai/gsm8k")),
        "reasoning_gym": typed(composed(model, "data=reasoning_gym", "data.task=gcd")),
        **{name: typed(composed(f"logger={name}")) for name in LOGGERS},
    }.items():  # fmt: skip
        with monkeypatch.context() as nothing:
            nothing.setattr("importlib.util.find_spec", lambda package: None)
            missing = pre.missing_packages(run)
        assert [name in line and "install" in line for line in missing] == [True] * bool(name)


def test_the_disk_must_hold_what_a_run_surely_writes(composed, tmp_path):
    model, run = 4 * shape_of(TinyModelConfig("tiny"))[0].numbers, typed(composed())
    need, without = (pre.space_needed(one) for one in (run, altered(run, checkpoint__every=0)))
    assert need.peak - without.peak == 4 * 3 * model  # two are kept, the best, and one is being written
    assert without.peak - model > 80 * 256 * 2000  # 80 steps of 256 responses
    assert pre.space_needed(altered(run, save_rollouts_every=0)).left < need.left / 2
    often, never = (altered(run, eval_every=every).responses_saved() for every in (None, 0))
    assert never < often  # two evaluations all the same
    assert pre.space_needed(typed(composed("algorithm=evaluate", "eval_problems=10"))).peak == 10 * (2000 + 30 * 24)
    assert pre.room_for([run], tmp_path / "not/there/yet") == []
    thousand = [typed(composed("scale=paper", "model=smollm2_135m", "n_steps=1000000000", "data.path=a/b"))]
    assert len(pre.room_for(thousand, tmp_path)) == 1
    with pytest.raises(ResourceError, match="save_model"):
        pre.room_for([altered(run, model__width=1024, model__layers=32, model__heads=64)] * 2000, tmp_path)


def test_a_refused_start_leaves_no_folder(tmp_path):
    done = rlreason("-m", "prompt.reward=r1_zero,nowhere:f", cwd=tmp_path)
    assert done.returncode == ConfigError.exit_code
    assert ("prompt.reward=nowhere:f" in done.stderr, len(done.stderr.splitlines())) == (True, 1)
    assert not list(tmp_path.iterdir())


GIB = 1 << 30
LARGE = ("model=qwen2_5_math_1_5b", "data=gsm8k", "data.path=a/b", "rollout=vllm")
ROOMY = Device("cuda", "a card of 80 GB", int(79.1 * GIB), 80 * GIB)
SMALLER = Device("cuda", "a card of 24 GB", int(23.5 * GIB), 24 * GIB)


def test_runs_that_surely_do_not_fit_are_refused_unless_asked_otherwise(composed):
    """Bug: a run that fits is refused, or one dies an hour later; a sweep's is measured beside those under way."""
    run = typed(composed(*LARGE))
    (tight,) = pre.memory_for([run], dataclasses.replace(ROOMY, free=57 * GIB))
    assert tight.startswith("memory: may not fit: ")
    assert "micro_batch_tokens=4096 takes " in tight
    with pytest.raises(ConfigError, match=r"memory: does not fit: .*=.*model\.check_memory"):
        pre.memory_for([run], SMALLER)
    (said,) = pre.memory_for([altered(run, model__check_memory=False)], SMALLER)
    assert said.startswith("memory: does not fit")
    busy = dataclasses.replace(ROOMY, free=GIB)  # by the runs of a sweep that are under way
    assert pre.memory_for([run, run], busy) == []
    with pytest.raises(ConfigError, match="does not fit"):
        pre.memory_for([run, altered(run, micro_batch_tokens=32768)], busy)
    fits = (typed(composed()), ROOMY), (run, ROOMY), (run, Device("cpu", "here", 200 * GIB, 256 * GIB))
    for one, there in (*fits, (run, Device("cpu", "a machine that tells nothing"))):
        assert pre.memory_for([one], there) == []
    (said,) = pre.memory_for([run], Device("cpu", "here", 20 * GIB, 256 * GIB))
    assert said.startswith("memory: does not fit: about ")  # and is not refused: pages can be swapped


def test_whatever_runs_out_of_memory_is_said_with_its_cure_and_no_other_error_is(composed):
    of_a_rank = EngineError("training on 2 ranks ended: rank 1 failed: OutOfMemoryError: CUDA out of memory")
    of_vllm = EngineError("rollout=vllm failed: ValueError: No available memory for the cache blocks.")
    behind = EngineError("rollout=vllm failed")
    behind.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    run = typed(composed(*LARGE))
    for error in (of_a_rank, of_vllm, behind):
        assert "lower micro_batch_tokens=" in str(pre.lacking(run, error))
    assert pre.lacking(run, ConfigError("out of memory is no word of it")) is None
    assert exit_code(torch.OutOfMemoryError("Allocation on device")) == ResourceError.exit_code


HEAVY = """
import torch
def heavy(advantages, policy_log_probs):
    if len(policy_log_probs) > 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.90 GiB.")
    return -advantages * policy_log_probs
"""


def test_a_real_run_that_runs_out_of_memory_ends_in_one_line_and_keeps_the_traceback(tmp_path):
    """Bug: all that a user sees is torch's traceback, or nobody ever sees it."""
    (tmp_path / "heavy_loss.py").write_text(HEAVY)
    done = rlreason(*words_of("loss=heavy_loss:heavy"), cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == ResourceError.exit_code
    assert done.stderr.startswith("rlreason: out of memory: ")
    assert done.stderr.count("\n") == 1
    status = json.loads((tmp_path / "run/status.json").read_text())
    assert (status["status"], f"rlreason: {status['reason']}\n") == ("failed", done.stderr)
    log = (tmp_path / "run/log.txt").read_text()
    assert all(part in log for part in ("Traceback", "heavy_loss.py", "Tried to allocate 2.90 GiB"))


def test_an_interrupted_run_goes_on_with_the_settings_that_save_memory(composed):
    """With all that the plan offers of what leaves the result as it is, and with no other."""
    run = typed(composed(*LARGE, "kl_placement=loss", "kl_coef=0.1"))
    for key, same_result in {(key, same) for saved, same in savings(run, 1024) for key in saved}:
        assert (changed({key: 1}, {key: 2}, MAY_CHANGE) == "") == same_result, key
    assert changed({"learning_rate": 1}, {"learning_rate": 2}, MAY_CHANGE)


def test_the_page_holds_todays_table_where_whoever_does_not_fit_has_a_cure(monkeypatch):
    """Bug: docs/scale.md promises that an experiment fits a card, and the plan has changed since."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from plans_by_card import put_between, table

    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert put_between(page, table()) == page, "python benchmarks/plans_by_card.py docs/scale.md writes it again"
    assert "| none" not in page
