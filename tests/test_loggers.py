"""Loggers beside the run folder, with the real services, offline: what they are given, and that none can end a run."""

import contextlib
import json
import math
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import wandb
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from rlreason.config.groups import LOGGERS, LoggerConfig
from rlreason.records import files
from rlreason.records.files import CONTENTS, SUMMARY
from rlreason.records.loggers import (
    AXES,
    COLUMNS,
    COUNTERS,
    SERVICES,
    LoggedRun,
    Loggers,
    Resumed,
    WandbLogger,
    counters_of,
)
from rlreason.records.writer import RunWriter
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.text import HIDDEN

OTHERS = {
    "WANDB_PROJECT": "theirs", "WANDB_ENTITY": "team", "WANDB_RUN_GROUP": "course", "WANDB_NAME": "first",
    "WANDB_TAGS": "a,b", "WANDB_NOTES": "a note",
}  # fmt: skip
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
    return folder


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
    assert made.run.settings.disable_git  # it would keep a difference from the commit, and what is secret there
    assert not made.run.settings.x_disable_meta
    assert list(Path("lr=1/wandb").glob("offline-run-*"))


def test_a_command_that_holds_a_secret_is_kept_from_wandb(logger, monkeypatch):
    monkeypatch.setattr("sys.argv", ["rlreason", "model.cache=https://me:swordfish@host"])
    assert logger(mode="offline").run.settings.x_disable_meta


def test_secrets_in_the_names_of_a_run_are_hidden(logger):
    names = {"name": "run swordfish-6", "group": "g swordfish-6", "tags": ["swordfish-6"], "notes": "is swordfish-6"}
    made = logger({"SOME_TOKEN": "swordfish-6"}, mode="offline", **names)
    hidden = (f"g {HIDDEN}", f"run {HIDDEN}", (HIDDEN,), f"is {HIDDEN}")
    assert (made.run.group, made.run.name, made.run.tags, made.run.notes) == hidden


def test_nothing_is_printed_and_the_place_is_shown(logger, capfd):
    made = logger({"WANDB_SILENT": "false"}, mode="offline")
    (part,) = Path().glob(made.place.split()[-1].replace("'", ""))
    assert part.samefile(made.run.settings.sync_dir)
    made.log(ROW)
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
    made.log(ROW)
    assert made.run.disabled
    assert not list(Path("lr=1").rglob("*.wandb"))


def test_a_variable_that_changes_after_the_first_run_of_a_process_holds_for_the_next(logger, monkeypatch):
    """W&B reads its variables once in a process; in a notebook, WANDB_MODE=offline must hold after a failed login."""
    with pytest.raises(ValueError, match="no login"):
        logger()
    monkeypatch.setenv("WANDB_PROJECT", "second")
    assert logger({"WANDB_MODE": "offline"}).run.project == "second"
    assert wandb.setup().settings.project is None  # what runs of the user's own go by


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


def history(found: list[wandb_internal_pb2.Record]) -> list[dict[str, str]]:
    """What was logged, as JSON by its name."""
    rows = [r.history.item for r in found if r.HasField("history")]
    return [{item.key or "/".join(item.nested_key): item.value_json for item in row} for row in rows]


def test_every_row_and_every_table_stands_at_its_counters(logger):
    made = logger(mode="offline")
    made.log(ROW)
    made.table("rollouts", [[0] * len(COLUMNS)], {name: ROW[name] for name in COUNTERS})
    made.finish({"accuracy": 1.0})
    wandb.teardown()  # waits until everything is written
    found = records(next(Path("lr=1").rglob("*.wandb")))
    axes = {r.metric.name or r.metric.glob_name: r.metric.step_metric for r in found if r.HasField("metric")}
    assert {name: axes[name] for names in AXES.values() for name in names} == {
        name: counter for counter, names in AXES.items() for name in names
    } | {"eval/*": "eval_step"}  # W&B's, as the handout defines it
    keys = history(found)
    assert [[json.loads(row[counter]) for counter in COUNTERS] for row in keys] == [[2, 5, 1], [2, 5, 1]]
    assert any(name.startswith("generations/rollouts/") for name in keys[1])


# The other services


