"""`Grader` turns responses and ground truths into grades, in order and in bounded time.

Equal pairs are graded once; failures of the workers are logged, and `grading_metrics` counts what came out.
"""

import hashlib
import json
import math
import os
import statistics
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rlreason.config.groups import GradingConfig, names_function
from rlreason.config.rules import wrong_values
from rlreason.errors import ConfigError
from rlreason.grading import plugin
from rlreason.grading.answers.compare import better, decide
from rlreason.grading.answers.lexer import ComparisonSettings, Verdict
from rlreason.grading.formats import FORMATS, Extracted, candidates
from rlreason.grading.pool import Pool, PoolReply
from rlreason.grading.worker import WorkerOptions
from rlreason.runtime.plugins import announced, for_workers
from rlreason.runtime.text import redacted
from rlreason.types import Grade

#: Of a list, any member is right.
GroundTruth = str | int | float | list[str | int | float]


def reference_answers(ground_truth: Any) -> list[str] | None:
    """Return the texts that count as right, or None for a value that cannot be compared with an answer.

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
CACHE_CHARS = 4_000  # longer texts are not cached
CacheKey = tuple[Any, ...]  # of texts, the answer first


def digest(key: CacheKey) -> str:
    """Hash a pair to 32 hex digits."""
    return hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class GradeCache:
    """A thread-safe cache of the grades of recently used pairs.

    Pairs that a resumed run graded before its checkpoint are known without their grade: None.
    """

    def __init__(self) -> None:
        self._grades: OrderedDict[str, Grade | None] = OrderedDict()
        self._lock = threading.Lock()

    def known(self, keys: Iterable[CacheKey]) -> dict[CacheKey, Grade | None]:
        """Return the grades of the keys that are cached."""
        with self._lock:
            return {key: self._grades[found] for key in keys if (found := digest(key)) in self._grades}

    def remember(self, used: Iterable[CacheKey], fresh: Mapping[CacheKey, Grade]) -> None:
        """Add fresh grades, except failures and long texts; drop those that were used longest ago."""
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
        """Return the digests of the cached pairs, recently used ones last."""
        with self._lock:
            return list(self._grades)

    def load_digests(self, digests: Sequence[str]) -> None:
        """Replace the cache by these pairs, without their grades."""
        with self._lock:
            self._grades = OrderedDict.fromkeys(digests)

    def after_fork(self) -> None:
        """Replace the lock in a forked child: a thread that is gone may hold it."""
        self._lock = threading.Lock()


MAX_LINES = 1000
MAX_CHARS = 400


class IncidentLog:
    """Append incidents to a file up to a limit. A file that cannot be written does not stop a run; see `failed`."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path else None
        self.left = MAX_LINES
        self.failed = ""

    def add(self, answer: str, ground_truth: str, reply: PoolReply) -> None:
        """Append a line for the pair and its result; nothing beyond the limit or without a file."""
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
    """Grades responses by a named format or a plug-in; see `grade_batch`. Close it, or use it in a `with`.

    `read` and `same` are its two steps for one response: extract the answer, and compare two answers.
    """

    def __init__(
        self,
        grading: GradingConfig | None = None,
        reward: str | Callable[..., Any] = "r1_zero",
        log_path: str | Path | None = None,
        symbolic: bool = True,
    ) -> None:
        """`grading`: None takes the defaults. `reward`: a format's name, `module:function`, a name that a package
        announced, or a function (response, ground truth) -> reward. `symbolic`: have the worker processes decide what
        the exact rules cannot. `ConfigError` for an invalid setting.
        """
        if isinstance(reward, str) and ":" not in reward:
            reward = reward if reward in FORMATS else announced("prompt.reward").get(reward, reward)
        name, sent = for_workers(reward)
        self.grading = grading or GradingConfig()
        _check(self.grading, name)
        self.reward, self.symbolic = name, symbolic
        self.plugin = name if ":" in name else None
        self.comparison = ComparisonSettings()
        if not self.plugin:  # a plug-in compares answers by its own rules
            self.comparison = ComparisonSettings(self.grading.percent, self.grading.rel_tol)
        options = WorkerOptions(self.grading.memory_mb, self.plugin, sent)
        self._pool = Pool(self.grading.workers, self.grading.timeout_s, self.grading.start_timeout_s, options)
        self._warned_unlimited = False
        self._log = IncidentLog(log_path)
        self._cache = GradeCache()
        self._reasons: dict[str, str] = {}  # kind of failure -> the plug-in's last error of that kind
        _graders.add(self)

    def start(self) -> None:
        """Start the workers now, before CUDA is initialized; else the first answer that needs one starts them."""
        if self.symbolic or self.plugin:
            self._pool.start()

    def wait(self) -> str:
        """Wait until the workers are ready; return why they cannot start, or an empty text."""
        return self._pool.wait()

    def read(self, response: str) -> Extracted:
        """Extract the answer of a response. Raises `ValueError` for a plug-in, which does not tell its answer.

        >>> Grader().read("so </think> <answer>38</answer>").answer, Grader().read("38").reason
        ('38', 'no </think>')
        """
        if self.plugin:
            raise ValueError(f"{self.plugin} reads responses by rules of its own")
        extracted = FORMATS[self.reward].read(response)
        if extracted.answer is None:
            return extracted
        return extracted._replace(candidates=tuple(candidates(extracted.answer, self.grading.extract)))

    def same(self, answer: str, reference: str) -> bool:
        """Whether two answers are equal by the exact rules; False where only the symbolic library could decide.

        >>> Grader().same("1/2", "0.5"), Grader().same("It is 38.", "38")
        (True, False)
        """
        texts = candidates(answer, self.grading.extract)
        return decide(texts, [reference], self.comparison)[0].outcome == "correct"

    def grade(self, response: str, ground_truth: GroundTruth) -> Grade:
        """Grade one response; for many, `grade_batch` uses the workers in parallel.

        >>> Grader().grade("2 + 2 = 4 </think> <answer>4</answer>", "4").reward
        1.0
        """
        return self.grade_batch([response], [ground_truth])[0]

    def grade_batch(self, responses: Sequence[str], ground_truths: Sequence[GroundTruth]) -> list[Grade]:
        """Return one grade per response, in order. Equal (answer, ground truth) pairs are decided once and cached.

        Raises `WaitError` where no worker starts in time. `grading_metrics` and `grading_warnings`
        count the results.
        """
        if len(responses) != len(ground_truths):
            counts = f"{len(responses)} responses and {len(ground_truths)} ground truths"
            raise ValueError(f"grade_batch got {counts}: give one ground truth for each response")
        jobs = [self._grade_or_key(response, truth) for response, truth in zip(responses, ground_truths, strict=True)]
        fresh: dict[CacheKey, Grade] = {}
        cached = self._cache.known(job for job in jobs if isinstance(job, tuple))
        todo = list(dict.fromkeys(job for job in jobs if isinstance(job, tuple) and not cached.get(job)))
        if todo:
            fresh = self._grade_by_plugin(todo) if self.plugin else self._grade_by_rules(todo)
        grades, worked_out = list[Grade](), {job for job in todo if job not in cached}
        for job in jobs:
            if isinstance(job, Grade):
                grades.append(job)
            elif job in worked_out:
                worked_out.remove(job)
                grades.append(fresh[job])
            else:
                grades.append(replace(cached.get(job) or fresh[job], milliseconds=None, remembered=True))
        self._cache.remember(cached, fresh)
        return grades

    def remembered(self) -> list[str]:
        """Return the digests of the cached pairs, for a checkpoint."""
        return self._cache.digests()

    def load_remembered(self, pairs: Sequence[str]) -> None:
        """Load a checkpoint's pairs, so that a resumed run counts the same cache hits as an uninterrupted one."""
        self._cache.load_digests(pairs)

    def unearnable(self, ground_truths: Sequence[GroundTruth]) -> list[int]:
        """Return the indices of ground truths that are graded wrong when a response states them word for word.

        A plug-in's response format is unknown, so nothing can be checked for one.
        """
        if self.plugin:
            return []
        written = FORMATS[self.reward].written
        responses = [written.format((reference_answers(truth) or [""])[0]) for truth in ground_truths]
        grades = self.grade_batch(responses, ground_truths)
        return [index for index, grade in enumerate(grades) if grade.outcome != "correct"]

    def warnings(self, grades: Sequence[Grade]) -> list[str]:
        """Return warnings about failures in these grades and doubtful settings, one sentence each."""
        warnings = grading_warnings(grades, self._reasons) + ([f"grading: {self.broken}"] if self.broken else [])
        if (unlimited := self._pool.unlimited) and not self._warned_unlimited:
            warnings.append(unlimited)
            self._warned_unlimited = True
        if self.plugin:
            warnings += plugin.correct_at_warnings(self.plugin, grades, self.grading.correct_at)
        return warnings

    @property
    def broken(self) -> str:
        """Why no worker process can start any more, in one sentence; empty where they can."""
        return self._pool.broken

    def why_not(self, grade: Grade) -> str:
        """Return why a plug-in gave no reward for the last response with this grade, in one sentence."""
        return self.broken or self._reasons.get(event(grade), "")

    def close(self) -> None:
        """End the worker processes. The grader still works afterwards and starts new ones when needed."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _grade_or_key(self, response: Any, ground_truth: Any) -> Grade | CacheKey:
        """Return the grade where the format decides it, else the key of the comparison to make."""
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

    def _grade_by_rules(self, todo: list[CacheKey]) -> dict[CacheKey, Grade]:
        verdicts: dict[CacheKey, Verdict] = {}
        milliseconds: dict[CacheKey, float] = {}
        undecided: list[tuple[CacheKey, str, str]] = []
        for job in todo:
            begin = time.perf_counter()
            verdict, pairs = decide(candidates(job[0], self.grading.extract), job[1:], self.comparison)
            verdicts[job] = verdict
            if self.symbolic:
                undecided += [(job, *pair) for pair in pairs]
            milliseconds[job] = 1000 * (time.perf_counter() - begin)
        begin = time.perf_counter()
        replies = self._pool.run([pair for _, *pair in undecided])
        waited = 1000 * (time.perf_counter() - begin) / max(1, len(undecided))  # each, on average
        for (job, answer, reference), reply in zip(undecided, replies, strict=True):
            verdict = _symbolic_verdict(reply)
            verdicts[job] = better(verdicts[job], verdict)
            milliseconds[job] += waited
            if verdict.outcome in ("timeout", "error"):
                self._log.add(answer, reference, reply)
        return {job: replace(_grade(verdict), milliseconds=milliseconds[job]) for job, verdict in verdicts.items()}

    def _grade_by_plugin(self, todo: list[CacheKey]) -> dict[CacheKey, Grade]:
        begin = time.perf_counter()
        replies = self._pool.run([[response, json.loads(truth)] for response, truth in todo])
        each = 1000 * (time.perf_counter() - begin) / len(todo)
        grades: dict[CacheKey, Grade] = {}
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


def _symbolic_verdict(reply: PoolReply) -> Verdict:
    if reply.status == "ok":
        return Verdict(reply.value["outcome"], reply.value["path"])
    if reply.status == "timeout":
        return Verdict("timeout", "symbolic")
    return Verdict("error", "killed" if reply.status == "killed" else "symbolic")


def _check(grading: GradingConfig, reward: str) -> None:
    if reward not in FORMATS and not names_function(reward):
        raise ConfigError(f"reward={reward} is none of {', '.join(FORMATS)}: name one, or a plug-in as module:function")
    if bad := wrong_values(grading, "grading."):
        raise ConfigError("; ".join(bad))


def _renew_after_fork() -> None:
    """Renew locks in a forked child, which threads that are gone may hold, and forget the parent's workers."""
    for grader in list(_graders):
        grader._cache.after_fork()
        grader._pool.after_fork()


