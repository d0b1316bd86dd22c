"""`rlreason report` as it is typed: runs and sweeps, broken ones, and mistakes in one line."""

import json
import shutil
from pathlib import Path

import pytest

from tests.starts import subcommand
from tests.sweep_folders import answers, cut_short, sweep

pytest.importorskip("vl_convert")


@pytest.fixture
def report(capsys, monkeypatch):
    """The command in this process: its exit code and what it prints."""
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *words: (subcommand("report", *words), *capsys.readouterr())


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A sweep of two rates with ten seeds each."""
    folder = tmp_path_factory.mktemp("whole") / "rates"
    chance = {"1": 0.5, "2": 0.8}
    sweep(folder, "lr", list(chance), lambda v, s: answers(s, chance[v]), seeds=range(10), reference={"lr": "1"})
    rows = [{"rollout_step": s, "train_step": s, "time/active": s, "reward/mean": s / 40} for s in range(41)]
    rows += [row | {"eval/accuracy": row["train_step"] / 50} for row in rows[::20]]
    for place in folder.glob("lr=*"):
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_page_and_markdown(report, whole, tmp_path):
    """Bug: a sweep, a run or settings of a sweep get no page, or the report beside the runs is read as a run."""
    folder = Path(shutil.copytree(whole, tmp_path / "rates"))
    code, said, error = report(folder)
    assert (code, error, "2 beats 1.\n" in said) == (0, "", True)
    assert all("2 is better than 1 by" in (folder / name).read_text() for name in ("report.html", "report.md"))
    assert list((folder / "report_files").glob("*.svg"))
    figures = tmp_path / "new/figures"
    paper = ("--figures", figures, "--metric", "eval/accuracy", "--x", "active", "--label", "1=a slow one")
    told = json.loads(report(folder, *paper, "--out", tmp_path / "out", "--json")[1])
    assert ([one["verdict"] for one in told["verdicts"]], told["problems"]) == (["better"], [])
    assert "2 beats a slow one" in (tmp_path / "out/report.md").read_text()
    assert {path.stem for path in figures.iterdir()} == {"eval_accuracy", "forest", "settings"}
    assert f",{40 / 3600}," in (figures / "eval_accuracy.csv").read_text()  # hours


def test_mistakes_are_one_line(report, whole, tmp_path):
    """Bug: a wrong path is a traceback, or leaves half a report; a wrong option does nothing, or merges settings."""
    (tmp_path / "file").write_text("")
    mistakes = [([tmp_path], "holds no run"), ([whole, "--out", tmp_path / "file/x"], "cannot be made")]
    paper = [whole, "--out", tmp_path / "out", "--figures", tmp_path / "paper"]
    mistakes += [([*paper, "--width", width], "inches") for width in ("-1", "nan", "0")]
    mistakes += [([*paper, "--x", x], "no key of metrics.jsonl: give one of step,") for x in ("total", "time", "lg")]
    mistakes += [([*paper, "--label", "1=2"], "alike: give each of 1, 2"), ([*paper, "--label", "low"], "NAME=TEXT")]
    mistakes += [([whole, "--metric", "a", "--metric", "b"], "--metric needs --figures DIR")]
    mistakes += [([*paper[1:], "--assignment", "cs336_2025"], "no --figures")]
    for words, says in mistakes:
        code, said, error = report(*words)
        assert (code, said, len(error.splitlines()), says in error) == (2, "", 1, True), (words, error)
    assert not list(tmp_path.rglob("report.html"))


def test_evaluations(report, tmp_path):
    """Bug: without curves there are no tables for a paper, or the JSON of models has texts."""
    right = {"1": 0.2, "2": 0.8, "3": 0.82}
    sweep(tmp_path / "s", "lr", list(right), lambda v, s: answers(s, right[v]), seeds=[0], reference={"lr": "1"})
    for place in (tmp_path / "s").glob("lr=*"):
        (place / "config.yaml").write_text((place / "config.yaml").read_text() + "algorithm: evaluate\n")
    figures = json.loads(report(tmp_path / "s", "--json", "--figures", tmp_path / "paper")[1])
    assert (tmp_path / "paper/who_can_be_told_from_whom.tex").exists()
    best, second, _ = figures["models"]
    assert (best["cannot_be_told_from"], second["cannot_be_told_from"]) == ([second["setting"]], [best["setting"]])
    assert 0.5 < best["low"] < best["mean"] < best["high"] < 1


def cut(file: Path) -> None:
    """Damage a line at the start, and half of the last one."""
    file.write_bytes(b"\x00\xff{not json\n" + file.read_bytes() + b'{"half": 1')


BROKEN = (
    (lambda r: cut(r / "metrics.jsonl"), "metrics.jsonl: left out 2 of its lines"),
    (lambda r: cut(r / "evals/step_00040.jsonl"), "step_00040.jsonl: left out 2 of its lines"),
    (lambda r: cut_short(r / "evals/step_00040.jsonl"), "step_00040.jsonl.gz cannot be read"),
    (lambda r: shutil.rmtree(r / "evals"), "its final evaluation is lost"),
    (lambda r: shutil.rmtree(r / "evals"), "has lost the responses of its final evaluation: it is not compared"),
    (lambda r: (r / "config.yaml").write_text("- 1\n"), "no config.yaml"),
    (lambda r: (r / "summary.json").write_text("[5"), "no JSON object"),
    (lambda r: (shutil.rmtree(r), r.mkdir()), "does not enter"),
    (shutil.rmtree, "(waiting)"),
)


def test_broken_folders(report, whole, tmp_path):
    """Bug: a folder with a broken or missing part is not named, or keeps the others from being compared."""
    folder = Path(shutil.copytree(whole, tmp_path / "rates"))
    for seed, (change, _) in enumerate(BROKEN):
        change(folder / f"lr=2,seed={seed}")
    code, said, error = report(folder)
    assert (code, error, "2 is better than 1 by" in said) == (0, "", True)
    written = " ".join((folder / "report.md").read_text().replace("\\", "").split())
    assert [says for _, says in BROKEN if says not in written] == []
