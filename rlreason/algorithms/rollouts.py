"""Sample responses to problems and grade them: the part that training and evaluation share.

It knows problems, the engine and the grader; it must not know losses or the optimizer.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from rlreason.engines.base import Engine, Prompt, Sampling, seed_for
from rlreason.types import Grade, Problem, Response, Sample


class Grades(Protocol):
    """What the rest of the house knows of the grader: two lists of strings in, verdicts out, in order."""

    def grade_batch(self, responses: list[str], golds: list[str]) -> list[Grade]: ...


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Everything needed to answer problems; `prompt_ids` turns a question into the prompt's token ids."""

    engine: Engine
    grader: Grades
    prompt_ids: Callable[[str], list[int]]
    seed: int

    def sample(self, problems: Sequence[Problem], sampling: Sampling, n: int, purpose: object) -> list[Sample]:
        """n responses to each problem, each graded while others are still being sampled.

        The same `purpose` (a step, say) draws the same random numbers.
        """
        prompts = [Prompt(p.id, self.prompt_ids(p.question), seed_for(self.seed, purpose, p.id)) for p in problems]
        gold = {p.id: p.answer for p in problems}
        grades: dict[int, Future[list[Grade]]] = {}
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="grading") as beside:

            def grade(place: int, response: Response) -> None:
                grades[place] = beside.submit(self.grader.grade_batch, [response.text], [gold[response.problem_id]])

            responses = self.engine.generate(prompts, sampling, n, grade)
            return [Sample(response, grades[place].result()[0]) for place, response in enumerate(responses)]


def problems_for_step(problems: Sequence[Problem], step: int, count: int, seed: int) -> list[Problem]:
    """The `count` problems of a step (from 1): passes over the data, each in its own order, cut into steps.

    A function of its arguments alone, so that a continued run sees the same problems as an uninterrupted one.
    A step that straddles two passes may meet a problem twice; each is then asked once and the next one joins.
    """
    chosen: dict[str, Problem] = {}
    position = (step - 1) * count
    while len(chosen) < min(count, len(problems)):
        epoch, place = divmod(position, len(problems))
        order = list(range(len(problems)))
        random.Random(f"{seed}/epoch/{epoch}").shuffle(order)
        for index in order[place : place + count - len(chosen)]:
            chosen.setdefault(problems[index].id, problems[index])
            position += 1
    return list(chosen.values())


def rollout_metrics(samples: Sequence[Sample], prefix: str = "rollout") -> dict[str, float]:
    """Rewards, lengths and what can go wrong quietly, as flat numbers over a batch of samples."""
    n = max(len(samples), 1)
    lengths = [len(s.response.token_ids) for s in samples]
    groups: dict[str, list[Sample]] = {}
    for s in samples:
        groups.setdefault(s.group, []).append(s)
    live = sum(any(s.advantage for s in group) for group in groups.values())
    distinct = sum(len({tuple(s.response.token_ids) for s in group}) / len(group) for group in groups.values())
    return {
        "reward/mean": sum(s.grade.reward for s in samples) / n,
        "reward/format": sum(s.grade.format for s in samples) / n,
        "reward/answer": sum(s.grade.answer for s in samples) / n,
        "reward/live_groups": live / max(len(groups), 1),  # share of groups with any credit other than 0
        f"{prefix}/length": sum(lengths) / n,
        f"{prefix}/length_max": max(lengths, default=0),
        f"{prefix}/truncated": sum(s.response.truncated for s in samples) / n,
        f"{prefix}/distinct": distinct / max(len(groups), 1),  # share of different responses within a group
        f"{prefix}/tokens": sum(lengths),
    }
