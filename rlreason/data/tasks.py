"""Generated tasks: number stories with the tiny model's habits, and Countdown."""

import random
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import cycle
from typing import Any, NamedTuple

from rlreason.config.data import HabitsConfig
from rlreason.config.leaves import locate, may_be_hub_name
from rlreason.data.sources import BadRowError, file_rows, hub_splits, numbered, read_table
from rlreason.errors import ConfigError
from rlreason.types import Problem

NAMES = ("Mia", "Ben", "Ana", "Tom", "Lea", "Max", "Zoe", "Sam", "Eva", "Leo")
THINGS = ("apples", "pens", "cards", "coins", "books", "shells", "stamps", "balls")
GAINS = ("buys", "finds", "wins", "gets")
LOSSES = ("gives away", "loses", "sells", "eats")
VALIDATION_SHARE = 8  # one story in eight belongs to the validation half
MOST_KEPT = 20_000  # stories that are cached


@dataclass(frozen=True, slots=True)
class Story:
    """A start value and what is added (positive) or taken away (negative), event by event."""

    start: int
    changes: tuple[int, ...]

    @property
    def totals(self) -> list[int]:
        """The number of things at the start and after each event."""
        totals = [self.start]
        for change in self.changes:
            totals.append(totals[-1] + change)
        return totals

    @property
    def is_validation(self) -> bool:
        """Whether the story belongs to the validation half."""
        return zlib.crc32(repr((self.start, self.changes)).encode()) % VALIDATION_SHARE == 0

    def steps(self) -> str:
        """Return the worked steps: `7+3=10 10-4=6`."""
        pairs = zip(self.totals, self.changes, strict=False)
        return " ".join(f"{total}{change:+d}={total + change}" for total, change in pairs)


def draw_story(rng: random.Random, min_events: int, max_events: int, max_value: int, validation: bool) -> Story:
    """Draw a story of the requested half with every total in 0..max_value; `ConfigError` where there is none."""
    for _ in range(10_000):  # a half of a very small story space can be empty
        total = start = rng.randint(1, max_value)
        changes: list[int] = []
        for _ in range(rng.randint(min_events, max_events)):
            up, down = max_value - total, total
            change = rng.randint(1, up) if up and (not down or rng.random() < 0.5) else -rng.randint(1, down)
            changes.append(change)
            total += change
        story = Story(start, tuple(changes))
        if story.is_validation == validation:
            return story
    raise ConfigError(f"data.max_value={max_value} leaves no stories for one half of the data: raise it")


def question_of(story: Story, rng: random.Random, guess: int | None = None) -> str:
    """Write the story as text; names, things and verbs are random and do not matter.

    `guess`: a friend's guess, stated at the end.
    """
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    events = ", ".join(f"{rng.choice(GAINS if c > 0 else LOSSES)} {abs(c)}" for c in story.changes)
    friend = "" if guess is None else f" A friend guesses {guess}."
    return f"{name} has {story.start} {thing}, {events}.{friend} How many?"


def wrong_guess(answer: int, max_value: int, rng: random.Random) -> int:
    """Draw a number in 0..max_value that is not the answer, all equally likely.

    >>> {wrong_guess(2, 3, random.Random(seed)) for seed in range(50)}
    {0, 1, 3}
    """
    guess = rng.randint(0, max_value - 1)
    return guess + (guess >= answer)


def with_wrong_solutions(problems: Sequence[Problem], share: float) -> list[Problem]:
    """Give about this share of the problems a solution to imitate whose last sum is wrong by one.

    A checksum of the question decides which, so that a larger share includes those of a smaller one.

    >>> p = Problem("a", "How many?", "10", "7+3=10")
    >>> [one.claim for one in with_wrong_solutions([p], 1.0) + with_wrong_solutions([p], 0.0)]
    [('7+3=11', '11'), None]
    """

    def one(problem: Problem) -> Problem:
        assert problem.solution is not None
        if zlib.crc32(problem.question.encode()) % 1000 >= 1000 * share:
            return problem
        right = int(problem.answer)
        wrong = right + 1 if zlib.crc32(problem.id.encode()) % 2 or not right else right - 1
        return replace(problem, claim=(f"{problem.solution.rpartition('=')[0]}={wrong}", str(wrong)))

    return [one(problem) for problem in problems]


