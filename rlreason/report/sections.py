"""Build the report of a study: its facts and warnings, its tables, and the same problems over training."""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

from rlreason.errors import ConfigError
from rlreason.evaluation.accuracy import pass_at
from rlreason.evaluation.cases import category
from rlreason.records.files import EVALS, OBJECTIVE, response_files
from rlreason.records.reader import RunFolder
from rlreason.report.content import NONE, PLUS_MINUS, SIGNS, TABLES, Case, Report, Table, Verdict, filled
from rlreason.report.figures import figures_of, figures_with_sets, forest_of, legend_of
from rlreason.report.study import RUNNING, Setting, Study, clusters_of, correctness, in_common, sampled_again
from rlreason.report.verdicts import (
    NO_TRAINING,
    effects_of,
    not_told_apart,
    p_text,
    signed,
    size,
    summary_of,
    verdicts_of,
)
from rlreason.runtime.statistics import LEVEL, holm, paired_difference, too_few
from rlreason.runtime.text import duration, few, shorten
from rlreason.sweeps.state import REFERENCE, WAITING, Judged, Key

LONGEST = 320  # characters of a value in a table
MEASURED = "How accuracy was measured"
TOLD_APART = "Who can be told from whom"
#: Setting, its accuracy with the ends of its interval, places of those that it cannot be told from, with a note.
Measured = tuple[Setting, tuple[float, float, float], dict[int, str]]


def build_report(study: Study) -> Report:
    """Build the whole report of a study."""
    every, sets, details = verdicts_of(study), study.sets, list[tuple[str, str | Table]]()
    verdicts = on_set(every, "")
    if protocol := next((run.protocol for run in study.runs if run.protocol), None):
        rows = [[name, shorten(str(value), LONGEST)] for name, value in protocol.items()]
        note = "Of the first run that has one; a verdict is refused, or says so, where another part differs."
        details.append((MEASURED, Table(MEASURED, ["part", "value"], rows, note=note)))
    summaries = [summary_of(verdicts, study)]
    summaries += [f"On {name}: {summary_of(found, of)}" for name, of in sets.items() if (found := on_set(every, name))]
    cards = defaultdict[str, list[str]](list)
    for one in study.settings:
        path = one.runs[0].folder / OBJECTIVE
        if path.is_file():
            cards[path.read_text(encoding="utf-8", errors="replace")].append(one.label)
    details += [(f"Objective: {few(of)}", text) for text, of in cards.items()]
    details += [("Command", study.command)] if study.command else []
    measured = measured_of(study)
    tables = [
        measured_table(study, measured),
        settings_table(study, verdicts),
        sets_table(study, every),
        effects_table(study, verdicts),
        passes_table(study),
        *(replace(table, title=f"pass@k on {name}") for name, of in sets.items() if (table := passes_table(of))),
        health_table(study),
    ]
    return Report(
        name=study.name,
        question=study.question,
        summary=" ".join(summaries),
        lead=filled(
            "lead.txt.j2",
            study=study,
            differs=what_differs(study),
            seeds=sorted({len(one.runs) for one in study.settings}),
            answered=max(len(run.final) for run in study.runs),
        ),
        legend=legend_of(study, verdicts),
        verdicts=every,
        facts=facts_of(study),
        warnings=[*warnings_of(study), *study.notes, *study.carried],
        figures=figures_of(study, figures_with_sets(study)),
        tables=[*filter(None, tables)],
        models=[
            {
                "setting": one.typed,
                "mean": mean,
                "low": low,
                "high": high,
                "cannot_be_told_from": [measured[place][0].typed for place in alike],
            }
            for one, (mean, low, high), alike in measured
        ],
        log=log_of(study),
        problems=study.problems,
        cases=cases_of(study),
        details=[*details, ("Method", filled("method.txt.j2"))],
        forest=forest_of(verdicts),
    )


# ---- facts and warnings ----

UNEQUAL = 1.25  # a ratio of two budgets above it makes them different
FEW_PROBLEMS = 16  # on fewer, seeds may agree by chance


