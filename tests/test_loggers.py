"""Loggers next to the run folder, with the real services, offline: what they get, and that none can end a run."""

import json
import math
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from rlreason.config.groups import LOGGERS, LoggerConfig
from rlreason.records.files import SUMMARY
from rlreason.records.loggers import AXES, COLUMNS, COUNTERS, SERVICES, LoggedRun, Logger, Loggers, WandbLogger
from rlreason.records.writer import RunWriter
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.text import HIDDEN

ROW = {"rollout_step": 2, "train_step": 5, "eval_step": 1, "train/loss": 0.5, "reward/mean": 0.25}
ODD = "\ud800 \u00fc ``` <think> | \x00\n# no heading"  # a lone surrogate, which UTF-8 has no bytes for
RESPONSE = dict.fromkeys(COLUMNS, 0.0) | {"response": ODD}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A run folder called `lr=1`, and no variable or login of any service."""
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith(("WANDB_", "TRACKIO_")) or name in (SWEEP_VARIABLE, "NETRC"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    folder = tmp_path / "lr=1"
    folder.mkdir()
    wandb.teardown()  # W&B reads its variables once in a process
    yield folder
    wandb.teardown()


@pytest.fixture
def trackio(place) -> Any:
    """The package, which takes its folder once in a process; 0.0.6, which does not import, is what old pins end at."""
    module = pytest.importorskip("trackio", minversion="0.40", exc_type=ImportError)
    assert module.TRACKIO_DIR.parent.parent == place.parent.parent  # a test's own
    return module


@pytest.fixture
def logger(place, monkeypatch):
    """A W&B logger that sends nothing anywhere."""
    made = []

    def make(variables: dict[str, str] | None = None, **settings: Any) -> WandbLogger:
        for name, value in (variables or {}).items():
            monkeypatch.setenv(name, value)
        made.append(WandbLogger(LoggedRun(place, LoggerConfig(wandb=True, **settings), {"seed": 0}, f"run{len(made)}")))
        return made[-1]

    yield make
    for one in made:
        one.run.finish()


@pytest.mark.parametrize(
    ("variables", "settings", "expected"),
    [
        ({}, {}, ("rlreason", None, "grid", "lr=1", (), None)),
        (
            {"WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_RUN_GROUP": "course", "WANDB_TAGS": "a,b"},
            {"project": "p", "name": "n", "notes": "o"},
            ("p", "team", "course", "n", ("a", "b"), "o"),
        ),
        (
            {"SOME_TOKEN": "swordfish-6"},
            {"group": "g swordfish-6", "name": "swordfish-6", "tags": ["swordfish-6"]},
            ("rlreason", None, f"g {HIDDEN}", HIDDEN, (HIDDEN,), None),
        ),
    ],
)
def test_settings_win_over_variables_and_these_over_our_defaults_and_secrets_are_hidden(
    logger, variables, settings, expected
):
    run = logger({SWEEP_VARIABLE: "grid", "WANDB_MODE": "offline"} | variables, **settings).run
    assert (run.project, run.entity or None, run.group, run.name, run.tags, run.notes or None) == expected
    assert run.settings.mode == "offline"
    assert run.settings.disable_git  # it would keep a difference from the commit, and what is secret there
    assert not run.settings.x_disable_meta


def records(file: Path) -> list[wandb_internal_pb2.Record]:
    """What an offline run wrote: LevelDB's log format, blocks of 32 KiB, to where it breaks off."""
    data, position, whole, out = file.read_bytes(), 7, b"", []
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if not 1 <= kind <= 4 or position > len(data):
            break
        if kind in (1, 4):  # a full record, or the last part of one
            out.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return out


def history(found: Iterable[wandb_internal_pb2.Record]) -> list[dict[str, Any]]:
    """What was logged, by its name."""
    rows = [r.history.item for r in found if r.HasField("history")]
    return [{item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row} for row in rows]


