"""Read problems from the rows of files, of the hub and of a user's function."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any

from rlreason.config.conflicts import nothing_to_evaluate
from rlreason.config.data import FileDataConfig, FunctionDataConfig, RowsDataConfig
from rlreason.config.leaves import locate, required
from rlreason.errors import ConfigError, DataError
from rlreason.grading import boxed
from rlreason.runtime.plugins import describe_error, load
from rlreason.runtime.text import few, first_line
from rlreason.types import Problem

Say = Callable[[str], None]  # prints a note
#: (its place, such as "line 3", and the row, or a `BadRowError` where it could not be read)
RawRow = tuple[str, Any]
Table = list[tuple[Problem, str | None]]  # of one file or split, with the data's own ids
GROUND_TRUTH = "ground_truth"  # label of a table that is read for its answers only


class BadRowError(Exception):
    """Why a row cannot be used, as the end of a sentence that begins with the row's place."""


def file_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a .jsonl file, line by line, or of the list in a .json file; `DataError` if it has no list.

    A line that is no JSON is yielded as a `BadRowError`, not raised.
    """
    if path.suffix == ".json":
        rows = _json(path.read_bytes())
        if not isinstance(rows, list):
            raise DataError(f"{path} holds no list of rows, as a .json file does: name it .jsonl if each line is one")
        yield from numbered(rows)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"line {number}", _json(line)


def numbered(rows: Iterable[Any], first: int = 1) -> Iterator[RawRow]:
    """Yield rows with their places, "row 1" and so on."""
    return ((f"row {number}", row) for number, row in enumerate(rows, first))


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also of a number with thousands of digits
        return BadRowError("is not JSON in UTF-8")


@cache  # several splits are read one by one
def hub_splits(path: str, hub_config: str | None) -> Mapping[str, Iterable[Any]]:
    """Return split name -> rows of a data set on the hub; `ConfigError` where it cannot be read."""
    with required(f"data.path={path} is no folder here, and reading it from the hub", "datasets"):
        from datasets import load_dataset
    try:
        return load_dataset(path, hub_config)  # type: ignore[no-any-return]
    except Exception as error:  # the hub client raises many kinds; all mean that it cannot be reached or read
        raise ConfigError(
            f"data.path={path} with data.hub_config={hub_config} cannot be read from the hub ({first_line(error)}): "
            "fix these, or give a folder instead"
        ) from error


def read_table(
    rows: Iterable[RawRow],
    source: str,
    prefix: str,
    parse: Callable[[Any, str], tuple[Problem, str | None]],
    skip: bool,
    say: Say,
) -> Table:
    """Parse rows into problems with the ids `prefix-number`, counted from 0.

    `parse` makes a problem from a row and an id, and reads the id in the row. A row that cannot be used is a
    `DataError`, or with `skip` left out and counted in a note. A source without usable rows is a `DataError`.
    """
    table: Table = []
    bad: dict[str, list[str]] = {}
    for number, (where, row) in enumerate(rows):
        try:
            if isinstance(row, BadRowError):
                raise row
            table.append(parse(row, f"{prefix}-{number}"))
        except BadRowError as reason:
            if not skip:
                cure = "fix or remove it, or set data.bad_rows=skip to leave such rows out"
                raise DataError(f"{source}, {where} {reason}: {cure}") from None
            bad.setdefault(str(reason), []).append(where)
    reasons = "".join(f"; {len(places)} because the row {reason} ({few(places, 3)})" for reason, places in bad.items())
    if not table:
        raise DataError(f"{source} holds no row that can be used{reasons}: give one with problems")
    if bad:
        dropped = sum(map(len, bad.values()))
        say(f"! {source}: {dropped} of {len(table) + dropped} rows left out{reasons}")
    return table


def question_hash(question: str) -> str:
    """Hash a question to 16 hex digits, independent of white space, to recognise it across files and runs."""
    return hashlib.sha256(" ".join(question.split()).encode()).hexdigest()[:16]


def fingerprint(problems: Iterable[Problem], asked_only: bool = False) -> str:
    """Hash everything that a run uses of its problems to 12 hex digits; `asked_only`: only prompts and answers."""
    digest = hashlib.sha256()
    for p in problems:
        digest.update(f"{p.id}\x1f{p.question}\x1f{p.answer}".encode())
        given = (("solution", p.solution), ("prompt", p.prompt), ("response", p.response))
        for name, text in given[1:2] if asked_only else given:
            digest.update(f"\x1f{name}\x1f{text}".encode() if text is not None else b"")
        digest.update(b"\x1e")
    return digest.hexdigest()[:12]


def rows_of(data: FunctionDataConfig) -> dict[str, list[RawRow]]:
    """Return the rows of "train" and, where the function returns them separately, of "validation".

    `DataError` where it fails or returns something else, `ConfigError` where data.n_validation is set although the
    function splits the rows itself.
    """
    try:
        returned = load(data.function)(**data.options)
        splits = dict(returned) if isinstance(returned, Mapping) else {"train": returned}
        if set(splits) not in ({"train"}, {"train", "validation"}):
            raise TypeError(f"it returned the keys {sorted(splits)}: return rows, or rows by train and validation")
        rows = {label: list(numbered(_plain(splits[label]))) for label in sorted(splits)}
    except Exception as error:  # anything that a user's function raises
        raise DataError(f"data.function={data.function} fails: {describe_error(error)}: fix it") from error
    if len(rows) == 2 and data.n_validation is not None:
        raise ConfigError(
            f"data.n_validation={data.n_validation}: {data.function} returns validation rows of its own: leave it out"
        )
    return rows


def _plain(rows: Any) -> Iterator[Any]:
    """Yield a table of pandas as its rows, without empty cells, and a `Problem` as the row that it is read from."""
    if hasattr(rows, "iterrows"):
        rows = rows.astype(object).where(rows.notna(), None).to_dict("records")
    for row in rows:
        yield row.facts | asdict(row) if isinstance(row, Problem) else row


def read_split(
    data: FileDataConfig, split: str, label: str, traces: bool = True, say: Say = lambda text: None
) -> Table:
    """Read the problems of one file or hub split; `label` is part of the ids of rows without one."""
    if file := locate(data.path, split):
        return as_table(data, str(file), file_rows(file), label, traces, say)
    splits = hub_splits(data.path or "", data.hub_config)
    if split not in splits:
        raise ConfigError(f"data.path={data.path} has no split {split}: choose one of {', '.join(splits)}")
    return as_table(data, f"{data.path}/{split}", numbered(splits[split], 0), label, traces, say)


def as_table(data: RowsDataConfig, source: str, rows: Iterable[RawRow], label: str, traces: bool, say: Say) -> Table:
    """Parse the rows of `source` into problems; `traces`: their responses will be imitated or graded."""
    names = field_names(asdict(data.fields))
    # A trace that is graded against a ground truth of its own would always be right.
    truth_elsewhere = label == GROUND_TRUTH or getattr(data, "ground_truth", None) is not None
    truth_in_response = not truth_elsewhere and not (traces and data.filter == "correct")
    rules = RowRules(names, data.gold, data.max_chars, traces and data.response_as == "solution", truth_in_response)

    def parse(row: Any, id: str) -> tuple[Problem, str | None]:
        return to_problem(row, id, rules), own_id(row, names)

    return read_table(rows, source, f"{data.name}-{label}", parse, data.bad_rows == "skip", say)


def validation_split(data: FileDataConfig) -> str:
    """Return the split to validate on where the settings name none."""
    if name := data.evaluation_file():
        return name
    if not Path(data.path or "").expanduser().is_dir():
        on_hub = hub_splits(data.path or "", data.hub_config)
        if name := next((name for name in ("validation", "test") if name in on_hub), ""):
            return name
    raise ConfigError(nothing_to_evaluate(data))


#: Parts of a problem, and the field names that are tried for each, in this order.
KNOWN: dict[str, tuple[str, ...]] = {
    "question": ("question", "problem"),
    "answer": ("ground_truth", "answer"),
    "solution": ("solution",),
    "prompt": ("prompt",),
    "response": ("response",),
    "messages": ("messages",),
    "id": ("id", "unique_id"),
}
#: Optional facts about a problem: the name of each, and the fields that it is read from.
FACTS: dict[str, tuple[str, ...]] = {
    "level": ("level", "difficulty"),
    "subject": ("subject", "type", "problem_type"),
    "source": ("source", "data_source", "dataset"),
}
MAX_FACT_CHARS = 80  # a longer text does not name a level or a source
Names = Mapping[str, tuple[str, ...]]

_HASH_LINE = re.compile(r"^(?:[ \t]*####(?!#)|.*####[ \t]*(?=[-+$\\]*\d))(.*)$", re.MULTILINE)
_HEADING = re.compile(r"\(?\w{1,3}[.):]+\s|[^\W\d]{2}")  # Step 1, 2. Add, (b) Divide
_NOT_FINITE = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FINAL = re.compile(r"[Tt]he final answer is:?\s*(.+?)\.?\s*I hope it is correct")


def field_names(own: Mapping[str, str | None]) -> Names:
    """Return the fields to read: `KNOWN`, with its names replaced by those in `own` (`data.fields`)."""
    names = {key: (name,) if (name := own.get(key)) else known for key, known in KNOWN.items()}
    if own.get("question") == "prompt":  # then it is a question to fill in, not a whole prompt
        names["prompt"] = ()
    return names


@dataclass(frozen=True, slots=True)
class RowRules:
    """How rows are read: the fields (`field_names`), where the ground truth is, and what a response is for."""

    names: Names
    gold: str = "auto"  # data.gold, see `reference_answer`
    max_chars: int = 100_000  # of one field
    wrap: bool = False  # a response is a solution, to be filled into the trace's template
    truth_in_response: bool = True  # not where the response is graded against it


def to_problem(row: Any, id: str, rules: RowRules) -> Problem:
    """Parse the row into a problem; `BadRowError` where it cannot be used."""
    if not isinstance(row, dict):
        raise BadRowError("is no JSON object")
    names = rules.names
    question, answer, solution, prompt, response = (
        _text(row, names[key], rules.max_chars) for key in ("question", "answer", "solution", "prompt", "response")
    )
    if (chat := _first_value(row, names["messages"])) is not None:
        question, response, prompt = *_chat(chat, rules.max_chars, response), None
    question = question or prompt
    if question is None:
        raise BadRowError(f"has no text under {_listed(names, 'question', 'prompt', 'messages')}")
    if answer is None and solution is None and response is None:
        raise BadRowError(f"has no text under {_listed(names, 'answer', 'solution', 'response')}")
    trace = solution or (response if rules.truth_in_response else None)
    found = reference_answer(rules.gold, answer, trace)
    if answer is not None and solution is None and found != without_thousands_commas(answer.strip()):
        before, mark, _ = answer.rpartition("####")
        solution = before if mark else answer
    if rules.wrap and response is not None:
        solution, response = response, None
    return Problem(
        id, question.strip(), found, solution.strip() if solution else None, prompt, response, facts_of(row, names)
    )


def facts_of(row: Mapping[str, Any], names: Names) -> dict[str, str]:
    """Return level, subject and source of a problem, where the row gives them as a word or a number.

    >>> facts_of({"level": "Level 5", "type": "Algebra", "source": {"url": "x"}}, KNOWN)
    {'level': 'Level 5', 'subject': 'Algebra'}
    """
    taken = {name for given in names.values() for name in given}
    found: dict[str, str] = {}
    for fact, name in ((fact, name) for fact, given in FACTS.items() for name in given if name not in taken):
        value = row.get(name)
        text = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
        if 0 < len(text) <= MAX_FACT_CHARS and text.isprintable():
            found.setdefault(fact, text)
    return found


def own_id(row: Any, names: Names) -> str | None:
    """Return the row's id in the data, if it has one."""
    value = _first_value(row, names["id"]) if isinstance(row, dict) else None
    return str(value) if isinstance(value, str | int) and str(value).strip() and str(value).isprintable() else None