def facts_of(study: Study) -> list[tuple[str, str]]:
    """Return the facts below the first screen: term and description."""
    runs = study.runs
    tokens = sorted(total for one in study.settings if (total := mean_total(one, "tokens")))
    facts = filled(
        "facts.txt.j2",
        differs=what_differs(study),
        study=study,
        tokens=list(dict.fromkeys(millions(of) for of in tokens)),
        early=sum(run.status not in (WAITING, RUNNING) and (not run.ended or run.diverged) for run in runs),
        overlaps=sorted({str(how) for run in runs if (how := run.settings.get("data.overlap"))}),
        health=health_of(study),
        duration=duration,
        sampled=millions(sum(run.totals.get("tokens", 0.0) for run in runs)),
    )
    return [(term, text) for term, _, text in (line.partition(": ") for line in facts.splitlines()) if text]


def what_differs(study: Study) -> str:
    """Return the swept keys that vary, in words."""
    return few(study.axes, 3) or "see below" if len(study.settings) > 1 else "the seed alone"


def health_of(study: Study) -> str:
    """Return in words how many of the runs have something wrong."""
    examined = [run for run in study.runs if run.series]
    ill = sum(any(finding.problem for finding in run.findings) for run in examined)
    what = f"something is wrong in {ill} of" if ill else "nothing is wrong in"
    return f"{what} {len(examined)} runs"


def mean_total(one: Setting, axis: str) -> float:
    """Return the mean of a counter of AXES at the end of the setting's runs; 0 without any."""
    totals = [run.totals[axis] for run in one.runs if run.ended and not run.diverged and axis in run.totals]
    return float(np.mean(totals)) if totals else 0.0


def warnings_of(study: Study) -> Iterator[str]:
    """Yield what makes the runs less comparable than they look, a plain sentence each."""
    for one in study.settings:
        finals = [final for final in one.finals if len(final) >= FEW_PROBLEMS]
        mixed = [final for final in finals if len({problem.share for problem in final.values()}) > 1]
        if len(mixed) > 1 and all(final == mixed[0] for final in mixed[1:]):
            yield (
                f"All {len(mixed)} seeds of {one.label} gave the same answers to every problem: if they are copies of "
                "one run, they tell no more than one seed."
            )
    for axis, what in (("tokens", "generated tokens"), ("updates", "optimizer updates")):
        base, totals = mean_total(study.reference, axis), {one.label: mean_total(one, axis) for one in study.settings}
        ratios = {label: total / base for label, total in totals.items() if base and total}
        odd = [f"{label}: {q:.1f} times" for label, q in ratios.items() if q > UNEQUAL or q < 1 / UNEQUAL]
        if odd:
            cure = f"read the curves against {axis} too"
            yield f"The {what} differ from those of {study.reference.name} ({few(odd, 3)}): {cure}."
    for fact, of in clusters_of(study.settings, in_common(study.settings)).items():
        if too_few(of):
            yield f"There are too few {fact}s of like size to tell what goes by them."
    for name in dict.fromkeys(name for run in study.runs for name in run.sets):
        if without := [run.folder.name for run in study.runs if name not in run.sets and run.accuracy is not None]:
            yield f"Not measured on {name}, and left out there: {few(without)}."
    if any(run.settings.get("data.overlap") == "allow" for run in study.runs):
        yield "Training and validation problems may overlap (data.overlap=allow): accuracy may be memory."
    series = [of for run in study.runs for of in run.series.items()]
    failures = [of for name, of in series if name.startswith("eval/") and name.endswith("/grading_failures")]
    if failed := sum(float(of.y.sum()) for of in failures):
        yield f"{failed:.0f} responses of evaluations got no grade (timeouts or errors) and count as wrong."
    names = {"code": "code", "hardware": "graphics card or processor", "packages": "library versions"}
    for key, name in names.items():
        values = {str(run.provenance[key]) for run in study.runs if run.provenance.get(key)}
        if len(values) > 1:
            yield f"Not all runs had the same {name}: {len(values)} different ones are on record."


# ---- tables ----


def percent(share: float) -> str:
    """Return a share as text: `percent(0.7468)` is '74.7%'."""
    return f"{100 * share:.1f}%"


def millions(tokens: float) -> str:
    """Return a number of tokens as text: `millions(278_696)` is '0.28 M'."""
    return f"{tokens / 1e6:.{2 if tokens < 1e7 else 1}f} M" if tokens else "0"


