"""Every case that the grader is held to, and the verdicts recorded for its version.

    python tests/verdicts.py        record the verdicts on new cases, or on all cases for a new GRADER_VERSION

A verdict here is what an accuracy sees: right, wrong or unformatted. Whether a hostile answer is refused or runs out
of time is no difference.
"""

import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.config.groups import GradingConfig
from rlreason.grading import Grader
from rlreason.grading.grader import GRADER_VERSION

FOLDER = Path(__file__).parent / "grading_cases"
RECORD = FOLDER / "verdicts.txt"
FORMS = (FOLDER / "number_forms.txt").read_text(encoding="utf-8").splitlines()
COUNTDOWN = "rlreason.grading.verifiers.countdown"

#: (formatted, right) -> responses to the gold 38.
R1_ZERO = {
    (1, 1): [
        "</think> <answer>38</answer>", "</think> <answer>38</answer></answer>", r"</think> <answer>$38$ ;</answer>",
        "</think> <answer>1</answer> </think> <answer>38</answer>", r"</think> <answer>it is \boxed{38}</answer>",
        r"</think> <answer>\boxed{1} \boxed{38}</answer>", r"</think> <answer>it is $\boxed 38$.</answer>",
        r"</think> <answer>\text{\$}38.00</answer>",
    ],
    (1, 0): [
        "</think> <answer>38</answer> done", "</think> <answer>3</answer>8", r"</think> <answer>38,,</answer>",
        "</think> <answer>38</answer> </think> <answer>1</answer>", "</think> <answer>37</answer> <answer>38",
        r"</think> <answer>\boxed{38</answer>", r"</think> <answer>\text{\$}39</answer>",
        "</think> <answer></answer>", "</think> <answer>39</answer>",
    ],
    (0, 0): [
        "</think><answer>38</answer>", "</think>  <answer>38</answer>", "</think>\n<answer>38</answer>", "",
        "<answer>38</answer>", "</think> <answer>38", "</answer> </think> <answer>38",
    ],
}  # fmt: skip
R1_ZERO_FORMAT = [(response, *marks) for marks, responses in R1_ZERO.items() for response in responses]
QUESTION_ONLY = (
    r"so \boxed{38}", r"\boxed{1} no, \boxed{38}.", r"\boxed 38", r"so \boxed38.", r"\boxed\frac{76}{2}",
    r"\boxed{\text{38}}", r"\boxed{38} no, \boxed{1}", r"\boxed 3 8", r"\boxed{}", r"\boxed{38} and \boxed{39",
    r"the \boxed environment", r"\fbox{38}", "38",
)  # fmt: skip
#: (extract, answer) for the gold 38.
EXTRACTED = (
    ("strict", "She sold 38 clips."), ("last_number", "She sold 38 clips."), ("sentence", "She sold 38 clips."),
    ("last_number", "She sold 38 or 39 clips"), ("last_number", "It is not 38"), ("last_number", "Of 40 clips, 38"),
    ("sentence", r"The answer is \frac{76}{2}."), ("sentence", r"Maybe the answer is 38"),
    ("last_number", "The total is $38."),
)  # fmt: skip
#: (settings, answer, gold)
TOLERATED: list[tuple[dict[str, Any], str, str]] = [
    ({}, r"38\%", "38"), ({"percent": False}, r"38\%", "38"), ({"percent": False}, r"38\%", "0.38"),
    ({}, "0.3333", r"\frac13"), ({"rel_tol": 1e-3}, "0.3333", r"\frac13"), ({"rel_tol": 1e-3}, "0.3334", r"\frac13"),
    ({"rel_tol": 0.0}, "0.333333", r"\frac13"),
]  # fmt: skip
#: Answers to 3 5 7 -> 22.
EQUATIONS = (
    "3 * 5 + 7", "(7 + (3 * 5))", r"3 \times 5 + 7", "22", "3 * 5 + 7 = 22", "3 * 5", "3 ** 5 - 7", "35 - 7 * 1",
)  # fmt: skip


