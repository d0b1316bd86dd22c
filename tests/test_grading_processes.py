"""The worker processes from outside: threads, forks, kills, nothing left behind; and hostile inputs.

Inputs made to hang, crash, fill memory, run code or be accepted: none may, and the next call is right.
"""

import os
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from verdicts import tagged

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
    """Whether a process has computed for half a second."""
    with suppress(psutil.NoSuchProcess):
        return process.cpu_times().user > 0.5
    return False


def ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


def test_threads_share_one_grader_whose_workers_outlive_the_thread_that_started_them():
    """Bug: replies go to another thread; a worker dies with the thread that began it, or outlives the closed grader."""
    found = {}
    with Grader(patient(workers=2)) as grader:
        with ThreadPoolExecutor(1) as first:
            found[0] = first.submit(rewards, grader).result(600)
        workers = workers_of(os.getpid())
        with ThreadPoolExecutor(7) as others:
            found |= {key: others.submit(rewards, grader, " " * key) for key in range(1, 8)}
            found |= {key: found[key].result(600) for key in range(1, 8)}
        assert workers_of(os.getpid()) == workers
    assert found == dict.fromkeys(range(8), EXPECTED)
    wait_for(lambda: all(map(ended, workers)))
    with pytest.raises(RuntimeError):
        rewards(grader, "         ")


@pytest.mark.long
@pytest.mark.parametrize("who", ["worker", "server"])
def test_a_process_that_died_idle_is_replaced_and_no_request_is_blamed(who):
    """Bug: the first request after it is an error."""
    with Grader(patient()) as grader:
        assert rewards(grader) == EXPECTED
        (worker,) = workers_of(os.getpid())
        process = worker if who == "worker" else worker.parent()
        process.kill()
        wait_for(lambda: ended(process))
        assert rewards(grader, " ") == EXPECTED  # a kill would have been an error, and no reward


PROGRAMS = Path(__file__).with_name("grading_programs")
SCRIPT, IN_A_POOL = PROGRAMS / "without_main_guard.py.txt", PROGRAMS / "in_a_pool.py.txt"


def program(path: Path, *arguments: str) -> subprocess.Popen:
    """A process of such a program, which comes through its standard input where the first argument is "-"."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with path.open() as file:
        command = [sys.executable, *(arguments or (str(path),))]
        return subprocess.Popen(command, stdin=file, stdout=-1, stderr=-1, text=True, env=env)


def test_no_worker_outlives_a_parent_that_is_killed():
    """Bug: after a run is killed its workers compute for ever."""
    parent = program(SCRIPT, "-", "hang")  # in C: the kernel has to end them
    assert parent.stdout.readline() == "1.0\n"
    wait_for(lambda: sum(map(busy, workers_of(parent.pid))) >= 2)
    processes = psutil.Process(parent.pid).children(recursive=True)
    parent.kill()
    parent.communicate()
    wait_for(lambda: all(map(ended, processes)))


@pytest.mark.parametrize("words", [(SCRIPT, "-"), (IN_A_POOL,)], ids=["from standard input", "in a pool"])
def test_a_program_without_a_main_guard_grades_and_ends(words):
    """Bug: workers that import the caller's main module, need its exit handlers to end, or are a forked child's too."""
    process = program(*words)
    assert (*process.communicate(timeout=600), process.returncode) == ("1.0\n", "", 0)


ALIVE = """
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

THREAD = ThreadPoolExecutor(1)
THREAD.submit(int).result()  # it has begun

def in_a_thread(response, ground_truth):
    return THREAD.submit(float, 1).result()

def in_a_process(response, ground_truth):
    process = multiprocessing.get_context("fork").Process(target=int)
    process.start()
    process.join()
    return 1.0 - process.exitcode
