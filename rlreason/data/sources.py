"""Read problems from the rows of files, of the hub and of a user's function."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from numbers import Real
from pathlib import Path
from typing import Any

from rlreason.config.data import FileDataConfig, RowsDataConfig
from rlreason.config.leaves import locate
from rlreason.errors import ConfigError, DataError
from rlreason.grading import boxed
from rlreason.runtime.text import few, first_line
from rlreason.types import Problem

Say = Callable[[str], None]  # prints a note
#: (its place, such as "line 3", and the row, or None where it could not be read)
RawRow = tuple[str, Any]
Table = list[tuple[Problem, str | None]]  # of one file or split, with the data's own ids
GROUND_TRUTH = "ground_truth"  # label of a table that is read for its answers only


class BadRowError(Exception):
    """Why a row cannot be used, as the end of a sentence that begins with the row's place."""


def file_rows(path: Path) -> Iterator[RawRow]:
    """Yield the rows of a .jsonl file, line by line, or of the list in a .json file; `DataError` if it has no list.

    A line that is no JSON is yielded as None.
    """
    if path.suffix != ".json":
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"line {number}", _json(line)
        return
    rows = _json(path.read_bytes())
    if not isinstance(rows, list):
        raise DataError(f"{path} holds no list of rows, as a .json file does: name it .jsonl if each line is one")
    yield from numbered(rows)


def numbered(rows: Iterable[Any], first: int = 1) -> Iterator[RawRow]:
    """Yield rows with their places, "row 1" and so on."""
    return ((f"row {number}", row) for number, row in enumerate(rows, first))


def rows_of_split(path: str | None, split: str, hub_config: str | None = None) -> tuple[str, Iterable[RawRow]]:
    """Return (source, rows) of a file, or of a split on the hub; `ConfigError` where it cannot be read."""
    if file := locate(path, split):
        return str(file), file_rows(file)
    splits = hub_splits(path or "", hub_config)
    if split not in splits:
        raise ConfigError(f"data.path={path} has no split {split}: choose one of {', '.join(splits)}")
    return f"{path}/{split}", numbered(splits[split], 0)


def _json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also of a number with thousands of digits
        return None


@cache  # several splits are read one by one
def hub_splits(path: str, hub_config: str | None) -> Mapping[str, Iterable[Any]]:
    """Return split name -> rows of a data set on the hub; `ConfigError` where it cannot be read."""
    try:
        from datasets import load_dataset

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


def as_table(data: RowsDataConfig, source: str, rows: Iterable[RawRow], label: str, traces: bool, say: Say) -> Table:
    """Parse the rows of `source` into problems; `traces`: their responses will be imitated or graded.

    `label` is part of the ids of rows without one.
    """
    # A trace that is graded against a ground truth of its own would always be right.
    truth_elsewhere = label == GROUND_TRUTH or getattr(data, "ground_truth", None) is not None
    parse = partial(
        to_problem,
        data=data,
        as_solution=traces and data.response_as == "solution",
        truth_in_response=not truth_elsewhere and not (traces and data.filter == "correct"),
    )
    table = read_table(rows, source, f"{data.name}-{label}", parse, data.bad_rows == "skip", say)
    if data.max_steps is None or label == GROUND_TRUTH:
        return table
    kept = [one for one in table if 0 < steps_in(one[0].solution) <= data.max_steps]
    counted = f"data.max_steps={data.max_steps}: kept {len(kept)} of {len(table)} problems of {source}"
    if not kept:
        raise DataError(f"{counted}: raise it, or leave it out where solutions have no <<3+4=7>>")
    say(counted)
    return kept


def steps_in(solution: str | None) -> int:
    """Return the number of calculations that a worked solution of GSM8K is annotated with, as <<3+4=7>>."""
    return (solution or "").count("<<")


def validation_split(data: FileDataConfig) -> str:
    """Return the split to validate on where the settings name none."""
    path = data.path or ""
    on_hub = {} if Path(path).expanduser().is_dir() else hub_splits(path, data.hub_config)
    for name in ("validation", "test"):
        if name in on_hub or locate(data.path, name):
            return name
    raise ConfigError(
        f"data.path={data.path} holds neither validation nor test: name data.validation, or set data.n_validation=200"
    )


