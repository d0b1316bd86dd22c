"""Run the jobs that do not train: `algorithm=evaluate` and `algorithm=best_of_n`.

Finished problems are on disk at once; an interrupted job resumes with the others. Each problem has its own random
numbers, and entropies and log-probabilities are measured in the order of the problems: the file does not depend on
where the job was interrupted, as far as the engine rounds alike in batches of other rows. It does with the tiny model;
with a real one some responses take another turn, in bfloat16 many, all drawn with the same probabilities.
"""

import math
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.config.algorithms import BestOfNConfig, EvalJobConfig
from rlreason.config.run import RunConfig
from rlreason.data.sources import question_hash
from rlreason.engines.rollouts import SamplingProgress
from rlreason.errors import ConfigError, DataError
from rlreason.evaluation.accuracy import (
    PURPOSE,
    answer_classes,
    best_at,
    draw_best_of_n,
    figures_of,
    is_correct,
    majority_at,
    mismatches_of,
    pass_at,
    proportion_with_ci,
    questions_of,
    subsets_of,
)
from rlreason.evaluation.cases import (
    CATEGORY_TEXTS,
    by_facts,
    categories,
    curves_table,
    figure_lines,
    share_table,
    ungraded,
)
from rlreason.evaluation.evaluator import Evaluator, protocol_of
from rlreason.grading import Grader
from rlreason.health.watch import Monitors
from rlreason.model.policy import weights_hash
from rlreason.records.console import Console
from rlreason.records.files import BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE, EVALS, PASS_RATES, RESPONSES
from rlreason.records.rows import Counters, ResponseLog, Row, response_row, write_rows
from rlreason.records.writer import RunWriter
from rlreason.runtime.plugins import describe_error, load
from rlreason.runtime.statistics import bootstrap_intervals, of_clusters, wilson_interval
from rlreason.runtime.text import few
from rlreason.training.build import Components, build_components, evaluation_problems, start_records
from rlreason.training.progress import common_summary, print_accuracies, print_responses, sets_summary
from rlreason.types import Problem, Sample, SampleFigures

BLOCK, BLOCK_TOKENS = 4096, 2**22  # responses and tokens sampled before they are scored and written: 0.7 GB
Scorer = Callable[[str, str], float]  # (question, response) -> a number, the higher the better
Curves = dict[str, list[tuple[float, float, float]]]  # way to choose -> (value, low, high) for each N


def start(run: RunConfig, records: RunWriter, console: Console) -> float:
    """Run the job, record everything in the folder of `records`, and return the accuracy of a single response.

    The responses are sampled once; some may have been in the folder before.
    """
    assert isinstance(run, EvalJobConfig)
    scorer = load_scorer(getattr(run, "scorer", None))
    components = build_components(run, records.folder, console, records.clock)
    try:
        start_records(run, components, records, console)
        return answered(run, components, scorer, records, console)
    except KeyboardInterrupt:
        records.loggers.finish({"status": "interrupted"})
        raise
    finally:
        components.close()
        records.loggers.finish(None)  # still open only if the job failed


@dataclass(slots=True)
class Answers:
    """The responses to all problems, problem by problem, without their tokens."""

    samples: list[SampleFigures] = field(default_factory=list)
    examples: list[Sample] = field(default_factory=list)  # the first to each of the first problems, to print
    mismatches: "array[float]" = field(default_factory=lambda: array("d"))  # between engine and trainer
    seconds: float = 0.0  # of sampling