def _mean_of(values: Sequence[float | None], as_text: Callable[[float], str]) -> str:
    numbers = [value for value in values if value is not None]
    return as_text(sum(numbers) / len(numbers)) if numbers else NONE


def settings_table(study: Study, verdicts: Sequence[Verdict]) -> Table:
    """Return for each setting its mean, difference to the reference, seeds and cost."""
    head = ["setting", "accuracy", "difference", "verdict", "seeds", "time a run", "tokens a run"]
    rows = []
    for one, verdict in zip(study.settings, [None, *verdicts], strict=True):
        rows.append([
            one.label,
            *judged_cells(one, verdict),
            f"{sum(run.ended for run in one.runs)} of {len(one.runs)}",
            _mean_of([run.seconds for run in one.runs], duration),
            _mean_of([run.totals.get("tokens") for run in one.runs], millions),
        ])  # fmt: skip
    note = (
        f"Accuracy and difference (points): the final evaluation, {PLUS_MINUS} half the width of its 95% interval over "
        "seeds and problems, with one seed over problems only; a difference's is by the kinds that its verdict names."
    )
    return Table("Settings", head, rows, frozenset({1, 2, 4, 5, 6}), note)


def judged_cells(one: Setting, verdict: Verdict | None) -> tuple[str, str, str]:
    """Return a setting's accuracy, its difference from the reference and the verdict; None: it is the reference."""
    accuracy, difference, word = NONE, NONE, "reference"
    if one.accuracies:
        mean, low, high = accuracy_of(one) or (0.0, 0.0, 0.0)  # its ends are kept within 0 and 1
        accuracy = f"{percent(mean)}\n{PLUS_MINUS} {size(max(mean - low, high - mean))}"
    if verdict is not None:
        word = f"{SIGNS[verdict.word]} {verdict.word}"
        if (d := verdict.difference) is not None:
            word += f"\n{p_text(verdict.adjusted_p or 0.0)}"
            difference = f"{signed(d.mean)}\n{PLUS_MINUS} {size(d.half)}"
    return accuracy, difference, word


def on_set(verdicts: Sequence[Verdict], name: str) -> list[Verdict]:
    """Return the verdicts on one of `eval.sets`; "" are those on the runs' own validation."""
    return [verdict for verdict in verdicts if verdict.of_set == name]


def sets_table(study: Study, verdicts: Sequence[Verdict]) -> Table | None:
    """Return each setting's accuracy and verdict on each of `eval.sets`; None without any."""
    rows = []
    for name, of in study.sets.items():
        of_set = on_set(verdicts, name)
        rows += [[one.label, name, *judged_cells(one, v)] for one, v in zip(of.settings, [None, *of_set], strict=True)]
    head = ["setting", "set", "accuracy", "difference", "verdict"]
    note = "As in the table of settings; p by Holm's correction over all settings and sets, the runs' own included."
    return Table("Validation sets", head, rows, frozenset({2, 3}), note) if rows else None


def measured_of(study: Study) -> list[Measured]:
    """Return each setting, best first, its accuracy with the interval, and the places of others as `not_told_apart`.

    [] where runs train, or fewer than two settings have an accuracy.
    """
    found = [(accuracy, one) for one in study.settings if (accuracy := accuracy_of(one))]
    algorithms = {run.settings.get("algorithm") for _, one in found for run in one.runs if run.final}
    if len(found) < 2 or not algorithms.issubset(NO_TRAINING):
        return []
    found.sort(key=lambda pair: -pair[0][0])
    alike = not_told_apart([one for _, one in found], study)
    return [(one, accuracy, others) for (accuracy, one), others in zip(found, alike, strict=True)]


def measured_table(study: Study, measured: Sequence[Measured]) -> Table | None:
    """Return what `measured_of` found as a table; None without any."""
    rows = []
    for number, (one, (mean, low, high), alike) in enumerate(measured, 1):
        others = [f"{place + 1}{note}" for place, note in alike.items()]
        ends = f"{percent(low)} to {percent(high)}"
        rows.append([str(number), one.label, percent(mean), ends, ", ".join(others) or NONE])
    note = (
        "Accuracy with its 95% interval over problems; seeds of one model are further samples. Each two are compared "
        "on the problems that both answered, with Holm's correction for all pairs."
    )
    head = ["no.", " ".join(study.axes) or "run", "accuracy", "95% interval", "cannot be told from"]
    return Table(TOLD_APART, head, rows, frozenset({2, 3}), note) if rows else None


