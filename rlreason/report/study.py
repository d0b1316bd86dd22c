"""Hold what a report compares: settings, runs and answers; and pair the answers that two sides share."""

import csv
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlreason.errors import ConfigError, DataError
from rlreason.evaluation.protocol import Protocol
from rlreason.health.finding import Finding
from rlreason.records.status import ending
from rlreason.runtime.differences import Difference, compared
from rlreason.runtime.intervals import Floats, of_clusters
from rlreason.runtime.text import few, question_keys, shorten
from rlreason.sweeps.closing import split_differences
from rlreason.sweeps.design import Key

#: What a curve may be drawn against -> the counter of `metrics.jsonl` that it is.
AXES = {"step": "rollout_step", "time": "time/active", "tokens": "tokens/generated", "updates": "train_step"}
RUNNING = "running"
LONGEST_NAME = 32  # of a reference in a sentence


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one run, in the order in which it was written, without values that are not finite."""

    x: Mapping[str, Floats]  # axis of AXES -> (points,); an axis that the rows lack is not there
    y: Floats  # (points,)


@dataclass(frozen=True, slots=True)
class GradedProblem:
    """One problem of an evaluation and the grades of its responses."""

    correct: float  # number of correct responses, or the sum of their shares
    samples: int
    question: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)  # level, subject, source ...

    @property
    def share(self) -> float:
        """Return the share of its responses that are correct."""
        return self.correct / self.samples if self.samples else 0.0


@dataclass(frozen=True, slots=True)
class Answers:
    """The graded responses of one evaluation, by problem."""

    problems: Mapping[str, GradedProblem]  # by problem id
    step: int | None = None  # None: of a job without steps
    categories: Mapping[str, int] = field(default_factory=dict)  # format1_wrong ... -> responses; see evaluation.tables


@dataclass(slots=True)
class StudyRun:
    """One run as read from its folder."""

    folder: Path
    name: str  # of its folder
    setting: Key  # swept key -> value as typed, without the seed
    seed: int
    status: str  # of records.status.STATUSES, with its rule; "waiting" where nothing has begun
    reason: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # every setting, by its dotted name
    series: Mapping[str, Series] = field(default_factory=dict)  # metric -> its curve
    final: Answers | None = None  # the final evaluation; of a run that was broken off, the last one that it reached
    start: Answers | None = None  # the evaluation before the first step
    accuracy: float | None = None  # of `final`, over all its responses; 0 for a diverged run that has none
    protocol: Protocol | None = None  # None where the run came to no end of its own
    planned_steps: int | None = None
    seconds: float | None = None  # wall clock, over all its parts
    shared_machine: bool = False  # its times are not comparable
    totals: Mapping[str, float] = field(default_factory=dict)  # axis of AXES -> where its counter ended
    findings: Sequence[Finding] = ()  # what is wrong with its course, by the monitors and the grader's counts
    summary: Mapping[str, Any] = field(default_factory=dict)  # summary.json, or {}
    provenance: Mapping[str, Any] = field(default_factory=dict)  # provenance.json, or {}

    @property
    def ended(self) -> bool:
        """Return whether it reached an end of its own, so that its final evaluation is the planned one."""
        return self.status.partition(":")[0] != "waiting" and ending(self.status).of_its_own

    @property
    def diverged(self) -> bool:
        """Return whether a monitor called it diverged."""
        return self.status.partition(":")[0] == "diverged"

    @property
    def evaluations(self) -> list[tuple[int, float]]:
        """Return (step, accuracy) of each evaluation, oldest first."""
        found = self.series.get("eval/accuracy")
        if found is None or "step" not in found.x:
            return []
        return [(int(x), float(y)) for x, y in zip(found.x["step"], found.y, strict=True)]


@dataclass(slots=True)
class Setting:
    """The varied values, and the runs that have them: one for each seed."""

    key: Key
    label: str  # short, one of its kind in a study: "3e-5", "group_size=8 sft_epochs=2"
    runs: list[StudyRun]
    best_of: int = 0  # of how many settings it was the best on these problems, where others of them are left out

    @property
    def name(self) -> str:
        """Return its name in a sentence if it is the reference; a long label is shortened."""
        return self.label if len(self.label) <= LONGEST_NAME else "the reference"

    @property
    def typed(self) -> str:
        """Return the setting as it is typed: the name in `compare --json`."""
        return " ".join(f"{key}={value}" for key, value in self.key) or self.label


@dataclass(slots=True)
class Study:
    """All that one report compares. `settings[0]` is the reference."""

    name: str  # of the sweep, or of the first folder
    question: str  # from its sweep file, else made from the differences
    axes: list[str]  # the swept keys
    settings: list[Setting]
    figure: str = "the final evaluation"  # what is compared, fixed before looking
    on_purpose: list[str] = field(
        default_factory=list
    )  # parts of the protocol that the sweep varies, see sweeps.outcomes
    problems: list[str] = field(default_factory=list)  # broken or missing parts of the folders, a line each
    notes: list[str] = field(default_factory=list)  # notes on how to read the figures
    among: set[str] | None = None  # the problems to compare on, where others have chosen a setting; None: all
    carried: list[Mapping[str, Any]] = field(default_factory=list)  # from carry=, see sweeps/carry.py
    command: str = ""  # that started the sweep
    folders: list[Path] = field(default_factory=list)  # as given

    @property
    def reference(self) -> Setting:
        """Return the setting that the others are compared with."""
        return self.settings[0]

    @property
    def runs(self) -> list[StudyRun]:
        """Return all runs, by setting."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of all runs, sorted."""
        return sorted({run.seed for run in self.runs})


