"""`Grader`: from responses and gold answers to grades, in order, in bounded time, never raising on content.

It puts the rooms together: read the answer out of the response, compare in process, hand what is left to the
workers, remember verdicts, count. It must not know mathematics, processes or the trainer.
"""

import json
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, get_args

from rlreason.answers import decide as answers
from rlreason.answers.verdict import Gold, Settings, Verdict, gold_texts
from rlreason.config.ranges import out_of_range
from rlreason.grading import formats, plugin
from rlreason.grading.incidents import IncidentLog
from rlreason.grading.metrics import event, grading_warnings
from rlreason.grading.workers.pool import Pool, Reply
from rlreason.types import Grade

CACHE_SIZE = 65_536
CACHE_CHARS = 4_000  # longer texts are not worth remembering
FORMATS = {"r1_zero": formats.r1_zero, "question_only": formats.question_only}

_graders: "weakref.WeakSet[Grader]" = weakref.WeakSet()


class Grader:
    """Grades responses by a named reward or a plug-in; see `grade_batch`. Close it, or use it in a `with`."""

    def __init__(
        self,
        reward: str = "r1_zero",
        extract: formats.Extract = "strict",
        timeout_s: float = 2.0,
        percent: bool = True,
        rel_tol: float = 1e-6,
        workers: int = 1,
        memory_mb: int = 1536,
        log_path: str | Path | None = None,
        symbolic: bool = True,
        correct_at: float | None = None,
    ) -> None:
        """`correct_at`: the answer reward of a plug-in from which on a response counts as correct.

        None: 1, and a reward that gives more is warned of.
        """
        _check(reward, extract, timeout_s, rel_tol, workers, memory_mb)
        self.reward, self.extract, self.symbolic = reward, extract, symbolic
        self.correct_at, self.whole_is_named = 1.0 if correct_at is None else correct_at, correct_at is not None
        self.settings = Settings(percent=percent, rel_tol=rel_tol)
        self.plugin = reward if ":" in reward else None
        self._pool = Pool(workers, timeout_s, memory_mb, self.plugin)
        self._log = IncidentLog(log_path)
        self._cache: OrderedDict[tuple[Any, ...], Grade] = OrderedDict()
        self._reasons: dict[str, str] = {}  # kind of failure -> why a plug-in failed so last
        self._lock = threading.Lock()
        _graders.add(self)

    def start(self) -> None:
        """Start the workers now, before CUDA is touched; else the first answer that needs one does."""
        if self.symbolic or self.plugin:
            self._pool.start()

    def wait(self) -> str:
        """Until the workers are ready; returns why they cannot be had, or an empty text."""
        return self._pool.wait()

    def grade_batch(self, responses: Sequence[str], golds: Sequence[Gold]) -> list[Grade]:
        """One grade per response, in order. Equal (answer, gold) pairs are worked out once and remembered.

        Nothing is counted here: `metrics.grading_metrics` and `grading_warnings` read whichever grades they are given.
        """
        if len(responses) != len(golds):
            raise ValueError(f"grade_batch got {len(responses)} responses and {len(golds)} golds; give one gold each")
        jobs = [self._job(response, gold) for response, gold in zip(responses, golds, strict=True)]
        fresh: dict[tuple[Any, ...], Grade] = {}
        with self._lock:
            known = {job: self._cache[job] for job in jobs if isinstance(job, tuple) and job in self._cache}
        todo = list(dict.fromkeys(job for job in jobs if isinstance(job, tuple) and job not in known))
        if todo:
            fresh = self._plugged(todo) if self.plugin else self._compared(todo)
        grades, worked_out = list[Grade](), set(todo)
        for job in jobs:
            if isinstance(job, Grade):
                grades.append(job)
            elif job in worked_out:
                worked_out.remove(job)
                grades.append(fresh[job])
            else:
                grades.append(replace(known.get(job) or fresh[job], milliseconds=None, remembered=True))
        with self._lock:
            self._remember(known, fresh)
        return grades

    def warnings(self, grades: Sequence[Grade]) -> list[str]:
        """What went wrong in these grades, and what may be meant otherwise, in one sentence each."""
        said = grading_warnings(grades, self._reasons) + ([f"grading: {self.broken}"] if self.broken else [])
        top = max((grade.answer for grade in grades), default=0.0)
        if self.plugin and top > 1 + plugin.ROUNDING and not self.whole_is_named:
            said.append(
                f"grading: {self.plugin} gives up to {top:g}, and every response that earns 1 or more counts as "
                f"correct: set grading.correct_at={top:g} where only that is whole credit, or grading.correct_at=1"
            )
        if self.plugin and 0 < top < self.correct_at - plugin.ROUNDING:
            said.append(
                f"grading: no response earned {self.correct_at:g}, from which on one counts as correct; the most was "
                f"{top:g}: set grading.correct_at where that is whole credit"
            )
        return said

    @property
    def broken(self) -> str | None:
        """Why the worker processes cannot be had any more, in words."""
        return self._pool.broken

    def why_not(self, grade: Grade) -> str:
        """Why a plug-in gave no reward for the response that got this grade last, in words."""
        return self.broken or self._reasons.get(event(grade), "")

    def close(self) -> None:
        """End the worker processes. The grader still works afterwards; it starts new ones when it must."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pool"):
            self._pool.close()

    def _job(self, response: Any, gold: Any) -> Grade | tuple[Any, ...]:
        """A grade where the format already decides, else the key of the comparison to make."""
        texts = gold_texts(gold)
        if not isinstance(response, str):
            return Grade(0.0, 0.0, 0.0, "error", "bad_response")
        if self.plugin:
            return plugin.key(response, gold)
        formatted, answer = FORMATS[self.reward](response)
        if not formatted:
            return Grade(0.0, 0.0, 0.0, "unformatted", "format")
        if texts is None:
            return Grade(1.0, 0.0, 0.0, "error", "bad_gold")
        if answer is None or not answer.strip():
            return Grade(1.0, 0.0, 0.0, "wrong", "no_answer")
        return (answer, *texts)

    def _compared(self, todo: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], Grade]:
        verdicts: dict[tuple[Any, ...], Verdict] = {}
        milliseconds: dict[tuple[Any, ...], float] = {}
        undecided: list[tuple[tuple[Any, ...], str, str]] = []
        for job in todo:
            begin = time.perf_counter()
            verdict, pairs = answers.decide(formats.candidates(job[0], self.extract), job[1:], self.settings)
            verdicts[job] = verdict
            if self.symbolic:
                undecided += [(job, answer, gold) for answer, gold in pairs]
            milliseconds[job] = 1000 * (time.perf_counter() - begin)
        begin = time.perf_counter()
        replies = self._pool.run([[answer, gold] for _, answer, gold in undecided])
        waited = 1000 * (time.perf_counter() - begin) / max(1, len(undecided))  # of each, on average
        for (job, answer, gold), reply in zip(undecided, replies, strict=True):
            verdict = _symbolic_verdict(reply)
            verdicts[job] = answers.better(verdicts[job], verdict)
            milliseconds[job] += waited
            if verdict.outcome in ("timeout", "error"):
                self._log.add(answer, gold, reply)
        return {job: replace(_grade(verdict), milliseconds=milliseconds[job]) for job, verdict in verdicts.items()}

    def _plugged(self, todo: list[tuple[Any, ...]]) -> dict[tuple[Any, ...], Grade]:
        begin = time.perf_counter()
        replies = self._pool.run([[response, json.loads(gold)] for response, gold in todo])
        each = 1000 * (time.perf_counter() - begin) / len(todo)
        grades: dict[tuple[Any, ...], Grade] = {}
        for job, reply in zip(todo, replies, strict=True):
            grade = plugin.grade(reply, self.correct_at)
            grades[job] = replace(grade, milliseconds=each)
            if failed := plugin.failure(reply, grade):
                self._reasons[event(grade)] = failed.error
                self._log.add(job[0], job[1], failed)
        return grades

    def _remember(self, known: dict[tuple[Any, ...], Grade], fresh: dict[tuple[Any, ...], Grade]) -> None:
        for job in known:
            if job in self._cache:
                self._cache.move_to_end(job)
        for job, grade in fresh.items():
            if grade.outcome != "error" and len(job[0]) <= CACHE_CHARS:
                self._cache[job] = grade
        while len(self._cache) > CACHE_SIZE:
            self._cache.popitem(last=False)


def _grade(verdict: Verdict) -> Grade:
    """The reward is the answer's: a formatted wrong answer earns nothing."""
    answer = 1.0 if verdict.outcome == "correct" else 0.0
    return Grade(1.0, answer, answer, verdict.outcome, verdict.path)


