"""What is found before anything slow is loaded, and what a start that was refused leaves behind."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_end_to_end import SMALL, rlreason

from rlreason.config.groups import LOGGERS, GradingConfig
from rlreason.config.leaves import needs as needs_package
from rlreason.config.store import typed
from rlreason.errors import ConfigError, DataError, ResourceError
from rlreason.grading import Grader
from rlreason.model.shapes import tiny_shape
from rlreason.records.reader import read_status
from rlreason.runtime.machine import Device
from rlreason.runtime.text import size
from rlreason.training.preflight import (
    memory_for,
    missing_packages,
    needed_by,
    own_functions,
    preflight,
    read_early,
    refusal,
    room_for,
    space_needed,
    unusable,
)
from tests.waiting import patient

MODULES = {
    "good.py": "def f(response, gold):\n    return 1.0\n\nnumber = 3\n",
    "inner.py": "import not_installed_anywhere\n",
    "broken.py": "def f(:\n",
    "raises.py": "def fill():\n    raise KeyError('x')\n\nfill()\n",
    "exits.py": "import sys\n\nsys.exit(3)\n",
    "judge.py": "def one(response):\n    return 1.0\n\ndef raises(response, gold):\n    raise KeyError(gold)\n\n"
                "def none(response, gold):\n    return None\n\n"
                "def slow(response, gold):\n    import time\n    time.sleep(30)\n\n"
                "def number(response, gold, fast=True):\n    return float(int(gold) > 1)\n",
    "later.py": "calls = 0\n\ndef f(response, gold):\n    global calls\n    calls += 1\n    if calls > 2:\n"
                "        raise ValueError('no more than two')\n    return 1.0\n",
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
        ("nowhere:f", "there is no module nowhere in {here}"),
        ("good.deeper:f", "there is no module good.deeper in {here}"),
        ("good:g", "module good has no function g"),
        ("good:numbre", "did you mean good:number?"),
        ("good:number", "of type int: name a function"),
        ("inner:f", "importing inner fails: ModuleNotFoundError: No module named 'not_installed_anywhere' ({here}/inn"),
        ("broken:f", "importing broken fails: SyntaxError: invalid syntax ({here}/broken.py, line 1)"),
        ("raises:f", "importing raises fails: KeyError: 'x' ({here}/raises.py, line 2)"),
        ("exits:f", "importing exits fails: SystemExit: 3 ({here}/exits.py, line 3)"),
        ("good:f", ""),
    ],
)
def test_a_function_that_cannot_be_had_is_one_line_with_the_imports_own_reason(modules, name, says):
    why = unusable(f"prompt.reward={name}", name, GradingConfig())
    assert says.format(here=modules) in why
    assert len(why.splitlines()) == bool(says)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("judge:one", "cannot be called with two texts (too many positional arguments)"),
        ("json:dumps", "dumps cannot be called with two texts"),
        ("judge:raises", "'probe' and the reference answer '20': KeyError: '20' ({here}/judge.py"),
        ("judge:none", "returned None, and must return a number"),
        ("judge:slow", "grading.timeout_s=0.5 s"),
    ],
)
def test_a_reward_that_cannot_judge_is_refused_before_the_model_is_loaded(modules, name, says):
    grading = GradingConfig(timeout_s=0.5) if name == "judge:slow" else patient()
    with Grader(grading, name) as grader:
        why = grader.wait() or refusal(f"eval.reward={name}", grader, "20", grading.timeout_s)
    assert says.format(here=modules) in why
    assert len(why.splitlines()) == 1


def test_too_few_problems_are_found_before_the_run_folder_is_made(composed, modules):
    rows = [{"question": f"{n}+1?", "answer": f"#### {n + 1}"} for n in range(4)]
    for half, part in (("train", rows[:2]), ("test", rows[2:])):
        (modules / f"{half}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    own = ("model=smollm2_135m", "prompt.reward=judge:number", f"data.path={modules}")
    assert preflight([typed(composed(*own, "eval_problems=2"))], modules) == []
    with pytest.raises(ConfigError, match="eval_problems=3 is more than the 2 problems there are"):
        preflight([typed(composed(*own, "eval_problems=3"), ["eval_problems"])], modules)


def test_a_plug_in_that_fails_later_says_why(modules, tmp_path):
    log = tmp_path / "grading_incidents.jsonl"
    with Grader(patient(), "later:f", log_path=log) as grader:
        (warning,) = grader.warnings(grader.grade_batch(["a", "b", "c"], ["1", "1", "1"]))
    assert "1 of 3 responses" in warning
    assert f"ValueError: no more than two ({modules}/later.py, line 7)" in warning
    assert "no more than two" in json.loads(log.read_text())["error"]


def test_every_function_of_the_users_own_is_tried(composed):
    assert own_functions(typed(composed())) == []
    mine = typed(composed("algorithm=best_of_n", "prompt.reward=a:b", "scorer=c:d"))
    assert own_functions(mine) == [("prompt.reward=a:b", "a:b"), ("scorer=c:d", "c:d")]
    countdown = typed(composed("data=countdown", "model=smollm2_135m", "data.verifier=mine.sums"))
    assert own_functions(countdown) == [("data.verifier=mine.sums", "mine.sums:r1_zero")]


def test_runs_that_could_not_begin_are_refused_together(composed, modules):
    words = ("prompt.reward=nowhere:f", "prompt.file=none.prompt")
    with pytest.raises(ConfigError) as caught:
        preflight([typed(composed(*words)), typed(composed(*words, "seed=1")), typed(composed())], modules)
    template, reward = str(caught.value).splitlines()
    assert template.startswith("prompt.file=none.prompt is neither in")
    assert reward.startswith("prompt.reward=nowhere:f: there is no module")
    assert preflight([typed(composed())], modules) == []


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"what?", "never uses the question"),
        (b"{question} {", "double literal braces"),
        (b"\xff", "text in UTF-8"),
    ],
)
def test_a_template_that_cannot_be_filled_is_found_early(composed, tmp_path, content, says):
    (tmp_path / "mine.prompt").write_bytes(content)
    with pytest.raises(ConfigError, match=says):
        preflight([typed(composed(f"prompt.file={tmp_path}/mine.prompt"))], tmp_path)


def test_the_packages_that_a_run_needs_and_no_other(composed, gsm8k):
    model, files = "model=smollm2_135m", f"data.path={gsm8k}"
    gym = ("data=reasoning_gym", "data.task=gcd")
    eval_files = (model, "data@eval.data=gsm8k", f"eval.data.path={gsm8k}")
    for name, words in {
        "": (model, files),
        "vllm": ("rollout=vllm",),
        "peft": ("model.lora.rank=2",),
        "bitsandbytes": ("optimizer=adamw_8bit",),
        "datasets": (model, "data.path=openai/gsm8k"),
        "reasoning_gym": (model, *gym),
        **{name: (f"logger={name}",) for name in LOGGERS},
    }.items():
        needed = list(needed_by(typed(composed(*words))))
        assert [package for package, _ in needed] == [name] * (name not in ("", "vllm"))
        assert all("install" in needs_package(because, package) for package, because in needed)
    assert missing_packages(typed(composed(model, files))) == []
    assert "datasets" in dict(needed_by(typed(composed(*eval_files, "data.path=openai/gsm8k"))))
    for more in ((files,), ("algorithm=evaluate",)):
        hub = typed(composed(model, *more, "data@eval.data=gsm8k", "eval.data.path=openai/gsm8k"))
        ((needed, because),) = needed_by(hub)
        assert (needed, because.partition(" ")[0]) == ("datasets", "eval.data.path=openai/gsm8k")
    asks = typed(composed(*eval_files, "algorithm=evaluate"))
    asks.data.path = "openai/gsm8k"  # which an evaluation of other data does not read
    assert "datasets" not in dict(needed_by(asks))


# What does not fit


def test_data_is_read_early_where_that_is_quick_and_once_for_a_sweep(composed, tmp_path, gsm8k):
    near = typed(composed("model=smollm2_135m", f"data.path={gsm8k}", "data.overlap=allow"))
    assert read_early([near]) == 1
    assert not typed(composed("model=smollm2_135m", "data.path=openai/gsm8k")).data.quickly_read
    assert not typed(composed("data.n_train=1000000")).data.quickly_read
    (tmp_path / "train.jsonl").write_bytes(b" " * 30_000_000)
    assert read_early([near]) == 0
    assert read_early([typed(composed(f"seed={seed}", "micro_batch_tokens=100")) for seed in range(4)]) == 1


def test_data_that_is_no_use_is_found_before_the_run_folder_is_made(composed, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1?", "answer": "2"}\nnonsense\n')
    files = [f"data.{split}={tmp_path}/rows.jsonl" for split in ("train", "validation")]
    with pytest.raises(DataError, match="line 2 is not JSON"):
        preflight([typed(composed("model=smollm2_135m", "data=jsonl", *files))], tmp_path)


def test_the_disk_must_hold_what_a_run_surely_writes(composed, tmp_path):
    run = typed(composed())
    need = space_needed(run)
    assert need.model == 4 * tiny_shape(128, 2, 4).numbers
    assert need.responses > 80 * 256 * 2000  # 80 steps of 256 responses
    assert space_needed(typed(composed("save_model=false"))).model == 0
    assert need.checkpoints == 4 * 3 * need.model  # two are kept, the best, and one is being written
    assert space_needed(typed(composed("checkpoint.every=0"))).checkpoints == 0
    assert space_needed(typed(composed("save_rollouts_every=0"))).responses < need.responses / 2
    assert space_needed(typed(composed("algorithm=evaluate", "eval_problems=10"))).responses == 10 * (2000 + 30 * 24)
    assert room_for([run], tmp_path / "not/there/yet") == []
    thousand = [typed(composed("scale=paper", "model=smollm2_135m", "n_steps=1000000000", "data.path=a/b"))]
    (note,) = room_for(thousand, tmp_path)
    assert "and this may write" in note
    big = composed("model.width=1024", "model.layers=32", "model.heads=64")
    with pytest.raises(ResourceError, match=r"free, and this writes at least .*free some space.*save_model=false"):
        room_for([typed(big)] * 2000, tmp_path)
    assert size(need.model) == "2.6 MiB"


TORCH_FREE = """
import sys
from rlreason.config.store import register
from rlreason.cli.check import check_command_line
register()
check_command_line(["prompt.reward=rlreason.grading.verifiers.countdown:r1_zero", "threads=1"])
import rlreason.training.preflight
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""