def test_nothing_is_printed_and_every_row_and_every_table_stands_at_its_counters(logger, capfd, monkeypatch):
    """W&B reads its variables once in a process; in a notebook, WANDB_MODE=offline must hold after a failed login."""
    with pytest.raises(ValueError, match="no login"):
        logger()
    monkeypatch.setattr("sys.argv", ["rlreason", "model.cache=https://me:swordfish@host"])
    made = logger({"WANDB_MODE": "offline", "WANDB_PROJECT": "second", "WANDB_SILENT": "false"})
    assert made.run.project == "second"
    assert made.run.settings.x_disable_meta  # it would keep the command, and what is secret there
    (part,) = Path().glob(made.place.split()[-1].replace("'", ""))
    assert part.samefile(made.run.settings.sync_dir)
    made.log(ROW)
    made.table("rollouts", [[0] * len(COLUMNS)], {name: ROW[name] for name in COUNTERS})
    made.finish({"accuracy": 1.0})
    wandb.teardown()  # waits until everything is written
    assert capfd.readouterr() == ("", "")
    found = records(next(part.glob("*.wandb")))
    axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in found if r.HasField("metric")}
    ours = {name: counter for counter, names in AXES.items() for name in names}
    assert {name: axes[name] for name in ours} == ours | {"eval/*": "eval_step"}  # W&B's, as the handout defines it
    rows = history(found)
    assert [[row[counter] for counter in COUNTERS] for row in rows] == [[2, 5, 1], [2, 5, 1]]
    assert any(name.startswith("generations/rollouts/") for name in rows[1])


def texts(events: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(f"{tag}/text_summary")]


def logged_to(place: Path, *names: str, messages: list[str] | None = None) -> Loggers:
    """Loggers that have got the same from a run: a row, another with numbers that are none, a table, the end."""
    loggers = Loggers(([] if messages is None else messages).append)
    loggers.start(LoggerConfig(**dict.fromkeys(names, True)), place, {"seed": 0, "prompt": {"file": ODD}})
    loggers.log(ROW)
    loggers.log({"train_step": 6, "train/loss": math.nan, "reward/mean": math.inf})
    loggers.table("evals", 3, [RESPONSE, RESPONSE])
    loggers.finish({"status": "finished", "accuracy": math.nan, "protocol": {"hash": ODD}})
    return loggers


