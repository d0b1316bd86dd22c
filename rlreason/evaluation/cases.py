"""Show saved responses as cases, with a guess at the reason for each grade; tables and signs of an evaluation."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlreason.evaluation.accuracy import common_answer, is_correct, proportion_with_ci, questions_of
from rlreason.grading import Grader
from rlreason.grading.formats import FORMATS, SHOWN_CHARS
from rlreason.grading.grader import reference_answers
from rlreason.health.monitors import FEWEST_ASKED
from rlreason.records.files import INCIDENTS
from rlreason.records.rows import Row
from rlreason.runtime.text import shorten
from rlreason.types import Problem, Sample, ScoredResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
COARSEST = 0.05  # relative rounding error: 0.3 and 0.33 are rounded thirds


class Reason(NamedTuple):
    """A guess at the reason for a grade."""

    kind: str  # the same text for the same mistake, so that mistakes can be counted
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else self.kind


def reasons_for(response: str, ground_truth: Any, grader: Grader, outcome: str, truncated: bool) -> list[Reason]:
    """Return the likeliest reason for the outcome, then further remarks; `grader` has the settings of the run."""
    cut = [Reason("cut at the token limit")] if truncated else []
    if outcome == "correct":
        return [Reason("right"), *cut]
    if grader.plugin and outcome in ("error", "timeout"):
        what = "raised, or returned no number" if outcome == "error" else "took longer than grading.timeout_s"
        return [Reason(f"no verdict: {grader.plugin} {what}", f"see {INCIDENTS}"), *cut]
    if grader.plugin:
        return [Reason("not earned", f"{grader.plugin} has rules of its own"), *cut]
    references, read = reference_answers(ground_truth) or [], grader.read(response)
    if read.formatted and outcome != "wrong":
        return [Reason("the grader could not work it out", outcome), *cut]
    if read.answer is not None and read.formatted:
        return [answer_reason(read.answer, references, grader), *cut]
    guesses = [Reason(read.reason, read.detail), *cut]
    numbers = _NUMBER.findall(response)
    if not read.formatted and numbers and _right(numbers[-1].rstrip(","), references, grader):
        guesses.append(Reason("the last number in it is the right one", numbers[-1].rstrip(",")))
    return guesses


def answer_reason(answer: str, references: list[str], grader: Grader) -> Reason:
    """Guess how a formatted answer misses the reference answers.

    >>> str(answer_reason("It costs 18 dollars a day", ["18"], Grader()))
    "a unit or a sentence around the right answer: 'It costs 18 dollars a day'"
    >>> str(answer_reason("17", ["18"], Grader()))
    "another answer: '17' instead of '18'"
    """
    if not answer.strip():
        return Reason("the answer is empty")
    quoted = repr(shorten(answer, SHOWN_CHARS))
    under_other_settings: dict[str, dict[str, Any]] = {
        "right by the grader's rules of now, not of then": {},
        "right but for a percent sign (grading.percent=false)": {"percent": True},
        f"rounded further than grading.rel_tol={grader.grading.rel_tol:g} allows": {"rel_tol": COARSEST},
        "a unit or a sentence around the right answer": {"extract": "sentence"},
    }
    for kind, other in under_other_settings.items():
        if _right(answer, references, grader, **other):
            return Reason(kind, quoted)
    if any(_bare(answer) == _bare(reference) for reference in references):
        return Reason("equal once marks are stripped: parser suspect", quoted)
    if any(_right(number, references, grader) for number in _NUMBER.findall(answer)):
        return Reason("the right number is one of several", quoted)
    if not re.search(r"\d", answer) and any(re.search(r"\d", reference) for reference in references):
        return Reason("no number in the answer", quoted)
    return Reason("another answer", f"{quoted} instead of {shorten(' or '.join(references), SHOWN_CHARS)!r}")


def _right(answer: str, references: list[str], grader: Grader, **other: Any) -> bool:
    """Return whether the answer equals a reference by the exact rules, with `other` replaced in the settings."""
    judge = Grader(replace(grader.grading, **other)) if other else grader
    return any(judge.same(answer, reference) for reference in references)


def _bare(text: str) -> str:
    return re.sub(r"[^\w.]+", "", text).lower().rstrip(".")


CATEGORIES = ("format0", "format1_wrong", "correct", "disagree", "truncated")
#: The fields of a saved row that a case shows.
SHOWN = ["problem_id", "sample", "question", "gold", "response"]
SHOWN += ["outcome", "path", "length", "finish_reason", "entropy"]
INDENT = 14  # columns of a case's labels in the terminal
LONGEST = 1500  # characters of a response that are shown, half of them from its end
LINE = 70  # the same, in one line


def category_of(row: Row) -> str:
    """Return the handout's category of a graded response."""
    return category(row["outcome"], row["format_reward"])


