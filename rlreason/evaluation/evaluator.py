"""Evaluate a policy: sample, score, count and warn, by the protocol of the run's settings."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from rlreason.config.evaluation import EvalProtocolConfig
from rlreason.data.sources import fingerprint
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts, score_samples
from rlreason.evaluation.accuracy import PURPOSE, eval_metrics, mismatches_of, questions_of
from rlreason.evaluation.protocol import Protocol, make_protocol
from rlreason.evaluation.selection import same_answers
from rlreason.grading import Grader
from rlreason.grading.build import grading_settings, reward_name_of
from rlreason.health.watch import Monitors
from rlreason.model.chat import prompt_facts
from rlreason.records.console import Console
from rlreason.records.files import EVALS
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.types import Counted, Problem, Sample

if TYPE_CHECKING:
    from rlreason.model.policy import LogProbScorer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scored responses, problem by problem, and their `eval/...` numbers."""

    samples: list[Sample]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Asks and judges by the evaluation protocol, which may differ from training; for training runs and jobs alike."""

    settings: EvalProtocolConfig
    rollouts: Rollouts
    sampling: Sampling
    scorer: "LogProbScorer"  # at the evaluation's temperature
    grader: Grader  # decides what is correct
    second_grader: Grader | None  # of the prompt's own reward, where another decides

    @property
    def rewards(self) -> tuple[str, str | None]:
        """By name: the one that counts, and the one that is kept next to it."""
        return self.grader.reward, None if self.second_grader is None else self.second_grader.reward

    def evaluate(self, problems: Sequence[Problem], step: int | None, monitors: Monitors) -> Evaluation:
        """Sample the protocol's number of responses to each problem, and judge them."""
        samples = self.rollouts.sample(problems, self.sampling, self.settings.samples, PURPOSE)
        self.rollouts.report("measuring entropies")
        scored = score_samples(samples, self.scorer)
        return Evaluation(scored, self.figures(scored, mismatches_of(scored, self.sampling), problems, step, monitors))

    def figures(
        self,
        samples: Sequence[Counted],
        mismatches: Sequence[float],
        problems: Sequence[Problem],
        step: int | None,
        monitors: Monitors,
    ) -> dict[str, float]:
        """Count scored responses to these problems, and warn. `step`: None without steps."""
        metrics = eval_metrics(samples, mismatches, questions_of(problems)) | same_answers(
            samples, [p.answer for p in problems], self.grader
        )
        monitors.check(step, metrics)
        monitors.check_grades(step, self.warnings(samples), "" if step is None else "in evaluation: ")
        return metrics

    def warnings(self, samples: Sequence[Counted]) -> list[str]:
        """What went wrong in grading these, by either grader, in one sentence each."""
        said = self.grader.warnings([s.grade for s in samples])
        if self.second_grader is not None:
            said += self.second_grader.warnings([s.prompt_grade for s in samples if s.prompt_grade is not None])
        return list(dict.fromkeys(said))

    def prompts(self, samples: Sequence[Sample]) -> list[str]:
        """The text that each of these is a response to, as the model read it."""
        decode = self.scorer.policy.tokenizer.decode
        texts = {s.group: str(decode(s.response.prompt_ids, clean_up_tokenization_spaces=False)) for s in samples}
        return [texts[s.group] for s in samples]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation of a training run."""

    samples: list[Sample]  # the first to each interim problem, in order
    metrics: dict[str, float]  # eval/... of all samples to the interim problems: comparable with the others
    whole: dict[str, float]  # eval/... of everything that was asked: in the last evaluation, the whole split
    problems: Sequence[Problem]  # everything that was asked
    last: bool  # whether that was the whole split


@dataclass(frozen=True, slots=True)
class Measured:
    """An evaluation that is not written down yet."""

    evaluated: Evaluated
    samples: list[Sample]  # all of them, problem by problem
    prompts: list[str]  # the text that each was a response to
    seconds: float


@dataclass
class Validation:
    """The evaluations of a training run: the same problems each time, and all others with them in the last one."""

    evaluator: Evaluator
    interim_problems: Sequence[Problem]  # which are among the final ones
    final_problems: Sequence[Problem]
    records: RunWriter
    monitors: Monitors
    counters: Counters
    console: Console
    history: list[Evaluated] = field(default_factory=list)

    def measure(self, step: int, last: bool = False) -> "Measured":
        """Sample, score and warn. `step`: how many steps are finished, for warnings."""
        evaluator, started = self.evaluator, time.monotonic()
        asked = self.final_problems if last else self.interim_problems
        name, again = ("last evaluation", False) if last else ("evaluation", bool(self.history))
        waits = self.console.wait(name, logged=again, more=evaluator.rollouts.drawn)
        with waits, self.counters.clock.phase("eval"):
            found = evaluator.evaluate(asked, step, self.monitors)
        evaluated = self._compared(found, asked, last)
        return Measured(evaluated, found.samples, evaluator.prompts(found.samples), time.monotonic() - started)

    def record(self, measured: "Measured", step: int, between_updates: bool = False) -> Evaluated:
        """Write an evaluation down. `step`: for the file's name, as in `measure`."""
        evaluated = measured.evaluated
        whole = evaluated.whole if evaluated.last else {}
        final = {name.replace("eval/", "final/"): value for name, value in whole.items()}
        self.counters.eval_step += 1
        self.counters.pace["problem"] = measured.seconds / max(len(evaluated.problems), 1)
        self.records.metrics(self.counters.row() | evaluated.metrics | final)
        update = self.counters.train_step if between_updates else None
        samples, prompts = measured.samples, measured.prompts
        self.records.responses(EVALS, step, samples, evaluated.problems, update=update, prompts=prompts)
        self.history.append(evaluated)
        return evaluated

    def _compared(self, found: Evaluation, asked: Sequence[Problem], last: bool) -> Evaluated:
        """Split off the part that is comparable with the other evaluations of the run."""
        n, samples, metrics = self.evaluator.settings.samples, found.samples, found.metrics
        if asked is not self.interim_problems:
            places = {p.id: place for place, p in enumerate(asked)}
            samples = [s for p in self.interim_problems for s in found.samples[places[p.id] * n :][:n]]
            mismatches = mismatches_of(samples, self.evaluator.sampling)
            metrics = eval_metrics(samples, mismatches, questions_of(self.interim_problems))
        return Evaluated(samples[::n], metrics, found.metrics, asked, last)

    @property
    def accuracy(self) -> float:
        """The newest on the interim problems."""
        return self.history[-1].metrics["eval/accuracy"]


