"""Which problems a run trains and is evaluated on: held-out draws, overlap, pass rates, subsets.

Pure functions of problems; each returns a line on what it left out.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlreason.data.files import Table, question_hash
from rlreason.errors import ConfigError, DataError
from rlreason.runtime.questions import question_key, question_keys
from rlreason.runtime.text import few, shorten
from rlreason.types import Problem


def identified(tables: Sequence[Table]) -> list[list[Problem]]:
    """The problems of each table under the data's own ids, if every row has a different one; else numbered."""
    own = [id for table in tables for id in table.own_ids]
    if None in own or len(set(own)) < len(own):
        return [table.problems for table in tables]
    return [[replace(p, id=id) for p, id in zip(t.problems, t.own_ids, strict=True) if id is not None] for t in tables]


def hold_out(problems: list[Problem], n: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(the rest, n drawn by seed). The first 100 drawn are among the first 200. `ConfigError` if none is left."""
    if n >= len(problems):
        raise ConfigError(f"data.n_validation={n} must be less than the {len(problems)} problems there are: lower it")
    held = subset(problems, n, seed)
    ids = {p.id for p in held}
    return [p for p in problems if p.id not in ids], held


def subset(problems: list[Problem], limit: int | None, seed: int) -> list[Problem]:
    """`limit` problems drawn by seed, nested: the first 128 are among the first 256. None takes all, in order."""
    if limit is None or limit >= len(problems):
        return problems
    order = list(range(len(problems)))
    random.Random(f"subset/{seed}").shuffle(order)
    return [problems[i] for i in order[:limit]]


def without_overlap(
    train: list[Problem], validation: Sequence[Problem], policy: str, fill: Callable[[str], str]
) -> tuple[list[Problem], list[str]]:
    """(train, notes). `policy` for a question of both: refuse it (`DataError`), drop it, or allow it with a note.

    Questions are the same by `question_key`: case, punctuation, width or a label in front make no other one. `fill`
    writes a question into the run's prompt: a row that gives its whole prompt is recognised by that.
    """
    prompted = any(p.prompt is not None for p in (*train, *validation))

    def keys(p: Problem) -> list[str]:
        """What a problem is recognised by: its question or whole prompt, and the question in the run's prompt."""
        in_prompt = [question_key(fill(p.question))] if prompted and p.prompt is None else []
        return [question_key(p.question), *in_prompt]

    asked = {key: p.id for p in validation for key in keys(p)}
    shared = {p.id: asked[key] for p in train for key in keys(p) if key in asked}
    if not shared:
        return train, []
    pairs = few([f"{a} is {b}" for a, b in shared.items()], 3)
    found = f"{len(shared)} training questions are validation questions too ({pairs})"
    if policy == "refuse":
        cure = "drop takes them out of the training data, allow keeps them"
        raise DataError(f"data.overlap=refuse: {found}: {cure}, or give other files")
    if policy == "allow":
        return train, [f"! {found}, and data.overlap=allow keeps them: validation accuracy may be memory"]
    rest = [p for p in train if p.id not in shared]
    if not rest:
        raise DataError(f"data.overlap=drop: {found}, and that is all of them: give other files")
    return rest, [f"! {found}: dropped from the training data"]


def repeated(problems: Sequence[Problem], what: str, same: Callable[[str, str], bool]) -> list[str]:
    """Notes: how many rows ask how many questions, where some are repeated, and those with different ground truths.

    `what`: 'training', say. `same`: whether two ground truths are one answer.
    """
    rows: dict[str, list[Problem]] = {}
    for key, p in zip(question_keys((p.id, p.question) for p in problems).values(), problems, strict=True):
        rows.setdefault(key, []).append(p)
    if len(rows) == len(problems):
        return []
    notes = [f"{len(problems)} {what} rows ask {len(rows)} different questions"]
    torn = []
    for of in rows.values():
        first, *others = [p for p in of if p.answer] or of[:1]
        if other := next((p for p in others if p.answer != first.answer and not same(p.answer, first.answer)), None):
            torn.append(f"{first.id} says {shorten(first.answer, 30)}, {other.id} {shorten(other.answer, 30)}")
    if torn:
        notes.append(f"! {len(torn)} {what} questions have different ground truths in different rows: {few(torn, 3)}")
    return notes


def read_pass_rates(path: Path) -> dict[str, float]:
    """Question hash -> correct / samples, over all lines of a question; `DataError` for a line of another form."""
    samples: dict[str, int] = {}
    correct: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key, n, c = row["question_hash"], row["samples"], row["correct"]
            sound = isinstance(key, str) and isinstance(n, int) and isinstance(c, int) and 0 <= c <= n > 0
        except (ValueError, KeyError, TypeError):
            sound = False
        if not sound:
            raise DataError(
                f"{path}, line {number} is no pass rate: it must hold question_hash, samples (1 or more) and correct "
                "(0 to samples); algorithm=evaluate writes such a file"
            )
        samples[key], correct[key] = samples.get(key, 0) + n, correct.get(key, 0) + c
    return {key: correct[key] / n for key, n in samples.items()}


def by_pass_rate(
    problems: list[Problem], rates: Mapping[str, float], low: float, high: float
) -> tuple[list[Problem], str]:
    """(problems with a pass rate in [low, high], a line on the others); `DataError` where there are none."""
    known = [(p, rates.get(question_hash(p.question))) for p in problems]
    kept = [p for p, rate in known if rate is not None and low <= rate <= high]
    hard = sum(rate is not None and rate < low for _, rate in known)
    easy = sum(rate is not None and rate > high for _, rate in known)
    without = sum(rate is None for _, rate in known)
    counts = (
        f"kept {len(kept)} of {len(problems)} problems with a pass rate in [{low:g}, {high:g}]; dropped: "
        f"{hard} below, {easy} above, {without} without a pass rate"
    )
    if not kept:
        cure = (
            "make the file with algorithm=evaluate on this data"
            if without == len(problems)
            else "widen data.min_pass_rate and data.max_pass_rate"
        )
        raise DataError(f"data.pass_rates: {counts}: {cure}")
    return kept, ("! " if without else "") + counts
