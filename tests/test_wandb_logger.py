"""Weights & Biases: its own variables win over our defaults, settings over both; every metric has an axis."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import wandb
from wandb.proto import wandb_internal_pb2

from rlreason.config.groups import LoggerConfig
from rlreason.errors import ConfigError
from rlreason.records.wandb_logger import AXES, COLUMNS, COUNTERS, WandbLogger
from rlreason.runtime.environment import SWEEP_VARIABLE

OTHERS = {
    "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_RUN_GROUP": "course", "WANDB_NAME": "first",
    "WANDB_TAGS": "a,b", "WANDB_NOTES": "a note",
}  # fmt: skip


@pytest.fixture
def logger(tmp_path, monkeypatch):
    """A logger that sends nothing anywhere, made in a folder called `lr=1` without any variable of W&B's."""
    monkeypatch.chdir(tmp_path)
    for name in (*OTHERS, "WANDB_MODE", "WANDB_DIR", SWEEP_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "lr=1"
    folder.mkdir()
    made = []

    def make(variables: dict[str, str] | None = None, **settings: Any) -> WandbLogger:
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)
        made.append(WandbLogger(folder, LoggerConfig(kind="wandb", **settings), {"seed": 0}))
        return made[-1]

    wandb.teardown()  # W&B reads its variables once in a process
    yield make
    for one in made:
        one.run.finish()
    wandb.teardown()


def identity(made: WandbLogger) -> tuple[Any, ...]:
    run = made.run
    return run.project, run.entity, run.group, run.name, run.tags, run.notes


def test_without_a_word_the_defaults_are_ours(logger):
    made = logger({SWEEP_VARIABLE: "grid", "WANDB_MODE": "offline"})
    assert (made.run.project, made.run.group, made.run.name) == ("rlreason", "grid", "lr=1")
    assert made.run.settings.mode == "offline"
    assert list(Path("lr=1/wandb").glob("offline-run-*"))


def test_nothing_is_printed_and_the_place_is_shown(logger, capfd):
    made = logger({"WANDB_SILENT": "false"}, mode="offline")
    assert Path(made.place.partition(";")[0]).samefile(made.run.settings.sync_dir)
    made.log({"train_step": 1, "train/loss": 0.5})
    made.finish({"accuracy": 1.0})
    assert capfd.readouterr() == ("", "")
    assert logger(mode="disabled").place == ""


def test_variables_of_wandb_win_over_our_defaults(logger):
    made = logger({SWEEP_VARIABLE: "grid", "WANDB_MODE": "offline", **OTHERS})
    assert identity(made) == ("theirs", "team", "course", "first", ("a", "b"), "a note")


def test_settings_win_over_variables(logger):
    made = logger(
        {SWEEP_VARIABLE: "grid", "WANDB_MODE": "online", **OTHERS},
        mode="offline", project="p", entity="e", group="g", name="n", tags=["t"], notes="o",
    )  # fmt: skip
    assert identity(made) == ("p", "e", "g", "n", ("t",), "o")
    assert made.run.settings.mode == "offline"


def test_wandb_can_be_switched_off_by_its_variable(logger):
    made = logger({"WANDB_MODE": "disabled"})
    made.log({"train_step": 1, "train/loss": 0.5})
    assert made.run.disabled
    assert not list(Path("lr=1").rglob("*.wandb"))


def test_a_word_that_wandb_does_not_know_is_one_line(logger):
    with pytest.raises(ConfigError, match="ofline") as caught:
        logger({"WANDB_MODE": "ofline"})
    assert len(str(caught.value).splitlines()) == 1


def records(file: Path) -> list[wandb_internal_pb2.Record]:
    """What an offline run wrote: LevelDB's log format, blocks of 32 KiB after a header of 7 bytes."""
    data, position, whole, out = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            out.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return out


def test_every_row_and_every_table_stands_at_its_counters(logger):
    made = logger(mode="offline")
    made.log({"rollout_step": 2, "train_step": 5, "eval_step": 1, "train/loss": 0.5, "ei/kept": 3})
    made.table("rollouts", 2, [dict.fromkeys(COLUMNS, 0)])
    made.finish({"accuracy": 1.0})
    wandb.teardown()  # waits until everything is written
    found = records(next(Path("lr=1").rglob("*.wandb")))
    axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in found if r.HasField("metric")}
    assert {name: axes[name] for names in AXES.values() for name in names} == {
        name: counter for counter, names in AXES.items() for name in names
    }
    rows = [r.history.item for r in found if r.HasField("history")]
    keys = [{item.key or "/".join(item.nested_key): item.value_json for item in row} for row in rows]
    assert [[json.loads(row[counter]) for counter in COUNTERS] for row in keys] == [[2, 5, 1], [2, 5, 1]]
    assert any(name.startswith("generations/rollouts/") for name in keys[1])
