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
from rlreason.evaluation.accuracy import PURPOSE, eval_metrics, mismatches_of, questions_of, same_answers
from rlreason.evaluation.protocol import Protocol, make_protocol
from rlreason.grading import Grader
from rlreason.grading.build import grading_settings, reward_name_of
from rlreason.health.watch import Monitors
from rlreason.model.chat import prompt_facts
from rlreason.records.console import Console
from rlreason.records.files import EVALS
from rlreason.records.rows import Counters
from rlreason.records.writer import RunWriter
from rlreason.types import Problem, Sample, ScoredResponse

if TYPE_CHECKING:
    from rlreason.model.policy import LogProbScorer


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scored responses, problem by problem, and their `eval/...` metrics."""

    samples: list[Sample]
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Samples and grades by the evaluation protocol, which may differ from training; for training runs and jobs."""

    settings: EvalProtocolConfig
    rollouts: Rollouts
    sampling: Sampling
    scorer: "LogProbScorer"  # at the evaluation's temperature
    grader: Grader  # decides what is correct
    second_grader: Grader | None  # of the prompt's own reward, where another decides

    @property
    def rewards(self) -> tuple[str, str | None]:
        """The names of the reward that counts and of the second one, if any."""
        return self.grader.reward, None if self.second_grader is None else self.second_grader.reward

    def evaluate(self, problems: Sequence[Problem], step: int | None, monitors: Monitors) -> Evaluation:
        """Sample the protocol's number of responses to each problem, score them and compute the metrics."""
        samples = self.rollouts.sample(problems, self.sampling, self.settings.samples, PURPOSE)
        self.rollouts.report("measuring entropies")
        scored = score_samples(samples, self.scorer)
        return Evaluation(scored, self.figures(scored, mismatches_of(scored, self.sampling), problems, step, monitors))

    def figures(
        self,
        samples: Sequence[ScoredResponse],
        mismatches: Sequence[float],
        problems: Sequence[Problem],
        step: int | None,
        monitors: Monitors,
    ) -> dict[str, float]:
        """Compute the metrics of scored responses to these problems, and warn. `step`: None without steps."""
        metrics = eval_metrics(samples, mismatches, questions_of(problems)) | same_answers(
            samples, [p.answer for p in problems], self.grader
        )
        monitors.check(step, metrics)
        monitors.check_grades(step, self.warnings(samples), "" if step is None else "in evaluation: ")
        return metrics

    def warnings(self, samples: Sequence[ScoredResponse]) -> list[str]:
        """Return the warnings of both graders about these samples, one sentence each."""
        warnings = self.grader.warnings([s.grade for s in samples])
        if self.second_grader is not None:
            warnings += self.second_grader.warnings([s.prompt_grade for s in samples if s.prompt_grade is not None])
        return list(dict.fromkeys(warnings))

    def prompts(self, samples: Sequence[Sample]) -> list[str]:
        """Return the prompt of each sample, as the model read it."""
        decode = self.scorer.policy.tokenizer.decode
        texts = {s.group: str(decode(s.response.prompt_ids, clean_up_tokenization_spaces=False)) for s in samples}
        return [texts[s.group] for s in samples]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation of a training run."""

    samples: list[Sample]  # the first to each interim problem, in order
    metrics: dict[str, float]  # eval/... of all samples to the interim problems: comparable with the others
    whole: dict[str, float]  # eval/... of all problems: in the last evaluation, the whole split
    problems: Sequence[Problem]  # all problems of this evaluation
    last: bool  # whether these are the whole split


@dataclass(frozen=True, slots=True)
class UnrecordedEvaluation:
    """An evaluation that is not in the records yet."""

    evaluated: Evaluated
    samples: list[Sample]  # all of them, problem by problem
    prompts: list[str]  # one for each sample
    seconds: float


@dataclass
class Validation:
    """The evaluations of a training run: of the same problems each time, and of all problems at the end."""

    evaluator: Evaluator
    interim_problems: Sequence[Problem]  # a subset of the final ones
    final_problems: Sequence[Problem]
    records: RunWriter
    monitors: Monitors
    counters: Counters
    console: Console
    history: list[Evaluated] = field(default_factory=list)

    def measure(self, step: int, last: bool = False) -> UnrecordedEvaluation:
        """Sample, score and warn. `step`: the number of finished steps, for warnings."""
        evaluator, started = self.evaluator, time.monotonic()
        problems = self.final_problems if last else self.interim_problems
        name, again = ("last evaluation", False) if last else ("evaluation", bool(self.history))
        waits = self.console.wait(name, logged=again, more=evaluator.rollouts.progress_text)
        with waits, self.counters.clock.phase("eval"):
            found = evaluator.evaluate(problems, step, self.monitors)
        evaluated, prompts = self._interim_part(found, problems, last), evaluator.prompts(found.samples)
        return UnrecordedEvaluation(evaluated, found.samples, prompts, time.monotonic() - started)

    def record(self, measured: UnrecordedEvaluation, step: int, between_updates: bool = False) -> Evaluated:
        """Write an evaluation to the records. `step`: for the file's name, as in `measure`."""
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

    def _interim_part(self, found: Evaluation, problems: Sequence[Problem], last: bool) -> Evaluated:
        """Compute the metrics of the interim problems alone, which are comparable over the run."""
        n, samples, metrics = self.evaluator.settings.samples, found.samples, found.metrics
        if problems is not self.interim_problems:
            places = {p.id: place for place, p in enumerate(problems)}
            samples = [s for p in self.interim_problems for s in found.samples[places[p.id] * n :][:n]]
            mismatches = mismatches_of(samples, self.evaluator.sampling)
            metrics = eval_metrics(samples, mismatches, questions_of(self.interim_problems))
        return Evaluated(samples[::n], metrics, found.metrics, problems, last)

    @property
    def accuracy(self) -> float:
        """The latest accuracy on the interim problems."""
        return self.history[-1].metrics["eval/accuracy"]


#: Settings of `sampling` and `grading` that are not part of a protocol, with the reason. Every other field is, so that
#: accuracies under different values of a new setting are not compared.
LEFT_OUT = {
    "grading.workers": "how many processes share the work changes its speed, not a verdict",
    "grading.start_timeout_s": "ends a run whose processes do not start; it decides no verdict",
    "grading.memory_mb": "bounds those processes; an answer that needs more is undecided, which a grade says of itself",
}


def protocol_of(
    evaluation: EvalProtocolConfig, problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> Protocol:
    """Return the protocol by which these problems are sampled and graded; `tokenizer` has the chat template.

    Prompts that come with the data are part of its hash. The engine is left out, since engines differ only by
    rounding, and so is a second reward, which does not count.
    """
    templated = any(p.prompt is None for p in problems)
    reward = reward_name_of(evaluation.reward, evaluation.data)
    grading = grading_settings(evaluation.grading, reward)
    if grading.get("correct_at", 1.0) is None:  # the same as 1
        grading["correct_at"] = 1.0
    return make_protocol(
        **(prompt_facts(evaluation.prompt, tokenizer) if templated else {"prompt": "(given with the data)"}),
        reward=reward,
        grading=protocol_settings("grading", grading),
        sampling=protocol_settings("sampling", asdict(evaluation.sampling)),
        stop=evaluation.prompt.stop,
        data=fingerprint(problems, asked_only=True),
        problems=len(problems),
        samples=evaluation.samples,
    )


def protocol_settings(group: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a group that are part of a protocol."""
    return {key: value for key, value in settings.items() if f"{group}.{key}" not in LEFT_OUT}
