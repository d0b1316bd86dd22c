"""What a job shows in the terminal, as text."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from rlreason.evaluation.accuracy import is_correct, proportion_with_ci, questions_of
from rlreason.types import Counted, Problem

#: The three categories of the CS336 handout. Whatever earned no full answer reward is not correct.
CATEGORIES = {
    "correct": "format 1, answer 1 (correct)",
    "format1_wrong": "format 1, answer 0",
    "format0": "format 0, answer 0",
}
MOST_PARTS = 40  # of one table; a fact with more different values tells problems apart, not kinds of them
FAILED = ("timeout", "refused", "error")  # outcomes that say something about the grader


def category(sample: Counted) -> str:
    """Which of `CATEGORIES` a graded sample is in."""
    if is_correct(sample):
        return "correct"
    return "format1_wrong" if sample.grade.format > 0 else "format0"


def categories(samples: Sequence[Counted], problems: Sequence[Problem] = ()) -> dict[str, dict[str, Any]]:
    """Count, share and 95% interval of each category; the shares add up to 1."""
    rows, questions = {}, questions_of(problems)
    for name in CATEGORIES:
        value, low, high = proportion_with_ci(samples, lambda s, name=name: category(s) == name, questions)  # type: ignore[misc]
        rows[name] = {"count": sum(category(s) == name for s in samples), "share": value, "interval": [low, high]}
    return rows


def category_table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """
    >>> print(category_table({"correct": {"count": 3, "share": 0.75, "interval": [0.3, 0.95]}}))
    category                       count   share   95% interval
    format 1, answer 1 (correct)       3   0.750   0.300-0.950
    """
    lines = [f"{'category':28} {'count':>7} {'share':>7}   95% interval"]
    for name, row in rows.items():
        low, high = row["interval"]
        lines.append(f"{CATEGORIES[name]:28} {row['count']:>7} {row['share']:>7.3f}   {low:.3f}-{high:.3f}")
    return "\n".join(lines)


def by_facts(samples: Sequence[Counted], problems: Sequence[Problem]) -> dict[str, Any]:
    """`accuracy_by`: for each level, subject or source that the data names, where there are a few different ones."""
    facts, rows, questions = {p.id: p.facts for p in problems}, dict[str, Any](), questions_of(problems)
    for fact in dict.fromkeys(name for of in facts.values() for name in of):
        parts: dict[str, list[Counted]] = {}
        for s in samples:
            parts.setdefault(facts[s.group].get(fact, "not told"), []).append(s)
        if 1 < len(parts) <= MOST_PARTS:
            rows[fact] = {name: _accuracy(parts[name], questions) for name in sorted(parts, key=_natural)}
    return {"accuracy_by": rows} if rows else {}


def _accuracy(samples: Sequence[Counted], questions: Mapping[str, str]) -> dict[str, Any]:
    value, low, high = proportion_with_ci(samples, is_correct, questions)
    return {"problems": len({s.group for s in samples}), "accuracy": value, "interval": [low, high]}


def _natural(name: str) -> list[tuple[int, str]]:
    """Level 2 before Level 10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name) if part]


def fact_tables(by: Mapping[str, Any]) -> list[str]:
    """
    >>> print(*fact_tables({"accuracy_by": {"level": {"1": {"problems": 4, "accuracy": 0.5, "interval": [0.1, 0.9]}}}}))
    level                       problems accuracy   95% interval
    1                                  4    0.500   0.100-0.900
    """
    tables = []
    for fact, parts in by.get("accuracy_by", {}).items():
        lines = [f"{fact:26} {'problems':>9} {'accuracy':>8}   95% interval"]
        for name, row in parts.items():
            low, high = row["interval"]
            shown = name if len(name) <= 26 else f"{name[:23]}..."
            lines.append(f"{shown:26} {row['problems']:>9} {row['accuracy']:>8.3f}   {low:.3f}-{high:.3f}")
        tables.append("\n".join(lines))
    return tables


def ungraded(samples: Sequence[Counted]) -> dict[str, int]:
    """Grades that the grader could not work out, by kind; they count as not correct."""
    return {name: sum(s.grade.outcome == name for s in samples) for name in FAILED}


def figure_lines(metrics: Mapping[str, float], max_tokens: int, failed: Mapping[str, int]) -> str:
    """Lengths, cut responses, entropy and what the grader could not work out, of all, correct and other responses."""

    def by_kind(name: str, form: str) -> str:
        kinds = (("", "all"), ("_correct", "correct"), ("_wrong", "others"))
        keys = {f"eval/{name}{suffix}": word for suffix, word in kinds}
        return ", ".join(f"{metrics[key]:{form}} {word}" for key, word in keys.items() if key in metrics)

    lines = [
        f"length     {by_kind('length', '.1f')} (tokens); cut at {max_tokens}: {metrics['eval/truncated']:.1%}",
        f"entropy    {by_kind('entropy', '.3f')} (nats per token)",
    ]
    if any(failed.values()):
        counts = ", ".join(f"{count} {name}" for name, count in failed.items() if count)
        lines.append(f"! grader   {counts}: these count as not correct (grading_incidents.jsonl)")
    return "\n".join(lines)


def curves_table(n_list: Sequence[int], curves: Mapping[str, Sequence[Sequence[float]]], columns: int = 120) -> str:
    """One row per N, one column per way to choose; `curves[name]` holds (value, low, high) for each N.

    Ways that do not fit into so many `columns` of text follow below.

    >>> print(curves_table([1, 4], {"pass@N": [(0.25, 0.1, 0.4), (0.5, 0.3, 0.7)]}))
      N               pass@N
      1    0.250 (0.10-0.40)
      4    0.500 (0.30-0.70)
    """
    width = max(20, *map(len, curves)) + 1
    lines, at_once = list[str](), max(1, (columns - 3) // width)
    for names in (list(curves)[i : i + at_once] for i in range(0, len(curves), at_once)):
        lines.append(f"{'N':>3}" + "".join(f"{name:>{width}}" for name in names))
        for place, n in enumerate(n_list):
            cells = [f"{v:.3f} ({low:.2f}-{high:.2f})" for v, low, high in (curves[name][place] for name in names)]
            lines.append(f"{n:>3}" + "".join(f"{cell:>{width}}" for cell in cells))
    return "\n".join(lines)
