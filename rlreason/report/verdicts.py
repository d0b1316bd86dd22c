"""Judge each setting against its reference, and put the verdict into words."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import numpy as np

from rlreason.records.files import FUNCTIONS
from rlreason.report.content import MINUS, TABLES, Verdict, counted
from rlreason.report.study import (
    RUNNING,
    Setting,
    Study,
    StudyRun,
    choosing_mean,
    clusters_of,
    correctness,
    in_common,
    sampled_again,
    unequal,
)
from rlreason.runtime.looks import after_looks
from rlreason.runtime.statistics import (
    LEVEL,
    PROBLEMS,
    SEEDS,
    UNPAIRED,
    Difference,
    Floats,
    clustered,
    compared,
    half_width,
    holm,
    paired_difference,
    seeds_needed,
)
from rlreason.runtime.text import few

SATURATED = (0.02, 0.95)  # both sides below the one or above the other: the task cannot separate them
WIDE = 0.08  # accuracy: an interval of this width also allows differences that matter
MOST_NAMED = 3  # settings that a summary names one by one
#: Headline of a verdict -> its verb in a summary, of one setting and of several; those that name no reference.
HEADLINES: dict[str, tuple[str, str]] = TABLES["headlines"]
ALONE: list[str] = TABLES["alone"]


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


def sentence(a: str, b: str, difference: Difference, outcome: str, comparisons: int, equal_within: float) -> str:
    """Return an outcome in words, for a setting and a reference of these names."""
    if outcome in ("better", "worse"):
        return f"{a} is {outcome} than {b} by {size(difference.mean)} accuracy points ({interval(difference)})."
    low, high = signed(difference.low), signed(difference.high)
    if outcome == "same":
        ends = f"95% interval {low} to {high}"
        return f"No difference larger than {100 * equal_within:g} points between {a} and {b} ({ends})."
    lies = f"the difference lies between {low} and {high} accuracy points."
    if difference.low > 0 or difference.high < 0:
        looks = "better" if difference.mean > 0 else "worse"
        return f"{a} looks {looks} than {b}, but not after correcting for {comparisons} comparisons: by itself, {lies}"
    return f"{a} and {b} cannot be told apart: {lies}"


def settling(difference: Difference, comparisons: int, clusters: str) -> str:
    """Return what would tell: seeds, problems, or more `clusters` ("7 subjects"); "" if the difference is clear."""
    if difference.low > 0 or difference.high < 0:
        return ""
    if abs(difference.mean) < 0.0005:
        if difference.high - difference.low > WIDE:
            return "More seeds and problems would narrow the interval; none would settle so small a difference."
        return "Nothing would settle so small a difference."
    level = LEVEL / max(comparisons, 1)
    needed = seeds_needed(difference, level)
    if needed is not None:
        return (
            f"About {max(needed, difference.seeds + 1)} seeds would settle a difference of this size half of the time."
        )
    if abs(difference.mean) < half_width(level, 0.0, difference.se_extra, math.inf, difference.dof_extra):
        more = f"problems of more {clusters.split()[1]}" if clusters else "more problems"
        return (
            f"More seeds on these {clusters or f'{difference.problems:,} problems'} would not settle it: {more} would."
        )
    return "Not even a thousand seeds would settle a difference of this size."


def summary_of(verdicts: Sequence[Verdict], study: Study) -> str:
    """Return all verdicts of a study in one sentence."""
    if not verdicts:
        accuracies = study.reference.accuracies
        if not accuracies:
            return "Nothing has been measured yet."
        mean, runs = sum(accuracies) / len(accuracies), counted(len(accuracies), "run")
        broken = sum(bool(run.final) and not run.ended for run in study.reference.runs)
        note = f" ({broken} of them broken off, with what they had reached)" if broken else ""
        return f"One setting, {runs}{note}: it ends at {100 * mean:.1f}%. There is nothing to compare it with."
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
NO_TRAINING = ("evaluate", "best_of_n")  # algorithms
EQUAL_WITHIN = 0.02  # accuracy: "no difference larger than 2 points"


@dataclass(frozen=True, slots=True)
class Pairing:
    """The difference of a setting from the reference, and the data behind it."""

    one: Setting
    reference: Setting
    difference: Difference
    correct: tuple[Mapping[int, Floats], Mapping[int, Floats]]  # of both: seed -> correctness on each question
    n_problems: int  # that they were compared on
    most_answered: int  # the largest number of problems that a run answered, where all problems count
    on_purpose: Sequence[str]  # parts of the protocol that differ because the sweep varies them
    clusters: str  # "7 subjects", if the difference is by them
    by_problem: Difference  # as if problems were independent
    looked: bool  # whether seeds were added by looks (seed=auto), whose levels no forecast of seeds knows


def pair(one: Setting, study: Study) -> Pairing | Verdict:
    """Pair two settings over the problems that every run of both answered, or return why they are not compared."""
    reference = study.reference
    differing, on_purpose = unequal(one, reference, study.on_purpose)
    answered = [set(final) for final in (*one.finals, *reference.finals)]
    common = set.intersection(*answered) if answered else {"all"}
    problems = sorted(common if study.among is None else common & study.among)
    empty = next((setting for setting in (one, reference) if not setting.accuracies), None)
    if problems and empty is None and not differing:
        a, b = answers_of((one, reference), problems, study)
        n, by_problem = len(problems), compared(a, b)
        most = max(map(len, answered), default=0) if study.among is None else n
        kinds = clusters_of((one, reference), problems)
        mine, its = answers_of((one, reference), problems, study, problems) if kinds else (a, b)
        difference, clusters = widest(by_problem, mine, its, kinds)
        difference, by_problem = (after_looks(found, study.max_seeds) for found in (difference, by_problem))
        looked = study.max_seeds > 0
        return Pairing(one, reference, difference, (a, b), n, most, on_purpose, clusters, by_problem, looked)
    headline, why = "", "their runs have no problem in common to be compared on"
    if differing:
        line = next((line for line in differing if line.startswith("reward:")), differing[0])
        name, _, values = line.partition(": ")
        first, _, second = values.partition(" and ")
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        why = f"{name} is {second} in {one.label} and {first} in {reference.label}{more}"
        why += "; eval.reward=r1_zero would measure both alike" if name == "reward" else ""
    elif empty is not None:
        why = f"no run of {empty.label} has a final evaluation"
        if any(run.status == RUNNING for run in empty.runs):
            why += " yet: it is still running"
            headline = "running" if empty is one else ""
    typed = (one.typed, reference.typed)
    return Verdict(one.label, reference.label, "not compared", f"Not compared: {why}.", typed=typed, headline=headline)


def answers_of(
    settings: Sequence[Setting], problems: Sequence[str], study: Study, keys: Sequence[str] | None = None
) -> list[dict[int, Floats]]:
    """Return `correctness`, that of one model in one; looks, which add seeds, count each of them."""
    right = correctness(settings, problems, keys)
    return right if study.max_seeds else sampled_again(settings, right)


def widest(
    found: Difference, a: Mapping[int, Floats], b: Mapping[int, Floats], kinds: Mapping[str, Sequence[str]]
) -> tuple[Difference, str]:
    """Return the widest of `found` and its like by clusters of the problems, and by which: "7 subjects", or ""."""
    by = ""
    for fact, clusters in kinds.items():
        wider = clustered(found, a, b, clusters)
        if wider is not found:
            found, by = wider, f"{len({*clusters})} {fact}s"
    return found, by


def verdicts_of(study: Study, equal_within: float = EQUAL_WITHIN, sets: bool = True) -> list[Verdict]:
    """Return a verdict for each setting but the reference, in order, by Holm over all comparisons.

    `sets`: then also on each of `eval.sets`, and Holm is over settings and sets.
    """
    asked = {"": study, **(study.sets if sets else {})}
    found = [pair(one, of) for of in asked.values() for one in of.settings[1:]]
    names = [name for name, of in asked.items() for _ in of.settings[1:]]
    adjusted = holm([one.difference.p for one in found if isinstance(one, Pairing)])
    p_of, n = iter(adjusted), len(adjusted)
    verdicts = [_verdict(one, next(p_of), n, equal_within) if isinstance(one, Pairing) else one for one in found]
    return [
        replace(verdict, of_set=name, sentence=f"On {name}: {verdict.sentence}") if name else verdict
        for name, verdict in zip(names, verdicts, strict=True)
    ]


def not_told_apart(settings: Sequence[Setting], study: Study) -> list[dict[int, str]]:
    """Return of each setting the places of those that it cannot be told from, by Holm over all pairs, with a note."""
    found = {
        (a, b): pair(other, replace(study, settings=[one, other]))
        for (a, one), (b, other) in combinations(enumerate(settings), 2)
    }
    p_of = iter(holm([one.difference.p for one in found.values() if isinstance(one, Pairing)]))
    alike: list[dict[int, str]] = [{} for _ in settings]
    for (a, b), pairing in found.items():
        note = "" if isinstance(pairing, Pairing) else " (not compared)"
        if note or next(p_of) > LEVEL:
            alike[a][b] = alike[b][a] = note
    return alike


def _verdict(pairing: Pairing, p: float, comparisons: int, equal_within: float) -> Verdict:
    """Return the verdict on a setting. `p`: corrected for so many comparisons."""
    one, reference, difference, (mine, its) = pairing.one, pairing.reference, pairing.difference, pairing.correct
    pooled = len(mine) < len(one.finals)  # seeds of one model
    by_seed = {seed: float((mine[seed] - its[seed]).mean()) for seed in sorted(mine.keys() & its.keys())}
    trained = any(run.settings.get("algorithm") not in NO_TRAINING for run in (*one.runs, *reference.runs))
    models = "same" if -equal_within < difference.low and difference.high < equal_within else "cannot tell"
    if p <= LEVEL:
        models = "better" if difference.mean > 0 else "worse"
    one_seed = difference.over == PROBLEMS and trained  # which compares trained models but not settings
    outcome = "cannot tell" if one_seed else models
    diverged, measured = sum(run.diverged for run in one.runs), len(one.accuracies)
    word, headline = "diverged" if diverged else outcome, ""
    if 0 < diverged < measured:
        headline = "diverged in some seeds"
    elif one_seed and not diverged:
        headline = "one seed"
    a, b, parts = one.label, reference.name, list[str]()
    equal = trained and _equal_bit_for_bit(one, reference)
    if equal:
        parts += [f"{a} and {b} are equal bit for bit in all seeds: more seeds would show no difference."]
        outcome, word, headline = "same", "same", ""
    elif one_seed:
        text = sentence(f"Model {a}", b, difference, models, comparisons, equal_within)
        parts += ["One seed on a side: this compares these trained models, not the settings."]
        parts += [text.replace("(95%", "(over problems only, 95%")]
    else:
        text = sentence(a, b, difference, "cannot tell" if diverged else outcome, comparisons, equal_within)
        if diverged:
            parts += [f"{a} diverged in {diverged} of {counted(measured, 'seed')}."]
        if diverged and outcome in ("better", "worse"):
            ends = f"{size(difference.mean)} accuracy points {'above' if outcome == 'better' else 'below'} {b}"
            text = f"Counted as it is, it ends {ends} ({interval(difference)})."
        parts += [text]
        foretold = trained and difference.seeds != 2 and not pairing.looked  # two numbers foretell nothing
        if outcome == "cannot tell" and foretold:
            parts += [settling(difference, comparisons, pairing.clusters)]
    if outcome in ("cannot tell", "same") and not equal:
        means = [np.mean([of.mean() for of in side.values()]) for side in pairing.correct]
        if max(means) < SATURATED[0]:
            parts += [f"Both are below {SATURATED[0]:.0%}: this task cannot separate them."]
        elif min(means) > SATURATED[1]:
            parts += [f"Both are above {SATURATED[1]:.0%}: this task cannot separate them."]
    if outcome == "cannot tell" and difference.seeds == 2 and trained:
        width = size(difference.high - difference.low)
        parts += [f"Two seeds say little of their own spread (the interval is {width} points wide): take four."]
    seeds = {
        SEEDS: f"{difference.seeds} paired seeds",
        UNPAIRED: f"{difference.seeds} or more seeds, unpaired",
        PROBLEMS: f"{len(one.finals)} seeds as one" if pooled else "one seed on a side",
    }[difference.over]
    problems = counted(difference.problems, "problem") + (f" in {pairing.clusters}" if pairing.clusters else "")
    family = f" (Holm, {comparisons} comparisons)" if comparisons > 1 else ""
    return Verdict(
        a,
        reference.label,
        word,
        " ".join(filter(None, (*parts, *caveats_of(pairing)))),
        f"{seeds} \N{MIDDLE DOT} {problems} \N{MIDDLE DOT} {p_text(p)}{family}",
        difference,
        p,
        {} if difference.over == UNPAIRED or pooled else by_seed,
        (one.typed, reference.typed),
        outcome,
        pairing.clusters,
        headline,
    )


def _equal_bit_for_bit(one: Setting, other: Setting) -> bool:
    """Return whether all seeds of two settings have equal curves and answers."""

    def figures_of(run: StudyRun) -> tuple[Any, ...]:
        curves = {name: of.y.tolist() for name, of in run.series.items() if name.startswith(CURVES)}
        return run.final, curves

    mine, its = ({run.seed: figures_of(run) for run in setting.runs} for setting in (one, other))
    measured = all(GRADIENT in run.series and (run.final or run.accuracy is None) for run in one.runs)
    if not measured or not any(run.series[GRADIENT].y.any() for run in one.runs):  # those that learn nothing are equal
        return False
    return mine == its


def caveats_of(pairing: Pairing) -> list[str]:
    """Return the caveats of a verdict, a sentence each."""
    reference, caveats = pairing.reference, list[str]()
    for setting in (pairing.one, reference):
        if setting.best_of:
            chosen = f"was chosen on these same problems, as the best of {setting.best_of} settings"
            caveats.append(f"{setting.label} {chosen}.")
        for run in setting.runs:
            who = f"Seed {run.seed} of {setting.label}"
            if run.final and (run.state == "stopped" or not run.ended):
                step = f"step {run.totals.get('step', 0):.0f}"
                caveats.append(f"{who} ended at {step} ({run.status}) and enters with what it had reached.")
            elif run.accuracy is None:
                why = "its final evaluation is lost" if run.ended else run.status
                caveats.append(f"{who} does not enter ({why}).")
    if diverged := sum(run.diverged for run in reference.runs):
        caveats.append(f"{reference.name} itself diverged in {diverged} of {len(reference.runs)} seeds.")
    sources = defaultdict[str, set[str]](set)  # setting that names a function of the user's -> hashes of its source
    for run in (*pairing.one.runs, *reference.runs):
        for key, digest in run.provenance.get("own_functions", {}).items():
            sources[key].add(digest)
    if edited := [key for key, of in sources.items() if len(of) > 1]:
        caveats.append(f"The source of {few(edited)} is not the same in all runs ({FUNCTIONS} of each has it).")
    mine, its = (side.keys() for side in pairing.correct)
    shared = [str(seed) for seed in sorted(mine & its)]
    if pairing.difference.over == UNPAIRED:
        caveats.append("The seeds differ, so the runs are not paired; the interval is wider for it.")
    elif shared and mine != its:
        caveats.append(f"Compared on the {counted(len(shared), 'seed')} that they share: {few(shared)}.")
    alone, difference = pairing.by_problem, pairing.difference
    if pairing.clusters and (alone.low > 0 or alone.high < 0) and difference.low <= 0 <= difference.high:
        lies = f"the difference lies between {signed(alone.low)} and {signed(alone.high)}"
        caveats.append(f"On problems of these {pairing.clusters} alone {lies}; for others that does not follow.")
    if pairing.n_problems < pairing.most_answered:
        common = f"{pairing.n_problems:,} of {pairing.most_answered:,} problems that all runs answered"
        caveats.append(f"Compared on the {common}.")
    if pairing.on_purpose:
        own = "each setting is measured under its own"
        caveats.append(f"This sweep varies {few(pairing.on_purpose)} on purpose; {own}.")
    return caveats


def effects_of(study: Study) -> list[tuple[str, str, Difference]]:
    """Return (values, which effect, difference) of a whole grid of two swept keys, where 0 is the reference's value.

        alone, i: mean_j (x_ij - x_0j),     together, i and j: (x_ij - x_0j) - (x_i0 - x_00)

    x is the correctness (seeds, problems) of the seeds that all settings ran on the problems that all runs answered, so
    that each effect is a paired difference, by clusters if that is wider. [] without such a grid, or with one seed.
    """
    columns = {name: np.array([dict(one.key).get(name, "") for one in study.settings]) for name in study.axes}
    varied = {name: of for name, of in columns.items() if len({*of}) > 1}
    short = {name.rpartition(".")[2]: of for name, of in varied.items()}
    varied = short if len(short) == len(varied) else varied
    problems = in_common(study.settings)
    if len(varied) != 2 or math.prod(len({*of}) for of in varied.values()) != len(study.settings) or not problems:
        return []
    right, by_problem = (answers_of(study.settings, problems, study, keys) for keys in (None, problems))
    seeds = set.intersection(*map(set, right))
    if not seeds or (len(seeds) < 2 and len(study.reference.finals) == len(right[0])):
        return []
    # (settings, seeds, questions), and problems
    x, rows = (np.array([[of[s] for s in sorted(seeds)] for of in side]) for side in (right, by_problem))
    weights = [  # of each key: value -> 1 where a setting has it, -1 where the reference's
        {f"{name}={value}": 1.0 * (of == value) - (of == of[0]) for value in dict.fromkeys(of) if value != of[0]}
        for name, of in varied.items()
    ]
    effects = [(what, "alone", w * 2 / np.abs(w).sum()) for of in weights for what, w in of.items()]
    effects += [(f"{a} {b}", "together", weights[0][a] * weights[1][b]) for a, b in product(*weights)]
    kinds, found = clusters_of(study.settings, problems), []
    for what, how, w in effects:
        by_question, d = paired_difference(np.tensordot(w, x, 1)), np.tensordot(w, rows, 1)
        effect, _ = widest(by_question, dict(enumerate(d)), dict(enumerate(0 * d)), kinds)
        found.append((what, how, after_looks(effect, study.max_seeds)))
    return found


def best_of(study: Study) -> Setting:
    """Return the setting with the best mean over its seeds on the half that chooses; the reference on a tie."""
    return max(study.settings, key=lambda one: (choosing_mean(one), one is study.reference))
