"""The worker processes from outside: threads, forks, signals, limits, and nothing left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from verdicts import tagged

from rlreason.config.groups import GradingConfig
from rlreason.grading import Grader
from tests.waiting import patient, wait_for

ROOT = Path(__file__).parents[1]
SYMBOLIC = [(r"\int_0^1 x\,dx", r"\frac12", 1.0), (r"\sum_{k=1}^{10} k", "55", 1.0), (r"\int_0^2 x\,dx", "3", 0.0)]
EXPECTED = [right for *_, right in SYMBOLIC]


def rewards(grader: Grader, suffix: str = "") -> list[float]:
    """Grades that need a worker; a suffix of spaces keeps them out of the cache."""
    grades = grader.grade_batch([tagged(answer + suffix) for answer, *_ in SYMBOLIC], [gold for _, gold, _ in SYMBOLIC])
    return [grade.reward for grade in grades]


def workers_of(pid: int) -> list[psutil.Process]:
    """The processes that grade, which are forked from a server; both have the server's command line."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # one that has ended meanwhile
            if process.ppid() != pid and "rlreason.grading" in " ".join(process.cmdline()):
                found.append(process)
    return found


def busy(process: psutil.Process) -> bool:
    """Return whether a process has computed for half a second; False if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cpu_times().user > 0.5
    return False


def ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def in_a_child(check) -> int:
    """Run a check in a forked child; return its exit code, 0 where it holds."""
    if (child := os.fork()) == 0:
        status = 1
        with suppress(BaseException):
            status = int(not check())
        os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_close_leaves_no_process():
    with Grader(patient(workers=2)) as grader:
        assert rewards(grader) == EXPECTED
        processes = workers_of(os.getpid())
        assert len(processes) == 2
    wait_for(lambda: all(map(ended, processes)))
    with pytest.raises(RuntimeError):
        rewards(grader, " ")


def test_threads_share_one_grader_whose_workers_outlive_the_thread_that_started_them():
    found: dict[int, list[float]] = {}
    with Grader(patient()) as grader:
        threads = [
            threading.Thread(target=lambda key=key: found.update({key: rewards(grader, " " * key)})) for key in range(8)
        ]
        threads[0].start()
        threads[0].join(600)
        workers = workers_of(os.getpid())
        for thread in threads[1:]:
            thread.start()
        for thread in threads[1:]:
            thread.join(600)
        assert workers_of(os.getpid()) == workers
    assert found == dict.fromkeys(range(8), EXPECTED)


def test_a_forked_child_makes_workers_of_its_own():
    with Grader(patient()) as grader:
        assert rewards(grader) == EXPECTED
        mine = workers_of(os.getpid())
        assert in_a_child(lambda: rewards(grader, " ") == EXPECTED and len(workers_of(os.getpid())) == 1) == 0
        assert rewards(grader, "  ") == EXPECTED
        assert workers_of(os.getpid()) == mine


@pytest.mark.long
def test_a_stuck_worker_delays_only_its_own_request():
    with Grader(GradingConfig(timeout_s=3.0, workers=2), "own_reward:by_length") as grader:
        grader.grade_batch(["ab", "abc"], ["12", "12"])
        begin = time.perf_counter()
        grades = grader.grade_batch(["hang"] + ["x" * length for length in range(1, 300)], ["12"] * 300)
        assert [grade.outcome for grade in grades].count("timeout") == 1
        assert grades[2].outcome == "correct"
        assert time.perf_counter() - begin < 3.0 + 5.0


@pytest.mark.long
@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_process_that_died_idle_is_replaced_and_no_request_is_blamed(who):
    with Grader(patient()) as grader:
        assert rewards(grader) == EXPECTED
        (worker,) = workers_of(os.getpid())
        process = worker if who == "worker" else worker.parent()
        process.kill()
        wait_for(lambda: ended(process))
        assert rewards(grader, " ") == EXPECTED  # a kill would have been an error, and no reward


SCRIPT = """
    import sys, threading, time
    from rlreason.config.groups import GradingConfig
    from rlreason.grading import Grader
    grader = Grader(GradingConfig(workers=2))
    answer = r"</think> <answer>\\int_0^1 x\\,dx</answer>"
    print(grader.grade_batch([answer], ["0.5"])[0].reward, flush=True)
    if "hang" in sys.argv:
        grader = Grader(GradingConfig(timeout_s=60.0, workers=2), reward=lambda response, gold: 9**9**9**9)
        threading.Thread(target=grader.grade_batch, args=(["a", "b"], ["1", "1"]), daemon=True).start()
        time.sleep(3600)