def effects_table(study: Study, verdicts: Sequence[Verdict]) -> Table | None:
    """Return what values of two swept keys change, alone and together; None without a whole grid, compared alike."""
    if any(verdict.difference is None for verdict in verdicts) or not (effects := effects_of(study)):
        return None
    rows = []
    for (what, how, d), p in zip(effects, holm([d.p for _, _, d in effects]), strict=True):
        word = ("better" if d.mean > 0 else "worse") if p <= LEVEL else "cannot tell"
        rows.append([f"{what}\n{how}", f"{signed(d.mean)}\n{PLUS_MINUS} {size(d.half)}", f"{word}\n{p_text(p)}"])
    note = (
        f"Against the values of {study.reference.label}: accuracy points and 95% interval, over problems and the "
        f"seeds that all settings ran ({effects[0][2].seeds}); p by Holm's correction over this table. Alone: the mean "
        "over the other key's values. Together: what both change, minus what each changes by itself."
    )
    return Table(TABLES["effects"], ["value", "points", "verdict"], rows, frozenset({1}), note)


def accuracy_of(one: Setting, among: set[str] | None = None) -> tuple[float, float, float] | None:
    """Return (mean, low, high) of a setting on the problems that all its runs answered (`among` them), or None.

    It is the interval of the difference from a setting that is always wrong: seeds and problems are samples. With one
    seed, or one model, it is over problems only; it is never by clusters of them.
    """
    problems = [name for name in in_common([one]) if among is None or name in among]
    if not problems:
        return None
    [right] = sampled_again([one], correctness([one], problems))
    difference = paired_difference(np.stack(list(right.values())))  # of (seeds, questions)
    return difference.mean, max(difference.low, 0.0), min(difference.high, 1.0)


def judged_settings(study: Study) -> dict[Key, Judged]:
    """Return each setting's accuracy and verdict for the table at the end of a sweep."""
    words = [REFERENCE, *(verdict.word for verdict in on_set(verdicts_of(study), ""))]
    return {one.key: (accuracy_of(one), word) for one, word in zip(study.settings, words, strict=True)}


def passes_table(study: Study) -> Table | None:
    """Return pass@k of each setting before and after training, the mean over seeds; None with one sample a problem.

    It is unbiased (Chen et al. 2021), the mean over the problems, for k = 1, 2, 4 ... to the fewest samples of one.
    Of a run with both evaluations, only the problems that were asked both times count.
    """
    graded: dict[tuple[str, str], list[list[tuple[int, int]]]] = defaultdict(list)  # of each run (samples, correct)
    for one, run in study.each:
        answers = {when: problems for when, problems in (("before", run.start), ("after", run.final)) if problems}
        for when, problems in answers.items():
            common = [problems[name] for name in sorted(problems) if all(name in other for other in answers.values())]
            graded[one.label, when].append([(problem.samples, round(problem.correct)) for problem in common])
    samples = [n for runs in graded.values() for counts in runs for n, _ in counts or [(0, 0)]]
    powers = [2**power for power in range(min(samples, default=0).bit_length())]
    if len(powers) < 2:
        return None
    rows = []
    for of, runs in graded.items():
        curves = [[np.mean([pass_at(n, correct, k) for n, correct in counts]) for k in powers] for counts in runs]
        rows.append([*of, *map(percent, np.mean(curves, axis=0))])
    head = ["setting", "training", *(f"k = {power}" for power in powers)]
    note = (
        "The probability that at least one of k responses is right, the mean over problems and seeds. Before and after "
        "training are of the same problems, those that were asked both times."
    )
    return Table("pass@k", head, rows, frozenset(range(2, len(head))), note)


