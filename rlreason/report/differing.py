"""What was compared: which settings differ, how it was measured, with which code on which machine, at what cost."""

from collections.abc import Mapping, Sequence
from typing import Any

from rlreason.records.files import OBJECTIVE
from rlreason.report.content import Detail, Table
from rlreason.report.read import differing_keys
from rlreason.report.study import Run, Setting, Study
from rlreason.report.tables import NONE, millions
from rlreason.runtime.text import duration, few, shorten

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
    """The settings in which the runs' configs differ, but for the seed; None where they do not."""
    firsts = [one.runs[0].settings for one in study.settings if one.runs and one.runs[0].settings]
    names = differing_keys(firsts)
    if not names:
        return None
    swept = {axis.partition(".")[0] for axis in study.axes}
    rows = [
        [
            name + ("" if name.partition(".")[0] in swept or name in study.axes else "\nnot swept by name"),
            *(shorten(_word(one.runs[0].settings.get(name)) if one.runs else NONE, LONGEST) for one in study.settings),
        ]
        for name in names
    ]
    return Table("What differs between the settings", ["setting", *(one.label for one in study.settings)], rows)


def _word(value: Any) -> str:
    return "null" if value is None else str(value)


def details_of(study: Study) -> list[Detail]:
    """Everything that is to be opened: configs, protocol, objectives, code and machine, cost, method."""
    found = []
    if (table := configs_table(study)) is not None:
        found.append(Detail(table.title, table=table))
    if (protocol := _protocol(study)) is not None:
        found.append(Detail("How accuracy was measured", table=protocol))
    found += _cards(study)
    found.append(Detail("Code and machine", table=_machine(study)))
    if study.command:
        found.append(Detail("Command", text=study.command))
    found.append(Detail("Cost", text=cost_of(study)))
    found.append(Detail("Method", text=METHOD))
    return found


def _protocol(study: Study) -> Table | None:
    of = [(one.label, run.protocol) for one in study.settings for run in one.runs[:1] if run.protocol is not None]
    if not of:
        return None
    names = dict.fromkeys(name for _, protocol in of for name in protocol)
    same = {name: len({str(protocol.get(name)) for _, protocol in of}) == 1 for name in names}
    rows = []
    for name in names:
        values = {str(protocol.get(name)): None for _, protocol in of}
        shown = next(iter(values)) if same[name] else "; ".join(f"{label}: {p.get(name)}" for label, p in of)
        rows.append([name, shorten(shown, 4 * LONGEST)])
    return Table("How accuracy was measured", ["part", "value"], rows)


def _cards(study: Study) -> list[Detail]:
    """The objective cards, each once, with the settings that have it."""
    cards: dict[str, list[str]] = {}
    for one in study.settings:
        for run in one.runs[:1]:
            path = run.folder / OBJECTIVE
            if path.is_file():
                cards.setdefault(path.read_text(encoding="utf-8", errors="replace"), []).append(one.label)
    several = len(cards) > 1
    return [Detail("Objective" + f": {few(labels)}" * several, text=text) for text, labels in cards.items()]


def _machine(study: Study) -> Table:
    """What ran it; a value that differs between runs is given with its number of runs."""
    rows = [[name, _values(study.runs, name)] for name in ("rlreason", "commit", "python", "platform")]
    rows += [[name, _values(study.runs, "packages", name)] for name in ("torch", "transformers", "vllm", "math-verify")]
    rows += [["processor", _values(study.runs, "hardware", "cpu")], ["GPU", _values(study.runs, "hardware", "gpus")]]
    return Table("Code and machine", ["", "value"], [row for row in rows if row[1]])


def _values(runs: Sequence[Run], *names: str) -> str:
    counts: dict[str, int] = {}
    for run in runs:
        value: Any = run.provenance
        for name in names:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value not in (None, "", [], {}):
            text = shorten(str(value), LONGEST)
            counts[text] = counts.get(text, 0) + 1
    return next(iter(counts), "") if len(counts) < 2 else "; ".join(f"{text} ({n} runs)" for text, n in counts.items())


def cost_of(study: Study) -> str:
    """Time and tokens of all runs, in words."""
    seconds = sum(run.seconds or 0.0 for run in study.runs)
    tokens = sum(run.totals.get("tokens", 0.0) for run in study.runs)
    begun = sum(run.seconds is not None for run in study.runs)
    text = f"{begun} runs took {duration(seconds)} in all and sampled {millions(tokens)} tokens to learn from"
    return f"{text}; some ran side by side." if any(run.shared_machine for run in study.runs) else f"{text}."


def what_differs(study: Study) -> str:
    """The swept keys, and how many other settings differ with them, in words."""
    if len(study.settings) < 2:
        return "the seed alone"
    axes = few([axis for axis in study.axes if _varies(axis, study.settings)] or study.axes, 3)
    return axes or "see below"


def _varies(axis: str, settings: Sequence[Setting]) -> bool:
    return len({dict(one.key).get(axis) for one in settings}) > 1