"""


def test_each_worker_imports_a_rewards_module_for_itself(tmp_path, monkeypatch):
    """Bug: forked from one that has imported it, threads are gone; daemons have no children."""
    (tmp_path / "alive.py").write_text(ALIVE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("in_a_thread", "in_a_process"):
        with Grader(patient(workers=2), f"alive:{name}") as grader:
            assert [grade.reward for grade in grader.grade_batch(["a", "b"], ["1", "1"])] == [1.0, 1.0], name


CASES = Path(__file__).parent / "grading_cases" / "hostile.txt"
GOLDS = ["38", r"\frac{1}{2}", r"\sqrt{2}+1", r"x^2+1", "(1,2)", r"\{1,2,3\}", r"\text{east}", r"(-\infty,3]"]
REPEATED = (
    r"1+ 1, - \ { ** () [( \pm 9^ 9! | ° x_{ \int e^ √ \in \log_ 1,000 \begin{pmatrix} \text{ \sqrt{ 1e5 <x = \cup 🙂"
)
NESTED = ("(", "1", ")"), ("\\sqrt{x+", "1", "}"), ("\\frac{1}{1+", "x", "}"), ("\\sin(", "x", ")"), ("\\{", "1", "\\}")
LONG = (
    "0." + "3" * 100_000, "9" * 3_999, "9" * 1_000_000, "x" * 1_000_000, "9" * 5_000 + "/7", "\x00", "\ud800", "38\x00",
    "38\u202e", " " * 3_999, "38" + "\u200b" * 390 + "9", "(x+1)(x+2)" * 30, "(a+b)^{50}(c+d)^{50}",
    "+".join(f"\\sqrt{{{n}}}" for n in range(2, 40)), "*".join(f"\\sin({n})" for n in range(2, 40)),
    "+".join(f"\\sqrt[{n}]{{10^{{900}}+{n}}}" for n in range(2, 20)), "\\{" + ",".join(["\\sqrt{2}"] * 40) + "\\}",
    "=".join(["x"] * 100), "<".join("abcdefghijklmnopqrstuvwxyz"),
)  # fmt: skip
HOSTILE = [*CASES.read_text(encoding="utf-8").splitlines(), *LONG]
for text in [*REPEATED.split(), "or ", "1 000"]:
    HOSTILE += [text * (size // len(text)) + "1" * (size > 400) for size in (390, 3900)]
for left, core, right in NESTED:
    HOSTILE += [left * depth + core + right * depth for depth in (12, 24, 500)]


@pytest.mark.long
def test_hostile_inputs_do_no_harm():
    """Bug: an answer that is right for anything, an error of the grader, memory, or a next call that is spoiled."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with Grader(patient(timeout_s=2.0, workers=2)) as grader:
        golds = [GOLDS[index % len(GOLDS)] for index in range(len(HOSTILE))]
        grades = grader.grade_batch([tagged(text) for text in HOSTILE], golds)
        assert rewards(grader) == EXPECTED
    wrong = [(text[:60], g) for text, g in zip(HOSTILE, grades, strict=True) if g.reward or g.path[:8] == "internal"]
    assert wrong == []
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < max(2**20, before + 2**18)  # KB


def test_a_hostile_gold_is_no_worse_than_a_hostile_answer():
    """Bug: an exception of a rule, or a gold that every answer equals."""
    with Grader(symbolic=False) as grader:
        grades = grader.grade_batch([tagged("38")] * len(HOSTILE), HOSTILE)
        grades += grader.grade_batch([tagged(text) for text in HOSTILE], ["38"] * len(HOSTILE))
    assert [(HOSTILE * 2)[index][:60] for index, grade in enumerate(grades) if grade.reward] == []
    assert not [grade for grade in grades if grade.outcome == "error"]


def test_code_in_an_answer_is_not_run_and_workers_load_no_torch(tmp_path):
    """Bug: the library's parser of Python's syntax evaluates a response."""
    target = tmp_path / "spoiled"
    opened, touched = f"open({str(target)!r},'w')", f"touch {target}"
    payloads = [
        opened, f"__import__('os').system('{touched}')", f'exec("{opened}")', f"[{opened} for _ in (1,)]",
        f"\\text{{{opened}}}", f"\\immediate\\write18{{{touched}}}", f"(lambda: {opened})()",
    ]  # fmt: skip
    with Grader(patient(extract="sentence")) as grader:
        golds = ["38"] * len(payloads) + [r"\int_0^1 x\,dx"] * len(payloads)
        assert not any(grade.reward for grade in grader.grade_batch([tagged(one) for one in payloads] * 2, golds))
        assert grader.grade_batch([tagged(r"\int_0^1 x\,dx")], ["0.5"])[0].reward
        workers = workers_of(os.getpid())
        assert workers
        assert not [m.path for worker in workers for m in worker.memory_maps() if "libtorch" in m.path]
    assert not target.exists()
