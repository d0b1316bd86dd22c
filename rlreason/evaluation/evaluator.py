"""Evaluate a policy: sample, score, count and warn, by the protocol of the run's settings."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
from transformers import PreTrainedTokenizerBase

from rlreason.config.run import EvalProtocolConfig
from rlreason.data.sources import fingerprint
from rlreason.engines.base import Sampling
from rlreason.engines.rollouts import Rollouts, score_samples
from rlreason.evaluation.accuracy import PURPOSE, common_answer, eval_metrics, mismatches_of, questions_of
from rlreason.evaluation.protocol import SEED_RULE, Protocol, grader_version, make_protocol
from rlreason.grading.grader import grading_settings, reward_name_of
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
class Evaluator:
    """Samples and grades by the evaluation protocol, which may differ from that of training."""

    settings: EvalProtocolConfig
    rollouts: Rollouts
    sampling: Sampling
    scorer: "LogProbScorer"  # at the evaluation's temperature

    def scored(self, samples: Sequence[Sample]) -> list[Sample]:
        """Return the samples with the policy's log-probabilities and entropies, or as they are (`eval.score=false`)."""
        return score_samples(samples, self.scorer) if self.settings.score else list(samples)

    def figures(
        self,
        samples: Sequence[ScoredResponse],
        mismatches: Sequence[float],
        problems: Sequence[Problem],
        step: int | None,
        monitors: Monitors,
    ) -> dict[str, float]:
        """Compute the metrics of scored responses to these problems, and warn. `step`: None without steps."""
        grader, second = self.rollouts.grader, self.rollouts.second_grader
        metrics = eval_metrics(samples, mismatches, questions_of(problems))
        if not grader.plugin:
            answers = [grader.read(s.text).answer for s in samples]
            metrics |= common_answer(answers, [p.answer for p in problems], grader.same, "eval")
        monitors.check(step, metrics)
        warnings = grader.warnings([s.grade for s in samples])
        if second is not None:
            warnings += second.warnings([s.prompt_grade for s in samples if s.prompt_grade is not None])
        monitors.check_grades(step, list(dict.fromkeys(warnings)), "" if step is None else "in evaluation: ")
        return metrics

    def prompts(self, samples: Sequence[Sample]) -> list[str]:
        """Return the prompt of each sample, as the model read it."""
        decode = self.scorer.policy.tokenizer.decode
        return [str(decode(s.response.prompt_ids, clean_up_tokenization_spaces=False)) for s in samples]


