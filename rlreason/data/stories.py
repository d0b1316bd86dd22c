"""Short number stories with exact answers, generated: reasoning practice for a tiny model.

    Mia has 7 apples. Mia buys 3, gives away 4, finds 2. How many?      7+3=10 10-4=6 6+2=8      8

Training and validation stories come from two disjoint halves of the story space: a checksum of the numbers
decides the half. What the tiny model is taught to answer is in `stories_habits`.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rlreason.errors import ConfigError
from rlreason.types import Problem

NAMES = ("Mia", "Ben", "Ana", "Tom", "Lea", "Max", "Zoe", "Sam", "Eva", "Leo")
THINGS = ("apples", "pens", "cards", "coins", "books", "shells", "stamps", "balls")
GAINS = ("buys", "finds", "wins", "gets")
LOSSES = ("gives away", "loses", "sells", "eats")
VALIDATION_SHARE = 8  # one story in eight belongs to the validation half
MOST_KEPT = 20_000  # stories that are remembered, to be read again


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

    def steps(self, until: int | None = None) -> str:
        """The worked steps, or the first `until` of them: `7+3=10 10-4=6`."""
        pairs = zip(self.totals, self.changes, strict=False)
        return " ".join(f"{total}{change:+d}={total + change}" for total, change in list(pairs)[:until])


def draw_story(rng: random.Random, min_events: int, max_events: int, max_value: int, validation: bool) -> Story:
    """A story of the half that is asked for, with every total in 0..max_value; `ConfigError` where there is none."""
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
    """The story as text; names, things and verbs are drawn at random and do not matter.

    `guess`: a friend's, told at the end.
    """
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    events = ", ".join(f"{rng.choice(GAINS if c > 0 else LOSSES)} {abs(c)}" for c in story.changes)
    told = "" if guess is None else f" A friend guesses {guess}."
    return f"{name} has {story.start} {thing}, {events}.{told} How many?"


def wrong_guess(answer: int, max_value: int, rng: random.Random) -> int:
    """A number in 0..max_value that is not the answer, all of them equally likely.

    >>> {wrong_guess(2, 3, random.Random(seed)) for seed in range(50)}
    {0, 1, 3}
    """
    guess = rng.randint(0, max_value - 1)
    return guess + (guess >= answer)


def with_wrong_solutions(problems: Sequence[Problem], share: float) -> list[Problem]:
    """The problems, about so large a share of them with a solution to imitate whose last sum is wrong by one.

    A checksum of the question decides which, so that a larger share holds those of a smaller one.

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
    """n problems with different questions; the same numbers may appear with other names and verbs.

    `guessed`: each ends with a friend's guess, right in training and wrong in validation: a shortcut that earns
    reward without the skill. The same arguments give the same problems. `ConfigError` where the space holds fewer.
    """
    made = _made if n <= MOST_KEPT else _made.__wrapped__
    return list(made(n, seed, min_events, max_events, max_value, validation, guessed))


@lru_cache(maxsize=4)  # a run reads its problems before it starts, when it starts, and to teach its model
def _made(
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
