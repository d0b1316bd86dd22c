"""`Grader` turns responses and ground truths into grades, in order and in bounded time.

Equal pairs are graded once; failures of the workers are logged, and `grading_metrics` counts what came out.
"""

import hashlib
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

from rlreason.config.data import DataConfig
from rlreason.config.groups import GradingConfig
from rlreason.config.rules import wrong_values
from rlreason.config.run import RunConfig, judges
from rlreason.errors import ConfigError
from rlreason.grading.answers.compare import Decision, better, decide
from rlreason.grading.formats import FORMATS, Extracted, candidates
from rlreason.grading.pool import Pool, PoolReply
from rlreason.runtime.plugins import announced, for_workers, names_function
from rlreason.runtime.text import redacted
from rlreason.types import Grade, Outcome

#: Part of the protocol of every accuracy; accuracies of different versions are not compared. `tests/test_grading.py`
#: compares the verdicts on all cases with it and says what to do when one changes.
GRADER_VERSION = 4

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
        if not isinstance(member, str | int | float) or isinstance(member, bool):
            continue
        if member != member:  # not a number
            return None
        try:
            texts.append(str(member))
        except ValueError:  # an integer of more digits than Python prints
            return None
    return texts or None


CACHE_SIZE = 65_536
CacheKey = tuple[Any, ...]  # of texts, the answer first
ROUNDING = 1e-9  # 0.7 + 0.2 + 0.1 is a little less than 1
MAX_INCIDENTS, MAX_CHARS = 1000, 400  # lines of the log of failures, and characters of each text


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
        if isinstance(reward, str) and ":" not in reward and reward not in FORMATS:
            reward = announced("prompt.reward").get(reward, reward)
        self.reward, sent = for_workers(reward)
        self.grading = grading or GradingConfig()
        if self.reward not in FORMATS and not names_function(self.reward):
            raise ConfigError(
                f"reward={self.reward} is none of {', '.join(FORMATS)}: name one, or a plug-in as module:function"
            )
        if bad := wrong_values(self.grading, "grading."):
            raise ConfigError("; ".join(bad))
        self.symbolic = symbolic
        self.plugin = self.reward if ":" in self.reward else None
        self.comparison = GradingConfig() if self.plugin else self.grading  # a plug-in compares by its own rules
        self._pool = Pool(self.grading, self.plugin, sent)
        self._log_path, self._incidents = log_path, 0
        self._lock = threading.Lock()
        #: By the digests of pairs, oldest first; None: graded before the checkpoint of a resumed run.
        self.cache: dict[str, Grade | None] = {}
        self._reasons: dict[str, str] = {}  # kind of failure -> the plug-in's last error of that kind

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

        Raises `WaitError` where no worker starts in time. `grading_metrics` and `warnings`
        count the results.
        """
        if len(responses) != len(ground_truths):
            counts = f"{len(responses)} responses and {len(ground_truths)} ground truths"
            raise ValueError(f"grade_batch got {counts}: give one ground truth for each response")
        jobs = [self._prepared(response, truth) for response, truth in zip(responses, ground_truths, strict=True)]
        texts = {job: repr(job).encode("utf-8", "surrogatepass") for job in jobs if not isinstance(job, Grade)}
        keys = {job: hashlib.blake2b(text, digest_size=16).hexdigest() for job, text in texts.items()}
        with self._lock:
            known = {job: self.cache[key] for job, key in keys.items() if key in self.cache}
        todo = [job for job in keys if known.get(job) is None]
        fresh = self._grade_by_plugin(todo) if self.plugin else self._grade_by_rules(todo)
        grades, seen = list[Grade](), set(known)
        for job in jobs:
            if isinstance(job, Grade):
                grades.append(job)
                continue
            grade = known.get(job) or fresh[job]
            grades.append(replace(grade, milliseconds=None, remembered=True) if job in seen else grade)
            seen.add(job)
        with self._lock:
            self.cache |= {keys[job]: grade for job, grade in fresh.items() if grade.outcome != "error"}
            for oldest in list(self.cache)[:-CACHE_SIZE]:
                del self.cache[oldest]
        return grades

    def warnings(self, grades: Sequence[Grade]) -> list[str]:
        """Return a sentence for each kind of failure of more than 0.5% of the responses and each doubtful setting."""
        events, n, warnings = Counter(map(event, grades)), len(grades), list[str]()
        for name, words in COUNTED.items():
            if events[name] > WARN_SHARE * n:
                last = f" (the last: {self._reasons[name]})" if name in self._reasons else ""
                warnings.append(
                    f"grading: {events[name]} of {n} responses ({events[name] / n:.1%}) {words}{last}; "
                    "they earned no reward, and that says nothing about the model"
                )
        if self._pool.broken:
            warnings.append(f"grading: {self._pool.broken}")
        if not self.plugin:
            return warnings
        top, correct_at = max((grade.answer for grade in grades), default=0.0), self.grading.correct_at
        if correct_at is None and top > 1 + ROUNDING:
            warnings.append(
                f"grading: {self.plugin} gives up to {top:g}, and every response that earns 1 or more counts as "
                f"correct: set grading.correct_at={top:g} where only that is a right answer, or grading.correct_at=1"
            )
        if 0 < top < (correct_at or 1.0) - ROUNDING:
            warnings.append(
                f"grading: no response earned {correct_at or 1.0:g}, from which on one counts as correct; the most was "
                f"{top:g}: set grading.correct_at where that is a right answer, or eval.reward=r1_zero (or another) to "
                "measure right answers apart from what is paid for"
            )
        return warnings

    def why_not(self, grade: Grade) -> str:
        """Return why a plug-in gave no reward for the last response with this grade, in one sentence."""
        return self._pool.broken or self._reasons.get(event(grade), "")

    def close(self) -> None:
        """End the worker processes, for good."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _prepared(self, response: Any, ground_truth: Any) -> Grade | CacheKey:
        """Return the grade where the format decides it, else the key of the comparison to make."""
        if not isinstance(response, str):
            return Grade(0.0, 0.0, 0.0, "error", "bad_response")
        if self.plugin:
            try:
                return response, json.dumps(ground_truth)
            except (TypeError, ValueError, RecursionError):
                return Grade(0.0, 0.0, 0.0, "error", "bad_gold")
        formatted, answer, *_ = FORMATS[self.reward].read(response)
        references = reference_answers(ground_truth)
        if not formatted:
            return Grade(0.0, 0.0, 0.0, "unformatted", "format")
        if references is None:
            return Grade(1.0, 0.0, 0.0, "error", "bad_gold")
        if answer is None or not answer.strip():
            return Grade(1.0, 0.0, 0.0, "wrong", "no_answer")
        return answer, *references

    def _grade_by_rules(self, todo: list[CacheKey]) -> dict[CacheKey, Grade]:
        verdicts, milliseconds = dict[CacheKey, Decision](), dict[CacheKey, float]()
        undecided: list[tuple[CacheKey, str, str]] = []
        for job in todo:
            begin = time.perf_counter()
            verdicts[job], pairs = decide(candidates(job[0], self.grading.extract), job[1:], self.comparison)
            if self.symbolic:
                undecided += [(job, *pair) for pair in pairs]
            milliseconds[job] = 1000 * (time.perf_counter() - begin)
        begin = time.perf_counter()
        replies = self._pool.run([pair for _, *pair in undecided])
        waited = 1000 * (time.perf_counter() - begin) / max(1, len(undecided))  # each, on average
        for (job, answer, reference), reply in zip(undecided, replies, strict=True):
            verdict = reply.value
            if reply.status != "ok":
                verdict = Decision(*reply.failure("symbolic"))
                self._log_incident(answer, reference, reply)
            verdicts[job] = better(verdicts[job], verdict)
            milliseconds[job] += waited
        grades: dict[CacheKey, Grade] = {}
        for job, verdict in verdicts.items():
            right = float(verdict.outcome == "correct")  # a formatted wrong answer earns nothing
            grades[job] = Grade(1.0, right, right, verdict.outcome, verdict.path, milliseconds=milliseconds[job])
        return grades

    def _grade_by_plugin(self, todo: list[CacheKey]) -> dict[CacheKey, Grade]:
        begin = time.perf_counter()
        replies = self._pool.run([[response, json.loads(truth)] for response, truth in todo])
        each = 1000 * (time.perf_counter() - begin) / max(1, len(todo))
        grades: dict[CacheKey, Grade] = {}
        for (response, truth), reply in zip(todo, replies, strict=True):
            if reply.status == "ok" and isinstance(reply.value, list):
                formatted, answer, reward = reply.value
                outcome: Outcome = "wrong" if formatted > 0 else "unformatted"
                if answer >= (self.grading.correct_at or 1.0) - ROUNDING:  # partial credit is no right answer
                    outcome = "correct"
                grade = Grade(formatted, answer, reward, outcome, "plugin", milliseconds=each)
            else:
                grade = Grade(0.0, 0.0, 0.0, *reply.failure("plugin"), milliseconds=each)
                self._reasons[event(grade)] = reply.value
                self._log_incident(response, truth, reply)
            grades[response, truth] = grade
        return grades

    def _log_incident(self, answer: str, ground_truth: str, reply: PoolReply) -> None:
        """Append a line for the pair and its failure; nothing beyond the limit or without a file."""
        self._incidents += 1
        if self._log_path is None or self._incidents > MAX_INCIDENTS:
            return
        record = {
            "time": round(time.time(), 1),
            "status": "error" if reply.status == "ok" else reply.status,
            "error": redacted(reply.value),
            "answer": answer[:MAX_CHARS],
            "answer_chars": len(answer),
            "gold": ground_truth[:MAX_CHARS],
        }
        path = Path(self._log_path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record) + "\n")


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


