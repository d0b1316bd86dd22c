"""Short number stories with exact answers, generated: reasoning practice for a tiny model.

    Mia has 7 apples. Mia buys 3, gives away 4, finds 2. How many?      7+3=10 10-4=6 6+2=8      8

Training and validation stories come from two disjoint halves of the story space: a checksum of the numbers
decides the half.
"""

import random
import zlib
from dataclasses import dataclass

from rlreason.errors import ConfigError
from rlreason.types import Problem

NAMES = ("Mia", "Ben", "Ana", "Tom", "Lea", "Max", "Zoe", "Sam", "Eva", "Leo")
THINGS = ("apples", "pens", "cards", "coins", "books", "shells", "stamps", "balls")
GAINS = ("buys", "finds", "wins", "gets")
LOSSES = ("gives away", "loses", "sells", "eats")
VALIDATION_SHARE = 8  # one story in eight belongs to the validation half
R1_ZERO_TRACE = " {solution} </think> <answer>{answer}</answer>"


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


def question_of(story: Story, rng: random.Random) -> str:
    """The story as text; names, things and verbs are drawn at random and do not matter."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    events = ", ".join(f"{rng.choice(GAINS if c > 0 else LOSSES)} {abs(c)}" for c in story.changes)
    return f"{name} has {story.start} {thing}, {events}. How many?"


def make_stories(
    n: int, seed: int, min_events: int = 2, max_events: int = 4, max_value: int = 30, validation: bool = False
) -> list[Problem]:
    """n problems with different questions; the same numbers may appear with other names and verbs.

    The same arguments give the same problems. `ConfigError` where the space holds fewer than n.
    """
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
        question = question_of(story, rng)
        if question not in problems:
            answer = str(story.totals[-1])
            problems[question] = Problem(f"stories-{half}-{len(problems)}", question, answer, story.steps())
    return list(problems.values())


def habit_trace(
    problem: Problem, rng: random.Random, hasty_share: float, slip_share: float, template: str = R1_ZERO_TRACE
) -> str:
    """A response for the warm start: hasty (one step, then an answer) or worked through, sometimes with a slip.

    `template` is filled with `{solution}`, the steps, and `{answer}`, the result of the last of them. A hasty trace is
    well-formed, and wrong unless the story is one step long.
    """
    assert problem.solution is not None
    steps = problem.solution.split(" ")
    if rng.random() < hasty_share:
        steps = steps[:1]
    if rng.random() < slip_share:
        left, right = steps[-1].split("=")
        steps[-1] = f"{left}={max(0, int(right) + rng.choice((-2, -1, 1, 2)))}"
    return template.format(solution=" ".join(steps), answer=steps[-1].split("=")[1])
