"""Judge each setting against its reference, and put the verdict into words."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlreason.report.content import Verdict, counted
from rlreason.report.study import CHOOSING, RUNNING, Pairing, Setting, Study, StudyRun, mean_on_half, pair, unequal
from rlreason.runtime.statistics import LEVEL, PROBLEMS, UNPAIRED, Difference, holm, seeds_needed
from rlreason.runtime.text import few
from rlreason.sweeps.state import WAITING, Key, RunState

MINUS = "\N{MINUS SIGN}"
SATURATED = (0.02, 0.95)  # both sides below the one or above the other: the task cannot separate them
WIDE = 0.08  # accuracy: an interval of this width also allows differences that matter
MOST_NAMED = 3  # settings that a summary names one by one
#: Headline of a verdict (its word unless it has another) -> its verb in a summary, of one setting and of several,
#: in the order of the summary.
HEADLINES = {
    "better": ("beats", "beat"),
    "same": ("is as good as", "are as good as"),
    "cannot tell": ("cannot be told apart from", "cannot be told apart from"),
    "one seed": ("cannot be judged by one seed against", "cannot be judged by one seed against"),
    "worse": ("is worse than", "are worse than"),
    "diverged": ("diverges", "diverge"),
    "diverged in some seeds": ("diverges in some seeds", "diverge in some seeds"),
    "running": ("is still running", "are still running"),
    "not compared": ("is not compared", "are not compared"),
}
ALONE = ("diverged", "diverged in some seeds", "running", "not compared")  # which name no reference


def size(difference: float) -> str:
    """Return an amount in points, without a sign: `size(-0.127)` is '12.7'."""
    points = 100 * abs(difference)
    return f"{points:.1f}" if points >= 0.05 or not points else f"{points:.1g}"


def signed(difference: float) -> str:
    """Return a difference in points with its sign.

    >>> signed(-0.0173), signed(0.089), signed(0.0001)
    ('\N{MINUS SIGN}1.7', '+8.9', '0.0')
    """
    text = f"{100 * difference:+.1f}".replace("-", MINUS)
    return "0.0" if text[1:] == "0.0" else text


def interval(difference: Difference) -> str:
    """Return the interval of a difference whose sign is known, as amounts."""
    low, high = sorted((abs(difference.low), abs(difference.high)))
    return f"95% interval {size(low)} to {size(high)}"


def p_text(p: float) -> str:
    """Return a p-value as text: 'p = 0.024' or 'p < 0.001'."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The difference of a setting `a` from the reference `b`, and what judges it."""

    a: str
    b: str
    difference: Difference
    comparisons: int  # that Holm corrects for
    equal_within: float  # accuracy


def sentence(c: Comparison, outcome: str, settles: bool = True) -> str:
    """Return the verdict in words; `settles` adds what it would take to tell."""
    a, b, difference = c.a, c.b, c.difference
    if outcome in ("better", "worse"):
        return f"{a} is {outcome} than {b} by {size(difference.mean)} accuracy points ({interval(difference)})."
    if outcome == "same":
        ends = f"95% interval {signed(difference.low)} to {signed(difference.high)}"
        return f"No difference larger than {100 * c.equal_within:g} points between {a} and {b} ({ends})."
    lies = f"the difference lies between {signed(difference.low)} and {signed(difference.high)} accuracy points."
    if difference.low > 0 or difference.high < 0:
        looks = "better" if difference.mean > 0 else "worse"
        corrected = f"but not after correcting for {c.comparisons} comparisons"
        return f"{a} looks {looks} than {b}, {corrected}: by itself, {lies}"
    text = f"{a} and {b} cannot be told apart: {lies}"
    return f"{text} {settling(difference, c.comparisons)}" if settles else text