#: Parts of a problem, and the field names that are tried for each, in this order.
KNOWN = {
    "question": ("question", "problem"),
    "answer": ("ground_truth", "answer"),
    "solution": ("solution",),
    "prompt": ("prompt",),
    "response": ("response",),
    "messages": ("messages",),
    "id": ("id", "unique_id"),
}
#: Optional facts about a problem: the name of each, and the fields that it is read from.
FACTS = {
    "level": ("level", "difficulty"),
    "subject": ("subject", "type", "problem_type"),
    "source": ("source", "data_source", "dataset"),
}
MAX_FACT_CHARS = 80  # a longer text does not name a level or a source

_HASH_LINE = re.compile(r"^(?:[ \t]*####(?!#)|.*####[ \t]*(?=[-+$\\]*\d))(.*)$", re.MULTILINE)
_HEADING = re.compile(r"\(?\w{1,3}[.):]+\s|[^\W\d]{2}")  # Step 1, 2. Add, (b) Divide
_NOT_FINITE = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE)
_SURROGATE = re.compile("[\ud800-\udfff]")
_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_FINAL = re.compile(r"[Tt]he final answer is:?[\s$*]*(.+?)[.$*\s]*I hope it is correct")


def _without_text(row: Mapping[str, Any], known: Sequence[str], key: str) -> BadRowError:
    """Return the error of a row without text under the known fields, and what it has instead."""
    instead = f"its fields are {few(list(row)) or 'none'}: name yours with data.fields.{key}=NAME"
    if known_there := [name for name in known if name in row]:
        instead = f"{few(known_there)} is empty"
    return BadRowError(f"has no text under {known}; {instead}")


def to_problem(
    row: Any, id: str, data: RowsDataConfig, as_solution: bool = False, truth_in_response: bool = True
) -> tuple[Problem, str | None]:
    """Parse a row into (problem, the row's own id, if it has one); `BadRowError` where it cannot be used.

    `as_solution`: a response is a solution, to be filled into the trace's template. `truth_in_response`: not where the
    response is graded against it.
    """
    if not isinstance(row, dict):
        raise BadRowError("is no JSON object in UTF-8")
    names = {key: (name,) if (name := getattr(data.fields, key)) else known for key, known in KNOWN.items()}
    if "prompt" in (data.fields.question, data.fields.messages):  # then it is no whole prompt
        names["prompt"] = ()
    question, answer, solution, prompt, response = (
        _text(row, names[key], data.max_chars) for key in ("question", "answer", "solution", "prompt", "response")
    )
    chat = _first(row, names["messages"])[1]
    chat = chat.tolist() if hasattr(chat, "tolist") else chat  # of pandas, from a parquet file
    if chat is not None:  # a longer conversation would lose its context
        is_list = isinstance(chat, list) and all(isinstance(message, dict) for message in chat)
        roles = [message.get("role") for message in chat] if is_list else []
        if roles not in (["user"], ["user", "assistant"]):
            raise BadRowError("has messages other than a list of one from the user and at most one answer")
        question, *answers = (_text(message, ("content",), data.max_chars) for message in chat)
        response, prompt = answers[0] if answers else response, None
    question = question or prompt
    if question is None:
        raise _without_text(row, names["question"] + names["prompt"] + names["messages"], "question")
    if answer is None and solution is None and response is None:
        raise _without_text(row, names["answer"] + names["solution"] + names["response"], "answer")
    trace = solution or (response if truth_in_response else None)
    found = reference_answer(data.gold, answer, trace)
    if answer is not None and solution is None and found != without_thousands_commas(answer.strip()):
        before, mark, _ = answer.rpartition("####")
        solution = before if mark else answer
    if as_solution and response is not None:
        solution, response = response, None
    solution = solution.strip() if solution else None
    own = _first(row, names["id"])[1]
    named = isinstance(own, str | int) and str(own).strip() and str(own).isprintable()
    facts = facts_of(row, names)
    if steps := steps_in(solution):
        facts.setdefault("level", f"{steps} step{'s' * (steps > 1)}")
    problem = Problem(id, question.strip(), found, solution, prompt, response, facts)
    return problem, str(own) if named else None