def labels_of(keys: Sequence[Key]) -> list[str]:
    """Return a short name for each setting, the reference first: only the value if one key differs.

    If every other setting differs from the reference in one key, that key; else all that differ, by the last parts of
    their names.

    >>> labels_of([(("learning_rate", "1e-5"),), (("learning_rate", "3e-5"),)])
    ['1e-5', '3e-5']
    >>> labels_of([(("a.limit", "8"), ("epochs", "1")), (("a.limit", "9"), ("epochs", "1"))])
    ['8', '9']
    >>> labels_of([(("g", "4"), ("q", "8")), (("g", "2"), ("q", "8")), (("g", "4"), ("q", "9"))])
    ['g=4 q=8', 'g=2', 'q=9']
    >>> labels_of([()])
    ['the default']
    """
    names = list(dict.fromkeys(name for key in keys for name, _ in key))
    differing = [name for name in names if len({dict(key).get(name) for key in keys}) > 1] or names
    if len(differing) == 1 and all(differing[0] in dict(key) for key in keys):
        return [dict(key)[differing[0]] for key in keys]
    reference = dict(keys[0])
    own = [[(n, v) for n, v in key if n in differing and reference.get(n) != v] for key in keys[1:]]
    of_each = [[pair for pair in key if pair[0] in differing] for key in keys]
    if all(len(pairs) == 1 for pairs in own):
        of_each[1:] = own
    for short in (True, False):
        made = [" ".join(f"{n.rpartition('.')[2] if short else n}={v}" for n, v in pairs) for pairs in of_each]
        if len(set(made)) == len(made):
            break
    return [label or "the default" for label in made]


#: Settings that decide how an accuracy is measured, for runs that left no protocol: by name or by group.
MEASURED_BY = ("prompt", "eval.prompt", "eval.sampling", "eval.data", "eval.samples", "eval.reward", "sampling")
DATA = ("name", "path", "validation")  # of the group data
NO_TRAINING = ("evaluate", "best_of_n")  # algorithms


@dataclass(frozen=True, slots=True)
class Side:
    """The answers of one side of a comparison: seed -> problem -> share of correct responses.

    None: a diverged run without answers; it is wrong on every problem. `fixed`: models that were not trained here, so
    that the side is a model and no setting. `questions`: problem -> what it asks; repeated rows are one problem.
    """

    right: Mapping[int, Mapping[str, float] | None]
    fixed: bool = False
    questions: Mapping[str, str] = field(default_factory=dict)

    @property
    def problems(self) -> set[str] | None:
        """Return the problems that all its runs answered; None if none answered any."""
        answered = [set(of) for of in self.right.values() if of is not None]
        return set.intersection(*answered) if answered else None

    def correctness(self, problems: Sequence[str], questions: Mapping[str, str]) -> dict[int, Floats]:
        """Return seed -> correctness on each question that these problems ask (`of_clusters`)."""
        asked = [questions.get(name, name) for name in problems]
        return {
            seed: np.zeros(len(set(asked))) if of is None else of_clusters(np.array([of[p] for p in problems]), asked)
            for seed, of in self.right.items()
        }


