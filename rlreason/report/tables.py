"""Build the tables of a report: settings, costs, pass@k, the experiment log, and differences of configs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlreason.evaluation.accuracy import pass_at
from rlreason.records.files import OBJECTIVE
from rlreason.report.content import SIGNS, Detail, Table, Verdict, counted
from rlreason.report.read import differing_keys
from rlreason.report.study import RUNNING, Answers, Setting, Study, StudyRun, setting_text, side_of
from rlreason.report.verdicts import p_text, signed, verdicts_of
from rlreason.runtime.differences import paired_difference
from rlreason.runtime.text import duration, few, shorten
from rlreason.sweeps.closing import REFERENCE, JudgedSetting
from rlreason.sweeps.state import Key

NONE = "\N{EN DASH}"


def percent(share: float) -> str:
    """Return a share as text: `percent(0.7468)` is '74.7%'."""
    return f"{100 * share:.1f}%"


def millions(tokens: float) -> str:
    """Return a number of tokens as text.

    >>> millions(278_696), millions(12_345_678), millions(0)
    ('0.28 M', '12.3 M', '0')
    """
    if not tokens:
        return "0"
    return f"{tokens / 1e6:.2f} M" if tokens < 1e7 else f"{tokens / 1e6:.1f} M"


def settings_table(study: Study, verdicts: Sequence[Verdict]) -> Table:
    """Return for each setting its mean, difference to the reference, seeds, best checkpoint, and cost."""
    verdict_of = {verdict.setting: verdict for verdict in verdicts}
    head = ["setting", "accuracy", "difference", "verdict", "seeds", "best checkpoint", "time a run", "tokens a run"]
    rows = [_row(one, verdict_of.get(one.label), one is study.reference) for one in study.settings]
    notes = [f"Accuracy and difference: {study.figure}, with 95% intervals over seeds and problems."]
    if any(len(one.runs) == 1 for one in study.settings):
        notes.append("With one seed the interval is over problems only.")
    if any("*" in row[5] for row in rows):
        notes.append("* The best of several evaluations is biased upwards, and is never compared.")
        for run in study.runs:
            interim = run.settings.get("interim_eval_problems") or run.settings.get("eval_problems")
            if isinstance(interim, int) and run.final is not None and interim < len(run.final.problems):
                fewer = "Evaluations during training ask fewer problems than the final one"
                notes.append(f"{fewer}: the best may lie below it.")
                break
    if any(run.shared_machine for run in study.runs):
        notes.append("Runs shared the machine, so their times compare with nothing.")
    return Table("Settings", head, rows, frozenset({1, 2, 4, 5, 6, 7}), " ".join(notes), frozenset({0}))


def _row(one: Setting, verdict: Verdict | None, is_reference: bool) -> list[str]:
    measured = [run for run in one.runs if run.accuracy is not None]
    accuracy, difference, judgement, best = NONE, NONE, "reference" if is_reference else NONE, NONE
    if curves := [run.evaluations for run in measured if len(run.evaluations) > 1]:
        mean = float(np.mean([max(at_step for _, at_step in curve) for curve in curves]))
        best = f"{percent(mean)}*\nbest of {max(map(len, curves))}"
    if measured and side_of(one).right:
        interval = accuracy_of(one)
        accuracy = percent(0.0) if interval is None else "{}\n{} to {}".format(*map(percent, interval))
    if verdict is not None:
        judgement = f"{SIGNS[verdict.word]} {verdict.word}"
        if (d := verdict.difference) is not None and verdict.adjusted_p is not None:
            difference = f"{signed(d.mean)}\n{signed(d.low)} to {signed(d.high)}"
            judgement += f"\n{p_text(verdict.adjusted_p)}"
    return [
        one.label,
        accuracy,
        difference,
        judgement,
        f"{sum(run.ended for run in one.runs)} of {len(one.runs)}",
        best,
        _mean_of([run.seconds for run in one.runs], duration),
        _mean_of([run.totals.get("tokens") for run in one.runs], millions),
    ]


def accuracy_of(one: Setting, among: set[str] | None = None) -> tuple[float, float, float] | None:
    """Return (mean, low, high) of a setting on the problems that all its runs answered (`among` them), or None.

    It is the interval of the difference from a setting that is always wrong: seeds and problems are samples. With one
    seed it is over problems only.
    """
    side = side_of(one)
    problems = side.problems if among is None or side.problems is None else side.problems & among
    if not problems:
        return None
    right = np.stack(list(side.correctness(sorted(problems), side.questions).values()))  # (seeds, problems)
    difference = paired_difference(right)
    return difference.mean, max(difference.low, 0.0), min(difference.high, 1.0)


def judged_settings(study: Study) -> dict[Key, JudgedSetting]:
    """Return each setting's accuracy and verdict for the table at the end of a sweep."""
    word_of = {verdict.setting: verdict.word for verdict in verdicts_of(study)}
    word_of[study.reference.label] = REFERENCE
    return {one.runs[0].setting: JudgedSetting(accuracy_of(one), word_of[one.label]) for one in study.settings}


