"""Every second of a run stands in one phase, in a run that was killed too."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import pairwise
from types import SimpleNamespace

import pytest

from rlreason import load_run
from rlreason.engines.rollouts import sampling_work, training_work
from rlreason.runtime.clock import Clock, Work, group_work
from rlreason.types import Grade, Response, Sample

COUNTERS = ("time/active", "time/total")


def add_up(rows: list[dict[str, float]]) -> float:
    """The seconds of all phases of these rows."""
    return sum(row[name] for row in rows for name in row if name.startswith("time/") and name not in COUNTERS)


@pytest.fixture
def hands(monkeypatch) -> SimpleNamespace:
    """A clock's time, which passes only where a test says so."""
    made = SimpleNamespace(now=100.0, monotonic=lambda: made.now)
    monkeypatch.setattr("rlreason.runtime.clock.time", made)
    return made


def test_phases_of_any_nesting_add_up_to_the_time_that_has_passed(hands):
    """Bug: seconds of a nested phase, or of one that failed, count twice or not at all."""
    clock = Clock()
    hands.now += 1
    clock.begin("loop")
    hands.now += 2
    with clock.phase("rollout"):
        hands.now += 4
        with clock.phase("grading"), clock.phase("record"):
            hands.now += 8
        with suppress(KeyError), clock.phase("score"):
            hands.now += 16
            raise KeyError
    rows = [clock.row()]
    with clock.phase("train"):
        hands.now += 32
        rows.append(clock.row())  # in the middle of a phase
        hands.now += 64
    rows.append(clock.row())
    assert clock.phases() == {"setup": 1, "loop": 2, "rollout": 4, "record": 8, "score": 16, "train": 96}
    assert [row["time/train"] for row in rows[1:]] == [32, 64]
    assert clock.total() == add_up(rows) == hands.now - 100


def test_what_another_thread_does_is_busy_and_a_clock_that_is_put_back_tells_nothing_twice(hands):
    """Bug: a resumed run reports again what is in the rows of its first part."""
    first = Clock()
    hands.now += 1
    first.worked("train", Work(2.0, 10, 20, 30))

    def work() -> None:
        with first.phase("rollout"), first.phase("score"):
            hands.now += 8

    with ThreadPoolExecutor() as pool:
        pool.submit(work)
    told = first.row()
    assert (told["busy/score"], told["time/setup"]) == (8, 9)
    assert {"time/rollout", "time/score"}.isdisjoint(told)
    with first.phase("train"):
        hands.now += 2
    first.worked("train", Work(1.0, 30, 40, 50))
    second = Clock()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    hands.now += 4
    row = second.row()
    assert (row["time/train"], row["time/setup"], row.get("busy/score")) == (2, 4, None)
    assert row["perf/train_tokens_per_second"] == 30.0
    assert second.overall() == {"perf/train_tokens_per_second": 40 / 3}
    assert add_up([told, row]) == second.total() == 15


def test_a_prompt_is_worked_on_once_for_its_group_and_three_times_with_a_backward_pass():
    """Bug: a utilisation that counts a shared prompt for each response."""
    grade, responses = Grade(1.0, 1.0, 1.0, "correct"), []
    for prompt, length in (([1, 2, 3], 4), ([1, 2, 3], 5), ([7], 2)):
        responses.append(Response(str(prompt), prompt, [1] * length, [-1.0] * length, "", "stop"))
    once = group_work(3, [4, 5]).plus(group_work(1, [2]))
    assert sampling_work(responses, 1.5) == Work(1.5).plus(once)
    learned = [Sample(response, grade, advantage=1.0) for response in responses]
    assert training_work(learned, 1.5) == Work(1.5, once.tokens, 3 * once.positions, 3 * once.contexts)
    even = [Sample(responses[2], grade), Sample(responses[0], grade, has_loss=False)]
    assert training_work(even, 0.0) == group_work(1, [2])  # only measured
    assert training_work(even[:1], 0.0, all_learn=True) == group_work(1, [2], passes=3)


def test_the_phases_of_a_run_add_up_to_its_wall_time(finished_run):
    """Bug: seconds that stand in no phase, or in two."""
    found = load_run(finished_run.folder)
    rows, totals = found.metrics, [row["time/total"] for row in found.metrics]
    # a row's total is read before its phases, so the sum up to a row lies between its total and the next one's
    for until, (total, behind) in enumerate(pairwise(totals), 1):
        assert total - 1e-6 <= add_up(rows[:until]) <= behind + 1e-6
    assert totals[-1] - 0.02 <= sum(found.summary["phases"].values()) <= found.summary["seconds"] + 0.1  # rounded
    names = {name for row in rows for name in row}
    assert {f"time/{name}" for name in ("setup", "eval", "record", "other", "train", "weight_sync")} <= names
    assert {"memory/process_peak_gb", "busy/grading", "perf/train_tokens_per_second"} <= names
    assert "perf/rollout_tokens_per_second" in names