#: The metrics of each of `eval.sets`, as eval/NAME/accuracy.
OF_SETS = (
    "accuracy", "accuracy_low", "accuracy_high", "format", "truncated", "length", "problems", "questions", "samples",
    "solved_once", "grading_failures",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """A set of problems and how it is measured: one of `eval.sets`, when the run's own is; "" is that one."""

    name: str
    evaluator: Evaluator
    interim_problems: list[Problem]  # a subset of the final ones
    final_problems: list[Problem]

    def problems(self, last: bool) -> list[Problem]:
        """Return those of the last evaluation, or of one on the way."""
        return self.final_problems if last else self.interim_problems

    def warn(self, samples: Sequence[ScoredResponse], step: int | None, monitors: Monitors) -> None:
        """Warn of responses that got no grade. `step`: None without steps."""
        warnings = self.evaluator.rollouts.grader.warnings([s.grade for s in samples])
        monitors.check_grades(step, warnings, f"in evaluation on {self.name}: ")

    def figures(self, samples: Sequence[ScoredResponse]) -> dict[str, float]:
        """Compute the `eval/NAME/...` metrics of graded responses to some of its problems."""
        metrics = eval_metrics(samples, [], questions_of(self.final_problems))
        return {f"eval/{self.name}/{name}": metrics[key] for name in OF_SETS if (key := f"eval/{name}") in metrics}


@dataclass(frozen=True, slots=True)
class Evaluated:
    """One evaluation of a training run."""

    samples: list[Sample]  # the first to each interim problem, in order
    metrics: dict[str, int | float]  # eval/... of all samples to the interim problems: comparable with the others
    whole: dict[str, int | float]  # eval/... of all problems: in the last evaluation, the whole split
    last: bool  # whether these are the whole split
    step: int  # after which it was done
    sets: dict[str, int | float] = field(default_factory=dict)  # eval/NAME/... of all problems of `eval.sets`


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
    sets: Sequence[ValidationSet] = ()  # measured besides
    history: list[Evaluated] = field(default_factory=list)

    def problems_asked(self, last: bool) -> int:
        """Return the number of problems of an evaluation, `eval.sets` included."""
        own = self.final_problems if last else self.interim_problems
        return len(own) + sum(len(one.problems(last)) for one in self.sets)

    def evaluate(self, step: int, last: bool = False) -> None:
        """Sample, score, warn and record: the interim problems, or the `last` time all. `step`: how many are done."""
        evaluator, rollouts, sampling = self.evaluator, self.evaluator.rollouts, self.evaluator.sampling
        began, n = time.monotonic(), evaluator.settings.samples
        problems = self.final_problems if last else self.interim_problems
        waits = self.console.wait("last evaluation" if last else "evaluation", more=rollouts.progress_text)
        with waits, self.counters.clock.phase("eval"):
            sampled = rollouts.sample(problems, sampling, n, PURPOSE)
            rollouts.report("measuring entropies")
            samples = interim = evaluator.scored(sampled)
            mismatches = mismatches_of(samples, sampling)
            whole = metrics = evaluator.figures(samples, mismatches, problems, step, self.monitors)
        if problems is not self.interim_problems:  # whose metrics alone are comparable over the run
            interim = answers_to(self.interim_problems, samples, n)
            metrics = eval_metrics(interim, mismatches_of(interim, sampling), questions_of(self.interim_problems))
        again = bool(self.history) and self.history[-1].step == step  # the evaluation that was due here ended the run
        update, sets, row = self.counters.train_step if again else None, dict[str, int | float](), dict(metrics)
        for one in self.sets:
            asks, each, asked = one.evaluator, one.evaluator.settings.samples, one.problems(last)
            with self.console.wait(f"evaluation on {one.name}"), self.counters.clock.phase("eval"):
                answers = asks.rollouts.sample(asked, asks.sampling, each, PURPOSE)
            one.warn(answers, step, self.monitors)
            sets |= one.figures(answers)
            row |= one.figures(answers_to(one.interim_problems, answers, each))
            prompts = asks.prompts(answers)
            self.records.responses(f"{EVALS}/{one.name}", step, answers, asked, update=update, prompts=prompts)
        row |= {f"final/{name.removeprefix('eval/')}": value for name, value in (whole | sets).items() if last}
        self.counters.eval_step += 1
        self.counters.pace["problem"] = (time.monotonic() - began) / max(self.problems_asked(last), 1)
        self.records.metrics(self.counters.row() | row)
        self.records.responses(EVALS, step, samples, problems, update=update, prompts=evaluator.prompts(samples))
        if len(self.history) > 1:  # the responses of the first and of the newest are shown in the end
            self.history[-1] = replace(self.history[-1], samples=[])
        self.history.append(Evaluated(interim[::n], metrics, whole, last, step, sets))

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the evaluations so far, with the texts of the first and the newest, which are shown in the end."""
        kept: list[dict[str, Any]] = []
        for one in self.history:
            texts = [
                Sample(replace(s.response, prompt_ids=[], token_ids=[], log_probs=[]), s.grade) for s in one.samples
            ]
            kept.append(msgspec.to_builtins(replace(one, samples=texts)))
        return kept

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Resume from this state."""
        self.history += msgspec.convert(state, list[Evaluated])


def answers_to(problems: Sequence[Problem], samples: Sequence[Sample], n: int) -> list[Sample]:
    """Return the responses to some of the problems that were asked, n to each, in the order of these problems."""
    places = {s.group: place for place, s in enumerate(samples[::n])}
    return [s for p in problems for s in samples[places[p.id] * n :][:n]]


#: Settings of `grading` that are not part of a protocol, with the reason. All others and those of `sampling` are, so
#: that accuracies under different values of a new setting are not compared.
LEFT_OUT = (
    "workers",  # how many processes share the work changes its speed, not a verdict
    "start_timeout_s",  # ends a run whose processes do not start; it decides no verdict
    "memory_mb",  # bounds those processes; an answer that needs more is undecided, which a grade says of itself
)


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
    if "correct_at" in grading:
        grading["correct_at"] = grading["correct_at"] or 1.0  # null is the same as 1
    prompt = prompt_facts(evaluation.prompt, tokenizer) if templated else {"prompt": "(given with the data)"}
    return make_protocol(
        {
            **prompt,
            "reward": reward,
            "grader": grader_version(),
            "grading": {key: value for key, value in grading.items() if key not in LEFT_OUT},
            "sampling": asdict(evaluation.sampling),
            "stop": list(evaluation.prompt.stop),
            "seeds": SEED_RULE,
            "data": fingerprint(problems, asked_only=True),
            "problems": len(problems),
            "samples per problem": evaluation.samples,
        }
    )