class Case(NamedTuple):
    """One response to judge. `settings` beyond the grader's defaults."""

    reward: str
    response: str
    gold: str
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def key(self) -> str:
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:10]


def labelled_pairs() -> list[tuple[str, bool, str, str]]:
    """(section, whether they are the same answer, answer, gold)"""
    rows, section = [], ""
    for line in (FOLDER / "pairs.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            section = line[3:].split(":")[0]
        elif line and not line.startswith("#"):
            answer, gold = line[2:].split(" ||| ")
            rows.append((section, line[0] == "+", answer, gold))
    return rows


def tagged(answer: str) -> str:
    return f"so it is </think> <answer> {answer} </answer>"


def all_cases() -> list[Case]:
    """Labelled pairs in both directions, number forms, formats, settings, hostile answers, equations of Countdown."""
    sides = [pair for _, _, first, second in labelled_pairs() for pair in ((first, second), (second, first))]
    sides += [(form.format(number), "38") for form in FORMS for number in (38, 39)]
    hostile = (FOLDER / "hostile.txt").read_text(encoding="utf-8").splitlines()
    cases = [
        *(Case("r1_zero", tagged(answer), gold) for answer, gold in sides),
        *(Case("r1_zero", response, "38") for response, *_ in R1_ZERO_FORMAT),
        *(Case("question_only", response, "38") for response in QUESTION_ONLY),
        *(Case("r1_zero", tagged(answer), "38", (("extract", extract),)) for extract, answer in EXTRACTED),
        *(Case("r1_zero", tagged(answer), gold, tuple(own.items())) for own, answer, gold in TOLERATED),
        # In process: what the symbolic library would spend its time limit on is no right answer either way.
        *(Case("r1_zero", tagged(of), gold, (("symbolic", False),)) for of in hostile for gold in ("38", "1/2")),
        *(Case(f"{COUNTDOWN}:r1_zero", tagged(answer), "3 5 7 -> 22") for answer in EQUATIONS),
    ]
    return list(dict.fromkeys(cases))


def judge(cases: Sequence[Case], default: Grader) -> dict[str, str]:
    """The verdicts of the grader as it is now, by the cases' keys; `default` has r1_zero and default settings."""
    groups: dict[tuple[str, tuple[tuple[str, Any], ...]], list[Case]] = defaultdict(list)
    for case in cases:
        groups[case.reward, case.settings].append(case)
    marks = {}
    for (reward, settings), group in groups.items():
        named = dict(settings)
        symbolic = named.pop("symbolic", True)
        is_default = (reward, settings) == ("r1_zero", ())
        own = nullcontext(default) if is_default else Grader(GradingConfig(**named), reward, symbolic=symbolic)
        with own as grader:
            grades = grader.grade_batch([case.response for case in group], [case.gold for case in group])
        for case, grade in zip(group, grades, strict=True):
            marks[case.key] = "+" if grade.outcome == "correct" else "-" if grade.format else "0"
    return marks


def changed(now: Mapping[str, str], cases: Sequence[Case]) -> list[str]:
    """What differs from the record: the cases with another verdict, unless the grader has a newer version."""
    version, *lines = RECORD.read_text(encoding="utf-8").splitlines()
    if int(version.split()[-1]) < GRADER_VERSION:
        return []
    recorded = dict(line.split() for line in lines)
    olds = [(recorded.get(case.key, now[case.key]), case) for case in cases]
    return [f"{old} is now {now[case.key]}: {case}" for old, case in olds if old != now[case.key]]


def text_of(now: Mapping[str, str]) -> str:
    return "\n".join([f"version {GRADER_VERSION}", *(" ".join(item) for item in sorted(now.items()))]) + "\n"


def main() -> None:
    cases = all_cases()
    with Grader() as grader:
        now = judge(cases, grader)
    if other := changed(now, cases):
        sys.exit("\n".join(["raise GRADER_VERSION in grading/grader.py, as verdicts changed:", *other]))
    RECORD.write_text(text_of(now), encoding="utf-8")


if __name__ == "__main__":
    main()