os.register_at_fork(after_in_child=_renew_after_fork)


WARN_SHARE = 0.005  # of the responses of a batch


COUNTED = {
    "timeouts": "ran out of time",
    "kills": "killed their worker",
    "errors": "ended in an error of the grader or the plug-in",
    "bad_golds": "have no usable ground truth (null, or not a string, number or list)",
}


def grading_metrics(grades: Sequence[Grade]) -> dict[str, float]:
    """Return `grading/...`: shares of formats, right answers and deciding rules, failures by kind, milliseconds.

    >>> right = Grade(1.0, 1.0, 1.0, "correct", "number")
    >>> m = grading_metrics([right, Grade(1.0, 0.1, 0.1, "wrong", "plugin")])
    >>> m["grading/answer_rate"], m["grading/path/number"], m["grading/timeouts"]
    (0.5, 0.5, 0.0)
    """
    if not grades:
        return {}
    n, events = len(grades), Counter(map(event, grades))
    formatted = sum(grade.format > 0 for grade in grades)
    correct = sum(grade.outcome == "correct" for grade in grades)
    rates = {
        "format_rate": formatted / n,
        "answer_rate": correct / n,
        "answer_given_format": correct / max(1, formatted),
        "cache_hit_rate": sum(grade.remembered for grade in grades) / n,
    }
    times = sorted(grade.milliseconds for grade in grades if grade.milliseconds is not None)
    if times:
        rates |= {"ms_median": statistics.median(times), "ms_p99": times[int(0.99 * (len(times) - 1))]}
    counts = {name: float(events[name]) for name in (*COUNTED, "refusals", "bad_responses")}
    paths = {f"path/{path}": count / n for path, count in sorted(Counter(g.path for g in grades).items())}
    return {f"grading/{name}": value for name, value in ({"responses": float(n)} | rates | counts | paths).items()}


def grading_warnings(grades: Sequence[Grade], reasons: Mapping[str, str] | None = None) -> list[str]:
    """Return one sentence for each kind of failure of more than 0.5% of the responses.

    `reasons`: for a kind of failure, the cause of the last one, where it is known.
    """
    last = {name: f" (the last: {reason})" for name, reason in (reasons or {}).items()}
    events, n = Counter(map(event, grades)), len(grades)
    return [
        f"grading: {events[name]} of {n} responses ({events[name] / n:.1%}) {words}{last.get(name, '')}; "
        "they earned no reward, and that says nothing about the model"
        for name, words in COUNTED.items()
        if events[name] > WARN_SHARE * n
    ]


def grading_failures(grades: Sequence[Grade]) -> int:
    """Count the failures of the grader, which count as not correct and say nothing about the model."""
    return sum(event(grade) in COUNTED for grade in grades)


def event(grade: Grade) -> str:
    """Return the counter of a grade; `plain` for verdicts, which are no failures of the grader."""
    if grade.outcome == "error":
        return {"killed": "kills", "bad_gold": "bad_golds", "bad_response": "bad_responses"}.get(grade.path, "errors")
    return {"timeout": "timeouts", "refused": "refusals"}.get(grade.outcome, "plain")