def settling(difference: Difference, comparisons: int = 1) -> str:
    """Return what it would take to tell: seeds, or problems."""
    if abs(difference.mean) < 0.0005:
        if difference.high - difference.low > WIDE:
            return "More seeds and problems would narrow the interval; none would settle so small a difference."
        return "Nothing would settle so small a difference."
    needed = seeds_needed(difference, LEVEL / max(comparisons, 1))
    if needed is not None:
        seeds = max(needed, difference.seeds + 1)
        return f"About {seeds} seeds would settle a difference of this size half of the time."
    if difference.se_extra > 0 and abs(difference.mean) < 2 * difference.se_extra:
        return f"More seeds on these {difference.problems:,} problems would not settle it: more problems would."
    return "Not even a thousand seeds would settle a difference of this size."


def small_line(difference: Difference, adjusted_p: float, comparisons: int) -> str:
    """Return in brief what a verdict is based on."""
    unpaired = {PROBLEMS: "one seed on a side", UNPAIRED: f"{difference.seeds} or more seeds, unpaired"}
    seeds = unpaired.get(difference.over, f"{difference.seeds} paired seeds")
    family = f" (Holm, {comparisons} comparisons)" if comparisons > 1 else ""
    problems = counted(difference.problems, "problem")
    return f"{seeds} \N{MIDDLE DOT} {problems} \N{MIDDLE DOT} {p_text(adjusted_p)}{family}"


def summary_of(verdicts: Sequence[Verdict], study: Study) -> str:
    """Return all verdicts of a study in one sentence."""
    if not verdicts:
        accuracies = study.reference.accuracies
        if not accuracies:
            return "Nothing has been measured yet."
        mean, runs = sum(accuracies) / len(accuracies), counted(len(accuracies), "run")
        return f"One setting, {runs}: it ends at {100 * mean:.1f}%. There is nothing to compare it with."
    parts: list[str] = []
    for headline, (of_one, of_several) in HEADLINES.items():
        if names := [verdict.setting for verdict in verdicts if (verdict.headline or verdict.word) == headline]:
            who = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
            if len(names) > MOST_NAMED:
                who = f"{len(names)} of {len(verdicts)} settings"
            part = f"{who} {of_one if len(names) == 1 else of_several}"
            if headline not in ALONE:
                part += " it" if parts else f" {study.reference.name}"
            parts.append(part)
    return f"{'; '.join(parts)}."


GRADIENT = "train/grad_norm"
CURVES = (GRADIENT, "reward/", "rollout/length", "eval/")  # that equal runs have in common to the last bit
EQUAL_WITHIN = 0.02  # accuracy: "no difference larger than 2 points"


def verdicts_of(study: Study, equal_within: float = EQUAL_WITHIN) -> list[Verdict]:
    """Return a verdict for each setting but the reference, in order, by Holm over all comparisons."""
    reference, others = study.reference, study.settings[1:]
    differences = [unequal(one, reference, study.on_purpose) for one in others]
    pairings = [
        None if differing else pair(one, reference, study.among)
        for one, (differing, _) in zip(others, differences, strict=True)
    ]
    adjusted = holm([pairing.difference.p for pairing in pairings if pairing is not None])
    n_compared, p_of = len(adjusted), iter(adjusted)
    verdicts = []
    for one, pairing, (differing, on_purpose) in zip(others, pairings, differences, strict=True):
        if pairing is None:
            verdicts.append(_not_compared(one, reference, differing))
            continue
        comparison = Comparison(one.label, reference.name, pairing.difference, n_compared, equal_within)
        verdict = _verdict(one, reference, pairing, comparison, next(p_of))
        caveats = caveats_of(one, reference, pairing, on_purpose, whole=study.among is None)
        verdicts.append(replace(verdict, sentence=" ".join([verdict.sentence, *caveats])))
    return verdicts