def _mean_of(values: Sequence[float | None], as_text: Callable[[float], str]) -> str:
    numbers = [value for value in values if value is not None]
    return as_text(sum(numbers) / len(numbers)) if numbers else NONE


def axes_table(study: Study, verdicts: Sequence[Verdict]) -> Table | None:
    """Return one swept key against another, with the mean accuracy and the difference to the reference."""
    varied = [axis for axis in study.axes if len({dict(one.key).get(axis) for one in study.settings}) > 1]
    if len(varied) != 2:
        return None
    verdict_of = {verdict.setting: verdict for verdict in verdicts}
    down, across = varied
    setting_at = {(dict(one.key).get(down, NONE), dict(one.key).get(across, NONE)): one for one in study.settings}

    def cell(row: str, column: str) -> str:
        if (one := setting_at.get((row, column))) is None:
            return ""
        accuracies = [run.accuracy for run in one.runs if run.accuracy is not None]
        mean, verdict = percent(float(np.mean(accuracies))) if accuracies else NONE, verdict_of.get(one.label)
        if one is study.reference:
            return f"{mean}\nreference"
        if verdict is None or verdict.difference is None:
            return mean
        return f"{mean}\n{SIGNS[verdict.word]} {signed(verdict.difference.mean)}"

    columns = sorted({column for _, column in setting_at}, key=_numbers_first)
    lines = sorted({row for row, _ in setting_at}, key=_numbers_first)
    rows = [[f"{down}={row}", *(cell(row, column) for column in columns)] for row in lines]
    return Table(
        f"{down} against {across}",
        ["", *(f"{across}={value}" for value in columns)],
        rows,
        frozenset(range(1, len(columns) + 1)),
        "Mean accuracy, and below it the difference to the reference in points with the verdict's sign.",
    )


def _numbers_first(value: str) -> tuple[int, float, str]:
    try:
        return 0, float(value), value
    except ValueError:
        return 1, 0.0, value


ONE_SAMPLE = "Every problem was asked once, so there is no pass@k: eval.samples=8 asks each eight times."


def pass_curve(answers: Answers) -> dict[int, float]:
    """Return k -> pass@k over the problems, unbiased (Chen et al. 2021), k = 1, 2, 4 ... to the fewest samples.

    >>> from rlreason.report.study import GradedProblem
    >>> pass_curve(Answers({"a": GradedProblem(1, 4), "b": GradedProblem(4, 4)}))
    {1: 0.625, 2: 0.75, 4: 1.0}
    """
    fewest = min((p.samples for p in answers.problems.values()), default=0)
    ks = [2**power for power in range(fewest.bit_length()) if 2**power <= fewest]
    problems = answers.problems.values()
    return {k: float(np.mean([pass_at(p.samples, round(p.correct), k) for p in problems])) for k in ks}


def passes_table(study: Study) -> Table | None:
    """Return pass@k of each setting before and after training, the mean over seeds; None with one sample a problem."""
    rows, longest, problems = [], list[int](), list[int]()
    for one in study.settings:
        pairs = [before_and_after(run) for run in one.runs]
        before, after = _mean([start for start, _ in pairs]), _mean([final for _, final in pairs])
        problems += [len(final.problems) for start, final in pairs if start is not None and final is not None]
        longest = longest if len(longest) >= len(after) else list(after)
        if len(after) > 1:
            for when, curve in (("before", before), ("after", after)):
                if curve:
                    rows.append([one.label, when, *map(percent, curve.values())])
    if not rows:
        return None
    rows = [[*row, *[NONE] * (len(longest) + 2 - len(row))] for row in rows]
    note = "The probability that at least one of k responses is right, the mean over problems and seeds."
    if problems:
        note += f" Both rows are of the same problems, those asked before and after training: {min(problems):,} a run."
    head = ["setting", "training", *(f"k = {k}" for k in longest)]
    return Table("pass@k", head, rows, frozenset(range(2, len(head))), note, frozenset({0}))


