"""Loggers next to the run folder, with the real services, offline: what they get, and that none can end a run."""

import json
import math
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from rlreason.config.groups import LoggerConfig
from rlreason.records.files import SUMMARY
from rlreason.records.loggers import AXES, COLUMNS, COUNTERS, SERVICES, Loggers, TrackioLogger, WandbLogger
from rlreason.records.writer import RunWriter
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.text import HIDDEN

ROW = {"rollout_step": 2, "train_step": 5, "eval_step": 1, "train/loss": 0.5, "reward/mean": 0.25}
ODD = "\u00fc ``` <think> | \x00\ud800\n# no heading"
RESPONSE = dict.fromkeys(COLUMNS, 0.0) | {"response": ODD}


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A run folder called `lr=1`, and no variable or login of any service."""
    import wandb  # here, like TensorBoard below: half a second in every test process

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
    return pytest.importorskip("trackio", minversion="0.40", exc_type=ImportError)


def wandb_logger(place: Path, **settings: Any) -> WandbLogger:
    """A W&B logger that sends nothing anywhere; the fixture ends it."""
    return WandbLogger(place, LoggerConfig(wandb=True, **settings), {"seed": 0}, "run1")


def test_wandb_prints_nothing_and_gets_every_row_and_table_at_its_counters(place, capfd, monkeypatch):
    """Bug: variables set after a failed login are ignored, as W&B reads them once, or a setting loses against one."""
    import wandb

    variables = {"WANDB_MODE": "offline", "WANDB_PROJECT": "second", "WANDB_SILENT": "false", "WANDB_NOTES": "theirs"}
    with pytest.raises(ValueError, match="no login"):
        wandb_logger(place)
    monkeypatch.setattr("sys.argv", ["rlreason", "model.cache=https://me:swordfish@host"])
    for name, value in (variables | {SWEEP_VARIABLE: "grid", "SOME_TOKEN": "swordfish-6"}).items():
        monkeypatch.setenv(name, value)
    defined = Mock()
    monkeypatch.setattr("wandb.sdk.wandb_run.Run.define_metric", defined)
    made = wandb_logger(place, notes="ours", tags=["g swordfish-6"])
    found = made.run.project, made.run.group, made.run.name, made.run.tags, made.run.notes
    assert found == ("second", "grid", "lr=1", (f"g {HIDDEN}",), "ours")
    assert made.run.settings.disable_git
    assert made.run.settings.x_disable_meta  # it would keep the command, and what is secret there
    (part,) = Path().glob(made.place.split()[-1].replace("'", ""))
    made.run.log = logged = Mock(wraps=made.run.log)
    made.log(ROW)
    made.table("rollouts", [[0] * len(COLUMNS)], {name: ROW[name] for name in COUNTERS})
    made.finish({"accuracy": 1.0})
    wandb.teardown()  # waits until everything is written
    assert list(part.glob("*.wandb"))
    assert capfd.readouterr() == ("", "")
    axes = {call.args[0]: call.kwargs.get("step_metric") for call in defined.call_args_list}
    ours = {name: counter for counter, names in AXES.items() for name in names}
    assert {name: axes[name] for name in ours} == ours | {"eval/*": "eval_step"}  # W&B's, as the handout defines it
    rows = [call.args[0] for call in logged.call_args_list]
    assert [[row[counter] for counter in COUNTERS] for row in rows] == [[2, 5, 1], [2, 5, 1]]
    assert "generations/rollouts" in rows[1]


def logged_to(place: Path, *names: str, messages: list[str] | None = None) -> Loggers:
    """Loggers that have got the same from a run: a row, another with numbers that are none, a table, the end."""
    loggers = Loggers(([] if messages is None else messages).append)
    loggers.start(LoggerConfig(**dict.fromkeys(names, True)), place, {"seed": 0, "prompt": {"file": ODD}, "of": place})
    loggers.log(ROW)
    loggers.log(ROW | {"train_step": 6, "train/loss": math.nan, "reward/mean": math.inf})
    loggers.table("evals", 3, [RESPONSE, RESPONSE])
    loggers.finish({"status": "finished", "accuracy": math.nan, "protocol": {"hash": ODD}})
    return loggers


def test_tensorboard_draws_each_metric_over_its_counter_and_shows_texts_as_they_are(place, capfd):
    """Bug: a response read as Markdown, or a metric over the wrong counter."""
    loggers = logged_to(place, "tensorboard")
    assert (loggers.failed, loggers.places) == ({}, {"tensorboard": "tensorboard --logdir lr=1/tensorboard"})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(place / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["reward/mean", "train/loss"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(2, 0.25), (2, math.inf)]
    first, second = events.Scalars("train/loss")
    assert (first.step, first.value, second.step, math.isnan(second.value)) == (5, 0.5, 6, True)
    texts = {tag: events.Tensors(f"{tag}/text_summary")[0] for tag in ("generations/evals", "config", "summary")}
    responses, config, summary = (text.tensor_proto.string_val[0].decode() for text in texts.values())
    assert (texts["generations/evals"].step, responses.count("ü ``` <think> |")) == (6, 2)
    assert all(line.startswith("    ") for line in responses.split("\n"))  # nothing in it is read as Markdown
    assert ("    seed: 0" in config, "    status: finished" in summary) == (True, True)
    assert capfd.readouterr() == ("", "")


def test_trackio_keeps_rows_tables_and_settings_in_its_own_place(trackio, place, monkeypatch, capfd):
    """Bug: two runs of one name in one, or the caller's own run ended."""
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
    monkeypatch.setattr(trackio, "init", Mock())
    monkeypatch.setenv("TRACKIO_SERVER_URL", "https://there?write_token=x")
    assert TrackioLogger(place, LoggerConfig(trackio=True), {}, "id").place == "https://there"
    assert capfd.readouterr() == ("", "")