def test_everything_that_is_checked_before_a_run_needs_no_torch(tmp_path):
    env = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    assert subprocess.run([sys.executable, "-c", TORCH_FREE], cwd=tmp_path, env=env, check=False).returncode == 0


# What a start that was refused leaves


@pytest.mark.parametrize(
    ("words", "setting"),
    [
        (["loss=nope"], "loss=nope"),
        (["learning_rate=-1"], "learning_rate=-1"),
        (["model=local", "model.path=/nowhere"], "model.path=/nowhere"),
        (["model=local", "model.path=model", "data=jsonl", "data.train=/nowhere.jsonl"], "/nowhere.jsonl"),
        (["sweep=grpo_learning_rate"], "sweep=grpo_learning_rate"),
    ],
)
def test_a_refused_start_leaves_no_folder(words, setting, tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    done = rlreason(*words, cwd=tmp_path)
    assert done.returncode == ConfigError.exit_code
    assert setting in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_refused_start_leaves_the_folder_of_another_run_as_it_was(finished_run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished_run.folder, folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    done = rlreason(*SMALL, "seed=7", f"hydra.run.dir={folder}", cwd=tmp_path)
    assert done.returncode == ConfigError.exit_code
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_start_that_fails_later_says_so_in_its_folder(tmp_path):
    """As where weights do not load: a folder of a run that is neither under way nor killed."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text('{"model_type": "llama"}')
    rows = "".join(json.dumps({"question": f"{n}+1?", "answer": f"#### {n + 1}"}) + "\n" for n in range(40))
    (tmp_path / "rows.jsonl").write_text(rows)
    words = ["model=local", "model.path=model", "data=jsonl", "data.train=rows.jsonl", "data.validation=rows.jsonl"]
    done = rlreason(*words, "data.overlap=allow", "hydra.run.dir=run", cwd=tmp_path)
    assert done.returncode == ConfigError.exit_code, done.stderr
    assert read_status(tmp_path / "run") == "failed"
    health = rlreason("health", "run", cwd=tmp_path)
    assert health.returncode == 1
    assert "failed" in health.stdout
    assert "killed" not in health.stdout


def test_a_sweep_is_refused_before_its_first_run_and_leaves_nothing(tmp_path):
    done = rlreason("-m", "prompt.reward=r1_zero,nowhere:f", *SMALL, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rlreason: prompt.reward=nowhere:f: there is no module nowhere")
    assert not list(tmp_path.iterdir())


def test_a_plan_that_surely_exceeds_the_memory_of_a_processor_is_said_with_its_cure(composed):
    run = typed(composed("model=qwen3_0_6b", "data.path=a/b"))
    (plan,) = memory_for([run, run], Device("cpu", "a machine", 8 << 30, 8 << 30))
    assert plan.startswith("memory: does not fit: about ")
    assert "rollout.max_rows=" in plan.splitlines()[-1]
    assert memory_for([run], Device("cpu", "a machine that tells nothing")) == []
    assert memory_for([typed(composed())], Device("cpu", "a machine", 8 << 30, 8 << 30)) == []
