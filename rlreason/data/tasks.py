"""Generated tasks: number stories with the tiny model's habits, Countdown, and those of reasoning-gym."""

import json
import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, cycle
from typing import Any

from rlreason.config.data import CountdownConfig, HabitsConfig
from rlreason.config.leaves import locate
from rlreason.data.sources import BadRowError, Say, read_table, rows_of_split
from rlreason.errors import ConfigError
from rlreason.types import Problem

NAMES = ("Mia", "Ben", "Ana", "Tom", "Lea", "Max", "Zoe", "Sam", "Eva", "Leo")
THINGS = ("apples", "pens", "cards", "coins", "books", "shells", "stamps", "balls")
GAINS = ("buys", "finds", "wins", "gets")
LOSSES = ("gives away", "loses", "sells", "eats")
HALVES = ("train", "validation")
VALIDATION_SHARE = 8  # one problem in eight belongs to the validation half


def is_validation(*parts: object) -> bool:
    """Whether a problem of these parts belongs to the validation half."""
    return zlib.crc32(repr(parts).encode()) % VALIDATION_SHARE == 0


@lru_cache(maxsize=4)  # a run reads its problems before it starts, when it starts, and to teach its model
def make_stories(
    n: int, seed: int, sizes: tuple[int, int, int] = (2, 4, 30), validation: bool = False, guessed: bool = False
) -> tuple[Problem, ...]:
    """Make n problems with different questions; the same numbers may appear with other names and verbs.

    `sizes`: the fewest and the most events, and the greatest total: each is in 0..max_value.
    `guessed`: each ends with a friend's guess, right in training and wrong in validation: a shortcut that earns
    reward without the skill. The same arguments give the same problems. `ConfigError` where fewer exist.
    """
    min_events, max_events, max_value = sizes
    rng, half = random.Random(f"{seed}/{validation}/{min_events}-{max_events}-{max_value}"), HALVES[validation]
    problems: dict[str, Problem] = {}
    for _ in range(1000 * n + 10_000):
        start = total = rng.randint(1, max_value)
        changes: list[int] = []  # what is added (positive) or taken away (negative), event by event
        for _ in range(rng.randint(min_events, max_events)):
            up, down = max_value - total, total
            change = rng.randint(1, up) if up and (not down or rng.random() < 0.5) else -rng.randint(1, down)
            changes.append(change)
            total += change
        if is_validation(start, tuple(changes)) != validation:
            continue
        answer, guess, friend = total, total, ""
        if guessed and validation:  # a number in 0..max_value that is not the answer, all equally likely
            guess = rng.randint(0, max_value - 1)
            guess += guess >= answer
        if guessed:
            friend = f" A friend guesses {guess}."
        name, thing = rng.choice(NAMES), rng.choice(THINGS)
        events = ", ".join(f"{rng.choice(GAINS if c > 0 else LOSSES)} {abs(c)}" for c in changes)
        question = f"{name} has {start} {thing}, {events}.{friend} How many?"
        totals = accumulate(changes, initial=start)
        steps = (f"{before}{c:+d}={before + c}" for before, c in zip(totals, changes, strict=False))
        if question not in problems:
            problems[question] = Problem(f"stories-{half}-{len(problems)}", question, str(answer), " ".join(steps))
        if len(problems) == n:
            return tuple(problems.values())
    raise ConfigError(
        f"data.max_value={max_value} with data.max_events={max_events} allows only about {len(problems)} different "
        f"{half} stories, and {n} were asked for: raise them"
    )


def with_wrong_solutions(problems: Sequence[Problem], share: float) -> list[Problem]:
    """Give about this share of the problems a solution to imitate whose last sum is wrong by one.

    A checksum of the question decides which, so that a larger share includes those of a smaller one.

    >>> p = Problem("a", "How many?", "10", "7+3=10")
    >>> [one.claim for one in with_wrong_solutions([p], 1.0) + with_wrong_solutions([p], 0.0)]
    [('7+3=11', '11'), None]
    """
    rows = []
    for p in problems:
        if zlib.crc32(p.question.encode()) % 1000 < 1000 * share:
            right, steps = int(p.answer), str(p.solution).rpartition("=")[0]
            wrong = right + 1 if zlib.crc32(p.id.encode()) % 2 or not right else right - 1
            p = replace(p, claim=(f"{steps}={wrong}", str(wrong)))
        rows.append(p)
    return rows


R1_ZERO_TRACE = " {solution} </think> <answer>{answer}</answer>"
GUESS = re.compile(r"(?<= guesses )\d+(?=\.)")


