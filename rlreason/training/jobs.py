"""Run the jobs that do not train: `algorithm=evaluate` and `algorithm=best_of_n`.

Finished problems are on disk at once; an interrupted job resumes with the others. Each problem has its own random
numbers, and entropies and log-probabilities are measured at the end in the order of the problems: the file does
not depend on where the job was interrupted, as far as the engine rounds alike in batches of other rows. It does with
the tiny model; with a real one some responses take another turn, in bfloat16 many, all drawn with the same
probabilities.
"""

import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlreason.config.algorithms import BestOfNConfig, EvalJobConfig, EvaluateConfig
from rlreason.config.conflicts import sampling_key
from rlreason.config.run import RunConfig
from rlreason.data.sources import question_hash
from rlreason.engines.rollouts import SamplingProgress, score_samples
from rlreason.errors import ConfigError, DataError
from rlreason.evaluation.accuracy import (
    PURPOSE,
    SampleFigures,
    answer_classes,
    best_at,
    describe_accuracies,
    draw_best_of_n,
    figures_of,
    is_correct,
    is_exact,
    majority_at,
    mismatches_of,
    more_accuracies,
    pass_at,
    proportion_with_ci,
    questions_of,
    subsets_of,
)
from rlreason.evaluation.cases import (
    by_facts,
    case_text,
    categories,
    category_table,
    curves_table,
    fact_tables,
    figure_lines,
    reasons,
    ungraded,
)
from rlreason.evaluation.evaluator import protocol_of
from rlreason.evaluation.protocol import Protocol, format_accuracy
from rlreason.grading import Grader
from rlreason.health.watch import Monitors
from rlreason.model.policy import weights_hash
from rlreason.records.console import Console
from rlreason.records.files import BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE, PASS_RATES, RESPONSES
from rlreason.records.reader import time_summary
from rlreason.records.rows import Counters, ResponseLog, Row, numbered_row
from rlreason.records.writer import RunWriter
from rlreason.runtime.intervals import Floats, bootstrap_intervals, of_clusters, wilson_interval
from rlreason.runtime.plugins import NotImportableError, describe_error, load
from rlreason.runtime.text import few
from rlreason.training.build import Components, build_components
from rlreason.training.summary import describe_job, print_loggers, run_facts, short_path
from rlreason.types import Problem, Sample, ScoredResponse

SHOWN_CHARS = 400  # of a response in the terminal


BLOCK, BLOCK_TOKENS = 4096, 2**22  # responses and tokens sampled before they are scored and written: 0.7 GB


@dataclass(frozen=True, slots=True)
class Responses:
    """All responses of a job, problem by problem, with grades and log-probabilities."""

    problems: list[Problem]
    samples: list[SampleFigures]
    examples: list[Sample]  # the first response to each of the first problems, to be printed
    metrics: dict[str, float]  # eval/...
    protocol: Protocol
    weights: str
    finished_before: int  # problems, by an interrupted job
    seconds: float  # of sampling, in this process
    tokens_per_second: float
    notices: dict[str, int]  # warnings of the monitors, and how often
    verdict: tuple[str, str]  # (status, reason)


@dataclass(slots=True)
class ResponseTotals:
    """Running totals of the responses so far; everything else about them is on disk."""

    samples: list[SampleFigures] = field(default_factory=list)
    mismatches: "array[float]" = field(default_factory=lambda: array("d"))  # of every token
    examples: list[Sample] = field(default_factory=list)
    tokens: int = 0  # sampled by this process
    seconds: float = 0.0  # of sampling


