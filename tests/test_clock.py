"""Every second of a run stands in one phase, in a run that was killed too; what other threads do is busy."""

import json
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from rlreason.engines.rollouts import sampling_work, training_work
from rlreason.records.console import Console
from rlreason.records.writer import RunWriter
from rlreason.runtime.clock import Clock, Work, group_work
from rlreason.training.build import build_components
from rlreason.training.train import close_records, train, trainer_of
from rlreason.types import Grade, Response, Sample
from tests.killed import AT
from tests.small_runs import words_of
from tests.starts import rlreason
from tests.test_trainer import run_of

COUNTERS = ("time/active", "time/total")


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def add_up(rows: list[dict[str, float]]) -> float:
    """The seconds of all phases of these rows."""
    return sum(row[name] for row in rows for name in row if name.startswith("time/") and name not in COUNTERS)


class Hands:
    """A clock's time, which passes only where a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def hands(monkeypatch) -> Hands:
    made = Hands()
    monkeypatch.setattr("rlreason.runtime.clock.time", made)
    return made


def test_phases_of_any_nesting_add_up_to_the_time_that_has_passed(hands):
    clock = Clock()
    hands.pass_by(1)
    clock.begin("loop")
    hands.pass_by(2)
    with clock.phase("rollout"):
        hands.pass_by(4)
        with clock.phase("grading"), clock.phase("record"):
            hands.pass_by(8)
        with suppress(KeyError), clock.phase("score"):
            hands.pass_by(16)
            raise KeyError
    rows = [clock.row()]
    with clock.phase("train"):
        hands.pass_by(32)
        rows.append(clock.row())  # in the middle of a phase
        hands.pass_by(64)
    rows.append(clock.row())
    expected = {"setup": 1, "loop": 2, "rollout": 4, "record": 8, "score": 16, "train": 96}
    assert clock.phases() == expected
    for name, seconds in expected.items():
        assert sum(row.get(f"time/{name}", 0) for row in rows) == seconds
    assert [row["time/train"] for row in rows[1:]] == [32, 64]
    assert clock.total() == add_up(rows) == hands.now - 100


def test_what_another_thread_does_is_busy_and_a_clock_that_is_put_back_tells_nothing_twice(hands):
    first = Clock()
    hands.pass_by(1)
    first.worked("train", Work(2.0, 10, 20, 30))

    def work() -> None:
        with first.phase("rollout"), first.phase("score"):
            hands.pass_by(8)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    told = first.row()
    assert (told["busy/score"], told["time/setup"]) == (8, 9)
    assert {"time/rollout", "time/score"}.isdisjoint(told)
    with first.phase("train"):
        hands.pass_by(2)
    first.worked("train", Work(1.0, 30, 40, 50))
    second = Clock()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    hands.pass_by(4)
    row = second.row()
    assert (row["time/train"], row["time/setup"], row.get("busy/score")) == (2, 4, None)
    assert row["perf/train_tokens_per_second"] == 30.0
    assert second.overall() == {"perf/train_tokens_per_second": 40 / 3}
    assert add_up([told, row]) == second.total() == 15


def samples_of(prompt: list[int], lengths: list[int], **about: object) -> list[Sample]:
    grade = Grade(1.0, 1.0, 1.0, "correct")
    responses = [Response(str(prompt), prompt, [1] * n, [-1.0] * n, "", "stop") for n in lengths]
    return [Sample(response, grade, **about) for response in responses]


def test_a_prompt_is_worked_on_once_for_its_group_and_three_times_with_a_backward_pass():
    group, other = samples_of([1, 2, 3], [4, 5], advantage=1.0), samples_of([7], [2], advantage=-1.0)
    once = group_work(3, [4, 5]).plus(group_work(1, [2]))
    assert sampling_work([s.response for s in [*group, *other]], 1.5) == Work(1.5).plus(once)
    work = training_work([*group, *other], 1.5)
    assert work == Work(1.5, once.tokens, 3 * once.positions, 3 * once.contexts)
    left_out, even = samples_of([9], [9], has_loss=False), samples_of([1], [6])
    assert training_work([*left_out, *even], 0.0) == group_work(1, [6])  # only measured
    assert training_work(even, 0.0, all_learn=True) == group_work(1, [6], passes=3)


def check_sums(rows: list[dict[str, float]], summary: dict[str, Any], passed: float) -> None:
    """Check that the rows' phases add up to the total so far, and to no more than the time that has `passed`.

    A row's total is read before its phases, so the sum up to a row lies between its total and the next one's.
    """
    totals = [row["time/total"] for row in rows]
    for until, total in enumerate(totals, 1):
        behind = totals[until] if until < len(totals) else passed
        assert total - 1e-6 <= add_up(rows[:until]) <= behind + 1e-6
    assert totals[-1] - 0.02 <= sum(summary["phases"].values()) <= passed + 0.02  # which are rounded


GRPO = ("rollout_batch_size=16", "group_size=4")
RUNS = {
    "grpo": (*GRPO, "train_batch_size=8", "checkpoint.every=1", "eval_every=1"),
    "sft": ("algorithm=sft", "train_batch_size=8", "checkpoint.every=1"),
}


@pytest.mark.parametrize("kind", [*RUNS, "ahead"])
def test_the_phases_of_a_run_add_up_to_its_wall_time(kind, tmp_path):
    """`ahead` with the engine in process, which the settings refuse for its numbers and not for its clock."""
    run, config = run_of(*RUNS.get(kind, RUNS["grpo"]), "n_steps=3", "eval_problems=8")
    began = time.monotonic()
    records, console = RunWriter(tmp_path, config, trains=True), Console()
    if kind == "ahead":
        components = build_components(run, tmp_path, console, clock=records.clock)
        with trainer_of(run, components, records, console) as trainer:
            trainer.batches.ahead = True
            close_records(trainer, *trainer.train())
    else:
        train(run, records, console)
    rows, summary = rows_of(tmp_path), json.loads((tmp_path / "summary.json").read_text())
    check_sums(rows, summary, time.monotonic() - began)
    names = {name for row in rows for name in row}
    assert {"time/setup", "time/eval", "time/record", "time/other", "memory/process_peak_gb"} <= names
    assert ("perf/rollout_tokens_per_second" in names) == (kind != "sft")
    assert "busy/grading" in names  # of the evaluations
    # steps 2 and 3, each while the one before was learned
    assert sum("busy/rollout" in row for row in rows) == (2 if kind == "ahead" else 0)
    if any("train/loss" in row for row in rows):
        assert {"time/train", "time/weight_sync", "perf/train_tokens_per_second"} <= names


@pytest.mark.long
def test_the_phases_of_a_run_that_was_killed_add_up_over_all_its_parts(tmp_path):
    at = {AT: "rlreason.training.algorithms:GRPO.collect:call:3"}
    assert rlreason(*words_of("checkpoint.every=1", "n_steps=4"), cwd=tmp_path, **at).returncode == -9
    assert rlreason("resume=run", cwd=tmp_path).returncode == 0
    rows = rows_of(tmp_path / "run")
    totals = [row["time/total"] for row in rows]
    assert all(total <= add_up(rows[:until]) + 1e-6 for until, total in enumerate(totals, 1))
    assert sum("time/setup" in row for row in rows) == 2