@dataclass(frozen=True, slots=True)
class Pairing:
    """The difference of a side to the reference, and the data behind it."""

    difference: Difference
    problems: Sequence[str]
    asked: int  # the largest number of problems that a run of either side answered
    by_seed: Mapping[int, float] = field(default_factory=dict)  # of the seeds that both sides have
    means: tuple[float, float] = (0.0, 0.0)  # accuracy of the side, of the reference


def side_of(setting: Setting) -> Side:
    """Return the final answers of a setting's runs; runs in progress have none."""
    right: dict[int, Mapping[str, float] | None] = {}
    for run in setting.runs:
        if run.final is not None:
            right[run.seed] = {name: problem.share for name, problem in run.final.problems.items()}
        elif run.diverged and run.accuracy is not None:
            right[run.seed] = None
    fixed = all(run.settings.get("algorithm") in NO_TRAINING for run in setting.runs)
    asked = (run.final.problems for run in setting.runs if run.final is not None)
    questions = {name: problem.question for of in asked for name, problem in of.items()}
    return Side(right, fixed, question_keys(questions.items()))


def pair(side: Side, reference: Side, among: set[str] | None = None) -> Pairing | None:
    """Return the difference over the problems that every run of both sides answered (`among` them), or None.

    >>> found = pair(Side({0: {"a": 1.0, "b": 1.0}}), Side({0: {"a": 0.0, "b": 1.0}}))
    >>> found.difference.mean, found.problems, found.by_seed
    (0.5, ['a', 'b'], {0: 0.5})
    """
    if not side.right or not reference.right:
        return None
    both = [found for one in (side, reference) if (found := one.problems) is not None]
    common = set.intersection(*both) if both else {"whatever was asked"}
    problems = sorted(common if among is None else common & among)
    if not problems:
        return None
    questions = {**side.questions, **reference.questions}
    a, b = side.correctness(problems, questions), reference.correctness(problems, questions)
    asked = max((len(of) for one in (side, reference) for of in one.right.values() if of is not None), default=0)
    means = tuple(float(np.mean([values.mean() for values in of.values()])) for of in (a, b))
    by_seed = {seed: float((a[seed] - b[seed]).mean()) for seed in sorted(a.keys() & b.keys())}
    return Pairing(compared(a, b), problems, asked, by_seed, (means[0], means[1]))


def unequal(setting: Setting, reference: Setting, on_purpose: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return (how two settings were measured differently, a line each; the parts that differ on purpose)."""
    runs = [run for one in (reference, setting) for run in one.runs if _measured(run) and _says_how(run)]
    others, intended = list[str](), list[str]()
    for run in runs[1:]:
        if runs[0].protocol is not None and run.protocol is not None:
            found = split_differences(runs[0].protocol, run.protocol, on_purpose)
        else:
            found = split_differences(_measuring(runs[0]), _measuring(run), on_purpose)
        others += found[0]
        intended += found[1]
    others += _asks_other_questions(setting, reference)
    return list(dict.fromkeys(others)), list(dict.fromkeys(intended))


def _asks_other_questions(setting: Setting, reference: Setting) -> list[str]:
    """Return whether one problem id stands for two questions."""
    first, second = (next((r.final.problems for r in s.runs if r.final is not None), {}) for s in (reference, setting))
    for name in sorted(first.keys() & second.keys()):
        if first[name].question != second[name].question:
            return [f"what problem {name} asks: one thing and another"]
    return []


def _measured(run: StudyRun) -> bool:
    return run.final is not None and run.status != RUNNING


def _says_how(run: StudyRun) -> bool:
    """Return whether it is known how a run was measured; for a file of results it is not."""
    return run.protocol is not None or bool(run.settings)


def _measuring(run: StudyRun) -> dict[str, Any]:
    """Return the settings that determine how a run's accuracy is measured."""
    found = {key: value for key, value in run.settings.items() if key.startswith(tuple(f"{m}." for m in MEASURED_BY))}
    found |= {key: run.settings[key] for key in MEASURED_BY if key in run.settings}
    return found | {f"data.{key}": run.settings.get(f"data.{key}") for key in DATA}


COLUMNS = ("setting", "seed", "problem", "correct")
WORDS = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}
Cells = dict[str, dict[int, dict[str, list[float]]]]  # setting -> seed -> problem -> [sum of correct, samples]