#: Settings of `sampling` and `grading` that are no part of a protocol, with the reason. Every other field of these two
#: is one, so that a new number makes accuracies that were measured under different values of it incomparable.
LEFT_OUT = {
    "grading.workers": "how many processes share the work changes its speed, not a verdict",
    "grading.start_timeout_s": "ends a run whose processes do not start; it decides no verdict",
    "grading.memory_mb": "bounds those processes; an answer that needs more is undecided, which a grade says of itself",
}


def protocol_of(
    evaluation: EvalProtocolConfig, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> Protocol:
    """How responses to each of these problems are asked for and judged; `tokenizer` has the chat template.

    Prompts that come with the data are part of its hash. The engine stays out, which may only round otherwise, and so
    does a second reward, which decides nothing.
    """
    templated = any(p.prompt is None for p in problems)
    reward = reward_name_of(evaluation.reward, evaluation.data)
    grading = grading_settings(evaluation.grading, reward)
    if grading.get("correct_at", 1.0) is None:  # which means the same as 1
        grading["correct_at"] = 1.0
    return make_protocol(
        **(prompt_facts(evaluation.prompt, tokenizer) if templated else {"prompt": "(given with the data)"}),
        reward=reward,
        grading=measured_by("grading", grading),
        sampling=measured_by("sampling", asdict(evaluation.sampling)),
        stop=evaluation.prompt.stop,
        data=fingerprint(problems, asked_only=True),
        problems=len(problems),
        samples=evaluation.samples,
    )


def measured_by(group: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a group that are part of a protocol."""
    return {key: value for key, value in settings.items() if f"{group}.{key}" not in LEFT_OUT}
