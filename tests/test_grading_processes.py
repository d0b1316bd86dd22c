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

from rlreason.config.groups import GradingConfig
from rlreason.grading import Grader
from tests.waiting import patient, wait_for

ROOT = Path(__file__).parents[1]
SYMBOLIC = [
    (r"\int_0^1 x\,dx", r"\frac12", 1.0),
    (r"\sum_{k=1}^{10} k", "55", 1.0),
    (r"\int_0^2 x\,dx", "3", 0.0),
]


def tagged(answer: str) -> str:
    return f"so </think> <answer>{answer}</answer>"


def rewards(grader: Grader, suffix: str = "") -> list[float]:
    """Grades that need a worker; a suffix of spaces keeps them out of the cache."""
    grades = grader.grade_batch([tagged(answer + suffix) for answer, *_ in SYMBOLIC], [gold for _, gold, _ in SYMBOLIC])
    return [grade.reward for grade in grades]


EXPECTED = [right for *_, right in SYMBOLIC]


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


def gone(processes: list[psutil.Process], within_s: float = 10.0) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.long
def test_close_leaves_no_process_and_the_grader_can_be_used_again():
    grader = Grader(patient(workers=2))
    grader.start()
    assert rewards(grader) == EXPECTED
    processes = workers_of(os.getpid())
    assert len(processes) >= 2
    grader.close()
    assert gone(processes)
    assert rewards(grader, " ") == EXPECTED
    grader.close()
    assert not workers_of(os.getpid())


def test_eight_threads_share_one_grader():
    found: dict[int, list[float]] = {}
    with Grader(patient(workers=2)) as grader:
        threads = [
            threading.Thread(target=lambda key=key: found.update({key: rewards(grader, " " * key)})) for key in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    assert found == dict.fromkeys(range(8), EXPECTED)


def test_workers_started_in_a_thread_outlive_it():
    with Grader(patient()) as grader:
        thread = threading.Thread(target=grader.start)
        thread.start()
        thread.join()
        assert rewards(grader) == EXPECTED
        first = workers_of(os.getpid())
        assert rewards(grader, " ") == EXPECTED  # a kill would have been an error, and no reward
        assert workers_of(os.getpid()) == first


def test_alarms_of_the_caller_are_left_alone():
    calls = []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(1))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1000)
        handler = signal.getsignal(signal.SIGALRM)
        with Grader(patient()) as grader:
            assert rewards(grader) == EXPECTED
        assert signal.getsignal(signal.SIGALRM) is handler
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 900
        assert not calls
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_forked_child_makes_workers_of_its_own():
    with Grader(patient()) as grader:
        assert rewards(grader) == EXPECTED
        mine = workers_of(os.getpid())
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = int(rewards(grader, " ") != EXPECTED or len(workers_of(os.getpid())) != 1)
                grader.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert rewards(grader, "  ") == EXPECTED
        assert workers_of(os.getpid()) == mine


@pytest.mark.long
def test_a_fork_while_another_thread_grades_does_not_hang_the_child():
    with Grader(GradingConfig(timeout_s=3.0), "tests.test_grading_settings:by_length") as grader:
        grader.grade_batch(["ab"], ["12"])
        thread = threading.Thread(target=lambda: grader.grade_batch(["hang"], ["12"]))
        thread.start()
        time.sleep(0.5)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = int(grader.grade_batch(["abc"], ["123"])[0].reward != 1.0)
                grader.close()
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        thread.join()


@pytest.mark.long
def test_a_stuck_worker_delays_only_its_own_request():
    with Grader(GradingConfig(timeout_s=2.0, workers=2), "tests.test_grading_settings:by_length") as grader:
        grader.grade_batch(["ab", "abc"], ["12", "12"])
        begin = time.perf_counter()
        grades = grader.grade_batch(["hang"] + ["x" * length for length in range(1, 300)], ["12"] * 300)
        assert [grade.outcome for grade in grades].count("timeout") == 1
        assert grades[2].outcome == "correct"
        assert time.perf_counter() - begin < 2.0 + 3.0


@pytest.mark.long
def test_a_worker_that_died_idle_is_replaced_and_no_request_is_blamed():
    with Grader(patient()) as grader:
        assert rewards(grader) == EXPECTED
        for process in workers_of(os.getpid()):
            process.kill()
        time.sleep(0.2)
        assert rewards(grader, " ") == EXPECTED  # a kill would have been an error, and no reward


SCRIPT = """
    import sys, threading, time
    from rlreason.config.groups import GradingConfig
    from rlreason.grading import Grader
    grader = Grader(GradingConfig(workers=2))
    answer = r"</think> <answer>\\int_0^1 x\\,dx</answer>"
    print(grader.grade_batch([answer], ["0.5"])[0].reward, flush=True)
    if "stay" in sys.argv:
        time.sleep(60)
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


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_no_worker_outlives_a_parent_that_is_killed(tmp_path, how):
    parent = script(tmp_path, "stay")
    assert parent.stdout.readline() == "1.0\n"
    processes = workers_of(parent.pid)
    assert processes
    parent.send_signal(how)
    parent.wait()
    assert gone(processes)
    parent.communicate()


def test_no_worker_that_hangs_in_c_outlives_a_run_that_is_killed_by_kill_9(tmp_path):
    """The processes do not end by themselves then: the kernel has to end them."""
    parent = script(tmp_path, "hang")
    assert parent.stdout.readline() == "1.0\n"
    wait_for(lambda: sum(map(busy, workers_of(parent.pid))) >= 2)
    processes = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.wait()
    assert gone(processes, 600)
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


TOO_LONG_FOR_A_SOCKET = "a folder whose path is too long for a socket" * 3


@pytest.mark.parametrize(
    ("arguments", "text", "folder", "printed"),
    [
        ([], SCRIPT, "", "1.0\n"),
        (["-"], SCRIPT, TOO_LONG_FOR_A_SOCKET, "1.0\n"),
        ([], IN_A_POOL, "", "[1.0]\n"),  # a daemon: it may start no processes, and runs no atexit functions
    ],
    ids=["without a main guard", "from standard input", "in a multiprocessing pool"],
)
def test_a_program_grades_and_ends(tmp_path, arguments, text, folder, printed):
    (tmp_path / folder).mkdir(exist_ok=True)
    process = script(tmp_path, *arguments, text=text, TMPDIR=str(tmp_path / folder))
    assert (*process.communicate(timeout=600), process.returncode) == (printed, "", 0)


def test_memory_of_a_worker_is_limited_and_the_next_answer_is_graded():
    with Grader(patient(memory_mb=512), "tests.test_grading_settings:by_length") as grader:
        grades = grader.grade_batch(["memory", "ab"], ["12", "12"])
    assert [grade.outcome for grade in grades] == ["error", "correct"]
    assert grades[0].path == "killed"


def test_grades_do_not_depend_on_order_company_or_workers():
    pairs = [(answer + " " * index, gold) for index in range(4) for answer, gold, _ in SYMBOLIC]
    pairs += [("9^9^9^9", "38"), (r"\sqrt{8}", r"2\sqrt2"), ("38", "39")]

    def graded(order: list[tuple[str, str]], workers: int) -> dict[tuple[str, str], object]:
        with Grader(patient(workers=workers)) as grader:
            grades = grader.grade_batch([tagged(answer) for answer, _ in order], [gold for _, gold in order])
        return dict(zip(order, grades, strict=True))

    assert graded(pairs, 1) == graded(pairs[::-1], 3)