def texts(events: EventAccumulator, tag: str) -> list[tuple[int, str]]:
    return [(e.step, e.tensor_proto.string_val[0].decode()) for e in events.Tensors(f"{tag}/text_summary")]


def logged_to(place: Path, *names: str, said: list[str] | None = None) -> Loggers:
    """Loggers that have got the same from a run: a row, another with numbers that are none, a table, the end."""
    loggers = Loggers(([] if said is None else said).append)
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
    assert step == 6
    assert shown.count("ü ``` <think> |") == 2
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


def test_runs_at_once_share_nothing_and_leave_the_callers_own_run_alone(place):
    wandb.teardown()
    mine = wandb.init(mode="offline", dir=str(place.parent), settings={"silent": True, "console": "off"})
    loggers = [Loggers(), Loggers()]
    settings = LoggerConfig(wandb=True, mode="offline")
    folders = [place / "a", place / "b"]
    for folder in folders:
        folder.mkdir()
    starts = zip(loggers, folders, strict=True)
    threads = [threading.Thread(target=one.start, args=(settings, folder, {})) for one, folder in starts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, one in enumerate(loggers):
        one.log(ROW | {"train_step": number})
        one.finish({"status": "finished"})
    assert wandb.run is mine
    mine.log({"own": 1})
    mine.finish()
    wandb.teardown()
    written = list(place.parent.rglob("*.wandb"))
    kept = [
        {name for r in records(file) for i in r.history.item for name in (i.key, *i.nested_key)} for file in written
    ]
    assert sorted("own" in names for names in kept) == sorted("train/loss" not in names for names in kept)
    assert len(kept) == 3


# What fails


def test_a_logger_that_cannot_start_is_one_line_and_in_the_summary(place):
    wandb.teardown()
    (place / "tensorboard").write_text("no folder")
    said: list[str] = []
    records = RunWriter(place.parent / "run", "seed: 0\n")
    records.loggers = logged_to(place, "wandb", "tensorboard", said=said)  # online, without a login
    assert [line.partition(" (")[0] for line in said] == [
        "! logger=wandb could not start", "! logger=tensorboard could not start",
    ]  # fmt: skip
    assert "(no login was found here): run `wandb login`, set WANDB_API_KEY, or use logger.mode=offline" in said[0]
    assert all(len(line.splitlines()) == 1 and line.endswith("; the run folder has everything") for line in said)
    records.metrics(ROW)
    records.summary({"status": "finished"})
    assert len(said) == 2
    summary = json.loads((records.folder / SUMMARY).read_text())
    assert summary["failed_loggers"] == records.loggers.failed == records.loggers.places
    assert summary["failed_loggers"]["wandb"] == "could not start (no login was found here)"
    wandb.teardown()


@pytest.mark.long
def test_a_process_of_wandb_that_is_stopped_holds_the_end_of_a_run_no_longer_than_it_may(place, monkeypatch):
    wandb.teardown()
    monkeypatch.setattr("rlreason.records.loggers.FINISH_S", 8.0)
    monkeypatch.setenv("WANDB_MODE", "offline")
    said: list[str] = []
    loggers = Loggers(said.append)
    loggers.start(LoggerConfig(wandb=True), place, {})
    (core,) = [child for child in psutil.Process().children() if child.name() == "wandb-core"]
    core.suspend()
    loggers.finish({})
    assert [line.partition(" (")[0] for line in said] == ["! logger=wandb could not end in order"]
    with contextlib.suppress(Exception):  # of W&B, whose process is gone
        wandb.teardown()


@pytest.mark.long
def test_a_service_that_does_not_answer_holds_the_run_no_longer_than_it_may(place, monkeypatch, capfd):
    """A server that takes connections and says nothing, as behind some firewalls."""
    wandb.teardown()
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        began = time.monotonic()
        loggers = Loggers(said.append)
        loggers.start(LoggerConfig(wandb=True), place, {})
        loggers.finish({})
        assert time.monotonic() - began < 20
    assert [line.partition(" (")[0] for line in said] == ["! logger=wandb could not start"]
    assert "Consider" not in said[0]
    assert not capfd.readouterr().out
    wandb.teardown()


class Failing:
    """A service that raises in one of its methods."""

    cure, place = "wait", "here"

    def __init__(self, at: str) -> None:
        self.at, self.calls = at, list[str]()

    def log(self, row: Mapping[str, float]) -> None:
        self._call("log")

    def table(self, name: str, rows: Sequence[Sequence[Any]], counters: Mapping[str, float]) -> None:
        self._call("table")

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._call("finish")

    def _call(self, method: str) -> None:
        self.calls.append(method)
        if method == self.at:
            raise OSError(f"{method}\nbroke")


@pytest.mark.parametrize("at", ["log", "table", "finish"])
def test_a_logger_that_raises_is_dropped_with_one_line_and_the_others_go_on(place, monkeypatch, at):
    services = {"wandb": Failing(at), "trackio": Failing("never")}
    for name, service in services.items():
        monkeypatch.setitem(SERVICES, name, lambda *_, service=service: service)
    messages: list[str] = []
    loggers = logged_to(place, *services, said=messages)
    what = "could not end in order" if at == "finish" else "failed"
    assert messages == [f"! logger=wandb {what} ({at} broke): wait; the run folder has everything"]
    assert loggers.failed == {"wandb": f"{what} ({at} broke)"}
    assert loggers.places == loggers.failed | {"trackio": "here"}
    assert services["wandb"].calls[-1] == at
    assert services["trackio"].calls == ["log", "log", "table", "finish"]


# A run that resumes


def in_tensorboard(place: Path) -> Counter[int]:
    events = EventAccumulator(str(place / "tensorboard")).Reload()
    assert len(texts(events, "config")) == 1
    return Counter(event.step for event in events.Scalars("train/loss"))


def in_wandb(place: Path) -> Counter[int]:
    wandb.teardown()  # waits until everything is written
    id = json.loads((place / files.LOGGERS).read_text())["wandb"]
    parts = sorted((place / "wandb").glob(f"offline-run-*-{id}/*.wandb"))
    assert len(parts) == 2
    rows = [{key: json.loads(value) for key, value in row.items()} for part in parts for row in history(records(part))]
    steps = [row["_step"] for row in rows]
    assert steps == sorted(set(steps))  # the parts follow one another on W&B's own axis too
    return Counter(row["train_step"] for row in rows if "train/loss" in row)


def in_trackio(place: Path) -> Counter[int]:
    import trackio

    [run] = [run for run in trackio.Api().runs("rlreason") if run.name == "resumed"]
    rows = trackio.SQLiteStorage.get_logs("rlreason", "resumed", run_id=run.id)
    return Counter(row["train_step"] for row in rows if "train/loss" in row)


@pytest.mark.parametrize("read", [in_tensorboard, in_wandb, in_trackio])
def test_a_run_that_resumes_goes_on_in_the_same_run_with_every_row_once(place, read, request):
    """It was interrupted after row 6, and its last checkpoint is from before row 4.

    One row of the first part does not come again: the evaluation at the end of a run that is then given more steps.
    """
    name = read.__name__.removeprefix("in_")
    if name == "trackio":
        request.getfixturevalue("trackio")
    wandb.teardown()
    settings = LoggerConfig(**{name: True}, mode="offline" if name == "wandb" else None, name="resumed")
    rows = [{"train_step": step, "train/loss": step / 8} for step in range(1, 10)]
    end = {"train_step": 6, "eval_step": 1, "eval/accuracy": 0.5}
    sent = frozenset(counters_of(row) for row in [*rows[3:6], end])
    for first, last, resumed in ((0, 6, None), (3, 9, Resumed(sent, frozenset({("evals", 5)})))):
        (place / files.METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows[:first]))
        loggers = Loggers()
        loggers.start(settings, place, {}, resumed)
        for row in rows[first:last]:
            loggers.log(row)
            if row["train_step"] == 5:
                loggers.table("evals", 5, [RESPONSE])
        if resumed is None:
            loggers.log(end)
        loggers.interrupted()
        assert not loggers.failed
        time.sleep(1.1 if name == "wandb" else 0)  # its folders are named by the second
    assert read(place) == Counter(range(1, 10))


def test_names_of_folders_are_the_run_folders_own():
    assert {"wandb", "tensorboard"} <= set(CONTENTS)
    assert tuple(SERVICES) == LOGGERS
