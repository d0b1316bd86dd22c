"""In the worker: the symbolic library's verdict, and our own check of its every yes."""

from math_verify import LatexExtractionConfig, parse, verify

from rlreason.grading.verdict import Verdict


def judge(answer: str, gold: str) -> Verdict:
    config = [LatexExtractionConfig()]
    left, right = (parse(f"${text}$", config, parsing_timeout=None, fallback_mode="no_fallback") for text in (answer, gold))
    equal = verify(right, left, timeout_seconds=None) if left and right else False
    return Verdict("correct" if equal else "wrong", "symbolic")
