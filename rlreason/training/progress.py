"""A step's metrics; when a run evaluates and when its budget ends it; its profile; what it prints."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import torch
from torch.profiler import profile, record_function

from rlreason.config.groups import WEIGHTS
from rlreason.config.training import BudgetConfig
from rlreason.engines.rollouts import rollout_metrics
from rlreason.evaluation.accuracy import describe_accuracies, more_accuracies
from rlreason.evaluation.cases import case_text, reasons
from rlreason.evaluation.evaluator import protocol_of
from rlreason.evaluation.protocol import Protocol, format_accuracy
from rlreason.grading import Grader
from rlreason.grading.grader import grading_metrics
from rlreason.health.watch import Monitors
from rlreason.records.console import Console
from rlreason.records.files import PROFILE_TABLE, PROFILE_TRACE
from rlreason.records.loggers import Loggers
from rlreason.records.reader import time_summary
from rlreason.records.rows import response_row
from rlreason.records.writer import RunWriter
from rlreason.runtime.clock import Clock
from rlreason.training.build import Components
from rlreason.types import Problem, Sample

LOST = f"diverged:{WEIGHTS}"  # the status of a run whose weights are not finite
SHOWN_CHARS = 400  # of a response in the terminal

FEWEST_EVALUATIONS = 10  # in a run without eval_every, the first and the last included


def interim_due(step: int, total: int, every: int | None, longest: int | None) -> bool:
    """Return whether an evaluation is due after this step of `total`.

    every: steps between evaluations, 0 for none on the way. None: at least ten in the run with the first, before it,
    as far as there are so many steps, and no more than `longest` steps apart.

    >>> [step for step in range(1, 201) if interim_due(step, 200, None, 10)][:3]
    [10, 20, 30]
    >>> sum(interim_due(step, 31, None, None) for step in range(1, 32))
    9
    """
    if every == 0:
        return False
    gap = Fraction(every or min(Fraction(total, FEWEST_EVALUATIONS - 1), Fraction(longest or total)))
    gap = max(gap, Fraction(1))
    return step // gap > (step - 1) // gap


MARGIN = 1.2  # on predicted times: the next step or evaluation may take longer


def budget_spent(
    budget: BudgetConfig, steps: int, used: Mapping[str, float], pace: Mapping[str, float], problems: int
) -> str:
    """Say why the budget does not allow another step; "" if it does.

        seconds ahead: 1.2 (t_step + t_problem problems)

    steps, used ("tokens/generated", "time/total"): by the whole run so far. pace: seconds and tokens of the newest
    "step", and seconds of an evaluation per "problem"; unknown ones count as 0. problems: of the evaluations due before
    the run can end.

    >>> used, pace = {"tokens/generated": 60.0, "time/total": 3590.0}, {"step": 5.0, "problem": 0.01, "tokens": 60.0}
    >>> budget_spent(BudgetConfig(steps=3), 3, used, pace, 0)
    'budget.steps=3 are done'
    >>> budget_spent(BudgetConfig(hours=1.0), 3, used, pace, 1000)
    'budget.hours=1: 10 s are left, and the next step and the last evaluation would take about 18 s'
    >>> budget_spent(BudgetConfig(tokens=100), 1, used, pace, 0)
    'budget.tokens=100: 40 are left, and the newest step sampled 60'
    """
    if budget.steps and steps >= budget.steps:
        return f"budget.steps={budget.steps} are done"
    tokens, seconds = used["tokens/generated"], used["time/total"]
    if budget.tokens and tokens + pace.get("tokens", 0.0) > budget.tokens:
        left = max(budget.tokens - tokens, 0)
        return f"budget.tokens={budget.tokens}: {left:.0f} are left, and the newest step sampled {pace['tokens']:.0f}"
    ahead = MARGIN * (pace.get("step", 0.0) + pace.get("problem", 0.0) * problems)
    if budget.hours and seconds + ahead > budget.hours * 3600:
        there = f"{max(budget.hours * 3600 - seconds, 0.0):.0f} s are left"
        needed = f"the next step and the last evaluation would take about {ahead:.0f} s"
        return f"budget.hours={budget.hours:g}: {there}, and {needed}"
    return ""


LARGEST = 10


@contextmanager
def profiled(step: int, records: RunWriter, console: Console) -> Iterator[None]:
    """Leave a trace of this block, training step `step`, and the table of its largest costs."""
    clock = records.clock
    clock.annotate = record_function  # shows the clock's phases next to the operations
    with profile() as trace:
        yield
    clock.annotate = nullcontext
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with console.wait("writing the profile"), clock.phase("profile"):
        trace.export_chrome_trace(str(records.folder / PROFILE_TRACE))
        costs = trace.key_averages().table(f"self_{device}_time_total", LARGEST, max_name_column_width=60)
        records.document(PROFILE_TABLE, f"Step {step}:\n\n```text\n{costs}```\n")


#: Metrics that add up.
COUNTS = ("train/skipped_updates", "train/overflows", "train/empty_updates", "train/tokens")


def averaged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """Average the metrics of a step's updates over those that measured them; counts are summed.

    >>> averaged([{"train/loss": 1.0, "train/empty_updates": 0}, {"train/empty_updates": 1}])
    {'train/loss': 1.0, 'train/empty_updates': 1.0}
    """
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        values = [update[name] for update in updates if name in update]
        out[name] = sum(values) / (1 if name in COUNTS else len(values))
    return out


def sampling_metrics(samples: Sequence[Sample], weight_version: int) -> dict[str, float]:
    """Return metrics of sampling and grading; `weight_version`: of the engine once everything was sampled."""
    if not samples:
        return {}
    staleness = weight_version - sum(s.response.weight_version for s in samples) / len(samples)
    graded = grading_metrics([s.grade for s in samples])
    return rollout_metrics(samples) | graded | {"rollout/staleness": staleness}


def print_responses(console: Console, samples: Sequence[Sample], problems: Sequence[Problem], grader: Grader) -> None:
    """Print responses with their grades, so that a wrong format or prompt shows before hours are spent.

    They are those to the first of these problems, one each.
    """
    for number, (sample, problem) in enumerate(zip(samples, problems, strict=False), 1):
        row = response_row(0, sample, problem)
        console.say("\n" + case_text(number, row, reasons(row, grader), SHOWN_CHARS))


def common_summary(
    components: Components, metrics: Mapping[str, float], protocol: Protocol, monitors: Monitors, clock: Clock
) -> dict[str, Any]:
    """Return what the summaries of training runs and other jobs share; `metrics`: of the last evaluation."""
    return {
        "accuracy": metrics["eval/accuracy"],
        "accuracy_interval": [metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]],
        **more_accuracies(metrics, components.evaluator.rollouts),
        "length": metrics["eval/length"],
        **({"start": asdict(components.start)} if components.start else {}),
        "data_sizes": components.sizes,
        "protocol": protocol,
        "notices": dict(monitors.counts),
        **time_summary(clock),
        "threads": torch.get_num_threads(),
    }


def sets_summary(components: Components, metrics: Mapping[str, float], last: bool = True) -> dict[str, Any]:
    """Return each of `eval.sets` for a summary, with its protocol; `last`: all its problems were asked. {} without."""
    sets, tokenizer = dict[str, Any](), components.policy.tokenizer
    for one in components.sets:
        prefix, problems = f"eval/{one.name}/", one.problems(last)
        figures = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        sets[one.name] = figures | {"protocol": protocol_of(one.evaluator.settings, problems, tokenizer)}
    return {"sets": sets} if sets else {}


def print_accuracies(console: Console, summary: Mapping[str, Any], loggers: Loggers) -> None:
    """Print the accuracies of a summary as they should be quoted, and where each logging service has the run."""
    low, high = summary["accuracy_interval"]
    console.say(format_accuracy(summary["accuracy"], low, high, summary["protocol"], summary.get("eval_questions")))
    for line in describe_accuracies(summary["accuracy"], summary):
        console.say(line)
    for name, of in summary.get("sets", {}).items():
        ends = of["accuracy_low"], of["accuracy_high"], of["protocol"], of.get("questions")
        console.say(f"{name}: {format_accuracy(of['accuracy'], *ends)}")
    for name, place in loggers.places.items():
        console.say(f"logger     {name}: {place}")
