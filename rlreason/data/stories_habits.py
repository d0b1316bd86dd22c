"""The habits that a warm start gives the tiny model: what it is shown as responses to stories.

A task with its own habits (`data.habits`) leaves reinforcement learning something else to select: chains that are
worked to the end only up to some length, a long idle tail behind a wrong sum, a guess that is repeated.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import replace

from rlreason.config.data import HabitsConfig
from rlreason.errors import ConfigError
from rlreason.types import Problem

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
    """A response for the warm start: hasty (one step, then an answer) or worked through, sometimes with a slip.

    `template` is filled with `{solution}`, the steps, and `{answer}`, the result of the last of them. A hasty trace is
    well-formed, and wrong unless the story is one step long. `more` may add a guess that is repeated, an end after any
    of the steps and an idle tail; where it adds none of them, it draws no random number.
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
    """The problems that a warm start shows: those that are short enough, their guesses drawn anew.

    A guess that is told is right in every training problem: shown so, it would be learned with the sums. Here it is any
    number, so that working through a story and repeating the guess are two habits. `ConfigError` where none is short.
    """
    most = habits.taught_max_events
    shown = [p for p in problems if most is None or len((p.solution or "").split(" ")) <= most]
    if not shown:
        raise ConfigError(
            f"data.habits.taught_max_events={most}: none of the {len(problems)} training stories is so short: "
            "raise it, or data.n_train"
        )
    return [_guessed_anew(p, max_value) for p in shown] if any(GUESS.search(p.question) for p in shown) else shown


def _guessed_anew(problem: Problem, max_value: int) -> Problem:
    guess = random.Random(f"guess/{problem.id}").randint(0, max_value)
    return replace(problem, question=GUESS.sub(str(guess), problem.question))