def _symbolic_verdict(reply: Reply) -> Verdict:
    if reply.status == "ok":
        return Verdict(reply.value["outcome"], reply.value["path"])
    if reply.status == "timeout":
        return Verdict("timeout", "symbolic")
    return Verdict("error", "killed" if reply.status == "killed" else "symbolic")


def _check(reward: str, extract: str, timeout_s: float, rel_tol: float, workers: int, memory_mb: int) -> None:
    module, _, function = reward.partition(":")
    if reward not in FORMATS and not (module and function):
        raise ValueError(f"reward={reward!r} is none of {sorted(FORMATS)}; name one, or a plug-in as module:function")
    if extract not in get_args(formats.Extract):
        raise ValueError(f"grading.extract={extract!r}; choose one of {list(get_args(formats.Extract))}")
    numbers = {"timeout_s": timeout_s, "rel_tol": rel_tol, "workers": workers, "memory_mb": memory_mb}
    if bad := out_of_range({f"grading.{name}": number for name, number in numbers.items()}):
        raise ValueError("; ".join(bad))


def _renew_after_fork() -> None:
    """In a forked child: locks may be held by threads that are gone, and the workers are the parent's."""
    for grader in list(_graders):
        grader._lock = threading.Lock()
        grader._pool.after_fork()


os.register_at_fork(after_in_child=_renew_after_fork)
