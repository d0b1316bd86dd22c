"""Show saved responses as cases, with a guess at the reason for each grade, and grade them again; tables and signs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rlreason.errors import ConfigError
from rlreason.evaluation.accuracy import common_answer, is_correct, proportion_with_ci, questions_of
from rlreason.grading import Grader
from rlreason.grading.formats import FORMATS, SHOWN_CHARS
from rlreason.grading.grader import RunGrading, reference_answers
from rlreason.health.monitors import FEWEST_ASKED
from rlreason.records.console import Console
from rlreason.records.files import INCIDENTS
from rlreason.records.rows import Row, grade_columns
from rlreason.runtime.plugins import NAMED_REWARDS
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import shorten
from rlreason.types import Grade, Problem, Sample, ScoredResponse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
COARSEST = 0.05  # relative rounding error: 0.3 and 0.33 are rounded thirds


def reasons(row: Row, grader: Grader, second: bool | None = None) -> list[str]:
    """Return the likeliest reason for the row's grade, then further remarks; `grader` has the settings of the run.

    Each is "KIND" or "KIND: DETAIL"; the same mistake has the same kind. `second`: whether another grader calls its
    answer correct.
    """
    outcome, references = row["outcome"], reference_answers(row["gold"]) or []
    read = None if grader.plugin else grader.read(row["response"])
    guesses: list[str] = []
    if second not in (None, outcome == "correct"):
        guesses.append(f"parser suspect, a second grader calls it {'right' if second else 'wrong'}")
    if outcome == "correct":
        guesses.append("right")
    elif outcome not in ("wrong", "unformatted"):
        guesses.append(f"no verdict: {outcome}, see {INCIDENTS}")
    elif read is None:
        guesses.append(f"not earned: {grader.plugin} has rules of its own")
    elif read.answer is not None:
        guesses.append(answer_reason(read.answer, references, grader))
    else:
        guesses.append(f"{read.reason}: {read.detail}" if read.detail else read.reason)
        number = (_NUMBER.findall(row["response"]) or [""])[-1].rstrip(",")
        if is_same_as_one(number, references, grader):
            guesses.append(f"the last number in it is the right one: {number}")
    if row["finish_reason"] == "length":
        guesses.append("cut at the token limit")
    return guesses


def answer_reason(answer: str, references: list[str], grader: Grader) -> str:
    """Guess how a formatted answer misses the reference answers.

    >>> answer_reason("It costs 18 dollars a day", ["18"], Grader())
    "a unit or a sentence around the right answer: 'It costs 18 dollars a day'"
    >>> answer_reason("17", ["18"], Grader())
    "another answer: '17' instead of '18'"
    """
    if not answer.strip():
        return "the answer is empty"
    quoted = repr(shorten(answer, SHOWN_CHARS))
    under_other_settings: dict[str, dict[str, Any]] = {
        "right by the grader's rules of now, not of then": {},
        "right but for a percent sign (grading.percent=false)": {"percent": True},
        f"rounded further than grading.rel_tol={grader.grading.rel_tol:g} allows": {"rel_tol": COARSEST},
        "a unit or a sentence around the right answer": {"extract": "sentence"},
    }
    for kind, other in under_other_settings.items():
        if is_same_as_one(answer, references, Grader(replace(grader.grading, **other))):
            return f"{kind}: {quoted}"
    return f"another answer: {quoted} instead of {shorten(' or '.join(references), SHOWN_CHARS)!r}"


def is_same_as_one(answer: str, references: list[str], grader: Grader) -> bool:
    """Return whether the answer equals a reference by the exact rules."""
    return any(grader.same(answer, reference) for reference in references)


#: The three categories of the CS336 handout.
CATEGORY_TEXTS = {
    "correct": "format 1, answer 1 (correct)",
    "format1_wrong": "format 1, answer 0",
    "format0": "format 0, answer 0",
}
CATEGORIES = (*CATEGORY_TEXTS, "disagree", "truncated")
INDENT = 14  # columns of a case's labels in the terminal
LONGEST = 1500  # characters of a response that are shown, half of them from its end


def category(outcome: str, format_reward: float) -> str:
    """Return the handout's category: without the full answer reward a response is not correct."""
    if outcome == "correct":
        return "correct"
    return "format1_wrong" if format_reward > 0 else "format0"


def is_in(row: Row, name: str | None) -> bool:
    """Return whether the row's own grade puts it in the category of this name; None: every row is."""
    if name == "truncated":
        return bool(row["finish_reason"] == "length")
    return name is None or category(row["outcome"], row["format_reward"]) == name


