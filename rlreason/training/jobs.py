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
from typing import Any

import numpy as np

from rlreason.config.algorithms import BestOfNConfig, EvalJobConfig
from rlreason.config.run import RunConfig
from rlreason.data.sources import question_hash
from rlreason.engines.rollouts import SamplingProgress, score_samples
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
from rlreason.evaluation.evaluator import protocol_of
from rlreason.health.watch import Monitors
from rlreason.model.policy import weights_hash
from rlreason.records.console import Console
from rlreason.records.files import BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE, PASS_RATES, RESPONSES
from rlreason.records.rows import Counters, ResponseLog, Row, numbered_row, write_rows
from rlreason.records.writer import RunWriter
from rlreason.runtime.plugins import describe_error, load
from rlreason.runtime.statistics import Floats, bootstrap_intervals, of_clusters, wilson_interval
from rlreason.runtime.text import few
from rlreason.training.build import Components, build_components, start_records
from rlreason.training.progress import common_summary, print_accuracies, print_loggers, print_responses, short_path
from rlreason.types import Problem, Sample, SampleFigures, ScoredResponse

BLOCK, BLOCK_TOKENS = 4096, 2**22  # responses and tokens sampled before they are scored and written: 0.7 GB


class Job:
    """A job: its parts, and what it has found about the responses, which are on disk."""

    def __init__(self, run: EvalJobConfig, components: Components, records: RunWriter, console: Console) -> None:
        self.run, self.components, self.records, self.console = run, components, records, console
        self.evaluator = components.evaluator
        self.asks, self.n = self.evaluator.settings, self.evaluator.settings.samples
        self.problems = components.final_problems
        if run.split == "train":
            self.problems = components.train_problems[: self.asks.final_problems]
        self.samples: list[SampleFigures] = []  # problem by problem
        self.examples: list[Sample] = []  # the first response to each of the first problems, to print
        self.seconds = 0.0  # of sampling

    def respond(self) -> None:
        """Sample, score and record the responses to all problems, and compute their metrics; then call `conclude`.

        That is done block by block, each as large as its tokens may be at once in memory; most evaluations are one.
        """
        run, records, problems, evaluator, n = self.run, self.records, self.problems, self.evaluator, self.n
        rollouts, sampling = evaluator.rollouts, evaluator.sampling
        key = "eval.data" if run.eval.data else "data"
        check_askable(problems, f"split={run.split} of {key}={self.asks.data.name}", key)
        self.protocol = protocol_of(self.asks, problems, self.components.policy.tokenizer)
        self.weights = weights_hash(self.components.policy.named_weights())
        log = ResponseLog(records.folder, f"protocol {self.protocol['hash']}, weights {self.weights}", problems, n)
        self.finished_before, mismatches, tokens = len(log.samples), array("d"), 0
        progress = SamplingProgress(self.console, len(problems) * n, log)

        def finished(number: int, sample: Sample) -> None:
            log.add(number, sample)
            progress.add(sample)

        records.clock.begin()
        at_once = max(min(BLOCK_TOKENS // sampling.max_tokens, BLOCK), 4 * run.rollout.max_rows)
        size = max(1, at_once // n)
        with records.growing(RESPONSES) as write:
            for first in range(0, len(problems), size):
                block = problems[first : first + size]
                left, began = [p for p in block if p.id not in log.samples], time.monotonic()
                with records.clock.phase("eval"):
                    with self.console.wait("sampling", more=rollouts.progress_text):
                        fresh = rollouts.sample(left, sampling, n, PURPOSE, finished) if left else []
                    self.seconds += time.monotonic() - began
                    tokens += sum(s.length for s in fresh)
                    log.samples |= {p.id: fresh[i * n : (i + 1) * n] for i, p in enumerate(left)}
                    samples = [s for p in block for s in log.samples.pop(p.id)]
                    with self.console.wait(f"measuring entropies of {len(samples)} responses"):
                        scored = score_samples(samples, evaluator.scorer)
                prompts, rows = evaluator.prompts(scored[::n]), list[Row]()
                for place, sample in enumerate(scored):
                    number, nth = divmod(place, n)
                    row = numbered_row(sample, block[number], nth) | {"prompt": prompts[number]}
                    rows.append(row | {"log_probs": [round(log_prob, 4) for log_prob in sample.log_probs or []]})
                write(rows)
                self.samples += map(figures_of, scored)
                mismatches += mismatches_of(scored, sampling)
                self.examples += scored[::n][: run.log_generations - len(self.examples)]
        self.monitors = Monitors(1, self.console.say, run.monitors, run.sampling_key("max_tokens"), steps=False)
        self.metrics = evaluator.figures(self.samples, mismatches, problems, None, self.monitors)
        self.metrics["eval/tokens_per_second"] = tokens / max(self.seconds, 1e-9)
        pass_rates: list[Row] = []  # for curricula (data.pass_rates)
        for i, p in enumerate(problems):
            correct = sum(map(is_correct, self.samples[i * n : (i + 1) * n]))
            row = {"problem_id": p.id, "question_hash": question_hash(p.question)}
            pass_rates.append(row | {"samples": n, "correct": correct})
        write_rows(records.folder / PASS_RATES, pass_rates)

    def conclude(self, more: dict[str, Any], tables: Sequence[str]) -> None:
        """Write the metrics row and then the summary, which marks the job as complete.

        Print the first few responses, the job's own tables, the accuracies as they should be quoted.
        """
        m, components, records = self.metrics, self.components, self.records
        records.metrics(Counters(eval_step=1, clock=records.clock).row() | m)
        status, reason = self.monitors.reason_to_stop() or ("finished", "")
        summary = common_summary(components, m, self.protocol, self.monitors, records.clock) | {
            "status": status,
            "reason": reason,
            **by_facts(self.samples, self.problems),
            "truncated": m["eval/truncated"],
            "tokens_per_second": round(m["eval/tokens_per_second"], 1),
            **more,
            "eval_problems": len(self.problems),
            "problems_kept_from_before": self.finished_before,
            "weights": self.weights,
            "seconds": round(self.seconds, 1),  # of sampling
        }
        records.summary(summary)
        folder, console = short_path(records.folder), self.console
        print_responses(console, self.examples, self.problems, self.evaluator.rollouts.grader)
        by_fact = [share_table(fact, parts) for fact, parts in summary.get("accuracy_by", {}).items()]
        for table in (*tables, *by_fact):
            console.table("\n" + table)
        print_accuracies(console, summary)
        console.say(f"{m['eval/tokens_per_second']:.0f} tokens/s, {self.seconds:.0f} s of sampling")
        console.say(f"\nall responses: {folder}/{RESPONSES}; to read some: python -m rlreason inspect {folder}")
        print_loggers(console, records.loggers)

    def print_start(self) -> None:
        """Print which problems go to which model."""
        run, asks, say = self.run, self.asks, self.console.say
        asked = f"{len(self.problems)} {run.split} problems of {asks.data.name}, {self.n} responses each"
        say(f"model      {run.model.name}: {self.components.policy.describe()}")
        say(f"asks       {asked}; prompt={asks.prompt.name}; {asks.sampling.describe()}")
        say(f"records    {short_path(self.records.folder)}")


def check_askable(problems: Sequence[Problem], where: str, key: str = "data") -> None:
    """Refuse an empty split, and problems without a ground truth.

    `key`: of the data's settings, `data` or `eval.data`.
    """
    if not problems:
        raise DataError(f"{where} holds no problems: give data, or choose the other split")
    if without := [p.id for p in problems if not p.answer.strip()]:
        raise DataError(
            f"{len(without)} of {len(problems)} problems in {where} have an empty ground truth ({few(without)}): "
            f"complete or remove these rows, or say where it stands ({key}.gold)"
        )


Scorer = Callable[[str, str], float]  # (question, response) -> a number, the higher the better
Curves = dict[str, list[tuple[float, float, float]]]  # way to choose -> (value, low, high) for each N


def best_of_n(run: BestOfNConfig, job: Job, scorer: Scorer | None) -> tuple[dict[str, Any], list[str]]:
    """Select among the responses in every way; record and draw how often that succeeds.

    Return what the summary has of it, and the tables to print.
    """
    records, picture = job.records, job.records.folder / BEST_OF_N_PICTURE
    with job.console.wait("choosing among the responses"):
        values = estimates(run, job, scorer)
        curves = with_intervals(values, run.seed, list(questions_of(job.problems).values()))
    lines = ["N,method,value,low,high"]
    for name, points in curves.items():
        for n, figures in zip(run.n_list, points, strict=True):
            lines.append(f"{n},{name}," + ",".join(f"{figure:.6g}" for figure in figures))
    records.document(BEST_OF_N_NUMBERS, "\n".join(lines) + "\n")
    title = f"{run.model.name}, {job.asks.data.name}, {len(job.problems)} problems x {job.n} samples"
    sampled = f"prompt={job.asks.prompt.name}, {job.asks.sampling.distribution}, protocol {job.protocol['hash']}"
    with job.console.wait("drawing the curves"):
        draw_best_of_n(picture, run.n_list, curves, title, f"{sampled}; bands: 95%, over problems")
    first = first_alone(job.samples, job.n, job.problems)
    more = {"n_list": list(run.n_list), "best_of_n": curves, "first_samples": first}
    return more, [curves_table(run.n_list, curves), f"curves: {short_path(picture)}"]


def first_alone(samples: Sequence[ScoredResponse], n: int, problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """Return the accuracy of each problem's first response, with its 95% interval.

    It equals that of `algorithm=evaluate`, whose only response to a problem is drawn with the same random numbers.
    `samples` hold n per problem, problem by problem.
    """
    firsts = samples[::n]
    value, low, high = proportion_with_ci(firsts, [is_correct(s) for s in firsts], questions_of(problems))
    return {"accuracy": value, "interval": [low, high]}


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


def estimates(run: BestOfNConfig, job: Job, scorer: Scorer | None) -> dict[str, Floats]:
    """Return each selection's expected success for every problem and N: (problems, len(n_list))."""
    n, at, grader = run.answers, run.n_list, job.evaluator.rollouts.grader
    groups = [job.samples[i : i + n] for i in range(0, len(job.samples), n)]
    right = [[is_correct(s) for s in group] for group in groups]
    ways: dict[str, Callable[[Problem, SampleFigures], float]] = {
        "best mean log-prob": lambda _, s: s.mean_log_prob,
        "best summed log-prob": lambda _, s: s.log_prob,
    }
    if scorer:
        ways["best by scorer"] = lambda p, s: scorer(p.question, s.text)
    out = {"pass@N": [[pass_at(n, sum(r), k) for k in at] for r in right]}
    for name, score in ways.items():
        out[name] = []
        for problem, group, r in zip(job.problems, groups, right, strict=True):
            scores = [score(problem, s) for s in group]
            out[name].append([best_at(scores, r, k) for k in at])
    if not grader.plugin:
        subsets = [subsets_of(n, k, run.seed) for k in at]
        classes = [answer_classes([s.text for s in group], grader) for group in groups]
        voted = zip(classes, right, strict=True)
        out["maj@N"] = [[majority_at(c, r, chosen) for chosen in subsets] for c, r in voted]
    return {name: np.array(rows) for name, rows in out.items()}


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


def start(run: RunConfig, records: RunWriter, console: Console) -> float:
    """Run the job, record everything in the folder of `records`, and return the accuracy of a single response.

    The responses are sampled once; some may have been in the folder before.
    """
    assert isinstance(run, EvalJobConfig)
    scorer = load_scorer(run.scorer) if isinstance(run, BestOfNConfig) else None
    components = build_components(run, records.folder, console, clock=records.clock)
    try:
        start_records(run, components, records, console)
        job = Job(run, components, records, console)
        job.print_start()
        job.respond()
        if isinstance(run, BestOfNConfig):
            more, tables = best_of_n(run, job, scorer)
        else:
            rows, failed = categories(job.samples, job.problems), ungraded(job.samples)
            of_categories = share_table("category", {CATEGORY_TEXTS[name]: row for name, row in rows.items()})
            lengths = figure_lines(job.metrics, job.evaluator.sampling.max_tokens, failed)
            more, tables = {"categories": rows, "ungraded": failed}, [of_categories, lengths]
        job.conclude(more, tables)
    except KeyboardInterrupt:
        records.loggers.finish({"status": "interrupted"})
        raise
    finally:
        components.close()
        records.loggers.finish(None)  # still open only if the job failed
    return job.metrics["eval/accuracy"]
