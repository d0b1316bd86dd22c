"""`profile=true`: what is written beside a run, and that the run itself is the same to the last bit."""

import gzip
import json

import pytest

from rlreason.progress.profile import LARGEST
from rlreason.records.reader import RunFolder
from tests.run_records import differences
from tests.test_trainer import trained

RUNS = {
    "grpo": ("rollout_batch_size=16", "group_size=4"),
    "sft": ("algorithm=sft", "train_batch_size=8"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", RUNS)
def test_a_step_is_traced_with_its_phases_and_nothing_of_the_run_changes(kind, tmp_path, capsys):
    words = (*RUNS[kind], "n_steps=3", "eval_problems=8", "eval_every=0", "save_model=true", "checkpoint.every=1")
    trained(tmp_path / "plain", *words)
    trained(tmp_path / "traced", *words, "profile=true")
    found = differences(tmp_path / "plain", tmp_path / "traced")
    assert [said for said in found if not said.startswith("summary: start is")] == []  # made, and then from the cache
    assert not [path.name for path in (tmp_path / "plain").iterdir() if "profile" in path.name]
    with gzip.open(tmp_path / "traced/profile.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = {event.get("name", "") for event in events}
    assert {"train", "aten::mm"} <= names
    table = RunFolder(tmp_path / "traced").profile
    assert table.startswith("Step 2: ")
    rows = [line for line in table.splitlines() if line.startswith("| aten")]
    assert 0 < len(rows) <= LARGEST
    seconds = [float(row.split("|")[3]) for row in rows]
    assert seconds == sorted(seconds, reverse=True)
    said = capsys.readouterr().out
    assert all(row in said for row in rows)


def test_the_only_step_of_a_run_is_traced_too(tmp_path):
    trained(tmp_path, *RUNS["sft"], "n_steps=1", "eval_problems=4", "profile=true")
    assert RunFolder(tmp_path).profile.startswith("Step 1: ")
