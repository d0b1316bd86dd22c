"""Countdown problems: make a target from given numbers, each used exactly once, with + - * / and brackets.

    Use the numbers 16, 56, 4 to make 44. ...      56 - 16 = 40, 4 + 40 = 44      4 + (56 - 16)

Generated, always solvable, with a worked solution; or read from rows with `nums` and `target`, as in
Jiayi-Pan/Countdown-Tasks-3to4. A checksum of numbers and target puts a problem into training or validation, so
that no problem is in both.
"""

import random
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlreason.config.sources import locate, may_be_hub_name
from rlreason.data.files import BadRowError, file_rows, hub_splits, read_table
from rlreason.errors import ConfigError
from rlreason.types import Problem

HALVES = ("train", "validation")
VALIDATION_SHARE = 8  # one problem in eight belongs to the validation half
MAX_MISSES = 20_000  # in a row, after which the space counts as exhausted


class Term(NamedTuple):
    """A part of an expression: its value, its text, and the text where it stands inside another."""

    value: int
    text: str
    inside: str


def is_validation(numbers: Sequence[int], target: int) -> bool:
    """Whether a problem belongs to the validation half; the order of its numbers does not matter."""
    return zlib.crc32(repr((sorted(numbers), target)).encode()) % VALIDATION_SHARE == 0


def question_of(numbers: Sequence[int], target: int) -> str:
    """The question as text."""
    return (
        f"Use the numbers {', '.join(map(str, numbers))} to make {target}. Use each number exactly once, with "
        "+, -, *, / and brackets. The answer is the expression alone."
    )


def draw_solution(rng: random.Random, numbers: Sequence[int]) -> tuple[Term, str]:
    """The numbers combined at random, pair by pair, into one term; and the steps as text.

    Every intermediate value is a whole number above 0, so divisions come out even; dividing by 1 is left out.
    """
    terms, steps = [Term(number, str(number), str(number)) for number in numbers], []
    while len(terms) > 1:
        rng.shuffle(terms)
        left, right = terms.pop(), terms.pop()
        values = {"+": left.value + right.value, "*": left.value * right.value}
        if left.value > right.value:
            values["-"] = left.value - right.value
        if right.value > 1 and left.value % right.value == 0:
            values["/"] = left.value // right.value
        sign = rng.choice(list(values))
        text = f"{left.inside} {sign} {right.inside}"
        terms.append(Term(values[sign], text, f"({text})"))
        steps.append(f"{left.value} {sign} {right.value} = {values[sign]}")
    return terms[0], ", ".join(steps)


def make_countdown(
    n: int,
    seed: int,
    min_count: int = 3,
    max_count: int = 4,
    max_value: int = 99,
    max_target: int = 100,
    validation: bool = False,
) -> list[Problem]:
    """n different problems of min_count to max_count numbers; their answer is one right expression of many.

    The same arguments give the same problems. `ConfigError` where the space holds fewer than n.
    """
    rng = random.Random(f"countdown/{seed}/{validation}/{min_count}-{max_count}-{max_value}-{max_target}")
    half = HALVES[validation]
    problems: dict[tuple[tuple[int, ...], int], Problem] = {}
    misses = 0
    while len(problems) < n:
        count = min_count + len(problems) % (max_count - min_count + 1)  # in turn: small counts are found more often
        numbers = [rng.randint(1, max_value) for _ in range(count)]
        solution, steps = draw_solution(rng, numbers)
        key = (tuple(sorted(numbers)), solution.value)
        if solution.value > max_target or is_validation(*key) != validation or key in problems:
            misses += 1
            if misses > MAX_MISSES:
                raise ConfigError(
                    f"data.max_value={max_value} with data.max_count={max_count} and data.max_target={max_target} "
                    f"allows only about {len(problems)} different {half} problems, and {n} were asked for: raise them"
                )
            continue
        misses = 0
        question = question_of(numbers, solution.value)
        problems[key] = Problem(f"countdown-{half}-{len(problems)}", question, solution.text, steps)
    return list(problems.values())


def load_countdown(
    path: str, name: str, n_train: int, n_validation: int, skip: bool
) -> tuple[list[Problem], list[Problem], list[str]]:
    """(train, validation, notes) from a JSON-lines file or a hub data set's train split, in the order of its rows.

    `ConfigError` where there are fewer than asked; `skip` leaves unusable rows out instead of stopping.
    """
    if file := locate(None, path):
        rows = file_rows(file)
    elif may_be_hub_name(path):
        splits = hub_splits(path, None)
        if "train" not in splits:
            raise ConfigError(f"data.path={path} has no split train: give a JSON-lines file of it instead")
        rows = ((f"row {number}", row) for number, row in enumerate(splits["train"]))
    else:
        raise ConfigError(f"data.path={path} is no .jsonl or .json file: give one, or a hub name, or null to make some")
    table = read_table(rows, path, name, to_problem, lambda row: None, skip)
    halves: dict[str, list[Problem]] = {half: [] for half in HALVES}
    for problem in table.problems:
        halves[HALVES[is_validation(*_key(problem))]].append(problem)
    for half, wanted in zip(HALVES, (n_train, n_validation), strict=True):
        if len(halves[half]) < wanted:
            raise ConfigError(
                f"data.n_{half}={wanted} is more than the {len(halves[half])} {half} problems among "
                f"{len(table.problems)} rows of data.path={path} (1 in {VALIDATION_SHARE} is for validation): lower it"
            )
    return halves["train"][:n_train], halves["validation"][:n_validation], table.notes


def to_problem(row: Any, id: str) -> Problem:
    """A row with `nums` and `target` as a problem, or `BadRowError`; whether it can be solved is not checked."""
    numbers, target = (row.get("nums"), row.get("target")) if isinstance(row, dict) else (None, None)
    if not isinstance(numbers, list) or not numbers or any(type(x) is not int or x < 0 for x in numbers):
        raise BadRowError("has no nums that are a list of whole numbers, 0 or above")
    if type(target) is not int:
        raise BadRowError("has no target that is a whole number")
    return Problem(id, question_of(numbers, target), f"{' '.join(map(str, numbers))} -> {target}")


def _key(problem: Problem) -> tuple[list[int], int]:
    numbers, target = problem.answer.split(" -> ")
    return [int(number) for number in numbers.split()], int(target)
