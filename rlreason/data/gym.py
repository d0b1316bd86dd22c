"""Problems of the optional `reasoning-gym` package: about a hundred kinds of puzzles with verifiers of their own.

The package makes a problem from a task's name, a seed and an index. Its answer here is the whole entry as JSON, which
is what the task's verifier needs. A few tasks iterate over sets of texts while they make a problem, so their problems
are the same in two runs only if PYTHONHASHSEED is.
"""

import json
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

from rlreason.config.packages import required
from rlreason.errors import ConfigError
from rlreason.types import Problem

OVERSAMPLING = 2  # problems made per problem asked for, to find enough different ones


def make_gym(tasks: Sequence[str], n: int, seed: int) -> list[Problem]:
    """n different problems, of each task in turn; `ConfigError` where a task is unknown or has too few."""
    per_task = -(-n // len(tasks))
    columns = [_problems(task, per_task, seed) for task in tasks]
    return [problem for row in zip(*columns, strict=True) for problem in row][:n]


def _problems(task: str, n: int, seed: int) -> list[Problem]:
    """n of a task's problems whose own answers its verifier accepts; others are skipped."""
    entry_at, score = _source(task, OVERSAMPLING * n, seed)
    problems: dict[str, Problem] = {}
    for index in range(OVERSAMPLING * n):
        entry = {"task": task, **entry_at(index)}
        question = entry["question"].strip()
        if question not in problems and _is_sound(entry, score):
            id, answer = f"{task}-{len(problems)}", json.dumps(entry)
            problems[question] = Problem(id, question, answer, facts={"source": task})
        if len(problems) == n:
            return list(problems.values())
    raise ConfigError(
        f"data.task={task}: of {OVERSAMPLING * n} problems only {len(problems)} are different and accepted by the "
        f"task's own verifier, and {n} were asked for: " + ("lower data.n_train" if problems else "choose another task")
    )


def _source(
    task: str, size: int, seed: int
) -> tuple[Callable[[int], dict[str, Any]], Callable[[str, dict[str, Any]], float]]:
    """(index -> entry, the task's verifier), from the package."""
    with required(f"data.task={task}", "reasoning_gym"):
        from reasoning_gym.factory import DATASETS, create_dataset, get_score_answer_fn
    if task not in DATASETS:
        near = get_close_matches(task, DATASETS) or sorted(DATASETS)[:5]
        raise ConfigError(f"data.task={task} is no task of reasoning-gym: give one of its names, as {', '.join(near)}")
    try:
        return create_dataset(task, seed=seed, size=size).__getitem__, get_score_answer_fn(task)
    except Exception as error:  # every task has rules of its own for what it can make
        raise ConfigError(
            f"data.task={task} cannot make {size} problems ({error}): lower data.n_train, or choose another task"
        ) from error


def _is_sound(entry: dict[str, Any], score: Callable[[str, dict[str, Any]], float]) -> bool:
    """Whether the entry's own answer gets the full score after it went through JSON, as in grading."""
    try:
        sent = json.loads(json.dumps(entry))
        return float(score(sent["answer"].strip(), sent)) >= 1.0
    except Exception:  # no JSON, no answer, or a verifier that raises on what JSON made of it
        return False