def is_tabular(path: Path) -> bool:
    """Return whether an argument is a file of results, or a folder of TRL's completions."""
    return path.is_file() or bool(trl_files(path))


def study_of_file(path: Path) -> Study:
    """Return the settings of a CSV file, the first one as the reference; or one setting of TRL's completions.

    `DataError` names the file, the line, the rule and the cure.
    """
    files = trl_files(path)
    cells = {_name(path): {seed: _of_trl(file) for seed, file in files.items()}} if files else _of_csv(path)
    settings = [_setting(name, seeds, path) for name, seeds in cells.items()]
    for setting, label in zip(settings, labels_of([setting.key for setting in settings]), strict=True):
        setting.label = label
    notes = [f"{path.name}: TRL's completions are of the last step's training prompts."] if files else []
    return Study(path.stem, "How do these settings compare?", ["setting"], settings, notes=notes, folders=[path])


def beside_runs(files: Sequence[Study], others: Sequence[Study]) -> list[str]:
    """Match files to runs whose problems they name, by id or by question; return a note on each file."""
    named = {name for study in files for run in study.runs if run.final for name in run.final.problems}
    questions: dict[str, str] = {}  # of the runs' problems, by what they go by here
    for run in (run for study in others for run in study.runs):
        if run.final is None:
            continue
        if not named & run.final.problems.keys():
            by_question = {p.question if p.question in named else name: p for name, p in run.final.problems.items()}
            run.final = replace(run.final, problems=by_question)
        questions |= {name: p.question for name, p in run.final.problems.items()}
    for run in (run for study in files for run in study.runs):
        if run.final is not None:  # the question says on which half of the problems one is
            of = {name: replace(p, question=questions.get(name, name)) for name, p in run.final.problems.items()}
            run.final = replace(run.final, problems=of)
    return [
        f"{study.folders[0].name} does not say how it was measured: that prompt, sampling, grader and data are those "
        "of the runs beside it cannot be checked."
        for study in files
        if others
    ]


def _setting(name: str, seeds: dict[int, dict[str, list[float]]], path: Path) -> Setting:
    key = (("setting", name),)
    runs = []
    for seed, of in sorted(seeds.items()):
        problems = {one: GradedProblem(right, int(samples), one) for one, (right, samples) in of.items()}
        run = StudyRun(path, f"{name},seed={seed}", key, seed, "finished", final=Answers(problems))
        run.accuracy = sum(p.correct for p in problems.values()) / sum(p.samples for p in problems.values())
        runs.append(run)
    return Setting(key, name, runs)


def _of_csv(path: Path) -> Cells:
    cells: Cells = {}
    for name, seed, problem, correct in _rows(path):
        cell = cells.setdefault(name, {}).setdefault(seed, {}).setdefault(problem, [0.0, 0])
        cell[0] += correct
        cell[1] += 1
    if not cells:
        raise DataError(f"{path} holds no row: give a file with a row for each setting, seed and problem")
    return cells


