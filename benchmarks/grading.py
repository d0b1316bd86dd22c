"""What a grade costs and how often it is right, on labelled pairs: `python benchmarks/grading.py`.

Compares with plain math-verify on the same pairs, and grades a batch with hostile items. One process grades;
processor times are of this process, wall times include the workers.
"""

import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rlreason.config.groups import GradingConfig  # noqa: E402
from rlreason.grading import Grader  # noqa: E402
from rlreason.grading.answers.compare import decide_pair  # noqa: E402
from rlreason.grading.grader import grading_metrics  # noqa: E402

CASES = ROOT / "tests" / "grading_cases"
FORMS = (CASES / "number_forms.txt").read_text(encoding="utf-8").splitlines()
Pair = tuple[str, str, bool]


def labelled() -> list[Pair]:
    """The labelled pairs: (answer, reference answer, whether they are equal)."""
    lines = (CASES / "pairs.txt").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line and not line.startswith("#")]
    return [(*line[2:].split(" ||| "), line[0] == "+") for line in rows]  # type: ignore[misc]


def tagged(answer: str) -> str:
    """A response in the r1_zero format."""
    return f"</think> <answer>{answer}</answer>"


def times_per_path(pairs: list[Pair]) -> None:
    """Processor milliseconds of the decision in process, by path; each pair is in the caches."""
    found: dict[str, list[float]] = defaultdict(list)
    for answer, reference, _ in pairs:
        decide_pair(answer, reference, GradingConfig())
        begin = time.process_time_ns()
        verdict = decide_pair(answer + " ", " " + reference, GradingConfig())
        found[verdict.path if verdict else "(to a worker)"].append((time.process_time_ns() - begin) / 1e6)
    show("path, both answers in the caches", found)
    numbers = [str(17 * index % 1009) for index in range(6000)]
    forms: list[float] = []
    for index, number in enumerate(numbers):
        answer = FORMS[index % len(FORMS)].format(number)
        begin = time.process_time_ns()
        decide_pair(answer, number, GradingConfig())
        forms.append((time.process_time_ns() - begin) / 1e6)
    show("surface forms of whole numbers", {"GSM8K forms": forms})


def show(title: str, times: dict[str, list[float]]) -> None:
    """A table of milliseconds, by name."""
    print(f"\n{title:<40}{'calls':>7}{'median ms':>11}{'p99 ms':>9}{'max ms':>9}")
    for name, values in sorted(times.items(), key=lambda item: -len(item[1])):
        values.sort()
        p99 = values[int(0.99 * (len(values) - 1))]
        print(f"  {name:<38}{len(values):>7}{statistics.median(values):>11.3f}{p99:>9.3f}{values[-1]:>9.3f}")


def against_math_verify(pairs: list[Pair]) -> None:
    """Accuracy, precision, recall and time per pair of this grader and of math-verify."""
    responses, references = [tagged(answer) for answer, *_ in pairs], [reference for _, reference, _ in pairs]
    print(f"\n{f'{len(pairs)} labelled pairs':<40}{'accuracy':>9}{'precision':>10}{'recall':>8}{'ms each':>14}")
    for name, reward in (
        ("this grader", "r1_zero"),
        ("math-verify", "rlreason.grading.symbolic:r1_zero_math_verify"),
    ):
        with Grader(GradingConfig(timeout_s=5.0), reward) as grader:
            grader.grade_batch([tagged(r"\int_0^1 x\,dx")], ["0.5"])  # start the worker
            begin = time.perf_counter()
            grades = grader.grade_batch(responses, references)
            wall = 1000 * (time.perf_counter() - begin) / len(pairs)
        accepted = [grade.answer > 0 for grade in grades]
        hits = sum(yes and label for yes, (*_, label) in zip(accepted, pairs, strict=True))
        right = sum(yes == label for yes, (*_, label) in zip(accepted, pairs, strict=True))
        recall = hits / sum(label for *_, label in pairs)
        row = f"{right / len(pairs):>9.3f}{hits / max(1, sum(accepted)):>10.3f}{recall:>8.3f}{wall:>14.2f}"
        print(f"  {name:<38}{row}")


def hostile_batch(pairs: list[Pair]) -> None:
    """240 clean items alone, and again among the hostile ones; then every hostile input by itself."""
    hostile = (CASES / "hostile.txt").read_text(encoding="utf-8").splitlines()
    clean = [(tagged(answer), reference) for answer, reference, _ in pairs[:240]]
    chosen = [(tagged(text), r"\sqrt2") for text in hostile[:: len(hostile) // 14][:14]]
    print(f"\n{'batch':<40}{'wall s':>8}")
    for name, batch in (
        ("240 clean", clean),
        ("the same with 14 hostile items", clean[:120] + chosen + clean[120:]),
    ):
        with Grader() as grader:
            grader.grade_batch([tagged(r"\int_0^1 x\,dx")], ["0.5"])
            begin = time.perf_counter()
            grader.grade_batch([response for response, _ in batch], [reference for _, reference in batch])
            print(f"  {name:<38}{time.perf_counter() - begin:>8.2f}")
    slowest, grades = (0.0, ""), []
    with Grader() as grader:
        grader.grade_batch([tagged(r"\int_0^1 x\,dx")], ["0.5"])
        for text in hostile:
            begin = time.perf_counter()
            grades += grader.grade_batch([tagged(text)], ["38"])
            slowest = max(slowest, (time.perf_counter() - begin, text))
    accepted, metrics = sum(grade.reward > 0 for grade in grades), grading_metrics(grades)
    counts = ", ".join(
        f"{metrics[f'grading/{name}']:.0f} {name}" for name in ("refusals", "timeouts", "kills", "errors")
    )
    print(f"  {len(hostile)} hostile inputs one by one: {accepted} accepted, {counts}")
    print(f"  the slowest took {slowest[0]:.2f} s: {slowest[1][:50]}")


def main() -> None:
    """All measurements, on one set of labelled pairs."""
    pairs = labelled()
    times_per_path(pairs)
    against_math_verify(pairs)
    hostile_batch(pairs)


if __name__ == "__main__":
    main()
