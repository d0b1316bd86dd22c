"""`profile=true`: what is written beside a run, and that the run itself is the same to the last bit."""

import gzip
import json

import pytest

from tests.run_records import differences
from tests.test_trainer import trained

GRPO = (
    "rollout_batch_size=16", "group_size=4", "n_steps=3", "eval_problems=8", "eval_every=0", "save_model=true",
    "checkpoint.every=1",
)  # fmt: skip


@pytest.mark.long
def test_a_step_is_traced_with_its_phases_and_nothing_of_the_run_changes(tmp_path):
    trained(tmp_path / "plain", *GRPO)
    trained(tmp_path / "traced", *GRPO, "profile=true")
    found = differences(tmp_path / "plain", tmp_path / "traced")
    assert [said for said in found if not said.startswith("summary: start is")] == []  # made, and then from the cache
    assert not [path.name for path in (tmp_path / "plain").iterdir() if "profile" in path.name]
    with gzip.open(tmp_path / "traced/profile.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert {"train", "aten::mm"} <= {event.get("name", "") for event in events}
    assert (tmp_path / "traced/profile.md").read_text().startswith("Step 2:")


def test_the_only_step_of_a_run_is_traced_too(tmp_path):
    trained(tmp_path, "algorithm=sft", "train_batch_size=8", "n_steps=1", "eval_problems=4", "profile=true")
    assert (tmp_path / "profile.md").read_text().startswith("Step 1:")