def respond(run: EvalJobConfig, components: Components, records: RunWriter, console: Console) -> Responses:
    """Sample and record the responses to the run's problems; call `conclude` after it."""
    evaluator, n = components.evaluator, components.evaluator.settings.samples
    problems = job_problems(run, components)
    key = "data" if run.eval.data is None else "eval.data"
    check_askable(problems, f"split={run.split} of {key}={evaluator.settings.data.name}", key)
    protocol = protocol_of(evaluator.settings, problems, components.policy.tokenizer)
    weights = weights_hash(components.policy.named_weights())
    log = records.open_log(f"protocol {protocol['hash']}, weights {weights}", problems, n)
    finished = len(log.samples)
    if finished:
        console.say(f"{finished} of {len(problems)} problems were finished before the interruption and are kept")
    records.clock.begin()
    totals = sample_all(run, components, problems, log, records, console)
    monitors = Monitors(1, console.say, run.monitors, sampling_key(run, "max_tokens"), steps=False)
    metrics = evaluator.figures(totals.samples, totals.mismatches, problems, None, monitors)
    pass_rates: list[Row] = [  # for curricula (data.pass_rates)
        {
            "problem_id": p.id,
            "question_hash": question_hash(p.question),
            "samples": n,
            "correct": sum(map(is_correct, totals.samples[i * n : (i + 1) * n])),
        }
        for i, p in enumerate(problems)
    ]
    records.rows(PASS_RATES, pass_rates)
    return Responses(
        problems=problems,
        samples=totals.samples,
        examples=totals.examples,
        metrics=metrics,
        protocol=protocol,
        weights=weights,
        finished_before=finished,
        seconds=totals.seconds,
        tokens_per_second=totals.tokens / max(totals.seconds, 1e-9),
        notices=dict(monitors.counts),
        verdict=monitors.reason_to_stop() or ("finished", ""),
    )