def test_tensorboard_draws_each_metric_over_its_counter_and_shows_texts_as_they_are(place, capfd):
    loggers = logged_to(place, "tensorboard")
    assert (loggers.failed, loggers.places) == ({}, {"tensorboard": "tensorboard --logdir lr=1/tensorboard"})
    events = EventAccumulator(str(place / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(2, 0.25), (2, math.inf)]
    first, second = events.Scalars("train/loss")
    assert (first.step, first.value, second.step, math.isnan(second.value)) == (5, 0.5, 6, True)
    ((step, shown),) = texts(events, "generations/evals")
    assert (step, shown.count("ü ``` <think> |")) == (6, 2)
    assert all(line.startswith("    ") for line in shown.split("\n"))  # nothing in it is read as Markdown
    assert "    seed: 0" in texts(events, "config")[0][1]
    assert "    status: finished" in texts(events, "summary")[0][1]
    assert capfd.readouterr() == ("", "")


def test_trackio_keeps_rows_tables_and_settings_in_its_own_place(trackio, place, monkeypatch, capfd):
    monkeypatch.setenv(SWEEP_VARIABLE, "grid")
    assert [logged_to(place, "trackio").failed for _ in range(2)] == [{}, {}]
    assert trackio.context_vars.current_run.get() is None  # a run of the caller's own would stay the current one
    first, second = trackio.Api().runs("rlreason")
    assert first.name == second.name == "lr=1"  # and yet two runs
    assert (first.config["seed"], first.config["_Group"]) == (0, "grid")
    rows = trackio.SQLiteStorage.get_logs("rlreason", "lr=1", run_id=first.id)
    assert [row["step"] for row in rows] == [5, 6, 6, 6]
    assert rows[0].items() >= ROW.items()
    assert (math.isnan(rows[1]["train/loss"]), rows[1]["reward/mean"]) == (True, math.inf)
    assert "ü ``` <think> |" in rows[2]["generations/evals"]["_value"][1]["response"]
    assert "status: finished" in rows[3]["summary"]["_value"]
    assert capfd.readouterr() == ("", "")


def test_the_callers_own_run_is_left_alone(place, logger):
    mine = wandb.init(mode="offline", dir=str(place.parent), settings={"silent": True, "console": "off"})
    theirs = logger(mode="offline")
    theirs.log(ROW)
    theirs.finish({"status": "finished"})
    assert wandb.run is mine
    mine.log({"own": 1})
    mine.finish()
    wandb.teardown()
    kept = [{name for row in history(records(file)) for name in row} for file in place.parent.rglob("*.wandb")]
    assert sorted(("own" in names, "train/loss" in names) for names in kept) == [(False, True), (True, False)]


def test_a_logger_that_cannot_start_is_one_line_and_in_the_summary(place):
    (place / "tensorboard").write_text("no folder")
    messages: list[str] = []
    run = RunWriter(place.parent / "run", "seed: 0\n")
    run.loggers = logged_to(place, "wandb", "tensorboard", messages=messages)  # online, without a login
    run.metrics(ROW)
    run.summary({"status": "finished"})
    assert [line.partition(" could")[0] for line in messages] == ["! logger=wandb", "! logger=tensorboard"]
    assert "logger.mode=offline" in messages[0]
    summary = json.loads((run.folder / SUMMARY).read_text())
    assert summary["failed_loggers"] == run.loggers.failed == run.loggers.places
    assert summary["failed_loggers"]["wandb"] == "could not start (no login was found here)"


@pytest.mark.parametrize("at", ["log", "table", "finish"])
def test_a_logger_that_raises_is_dropped_with_one_line_and_the_others_go_on(place, monkeypatch, at):
    services = {name: Mock(spec=Logger, cure="wait", place="here") for name in ("wandb", "trackio")}
    getattr(services["wandb"], at).side_effect = OSError(f"{at}\nbroke")
    for name, service in services.items():
        monkeypatch.setitem(SERVICES, name, lambda *_, service=service: service)
    messages: list[str] = []
    loggers = logged_to(place, *services, messages=messages)
    assert len(messages) == 1
    assert messages[0].startswith("! logger=wandb ")
    assert f"({at} broke): wait" in messages[0]
    assert loggers.places == loggers.failed | {"trackio": "here"}
    assert services["wandb"].method_calls[-1][0] == at
    assert [call[0] for call in services["trackio"].method_calls] == ["log", "log", "table", "finish"]


@pytest.mark.parametrize("name", LOGGERS)
def test_a_run_that_resumes_goes_on_in_the_same_run(place, name, request):
    """It was interrupted after row 6, and its last checkpoint is from before row 4: rows 4 to 6 come twice."""
    service = request.getfixturevalue("trackio") if name == "trackio" else None
    settings = LoggerConfig(**{name: True}, mode="offline" if name == "wandb" else None, name="resumed")
    rows = [{"train_step": step, "train/loss": step / 8} for step in range(1, 10)]
    for part, resumed in ((rows[:6], False), (rows[3:], True)):
        loggers = Loggers()
        loggers.start(settings, place, {}, resumed)
        for row in part:
            loggers.log(row)
        loggers.finish({"status": "interrupted"})
        assert not loggers.failed
        time.sleep(1.1 if name == "wandb" else 0)  # its folders are named by the second
    wandb.teardown()  # waits until everything is written
    if name == "tensorboard":
        events = EventAccumulator(str(place / "tensorboard")).Reload()
        assert len(texts(events, "config")) == 1
        values = {(event.step, event.value) for event in events.Scalars("train/loss")}
    elif name == "trackio":
        [run] = [run for run in service.Api().runs("rlreason") if run.name == "resumed"]
        found = service.SQLiteStorage.get_logs("rlreason", "resumed", run_id=run.id)
        values = {(row["train_step"], row["train/loss"]) for row in found if "train/loss" in row}
    else:
        id = json.loads((place / "loggers.json").read_text())["wandb"]
        parts = sorted((place / "wandb").glob(f"offline-run-*-{id}/*.wandb"))
        first, second = ([row for row in history(records(part)) if "train/loss" in row] for part in parts)
        assert all(new["_step"] == old["_step"] for old, new in zip(first[3:], second, strict=False))
        values = {(row["train_step"], row["train/loss"]) for row in first + second}
    assert values == {(row["train_step"], row["train/loss"]) for row in rows}