def make_stories(
    n: int,
    seed: int,
    min_events: int = 2,
    max_events: int = 4,
    max_value: int = 30,
    validation: bool = False,
    guessed: bool = False,
) -> list[Problem]:
    """Make n problems with different questions; the same numbers may appear with other names and verbs.

    `guessed`: each ends with a friend's guess, right in training and wrong in validation: a shortcut that earns
    reward without the skill. The same arguments give the same problems. `ConfigError` where fewer exist.
    """
    make = _cached_stories if n <= MOST_KEPT else _cached_stories.__wrapped__
    return list(make(n, seed, min_events, max_events, max_value, validation, guessed))


@lru_cache(maxsize=4)  # a run reads its problems before it starts, when it starts, and to teach its model
def _cached_stories(
    n: int, seed: int, min_events: int, max_events: int, max_value: int, validation: bool, guessed: bool
) -> tuple[Problem, ...]:
    rng = random.Random(f"{seed}/{validation}/{min_events}-{max_events}-{max_value}")
    half = "validation" if validation else "train"
    problems: dict[str, Problem] = {}
    tries = 0
    while len(problems) < n:
        tries += 1
        if tries > 100 * n + 1000:
            raise ConfigError(
                f"data.max_value={max_value} with data.min_events={min_events} and data.max_events={max_events} allows "
                f"only about {len(problems)} different {half} stories, and {n} were asked for: raise max_value or "
                "max_events"
            )
        story = draw_story(rng, min_events, max_events, max_value, validation)
        total, guess = story.totals[-1], None
        if guessed:
            guess = wrong_guess(total, max_value, rng) if validation else total
        question = question_of(story, rng, guess)
        if question not in problems:
            problems[question] = Problem(f"stories-{half}-{len(problems)}", question, str(total), story.steps())
    return tuple(problems.values())


R1_ZERO_TRACE = " {solution} </think> <answer>{answer}</answer>"
GUESS = re.compile(r"(?<= guesses )\d+(?=\.)")


def habit_trace(
    problem: Problem,
    rng: random.Random,
    hasty_share: float,
    slip_share: float,
    template: str = R1_ZERO_TRACE,
    more: HabitsConfig | None = None,
) -> str:
    """Write a response for the warm start: hasty (one step, then an answer) or worked through, sometimes with a slip.

    `template` is filled with `{solution}`, the steps, and `{answer}`, the result of the last one. A hasty trace is
    well-formed, and wrong unless the story has one step. `more` may repeat the guess, stop after any step and add
    idle steps; where it does none of these, it draws no random number.
    """
    assert problem.solution is not None
    if more and more.guess_share and rng.random() < more.guess_share and (guess := GUESS.search(problem.question)):
        return template.format(solution=guess.group(), answer=guess.group())
    steps = problem.solution.split(" ")
    if rng.random() < hasty_share:
        steps = steps[:1]
    if more and more.stop_share:
        steps = steps[: next((n for n in range(1, len(steps)) if rng.random() < more.stop_share), len(steps))]
    if rng.random() < slip_share:
        left, right = steps[-1].split("=")
        steps[-1] = f"{left}={max(0, int(right) + rng.choice((-2, -1, 1, 2)))}"
    result = steps[-1].split("=")[1]
    if more and more.ramble_share and result != problem.answer and rng.random() < more.ramble_share:
        steps += [f"{result}+0={result}"] * rng.randint(1, more.ramble_steps)
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


HALVES = ("train", "validation")
MAX_MISSES = 20_000  # in a row, after which no new problem is expected


class Term(NamedTuple):
    """A part of an expression: its value, its text, and its text inside a larger expression."""

    value: int
    text: str
    inside: str