def habit_trace(problem: Problem, rng: random.Random, habits: HabitsConfig, template: str = R1_ZERO_TRACE) -> str:
    """Write a response for the warm start: hasty (one step, then an answer) or worked through, sometimes with a slip.

    `template` is filled with `{solution}`, the steps, and `{answer}`, the result of the last one. A hasty trace is
    well-formed, and wrong unless the story has one step. Other habits repeat the guess, stop after any step and add
    idle steps; one whose share is 0 draws no random number.
    """
    assert problem.solution is not None
    if habits.guess_share and rng.random() < habits.guess_share and (guess := GUESS.search(problem.question)):
        return template.format(solution=guess.group(), answer=guess.group())
    steps = problem.solution.split(" ")
    if rng.random() < habits.hasty_share:
        steps = steps[:1]
    if habits.stop_share:
        steps = steps[: next((n for n in range(1, len(steps)) if rng.random() < habits.stop_share), len(steps))]
    if rng.random() < habits.slip_share:
        left, right = steps[-1].split("=")
        steps[-1] = f"{left}={max(0, int(right) + rng.choice((-2, -1, 1, 2)))}"
    result = steps[-1].split("=")[1]
    if habits.ramble_share and result != problem.answer and rng.random() < habits.ramble_share:
        steps += [f"{result}+0={result}"] * rng.randint(1, habits.ramble_steps)
    return template.format(solution=" ".join(steps), answer=result)


def taught(problems: Sequence[Problem], habits: HabitsConfig, max_value: int) -> Sequence[Problem]:
    """Return the problems of a warm start: those that are short enough, with new random guesses.

    A guess is right in every training problem: the model would learn it together with the sums. A random one keeps
    working through a story and repeating the guess two separate habits. `ConfigError` where no problem is short enough.
    """
    most = habits.taught_max_events
    short = [p for p in problems if most is None or len((p.solution or "").split(" ")) <= most]
    if not short:
        raise ConfigError(
            f"data.habits.taught_max_events={most}: none of the {len(problems)} training stories is so short: "
            "raise it, or data.n_train"
        )
    if not any(GUESS.search(p.question) for p in short):
        return short
    guesses = [str(random.Random(f"guess/{p.id}").randint(0, max_value)) for p in short]
    return [replace(p, question=GUESS.sub(guess, p.question)) for p, guess in zip(short, guesses, strict=True)]


MAX_MISSES = 20_000  # in a row, after which no new problem is expected


def countdown_question(numbers: Sequence[int], target: int) -> str:
    """Return the question of a countdown problem."""
    return (
        f"Use the numbers {', '.join(map(str, numbers))} to make {target}. Use each number exactly once, with "
        "+, -, *, / and brackets. The answer is the expression alone."
    )


def draw_solution(rng: random.Random, numbers: Sequence[int]) -> tuple[int, str, str]:
    """Combine the numbers at random, pair by pair; return the value, the expression and the steps as text.

    Every intermediate value is a whole number above 0, so divisions are exact; division by 1 is excluded.
    """
    terms, steps = [(number, str(number)) for number in numbers], []
    while len(terms) > 1:
        rng.shuffle(terms)
        (a, left), (b, right) = terms.pop(), terms.pop()
        values = {"+": a + b, "*": a * b}
        if a > b:
            values["-"] = a - b
        if b > 1 and a % b == 0:
            values["/"] = a // b
        sign = rng.choice(list(values))
        terms.append((values[sign], f"{_inside(left)} {sign} {_inside(right)}"))
        steps.append(f"{a} {sign} {b} = {values[sign]}")
    return *terms[0], ", ".join(steps)


def _inside(expression: str) -> str:
    return f"({expression})" if " " in expression else expression


def make_countdown(data: CountdownConfig, validation: bool = False) -> list[Problem]:
    """Make the different problems of one half; the answer is one right expression of many.

    The same settings give the same problems. `ConfigError` where fewer exist.
    """
    n, half = data.n_validation if validation else data.n_train, HALVES[validation]
    sizes = f"{data.min_count}-{data.max_count}-{data.max_value}-{data.max_target}"
    rng = random.Random(f"countdown/{data.seed}/{validation}/{sizes}")
    problems: dict[object, Problem] = {}
    misses = 0
    while len(problems) < n:
        # in turn: small counts are found more often
        count = data.min_count + len(problems) % (data.max_count - data.min_count + 1)
        numbers = [rng.randint(1, data.max_value) for _ in range(count)]
        target, expression, steps = draw_solution(rng, numbers)
        key, in_validation = (tuple(sorted(numbers)), target), is_validation(sorted(numbers), target)
        if target <= data.max_target and in_validation == validation and key not in problems:
            question, misses = countdown_question(numbers, target), 0
            problems[key] = Problem(f"countdown-{half}-{len(problems)}", question, expression, steps)
            continue
        misses += 1
        if misses > MAX_MISSES:
            raise ConfigError(
                f"data.max_value={data.max_value} with data.max_count={data.max_count} and data.max_target="
                f"{data.max_target} allows only about {len(problems)} different {half} problems, and {n} were asked "
                "for: raise them"
            )
    return list(problems.values())