def _verdict(one: Setting, reference: Setting, pairing: Pairing, c: Comparison, p: float) -> Verdict:
    """Return the verdict without its caveats."""
    difference = c.difference
    models = "same" if -c.equal_within < difference.low and difference.high < c.equal_within else "cannot tell"
    if p <= LEVEL:
        models = "better" if difference.mean > 0 else "worse"
    one_seed = difference.over == PROBLEMS and not pairing.fixed  # which compares trained models but not settings
    outcome = "cannot tell" if one_seed else models
    diverged, measured = sum(run.diverged for run in one.runs), len(one.accuracies)
    word, headline = "diverged" if diverged else outcome, ""
    if 0 < diverged < measured:
        headline = "diverged in some seeds"
    elif word == "cannot tell" and one_seed:
        headline = "one seed"
    equal = not pairing.fixed and _equal_bit_for_bit(one, reference)
    if equal:
        text = f"{c.a} and {c.b} are equal bit for bit in all seeds: more seeds would show no difference."
        outcome, word, headline = "same", "same", ""
    elif one_seed:
        of_models = replace(c, a=f"Model {_model(one, pairing)}", b=_model(reference, pairing))
        text = sentence(of_models, models, settles=False).replace("(95%", "(over problems only, 95%")
        text = f"One seed on a side: this compares these trained models, not the settings. {text}"
    elif diverged and difference.over != PROBLEMS:
        text = f"{c.a} diverged in {diverged} of {counted(measured, 'seed')}."
        if outcome in ("better", "worse"):
            ends = f"{size(difference.mean)} accuracy points {'above' if outcome == 'better' else 'below'} {c.b}"
            text += f" Counted as it is, it ends {ends} ({interval(difference)})."
        else:
            text += f" {sentence(c, 'cannot tell')}"
    else:
        text = sentence(c, outcome, settles=not pairing.fixed)
    if outcome in ("cannot tell", "same") and not equal:
        if max(pairing.means) < SATURATED[0]:
            text += f" Both are below {SATURATED[0]:.0%}: this task cannot separate them."
        elif min(pairing.means) > SATURATED[1]:
            text += f" Both are above {SATURATED[1]:.0%}: this task cannot separate them."
    if outcome == "cannot tell" and difference.seeds == 2 and not pairing.fixed:
        width = size(difference.high - difference.low)
        text += f" Two seeds never settle anything: the interval is {width} points wide."
    by_seed = pairing.by_seed if difference.over != UNPAIRED else {}
    small, typed = small_line(difference, p, c.comparisons), (one.typed, reference.typed)
    return Verdict(c.a, reference.label, word, text, small, difference, p, by_seed, typed, outcome, headline)


def _equal_bit_for_bit(one: Setting, other: Setting) -> bool:
    """Return whether all seeds of two settings have equal curves and answers."""
    mine, its = (
        {
            run.seed: {name: of.y.tolist() for name, of in run.series.items() if name.startswith(CURVES)}
            for run in s.runs
        }
        for s in (one, other)
    )
    measured = all(one.right.values()) and all(GRADIENT in curves for curves in mine.values())
    return measured and one.right == other.right and mine == its


def _model(setting: Setting, pairing: Pairing) -> str:
    """Return the name of the trained model in a comparison of one seed."""
    return setting.label + (f", seed {min(pairing.by_seed)}" if len(setting.accuracies) > 1 and pairing.by_seed else "")


def _not_compared(one: Setting, reference: Setting, differing: Sequence[str]) -> Verdict:
    headline, why = "", "their runs answered no problem in common"
    empty = next((s for s in (one, reference) if not s.right), None)
    if differing:
        name, _, values = differing[0].partition(": ")
        first, _, second = values.partition(" and ")
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        why = f"{name} is {second} in {one.label} and {first} in {reference.label}{more}"
    elif empty is not None:
        why = f"no run of {empty.label} has a final evaluation"
        if any(run.status == RUNNING for run in empty.runs):
            why += " yet: it is still running"
            headline = "running" if empty is one else ""
    text = f"Not compared: {' '.join(why.split())}."
    typed = (one.typed, reference.typed)
    return Verdict(one.label, reference.label, "not compared", text, typed=typed, headline=headline)