def counts(rows: Sequence[Row]) -> dict[str, int]:
    """Count the responses of each category, and those cut at the token limit."""
    return {name: sum(is_in(row, name) for row in rows) for name in (*CATEGORY_TEXTS, "truncated")}


def case_text(number: int, row: Row, guesses: Sequence[str], most: int = LONGEST) -> str:
    """Format a case; texts are indented so that their own lines stay visible."""
    entropy = f", entropy {row['entropy']:.2f}" if row.get("entropy") is not None else ""
    ended = "cut at the limit" if row["finish_reason"] == "length" else "ended"
    name = category(row["outcome"], row["format_reward"])
    grade = f"{name} (outcome {row['outcome']}, decided by {row['path']})"
    parts = {
        "question": row["question"],
        "ground truth": str(row["gold"]),
        "response": shorten(row["response"], most, "both"),
        "grade": f"{grade}; {row['length']} tokens, {ended}{entropy}",
        "why": "; ".join(guesses),
    }
    lines = [f"--- {number}. {row['problem_id']}" + (f", sample {row['sample']}" if row.get("sample") else "")]
    for label, text in parts.items():
        lines.append(f"{label + ':':{INDENT}}" + text.replace("\n", "\n" + " " * INDENT))
    return "\n".join(lines)


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
    signs = {"rollout/round_trip": round_trip(samples, tokenizer)}
    if (grader.plugin or "").startswith("rlreason."):  # a verifier's ground truths are no answers
        return signs
    answers = [stated_answer(s.text) for s in samples]
    right = [is_correct(s) for s in samples]
    if grader.plugin:  # by the exact rules
        right = []
        for s, answer in zip(samples, answers, strict=True):
            references = reference_answers(truths.get(s.group)) or []
            right.append(answer is not None and is_same_as_one(answer, references, grader))
    signs["rollout/right"] = sum(right) / len(samples)
    asked = [truths.get(problem, "") for problem in dict.fromkeys(s.group for s in samples)]
    if len(asked) >= FEWEST_ASKED and (grader.plugin is None or signs["rollout/right"] > 0):
        signs |= common_answer(answers, asked, grader.same, "rollout")
    return signs