def sample_all(
    run: EvalJobConfig,
    components: Components,
    problems: Sequence[Problem],
    log: ResponseLog,
    records: RunWriter,
    console: Console,
) -> ResponseTotals:
    """Sample, score and record the responses to all problems, block by block.

    A block is as large as its tokens may be at once in memory; most evaluations are a single block.
    """
    evaluator, n, totals = components.evaluator, components.evaluator.settings.samples, ResponseTotals()
    rows, most = run.rollout.max_rows, evaluator.sampling.max_tokens
    progress = SamplingProgress(console, len(problems) * n, log, rows, most)
    size = max(1, max(min(BLOCK_TOKENS // most, BLOCK), 4 * rows) // n)
    with records.growing(RESPONSES) as write:
        for first in range(0, len(problems), size):
            block = problems[first : first + size]
            with records.clock.phase("eval"):
                samples = sample_block(components, block, log, progress, console, totals)
                with console.wait(f"measuring entropies of {len(samples)} responses"):
                    scored = score_samples(samples, evaluator.scorer)
            write(rows_of(scored, block, n, components))
            totals.samples += map(figures_of, scored)
            totals.mismatches += mismatches_of(scored, evaluator.sampling)
            totals.examples += scored[::n][: run.log_generations - len(totals.examples)]
    return totals


def job_problems(run: EvalJobConfig, components: Components) -> list[Problem]:
    """Return the problems of the chosen split, as many as the settings allow."""
    most = components.evaluator.settings.final_problems
    return components.train_problems[:most] if run.split == "train" else components.final_problems


def sample_block(
    components: Components,
    problems: Sequence[Problem],
    log: ResponseLog,
    progress: SamplingProgress,
    console: Console,
    totals: ResponseTotals,
) -> list[Sample]:
    """Return the samples, problem by problem; count tokens and seconds of those not yet in the log in `totals`."""
    evaluator, left = components.evaluator, [p for p in problems if p.id not in log.samples]
    n = evaluator.settings.samples

    def finished(number: int, sample: Sample) -> None:
        log.add(number, sample)
        progress.add(sample)

    began = time.monotonic()
    try:
        with console.wait("sampling", more=evaluator.rollouts.progress_text):
            fresh = evaluator.rollouts.sample(left, evaluator.sampling, n, PURPOSE, finished) if left else []
    except KeyboardInterrupt as stopped:
        state = f"with {progress.answered} of {progress.wanted} responses kept"
        raise type(stopped)(f"{stopped} {state}".strip()) from None
    totals.seconds += time.monotonic() - began
    totals.tokens += sum(s.length for s in fresh)
    by_problem = {p.id: fresh[i * n : (i + 1) * n] for i, p in enumerate(left)}
    return [s for p in problems for s in by_problem.get(p.id) or log.samples.pop(p.id)]


def check_askable(problems: Sequence[Problem], where: str, key: str = "data") -> None:
    """Refuse an empty split, and problems without a ground truth.

    `key`: of the data's settings, `data` or `eval.data`.
    """
    if not problems:
        raise DataError(f"{where} holds no problems: give data, or choose the other split")
    without = [p.id for p in problems if not p.answer.strip()]
    if without:
        raise DataError(
            f"{len(without)} of {len(problems)} problems in {where} have an empty ground truth ({few(without)}), so "
            f"nothing can be graded there: complete or remove these rows, or say where it stands ({key}.gold)"
        )


def rows_of(samples: Sequence[Sample], problems: Sequence[Problem], n: int, components: Components) -> Iterator[Row]:
    """Yield the rows of `responses.jsonl`; their log-probabilities are the model's own, at the sampling temperature."""
    prompts = components.evaluator.prompts(samples[::n])
    for place, sample in enumerate(samples):
        measured = [round(log_prob, 4) for log_prob in sample.log_probs or []]
        row = numbered_row(sample, problems[place // n], place % n)
        yield row | {"prompt": prompts[place // n], "log_probs": measured}


def conclude(records: RunWriter, components: Components, responses: Responses, more: dict[str, Any]) -> None:
    """Write the metrics row and then the summary, which marks the job as complete."""
    r = responses
    metrics = r.metrics | {"eval/tokens_per_second": r.tokens_per_second}
    records.metrics(Counters(eval_step=1, clock=records.clock).row() | metrics)
    status, reason = r.verdict
    summary = {
        "status": status,
        "reason": reason,
        "accuracy": metrics["eval/accuracy"],
        "accuracy_interval": [metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]],
        **more_accuracies(metrics, *components.evaluator.rewards),
        **by_facts(r.samples, r.problems),
        "length": metrics["eval/length"],
        "truncated": metrics["eval/truncated"],
        "tokens_per_second": round(r.tokens_per_second, 1),
        **more,
        "eval_problems": len(r.problems),
        "data_sizes": components.sizes,
        "problems_kept_from_before": r.finished_before,
        "notices": r.notices,
        "weights": r.weights,
        **({"start": asdict(components.start)} if components.start else {}),
        "protocol": r.protocol,
        **time_summary(records.clock),
        "seconds": round(r.seconds, 1),  # of sampling
        "threads": torch.get_num_threads(),
    }
    records.summary(summary)


def evaluate_model(run: EvaluateConfig, records: RunWriter, console: Console) -> float:
    """Sample, grade and count; return the accuracy."""
    with job_responses(run, records, console) as (components, responses):
        rows, failed = categories(responses.samples, responses.problems), ungraded(responses.samples)
        conclude(records, components, responses, {"categories": rows, "ungraded": failed})
        print_cases(console, run, components, responses)
        console.table("\n" + category_table(rows))
        console.say(figure_lines(responses.metrics, components.evaluator.sampling.max_tokens, failed))
        for table in fact_tables(by_facts(responses.samples, responses.problems)):
            console.table("\n" + table)
        print_closing(console, components, responses, records.folder)
    return responses.metrics["eval/accuracy"]


@contextmanager
def job_responses(run: EvalJobConfig, records: RunWriter, console: Console) -> Iterator[tuple[Components, Responses]]:
    """Yield (components, responses) of a job, which resumes from the responses already in the folder."""
    components = build_components(run, records.folder, console, clock=records.clock)
    records.loggers = components.loggers
    try:
        records.add_provenance(run_facts(run, components))
        print_start(console, run, components, records.folder, records.resumed)
        yield components, respond(run, components, records, console)
    except KeyboardInterrupt:
        components.loggers.interrupted()
        print_loggers(console, components.loggers)
        raise
    finally:
        components.close()
        components.loggers.abandon()  # still open only if the job failed


def print_start(console: Console, run: EvalJobConfig, components: Components, folder: Path, again: bool) -> None:
    """Print which problems go to which model, and how to resume after an interruption."""
    asks, count = components.evaluator.settings, len(job_problems(run, components))
    each = "one response each" if asks.samples == 1 else f"{asks.samples} responses each"
    console.say(
        f"model      {run.model.name}: {components.policy.describe()}; ready after {components.seconds_to_build:.0f} s"
    )
    prompt = describe_job(run)
    console.say(
        f"asks       {count} {run.split} problems of {asks.data.name}, {each}; {prompt}; {asks.sampling.describe()}"
    )
    counts, second = components.evaluator.rewards
    if second is not None:
        console.say(f"counts     by {counts}, and for comparison by {second}")
    cure = "" if again else "; interrupted? the same command with hydra.run.dir=THAT_FOLDER goes on"
    console.say(f"records    {short_path(folder)}{cure}")


def print_cases(console: Console, run: EvalJobConfig, components: Components, responses: Responses) -> None:
    """Print the first few responses, so that a wrong format or prompt shows early."""
    grader = components.evaluator.grader
    by_id = {p.id: p for p in responses.problems}
    for number, sample in enumerate(responses.examples, 1):
        row = numbered_row(sample, by_id[sample.group], 0)
        console.say("\n" + case_text(number, row, reasons(row, grader), SHOWN_CHARS))


def print_closing(console: Console, components: Components, responses: Responses, folder: Path) -> None:
    """Print the accuracies as they should be quoted, and where the responses are."""
    m = responses.metrics
    for line in describe_accuracies(m["eval/accuracy"], more_accuracies(m, *components.evaluator.rewards)):
        console.say(line)
    figures = (m["eval/accuracy"], m["eval/accuracy_low"], m["eval/accuracy_high"])
    quoted = format_accuracy(*figures, responses.protocol, m.get("eval/questions"))
    console.say(f"{quoted}; {responses.tokens_per_second:.0f} tokens/s, {responses.seconds:.0f} s of sampling")
    console.say(
        f"\nall responses: {short_path(folder / RESPONSES)}; "
        f"to read some: python -m rlreason inspect {short_path(folder)}"
    )
    print_loggers(console, components.loggers)


Scorer = Callable[[str, str], float]  # (question, response) -> a number, the higher the better
Curves = dict[str, list[tuple[float, float, float]]]  # way to choose -> (value, low, high) for each N


def best_of_n(run: BestOfNConfig, records: RunWriter, console: Console) -> float:
    """Sample all responses once and select among them in every way; return the accuracy of a single response."""
    scorer, folder = load_scorer(run.scorer), records.folder
    with job_responses(run, records, console) as (components, responses):
        asks, grader = components.evaluator.settings, components.evaluator.grader
        with console.wait("choosing among the responses"):
            values = estimates(run, responses, grader, scorer)
            curves = with_intervals(values, run.seed, list(questions_of(responses.problems).values()))
        records.document(BEST_OF_N_NUMBERS, as_csv(run.n_list, curves))
        title = f"{run.model.name}, {asks.data.name}, {len(responses.problems)} problems x {asks.samples} samples"
        sampled = f"{describe_job(run)}, {asks.sampling.distribution}"
        subtitle = f"{sampled}, protocol {responses.protocol['hash']}; bands: 95%, over problems"
        with console.wait("drawing the curves"):
            draw_best_of_n(folder / BEST_OF_N_PICTURE, {"": (run.n_list, curves)}, title, subtitle)
        first = first_alone(responses.samples, asks.samples, responses.problems)
        conclude(
            records, components, responses, {"n_list": list(run.n_list), "best_of_n": curves, "first_samples": first}
        )
        print_cases(console, run, components, responses)
        console.table("\n" + curves_table(run.n_list, curves, console.width))
        low, high = first["interval"]
        console.say(
            f"first samples alone: accuracy {first['accuracy']:.3f} ({low:.3f}-{high:.3f}); they are the ones that "
            "algorithm=evaluate draws"
        )
        for line in explanations(run, asks.sampling.distribution, grader):
            console.say(line)
        print_closing(console, components, responses, folder)
        console.say(
            f"curves: {short_path(folder / BEST_OF_N_PICTURE)}, numbers: {short_path(folder / BEST_OF_N_NUMBERS)}"
        )
    return responses.metrics["eval/accuracy"]


def first_alone(samples: Sequence[ScoredResponse], n: int, problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """Return the accuracy of each problem's first response, with its 95% interval.

    It equals that of `algorithm=evaluate`, whose only response to a problem is drawn with the same random numbers.
    `samples` hold n per problem, problem by problem.
    """
    value, low, high = proportion_with_ci(samples[::n], is_correct, questions_of(problems))
    return {"accuracy": value, "interval": [low, high]}


def load_scorer(name: str | None) -> Scorer | None:
    """Load the function `module:function` and try it once."""
    if name is None:
        return None
    try:
        scorer: Scorer = load(name)
        float(scorer("How many?", "probe"))
    except NotImportableError as error:
        raise ConfigError(f"scorer={name}: {error}") from error
    except Exception as error:  # whatever the user's function raises
        raise ConfigError(
            f"scorer={name} fails on ('How many?', 'probe'): {describe_error(error)}: it must return a number for any "
            "question and response"
        ) from error
    return scorer


def estimates(run: BestOfNConfig, responses: Responses, grader: Grader, scorer: Scorer | None) -> dict[str, Floats]:
    """Return each selection's expected success for every problem and N: (problems, len(n_list))."""
    n, at = run.answers, run.n_list
    groups = [responses.samples[i : i + n] for i in range(0, len(responses.samples), n)]
    right = [[is_correct(s) for s in group] for group in groups]
    questions = [p.question for p in responses.problems]
    out = {"pass@N": np.array([[pass_at(n, sum(r), k) for k in at] for r in right])}
    scores: dict[str, list[list[float]]] = {
        "best mean log-prob": [[s.mean_log_prob for s in group] for group in groups],
        "best summed log-prob": [[s.log_prob for s in group] for group in groups],
    }
    if scorer:
        scores["best by scorer"] = [
            [user_score(scorer, run.scorer, q, s) for s in group] for q, group in zip(questions, groups, strict=True)
        ]
    for name, of_groups in scores.items():
        out[name] = np.array([[best_at(s, r, k) for k in at] for s, r in zip(of_groups, right, strict=True)])
    if not grader.plugin:
        subsets = [subsets_of(n, k, run.seed) for k in at]
        classes = [answer_classes([s.text for s in group], grader) for group in groups]
        out["maj@N"] = np.array(
            [[majority_at(c, r, chosen) for chosen in subsets] for c, r in zip(classes, right, strict=True)]
        )
    return out


def user_score(scorer: Scorer, name: str | None, question: str, sample: ScoredResponse) -> float:
    """Return the user scorer's number for a response, or raise `ConfigError`. The responses stay on disk."""
    try:
        score = float(scorer(question, sample.text))
    except Exception as error:  # whatever the user's function raises
        raise ConfigError(
            f"scorer={name} fails on a response to {sample.group} ({type(error).__name__}: {error}): fix it and type "
            "the command again with this hydra.run.dir; nothing is sampled again"
        ) from error
    if not math.isfinite(score):
        raise ConfigError(f"scorer={name} gives {score} for a response to {sample.group}: it must be a finite number")
    return score


def with_intervals(values: dict[str, Floats], seed: int, questions: Sequence[str] = ()) -> Curves:
    """Return means over problems with bootstrap intervals; all selections and all N use the same resampled problems.

    `questions`: of each problem; problems with the same question are resampled together. If all problems have the
    same outcome, resampling says nothing: then it is Wilson's interval over problems.
    """
    together = np.concatenate(list(values.values()), axis=1)
    together = of_clusters(together.T, questions).T if questions else together
    low, high = bootstrap_intervals(together, seed)
    points = list(zip(together.mean(0).tolist(), low.tolist(), high.tolist(), strict=True))
    for column in np.flatnonzero(np.ptp(together, axis=0) == 0).tolist():
        share, problems = points[column][0], len(together)
        points[column] = (share, *wilson_interval(share * problems, problems))
    width = len(points) // len(values)
    return {name: points[i * width : (i + 1) * width] for i, name in enumerate(values)}


def as_csv(n_list: Sequence[int], curves: Curves) -> str:
    """Write the curves as CSV, a line for each selection and N.

    >>> as_csv([1], {"pass@N": [(0.5, 0.25, 0.75)]})
    'N,method,value,low,high\\n1,pass@N,0.5,0.25,0.75\\n'
    """
    rows = [
        f"{n},{name},{v:.6g},{low:.6g},{high:.6g}"
        for name, points in curves.items()
        for n, (v, low, high) in zip(n_list, points, strict=True)
    ]
    return "\n".join(["N,method,value,low,high", *rows]) + "\n"


def explanations(run: BestOfNConfig, distribution: str, grader: Grader) -> list[str]:
    """Return what a reader must know about the columns besides their names."""
    lines = [
        f"log-probabilities are those of the sampled tokens under the model at {distribution}; every number is an "
        f"expectation over N random ones of the {run.answers} samples"
    ]
    if grader.plugin:
        lines.append(f"no maj@N: {grader.plugin} does not say where a response's answer stands")
    elif not all(is_exact(run.answers, k) for k in run.n_list):
        lines.append(f"maj@N: over random subsets (seed {run.seed}) where there are too many to take all")
    return lines


def start(run: RunConfig, records: RunWriter, console: Console) -> float:
    """Run the job, record everything in the folder of `records`, and return the accuracy."""
    match run:
        case BestOfNConfig():
            return best_of_n(run, records, console)
        case EvaluateConfig():
            return evaluate_model(run, records, console)
    raise TypeError(f"{type(run).__name__} is the settings of no job")
