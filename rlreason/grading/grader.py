"""`Grader`: from responses and ground truths to grades, in order, in bounded time.

Equal pairs are graded once; what a worker could not decide is written down.
"""

import hashlib
import json
import math
import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlreason.config.fields import out_of_range, wrong_choices
from rlreason.config.groups import GradingConfig, names_function
from rlreason.errors import ConfigError
from rlreason.grading import plugin
from rlreason.grading.answers.decide import better, decide
from rlreason.grading.answers.lexer import ComparisonSettings, Verdict
from rlreason.grading.formats import FORMATS, Extracted, candidates
from rlreason.grading.pool import Pool, Reply
from rlreason.health.finding import event, grading_warnings
from rlreason.runtime.plugins import announced, for_workers
from rlreason.runtime.text import redacted
from rlreason.types import Grade

#: A list means any of its members.
GroundTruth = str | int | float | list[str | int | float]


def reference_answers(ground_truth: Any) -> list[str] | None:
    """The texts that count as right, or None for a kind of value that no answer can be compared with.

    >>> reference_answers([38, "38.0"]), reference_answers(None), reference_answers(float("nan"))
    (['38', '38.0'], None, None)
    """
    members = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    texts: list[str] = []
    for member in members:
        if isinstance(member, str):
            texts.append(member)
        elif isinstance(member, int | float) and not isinstance(member, bool):
            if math.isnan(member):
                return None
            try:
                texts.append(str(member))
            except ValueError:  # an integer of more digits than Python prints
                return None
        elif not isinstance(ground_truth, list):
            return None
    return texts or None


CACHE_SIZE = 65_536
CACHE_CHARS = 4_000  # longer texts are not worth remembering
Key = tuple[Any, ...]  # of texts, the answer first


def digest(key: Key) -> str:
    """32 hex digits that stand for a pair."""
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class GradeCache:
    """The grades of the pairs used last, for several threads at once.

    Of pairs that a run graded before it went on from a checkpoint, it knows only that they were graded: None.
    """

    def __init__(self) -> None:
        self._grades: OrderedDict[str, Grade | None] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, keys: Iterable[Key]) -> dict[Key, Grade | None]:
        """The grades of those of the keys that are remembered."""
        with self._lock:
            return {key: self._grades[found] for key in keys if (found := digest(key)) in self._grades}

    def remember(self, used: Iterable[Key], fresh: Mapping[Key, Grade]) -> None:
        """Keep fresh grades, except failures and long texts, and those that were used again the longest."""
        with self._lock:
            for key in used:
                if (found := digest(key)) in self._grades:
                    self._grades.move_to_end(found)
            for key, grade in fresh.items():
                if grade.outcome != "error" and len(key[0]) <= CACHE_CHARS:
                    self._grades[digest(key)] = grade
            while len(self._grades) > CACHE_SIZE:
                self._grades.popitem(last=False)

    def digests(self) -> list[str]:
        """Which pairs are remembered, those used last at the end."""
        with self._lock:
            return list(self._grades)

    def put(self, digests: Sequence[str]) -> None:
        """Remember that these pairs were graded, and no others."""
        with self._lock:
            self._grades = OrderedDict.fromkeys(digests)

    def after_fork(self) -> None:
        """In a forked child: the lock may be held by a thread that is gone."""
        self._lock = threading.Lock()


MAX_LINES = 1000
MAX_CHARS = 400