def answered(
    run: EvalJobConfig, components: Components, scorer: Scorer | None, records: RunWriter, console: Console
) -> float:
    """Let the model answer, compute and record what the job asks for, print it; return the accuracy.

    The summary is written last and marks the job as complete.
    """
    evaluator, problems = components.evaluator, components.final_problems
    asks, n, grader = evaluator.settings, evaluator.settings.samples, evaluator.rollouts.grader
    if run.split == "train":
        problems = evaluation_problems(asks, components.train_problems, asks.final_problems)
    console.say(f"asks       {len(problems)} {run.split} problems")
    key = "eval.data" if run.eval.data else "data"
    check_askable(problems, f"split={run.split} of {key}={asks.data.name}", key)
    protocol = protocol_of(asks, problems, components.policy.tokenizer)
    weights = weights_hash(components.policy.named_weights())
    log = ResponseLog(records.folder, f"protocol {protocol['hash']}, weights {weights}", problems, n)
    finished_before = len(log.samples)
    records.clock.begin()
    answers = respond(run, evaluator, problems, log, records, console)
    samples = answers.samples
    monitors = Monitors(1, console.say, run.monitors, run.sampling_key("max_tokens"), steps=False)
    sets = figures_of_sets(run, components, weights, records, console, monitors)
    metrics = evaluator.figures(samples, answers.mismatches, problems, None, monitors)
    metrics["eval/tokens_per_second"] = records.clock.overall().get("perf/eval_tokens_per_second", 0.0)
    write_pass_rates(records.folder / PASS_RATES, problems, samples, n)
    more: dict[str, Any]
    if isinstance(run, BestOfNConfig):
        with console.wait("choosing among the responses"):
            curves = best_of_n(run, problems, samples, scorer, grader)
            sampled = f"prompt={asks.prompt.name}, {asks.sampling.distribution}, protocol {protocol['hash']}"
            title = f"{run.model.name}, {asks.data.name}, {len(problems)} problems x {n} samples"
            write_curves(run.n_list, curves, records, title, f"{sampled}; bands: 95%, over problems")
        # The first response to a problem is drawn with the random numbers of algorithm=evaluate's only one.
        firsts = samples[::n]
        first, *interval = proportion_with_ci(firsts, list(map(is_correct, firsts)), questions_of(problems))
        more = {"n_list": list(run.n_list), "best_of_n": curves}
        more["first_samples"] = {"accuracy": first, "interval": interval}
        tables = [curves_table(run.n_list, curves), f"curves: {records.folder / BEST_OF_N_PICTURE}"]
    else:
        more = {"categories": categories(samples, problems), "ungraded": ungraded(samples)}
        named = {CATEGORY_TEXTS[name]: row for name, row in more["categories"].items()}
        lengths = figure_lines(metrics, asks.sampling.max_tokens, more["ungraded"])
        tables = [share_table("category", named), lengths]
    records.metrics(Counters(eval_step=1, clock=records.clock).row() | metrics | sets)
    status, reason = monitors.reason_to_stop() or ("finished", "")
    summary = common_summary(components, metrics, protocol, monitors, records.clock) | {
        "status": status,
        "reason": reason,
        **by_facts(samples, problems),
        "truncated": metrics["eval/truncated"],
        "tokens_per_second": round(metrics["eval/tokens_per_second"], 1),
        **more,
        **sets_summary(components, sets),
        "eval_problems": len(problems),
        "problems_kept_from_before": finished_before,
        "weights": weights,
    }
    records.summary(summary)
    print_responses(console, answers.examples, problems, grader)
    tables += [share_table(fact, parts) for fact, parts in summary.get("accuracy_by", {}).items()]
    for table in tables:
        console.table("\n" + table)
    print_accuracies(console, summary, records.loggers)
    console.say(f"{metrics['eval/tokens_per_second']:.0f} tokens/s, {answers.seconds:.0f} s of sampling")
    folder = records.folder
    console.say(f"\nall responses: {folder / RESPONSES}; to read some: python -m rlreason inspect {folder}")
    return metrics["eval/accuracy"]


def figures_of_sets(
    run: EvalJobConfig,
    components: Components,
    weights: str,
    records: RunWriter,
    console: Console,
    monitors: Monitors,
) -> dict[str, float]:
    """Let the model answer each of `eval.sets`, warn, record the responses as the run's own, and return the metrics."""
    figures = dict[str, float]()
    for one in components.sets:
        asks, problems, place = one.evaluator.settings, one.final_problems, f"{EVALS}/{one.name}"
        (records.folder / place).mkdir(parents=True, exist_ok=True)
        identity = f"protocol {protocol_of(asks, problems, components.policy.tokenizer)['hash']}, weights {weights}"
        log = ResponseLog(records.folder / place, identity, problems, asks.samples)
        answers = respond(run, one.evaluator, problems, log, records, console, f"{place}/{RESPONSES}")
        one.warn(answers.samples, None, monitors)
        figures |= one.figures(answers.samples)
    return figures


def write_pass_rates(path: Path, problems: Sequence[Problem], samples: Sequence[SampleFigures], n: int) -> None:
    """Write how many of the n responses to each problem were correct, for curricula (data.pass_rates)."""
    rates: list[Row] = []
    for i, problem in enumerate(problems):
        correct = sum(map(is_correct, samples[i * n : (i + 1) * n]))
        named = {"problem_id": problem.id, "question_hash": question_hash(problem.question)}
        rates.append(named | {"samples": n, "correct": correct})
    write_rows(path, rates)