def before_and_after(run: StudyRun) -> tuple[Answers | None, Answers | None]:
    """Return the answers before and after training to the problems that were asked both times.

    An evaluation before training may ask fewer problems than the final one. If one is missing, the other is whole.
    """
    start, final = run.start, run.final
    if start is None or final is None:
        return start, final
    both = start.problems.keys() & final.problems.keys()
    if not both:
        return None, final
    a, b = ({name: p for name, p in answers.problems.items() if name in both} for answers in (start, final))
    return replace(start, problems=a), replace(final, problems=b)


def _mean(answers: Sequence[Answers | None]) -> dict[int, float]:
    curves = [pass_curve(one) for one in answers if one is not None]
    curves = [curve for curve in curves if curve]
    if not curves:
        return {}
    return {k: float(np.mean([curve[k] for curve in curves])) for k in curves[0] if all(k in curve for curve in curves)}


def best_of_n_table(study: Study) -> Table | None:
    """Return the accuracy of each way to choose among N responses, of runs of algorithm=best_of_n, or None."""
    rows: list[list[str]] = []
    numbers: list[int] = []
    for one in study.settings:
        for run in one.runs:
            ways, n_list = run.summary.get("best_of_n"), run.summary.get("n_list")
            if not isinstance(ways, dict) or not isinstance(n_list, list):
                continue
            numbers = numbers if len(numbers) >= len(n_list) else n_list
            name = one.label if len(one.runs) == 1 else f"{one.label}, seed {run.seed}"
            rows += [[name, str(way), *map(_point, values)] for way, values in ways.items()]
    if not rows:
        return None
    rows = [[*row, *[NONE] * (len(numbers) + 2 - len(row))] for row in rows]
    note = "All from one set of samples; 95% intervals over problems."
    head = ["setting", "chosen by", *(f"N = {n}" for n in numbers)]
    return Table("Best of N", head, rows, frozenset(range(2, len(head))), note)


def _point(value: Sequence[float]) -> str:
    try:
        middle, low, high = map(float, value)
    except (TypeError, ValueError):
        return NONE
    return f"{percent(middle)}\n{percent(low)} to {percent(high)}"


#: First word of a status -> its text.
STATUS_TEXTS = {
    "finished": "\N{CHECK MARK} finished",
    "budget": "\N{CHECK MARK} budget spent",
    "stopped": "\N{BLACK SQUARE} stopped",
    "diverged": "\N{MULTIPLICATION X} diverged",
    "interrupted": "\N{BLACK SQUARE} interrupted",
    "failed": "\N{MULTIPLICATION X} failed",
    "running": "\N{HORIZONTAL ELLIPSIS} running",
    "waiting": "\N{HORIZONTAL ELLIPSIS} not begun",
}


def log_of(study: Study) -> Table:
    """Return a row for each run, by setting and seed."""
    head, rows = ["setting", "seed", "state", "why", "steps", "last accuracy", "time"], []
    for label, run in ((setting.label, run) for setting in study.settings for run in setting.runs):
        word, _, rule = run.status.partition(":")
        why = run.reason or (f"by the rule {rule}" if rule else NONE)
        last = run.accuracy if run.accuracy is not None or not run.evaluations else run.evaluations[-1][1]
        reached = run.totals.get("step")
        steps = NONE if reached is None else f"{reached:.0f}"
        if reached is not None and run.planned_steps and run.planned_steps != reached:
            steps += f" of {run.planned_steps}"
        accuracy = NONE if last is None else percent(last)
        time = NONE if run.seconds is None else duration(run.seconds)
        rows.append([label, str(run.seed), STATUS_TEXTS[word], why, steps, accuracy, time])
    return Table("Experiment log", head, rows, frozenset({1, 4, 5, 6}), labels=frozenset({0}))


METHOD = """\
Compared is the accuracy of each run's final evaluation on the same problems, a figure that was fixed before the runs.
The difference of two settings is the mean over seeds and problems of one's correctness minus the other's.
Its 95% interval takes seeds and problems for samples both: Student's t over the seeds' mean differences, and in \
quadrature what all seeds share because they answer the same problems.
Among several settings a verdict counts by Holm's correction; the interval shown is that of the comparison by itself.
A direction is named only where the interval, and the correction, exclude zero; one seed tells of trained models alone.
"""
LONGEST = 80  # characters of a value in a table


