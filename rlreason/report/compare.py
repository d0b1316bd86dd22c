"""Which of two settings is better, by how much, and when no one can tell.

A and B are runs, sweeps, settings of a sweep (SWEEP/KEY=VALUE), evaluations, CSV files with the columns
setting,seed,problem,correct, or folders of TRL's completions. The first is the reference. A sweep or a CSV file alone:
all its settings against its reference. Of two sweeps, or two files, the best settings are compared.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.report.content import Verdict
from rlreason.report.read import read_given, study_of
from rlreason.report.remarks import warnings_of
from rlreason.report.study import Setting, Study, beside_runs, is_tabular, study_of_file
from rlreason.report.verdicts import EQUAL_WITHIN, best_of, comparing_half, how_chosen, unequal_tuning, verdicts_of
from rlreason.runtime.streams import folded
from rlreason.runtime.subcommand import Answer, Parser

OUTCOMES = ("better", "worse", "same")
NOT_AS_EXPECTED = 1  # exit code


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `rlreason compare`."""
    parser.add_argument("sides", metavar="RUN", type=Path, nargs="+", help="the reference, and what to compare with it")
    parser.add_argument(
        "--expect", choices=OUTCOMES, help=f"exit with {NOT_AS_EXPECTED} unless every verdict is this one"
    )
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
    lines = [folded(line, console.width) for verdict in verdicts for line in _lines(verdict)]
    said = [*study.notes, *study.problems, *warnings_of(study)]
    lines += [folded(f"! {text}", console.width) for text in said]
    exit_code = 0 if comparable else ConfigError.exit_code
    if arguments.expect and (other := [v for v in verdicts if v.outcome != arguments.expect]):
        exit_code = NOT_AS_EXPECTED
        lines.append(f"expected {arguments.expect}: {other[0].setting} is {other[0].outcome or other[0].word!r}")
    return Answer("\n".join(lines), [entry(verdict, said) for verdict in verdicts], exit_code)


def entry(verdict: Verdict, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return a verdict for JSON; the difference and its ends are accuracies, 0 to 1. `notes`: apply to all verdicts."""
    found = verdict.difference
    return {
        "setting": verdict.typed[0],
        "reference": verdict.typed[1],
        "difference": found.mean if found else None,
        "low": found.low if found else None,
        "high": found.high if found else None,
        "verdict": verdict.outcome or verdict.word,
        "seeds": found.seeds if found else 0,
        "problems": found.problems if found else 0,
        "p": found.p if found else None,
        "adjusted_p": verdict.adjusted_p,
        "sentence": verdict.sentence,
        "notes": list(notes),
    }


def _lines(verdict: Verdict) -> list[str]:
    return [
        f"{verdict.outcome or verdict.word}: {verdict.sentence}",
        *([f"  {verdict.small}"] if verdict.small else []),
    ]


def compared_study(paths: Sequence[Path]) -> Study:
    """Return the study of the arguments: `paths[0]` is the reference, or contains it if it is alone."""
    if len(paths) == 1:
        path = paths[0]
        study = _study_of(path, is_tabular(path))
        if len(study.settings) < 2:
            raise ConfigError(
                f"{path} holds one setting, {study.reference.label}: give a second one to compare with it"
            )
        return study
    tabular = [is_tabular(path) for path in paths]
    studies = [_study_of(path, of_file) for path, of_file in zip(paths, tabular, strict=True)]
    files, others = ([s for s, of_file in zip(studies, tabular, strict=True) if of_file is of] for of in (True, False))
    unknown = beside_runs(files, others)
    sides = [best_of(study) for study in studies]
    labels = _labels(paths, studies, sides)
    _refuse_the_same(paths, sides)
    joined = Study(
        studies[0].name,
        "How do these compare?",
        [],
        [Setting((), label, side.runs, side.best_of) for label, side in zip(labels, sides, strict=True)],
        on_purpose=studies[0].on_purpose if _of_one_sweep(paths) else [],
        problems=[line for study in studies for line in study.problems],
        notes=[line for study in studies for line in study.notes] + unknown,
        folders=list(paths),
    )
    tried = [len(study.settings) for study in studies]
    if max(tried) > 1:
        joined.among = comparing_half(joined.settings)
        if not joined.among:
            raise ConfigError(
                f"{paths[0]}: too few problems to keep half of them from choosing: give one setting a side"
            )
        joined.notes += [how_chosen(label, of) for label, of in zip(labels, tried, strict=True) if of > 1]
        joined.notes += [
            text for k in range(1, len(tried)) if (text := unequal_tuning(labels[k], tried[k], labels[0], tried[0]))
        ]
    return joined


def _study_of(path: Path, of_file: bool) -> Study:
    return study_of_file(path) if of_file else study_of([read_given(path)])


def _of_one_sweep(paths: Sequence[Path]) -> bool:
    """Return whether all sides are settings of one sweep, SWEEP/KEY=VALUE."""
    return len({path.parent.resolve() for path in paths}) == 1 and all("=" in path.name for path in paths)


def _refuse_the_same(paths: Sequence[Path], sides: Sequence[Setting]) -> None:
    """Raise `ConfigError` if a side is compared with its own runs."""
    seen: dict[tuple[tuple[Path, str], ...], Path] = {}
    for path, side in zip(paths, sides, strict=True):
        runs = tuple((run.folder.resolve(), run.name) for run in side.runs)
        if runs in seen:
            raise ConfigError(f"{seen[runs]} and {path} are the same runs ({side.label}): give two different sides")
        seen[runs] = path


def _labels(paths: Sequence[Path], studies: Sequence[Study], sides: Sequence[Setting]) -> list[str]:
    """Return the name of each side: its setting if the sweep is the same, else with the folder that was given."""
    given = [path.name or str(path) for path in paths]
    if len(set(given)) < len(given):
        given = [str(path) for path in paths]
    if len(set(given)) < len(given):
        raise ConfigError(f"{given[0]} is given twice: give two different sides")
    return [
        f"{name}: {side.label}" if len(study.settings) > 1 else name
        for name, study, side in zip(given, studies, sides, strict=True)
    ]
