"""Every second of a run stands in one phase, in a run that was killed too; what other threads do is busy."""

import json
import threading
import time
from pathlib import Path

import pytest

from rlreason.algorithms.prefetch import RolloutPrefetcher
from rlreason.algorithms.rollouts import sampling_work
from rlreason.progress.work import training_work
from rlreason.records.console import Console
from rlreason.records.counters import Counters
from rlreason.records.writer import RunWriter
from rlreason.runtime.clock import Clock
from rlreason.runtime.throughput import Work, group_work
from rlreason.setup.algorithm import make_algorithm
from rlreason.setup.components import build_components
from rlreason.setup.learner import make_learner
from rlreason.trainer import Trainer, train
from rlreason.types import Grade, Response, Sample
from tests.killed import AT
from tests.small_runs import words_of
from tests.starts import rlreason
from tests.test_trainer import run_of

COUNTERS = ("time/active", "time/total")


def timed(row: dict[str, float]) -> dict[str, float]:
    """The seconds of a row's phases."""
    return {name: value for name, value in row.items() if name.startswith("time/") and name not in COUNTERS}


def rows_of(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def add_up(rows: list[dict[str, float]]) -> float:
    return sum(sum(timed(row).values()) for row in rows)


def test_phases_of_any_nesting_add_up_to_the_time_that_has_passed():
    began = time.monotonic()
    clock = Clock()
    clock.begin("loop")
    with clock.phase("rollout"):
        with clock.phase("grading"), clock.phase("record"):
            time.sleep(0.01)
        with pytest.raises(KeyError), clock.phase("score"):
            raise KeyError
    rows = [clock.row()]
    with clock.phase("train"):
        rows.append(clock.row())  # in the middle of a phase
    rows.append(clock.row())
    passed = time.monotonic() - began
    assert {name for row in rows for name in timed(row)} == {
        f"time/{name}" for name in ("setup", "loop", "rollout", "grading", "record", "score", "train")
    }
    assert all(value >= 0 for row in rows for value in timed(row).values())
    assert add_up(rows) == pytest.approx(passed, abs=1e-3) == pytest.approx(clock.total(), abs=1e-3)
    assert clock.phases()["record"] >= 0.01 > clock.phases()["rollout"]


def test_what_another_thread_does_is_busy_and_no_time_of_the_loop():
    clock = Clock()

    def work() -> None:
        with clock.phase("rollout"), clock.phase("score"):
            time.sleep(0.02)

    thread = threading.Thread(target=work)
    with clock.phase("train"):
        thread.start()
        thread.join()
    row = clock.row()
    assert row["busy/score"] >= 0.02
    assert {"time/rollout", "time/score"}.isdisjoint(row)
    assert row["time/train"] >= row["busy/score"]
    assert "busy/score" not in clock.row()  # it is told once


def test_a_clock_that_is_put_back_goes_on_and_tells_nothing_twice():
    first = Clock()
    first.worked("train", Work(2.0, 10, 20, 30))
    told = first.row()
    with first.phase("train"):
        time.sleep(0.01)
    first.worked("train", Work(1.0, 30, 40, 50))
    state = json.loads(json.dumps(first.state()))
    second = Clock()
    second.put(state)
    row = second.row()
    assert row["time/train"] == state["seconds"]["time/train"][0]
    assert row["perf/train_tokens_per_second"] == 30.0
    assert second.overall() == {"perf/train_tokens_per_second": 40 / 3}
    assert add_up([told, row]) == pytest.approx(second.total(), abs=1e-3)


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


class Watched(Console):
    """Remembers when it printed last."""

    said_at = 0.0

    def table(self, text: str) -> None:
        super().table(text)
        self.said_at = time.monotonic()


RUNS = {
    "grpo": ("rollout_batch_size=16", "group_size=4", "eval_every=1"),
    "off_policy": ("rollout_batch_size=16", "group_size=4", "train_batch_size=8", "checkpoint.every=1"),
    "ei": ("algorithm=ei", "question_batch_size=4", "group_size=4", "sft_epochs=2", "train_batch_size=4"),
    "sft": ("algorithm=sft", "train_batch_size=8", "checkpoint.every=1"),
}


@pytest.mark.parametrize("kind", RUNS)
def test_the_phases_of_a_run_add_up_to_its_wall_time(kind, tmp_path):
    run, config = run_of(*RUNS[kind], "n_steps=3", "eval_problems=8")
    began = time.monotonic()
    console = Watched()
    train(run, RunWriter(tmp_path, config, trains=True), console)
    passed = console.said_at - began
    rows, summary = rows_of(tmp_path), json.loads((tmp_path / "summary.json").read_text())
    assert add_up(rows) == pytest.approx(rows[-1]["time/total"], rel=0.001, abs=0.01)
    for until in range(1, len(rows)):
        assert add_up(rows[:until]) == pytest.approx(rows[until - 1]["time/total"], rel=0.001, abs=0.01)
    assert sum(summary["phases"].values()) == pytest.approx(passed, rel=0.02, abs=0.25)
    assert summary["time/total"] == pytest.approx(sum(summary["phases"].values()), abs=0.1)
    names = {name for row in rows for name in row}
    assert {"time/setup", "time/eval", "time/record", "time/other", "memory/process_peak_gb"} <= names
    assert ("perf/rollout_tokens_per_second" in names) == (kind != "sft")
    assert "busy/grading" in names  # of the evaluations
    assert "busy/rollout" not in names
    if any("train/loss" in row for row in rows):
        assert {"time/train", "time/weight_sync", "perf/train_tokens_per_second"} <= names


KILLED = "rlreason.algorithms.grpo:GRPO.collect:call:3"


def test_the_phases_of_a_run_that_samples_ahead_add_up_and_what_overlaps_is_busy(tmp_path):
    """With the engine in process, which the settings refuse for its numbers and not for its clock."""
    run, config = run_of(*RUNS["grpo"], "n_steps=3", "eval_problems=8")
    began = time.monotonic()
    records, console = RunWriter(tmp_path, config, trains=True), Watched()
    components = build_components(run, tmp_path, console, clock=records.clock)
    prefetcher = RolloutPrefetcher(make_algorithm(run, components, console), ahead=True, clock=records.clock)
    counters, learner = Counters(clock=records.clock), make_learner(run, components.policy)
    trainer = Trainer(run, components, prefetcher, learner, records, console, counters)
    try:
        trainer.loop()
    finally:
        components.close()
        prefetcher.close()
    rows, summary = rows_of(tmp_path), json.loads((tmp_path / "summary.json").read_text())
    assert add_up(rows) == pytest.approx(rows[-1]["time/total"], rel=0.001, abs=0.01)
    assert sum(summary["phases"].values()) == pytest.approx(console.said_at - began, rel=0.02, abs=0.25)
    assert sum("busy/rollout" in row for row in rows) == 2  # steps 2 and 3, each while the one before was learned
    assert summary["perf/rollout_tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.long
def test_the_phases_of_a_run_that_was_killed_add_up_over_all_its_parts(tmp_path):
    killed = rlreason(
        *words_of("checkpoint.every=1", "n_steps=4"),
        cwd=tmp_path,
        **{AT: KILLED},
    )
    assert killed.returncode == -9
    before = rows_of(tmp_path / "run")
    done = rlreason("resume=run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(tmp_path / "run")
    assert add_up(rows) == pytest.approx(rows[-1]["time/total"], rel=0.001, abs=0.01)
    assert sum("time/setup" in row for row in rows) == 2
    assert rows[-1]["time/total"] > before[-1]["time/total"]