def configs_table(study: Study) -> Table | None:
    """Return the settings in which the runs' configs differ, except the seed, or None."""
    firsts = [one.runs[0].settings for one in study.settings if one.runs and one.runs[0].settings]
    names = differing_keys(firsts)
    if not names:
        return None
    swept = {axis.partition(".")[0] for axis in study.axes}
    rows = [
        [
            name + ("" if name.partition(".")[0] in swept or name in study.axes else "\nnot swept by name"),
            *(
                shorten(setting_text(one.runs[0].settings.get(name)) if one.runs else NONE, LONGEST)
                for one in study.settings
            ),
        ]
        for name in names
    ]
    return Table("What differs between the settings", ["setting", *(one.label for one in study.settings)], rows)


def details_of(study: Study) -> list[Detail]:
    """Return all collapsible sections: configs, protocol, objectives, code and machine, cost, method."""
    tables = [Detail(table.title, table=table) for table in (configs_table(study), _protocol(study)) if table]
    machine, command = _machine(study), [Detail("Command", text=study.command)] if study.command else []
    last = [Detail("Cost", text=cost_of(study)), Detail("Method", text=METHOD)]
    return [*tables, *_cards(study), Detail(machine.title, table=machine), *command, *last]


def _protocol(study: Study) -> Table | None:
    protocols = [(one.label, run.protocol) for one in study.settings for run in one.runs[:1] if run.protocol]
    if not protocols:
        return None
    rows = []
    for name in dict.fromkeys(name for _, protocol in protocols for name in protocol):
        values = {str(protocol.get(name)) for _, protocol in protocols}
        text = "; ".join(f"{label}: {protocol.get(name)}" for label, protocol in protocols)
        rows.append([name, shorten(values.pop() if len(values) == 1 else text, 4 * LONGEST)])
    return Table("How accuracy was measured", ["part", "value"], rows)


def _cards(study: Study) -> list[Detail]:
    """Return the objective cards, each once, with the settings that have it."""
    cards: dict[str, list[str]] = {}
    for one in study.settings:
        for run in one.runs[:1]:
            path = run.folder / OBJECTIVE
            if path.is_file():
                cards.setdefault(path.read_text(encoding="utf-8", errors="replace"), []).append(one.label)
    several = len(cards) > 1
    return [
        Detail(f"Objective: {few(labels)}" if several else "Objective", text=text) for text, labels in cards.items()
    ]


def _machine(study: Study) -> Table:
    """Return the machine and versions; a value that differs between runs has its number of runs."""
    rows = [[name, _values(study.runs, name)] for name in ("rlreason", "commit", "python", "platform")]
    rows += [[name, _values(study.runs, "packages", name)] for name in ("torch", "transformers", "vllm", "math-verify")]
    rows += [["processor", _values(study.runs, "hardware", "cpu")], ["GPU", _values(study.runs, "hardware", "gpus")]]
    return Table("Code and machine", ["", "value"], [row for row in rows if row[1]])


def _values(runs: Sequence[StudyRun], *names: str) -> str:
    counts: dict[str, int] = {}
    for run in runs:
        value: Any = run.provenance
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value not in (None, "", [], {}):
            text = shorten(str(value), LONGEST)
            counts[text] = counts.get(text, 0) + 1
    if len(counts) < 2:
        return next(iter(counts), "")
    return "; ".join(f"{text} ({n} runs)" for text, n in counts.items())


def cost_of(study: Study) -> str:
    """Return time and tokens of all runs, in words."""
    seconds = sum(run.seconds or 0.0 for run in study.runs)
    tokens = sum(run.totals.get("tokens", 0.0) for run in study.runs)
    timed = sum(run.seconds is not None for run in study.runs)
    text = (
        f"{counted(timed, 'run')} took {duration(seconds)} in all and sampled {millions(tokens)} tokens to learn from"
    )
    if any(run.status == RUNNING for run in study.runs):
        text = f"{millions(tokens)} tokens sampled so far; {timed} ended, after {duration(seconds)}"
    return f"{text}; some ran side by side." if any(run.shared_machine for run in study.runs) else f"{text}."


def what_differs(study: Study) -> str:
    """Return the swept keys that vary, in words."""
    if len(study.settings) < 2:
        return "the seed alone"
    varied = [axis for axis in study.axes if len({dict(one.key).get(axis) for one in study.settings}) > 1]
    return few(varied or study.axes, 3) or "see below"