def grading_failures(grades: Sequence[Grade]) -> int:
    """Count the failures of the grader, which count as not correct and say nothing about the model."""
    return sum(event(grade) in COUNTED for grade in grades)


def event(grade: Grade) -> str:
    """Return the counter of a grade; `plain` for verdicts, which are no failures of the grader."""
    if grade.outcome == "error":
        return {"killed": "kills", "bad_gold": "bad_golds", "bad_response": "bad_responses"}.get(grade.path, "errors")
    return {"timeout": "timeouts", "refused": "refusals"}.get(grade.outcome, "plain")


@dataclass(frozen=True, slots=True)
class Graders:
    """The graders of a run, with running workers. Equal rewards share one grader."""

    training: Grader
    evaluation: Grader
    second: Grader | None  # by the evaluation prompt's reward, where another reward counts
    sets: Mapping[str, Grader] = field(default_factory=dict)  # of each of `eval.sets`

    def all(self) -> list[Grader]:
        """Return each grader once."""
        return list(dict.fromkeys(filter(None, (self.training, self.evaluation, self.second, *self.sets.values()))))

    def close(self) -> None:
        """End their workers."""
        for grader in self.all():
            grader.close()


def make_graders(run: RunConfig, incidents: Path) -> Graders:
    """Start the graders; they log their failures in `incidents`.

    Data with its own verifier determines the reward. A run that learns without grades has no separate training grader.
    """
    evaluation = run.evaluation
    counts = reward_name_of(evaluation.reward, evaluation.data)
    second = reward_name_of(evaluation.prompt_reward, evaluation.data) if evaluation.prompt_reward else ""
    training = reward_name_of(run.prompt.reward, run.data) if run.judges_to_learn else counts
    sets = {name: reward_name_of(*judges(asked)[0]) for name, asked in run.by_set().items()}
    names = {counts, second, training, *sets.values()} - {""}
    graders = {name: Grader(run.grading, name, log_path=incidents) for name in names}
    for grader in graders.values():
        grader.start()
    of_sets = {name: graders[reward] for name, reward in sets.items()}
    return Graders(graders[training], graders[counts], graders.get(second), of_sets)


