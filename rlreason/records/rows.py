"""A graded response as a row of a file, there and back; and which fields a row must have to be used for something."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlreason.records.lines import finite, line_of, written
from rlreason.types import Grade, Problem, Response, Sample

Row = dict[str, Any]
NUMBER = (int, float)

#: The fields of a row that something needs, with the types of their values.
FIELDS: dict[str, type | tuple[type, ...]] = {
    "gold": object,
    "sample": int,
    **dict.fromkeys(("problem_id", "question", "response", "outcome", "path", "finish_reason"), str),
    **dict.fromkeys(("reward", "format_reward", "answer_reward", "length", "weight_version", "entropy"), NUMBER),
    **dict.fromkeys(("prompt_ids", "token_ids", "log_probs", "trainer_log_probs"), list),
    "prompt_reward": dict,
}
#: Fields that a row may have, or have as null; another value of another type is not usable.
OPTIONAL = ("trainer_log_probs", "prompt_reward", "entropy")
PER_TOKEN = ("log_probs", "trainer_log_probs")  # as long as the row's token_ids
GRADE = ("reward", "format_reward", "answer_reward", "outcome", "path")
#: What a row needs to be graded again, to be shown to a person, and to be learned from.
TO_REGRADE = ("response", "gold", "outcome")
TO_SHOW = (*TO_REGRADE, "problem_id", "question", "format_reward", "path", "length", "finish_reason")
TO_LEARN = (
    "problem_id", "response", "reward", "format_reward", "answer_reward", "outcome", "path", "finish_reason",
    "weight_version", "prompt_ids", "token_ids", "log_probs",
)  # fmt: skip


def lacks(row: Row, needed: Iterable[str]) -> str:
    """Which of the needed fields a row lacks, or holds something else in; empty where it has them all.

    >>> lacks({"response": "4", "outcome": 1.0}, TO_REGRADE), lacks({"token_ids": [1, None]}, ["token_ids"])
    ("no 'gold', no usable 'outcome'", "no usable 'token_ids'")
    """
    missing = [f"no '{name}'" for name in needed if name not in row]
    found = [name for name in needed if name in row] + [name for name in OPTIONAL if row.get(name) is not None]
    return ", ".join(missing + [f"no usable '{name}'" for name in found if not _fits(row, name)])


def _fits(row: Row, name: str) -> bool:
    if not isinstance(row[name], FIELDS[name]):
        return False
    value = row[name]
    if name == "prompt_reward":
        return not lacks(value, GRADE)
    if name in PER_TOKEN and len(value) != (len(ids) if isinstance(ids := row.get("token_ids"), list) else 0):
        return False
    numbers = NUMBER if name in PER_TOKEN else int
    return not isinstance(value, list) or all(isinstance(number, numbers) for number in value)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Replace a file by these rows, one a line; a number that is not finite becomes null."""
    with written(path) as file:
        file.writelines(map(line_of, rows))


def response_row(step: int, s: Sample, problem: Problem) -> Row:
    """Enough to read the response, to grade it again, and to compute any loss on it without sampling."""
    return {
        "step": step,
        "problem_id": s.group,
        "question": problem.question,
        "gold": problem.answer,
        "response": s.response.text,
        **grade_columns(s.grade),
        "advantage": round(s.advantage, 6),
        "kept": s.has_loss,
        "length": len(s.response.token_ids),
        "entropy": None if s.entropy is None else round(s.entropy, 5),
        "facts": problem.facts,
        **({} if s.prompt_grade is None else {"prompt_reward": grade_columns(s.prompt_grade)}),
        "finish_reason": s.response.finish_reason,
        "weight_version": s.response.weight_version,
        "prompt_ids": s.response.prompt_ids,
        "token_ids": s.response.token_ids,
        "log_probs": [round(lp, 5) for lp in s.response.log_probs],
    }


def numbered_row(sample: Sample, problem: Problem, number: int) -> Row:
    """A response of a job without steps, and which of its problem's it is."""
    row: Row = finite(response_row(0, sample, problem) | {"sample": number})
    return row


def grade_columns(grade: Grade) -> Row:
    """The fields of a row that tell its grade."""
    return {
        "reward": grade.reward,
        "format_reward": grade.format,
        "answer_reward": grade.answer,
        "outcome": grade.outcome,
        "path": grade.path,
    }


def grade_of(row: Row) -> Grade:
    """The grade that a row tells."""
    return Grade(row["format_reward"], row["answer_reward"], row["reward"], row["outcome"], row["path"])


def sample_of(row: Row) -> Sample:
    """The sample that a row was written from: the response and its grade. The row needs the fields of `TO_LEARN`."""
    response = Response(
        problem_id=row["problem_id"],
        prompt_ids=row["prompt_ids"],
        token_ids=row["token_ids"],
        log_probs=row["log_probs"],
        text=row["response"],
        finish_reason=row["finish_reason"],
        weight_version=row["weight_version"],
    )
    by_prompt = grade_of(row["prompt_reward"]) if row.get("prompt_reward") else None
    return Sample(response, grade_of(row), by_prompt, log_probs=row.get("trainer_log_probs"))
