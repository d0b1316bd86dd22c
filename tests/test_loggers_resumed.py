"""A run that was killed and goes on: each service has every row once, whatever of them it had kept, and lost none."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlreason.config.groups import LoggerConfig
from rlreason.records.files import LOGGERS, METRICS, step_name
from rlreason.records.guarded_loggers import Loggers, Resumed, catch_up_service
from rlreason.records.loggers import COLUMNS, COUNTERS, Sent, axis_of
from rlreason.runtime.machine import SWEEP_VARIABLE
from tests.test_loggers import history, records

STEPS = 16
KEPT = 7  # rows that stand before the checkpoint
RESPONSE = dict.fromkeys(COLUMNS, 0.0) | {"response": "step: 99 so 7"}


def rows() -> list[dict[str, float]]:
    """Those of a run with two updates a step, which is evaluated now and then: several share a `train_step`."""
    found: list[dict[str, float]] = []
    for step in range(STEPS):
        counters = {"rollout_step": step // 2, "train_step": step, "eval_step": step // 4}
        found.append(counters | {"train/loss": step / 8} | ({"reward/mean": step / 4} if step % 2 == 0 else {}))
        if step % 4 == 3:
            found.append(counters | {"eval/accuracy": step / 16, "time/eval": time.monotonic()})
    found[3]["train/loss"] = math.nan
    return found


def part(folder: Path, name: str, first: int, last: int | None, pause: float = 0.0) -> None:
    """Log rows `first` to `last` as a run does, and tables after some of them; then be killed, interrupted, or done."""
    said: list[str] = []
    sent = len((folder / METRICS).read_text().splitlines()) if (folder / METRICS).exists() else 0
    resumed = None
    if first:
        lines = (folder / METRICS).read_text().splitlines(keepends=True)
        (folder / METRICS).write_text("".join(lines[:first]))
        resumed = Resumed(sent - first, frozenset(("evals", step) for step in range(first, sent) if step % 5 == 0))
        for path in (folder / "evals").glob("*"):
            if int(path.name[5:10]) >= first:
                path.unlink()
    loggers = Loggers(said.append)
    loggers.start(LoggerConfig(**{name: True}, mode="offline" if name == "wandb" else None), folder, {}, resumed)
    for number, row in list(enumerate(rows()))[first:last]:
        with (folder / METRICS).open("a") as file:
            finite = {key: None if math.isnan(value) else value for key, value in row.items()}
            file.write(json.dumps(finite) + "\n")
        loggers.log(row)
        if number % 5 == 0:
            (folder / "evals").mkdir(exist_ok=True)
            (folder / "evals" / step_name(number)).write_text("{}\n")
            loggers.table("evals", number, [RESPONSE])
    assert not said, said
    if pause == INTERRUPTED:
        loggers.interrupted()
    elif last is not None:
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        loggers.finish({"status": "finished"})
    assert not loggers.failed, loggers.failed


def run_part(place: Path, *words: object) -> int:
    """The exit code of one part of the run, which is a process of its own."""
    argv = [sys.executable, __file__, *map(str, words)]
    left_out = ("WANDB_", "TRACKIO_", SWEEP_VARIABLE, "NETRC")
    env = {key: value for key, value in os.environ.items() if not key.startswith(left_out)}
    env |= {"HOME": str(place), "TRACKIO_DIR": str(place / "trackio"), "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(argv, cwd=place, env=env, check=False, timeout=600).returncode


Found = tuple[Counter[tuple[str, int]], Counter[int]]  # (metric, value of its counter), step of a table


def in_tensorboard(folder: Path) -> Found:
    events = EventAccumulator(str(folder / "tensorboard"), {"scalars": 0, "tensors": 0}).Reload()
    tags = events.Tags()
    assert len(events.Tensors("config/text_summary")) == 1
    said = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("generations/evals/text_summary")]
    return (
        Counter((tag, event.step) for tag in tags["scalars"] for event in events.Scalars(tag)),
        Counter(int(text.split()[1]) for text in said),
    )


def in_wandb(folder: Path) -> Found:
    known = json.loads((folder / LOGGERS).read_text())["wandb"]
    files = sorted((folder / "wandb").glob(f"offline-run-*-{known}/*.wandb"))
    metrics, tables, steps = Counter[tuple[str, int]](), Counter[int](), list[int]()
    for file in files:
        for row in history(records(file)):
            values = {name: json.loads(value) for name, value in row.items()}
            steps.append(values["_step"])
            if found := [name for name in values if name.startswith("generations/evals/path")]:
                table = json.loads((file.parent / "files" / values[found[0]]).read_text())
                tables[table["data"][0][0]] += 1
                continue
            names = [name for name in values if name not in COUNTERS and not name.startswith("_")]
            metrics.update((name, values[axis_of(name)]) for name in names)
    assert steps == sorted(set(steps))  # the parts follow one another on W&B's own axis too
    return metrics, tables


def in_trackio(folder: Path) -> Found:
    database = Path(folder.parent / "trackio/rlreason.db")
    words = "import json, sys, trackio; [run] = trackio.Api().runs('rlreason'); "
    words += "print(json.dumps(trackio.SQLiteStorage.get_logs('rlreason', run.name, run_id=run.id), default=str))"
    env = os.environ | {"TRACKIO_DIR": str(folder.parent / "trackio")}
    done = subprocess.run([sys.executable, "-c", words], env=env, capture_output=True, text=True, check=True)
    assert database.is_file()
    metrics, tables = Counter[tuple[str, int]](), Counter[int]()
    for row in json.loads(done.stdout.splitlines()[-1]):
        if "generations/evals" in row:
            tables[row["generations/evals"]["_value"][0]["step"]] += 1
        elif "summary" not in row:
            names = [name for name in row if name not in (*COUNTERS, "step", "timestamp")]
            metrics.update((name, int(row[axis_of(name)])) for name in names)
    return metrics, tables


READ = {"tensorboard": in_tensorboard, "wandb": in_wandb, "trackio": in_trackio}


INTERRUPTED = -1.0
PAUSES = [(name, pause) for name in READ for pause in (INTERRUPTED, 0.0, 1.5)]  # what a service has kept differs


@pytest.mark.long
@pytest.mark.parametrize(("name", "pause"), PAUSES)
def test_a_run_that_was_stopped_goes_on_with_its_own_run_in_the_service(tmp_path, name, pause):
    if name == "trackio":
        pytest.importorskip("trackio", minversion="0.40", exc_type=ImportError)
    folder = tmp_path / "lr=1"
    folder.mkdir()
    stopped = 0 if pause == INTERRUPTED else -signal.SIGKILL
    assert run_part(tmp_path, folder, name, 0, 13, pause) == stopped
    known = (folder / LOGGERS).read_text()
    again = 14 if name == "wandb" else 10  # stopped again, before it got as far: W&B would have some rows twice
    assert run_part(tmp_path, folder, name, KEPT, again, pause) == stopped
    assert run_part(tmp_path, folder, name, KEPT + 1, "None") == 0
    assert (folder / LOGGERS).read_text() == known
    metrics, tables = READ[name](folder)
    whole = rows()
    expected = Counter((key, int(row[axis_of(key)])) for row in whole for key in row if key not in COUNTERS)
    there = {number for number in range(len(whole)) if number % 5 == 0}
    assert set(tables.values()) == {1}
    assert tables.keys() <= there
    if name == "wandb" and pause == 0:  # W&B is trusted to hold what it was sent, and lost some with the process
        assert metrics <= expected
    else:
        assert metrics == expected
        assert {number for number in there if number > KEPT} <= tables.keys()  # one that was lost before is not there


def test_a_logger_that_is_chosen_later_gets_the_rows_from_before(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / METRICS).write_text('{"train_step": 1, "train/loss": 0.5}\n{"train_step": 2, "train/loss": null}\n')
    loggers = Loggers()
    loggers.start(LoggerConfig(tensorboard=True), folder, {}, Resumed())
    loggers.log({"train_step": 3, "train/loss": 0.25})
    loggers.finish({})
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


class Remote:
    """A service that cannot be asked what it holds."""

    cure = place = ""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def sent(self) -> Sent | None:
        return None

    def log(self, row: Any) -> None:
        self.got.append(row)

    def table(self, name: str, step: int, rows: Any, counters: Any) -> None:
        self.got.append((name, step))

    def finish(self, summary: Any, counters: Any) -> None:
        pass

    def abandon(self) -> None:
        pass


def test_a_service_that_cannot_be_read_is_trusted_to_hold_what_it_was_sent():
    made, resumed = Remote(), Resumed(2, frozenset({("rollouts", 4)}))
    loggers = Loggers()
    loggers.add("mine", lambda: made, "", lambda one: catch_up_service(one, [{"train_step": 1}], [], resumed))
    for step in range(2, 6):
        loggers.log({"train_step": step, "train/loss": 0.5})
        loggers.table("rollouts", step, [RESPONSE])
    loggers.finish({})
    assert [one if isinstance(one, tuple) else one["train_step"] for one in made.got] == [
        ("rollouts", 2), ("rollouts", 3), 4, 5, ("rollouts", 5),
    ]  # fmt: skip


if __name__ == "__main__":
    place, service, start, end, *rest = sys.argv[1:]
    part(Path(place), service, int(start), None if end == "None" else int(end), *map(float, rest))