def round_trip(samples: Sequence[Sample], tokenizer: "PreTrainedTokenizerBase") -> float:
    """Return the share of prompts, or of responses where that is less, whose text survives encoding and decoding.

    A few of them are checked. Spaces are ignored: many tokenizers add or drop one next to a special token.
    """
    decode: Any = partial(tokenizer.decode, clean_up_tokenization_spaces=False)

    def survives(ids: list[int]) -> bool:
        text = decode(ids)
        again = decode(tokenizer.encode(text, add_special_tokens=False))
        return "".join(text.split()) == "".join(again.split())

    some = [s.response for s in samples[:: -(-len(samples) // TEXTS)]]
    surviving = min(sum(survives(r.prompt_ids) for r in some), sum(survives(r.token_ids) for r in some))
    return surviving / len(some)


MOST_PARTS = 40  # of one table; a fact with more values identifies problems, not kinds of problems
FAILED = ("timeout", "refused", "error")  # outcomes without a verdict, failures of the grader


def categories(samples: Sequence[ScoredResponse], problems: Sequence[Problem] = ()) -> dict[str, dict[str, Any]]:
    """Return count, share and 95% interval of each category; the shares sum to 1."""
    rows, questions = {}, questions_of(problems)
    for name in CATEGORY_TEXTS:
        hits = [category(s.grade.outcome, s.grade.format) == name for s in samples]
        value, low, high = proportion_with_ci(samples, hits, questions)
        rows[name] = {"count": sum(hits), "share": value, "interval": [low, high]}
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
        for name, part in sorted(parts.items()):
            value, low, high = proportion_with_ci(part, [is_correct(s) for s in part], questions)
            n_problems = len({s.group for s in part})
            rows[fact][name] = {"problems": n_problems, "accuracy": value, "interval": [low, high]}
    return {"accuracy_by": rows} if rows else {}


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
        lines.append(f"{name[:28]:28} {row[counted]:>8} {row[share]:>8.3f}   {low:.3f}-{high:.3f}")
    return "\n".join(lines)


def ungraded(samples: Sequence[ScoredResponse]) -> dict[str, int]:
    """Count the grades that the grader could not decide, by kind; they count as not correct."""
    return {name: sum(s.grade.outcome == name for s in samples) for name in FAILED}


def figure_lines(metrics: Mapping[str, float], max_tokens: int, failed: Mapping[str, int]) -> str:
    """Format lengths, cut responses, entropy and undecided grades, of all, correct and other responses."""

    def by_kind(name: str, form: str) -> str:
        kinds = {f"eval/{name}": "all", f"eval/{name}_correct": "correct", f"eval/{name}_wrong": "others"}
        return ", ".join(f"{metrics[key]:{form}} {kind}" for key, kind in kinds.items() if key in metrics)

    lines = [f"length     {by_kind('length', '.1f')} (tokens); cut at {max_tokens}: {metrics['eval/truncated']:.1%}"]
    if entropies := by_kind("entropy", ".3f"):
        lines.append(f"entropy    {entropies} (nats per token)")
    if any(failed.values()):
        counted = ", ".join(f"{count} {name}" for name, count in failed.items() if count)
        lines.append(f"! grader   {counted}: these count as not correct (grading_incidents.jsonl)")
    return "\n".join(lines)


def curves_table(n_list: Sequence[int], curves: Mapping[str, Sequence[Sequence[float]]]) -> str:
    """Format a table with a column per N and a row per way to choose; `curves[name]` has (value, low, high) per N.

    >>> print(curves_table([1, 4], {"pass@N": [(0.25, 0.1, 0.4), (0.5, 0.3, 0.7)]}))
    N                                      1                 4
    pass@N                 0.250 (0.10-0.40) 0.500 (0.30-0.70)
    """
    lines = [f"{'N':22}" + "".join(f"{n:>18}" for n in n_list)]
    for name, points in curves.items():
        cells = [f"{value:.3f} ({low:.2f}-{high:.2f})" for value, low, high in points]
        lines.append(f"{name:22}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(lines)


def opinions(rows: Sequence[Row], graded: RunGrading, console: Console) -> list[bool | None]:
    """Return whether plain math-verify calls each answer correct; None where it has no verdict.

    `ConfigError` for a reward without a second grader.
    """
    grades = grade_rows(rows, second_grader(graded), console)
    return [None if grade.outcome in FAILED else grade.outcome == "correct" for grade in grades]


def second_grader(graded: RunGrading) -> RunGrading:
    """Return math-verify with the run's format."""
    if graded.reward not in NAMED_REWARDS:
        raise ConfigError(f"{graded.reward} has no second grader: only {' and '.join(NAMED_REWARDS)} have one")
    return graded._replace(reward=f"rlreason.grading.symbolic:{graded.reward}_math_verify")


def grade_rows(rows: Sequence[Row], graded: RunGrading, console: Console) -> list[Grade]:
    """Grade the rows' responses again, in order; the grader's warnings go to stderr.

    Raise `ConfigError` before grading if a function cannot be loaded.
    """
    with Grader(*graded) as grader, console.wait(f"grading with {graded.reward}"):
        if grader.plugin and (why := grader.wait()):
            raise ConfigError(f"{graded.reward}: {why}")
        grades = grader.grade_batch([row["response"] for row in rows], [row["gold"] for row in rows])
        for warning in grader.warnings(grades):
            print_stderr(f"{graded.reward}: {warning}")
    return grades


def agreement(marks: Mapping[str, Sequence[bool]]) -> dict[str, dict[str, Any]]:
    """Return for each grader its share of correct responses, its agreement with `now`, and the rows that differ.

    marks: grader -> whether it calls each response correct. `only_it`, `only_now`: indices of rows that only this
    grader, or only the current one, calls correct.

    >>> agreement({"saved": [True, True], "now": [True, False]})["saved"]
    {'correct': 1.0, 'agrees': 0.5, 'only_it': [1], 'only_now': []}
    """
    now, graders = marks["now"], dict[str, dict[str, Any]]()
    for name, correct in marks.items():
        only_it = [place for place, right in enumerate(correct) if right and not now[place]]
        only_now = [place for place, right in enumerate(now) if right and not correct[place]]
        agrees = 1 - (len(only_it) + len(only_now)) / len(now)
        graders[name] = {"correct": sum(correct) / len(now), "agrees": agrees, "only_it": only_it, "only_now": only_now}
    return graders


def regraded(row: Row, grade: Grade) -> Row:
    """Return the row with its new grade, keeping the grade that the run was trained on."""
    new = grade_columns(grade)
    previous = row.get("previous_grade") or {key: row.get(key) for key in new}
    return {**row, **new, "previous_grade": previous}