"""


def script(folder: Path, *arguments: str, text: str = SCRIPT, **env: str) -> subprocess.Popen:
    """A process of such a program, which lies in `folder` or, where an argument is "-", comes through its input."""
    (folder / "program.py").write_text(textwrap.dedent(text))
    command = [sys.executable, *(arguments if "-" in arguments else ("program.py", *arguments))]
    with (folder / "program.py").open() as program:
        env = {**os.environ, "PYTHONPATH": str(ROOT), **env}
        return subprocess.Popen(command, stdin=program, stdout=-1, stderr=-1, text=True, env=env, cwd=folder)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL])
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path, how):
    parent = script(tmp_path, "hang")  # in C: the kernel has to end them
    assert parent.stdout.readline() == "1.0\n"
    wait_for(lambda: sum(map(busy, workers_of(parent.pid))) >= 2)
    processes = psutil.Process(parent.pid).children(recursive=True)
    assert len(processes) >= 2
    parent.send_signal(how)
    parent.wait()
    wait_for(lambda found=processes: all(map(ended, found)))
    parent.communicate()


IN_A_POOL = """
    import multiprocessing
    from rlreason.grading import r1_zero_reward_fn

    def graded(answer):
        return r1_zero_reward_fn("so </think> <answer>" + answer + "</answer>", "0.5", fast=False)["reward"]

    if __name__ == "__main__":
        with multiprocessing.get_context("fork").Pool(1) as pool:
            print(pool.map(graded, [r"\\int_0^1 x\\,dx"]))
            pool.close()
            pool.join()
"""


@pytest.mark.parametrize(
    ("arguments", "text", "printed"),
    [(["-"], SCRIPT, "1.0\n"), ([], IN_A_POOL, "[1.0]\n")],  # a daemon: may start no processes, runs no atexit
    ids=["from standard input", "in a multiprocessing pool"],
)
def test_a_program_without_a_main_guard_grades_and_ends(tmp_path, arguments, text, printed):
    process = script(tmp_path, *arguments, text=text)
    assert (*process.communicate(timeout=600), process.returncode) == (printed, "", 0)


def test_grades_do_not_depend_on_order_company_or_workers():
    pairs = [(answer + " " * index, gold) for index in range(4) for answer, gold, _ in SYMBOLIC]
    pairs += [("9^9^9^9", "38"), (r"\sqrt{8}", r"2\sqrt2"), ("38", "39")]

    def graded(order: list[tuple[str, str]], workers: int) -> dict[tuple[str, str], object]:
        with Grader(patient(workers=workers)) as grader:
            grades = grader.grade_batch([tagged(answer) for answer, _ in order], [gold for _, gold in order])
        return dict(zip(order, grades, strict=True))

    assert graded(pairs, 1) == graded(pairs[::-1], 3)


ALIVE = """
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import numpy

THREAD, GENERATOR = ThreadPoolExecutor(1), numpy.random.default_rng()
THREAD.submit(int).result()  # it has begun

def in_a_thread(response, ground_truth):
    return THREAD.submit(float, 1).result()

def at_random(response, ground_truth):
    return GENERATOR.random()

def in_a_process(response, ground_truth):
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return 1.0 - process.exitcode
"""


def test_each_worker_imports_a_rewards_module_for_itself(tmp_path, monkeypatch):
    """Bug: forked from one that has imported it, threads are gone and generators equal; daemons have no children."""
    (tmp_path / "alive.py").write_text(ALIVE)
    monkeypatch.syspath_prepend(tmp_path)
    found = {}
    for name in ("in_a_thread", "at_random", "in_a_process"):
        with Grader(patient(workers=2), f"alive:{name}") as grader:
            found[name] = [grade.reward for grade in grader.grade_batch(["a", "b"], ["1", "1"])]
    assert found["in_a_thread"] == found["in_a_process"] == [1.0, 1.0]
    assert len(set(found["at_random"])) == 2
