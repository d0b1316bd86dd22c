"""Define what a report compares: settings, runs and answers; and pair the answers of two settings."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.config.leaves import typed_word
from rlreason.evaluation.protocol import Protocol, differences
from rlreason.health.monitors import Finding
from rlreason.records.reader import ended_by_itself
from rlreason.records.resume import is_below
from rlreason.report.content import TABLES, Series, printable
from rlreason.runtime.statistics import Floats, of_clusters
from rlreason.runtime.text import question_keys
from rlreason.sweeps.state import WAITING, Key

#: x axis of a curve -> its counter in `metrics.jsonl`.
AXES: dict[str, str] = TABLES["counters"]
#: x axis of a figure for a paper -> key of `metrics.jsonl`, title, what it is divided by.
PAPER_AXES: dict[str, tuple[str, str, float]] = TABLES["paper_axes"]
RUNNING = "running"
LONGEST_NAME = 32  # characters of a reference in a sentence


@dataclass(slots=True)
class GradedProblem:
    """One problem of an evaluation and the grades of its responses."""

    question: str
    correct: float = 0  # number of correct responses, or the sum of their shares
    samples: int = 0
    facts: Mapping[str, str] = field(default_factory=dict)  # from the data: level, subject ...

    @property
    def share(self) -> float:
        """Return the share of its responses that are correct."""
        return self.correct / self.samples


Answers = dict[str, GradedProblem]  # of one evaluation, by problem id


@dataclass(slots=True)
class StudyRun:
    """One run as read from its folder."""

    folder: Path
    setting: Key  # swept key -> value as typed, without the seed
    seed: int
    status: str  # finished, stopped:RULE ... as in status.json; "waiting" before it begins
    reason: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # every setting, by its dotted name
    series: dict[str, Series] = field(default_factory=dict)  # metric -> its curve
    final: Answers = field(default_factory=dict)  # of the last evaluation
    start: Answers = field(default_factory=dict)  # of the evaluation before the first step
    protocol: Protocol = field(default_factory=dict)  # {} if the run did not end by itself
    planned_steps: int | None = None
    seconds: float | None = None  # wall clock, over all its parts
    shared_machine: bool = False  # its times are not comparable
    totals: Mapping[str, float] = field(default_factory=dict)  # axis of AXES -> last value of its counter
    findings: Sequence[Finding] = ()  # those of `rlreason health`
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary.json, or {}
    provenance: Mapping[str, Any] = field(default_factory=dict)  # provenance.json, or {}
    sets: dict[str, "StudyRun"] = field(default_factory=dict)  # this run as measured on each of `eval.sets`

    @property
    def state(self) -> str:
        """Return its status without the rule that caused it."""
        return self.status.partition(":")[0]

    @property
    def ended(self) -> bool:
        """Return whether it ended by itself, so that its last evaluation is the planned one."""
        return self.state != WAITING and ended_by_itself(self.status)

    @property
    def diverged(self) -> bool:
        """Return whether a monitor called it diverged."""
        return self.state == "diverged"

    @property
    def accuracy(self) -> float | None:
        """Return the accuracy of its last evaluation; 0 if it diverged before one, as weights of NaN answer nothing."""
        if self.final:
            problems = self.final.values()
            return sum(problem.correct for problem in problems) / sum(problem.samples for problem in problems)
        return 0.0 if self.diverged and self.summary and self.summary.get("accuracy") is None else None


@dataclass(slots=True)
class Setting:
    """The varied values, and the runs that have them: one for each seed."""

    key: Key
    label: str  # short and unique in a study: "3e-5", "group_size=8 sft_epochs=2"
    runs: list[StudyRun]
    best_of: int = 0  # the number of settings that it was the best of, if the others are left out

    @property
    def name(self) -> str:
        """Return its name in a sentence if it is the reference; a long label is shortened."""
        return self.label if len(self.label) <= LONGEST_NAME else "the reference"

    @property
    def typed(self) -> str:
        """Return the setting as it is typed: the name in `compare --json`."""
        return " ".join(f"{key}={value}" for key, value in self.key) or self.label

    def means(self, among: set[str] | None = None) -> list[float]:
        """Return the mean share correct of each run that counts, over its final problems (`among` them)."""
        means = []
        for run in self.runs:
            if run.accuracy is not None:
                shares = [problem.share for name, problem in run.final.items() if among is None or name in among]
                means.append(float(np.mean(shares)) if shares else 0.0)
        return means

    def on(self, name: str) -> "Setting":
        """Return this setting as measured on one of `eval.sets`."""
        return replace(self, runs=[run.sets[name] for run in self.runs if name in run.sets], best_of=0)

    @property
    def finals(self) -> list[Answers]:
        """Return the final evaluations of its runs that have one."""
        return [run.final for run in self.runs if run.final]

    @property
    def accuracies(self) -> list[float]:
        """Return the accuracies of its runs that have one."""
        return [run.accuracy for run in self.runs if run.accuracy is not None]


@dataclass(slots=True)
class Study:
    """All that one report compares, always by final evaluations. `settings[0]` is the reference."""

    name: str  # of the sweep, or of the first folder
    question: str  # from its sweep file, else made from the differences
    axes: list[str]  # the swept keys
    settings: list[Setting]
    on_purpose: list[str] = field(default_factory=list)  # parts of the protocol that the sweep varies
    problems: list[str] = field(default_factory=list)  # broken or missing parts of the folders, a line each
    notes: list[str] = field(default_factory=list)  # notes on how to read the figures
    among: set[str] | None = None  # the problems to compare on; None: all
    carried: list[str] = field(default_factory=list)  # of an earlier sweep by carry=, a sentence each
    command: str = ""  # that started the sweep
    max_seeds: int = 0  # of its looks; 0: the seeds were fixed

    def __post_init__(self) -> None:
        """Write out control characters in the labels, which pictures hold as they are."""
        for setting in self.settings:
            setting.label = printable(setting.label)

    @property
    def reference(self) -> Setting:
        """Return the setting that the others are compared with."""
        return self.settings[0]

    @property
    def runs(self) -> list[StudyRun]:
        """Return all runs, by setting."""
        return [run for _, run in self.each]

    @property
    def each(self) -> list[tuple[Setting, StudyRun]]:
        """Return all runs with their settings."""
        return [(setting, run) for setting in self.settings for run in setting.runs]

    @property
    def sets(self) -> dict[str, "Study"]:
        """Return this study on each of `eval.sets` that the reference has and another setting too.

        Where some of the runs' own problems chose the settings (`among`), a set is without these questions.
        """
        have = [{name: None for run in one.runs for name in run.sets} for one in self.settings]
        shared = [name for name in have[0] if any(name in others for others in have[1:] or have)]
        found = {name: replace(self, settings=[one.on(name) for one in self.settings], among=None) for name in shared}
        if self.among is not None:
            chose = {question for name, question in questions_in(self.settings).items() if name not in self.among}
            for of in found.values():
                of.among = {name for name, question in questions_in(of.settings).items() if question not in chose}
        return found


def labels_of(keys: Sequence[Key]) -> list[str]:
    """Return a short name for each setting, the reference first: only the value if one key differs.

    If every other setting differs from the reference in one key, that key; else all that differ. Names of keys are
    their last parts where these are distinct.

    >>> labels_of([(("learning_rate", "1e-5"),), (("learning_rate", "3e-5"),)])
    ['1e-5', '3e-5']
    >>> labels_of([(("g", "4"), ("q", "8")), (("g", "2"), ("q", "8")), (("g", "4"), ("q", "9"))])
    ['g=4 q=8', 'g=2', 'q=9']
    >>> labels_of([()])
    ['the default']
    >>> labels_of([(("model.path", "/class/ann/model"),), (("model.path", "/class/bob/model"),)])
    ['ann/model', 'bob/model']
    """
    settings = [dict(key) for key in keys]
    names = list(dict.fromkeys(name for setting in settings for name in setting))
    differing = [name for name in names if len({setting.get(name) for setting in settings}) > 1] or names
    if len(differing) == 1 and all(differing[0] in setting for setting in settings):
        values = [setting[differing[0]] for setting in settings]
        return path_ends(values) if differing[0].endswith("path") else values
    parts = [[pair for pair in key if pair[0] in differing] for key in keys]
    own = [[pair for pair in pairs if pair not in parts[0]] for pairs in parts[1:]]
    if all(len(pairs) == 1 for pairs in own):
        parts[1:] = own
    last = {name: name.rpartition(".")[2] for name in differing}
    short = last if len({*last.values()}) == len(last) else {name: name for name in differing}
    return [" ".join(f"{short[name]}={value}" for name, value in pairs) or "the default" for pairs in parts]


def path_ends(paths: Sequence[str]) -> list[str]:
    """Return the ends of paths, as typed, of so many parts that different paths have different ends.

    >>> path_ends(["'/a/1/model'", "/a/2/model"])
    ['1/model', '2/model']
    """
    parts = [Path(path.strip("'\"")).parts for path in paths]
    n = next(n for n in count(1) if len({one[-n:] for one in parts}) == len(set(parts)))
    return [str(Path(*one[-n:])) for one in parts]


#: Facts that a setting's effect may go by. Not `level`: an effect of equal log-odds differs in points between levels,
#: and of settings that are better by 2 points (4 seeds, no spread) 25% are found instead of 42%. `cluster`: a column.
CLUSTERS = ("subject", "source", "cluster")


def in_common(settings: Sequence[Setting]) -> list[str]:
    """Return the problems that all runs answered."""
    finals = [set(final) for setting in settings for final in setting.finals]
    return sorted(set.intersection(*finals)) if finals else []


def questions_in(settings: Sequence[Setting]) -> dict[str, str]:
    """Return problem -> its question, of all final evaluations."""
    return {name: p.question for setting in settings for final in setting.finals for name, p in final.items()}


def clusters_of(settings: Sequence[Setting], problems: Sequence[str]) -> dict[str, list[str]]:
    """Return fact of `CLUSTERS` -> its value for each problem, where these differ."""
    finals, found = [final for setting in settings for final in setting.finals], dict[str, list[str]]()
    for fact in CLUSTERS:
        told = [[final[name].facts.get(fact, "") for final in finals] for name in problems]
        values = [max(of, default="") for of in told]  # not every program tells it
        if len({*values}) > 1:
            found[fact] = values
    return found


def correctness(
    settings: Sequence[Setting], problems: Sequence[str], keys: Sequence[str] | None = None
) -> list[dict[int, Floats]]:
    """Return of each setting seed -> correctness on each key of the problems, the questions if None (`of_clusters`)."""
    if keys is None:
        asked = questions_in(settings)
        keys = list(question_keys((name, asked.get(name, "")) for name in problems).values())
    right: list[dict[int, Floats]] = [{} for _ in settings]
    for setting, of_setting in zip(settings, right, strict=True):
        for run in setting.runs:
            if run.final:
                shares = np.array([run.final[name].share for name in problems])
                of_setting[run.seed] = of_clusters(shares, keys)
            elif run.accuracy is not None:  # it diverged at once
                of_setting[run.seed] = np.zeros(len(set(keys)))
    return right


def sampled_again(settings: Sequence[Setting], right: Sequence[dict[int, Floats]]) -> list[dict[int, Floats]]:
    """Return `correctness` with one mean of the seeds where each setting is one model, which nothing trained.

    Its seeds are further samples of its responses, no sample of trainings.
    """
    models = [{run.summary.get("weights") for run in one.runs if run.final} for one in settings]  # of jobs alone
    if any(len(weights) != 1 or None in weights for weights in models):
        return list(right)
    return [{min(of): np.mean([*of.values()], axis=0)} for of in right]


#: Settings and groups that decide how accuracy is measured, for runs without a protocol.
MEASURED_BY = (
    "prompt", "eval.prompt", "eval.sampling", "eval.data", "eval.samples", "eval.reward", "sampling", "data.name",
    "data.path", "data.validation", "grading.extract", "grading.percent", "grading.rel_tol", "grading.correct_at",
    "grading.timeout_s",
)  # fmt: skip
#: Parts of a protocol that name no setting -> settings and groups that decide them, without those of training alone.
DECIDED_BY = {"data": ("data", "eval.data", "split"), "problems": ("data", "eval", "eval_problems", "split")}
OF_TRAINING = ("data.train", "data.limit", "data.n_train", "data.filter", "data.pass_rate", "data.min_pass_rate")
OF_SETS = "eval.sets."  # each of which is judged by itself


def unequal(setting: Setting, reference: Setting, on_purpose: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (how two settings were measured differently, a line each; the parts that differ on purpose).

    In place of a hash or a count stand the settings behind it.
    """
    measured = [run for run in (*reference.runs, *setting.runs) if run.final]
    runs = [run for run in measured if run.protocol or run.settings]  # a file of results does not say
    runs.sort(key=lambda run: not run.protocol)
    lines, intended = list[str](), list[str]()
    for run in runs:
        first = runs[0]
        one, two = first.protocol, run.protocol
        if not (one and two):
            one, two = ({n: v for n, v in r.settings.items() if is_below(n, MEASURED_BY)} for r in (first, run))
        differing: dict[str, str] = {}  # part of the protocol -> line
        for line in differences(one, two):
            part = line.partition(":")[0]
            if any(part == of or (of.endswith(".") and part.startswith(of)) for of in on_purpose):
                intended.append(part)
            else:
                differing[part] = line
        roots = [root for part in differing for root in DECIDED_BY.get(part, ())]
        behind = [
            f"{name}: {typed_word(first.settings.get(name))} and {typed_word(run.settings.get(name))}"
            for name in {**first.settings, **run.settings}
            if is_below(name, roots) and not name.startswith((*OF_TRAINING, OF_SETS))
            if first.settings.get(name) != run.settings.get(name)
        ]
        lines += behind
        lines += [line for part, line in differing.items() if part not in DECIDED_BY or not behind]
    mine, its = (next(iter(one.finals), {}) for one in (setting, reference))
    renamed = [name for name in sorted(mine.keys() & its.keys()) if mine[name].question != its[name].question]
    lines += [f"what problem {name} asks: one thing and another" for name in renamed[:1]]
    return list(dict.fromkeys(lines)), list(dict.fromkeys(intended))