def facts_of(row: Mapping[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return level, subject and source of a problem, where the row gives them as a word or a number.

    >>> facts_of({"level": "Level 5", "type": "Algebra", "source": {"url": "x"}}, KNOWN)
    {'level': 'Level 5', 'subject': 'Algebra'}
    >>> facts_of({"level": [5], "difficulty": "hard", "type": "4"}, {"answer": ("type",)})
    {'level': 'hard'}
    """
    taken = {name for given in names.values() for name in given}
    found: dict[str, str] = {}
    for fact, name in ((fact, name) for fact, given in FACTS.items() for name in given if name not in taken):
        value = row.get(name)
        text = str(value).strip() if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
        if 0 < len(text) <= MAX_FACT_CHARS and text.isprintable():
            found.setdefault(fact, text)
    return found


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


def _hash_line(text: str) -> str | None:
    """Return the answer of the last line `#### N`, also with lines after it; a heading is not an answer."""
    lines = [line.strip("*_ \t\r") for line in _HASH_LINE.findall(text)]
    found = [line for line in lines if line and not _HEADING.match(line)]
    return without_thousands_commas(found[-1]) if found else None


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match in the text."""
    found = pattern.findall(text)
    return found[-1].strip() if found else None


_closing_sentence, _tag = partial(_last, _FINAL), partial(_last, _TAG)
#: data.gold -> how a ground truth is read from a text, in the order of trial.
READERS: dict[str, tuple[Callable[[str], str | None], ...]] = {
    "hash": (_after_hash, _hash_line),
    "boxed": (boxed,),
    "final": (_closing_sentence,),
    "tag": (_tag,),
    "auto": (_after_hash, boxed, _closing_sentence, _tag, _hash_line),
}


def reference_answer(rule: str, answer: str | None, trace: str | None) -> str:
    r"""Return the ground truth by `rule` (`data.gold`); "" where `auto` finds none.

    `hash` is the text after `####` in its line, `boxed` the last `\boxed{}`, `final` the answer of Minerva's closing
    sentence, `tag` the last `<answer>`, `field` the unchanged answer field. `auto` takes the first of these that
    matches, in the answer field and then in the trace. Any other rule that finds none raises `BadRowError`.
    """
    for text in (answer, trace):
        for read in READERS.get(rule, ()):
            if text is not None and (found := read(text)) is not None:
                return _usable(found)
        if text is not None and text is answer and rule in ("field", "auto"):
            return without_thousands_commas(_usable(text))
    if rule == "auto":
        return ""
    raise BadRowError(f"has no ground truth for data.gold={rule} (data.gold=auto also takes a bare answer)")


def _usable(answer: str) -> str:
    if not (answer := answer.strip()):
        raise BadRowError("has an empty ground truth")
    if _NOT_FINITE.fullmatch(answer):
        raise BadRowError(f"has the ground truth {answer}, which is no number (infinity is written \\infty)")
    return answer


def _text(row: Mapping[str, Any], names: Sequence[str], max_chars: int) -> str | None:
    """Return the text of the first of these fields that the row has; a number as text."""
    name, value = _first(row, names)
    if isinstance(value, Real) and not isinstance(value, bool):  # also of numpy
        if not math.isfinite(value):
            raise BadRowError(f"has {value}, which is no number, under {name!r}")
        return str(value)
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRowError(f"has no text under {name!r}")
    if len(value) > max_chars:
        raise BadRowError(f"has more than data.max_chars={max_chars} characters under {name!r}")
    if _SURROGATE.search(value):
        raise BadRowError(f"has half a surrogate pair, which is no character, under {name!r}")
    return value


def _first(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    """Return (name, value) of the first of these fields that the row has; a blank text is none."""
    given = ((name, row.get(name)) for name in names)
    return next(((name, value) for name, value in given if value is not None and str(value).strip()), ("", None))
