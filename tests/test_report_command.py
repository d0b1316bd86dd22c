"""`rlreason report` as it is typed: runs and sweeps, broken ones, and mistakes in one line."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.some import some
from tests.sweep_folders import answers, sweep
from tests.test_subcommands import subcommand

pytest.importorskip("vl_convert")
CHANCE = {"1": 0.5, "2": 0.8}


@pytest.fixture
def report(capsys, monkeypatch):
    """The command in this process: its exit code and what it prints."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: (subcommand("report", *words), *capsys.readouterr())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A sweep of two rates with four seeds each."""
    folder = tmp_path_factory.mktemp("whole") / "rates"
    sweep(folder, "lr", list(CHANCE), lambda value, seed: answers(seed, CHANCE[value]), reference={"lr": "1"})
    for place in folder.glob("lr=*"):
        lines = [{"rollout_step": s, "train_step": s, "time/active": s, "reward/mean": s / 40} for s in range(41)]
        lines += [{"rollout_step": s, "train_step": s, "eval/accuracy": s / 50} for s in (0, 20, 40)]
        (place / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_sweep_a_run_and_settings_become_a_page_and_markdown(report, whole, tmp_path):
    folder = Path(shutil.copytree(whole, tmp_path / "rates"))
    code, said, error = report(folder)
    assert (code, error, "2 beats 1.\n" in said) == (0, "", True)
    assert all("2 is better than 1 by" in (folder / name).read_text() for name in ("report.html", "report.md"))
    assert list((folder / "report_files").glob("*.svg"))
    figures = json.loads(report(folder, "--json")[1])  # its own report beside the runs is no run
    assert ([one["verdict"] for one in figures["verdicts"]], figures["problems"]) == (["better"], [])
    for words, says in (
        ([whole / "lr=1,seed=0", "--figures", tmp_path / "new/figures"], "One setting, 1 run"),
        ([whole / "lr=1,seed=0", whole / "lr=2,seed=0"], "One seed on a side"),
    ):
        code, said, error = report(*words, "--out", tmp_path / "out")
        assert (code, error, says in said) == (0, "", True), words
    assert (tmp_path / "new/figures/eval_accuracy.pdf").exists()


def test_neither_torch_nor_hydra_is_loaded(whole, tmp_path):
    probe = (
        "import sys; from rlreason.__main__ import main; sys.argv[1:] = "
        f"['report', {str(whole)!r}, '--out', {str(tmp_path)!r}]\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'hydra', 'vllm'} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout.splitlines()[-1] == "[]"


def test_mistakes_are_one_line(report, whole, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "chain/a").mkdir(parents=True)
    (tmp_path / "chain/a/sweep.json").write_text("{}")
    for words, says in (
        ([tmp_path], "holds no run"),
        ([tmp_path / "chain"], "holds the sweeps a: give "),
        ([whole / "lr=9"], "no run of"),
        ([whole, "--out", tmp_path / "file/x"], "cannot be made"),
    ):
        code, said, error = report(*words)
        assert (code, said, len(error.splitlines()), says in error) == (2, "", 1, True), (words, error)
    assert not list(tmp_path.rglob("report.html"))


def cut(file: Path) -> None:
    """Damage a line in the middle, and half of the last one."""
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:9]) + b"\x00\xff{not json\n" + b"".join(lines[9:]) + b'{"half": 1')


BROKEN = {
    "metrics with half a line": (lambda r: cut(r / "metrics.jsonl"), "left out line"),
    "responses with half a line": (lambda r: cut(r / "evals/step_00040.jsonl"), "left out line"),
    "evaluations gone": (lambda r: shutil.rmtree(r / "evals"), "has lost the responses"),
    "config that is none": (lambda r: (r / "config.yaml").write_text("- 1\n"), "holds no settings"),
    "summary that is none": (lambda r: (r / "summary.json").write_text("[5"), "no JSON object"),
    "an empty folder": (lambda r: (shutil.rmtree(r), r.mkdir()), "does not enter"),
}


@pytest.mark.parametrize("name", some(BROKEN))
def test_what_is_broken_is_named_and_the_rest_is_compared(name, report, whole, tmp_path):
    change, says = BROKEN[name]
    folder = Path(shutil.copytree(whole, tmp_path / "rates"))
    change(folder / "lr=2,seed=3")
    code, said, error = report(folder, "--out", tmp_path / "out")
    assert (code, error, "2 is better than 1 by" in said) == (0, "", True)
    assert says in " ".join((tmp_path / "out/report.md").read_text().replace("\\", "").split())


@pytest.mark.long
def test_two_hundred_runs_of_two_hundred_steps(tmp_path):
    """In under 30 seconds of processor time and 1 GB, in the process of the command."""
    values, rng = [str(k) for k in range(50)], np.random.default_rng(0)
    sweep(tmp_path / "s", "x", values, lambda v, s: answers(s, 0.4 + int(v) / 200, 256), reference={"x": "0"})
    names = ["reward/mean", "rollout/entropy", "rollout/length", "train/grad_norm", *(f"train/{k}" for k in range(80))]
    for place in (tmp_path / "s").glob("x=*"):
        with (place / "metrics.jsonl").open("w") as file:
            for step in range(200):
                row = {"rollout_step": step, "train_step": step, "tokens/generated": 900 * step, "time/active": step}
                row |= dict(zip(names, rng.random(len(names)).tolist(), strict=True))
                file.write(json.dumps(row | ({"eval/accuracy": 0.4} if step % 10 == 0 else {})) + "\n")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "rlreason", "report", tmp_path / "s"], check=True, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30
    assert after.ru_maxrss < 1e6  # kB