#: Swept settings -> the parts of the protocol that they change on purpose; a name ending in a dot stands for its group.
ON_PURPOSE = {
    "prompt": ("prompt", "chat.", "reward", "stop"),
    "eval.prompt": ("prompt", "chat.", "reward", "stop"),
    "eval.reward": ("reward",),
    "sampling": ("sampling.",),
    "eval.sampling": ("sampling.",),
    "eval": ("prompt", "chat.", "reward", "stop", "sampling."),
    "grading": ("grading.",),
}


def purposes(axes: Iterable[str]) -> tuple[str, ...]:
    """Return the parts of the protocol that sweeping these settings, or some in their groups, changes on purpose.

    >>> purposes(["eval.sampling.temperature", "learning_rate"]), purposes(["prompt"])[:2]
    (('sampling.',), ('prompt', 'chat.'))
    """
    meant: list[str] = []
    for axis in axes:
        groups = [key for key in ON_PURPOSE if is_below(axis, [key])]
        meant += ON_PURPOSE[max(groups, key=len)] if groups else ()
    return tuple(dict.fromkeys(meant))


CHOOSING, COMPARING = "choosing", "comparing"  # the halves of the problems: one chooses a setting, the other judges it


def half(settings: Iterable[Setting], which: str) -> set[str]:
    """Return the problems of a half that any run of the settings answered: by crc32 of the question, even or odd."""
    finals = [final for setting in settings for final in setting.finals]
    parity = (CHOOSING, COMPARING).index(which)
    return {name for of in finals for name, p in of.items() if zlib.crc32(p.question.encode()) % 2 == parity}


def choosing_mean(setting: Setting) -> float:
    """Return the mean accuracy over the seeds of a setting on the half of the problems that chooses; -1 without any."""
    means = setting.means(half([setting], CHOOSING))
    return float(np.mean(means)) if means else -1.0