def reference_answer(rule: str, answer: str | None, trace: str | None) -> str:
    r"""Return the ground truth by `rule` (`data.gold`); "" where `auto` finds none.

    `hash` is the text after `####` in its line, `boxed` the last `\boxed{}`, `final` the answer of Minerva's closing
    sentence, `tag` the last `<answer>`, `field` the unchanged answer field. `auto` takes the first of these that
    matches, in the answer field and then in the trace. Any other rule that finds none raises `BadRowError`.
    """
    readers: dict[str, Callable[[str], str | None]] = {
        "hash": _after_hash,
        "boxed": boxed,
        "final": lambda text: found[-1].strip("$* ").rstrip(".$* ") if (found := _FINAL.findall(text)) else None,
        "tag": lambda text: found[-1].strip() if (found := _TAG.findall(text)) else None,
        "hash line": partial(_hash_line, headings=rule == "hash"),
    }
    for text in (answer, trace):
        for name, read in readers.items():
            if text is not None and rule in (name, name.split()[0], "auto") and (found := read(text)) is not None:
                return _usable(found)
        if text is not None and text is answer and rule in ("field", "auto"):
            return without_thousands_commas(_usable(text))
    if rule == "auto":
        return ""
    raise BadRowError(f"has no ground truth for data.gold={rule}")


