"""Run the jobs that do not train: `algorithm=evaluate` and `algorithm=best_of_n`.

Finished problems are on disk at once; an interrupted job resumes with the others. Each problem has its own random
numbers, and entropies and log-probabilities are measured in the order of the problems: the file does not depend on
where the job was interrupted, as far as the engine rounds alike in batches of other rows. It does with the tiny model;
with a real one some responses take another turn, in bfloat16 many, all drawn with the same probabilities.
"""

import math
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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
    answer_classes,
    best_at,
    describe_accuracies,
    draw_best_of_n,
    figures_of,
    is_correct,
    majority_at,
    mismatches_of,
    more_accuracies,
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
from rlreason.evaluation.protocol import format_accuracy
from rlreason.health.watch import Monitors
from rlreason.model.policy import weights_hash
from rlreason.records.console import Console
from rlreason.records.files import BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE, PASS_RATES, RESPONSES
from rlreason.records.reader import time_summary
from rlreason.records.rows import Counters, ResponseLog, Row, numbered_row
from rlreason.records.writer import RunWriter
from rlreason.runtime.plugins import describe_error, load
from rlreason.runtime.statistics import Floats, bootstrap_intervals, of_clusters, wilson_interval
from rlreason.runtime.text import few
from rlreason.training.build import Components, build_components, run_facts, start_loggers
from rlreason.training.progress import print_loggers, print_responses, short_path
from rlreason.types import Problem, Sample, SampleFigures, ScoredResponse

BLOCK, BLOCK_TOKENS = 4096, 2**22  # responses and tokens sampled before they are scored and written: 0.7 GB