def _rows(path: Path) -> Iterator[tuple[str, int, str, float]]:
    """Yield (setting, seed, problem, correct) of each row."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            head = [name.strip().lower() for name in next(reader, [])]
            if missing := [name for name in COLUMNS if name not in head]:
                raise DataError(
                    f"{path} has no column {missing[0]}: its first line must name {', '.join(COLUMNS)} (in any order)"
                )
            at = [head.index(name) for name in COLUMNS]
            seeds: dict[str, int] = {}
            corrects: dict[str, float] = {}
            names: dict[str, str] = {}  # as written -> on one line
            for row in reader:
                if not row:
                    continue
                try:
                    name, seed, problem, correct = (row[k] for k in at)
                except IndexError:
                    raise _wrong(path, reader.line_num, f"has {len(row)} cells, fewer than its head") from None
                if seed not in seeds:
                    seeds[seed] = _seed(path, reader.line_num, seed)
                if correct not in corrects:
                    corrects[correct] = _correct(path, reader.line_num, correct)
                if name not in names:
                    names[name] = " ".join(name.split())
                if not names[name] or not problem:
                    raise _wrong(path, reader.line_num, "names no setting or no problem")
                yield names[name], seeds[seed], problem, corrects[correct]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} cannot be read as CSV ({error}): give a UTF-8 file with commas") from None


def _wrong(path: Path, line: int, what: str) -> DataError:
    return DataError(f"{path}, line {line} {what}: mend the line, or leave it out")


def _seed(path: Path, line: int, word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise _wrong(path, line, f"has seed={shorten(word, 20)}, which is no whole number") from None


def _correct(path: Path, line: int, word: str) -> float:
    try:
        value = WORDS[word.strip().lower()] if word.strip().lower() in WORDS else float(word)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        raise _wrong(path, line, f"has correct={shorten(word, 20)}, which is neither 0, 1 nor a share in between")
    return value


def trl_files(path: Path) -> dict[int, Path]:
    """Return the last completions that TRL has logged, by seed.

    A file, an output_dir, or a folder with an output_dir for each seed: the number at the end of its name is the seed.
    """
    if path.is_file():
        return {0: path} if path.suffix == ".parquet" else {}
    if not path.is_dir():
        return {}
    if (own := _last_of(path)) is not None:
        return {0: own}
    inner = [(place, file) for place in sorted(path.glob("*")) if (file := _last_of(place)) is not None]
    numbers = [re.search(r"(\d+)$", place.name) for place, _ in inner]
    seeds = [int(number[1]) for number in numbers if number is not None]
    if len(set(seeds)) < len(inner):
        named = few([place.name for place, _ in inner], 4)
        raise ConfigError(f"{path} holds the runs {named}: end each name with the number of its seed, seed_0, seed_1")
    return dict(zip(seeds, (file for _, file in inner), strict=True))


def _last_of(folder: Path) -> Path | None:
    """Return the completions of the last step in an output_dir, or in its folder of completions."""
    found = [file for place in (folder, folder / "completions") for file in place.glob("completions_*.parquet")]
    return max(found, key=lambda file: (len(file.stem), file.stem), default=None)


def _name(path: Path) -> str:
    """Return the name of a run of TRL's: its output_dir."""
    folder = path.parent if path.is_file() else path
    return (folder.resolve().parent if folder.name == "completions" else folder.resolve()).name or path.stem


def _of_trl(path: Path) -> dict[str, list[float]]:
    """Read the last step's completions: a problem is a prompt, and correct is its first reward, in 0 to 1.

    A reward that is called accuracy or correct takes precedence.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise ConfigError(f"{path} is a parquet file: pip install pyarrow, which reads it") from None
    try:
        table: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet ({shorten(str(error), 80)}): give another file") from None
    known = {"step", "prompt", "completion", "advantage", "timestamp"}
    rewards = [n for n, of in table.items() if n not in known and of and isinstance(of[0], int | float)]
    if "prompt" not in table or not rewards:
        raise DataError(f"{path} has no prompt and reward columns: give completions that TRL's GRPOTrainer has logged")
    reward = next((name for name in rewards if "acc" in name or "correct" in name), rewards[0])
    newest = max(table["step"]) if table.get("step") else None
    cells: dict[str, list[float]] = {}
    for k, (prompt, value) in enumerate(zip(table["prompt"], table[reward], strict=True)):
        if newest is not None and table["step"][k] != newest:
            continue
        if value is None or not 0 <= float(value) <= 1:
            raise DataError(f"{path}, row {k + 1} has {reward}={value}: only rewards of 0 to 1 can be compared")
        cell = cells.setdefault(str(prompt), [0.0, 0])
        cell[0] += float(value)
        cell[1] += 1
    return cells