def health_table(study: Study) -> Table | None:
    """Return each problem of a setting's runs: how many have it, where first, why, and what to try."""
    rows = []
    for one in study.settings:
        found = [(run.seed, finding) for run in one.runs for finding in run.findings if finding.problem]
        for rule in dict.fromkeys(finding.rule for _, finding in found):
            by_seed = {seed: finding for seed, finding in found if finding.rule == rule}
            first = min(by_seed.values(), key=lambda finding: finding.step or 0)
            seeds = f"{len(by_seed)} of {len(one.runs)}\nseed {', '.join(map(str, by_seed))}"
            rows.append([one.label, f"{rule}\n{first.what}", seeds, str(first.step), first.causes, first.cure])
    head = ["setting", "what is wrong", "runs", "first at step", "commonest causes", "try"]
    note = "What the monitors find in the recorded metrics, all of them on. With evidence: rlreason health RUN."
    return Table("Health of the runs", head, rows, frozenset({3}), note) if rows else None


def log_of(study: Study) -> Table:
    """Return a row for each run, by setting and seed."""
    head, rows = ["setting", "seed", "state", "why", "steps", "last accuracy", "time"], []
    for one, run in study.each:
        rule, reached, last = run.status.partition(":")[2], run.totals.get("step"), run.accuracy
        if last is None and "eval/accuracy" in run.series:
            last = run.series["eval/accuracy"].y[-1]
        steps = NONE if reached is None else f"{reached:.0f} of {run.planned_steps or NONE}"
        why, time = run.reason or (f"by the rule {rule}" if rule else NONE), _mean_of([run.seconds], duration)
        rows.append([one.label, str(run.seed), run.state, why, steps, _mean_of([last], percent), time])
    return Table("Experiment log", head, rows, frozenset({1, 4, 5, 6}))


# ---- the same problems over training ----

PROBLEMS_SHOWN, SETTINGS_SHOWN = 4, 6  # at most
SHOWN = ("problem_id", "response", "outcome")  # fields of a response
OUTCOMES = {"correct": "correct", "format1_wrong": "wrong", "format0": "no format"}
LONGEST_RESPONSE = 600  # characters


def cases_of(study: Study) -> list[Case]:
    """Select problems by a fixed rule, with responses of each setting's smallest seed: at first, midway, in the end.

    The problems are those that all these runs answered: the first, by a hash, that each possible number of runs solves.
    The steps are those that the reference has saved. [] if it has saved none.
    """
    settings = [one for one in study.settings if one.finals][:SETTINGS_SHOWN]
    runs = {one.label: next(run for run in one.runs if run.final) for one in settings}
    files = {  # of two evaluations of one step the later one, which is the final one
        label: {file.step or 0: file for file in response_files(run.folder, EVALS)} for label, run in runs.items()
    }
    saved = sorted(next(iter(files.values()), {}))
    if not saved:
        return []
    steps = sorted({saved[0], saved[len(saved) // 2], saved[-1]})
    common = set.intersection(*(set(asked) for run in runs.values() for asked in (run.final, run.start) if asked))
    solved_by = dict[int, str]()  # the first problem of each number of runs that solve it in the end
    for name in sorted(common, key=lambda name: zlib.crc32(name.encode())):
        solved_by.setdefault(sum(run.final[name].share == 1 for run in runs.values()), name)
    names, texts = list(solved_by.values())[:PROBLEMS_SHOWN], dict[str, tuple[str, str]]()
    shown: dict[str, dict[int, dict[str, dict[str, str]]]] = {name: {step: {} for step in steps} for name in names}
    for step, label in product(steps, runs):
        try:
            file = files[label][step]
            rows = RunFolder(runs[label].folder, lambda _: None).rows(file, SHOWN)
        except (KeyError, ConfigError):  # it has not saved this step, or the file is damaged
            continue
        for line, row in rows.items():
            name = row["problem_id"]
            if name in names and label not in shown[name][step]:
                told = (row.get("question"), row.get("gold"), row["response"])
                question, gold, text = (shorten(str(one), LONGEST_RESPONSE, "both") for one in told)
                texts[name] = question, gold
                shown[name][step][label] = {
                    "setting": label,
                    "outcome": OUTCOMES[category(row["outcome"], row.get("format_reward") or 0)],
                    "text": text,
                    "where": f"{Path(*file.path.parts[-3:])}:{line}",
                }
    return [
        Case(*texts[name], {step: list(of.values()) for step, of in by_step.items()})
        for name, by_step in shown.items()
        if all(by_step.values())
    ]
