"""Saved responses as cases that a person can read: which category, which text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlreason.evaluation.reasons import Reason, why
from rlreason.grading import Grader
from rlreason.records.rows import Row
from rlreason.runtime.text import shorten

CATEGORIES = ("format0", "format1_wrong", "correct", "disagree", "truncated")
#: What a case shows of a saved row.
SHOWN = ["problem_id", "sample", "question", "gold", "response"]
SHOWN += ["outcome", "path", "length", "finish_reason", "entropy"]
INDENT = 14  # columns of a case's labels in the terminal
LONGEST = 1500  # characters of a response that are shown, half of them from its end
LINE = 70  # the same of a response in one line


def category_of(row: Row) -> str:
    """The handout's category of a graded response."""
    if row["outcome"] == "correct":
        return "correct"
    return "format1_wrong" if row["format_reward"] > 0 else "format0"


def is_in(row: Row, category: str | None) -> bool:
    """Whether the row belongs to a category that its own grade decides; None: every row does."""
    if category == "truncated":
        return bool(row["finish_reason"] == "length")
    return category is None or category_of(row) == category


def reasons(row: Row, grader: Grader, second: bool | None = None) -> list[Reason]:
    """Why this row earned what it did; `second` is what another grader thinks of its answer."""
    found = why(row["response"], row["gold"], grader, row["outcome"], row["finish_reason"] == "length")
    if second is None or second == (row["outcome"] == "correct"):
        return found
    called = "right" if second else "wrong"
    return [Reason(f"parser suspect, a second grader calls it {called}"), *found]


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """How many responses there are of each category, and how many were cut at the token limit."""
    by_category = Counter(map(category_of, rows))
    found = {name: by_category[name] for name in ("correct", "format1_wrong", "format0")}
    return found | {"truncated": sum(row["finish_reason"] == "length" for row in rows)}


def counts_line(rows: Sequence[Row]) -> str:
    """The counts in a line."""
    found = counts(rows)
    cut = found.pop("truncated")
    return f"{len(rows)} responses: {', '.join(f'{n} {name}' for name, n in found.items())}; {cut} of them truncated"


def figures(row: Row, found: Sequence[Reason]) -> dict[str, Any]:
    """A case for a program: what is shown of it, under the names of the saved row, its category and the guesses."""
    return {key: row[key] for key in SHOWN if key in row} | {"category": category_of(row), "why": list(map(str, found))}


def case_line(row: Row) -> str:
    """A case in one line: its ground truth, and the end of the response, where an answer stands."""
    truth, response = shorten(str(row["gold"]), LINE), shorten(str(row["response"]), LINE, "end")
    return f"  {row.get('problem_id', '?')}  ground truth {truth!r}  response {response!r}"


def case_lines(row: Row, found: Sequence[Reason], most: int = LONGEST) -> list[tuple[str, str]]:
    """A case as (label, text), for a terminal and for Markdown alike."""
    entropy = f", entropy {row['entropy']:.2f}" if row.get("entropy") is not None else ""
    ended = "cut at the limit" if row["finish_reason"] == "length" else "ended"
    return [
        ("question", row["question"]),
        ("ground truth", str(row["gold"])),
        ("response", shorten(row["response"], most, "both")),
        ("grade", f"{category_of(row)} ({row['outcome']}, {row['path']}); {row['length']} tokens, {ended}{entropy}"),
        ("why", "; ".join(map(str, found))),
    ]


def case_text(number: int, row: Row, found: Sequence[Reason], most: int = LONGEST) -> str:
    """One case for the terminal, responses indented so that their own lines stay visible."""
    lines = [f"--- {number}. {row['problem_id']}" + (f", sample {row['sample']}" if row.get("sample") else "")]
    for label, text in case_lines(row, found, most):
        lines.append(f"{label + ':':{INDENT}}" + text.replace("\n", "\n" + " " * INDENT))
    return "\n".join(lines)


def markdown(
    run: Path, heading: str, rows: Sequence[Row], found: Sequence[Sequence[Reason]], counted: Mapping[str, int]
) -> str:
    """The cases and the tally of reasons, for a write-up."""
    lines = [f"# Cases from {run.name}", "", heading, "", "| why (a guess) | count |", "| --- | ---: |"]
    lines += [f"| `{kind}` | {count} |" for kind, count in counted.items()]
    for number, (row, why_so) in enumerate(zip(rows, found, strict=True), 1):
        lines += ["", f"## {number}. {row['problem_id']}"]
        for label, text in case_lines(row, why_so):
            fence = "`" * 3 if "`" * 3 not in text else "`" * 8
            plain = text.replace("<", "&lt;")  # a tag would vanish from the page
            lines += ["", f"**{label}**", "", *((fence, text, fence) if label == "response" else (plain,))]
    return "\n".join(lines) + "\n"
