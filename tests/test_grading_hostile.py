"""Inputs made to hang, crash, fill memory, run code or be accepted: none may, and the next call is right."""

import os
import resource
import time
from pathlib import Path

import pytest
from verdicts import tagged

from rlreason.grading import Grader
from tests.test_grading_processes import workers_of
from tests.waiting import patient

CASES = Path(__file__).parent / "grading_cases" / "hostile.txt"
GOLDS = ["38", r"\frac{1}{2}", r"\sqrt{2}+1", r"x^2+1", "(1,2)", r"\{1,2,3\}", r"\text{east}", r"(-\infty,3]"]
LONGEST_S, SLACK_S = 3.0, 2.0  # for one input; for a busy machine
REPEATED = (
    r"1+ 1, 1/ - \ { $ ** () [( \pm 1\pm 9^ 9! | |x % ° x_{ ' \int e^ ² √ \in x\in \log_ \log_2 x^2 1,000 (x, "
    r"\begin{pmatrix} \text{ \sqrt{ \frac12 1e5 : 1: <x = \cup 🙂 x"
)
NESTED = ("(", "1", ")"), ("\\sqrt{x+", "1", "}"), ("\\frac{1}{1+", "x", "}"), ("\\sin(", "x", ")"), ("\\{", "1", "\\}")
LONG = (
    "0." + "3" * 100_000, "9" * 3_999, "9" * 1_000_000, "x" * 1_000_000, "9" * 5_000 + "/7", "\x00", "\ud800", "38\x00",
    "\udcff\udcff", "38\u202e", " " * 3_999, "38" + "\u200b" * 390 + "9", "(x+1)(x+2)" * 30, "(a+b)^{50}(c+d)^{50}",
    "+".join(f"\\sqrt{{{n}}}" for n in range(2, 40)), "*".join(f"\\sin({n})" for n in range(2, 40)),
    "+".join(f"\\sqrt[{n}]{{10^{{900}}+{n}}}" for n in range(2, 20)), "\\{" + ",".join(["\\sqrt{2}"] * 40) + "\\}",
    "=".join(["x"] * 100), "<".join("abcdefghijklmnopqrstuvwxyz"),
)  # fmt: skip
HOSTILE = [
    *CASES.read_text(encoding="utf-8").splitlines(),
    *(text * (390 // len(text)) for text in [*REPEATED.split(), "or ", "1 000"]),
    *(text * (3900 // len(text)) + "1" for text in [*REPEATED.split(), "or ", "1 000"]),
    *(left * depth + core + right * depth for left, core, right in NESTED for depth in (12, 24, 500)),
    *LONG,
]  # fmt: skip
SLOW = [
    "9**9**9**9", "9999999999!", "1e999999999", "[0]*999999999", "(" * 3000 + ")" * 3000, "0." + "3" * 100_000,
    r"\int_0^1 \frac{\ln(1+x^{2+\sqrt{3}})}{1+x} dx", r"\int_0^{1000} \sin(x^2) e^{\sin x} dx",
    r"\sum_{k=1}^{10^{12}} \frac1k", r"x^{x^{x^{x^x}}}", r"\binom{10^9}{5\cdot10^8}", r"\prod_{k=1}^{99999999} k",
    "((((x+1)^{50}+1)^{50}+1)^{50}+1)^{50}", r"\lim_{x\to 0} \frac{\sin x}{x^{x^{x}}}",
]  # fmt: skip


@pytest.mark.long
def test_hostile_inputs_do_no_harm():
    files, failures, peak = set(os.listdir()), [], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert len(set(HOSTILE)) >= 250
    with Grader(patient(timeout_s=2.0)) as grader:
        grader.grade_batch([tagged(r"\int_0^1 x\,dx")], ["0.5"])
        for index, text in enumerate(HOSTILE):
            gold = GOLDS[index % len(GOLDS)]
            for pair in {(text, gold), (text, "38")}:
                begin = time.perf_counter()
                (grade,) = grader.grade_batch([tagged(pair[0])], [pair[1]])
                seconds = time.perf_counter() - begin
                if grade.reward or seconds > LONGEST_S + SLACK_S or grade.path.startswith("internal"):
                    failures.append((pair[0][:60], pair[1], grade, seconds))
            (after,) = grader.grade_batch([tagged(r"\int_0^2 x\,dx" + " " * (index + 1))], ["2"])
            if after.reward != 1.0:
                failures.append((text[:60], "the next call", after, 0.0))
    assert not failures
    assert set(os.listdir()) - files <= {".pytest_cache", "__pycache__"}
    allowed = max(2**20, peak + 2**18)  # KB: the caller stays below 1 GB, or adds little to what tests before it took
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < allowed


def test_a_hostile_gold_is_no_worse_than_a_hostile_answer():
    with Grader(symbolic=False) as grader:
        grades = grader.grade_batch([tagged("38")] * len(HOSTILE), HOSTILE)
    assert [HOSTILE[index][:60] for index, grade in enumerate(grades) if grade.reward] == []
    assert not [grade for grade in grades if grade.outcome == "error"]


@pytest.mark.long
def test_a_hostile_batch_costs_little_more_than_its_clean_part_and_changes_no_grade():
    clean = [(str(index % 97), str(index % 89)) for index in range(180)]
    clean += [(f"\\frac{{{index}}}{{7}}", f"{index}/7") for index in range(60)]
    hostile = [(text, r"\sqrt2") for text in SLOW]
    mixed = [pair for k in range(12) for pair in (hostile[k], *clean[20 * k : 20 * k + 20])] + hostile[12:]

    def graded(pairs: list[tuple[str, str]]) -> tuple[dict[tuple[str, str], object], float]:
        with Grader(patient()) as grader:
            grader.grade_batch([tagged(r"\int_0^1 x\,dx")], ["0.5"])
            begin = time.perf_counter()
            grades = grader.grade_batch([tagged(answer) for answer, _ in pairs], [gold for _, gold in pairs])
            return dict(zip(pairs, grades, strict=True)), time.perf_counter() - begin

    alone, clean_s = graded(clean)
    together, mixed_s = graded(mixed)
    assert mixed_s < clean_s + 5.0 + SLACK_S
    assert {pair: together[pair] for pair in alone} == alone
    assert not any(together[pair].reward for pair in hostile)


def test_code_in_an_answer_is_not_run_and_workers_load_no_torch(tmp_path):
    target = tmp_path / "spoiled"
    payloads = [
        f"open({str(target)!r},'w')",
        f"__import__('os').system('touch {target}')",
        f"exec(\"open({str(target)!r}, 'w')\")",
        f"[open({str(target)!r},'w') for _ in (1,)]",
        f"\\text{{open({str(target)!r},'w')}}",
        f"\\immediate\\write18{{touch {target}}}",
        f"(lambda: open({str(target)!r},'w'))()",
    ]
    with Grader(patient(extract="sentence")) as grader:
        golds = ["38"] * len(payloads) + [r"\int_0^1 x\,dx"] * len(payloads)
        assert not any(grade.reward for grade in grader.grade_batch([tagged(one) for one in payloads] * 2, golds))
        assert grader.grade_batch([tagged(r"\int_0^1 x\,dx")], ["0.5"])[0].reward
        workers = workers_of(os.getpid())
        assert workers
        assert not [m.path for worker in workers for m in worker.memory_maps() if "libtorch" in m.path]
    assert not target.exists()