def respond(
    run: EvalJobConfig,
    evaluator: Evaluator,
    problems: Sequence[Problem],
    log: ResponseLog,
    records: RunWriter,
    console: Console,
    file: str = RESPONSES,
) -> Answers:
    """Sample, score and record in `file` the responses to all problems, but for those in the log.

    That is done block by block, each as large as its tokens may be at once in memory; most evaluations are one.
    """
    rollouts, sampling, n, answers = evaluator.rollouts, evaluator.sampling, evaluator.settings.samples, Answers()
    progress = SamplingProgress(console, len(problems) * n, log)

    def finished(number: int, sample: Sample) -> None:
        log.add(number, sample)
        progress.add(sample)

    at_once = max(min(BLOCK_TOKENS // sampling.max_tokens, BLOCK), 4 * run.rollout.max_rows)
    size = max(1, at_once // n)
    with records.growing(file) as write:
        for first in range(0, len(problems), size):
            block = problems[first : first + size]
            left, began = [p for p in block if p.id not in log.samples], time.monotonic()
            with records.clock.phase("eval"):
                with console.wait("sampling", more=rollouts.progress_text):
                    fresh = rollouts.sample(left, sampling, n, PURPOSE, finished) if left else []
                answers.seconds += time.monotonic() - began
                log.samples |= {p.id: fresh[i * n : (i + 1) * n] for i, p in enumerate(left)}
                of_block = [s for p in block for s in log.samples.pop(p.id)]
                with console.wait(f"measuring entropies of {len(of_block)} responses"):
                    scored = evaluator.scored(of_block)
            prompts, rows = evaluator.prompts(scored[::n]), list[Row]()
            for place, sample in enumerate(scored):
                number, nth = divmod(place, n)
                row = response_row(0, sample, block[number]) | {"sample": nth, "prompt": prompts[number]}
                if sample.log_probs is not None:
                    row["log_probs"] = [round(log_prob, 4) for log_prob in sample.log_probs]
                rows.append(row)
            write(rows)
            answers.samples += map(figures_of, scored)
            answers.mismatches += mismatches_of(scored, sampling)
            answers.examples += scored[::n][: run.log_generations - len(answers.examples)]
    return answers


def check_askable(problems: Sequence[Problem], where: str, key: str = "data") -> None:
    """Refuse an empty split, and problems without a ground truth. `key`: of the data's settings."""
    if not problems:
        raise DataError(f"{where} holds no problems: give data, or choose the other split")
    if without := [p.id for p in problems if not p.answer.strip()]:
        raise DataError(
            f"{len(without)} of {len(problems)} problems in {where} have an empty ground truth ({few(without)}): "
            f"complete or remove these rows, or say where it stands ({key}.gold)"
        )


def load_scorer(name: str | None) -> Scorer | None:
    """Load the function `module:function` and try it once; None if there is none."""
    if not name:
        return None

    def scorer(question: str, response: str) -> float:
        try:
            if math.isfinite(score := float(load(name)(question, response))):
                return score
            why = f"{score} is not finite"
        except Exception as error:  # whatever the user's function raises
            why = describe_error(error)
        raise ConfigError(
            f"scorer={name} fails on a response to {question[:40]!r} ({why}): mend it, and type the command again with "
            "this hydra.run.dir: no response is sampled again"
        )

    scorer("How many?", "probe")
    return scorer


def best_of_n(
    run: BestOfNConfig,
    problems: Sequence[Problem],
    samples: Sequence[SampleFigures],
    scorer: Scorer | None,
    grader: Grader,
) -> Curves:
    """Return each selection's expected success for every N, a mean over problems with its bootstrap interval.

    All selections and all N use the same resampled problems; those with the same question are resampled together. If
    all problems have the same outcome, resampling says nothing: then it is Wilson's interval over problems.
    """
    n, at = run.answers, run.n_list
    groups = [samples[i : i + n] for i in range(0, len(samples), n)]
    right = [[is_correct(s) for s in group] for group in groups]
    scores = {"best mean log-prob": [[s.mean_log_prob for s in group] for group in groups]}
    scores["best summed log-prob"] = [[s.log_prob for s in group] for group in groups]
    if scorer:
        asked = zip(problems, groups, strict=True)
        scores["best by scorer"] = [[scorer(p.question, s.text) for s in group] for p, group in asked]
    values = {"pass@N": [[pass_at(n, sum(r), k) for k in at] for r in right]}  # way -> (problems, len(n_list))
    for name, of_groups in scores.items():
        values[name] = [[best_at(of, r, k) for k in at] for of, r in zip(of_groups, right, strict=True)]
    if not grader.plugin:
        subsets = [subsets_of(n, k, run.seed) for k in at]
        classes = [answer_classes([s.text for s in group], grader) for group in groups]
        voted = zip(classes, right, strict=True)
        values["maj@N"] = [[majority_at(c, r, chosen) for chosen in subsets] for c, r in voted]
    together = np.concatenate([np.array(rows) for rows in values.values()], axis=1)
    together = of_clusters(together.T, list(questions_of(problems).values())).T
    low, high = bootstrap_intervals(together, run.seed)
    points = list(zip(together.mean(0).tolist(), low.tolist(), high.tolist(), strict=True))
    for column in np.flatnonzero(np.ptp(together, axis=0) == 0).tolist():
        share, count = points[column][0], len(together)
        points[column] = (share, *wilson_interval(share * count, count))
    return {name: points[i * len(at) : (i + 1) * len(at)] for i, name in enumerate(values)}


def write_curves(n_list: Sequence[int], curves: Curves, records: RunWriter, title: str, subtitle: str) -> None:
    """Write how often each selection succeeds as a table, and draw it."""
    lines = ["N,method,value,low,high"]
    for name, points in curves.items():
        for n, figures in zip(n_list, points, strict=True):
            lines.append(f"{n},{name}," + ",".join(f"{figure:.6g}" for figure in figures))
    records.document(BEST_OF_N_NUMBERS, "\n".join(lines) + "\n")
    draw_best_of_n(records.folder / BEST_OF_N_PICTURE, n_list, curves, title, subtitle)
