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

import yaml

from rlreason.config.groups import GradingConfig
from rlreason.grading import Grader
from rlreason.grading.grader import GRADER_VERSION

FOLDER = Path(__file__).parent / "grading_cases"
RECORD = FOLDER / "verdicts.txt"
FORMS = (FOLDER / "number_forms.txt").read_text(encoding="utf-8").splitlines()
COUNTDOWN = "rlreason.grading.verifiers.countdown"
FORMATS = yaml.safe_load((FOLDER / "formats.yaml").read_text(encoding="utf-8"))
R1_ZERO_FORMAT = [(text, of["formatted"], of["right"]) for of in FORMATS["r1_zero"] for text in of["responses"]]


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
        *(Case("question_only", response, "38") for response in FORMATS["question_only"]),
        *(Case("r1_zero", tagged(answer), "38", (("extract", extract),)) for extract, answer in FORMATS["extracted"]),
        *(Case("r1_zero", tagged(answer), gold, tuple(own.items())) for own, answer, gold in FORMATS["tolerated"]),
        # In process: what the symbolic library would spend its time limit on is no right answer either way.
        *(Case("r1_zero", tagged(of), gold, (("symbolic", False),)) for of in hostile for gold in ("38", "1/2")),
        *(Case(f"{COUNTDOWN}:r1_zero", tagged(answer), "3 5 7 -> 22") for answer in FORMATS["equations"]),
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
