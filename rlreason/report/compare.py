"""Compare two settings or more, also of other programs: which is better, by how much, or that no one can tell.

A and B are runs, sweeps, settings of a sweep (SWEEP/KEY=VALUE), evaluations, CSV files with the columns
setting,seed,problem,correct (and cluster), TRL's completions, lm-eval's samples (--log_samples), or Inspect's logs. The
first is the reference. A sweep or a CSV file alone: all its settings against its reference. Of two sweeps, or two
files, the best settings are compared.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlreason.config.leaves import typed_word
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.report.content import Verdict
from rlreason.report.read import differing_keys, read_study, study_of_results
from rlreason.report.sections import health_of, warnings_of
from rlreason.report.study import COMPARING, Setting, Study, half
from rlreason.report.verdicts import EQUAL_WITHIN, best_of, verdicts_of
from rlreason.runtime.streams import Answer, Parser, folded
from rlreason.runtime.text import few

OUTCOMES = ("better", "worse", "same")
NOT_AS_EXPECTED = 1  # exit code


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason compare`."""
    parser.add_argument("sides", metavar="RUN", type=Path, nargs="+", help="the reference, and what to compare with it")
    unless = f"exit with {NOT_AS_EXPECTED} unless every verdict is this one"
    parser.add_argument("--expect", choices=OUTCOMES, help=unless)
    parser.add_argument(
        "--equal-within",
        type=float,
        default=100 * EQUAL_WITHIN,
        metavar="POINTS",
        help=f"'same' needs an interval inside this ({100 * EQUAL_WITHIN:g} accuracy points)",
    )


def main(arguments: argparse.Namespace, console: Console) -> Answer:
    """Return the verdict on each pair, as text and figures."""
    if not 0 < arguments.equal_within < 100:
        raise ConfigError(f"--equal-within {arguments.equal_within:g} is no width: give points above 0 and below 100")
    with console.wait("reading"):
        study = compared_study(arguments.sides)
    verdicts = verdicts_of(study, arguments.equal_within / 100)
    comparable = any(verdict.difference for verdict in verdicts)
    if not comparable and arguments.json is None:
        raise ConfigError(" ".join(verdict.sentence for verdict in verdicts[:3]) or "there is nothing to compare")
    lines = []
    for verdict in verdicts:
        word = f"{verdict.outcome or verdict.word}: " if verdict.difference is not None else ""  # the sentence says it
        lines.append(f"{word}{verdict.sentence}")
        if verdict.small:
            lines.append(f"  {verdict.small}")
    notes = [*study.notes, *study.problems, *warnings_of(study)]
    if any(finding.problem for run in study.runs for finding in run.findings):
        notes.append(f"Health: {health_of(study)}; rlreason health RUN lists it.")
    lines += [f"! {text}" for text in notes]
    exit_code = 0 if comparable else ConfigError.exit_code
    if comparable and arguments.expect and (other := [v for v in verdicts if v.outcome != arguments.expect]):
        exit_code = NOT_AS_EXPECTED
        lines.append(f"expected {arguments.expect}: {other[0].setting} is {other[0].outcome or other[0].word!r}")
    figures = [entry(verdict, notes) for verdict in verdicts]
    return Answer(folded("\n".join(lines), console.width), figures, exit_code)


def entry(verdict: Verdict, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return a verdict for JSON; the difference and its ends are accuracies, 0 to 1. `notes`: apply to all verdicts."""
    difference, (clusters, _, kinds) = verdict.difference, verdict.clusters.partition(" ")
    return {
        "setting": verdict.typed[0],
        "reference": verdict.typed[1],
        "set": verdict.of_set,
        "difference": difference.mean if difference else None,
        "low": difference.low if difference else None,
        "high": difference.high if difference else None,
        "verdict": verdict.outcome or verdict.word,
        "seeds": difference.seeds if difference else 0,
        "problems": difference.problems if difference else 0,
        "clusters": int(clusters or 0),
        "clustered_by": kinds.removesuffix("s"),
        "p": difference.p if difference else None,
        "adjusted_p": verdict.adjusted_p,
        "sentence": verdict.sentence,
        "notes": list(notes),
    }


def compared_study(paths: Sequence[Path]) -> Study:
    """Return the study of the arguments: `paths[0]` is the reference, or contains it if it is alone."""
    results = [study_of_results(path) for path in paths]
    studies = [study or read_study([path]) for path, study in zip(paths, results, strict=True)]
    others = [study for study, of_file in zip(studies, results, strict=True) if of_file is None]
    first = studies[0]
    if len(paths) == 1:
        if len(first.settings) < 2:
            one = first.reference.label
            raise ConfigError(f"{paths[0]} holds one setting, {one}: give a second one to compare with it")
        return first
    asked: dict[str, tuple[str, str]] = {}  # id or question of a problem of the runs -> id and question
    for run in (run for study in others for run in study.runs):
        for name, problem in run.final.items():
            asked[problem.question] = asked[name] = name, problem.question
    notes = []
    for path, study in zip(paths, results, strict=True):
        for run in study.runs if study else []:
            problems, run.final = run.final, {}
            for name, problem in problems.items():
                theirs, problem.question = asked.get(name, (name, name))
                run.final[theirs] = problem
        if study and others:
            unchecked = "that prompt, sampling, grader and data are those of the runs beside it cannot be checked"
            notes.append(f"{path.name} does not say how it was measured: {unchecked}.")
    are_distinct = len({path.name for path in paths}) == len(paths)
    sides, best_notes = list[Setting](), list[str]()
    for path, study in zip(paths, studies, strict=True):
        best, label = best_of(study), path.name if are_distinct else str(path)
        if len(study.settings) > 1:
            label = f"{label}: {best.label}"
            best_notes.append(
                f"{label} was the best of {len(study.settings)} settings on one half of the problems; the verdict is "
                "on the other half, which did not choose."
            )
        sides.append(Setting((), label, best.runs, best.best_of))
    among = half(sides, COMPARING) if best_notes else None
    if among == set():
        raise ConfigError(f"{paths[0]}: too few problems to keep half of them from choosing: give one setting a side")
    configs = [study.runs[0].settings for study in others]
    names = [side.label for side, of_file in zip(sides, results, strict=True) if of_file is None]
    differing = [
        f"{key} ({', '.join(f'{typed_word(c.get(key))} in {name}' for c, name in zip(configs, names, strict=True))})"
        for key in differing_keys(configs)
    ]
    if differing and all(len(study.settings) == 1 for study in others):
        notes.append(f"These runs differ in {few(differing)}.")
    same_sweep = len({path.parent.resolve() for path in paths}) == 1 and all("=" in path.name for path in paths)
    return Study(
        first.name,
        "How do these compare?",
        [],
        sides,
        on_purpose=first.on_purpose if same_sweep else [],
        problems=[line for study in studies for line in study.problems],
        notes=[*(line for study in studies for line in study.notes), *notes, *best_notes],
        among=among,
        max_seeds=max(study.max_seeds for study in studies),
    )