def grading_settings(grading: GradingConfig, reward: str) -> dict[str, Any]:
    """Return the settings that a grader reads: a plug-in compares answers by its own rules."""
    unread = ("extract", "percent", "rel_tol") if ":" in reward else ("correct_at",)
    return {f.name: getattr(grading, f.name) for f in fields(grading) if f.name not in unread}


def reward_name_of(reward: str, data: DataConfig) -> str:
    """Return the prompt's reward, or the data's own verifier of answers in that prompt's format.

    A user's reward, `module:function`, also grades data with a verifier.

    >>> from rlreason.config.data import CountdownConfig
    >>> reward_name_of("r1_zero", CountdownConfig()), reward_name_of("mine:reward", CountdownConfig())
    ('rlreason.grading.verifiers.countdown:r1_zero', 'mine:reward')
    """
    return reward if ":" in reward or data.verifier is None else f"{data.verifier}:{reward}"


class RunGrading(NamedTuple):
    """What graded a run, as the first arguments of a `Grader`; `reward`: a format's name, or `module:function`."""

    grading: GradingConfig
    reward: str

    @classmethod
    def of(cls, reward: str, verifier: str | None, grading: Mapping[str, Any]) -> "RunGrading":
        """Build it from a run's settings: its prompt's reward, its data's verifier and the group `grading`."""
        return cls(GradingConfig(**grading), reward_name_of(reward, DataConfig(verifier=verifier)))