def category(outcome: str, format_reward: float) -> str:
    """Return the handout's category: without the full answer reward a response is not correct."""
    if outcome == "correct":
        return "correct"
    return "format1_wrong" if format_reward > 0 else "format0"


def is_in(row: Row, category: str | None) -> bool:
    """Return whether the row's own grade puts it in the category; None: every row is."""
    if category == "truncated":
        return bool(row["finish_reason"] == "length")
    return category is None or category_of(row) == category


def reasons(row: Row, grader: Grader, second: bool | None = None) -> list[Reason]:
    """Guess the reasons for the row's grade; `second`: whether another grader calls its answer correct."""
    guesses = reasons_for(row["response"], row["gold"], grader, row["outcome"], row["finish_reason"] == "length")
    if second is None or second == (row["outcome"] == "correct"):
        return guesses
    called = "right" if second else "wrong"
    return [Reason(f"parser suspect, a second grader calls it {called}"), *guesses]


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Count the responses of each category, and those cut at the token limit."""
    return {name: sum(is_in(row, name) for row in rows) for name in (*CATEGORY_TEXTS, "truncated")}


def counts_line(rows: Sequence[Row]) -> str:
    """Return the counts as a line."""
    of = counts(rows)
    categories = ", ".join(f"{of[name]} {name}" for name in CATEGORY_TEXTS)
    return f"{len(rows)} responses: {categories}; {of['truncated']} of them truncated"


def figures(row: Row, guesses: Sequence[Reason]) -> dict[str, Any]:
    """Return a case for `--json`: fields of the saved row, its category and the guesses at the reason."""
    saved = {key: row[key] for key in SHOWN if key in row}
    return saved | {"category": category_of(row), "why": list(map(str, guesses))}


def case_line(row: Row) -> str:
    """Return a case in one line: its ground truth, and the end of the response, where the answer is."""
    truth, response = shorten(str(row["gold"]), LINE), shorten(str(row["response"]), LINE, "end")
    return f"  {row.get('problem_id', '?')}  ground truth {truth!r}  response {response!r}"


def case_lines(row: Row, guesses: Sequence[Reason], most: int = LONGEST) -> list[tuple[str, str]]:
    """Return a case as (label, text) pairs, for the terminal and for Markdown."""
    entropy = f", entropy {row['entropy']:.2f}" if row.get("entropy") is not None else ""
    ended = "cut at the limit" if row["finish_reason"] == "length" else "ended"
    grade = f"{category_of(row)} (outcome {row['outcome']}, decided by {row['path']})"
    return [
        ("question", row["question"]),
        ("ground truth", str(row["gold"])),
        ("response", shorten(row["response"], most, "both")),
        ("grade", f"{grade}; {row['length']} tokens, {ended}{entropy}"),
        ("why", "; ".join(map(str, guesses))),
    ]


def case_text(number: int, row: Row, guesses: Sequence[Reason], most: int = LONGEST) -> str:
    """Format a case for the terminal; responses are indented so that their own lines stay visible."""
    lines = [f"--- {number}. {row['problem_id']}" + (f", sample {row['sample']}" if row.get("sample") else "")]
    for label, text in case_lines(row, guesses, most):
        lines.append(f"{label + ':':{INDENT}}" + text.replace("\n", "\n" + " " * INDENT))
    return "\n".join(lines)


def markdown(
    run: Path, heading: str, rows: Sequence[Row], guesses: Sequence[Sequence[Reason]], counted: Mapping[str, int]
) -> str:
    """Format the cases and the counts of reasons as Markdown."""
    lines = [f"# Cases from {run.name}", "", heading, "", "| why (a guess) | count |", "| --- | ---: |"]
    lines += [f"| `{kind}` | {count} |" for kind, count in counted.items()]
    for number, (row, why_so) in enumerate(zip(rows, guesses, strict=True), 1):
        lines += ["", f"## {number}. {row['problem_id']}"]
        for label, text in case_lines(row, why_so):
            fence = "`" * 3 if "`" * 3 not in text else "`" * 8
            plain = text.replace("<", "&lt;")  # a tag would vanish from the page
            lines += ["", f"**{label}**", "", *((fence, text, fence) if label == "response" else (plain,))]
    return "\n".join(lines) + "\n"


TEXTS = 32  # texts of a step that are checked by encoding and decoding


def stated_answer(response: str) -> str | None:
    """Return the answer that a response states in any of the known formats; None where it states none.

    >>> stated_answer("so </think> <answer> 38</answer>"), stated_answer("it is 38")
    ('38', None)
    """
    answers = (form.read(response).answer for form in FORMATS.values())
    return next((answer.strip() for answer in answers if answer is not None and answer.strip()), None)


def failure_metrics(
    samples: Sequence[Sample], truths: Mapping[str, str], grader: Grader, tokenizer: "PreTrainedTokenizerBase"
) -> dict[str, float]:
    """Return metrics of a step's samples that reveal silent failures; `truths`: problem id -> ground truth.

    `rollout/right`: the share of responses that state the right answer, whatever they earn. `rollout/same_answer`,
    `_right`: the share of responses with the commonest answer, and of problems for which it is right. Verifiers,
    whose ground truths are no answers, have neither, and the last two need enough problems. `rollout/round_trip`: the
    share of texts that encoding and decoding does not change.
    """
    if not samples:
        return {}
    signs: dict[str, float] = {}
    verifies = grader.plugin is not None and grader.plugin.startswith("rlreason.")  # ground truths are no answers
    if not verifies:
        signs["rollout/right"] = sum(_is_right(s, truths, grader) for s in samples) / len(samples)
    asked = [truths.get(problem, "") for problem in dict.fromkeys(s.group for s in samples)]
    comparable = not verifies and (grader.plugin is None or signs["rollout/right"] > 0)
    if comparable and len(asked) >= FEWEST_ASKED:
        signs |= common_answer([stated_answer(s.text) for s in samples], asked, grader.same, "rollout")
    return signs | {"rollout/round_trip": round_trip(samples, tokenizer)}


def _is_right(sample: Sample, truths: Mapping[str, str], grader: Grader) -> bool:
    """Return whether a response states the right answer: by its grade, or by the exact rules for a plug-in's."""
    if not grader.plugin:
        return sample.grade.outcome == "correct"
    answer = stated_answer(sample.text)
    references = reference_answers(truths.get(sample.group)) or ()
    return answer is not None and any(grader.same(answer, reference) for reference in references)