def without_thousands_commas(answer: str) -> str:
    """Remove the thousands commas of a plain number; return anything else unchanged.

    >>> without_thousands_commas("-1,234,567.5"), without_thousands_commas("(1,2)"), without_thousands_commas("1,2,3")
    ('-1234567.5', '(1,2)', '1,2,3')
    """
    return answer.replace(",", "") if re.fullmatch(r"-?\$?\d{1,3}(,\d{3})+(\.\d+)?", answer) else answer


def _after_hash(text: str) -> str | None:
    """Return the text after the last `####` if it is on the last line; elsewhere `####` may begin a heading."""
    _, mark, rest = text.rpartition("####")
    return without_thousands_commas(rest.strip()) if mark and "\n" not in rest.strip() else None


def _hash_line(text: str, headings: bool = False) -> str | None:
    """Return the answer of the last line `#### N`, also with lines after it; a heading is not an answer."""
    lines = [line.strip("*_ \t\r") for line in _HASH_LINE.findall(text)]
    found = [line for line in lines if line and (headings or not _HEADING.match(line))]
    return without_thousands_commas(found[-1]) if found else None


def _usable(answer: str) -> str:
    if not (answer := answer.strip()):
        raise BadRowError("has an empty ground truth")
    if _NOT_FINITE.fullmatch(answer):
        raise BadRowError(f"has the ground truth {answer}, which is no number (infinity is written \\infty)")
    return answer