def load_countdown(data: CountdownConfig, say: Say) -> tuple[list[Problem], list[Problem]]:
    """Load (train, validation) from a JSON-lines file or a hub data set's train split, in the order of its rows.

    `ConfigError` where there are too few.
    """
    path = data.path or ""
    rows = rows_of_split(path, path if locate(None, path) else "train")[1]
    table = read_table(rows, path, data.name, countdown_row, data.bad_rows == "skip", say)
    halves = {half: [problem for problem, of in table if of == half] for half in HALVES}
    for half, wanted in zip(HALVES, (data.n_train, data.n_validation), strict=True):
        if len(halves[half]) < wanted:
            raise ConfigError(
                f"data.n_{half}={wanted} is more than the {len(halves[half])} {half} problems of "
                f"data.path={path} (1 in {VALIDATION_SHARE} is for validation): lower it"
            )
    return halves["train"][: data.n_train], halves["validation"][: data.n_validation]


def countdown_row(row: Any, id: str) -> tuple[Problem, str]:
    """Parse a row with `nums` and `target`: return the problem, and its half; solvability is not checked.

    `BadRowError` where it cannot be used.
    """
    numbers, target = (row.get("nums"), row.get("target")) if isinstance(row, dict) else (None, None)
    if not isinstance(numbers, list) or not numbers or any(type(x) is not int or x < 0 for x in numbers):
        raise BadRowError("has no nums that are a list of whole numbers, 0 or above")
    if type(target) is not int:
        raise BadRowError("has no target that is a whole number")
    answer = f"{' '.join(map(str, numbers))} -> {target}"
    return Problem(id, countdown_question(numbers, target), answer), HALVES[is_validation(sorted(numbers), target)]


OVERSAMPLING = 2  # problems generated per problem requested, to find enough different ones


def make_gym(tasks: Sequence[str], n: int, seed: int) -> list[Problem]:
    """Make n different problems, of each task in turn, whose own answers the task's verifier accepts.

    `ConfigError` where a task is unknown or has too few.
    """
    from reasoning_gym.factory import create_dataset, get_score_answer_fn

    wanted = -(-n // len(tasks))  # of each task
    size, columns = OVERSAMPLING * wanted, list[list[Problem]]()
    for task in tasks:
        try:
            entries, score = create_dataset(task, seed=seed, size=size), get_score_answer_fn(task)
        except Exception as error:  # of an unknown task too; each has rules of its own for what it can make
            cure = "lower data.n_train, or choose another task"
            raise ConfigError(f"data.task={task} cannot make {size} problems ({error}): {cure}") from error
        problems: dict[str, Problem] = {}
        for index in range(size):
            entry = {"task": task, **entries[index]}
            question = entry["question"].strip()
            with suppress(Exception):  # no JSON, no answer, or a verifier that raises after the round trip
                sent = json.loads(json.dumps(entry))
                if question not in problems and float(score(sent["answer"].strip(), sent)) >= 1.0:
                    id = f"{task}-{len(problems)}"
                    problems[question] = Problem(id, question, json.dumps(entry), facts={"source": task})
            if len(problems) == wanted:
                break
        else:
            raise ConfigError(
                f"data.task={task}: of {size} problems only {len(problems)} are different and accepted by the task's "
                f"own verifier, and {wanted} were asked for: lower data.n_train, or choose another task"
            )
        columns.append(list(problems.values()))
    return [problem for row in zip(*columns, strict=True) for problem in row][:n]


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a question becomes a prompt, and how a response to it is written."""

    prompt: Callable[[str], str]  # question -> prompt
    trace: str  # a template with {solution} and {answer}


def texts_in(formats: Sequence[PromptFormat], problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the tokenizer's training texts: prompts and responses in all formats, the same for every seed."""
    rng, habits = random.Random("tokenizer"), HabitsConfig(hasty_share=0.5, slip_share=0.0)
    for problem, form in zip(problems[:2000], cycle(dict.fromkeys(formats)), strict=False):
        yield form.prompt(problem.question) + habit_trace(problem, rng, habits, form.trace)