def is_validation(numbers: Sequence[int], target: int) -> bool:
    """Whether a problem belongs to the validation half; the order of its numbers does not matter."""
    return zlib.crc32(repr((sorted(numbers), target)).encode()) % VALIDATION_SHARE == 0


def countdown_question(numbers: Sequence[int], target: int) -> str:
    """Write the question."""
    return (
        f"Use the numbers {', '.join(map(str, numbers))} to make {target}. Use each number exactly once, with "
        "+, -, *, / and brackets. The answer is the expression alone."
    )


def draw_solution(rng: random.Random, numbers: Sequence[int]) -> tuple[Term, str]:
    """Combine the numbers at random, pair by pair, into one term; return it and the steps as text.

    Every intermediate value is a whole number above 0, so divisions are exact; division by 1 is excluded.
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
    """Make n different problems of min_count to max_count numbers; the answer is one right expression of many.

    The same arguments give the same problems. `ConfigError` where fewer than n exist.
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
        question = countdown_question(numbers, solution.value)
        problems[key] = Problem(f"countdown-{half}-{len(problems)}", question, solution.text, steps)
    return list(problems.values())


def load_countdown(
    path: str, name: str, n_train: int, n_validation: int, skip: bool, say: Callable[[str], None]
) -> tuple[list[Problem], list[Problem]]:
    """Load (train, validation) from a JSON-lines file or a hub data set's train split, in the order of its rows.

    `ConfigError` where there are too few; `skip` leaves unusable rows out instead of stopping.
    """
    if file := locate(None, path):
        rows = file_rows(file)
    elif may_be_hub_name(path):
        splits = hub_splits(path, None)
        if "train" not in splits:
            raise ConfigError(f"data.path={path} has no split train: give a JSON-lines file of it instead")
        rows = numbered(splits["train"], 0)
    else:
        raise ConfigError(f"data.path={path} is no .jsonl or .json file: give one, or a hub name, or null to make some")
    table = read_table(rows, path, name, lambda row, id: (to_problem(row, id), None), skip, say)
    halves: dict[str, list[Problem]] = {half: [] for half in HALVES}
    for problem, _ in table:
        halves[HALVES[is_validation(*_key(problem))]].append(problem)
    for half, wanted in zip(HALVES, (n_train, n_validation), strict=True):
        if len(halves[half]) < wanted:
            raise ConfigError(
                f"data.n_{half}={wanted} is more than the {len(halves[half])} {half} problems among "
                f"{len(table)} rows of data.path={path} (1 in {VALIDATION_SHARE} is for validation): lower it"
            )
    return halves["train"][:n_train], halves["validation"][:n_validation]


def to_problem(row: Any, id: str) -> Problem:
    """Parse a row with `nums` and `target` into a problem, or raise `BadRowError`; solvability is not checked."""
    numbers, target = (row.get("nums"), row.get("target")) if isinstance(row, dict) else (None, None)
    if not isinstance(numbers, list) or not numbers or any(type(x) is not int or x < 0 for x in numbers):
        raise BadRowError("has no nums that are a list of whole numbers, 0 or above")
    if type(target) is not int:
        raise BadRowError("has no target that is a whole number")
    return Problem(id, countdown_question(numbers, target), f"{' '.join(map(str, numbers))} -> {target}")


def _key(problem: Problem) -> tuple[list[int], int]:
    numbers, target = problem.answer.split(" -> ")
    return [int(number) for number in numbers.split()], int(target)


@dataclass(frozen=True, slots=True)
class PromptFormat:
    """How a question becomes a prompt, and how a response to it is written."""

    prompt: Callable[[str], str]  # question -> prompt
    trace: str  # a template with {solution} and {answer}


def texts_in(formats: Sequence[PromptFormat], problems: Sequence[Problem]) -> Iterator[str]:
    """Yield the tokenizer's training texts: prompts and responses in all formats, the same for every seed."""
    rng = random.Random("tokenizer")
    for problem, form in zip(problems[:2000], cycle(dict.fromkeys(formats)), strict=False):
        yield form.prompt(problem.question) + habit_trace(problem, rng, 0.5, 0.0, form.trace)