def _chat(chat: Any, max_chars: int, response: str | None) -> tuple[str | None, str | None]:
    """Return (question, response) of one user message and its answer; a longer conversation would lose its context."""
    if not isinstance(chat, list) or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in chat):
        raise BadRowError("has messages that are no list of role and content")
    if [m["role"] for m in chat] not in (["user"], ["user", "assistant"]):
        raise BadRowError("has messages other than one from the user and at most one answer")
    question, *answers = (_text(m, ("content",), max_chars) for m in chat)
    return question, answers[0] if answers else response


def _text(row: Mapping[str, Any], names: Sequence[str], max_chars: int) -> str | None:
    """Return the text of the first of these fields that the row has; a number as text."""
    name = next((name for name in names if row.get(name) is not None), None)
    value = None if name is None else row[name]
    if isinstance(value, Real) and not isinstance(value, bool):  # also of numpy
        if not math.isfinite(value):
            raise BadRowError(f"has {value}, which is no number, under {name!r}")
        return str(value)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"has no text under {name!r}")
    if len(value) > max_chars:
        raise BadRowError(f"has more than data.max_chars={max_chars} characters under {name!r}")
    if _SURROGATE.search(value):
        raise BadRowError(f"has half a surrogate pair, which is no character, under {name!r}")
    return value


def _first_value(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _listed(names: Names, *keys: str) -> str:
    return ", ".join(repr(name) for key in keys for name in names[key])