def round_trip(samples: Sequence[Sample], tokenizer: "PreTrainedTokenizerBase") -> float:
    """Return the share of prompts, or of responses where that is less, whose text survives encoding and decoding.

    A few of them are checked. Spaces are ignored: many tokenizers add or drop one next to a special token.
    """

    def text_of(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))

    def again(text: str) -> str:
        return text_of(tokenizer.encode(text, add_special_tokens=False))

    def share(texts: list[str]) -> float:
        return sum("".join(again(text).split()) == "".join(text.split()) for text in texts) / len(texts)

    some = [s.response for s in samples[:: -(-len(samples) // TEXTS)]]
    return min(share([text_of(r.prompt_ids) for r in some]), share([text_of(r.token_ids) for r in some]))


#: The three categories of the CS336 handout.
CATEGORY_TEXTS = {
    "correct": "format 1, answer 1 (correct)",
    "format1_wrong": "format 1, answer 0",
    "format0": "format 0, answer 0",
}
MOST_PARTS = 40  # of one table; a fact with more values identifies problems, not kinds of problems
FAILED = ("timeout", "refused", "error")  # outcomes without a verdict, failures of the grader


def categories(samples: Sequence[ScoredResponse], problems: Sequence[Problem] = ()) -> dict[str, dict[str, Any]]:
    """Return count, share and 95% interval of each category; the shares sum to 1."""
    rows, questions = {}, questions_of(problems)
    for name in CATEGORY_TEXTS:

        def is_of(s: ScoredResponse, name: str = name) -> bool:
            return category(s.grade.outcome, s.grade.format) == name

        value, low, high = proportion_with_ci(samples, is_of, questions)
        rows[name] = {"count": sum(map(is_of, samples)), "share": value, "interval": [low, high]}
    return rows


def by_facts(samples: Sequence[ScoredResponse], problems: Sequence[Problem]) -> dict[str, Any]:
    """Return `accuracy_by`: the accuracy by each level, subject or source, where the data has a few different ones."""
    facts, rows, questions = {p.id: p.facts for p in problems}, dict[str, Any](), questions_of(problems)
    for fact in dict.fromkeys(name for of in facts.values() for name in of):
        parts: dict[str, list[ScoredResponse]] = {}
        for s in samples:
            parts.setdefault(facts[s.group].get(fact, "not told"), []).append(s)
        if not 1 < len(parts) <= MOST_PARTS:
            continue
        rows[fact] = {}
        for name in sorted(parts, key=_natural):
            value, low, high = proportion_with_ci(parts[name], is_correct, questions)
            problems_of_part = len({s.group for s in parts[name]})
            rows[fact][name] = {"problems": problems_of_part, "accuracy": value, "interval": [low, high]}
    return {"accuracy_by": rows} if rows else {}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which Level 2 comes before Level 10."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name) if part]


def share_table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Format rows of (number, share, interval), as `categories` and `by_facts` return them.

    >>> print(share_table("level", {"1": {"problems": 4, "accuracy": 0.5, "interval": [0.1, 0.9]}}))
    level                        problems accuracy   95% interval
    1                                   4    0.500   0.100-0.900
    """
    counted, share, _ = next(iter(rows.values()))
    lines = [f"{title:28} {counted:>8} {share:>8}   95% interval"]
    for name, row in rows.items():
        low, high = row["interval"]
        label = name if len(name) <= 28 else f"{name[:25]}..."
        lines.append(f"{label:28} {row[counted]:>8} {row[share]:>8.3f}   {low:.3f}-{high:.3f}")
    return "\n".join(lines)


def ungraded(samples: Sequence[ScoredResponse]) -> dict[str, int]:
    """Count the grades that the grader could not decide, by kind; they count as not correct."""
    return {name: sum(s.grade.outcome == name for s in samples) for name in FAILED}


def figure_lines(metrics: Mapping[str, float], max_tokens: int, failed: Mapping[str, int]) -> str:
    """Format lengths, cut responses, entropy and undecided grades, of all, correct and other responses."""

    def by_kind(name: str, form: str) -> str:
        kinds = {f"eval/{name}": "all", f"eval/{name}_correct": "correct", f"eval/{name}_wrong": "others"}
        return ", ".join(f"{metrics[key]:{form}} {kind}" for key, kind in kinds.items() if key in metrics)

    lines = [
        f"length     {by_kind('length', '.1f')} (tokens); cut at {max_tokens}: {metrics['eval/truncated']:.1%}",
        f"entropy    {by_kind('entropy', '.3f')} (nats per token)",
    ]
    if any(failed.values()):
        counted = ", ".join(f"{count} {name}" for name, count in failed.items() if count)
        lines.append(f"! grader   {counted}: these count as not correct (grading_incidents.jsonl)")
    return "\n".join(lines)


def curves_table(n_list: Sequence[int], curves: Mapping[str, Sequence[Sequence[float]]], columns: int = 120) -> str:
    """Format a table with a row per N and a column per way to choose; `curves[name]` has (value, low, high) per N.

    Ways that do not fit into `columns` characters continue below.

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
