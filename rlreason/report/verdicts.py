"""The verdict on each setting of a study against its reference, and everything that has to be said with it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from rlreason.report import words
from rlreason.report.content import Verdict
from rlreason.report.pairing import Pairing, pair, side_of, unequal
from rlreason.report.study import Run, Setting, Study
from rlreason.runtime.text import few
from rlreason.statistics import holm
from rlreason.statistics.differences import PROBLEMS, UNPAIRED
from rlreason.sweeps.state import WAITING

GRADIENT = "train/grad_norm"
CURVES = (GRADIENT, "reward/", "rollout/length", "eval/")  # that equal runs have in common to the last bit
EQUAL_WITHIN = 0.02  # accuracy: "no difference larger than 2 points"


def verdicts_of(study: Study, equal_within: float = EQUAL_WITHIN) -> list[Verdict]:
    """One verdict for each setting but the reference, in their order, by Holm over all that could be compared."""
    reference = study.reference
    others = study.settings[1:]
    refused = {id(one): unequal(one, reference, study.on_purpose) for one in others}
    sides = {id(one): side_of(one) for one in study.settings}
    found = {
        id(one): None if refused[id(one)][0] else pair(sides[id(one)], sides[id(reference)], study.among)
        for one in others
    }
    tested = [one for one in others if found[id(one)] is not None]
    adjusted = holm([p.difference.p for one in tested if (p := found[id(one)]) is not None])
    p_of = dict(zip(map(id, tested), adjusted, strict=True))
    verdicts = []
    for one in others:
        pairing, (differing, on_purpose) = found[id(one)], refused[id(one)]
        if pairing is None:
            verdicts.append(_not_compared(one, reference, differing))
            continue
        fixed = sides[id(one)].fixed and sides[id(reference)].fixed
        verdict = _verdict(one, reference, pairing, p_of[id(one)], len(tested), equal_within, fixed)
        marks = marks_of(one, reference, pairing, on_purpose, whole=study.among is None)
        verdicts.append(replace(verdict, sentence=" ".join([verdict.sentence, *marks])))
    return verdicts


def _verdict(
    one: Setting, reference: Setting, pairing: Pairing, p: float, comparisons: int, equal_within: float, fixed: bool
) -> Verdict:
    difference, a, b = pairing.difference, one.label, reference.name
    if not fixed and equal_runs(one, reference):
        text = f"{a} and {b} are equal bit for bit in all seeds: more seeds would show no difference."
        small = words.small_line(difference, p, comparisons, len(pairing.by_seed))
        pair_typed = (one.typed, reference.typed)
        return Verdict(a, reference.label, "same", text, small, difference, p, pairing.by_seed, pair_typed, "same")
    models = words.of_models(difference, p, equal_within)
    outcome = models if fixed else words.outcome_of(difference, p, equal_within)
    diverged, measured = sum(run.diverged for run in one.runs), sum(run.accuracy is not None for run in one.runs)
    if diverged and difference.over != PROBLEMS:
        text = words.of_diverged(a, b, difference, outcome, diverged, measured, comparisons)
    elif difference.over == PROBLEMS and not fixed:
        models_of = (_model(one, pairing), _model(reference, pairing))
        text = words.of_one_seed(*models_of, difference, models, comparisons, equal_within)
    else:
        text = words.sentence(a, b, difference, outcome, comparisons, equal_within, settles=not fixed)
    if outcome in ("cannot tell", "same"):
        text = " ".join(filter(None, [text, words.of_saturated(pairing.means)]))
    if outcome == "cannot tell" and difference.seeds == 2 and not fixed:
        width = words.size(difference.high - difference.low)
        text += f" Two seeds never settle anything: the interval is {width} points wide."
    return Verdict(
        a,
        reference.label,
        "diverged" if diverged else outcome,
        text,
        words.small_line(difference, p, comparisons, len(pairing.by_seed)),
        difference,
        p,
        pairing.by_seed if difference.over != UNPAIRED else {},
        (one.typed, reference.typed),
        outcome,
    )


def equal_runs(one: Setting, reference: Setting) -> bool:
    """Whether two settings came to the same curves and the same answers in every seed: they were one formula."""
    mine, its = ({run.seed: run for run in setting.runs} for setting in (one, reference))
    return mine.keys() == its.keys() and all(_equal(mine[seed], its[seed]) for seed in mine)


def _equal(one: Run, other: Run) -> bool:
    if one.final is None or other.final is None or GRADIENT not in one.series.keys() & other.series.keys():
        return False
    shares = [
        {name: problem.share for name, problem in run.final.problems.items()} for run in (one, other) if run.final
    ]
    curves = [name for name in one.series if name.startswith(CURVES)]
    same = (name in other.series and np.array_equal(one.series[name].y, other.series[name].y) for name in curves)
    return shares[0] == shares[1] and all(same)


def _model(setting: Setting, pairing: Pairing) -> str:
    """What the trained model of a comparison of one seed is called."""
    several = sum(run.accuracy is not None for run in setting.runs) > 1
    return setting.label + (f", seed {min(pairing.by_seed)}" if several and pairing.by_seed else "")


def _not_compared(one: Setting, reference: Setting, differing: Sequence[str]) -> Verdict:
    if differing:
        name, _, values = differing[0].partition(": ")
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        first, _, second = values.partition(" and ")
        why = f"{name} is {second} in {one.label} and {first} in {reference.label}{more}"
    else:
        empty = next((s for s in (one, reference) if not side_of(s).right), None)
        why = f"no run of {empty.label} has a final evaluation" if empty else "their runs answered no problem in common"
    text = f"Not compared: {' '.join(why.split())}."
    return Verdict(one.label, reference.label, "not compared", text, typed=(one.typed, reference.typed))


def marks_of(
    one: Setting, reference: Setting, pairing: Pairing, on_purpose: Sequence[str], whole: bool = True
) -> list[str]:
    """What has to be said with a verdict, a sentence each. `whole`: all problems were to be compared on."""
    marks = [
        f"{setting.label} was chosen on these same problems, as the best of {setting.best_of} settings."
        for setting in (one, reference)
        if setting.best_of
    ]
    marks += [mark for setting in (one, reference) for mark in _of_runs(setting)]
    diverged = sum(run.diverged for run in reference.runs)
    if diverged:
        marks.append(f"{reference.name} itself diverged in {diverged} of {len(reference.runs)} seeds.")
    marks += _of_seeds(one, reference, pairing)
    if whole and len(pairing.problems) < pairing.asked:
        lack = _lacking((one, reference), pairing.asked)
        of = f"{len(pairing.problems):,} of {pairing.asked:,} problems that all runs answered"
        marks.append(f"Compared on the {of}{f': {lack}' if lack else ''}.")
    if on_purpose:
        one_part = len(on_purpose) == 1
        parts = few([part[:1].upper() + part[1:] if k == 0 else part for k, part in enumerate(on_purpose)])
        marks.append(
            f"{parts} {'differs' if one_part else 'differ'}, as this sweep varies {'it' if one_part else 'them'} on "
            "purpose; each setting is measured under its own."
        )
    return marks


def _lacking(settings: Sequence[Setting], asked: int) -> str:
    """'seed 1 of b answered 7', of the runs that answered fewer problems than others."""
    answered = [
        (f"seed {run.seed} of {s.label}", len(run.final.problems)) for s in settings for run in s.runs if run.final
    ]
    short = sorted(((n, who) for who, n in answered if n < asked))
    return few([f"{who} answered {n:,}" for n, who in short], 2)


def _of_runs(setting: Setting) -> list[str]:
    marks = []
    for run in setting.runs:
        who = f"Seed {run.seed} of {setting.label}"
        if run.final is not None and not run.ended:
            of = f" of {run.planned_steps}" if run.planned_steps else ""
            how = "failed" if run.status.partition(":")[0] == "failed" else "stopped"
            marks.append(f"{who} {how} at step {_step(run)}{of} and enters with what it had reached.")
        elif run.status.partition(":")[0] == "stopped" and run.final is not None:
            marks.append(f"{who} was ended at step {_step(run)} ({run.status}) and enters with what it had reached.")
        elif run.status == WAITING:
            marks.append(f"{who} does not enter: it has not begun, or its folder is gone.")
        elif run.accuracy is None:
            marks.append(f"{who} does not enter: {'its final evaluation is lost' if run.ended else run.status}.")
    return marks


def _step(run: Run) -> int:
    if run.totals.get("step") is not None:
        return int(run.totals["step"])
    return run.final.step or 0 if run.final else 0


def _of_seeds(one: Setting, reference: Setting, pairing: Pairing) -> list[str]:
    mine, its = ({run.seed for run in s.runs if run.accuracy is not None} for s in (one, reference))
    marks = []
    if pairing.difference.over == UNPAIRED:
        marks.append("The seeds differ, so the runs are not paired; the interval is wider for it.")
    elif mine != its and mine & its:
        for setting, lacking in ((one, its - mine), (reference, mine - its)):
            if lacking:
                seeds = few([str(seed) for seed in sorted(lacking)])
                marks.append(f"{setting.label} lacks seed{'s' * (len(lacking) > 1)} {seeds}.")
        marks.append(f"Compared on the {len(mine & its)} that they share.")
    return marks