def test_the_callers_own_run_is_left_alone(place):
    """Bug: a run started from a notebook ends the notebook's own W&B run, or logs into it."""
    import wandb

    mine = wandb.init(mode="offline", dir=str(place.parent), settings={"silent": True, "console": "off"})
    theirs = wandb_logger(place, mode="offline")
    theirs.finish({"status": "finished"})
    assert (wandb.run, mine.summary.get("status")) == (mine, None)
    assert theirs.run.id != mine.id
    mine.finish()


def test_a_logger_that_cannot_start_is_one_line_and_in_the_summary(place):
    """Bug: a missing login ends the run."""
    (place / "tensorboard").write_text("no folder")
    messages: list[str] = []
    run = RunWriter(place.parent / "run", "seed: 0\n")
    run.loggers = logged_to(place, "wandb", "tensorboard", messages=messages)  # online, without a login
    run.metrics(ROW)
    run.summary({"status": "finished"})
    assert [line.partition(" could")[0] for line in messages] == ["! logger=wandb", "! logger=tensorboard"]
    assert "logger.mode=offline" in messages[0]
    failed = json.loads((run.folder / SUMMARY).read_text())["failed_loggers"]
    assert failed == run.loggers.failed == run.loggers.places
    assert failed["wandb"] == "could not start (no login was found here)"


@pytest.mark.parametrize("at", ["log", "table", "finish"])
def test_a_logger_that_raises_is_dropped_with_one_line_and_the_others_go_on(place, monkeypatch, at):
    """Bug: a service's error ends the run, or is printed at every row."""
    services = {name: Mock(cure="wait", place="here") for name in ("wandb", "trackio")}
    getattr(services["wandb"], at).side_effect = OSError(f"{at}\nbroke")
    for name, service in services.items():
        monkeypatch.setitem(SERVICES, name, lambda *_, service=service: service)
    messages: list[str] = []
    loggers = logged_to(place, *services, messages=messages)
    (said,) = messages
    assert (said.startswith("! logger=wandb "), f"({at} broke): wait" in said) == (True, True)
    assert loggers.places == loggers.failed | {"trackio": "here"}
    assert services["wandb"].method_calls[-1][0] == at
    assert [call[0] for call in services["trackio"].method_calls] == ["log", "log", "table", "finish"]


def test_a_run_that_resumes_goes_on_in_the_same_run(place, monkeypatch):
    """Bug: each part of an interrupted run is a run of its own in the service, or a new run continues an old one."""
    service = Mock(return_value=Mock(place=""))
    monkeypatch.setitem(SERVICES, "trackio", service)
    for resumed in (False, True, False):
        Loggers().start(LoggerConfig(trackio=True), place, {}, resumed)
    first, second, third = (call.args[3:] for call in service.call_args_list)
    assert (second, third[1], third[0] != first[0]) == ((first[0], True), False, True)
