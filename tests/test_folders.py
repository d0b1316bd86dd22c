"""Finding and keeping runs: ls, diff, clean and pack on folders that real commands have left."""

import json
import os
import shutil
import tarfile
from pathlib import Path

import pytest

from rlreason.cli.flags import with_newest
from rlreason.cli.ls import cells_of, newest
from rlreason.errors import ConfigError
from rlreason.records.files import MOMENTS, checkpoint_fault, checkpoints_in
from rlreason.records.reader import write_status


@pytest.fixture
def runs(finished_run, finished_sweep, tmp_path, monkeypatch) -> Path:
    """A folder `runs` with a run, below a folder of its algorithm, and a newer sweep of two seeds; it is `./runs`."""
    shutil.copytree(finished_run.folder, tmp_path / "runs/grpo/one")
    shutil.copytree(finished_sweep.folder, tmp_path / "runs/sweeps/two")
    monkeypatch.chdir(tmp_path)
    os.utime("runs/grpo/one/status.json", (1, 1))
    return tmp_path / "runs"


def test_ls_has_a_line_for_each_run_and_sweep(runs, cli):
    """Bug: the runs of a sweep are listed too, a folder of runs passes for one, links count twice, or None is shown."""
    entries = {Path(entry["folder"]).name: entry for entry in cli.figures("ls")}
    assert entries.keys() == {"one", "two"}
    one, two = entries["one"], entries["two"]
    assert (one["kind"], one["status"], one["done"], one["of"]) == ("run", "finished", 2, 2)
    assert (two["kind"], two["status"], two["done"], two["of"]) == ("sweep", "finished", 2, 2)
    assert "loss=grpo_clip" in one["typed"]
    assert one["of_what"] == "tiny, stories"
    assert not any("None" in cell for cell in cells_of(one | {"of": None}))  # as of discovery
    summaries = [json.loads(path.read_text())["accuracy"] for path in (runs / "sweeps/two").glob("*/summary.json")]
    assert two["accuracy"] == max(summaries)
    (runs / "sweeps/two/seed=0/config.yaml").write_text("model: [")
    (runs / "grpo/torn").mkdir()
    (runs / "grpo/torn/config.yaml").write_text("model: [")
    assert {Path(entry["folder"]).name for entry in cli.figures("ls")} == {"one", "two", "torn"}
    weights = list((runs / "grpo/one").rglob("*.safetensors"))
    linked = runs / "grpo/one/linked"
    os.link(weights[0], linked)
    assert cli.figures("ls", "runs/grpo")[0]["bytes"] == one["bytes"]


def test_last_is_the_newest(runs, cli):
    """Bug: `last` is a sweep where one run is needed, or the first by name."""
    assert newest(Path("runs"), single=False) == Path("runs/sweeps/two")
    assert newest(Path("runs"), single=True).parent == Path("runs/sweeps/two")
    os.utime("runs/grpo/one/status.json")
    assert cli.figures("inspect", "last", "-n", "1")["verb"] == "inspect"
    assert newest(Path("runs"), single=True) == Path("runs/grpo/one")
    with pytest.raises(ConfigError, match="there is no run"):
        newest(Path("elsewhere"), single=True)


def test_last_is_a_run_that_has_a_model_or_can_resume(runs):
    """Bug: `last` is the evaluation of the model that it is to give, or nothing says what was typed."""
    shutil.copytree("runs/grpo/one", "runs/evaluated", ignore=shutil.ignore_patterns("model", "checkpoints"))
    os.utime("runs/grpo/one/status.json")
    os.utime("runs/evaluated/status.json", (2**32, 2**32))
    assert newest(Path("runs"), single=True) == Path("runs/evaluated")
    assert [with_newest(f"{key}=last") for key in ("model.path", "resume", "seed")] == [
        "model.path=runs/grpo/one", "resume=runs/grpo/one", "seed=last"
    ]  # fmt: skip
    Path("runs/evaluated/summary.json").unlink()  # interrupted
    assert with_newest("resume=last") == "resume=runs/evaluated"
    shutil.rmtree("runs")
    with pytest.raises(ConfigError, match=r"^resume=last: there is no run"):
        with_newest("resume=last")


def test_clean_removes_what_is_listed_with_yes_alone(runs, cli):
    """Bug: it removes without --yes, removes a finished run's weights, or leaves checkpoints that cannot be read."""
    kept = runs / "grpo/one"
    whole = checkpoints_in(kept)[-1]
    broken = shutil.copytree(kept, runs / "grpo/broken")
    write_status(broken, "interrupted")
    manifest = json.loads((whole / "manifest.json").read_text())
    (whole / MOMENTS).write_bytes(b"moments")
    (whole / "manifest.json").write_text(json.dumps(manifest | {MOMENTS: [7, "of another time"]}))
    spent = shutil.copytree(kept, runs / "grpo/spent")  # a larger budget goes on with its moments
    write_status(spent, "budget")
    listed = cli.figures("clean", "runs")
    assert not listed["removed"]
    assert checkpoints_in(broken)
    assert (whole / MOMENTS).exists()
    assert {entry["what"] for entry in listed["entries"]} == {"moments", "checkpoint"}
    removed = cli.figures("clean", "runs", "--yes")
    assert removed["bytes"] == listed["bytes"]
    assert not checkpoints_in(broken)
    assert not (whole / MOMENTS).exists()
    assert (checkpoints_in(spent)[-1] / MOMENTS).exists()
    assert not checkpoint_fault(whole)
    assert (broken / "model/model.safetensors").exists()
    assert not cli.figures("clean", "runs")["entries"]


def test_diff_names_settings_and_figures(runs, cli):
    """Bug: a setting that differs is not named, or times pass for a difference."""
    first, second = sorted((runs / "sweeps/two").glob("seed=*"))
    found = cli.figures("diff", str(first), str(second))
    assert any(line.startswith("seed: 0") for line in found["settings"])
    assert found["equal"]["metrics"] is False
    alike = cli.figures("diff", str(first), str(first))
    assert not alike["settings"]
    assert not alike["environment"]
    assert False not in alike["equal"].values()


def test_a_run_of_any_name_is_packed(runs, cli):
    """Bug: a run whose name is that of a folder of weights is left out in silence."""
    shutil.copytree("runs/grpo/one", "runs/mine/model")
    cli.figures("pack", "runs/mine", "--out", "mine.tar.gz")
    with tarfile.open("mine.tar.gz") as archive:
        names = archive.getnames()
    assert "mine/model/config.yaml" in names
    assert not [name for name in names if name.startswith("mine/model/model")]


def test_a_packed_sweep_is_read_as_the_original(runs, cli, tmp_path):
    """Bug: weights are in the file, names of the user's machine are, or what the report reads is not."""
    cli.figures("pack", "runs/sweeps/two", "--out", "hand_in.tar.gz")
    with tarfile.open("hand_in.tar.gz") as archive:
        assert not [name for name in archive.getnames() if name.endswith(".safetensors")]
        assert {(member.uname, member.uid) for member in archive.getmembers()} == {("", 0)}
        archive.extractall(tmp_path / "there", filter="data")
    here, there = (cli.figures("ls", str(folder))[0] for folder in (runs / "sweeps/two", tmp_path / "there/two"))
    assert (here["accuracy"], here["status"], here["typed"]) == (there["accuracy"], there["status"], there["typed"])