def caveats_of(one: Setting, reference: Setting, pairing: Pairing, on_purpose: Sequence[str], whole: bool) -> list[str]:
    """Return the caveats of a verdict, a sentence each. `whole`: the comparison is on all problems."""
    caveats = [
        f"{setting.label} was chosen on these same problems, as the best of {setting.best_of} settings."
        for setting in (one, reference)
        if setting.best_of
    ]
    caveats += [text for setting in (one, reference) for run in setting.runs if (text := _caveat_of(run, setting))]
    if diverged := sum(run.diverged for run in reference.runs):
        caveats.append(f"{reference.name} itself diverged in {diverged} of {len(reference.runs)} seeds.")
    mine, its = ({run.seed for run in s.runs if run.accuracy is not None} for s in (one, reference))
    if pairing.difference.over == UNPAIRED:
        caveats.append("The seeds differ, so the runs are not paired; the interval is wider for it.")
    elif mine != its and mine & its:
        for setting, lacking in ((one, its - mine), (reference, mine - its)):
            if lacking:
                noun = "seed" if len(lacking) == 1 else "seeds"
                caveats.append(f"{setting.label} lacks {noun} {few([str(seed) for seed in sorted(lacking)])}.")
        caveats.append(f"Compared on the {len(mine & its)} that they share.")
    if whole and len(pairing.problems) < pairing.most_answered:
        short = sorted(
            (len(run.final.problems), f"seed {run.seed} of {setting.label}")
            for setting in (one, reference)
            for run in setting.runs
            if run.final is not None and len(run.final.problems) < pairing.most_answered
        )
        lack = few([f"{who} answered {n:,}" for n, who in short], 2)
        common = f"{len(pairing.problems):,} of {pairing.most_answered:,} problems that all runs answered"
        caveats.append(f"Compared on the {common}{f': {lack}' if lack else ''}.")
    if on_purpose:
        parts = few(on_purpose)
        differ, them = ("differs", "it") if len(on_purpose) == 1 else ("differ", "them")
        caveats.append(
            f"{parts[0].upper()}{parts[1:]} {differ}, as this sweep varies {them} on purpose; each setting is measured "
            "under its own."
        )
    return caveats


def _caveat_of(run: StudyRun, setting: Setting) -> str:
    """Return how a run that did not finish enters the comparison; "" for one that did."""
    who, step = f"Seed {run.seed} of {setting.label}", run.totals.get("step")
    if step is None:
        step = (run.final.step or 0) if run.final else 0
    if run.final is not None and not run.ended:
        planned = f" of {run.planned_steps}" if run.planned_steps else ""
        how = "failed" if run.state == "failed" else "stopped"
        return f"{who} {how} at step {step:.0f}{planned} and enters with what it had reached."
    if run.final is not None and run.state == "stopped":
        return f"{who} was ended at step {step:.0f} ({run.status}) and enters with what it had reached."
    if run.status == WAITING:
        return f"{who} does not enter: it has not begun, or its folder is gone."
    if run.accuracy is None:
        why = "it is still running" if run.status == RUNNING else run.status
        return f"{who} does not enter: {'its final evaluation is lost' if run.ended else why}."
    return ""


def best_of(study: Study) -> Setting:
    """Return the setting with the best mean over its seeds on the half that chooses; the reference on a tie."""
    return max(study.settings, key=lambda one: (mean_on_half(one, CHOOSING), one is study.reference))


def picked(runs: Sequence[RunState], everyone: Sequence[RunState]) -> int:
    """Return the number of settings in `everyone` if that of `runs` was the best, and they are 3 or more; else 0."""
    by_setting: dict[Key, list[float]] = {}
    for run in everyone:
        by_setting.setdefault(run.key, []).append(run.accuracy or 0.0)
    best = max(by_setting, key=lambda key: np.mean(by_setting[key]))
    return len(by_setting) if len(by_setting) >= 3 and {run.key for run in runs} == {best} else 0
