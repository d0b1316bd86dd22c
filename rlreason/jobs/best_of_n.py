"""`algorithm=best_of_n`: what the best, the likeliest and the most frequent of N responses are worth."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlreason.config.jobs import BestOfNConfig
from rlreason.errors import ConfigError
from rlreason.evaluation.accuracy import is_correct, proportion_with_ci, questions_of
from rlreason.evaluation.plot import draw_best_of_n
from rlreason.evaluation.selection import best_at, is_exact, majority_at, pass_at, subsets_of
from rlreason.evaluation.tables import curves_table
from rlreason.evaluation.votes import answer_classes
from rlreason.grading import Grader
from rlreason.jobs.evaluate import asked, cases, closing
from rlreason.jobs.respond import Responses, conclude
from rlreason.plugins.load import NotImportableError, described, load
from rlreason.records.console import Console
from rlreason.records.files import BEST_OF_N_NUMBERS, BEST_OF_N_PICTURE
from rlreason.records.writer import RunWriter
from rlreason.setup.run_summary import describe_job, shown
from rlreason.statistics import Floats, bootstrap_intervals, of_clusters, wilson_interval
from rlreason.types import Counted, Problem

Scorer = Callable[[str, str], float]  # (question, response) -> a number, the higher the better
Curves = dict[str, list[tuple[float, float, float]]]  # way to choose -> (value, low, high) for each N


def best_of_n(run: BestOfNConfig, records: RunWriter, console: Console) -> float:
    """Ask for all samples once, choose among them in every way; returns the accuracy of a single response."""
    scorer, folder = load_scorer(run.scorer), records.folder
    with asked(run, records, console) as (components, responses):
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
        found = {"n_list": list(run.n_list), "best_of_n": curves, "first_samples": first}
        conclude(records, components, responses, found)
        cases(console, run, components, responses)
        console.table("\n" + curves_table(run.n_list, curves, console.width))
        low, high = first["interval"]
        console.say(
            f"first samples alone: accuracy {first['accuracy']:.3f} ({low:.3f}-{high:.3f}); they are the ones that "
            "algorithm=evaluate draws"
        )
        for line in explanations(run, asks.sampling.distribution, grader):
            console.say(line)
        closing(console, components, responses, folder)
        console.say(f"curves: {shown(folder / BEST_OF_N_PICTURE)}, numbers: {shown(folder / BEST_OF_N_NUMBERS)}")
    return responses.metrics["eval/accuracy"]


def first_alone(samples: Sequence[Counted], n: int, problems: Sequence[Problem] = ()) -> dict[str, Any]:
    """Accuracy of each problem's first response, with its 95% interval: that of `algorithm=evaluate`, whose only
    response to a problem is drawn with the same random numbers. `samples` hold n to each problem, one after another.
    """
    value, low, high = proportion_with_ci(samples[::n], is_correct, questions_of(problems))
    return {"accuracy": value, "interval": [low, high]}


def load_scorer(name: str | None) -> Scorer | None:
    """A function by its `module:function` name, tried once."""
    if name is None:
        return None
    try:
        found: Scorer = load(name)
        float(found("How many?", "probe"))
    except NotImportableError as error:
        raise ConfigError(f"scorer={name}: {error}") from error
    except Exception as error:  # whatever a stranger's function does
        raise ConfigError(
            f"scorer={name} fails on ('How many?', 'probe'): {described(error)}: it must return a number for any "
            "question and response"
        ) from error
    return found


def estimates(run: BestOfNConfig, responses: Responses, grader: Grader, scorer: Scorer | None) -> dict[str, Floats]:
    """For each way to choose, its expected success on every problem for every N: (problems, len(n_list))."""
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
            [scored(scorer, run.scorer, q, s) for s in group] for q, group in zip(questions, groups, strict=True)
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


def scored(scorer: Scorer, name: str | None, question: str, sample: Counted) -> float:
    """The scorer's number for a response; anything else is an error of its author's. The responses stay on disk."""
    try:
        score = float(scorer(question, sample.text))
    except Exception as error:  # whatever a stranger's function does
        raise ConfigError(
            f"scorer={name} fails on a response to {sample.group} ({type(error).__name__}: {error}): fix it and type "
            "the command again with this hydra.run.dir; nothing is sampled again"
        ) from error
    if not math.isfinite(score):
        raise ConfigError(f"scorer={name} gives {score} for a response to {sample.group}: it must be a finite number")
    return score


def with_intervals(values: dict[str, Floats], seed: int, questions: Sequence[str] = ()) -> Curves:
    """Mean over problems with its bootstrap interval; all ways and all N meet the same draws of problems.

    `questions`: of each problem, by which those that ask the same one are drawn together.

    Where all problems came out alike, drawing among them says nothing: there it is Wilson's interval over problems.
    """
    together = np.concatenate(list(values.values()), axis=1)
    together = of_clusters(together.T, questions).T if questions else together
    low, high = bootstrap_intervals(together, seed)
    points = list(zip(together.mean(0).tolist(), low.tolist(), high.tolist(), strict=True))
    for column in np.flatnonzero(np.ptp(together, axis=0) == 0).tolist():
        proportion_with_ci, problems = points[column][0], len(together)
        points[column] = (proportion_with_ci, *wilson_interval(proportion_with_ci * problems, problems))
    width = len(points) // len(values)
    return {name: points[i * width : (i + 1) * width] for i, name in enumerate(values)}


def as_csv(n_list: Sequence[int], curves: Curves) -> str:
    """
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
    """What the columns mean, as far as it is not in their names."""
    lines = [
        f"log-probabilities are those of the sampled tokens under the model at {distribution}; every number is an "
        f"expectation over N random ones of the {run.answers} samples"
    ]
    if grader.plugin:
        lines.append(f"no maj@N: {grader.plugin} does not say where a response's answer stands")
    elif not all(is_exact(run.answers, k) for k in run.n_list):
        lines.append(f"maj@N: over random subsets (seed {run.seed}) where there are too many to take all")
    return lines