@dataclass
class Job:
    """A job: its parts, and what it has found about the responses, which are on disk."""

    run: EvalJobConfig
    components: Components
    records: RunWriter
    console: Console
    samples: list[SampleFigures] = field(default_factory=list)  # problem by problem
    mismatches: "array[float]" = field(default_factory=lambda: array("d"))  # of every token
    examples: list[Sample] = field(default_factory=list)  # the first response to each of the first problems, to print
    tokens: int = 0  # sampled by this process
    seconds: float = 0.0  # of sampling, in this process

    def __post_init__(self) -> None:
        self.evaluator = self.components.evaluator
        self.asks, self.n = self.evaluator.settings, self.evaluator.settings.samples
        train, most = self.components.train_problems, self.asks.final_problems
        self.problems = train[:most] if self.run.split == "train" else self.components.final_problems

    def respond(self) -> None:
        """Sample and record the responses to all problems, and compute their metrics; call `conclude` after it."""
        run, records, problems = self.run, self.records, self.problems
        key = "data" if run.eval.data is None else "eval.data"
        check_askable(problems, f"split={run.split} of {key}={self.asks.data.name}", key)
        self.protocol = protocol_of(self.asks, problems, self.components.policy.tokenizer)
        self.weights = weights_hash(self.components.policy.named_weights())
        log = records.open_log(f"protocol {self.protocol['hash']}, weights {self.weights}", problems, self.n)
        self.finished_before = len(log.samples)
        records.clock.begin()
        self._sample_all(log)
        self.monitors = Monitors(1, self.console.say, run.monitors, sampling_key(run, "max_tokens"), steps=False)
        self.metrics = self.evaluator.figures(self.samples, self.mismatches, problems, None, self.monitors)
        self.metrics["eval/tokens_per_second"] = self.tokens / max(self.seconds, 1e-9)
        pass_rates: list[Row] = [  # for curricula (data.pass_rates)
            {
                "problem_id": p.id,
                "question_hash": question_hash(p.question),
                "samples": self.n,
                "correct": sum(map(is_correct, self.samples[i * self.n : (i + 1) * self.n])),
            }
            for i, p in enumerate(problems)
        ]
        records.rows(PASS_RATES, pass_rates)

    def _sample_all(self, log: ResponseLog) -> None:
        """Sample, score and record the responses to all problems, block by block.

        A block is as large as its tokens may be at once in memory; most evaluations are a single block.
        """
        rows, most, clock = self.run.rollout.max_rows, self.evaluator.sampling.max_tokens, self.records.clock
        progress = SamplingProgress(self.console, len(self.problems) * self.n, log)
        size = max(1, max(min(BLOCK_TOKENS // most, BLOCK), 4 * rows) // self.n)
        with self.records.growing(RESPONSES) as write:
            for first in range(0, len(self.problems), size):
                block = self.problems[first : first + size]
                with clock.phase("eval"):
                    samples = self._sample_block(block, log, progress)
                    with self.console.wait(f"measuring entropies of {len(samples)} responses"):
                        scored = score_samples(samples, self.evaluator.scorer)
                write(self._rows(scored, block))
                self.samples += map(figures_of, scored)
                self.mismatches += mismatches_of(scored, self.evaluator.sampling)
                self.examples += scored[:: self.n][: self.run.log_generations - len(self.examples)]

    def _sample_block(self, problems: Sequence[Problem], log: ResponseLog, progress: SamplingProgress) -> list[Sample]:
        """Return the samples, problem by problem; those not yet in the log are sampled, and counted."""
        left = [p for p in problems if p.id not in log.samples]

        def finished(number: int, sample: Sample) -> None:
            log.add(number, sample)
            progress.add(sample)

        began, rollouts = time.monotonic(), self.evaluator.rollouts
        with self.console.wait("sampling", more=rollouts.progress_text):
            fresh = rollouts.sample(left, self.evaluator.sampling, self.n, PURPOSE, finished) if left else []
        self.seconds += time.monotonic() - began
        self.tokens += sum(s.length for s in fresh)
        by_problem = {p.id: fresh[i * self.n : (i + 1) * self.n] for i, p in enumerate(left)}
        return [s for p in problems for s in by_problem.get(p.id) or log.samples.pop(p.id)]

    def _rows(self, samples: Sequence[Sample], problems: Sequence[Problem]) -> Iterator[Row]:
        """Yield rows of `responses.jsonl`; log-probabilities are the model's own, at the sampling temperature."""
        prompts = self.evaluator.prompts(samples[:: self.n])
        for place, sample in enumerate(samples):
            number, nth = divmod(place, self.n)
            measured = [round(log_prob, 4) for log_prob in sample.log_probs or []]
            row = numbered_row(sample, problems[number], nth)
            yield row | {"prompt": prompts[number], "log_probs": measured}

    def conclude(self, more: dict[str, Any]) -> None:
        """Write the metrics row and then the summary, which marks the job as complete."""
        m, components, records = self.metrics, self.components, self.records
        records.metrics(Counters(eval_step=1, clock=records.clock).row() | m)
        status, reason = self.monitors.reason_to_stop() or ("finished", "")
        self.summary = {
            "status": status,
            "reason": reason,
            "accuracy": m["eval/accuracy"],
            "accuracy_interval": [m["eval/accuracy_low"], m["eval/accuracy_high"]],
            **more_accuracies(m, *self.evaluator.rewards),
            **by_facts(self.samples, self.problems),
            "length": m["eval/length"],
            "truncated": m["eval/truncated"],
            "tokens_per_second": round(m["eval/tokens_per_second"], 1),
            **more,
            "eval_problems": len(self.problems),
            "data_sizes": components.sizes,
            "problems_kept_from_before": self.finished_before,
            "notices": dict(self.monitors.counts),
            "weights": self.weights,
            **({"start": asdict(components.start)} if components.start else {}),
            "protocol": self.protocol,
            **time_summary(records.clock),
            "seconds": round(self.seconds, 1),  # of sampling
            "threads": torch.get_num_threads(),
        }
        records.summary(self.summary)

    def print_start(self) -> None:
        """Print which problems go to which model."""
        run, asks, say = self.run, self.asks, self.console.say
        asked = f"{len(self.problems)} {run.split} problems of {asks.data.name}, {self.n} responses each"
        say(f"model      {run.model.name}: {self.components.policy.describe()}")
        say(f"asks       {asked}; prompt={asks.prompt.name}; {asks.sampling.describe()}")
        say(f"records    {short_path(self.records.folder)}")

    def print_closing(self, tables: Sequence[str]) -> None:
        """Print the first few responses, the job's own tables, the accuracies as they should be quoted."""
        m, folder, console = self.metrics, short_path(self.records.folder), self.console
        print_responses(console, self.examples, self.problems, self.evaluator.grader)
        for table in tables:
            console.table("\n" + table)
        for line in describe_accuracies(m["eval/accuracy"], self.summary):
            console.say(line)
        figures = (m["eval/accuracy"], m["eval/accuracy_low"], m["eval/accuracy_high"])
        quoted = format_accuracy(*figures, self.protocol, m.get("eval/questions"))
        console.say(f"{quoted}; {m['eval/tokens_per_second']:.0f} tokens/s, {self.seconds:.0f} s of sampling")
        console.say(f"\nall responses: {folder}/{RESPONSES}; to read some: python -m rlreason inspect {folder}")
        print_loggers(console, self.records.loggers)


@contextmanager
def job_of(run: EvalJobConfig, records: RunWriter, console: Console) -> Iterator[Job]:
    """Yield a job with all its responses, some of which may have been in its folder before."""
    components = build_components(run, records.folder, console, clock=records.clock)
    try:
        start_loggers(run, records, console)
        records.add_provenance(run_facts(run, components))
        job = Job(run, components, records, console)
        job.print_start()
        job.respond()
        yield job
    except KeyboardInterrupt:
        records.loggers.finish({"status": "interrupted"})
        raise
    finally:
        components.close()
        records.loggers.finish(None)  # still open only if the job failed


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


def evaluate_model(run: EvaluateConfig, records: RunWriter, console: Console) -> float:
    """Sample, grade and count; return the accuracy."""
    with job_of(run, records, console) as job:
        rows, failed = categories(job.samples, job.problems), ungraded(job.samples)
        job.conclude({"categories": rows, "ungraded": failed})
        of_categories = share_table("category", {CATEGORY_TEXTS[name]: row for name, row in rows.items()})
        lengths = figure_lines(job.metrics, job.evaluator.sampling.max_tokens, failed)
        by_fact = [share_table(fact, parts) for fact, parts in job.summary.get("accuracy_by", {}).items()]
        job.print_closing([of_categories, lengths, *by_fact])
    return job.metrics["eval/accuracy"]


Scorer = Callable[[str, str], float]  # (question, response) -> a number, the higher the better
Curves = dict[str, list[tuple[float, float, float]]]  # way to choose -> (value, low, high) for each N


def best_of_n(run: BestOfNConfig, records: RunWriter, console: Console) -> float:
    """Sample all responses once and select among them in every way; return the accuracy of a single response."""
    scorer, picture = load_scorer(run.scorer), records.folder / BEST_OF_N_PICTURE
    with job_of(run, records, console) as job:
        with console.wait("choosing among the responses"):
            values = estimates(run, job, scorer)
            curves = with_intervals(values, run.seed, list(questions_of(job.problems).values()))
        records.document(BEST_OF_N_NUMBERS, as_csv(run.n_list, curves))
        title = f"{run.model.name}, {job.asks.data.name}, {len(job.problems)} problems x {job.n} samples"
        sampled = f"prompt={job.asks.prompt.name}, {job.asks.sampling.distribution}, protocol {job.protocol['hash']}"
        with console.wait("drawing the curves"):
            draw_best_of_n(picture, run.n_list, curves, title, f"{sampled}; bands: 95%, over problems")
        first = first_alone(job.samples, job.n, job.problems)
        job.conclude({"n_list": list(run.n_list), "best_of_n": curves, "first_samples": first})
        job.print_closing([curves_table(run.n_list, curves)])
        console.say(f"curves: {short_path(picture)}")
    return job.metrics["eval/accuracy"]


def first_alone(samples: Sequence[ScoredResponse], n: int, problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """Return the accuracy of each problem's first response, with its 95% interval.

    It equals that of `algorithm=evaluate`, whose only response to a problem is drawn with the same random numbers.
    `samples` hold n per problem, problem by problem.
    """
    value, low, high = proportion_with_ci(samples[::n], is_correct, questions_of(problems))
    return {"accuracy": value, "interval": [low, high]}


def load_scorer(name: str | None) -> Scorer | None:
    """Load the function `module:function` and try it once; None if there is none."""
    if name is None:
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
    n, at, grader = run.answers, run.n_list, job.evaluator.grader
    groups = [job.samples[i : i + n] for i in range(0, len(job.samples), n)]
    right = [[is_correct(s) for s in group] for group in groups]
    scores: dict[str, list[list[float]]] = {
        "best mean log-prob": [[s.mean_log_prob for s in group] for group in groups],
        "best summed log-prob": [[s.log_prob for s in group] for group in groups],
    }
    if scorer:
        asked = zip(job.problems, groups, strict=True)
        scores["best by scorer"] = [[scorer(p.question, s.text) for s in group] for p, group in asked]
    out = {"pass@N": np.array([[pass_at(n, sum(r), k) for k in at] for r in right])}
    for name, of_groups in scores.items():
        out[name] = np.array([[best_at(s, r, k) for k in at] for s, r in zip(of_groups, right, strict=True)])
    if not grader.plugin:
        subsets = [subsets_of(n, k, run.seed) for k in at]
        classes = [answer_classes([s.text for s in group], grader) for group in groups]
        voted = zip(classes, right, strict=True)
        out["maj@N"] = np.array([[majority_at(c, r, chosen) for chosen in subsets] for c, r in voted])
    return out


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


def start(run: RunConfig, records: RunWriter, console: Console) -> float:
    """Run the job, record everything in the folder of `records`, and return the accuracy."""
    if isinstance(run, BestOfNConfig):
        return best_of_n(run, records, console)
    assert isinstance(run, EvaluateConfig)
    return evaluate_model(run, records, console)