class IncidentLog:
    """Appends until the limit. A file that cannot be written does not stop a run; `failed` says why it cannot."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path else None
        self.left = MAX_LINES
        self.failed = ""

    def add(self, answer: str, ground_truth: str, reply: Reply) -> None:
        """One line for the pair and its result; nothing beyond the limit or without a file."""
        if self.path is None or not self.left:
            return
        self.left -= 1
        record = {
            "time": round(time.time(), 1),
            "status": reply.status,
            "error": redacted(reply.error),
            "answer": answer[:MAX_CHARS],
            "answer_chars": len(answer),
            "gold": ground_truth[:MAX_CHARS],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(record) + "\n")
        except OSError as error:
            self.left, self.failed = 0, str(error)


_graders: "weakref.WeakSet[Grader]" = weakref.WeakSet()


class Grader:
    """Grades responses by a format's name or a plug-in; see `grade_batch`. Close it, or use it in a `with`.

    `read` and `same` are its two steps for one response: what answer it states, and whether two answers are equal.
    """

    def __init__(
        self,
        grading: GradingConfig | None = None,
        reward: str | Callable[..., Any] = "r1_zero",
        log_path: str | Path | None = None,
        symbolic: bool = True,
    ) -> None:
        """`grading`: None takes the defaults. `reward`: a format's name, `module:function`, a name that a package
        announced, or a function (response, ground truth) -> reward. `symbolic`: ask the worker processes what the exact
        rules leave open.

        Raises `ConfigError` for a setting that no grader can have.
        """
        if isinstance(reward, str) and ":" not in reward:
            reward = reward if reward in FORMATS else announced("prompt.reward").get(reward, reward)
        name, sent = for_workers(reward)
        self.grading = grading or GradingConfig()
        _check(self.grading, name)
        self.reward, self.symbolic = name, symbolic
        self.plugin = name if ":" in name else None
        self.comparison = ComparisonSettings()
        if not self.plugin:  # which compares answers by rules of its own
            self.comparison = ComparisonSettings(self.grading.percent, self.grading.rel_tol)
        limits = self.grading.timeout_s, self.grading.memory_mb
        self._pool = Pool(self.grading.workers, *limits, self.plugin, sent, self.grading.start_timeout_s)
        self._said_unlimited = False
        self._log = IncidentLog(log_path)
        self._cache = GradeCache()
        self._reasons: dict[str, str] = {}  # kind of failure -> why a plug-in failed so last
        _graders.add(self)

    def start(self) -> None:
        """Start the workers now, before CUDA is touched; else the first answer that needs one does."""
        if self.symbolic or self.plugin:
            self._pool.start()

    def wait(self) -> str:
        """Until the workers are ready; returns why they cannot be had, or an empty text."""
        return self._pool.wait()

    def read(self, response: str) -> Extracted:
        """What the response states as its answer. Raises `ValueError` for a plug-in, which does not say what it reads.

        >>> Grader().read("so </think> <answer>38</answer>").answer, Grader().read("38").reason
        ('38', 'no </think>')
        """
        if self.plugin:
            raise ValueError(f"{self.plugin} reads responses by rules of its own")
        found = FORMATS[self.reward].read(response)
        if found.answer is None:
            return found
        return found._replace(candidates=tuple(candidates(found.answer, self.grading.extract)))

    def same(self, answer: str, reference: str) -> bool:
        """Whether an answer is this one by the exact rules; what only the symbolic library can tell is not.

        >>> Grader().same("1/2", "0.5"), Grader().same("It is 38.", "38")
        (True, False)
        """
        texts = candidates(answer, self.grading.extract)
        return decide(texts, [reference], self.comparison)[0].outcome == "correct"

    def grade(self, response: str, ground_truth: GroundTruth) -> Grade:
        """The grade of one response; for many, `grade_batch` asks the workers side by side.

        >>> Grader().grade("2 + 2 = 4 </think> <answer>4</answer>", "4").reward
        1.0
        """
        return self.grade_batch([response], [ground_truth])[0]

    def grade_batch(self, responses: Sequence[str], ground_truths: Sequence[GroundTruth]) -> list[Grade]:
        """One grade per response, in order. Equal (answer, ground truth) pairs are worked out once and remembered.

        Raises `WaitError` where no worker starts in time. Nothing is counted here: `metrics.grading_metrics` and
        `grading_warnings` read whichever grades they are given.
        """
        if len(responses) != len(ground_truths):
            counts = f"{len(responses)} responses and {len(ground_truths)} ground truths"
            raise ValueError(f"grade_batch got {counts}: give one ground truth for each response")
        jobs = [self._job(response, truth) for response, truth in zip(responses, ground_truths, strict=True)]
        fresh: dict[Key, Grade] = {}
        known = self._cache.known(job for job in jobs if isinstance(job, tuple))
        todo = list(dict.fromkeys(job for job in jobs if isinstance(job, tuple) and not known.get(job)))
        if todo:
            fresh = self._plugged(todo) if self.plugin else self._compared(todo)
        grades, worked_out = list[Grade](), {job for job in todo if job not in known}
        for job in jobs:
            if isinstance(job, Grade):
                grades.append(job)
            elif job in worked_out:
                worked_out.remove(job)
                grades.append(fresh[job])
            else:
                grades.append(replace(known.get(job) or fresh[job], milliseconds=None, remembered=True))
        self._cache.remember(known, fresh)
        return grades

    def remembered(self) -> list[str]:
        """Which pairs it has graded and remembers, for a checkpoint."""
        return self._cache.digests()

    def put_remembered(self, pairs: Sequence[str]) -> None:
        """Count these pairs as graded before: what is counted of a run is the same after it was interrupted."""
        self._cache.put(pairs)

    def unearnable(self, ground_truths: Sequence[GroundTruth]) -> list[int]:
        """Indices of the ground truths that are not graded right when a response states them word for word.

        A plug-in's response format is unknown, so nothing can be checked for one.
        """
        if self.plugin:
            return []
        written = FORMATS[self.reward].written
        responses = [written.format((reference_answers(truth) or [""])[0]) for truth in ground_truths]
        grades = self.grade_batch(responses, ground_truths)
        return [index for index, grade in enumerate(grades) if grade.outcome != "correct"]

    def warnings(self, grades: Sequence[Grade]) -> list[str]:
        """What went wrong in these grades, and what may be meant otherwise, in one sentence each."""
        said = grading_warnings(grades, self._reasons) + ([f"grading: {self.broken}"] if self.broken else [])
        if (unlimited := self._pool.unlimited) and not self._said_unlimited:
            said.append(unlimited)
            self._said_unlimited = True
        if self.plugin:
            said += plugin.correct_at_warnings(self.plugin, grades, self.grading.correct_at)
        return said

    @property
    def broken(self) -> str:
        """Why no worker process can be started any more, in one sentence; empty where they can."""
        return self._pool.broken

    def why_not(self, grade: Grade) -> str:
        """Why a plug-in gave no reward for the response that got this grade last, in one sentence."""
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

    def _job(self, response: Any, ground_truth: Any) -> Grade | Key:
        """A grade where the format already decides, else the key of the comparison to make."""
        references = reference_answers(ground_truth)
        if not isinstance(response, str):
            return Grade(0.0, 0.0, 0.0, "error", "bad_response")
        if self.plugin:
            return plugin.key(response, ground_truth)
        formatted, answer, *_ = FORMATS[self.reward].read(response)
        if not formatted:
            return Grade(0.0, 0.0, 0.0, "unformatted", "format")
        if references is None:
            return Grade(1.0, 0.0, 0.0, "error", "bad_gold")
        if answer is None or not answer.strip():
            return Grade(1.0, 0.0, 0.0, "wrong", "no_answer")
        return (answer, *references)

    def _compared(self, todo: list[Key]) -> dict[Key, Grade]:
        verdicts: dict[Key, Verdict] = {}
        milliseconds: dict[Key, float] = {}
        undecided: list[tuple[Key, str, str]] = []
        for job in todo:
            begin = time.perf_counter()
            verdict, pairs = decide(candidates(job[0], self.grading.extract), job[1:], self.comparison)
            verdicts[job] = verdict
            if self.symbolic:
                undecided += [(job, *pair) for pair in pairs]
            milliseconds[job] = 1000 * (time.perf_counter() - begin)
        begin = time.perf_counter()
        replies = self._pool.run([pair for _, *pair in undecided])
        waited = 1000 * (time.perf_counter() - begin) / max(1, len(undecided))  # of each, on average
        for (job, answer, reference), reply in zip(undecided, replies, strict=True):
            verdict = _symbolic_verdict(reply)
            verdicts[job] = better(verdicts[job], verdict)
            milliseconds[job] += waited
            if verdict.outcome in ("timeout", "error"):
                self._log.add(answer, reference, reply)
        return {job: replace(_grade(verdict), milliseconds=milliseconds[job]) for job, verdict in verdicts.items()}

    def _plugged(self, todo: list[Key]) -> dict[Key, Grade]:
        begin = time.perf_counter()
        replies = self._pool.run([[response, json.loads(truth)] for response, truth in todo])
        each = 1000 * (time.perf_counter() - begin) / len(todo)
        grades: dict[Key, Grade] = {}
        for job, reply in zip(todo, replies, strict=True):
            grade = plugin.grade(reply, self.grading.correct_at)
            grades[job] = replace(grade, milliseconds=each)
            if failed := plugin.failure(reply, grade):
                self._reasons[event(grade)] = failed.error
                self._log.add(job[0], job[1], failed)
        return grades


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


def _check(grading: GradingConfig, reward: str) -> None:
    if reward not in FORMATS and not names_function(reward):
        raise ConfigError(f"reward={reward} is none of {', '.join(FORMATS)}: name one, or a plug-in as module:function")
    ranges = out_of_range({f"grading.{name}": value for name, value in vars(grading).items()})
    if bad := [*wrong_choices(grading, "grading."), *ranges]:
        raise ConfigError("; ".join(bad))


def _renew_after_fork() -> None:
    """In a forked child: locks may be held by threads that are gone, and the workers are the parent's."""
    for grader in list(_graders):
        grader._cache.after_fork()
        grader._pool.after_fork()


os.register_at_fork(after_in_child=_renew_after_fork)
