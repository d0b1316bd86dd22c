"""Read the questions and published figures of an assignment, and find the runs that may answer them."""

import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rlreason.config.leaves import flat
from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG, STATUS
from rlreason.records.reader import RunFolder, setting_in
from rlreason.report.content import Case, Entry, Figure, Table, Verdict
from rlreason.report.verdicts import signed
from rlreason.runtime.files import number
from rlreason.sweeps.state import FILE, read_state

COURSES = Path(__file__).with_name("courses.yaml")

SAME_SIZE = 0.1  # relative difference of parameter counts, which are counted in more than one way


@dataclass(frozen=True, slots=True)
class AssignmentQuestion:
    """One question of a handout; see the head of courses.yaml for its fields."""

    id: str
    title: str
    asks: str  # what is handed in
    command: str = ""  # runs its sweeps; "": the student answers it in words
    commands: Mapping[str, str] = field(default_factory=dict)  # sweep -> its own command
    sweeps: Sequence[str] = ()
    algorithm: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # of runs of the algorithm: a value, or several
    each: str = ""  # a setting of which every value has to have run
    whole: bool = False  # the evaluation asks all problems
    instead: str = ""  # a sweep whose reference may answer it
    bar: float | None = None  # 0 to 1
    steps: int = 0  # the steps that the bar is set for; 0: any
    figures: Sequence[str] = ()
    parts: Sequence[str] = ()
    note: str = ""  # before the figures of its section

    @property
    def all_commands(self) -> list[str]:
        """Return the commands that run all of its sweeps."""
        return list(dict.fromkeys(filter(None, map(self.command_of, self.sweeps or [""]))))

    def values(self, key: str) -> list[str]:
        """Return the allowed values of one of its settings, as typed."""
        value = self.settings.get(key, [])
        return ["null" if one is None else str(one) for one in (value if isinstance(value, list) else [value])]

    def command_of(self, sweep: str) -> str:
        """Return the command that runs one of its sweeps."""
        return self.commands.get(sweep, self.command)


@dataclass(frozen=True, slots=True)
class PublishedFigure:
    """A published figure: `low` to `high`, accuracies of 0 to 1."""

    question: str
    what: str
    low: float
    high: float
    source: str
    band: bool = False  # drawn as a grey band in the question's picture


@dataclass(frozen=True, slots=True)
class Direction:
    """The published verdict on one setting against another."""

    question: str
    setting: str  # as typed
    reference: str
    word: str  # better, worse, same or cannot tell
    what: str
    source: str
    small: Sequence[str] = ()  # setting and reference at scale=embedded, or as another sweep names them
    but: str = ""  # why it is not comparable

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of settings that it applies to."""
        return [(self.setting, self.reference)] + ([(self.small[0], self.small[1])] if self.small else [])


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment: its questions in the handout's order, and published figures of its model on its data."""

    name: str
    title: str
    questions: Sequence[AssignmentQuestion]
    model: str  # names as in conf/
    model_name: str
    data: str
    data_name: str
    a_right_loop: str
    figures: Sequence[PublishedFigure]
    directions: Sequence[Direction]
    parameters: float  # of the model
    problems: int  # to validate on, at least
    lacks: str = ""  # what the handout asks for and no command makes

    def is_of(self, settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> bool:
        """Return whether a run has the course's model and data: by name, and by size if recorded."""
        models = (self.model, f"{self.model}_base")
        if settings.get("model.name") not in models or settings.get("data.name") != self.data:
            return False
        size = number(setting_in(provenance, "model.parameters"))
        there = number(setting_in(provenance, "data.sizes.validation"))
        right_size = size is None or abs(size / self.parameters - 1) < SAME_SIZE
        return right_size and (there is None or there >= self.problems)


def course_of(name: str) -> Assignment:
    """Return the course of this name; `KeyError` if there is none."""
    courses = yaml.safe_load(COURSES.read_text("utf-8"))
    course = courses[name]
    sources, published = courses["sources"], course["published"]
    figures = [
        PublishedFigure(**one | {"low": one["low"] / 100, "high": one["high"] / 100, "source": sources[one["source"]]})
        for one in published.pop("figures")
    ]
    directions = [Direction(**one | {"source": sources[one["source"]]}) for one in published.pop("directions")]
    questions, lacks = questions_of(courses, name), course.get("lacks", "")
    return Assignment(
        name, course["title"], questions, figures=figures, directions=directions, lacks=lacks, **published
    )


def questions_of(courses: Mapping[str, Any], name: str) -> list[AssignmentQuestion]:
    """Return the questions of a course; those taken from another have its commands with this course's experiment."""
    questions: list[AssignmentQuestion] = []
    for entry in courses[name]["questions"]:
        if "take" not in entry:
            fields = {("instead" if key == "or" else key): value for key, value in entry.items()}
            questions.append(AssignmentQuestion(**fields))
            continue
        other = entry["take"]["course"]
        theirs = questions_of(courses, other)
        ids = [question.id for question in theirs]
        for question in theirs[ids.index(entry["take"]["first"]) : ids.index(entry["take"]["last"]) + 1]:
            commands = {sweep: _of_course(command, other, name) for sweep, command in question.commands.items()}
            questions.append(replace(question, command=_of_course(question.command, other, name), commands=commands))
    return questions


def _of_course(command: str, theirs: str, ours: str) -> str:
    """Return a command of another course for this course's experiment, whose data needs no path."""
    return command.replace(f"experiment={theirs}", f"experiment={ours}").removesuffix(" data.path=MATH_DIR")


NOT_RUN = "not run"
HEAD = ["question", "setting against reference", "published", "found here", "the two"]


def agreement(published: str, ours: str, but: str = "") -> str:
    """Return whether a verdict's word or outcome agrees with the published one.

    >>> [agreement("worse", word) for word in ("worse", "diverged", "better", "same", "cannot tell")]
    ['agrees', 'agrees', 'disagrees', 'disagrees', 'cannot tell']
    >>> agreement("cannot tell", "better"), agreement("worse", "worse", "another budget"), agreement("same", "same")
    ('cannot tell', 'not comparable', 'agrees')
    """
    if but or ours == "not compared":
        return "not comparable"
    if "cannot tell" in (published, ours):
        return "cannot tell"
    return "agrees" if published == ("worse" if ours == "diverged" else ours) else "disagrees"


def verdict_of(direction: Direction, verdicts: Sequence[Verdict]) -> Verdict | None:
    """Return the verdict on exactly the pair of settings of a direction, or None."""
    for a, b in direction.pairs:
        wanted, against = typed_settings(a), typed_settings(b)
        for verdict in verdicts:
            setting, reference = (typed_settings(typed) for typed in verdict.typed)
            if setting - reference == wanted - against and against <= reference:
                return verdict
    return None


def typed_settings(typed: str) -> set[tuple[str, str | float]]:
    """Return the overrides of a line as (key, value), with equal numbers equal: 1e-2 is 0.01.

    >>> typed_settings("learning_rate=1e-2 loss=grpo_clip") == typed_settings("loss=grpo_clip learning_rate=0.01")
    True
    """
    settings: set[tuple[str, str | float]] = set()
    for override in typed.split():
        key, _, value = override.partition("=")
        try:
            settings.add((key, float(value)))
        except ValueError:
            settings.add((key, value))
    return settings


def directions_table(course: Assignment, verdicts: Mapping[str, Sequence[Verdict]]) -> Table | None:
    """Return all published directions of a course, or None. `verdicts`: question -> verdicts of its sweeps."""
    rows, relations = [], list[str]()
    for direction in course.directions:
        verdict = verdict_of(direction, verdicts.get(direction.question, []))
        a, b = (direction.setting, direction.reference) if verdict is None else verdict.typed
        relation, ours = NOT_RUN, NOT_RUN
        if verdict is not None:
            ours = verdict.outcome or verdict.word
            relation = agreement(direction.word, ours, direction.but)
            ours += ", it diverged" if verdict.word == "diverged" and ours != "diverged" else ""
            if (d := verdict.difference) is not None:
                ours += f": {signed(d.mean)} points ({signed(d.low)} to {signed(d.high)})"
        relations.append(relation)
        if relation == "not comparable" and direction.but:
            relation = f"{relation}: {direction.but}"
        pair = f"{_short(a, b)} against {_short(b, a)}"
        rows.append([direction.question, pair, f"{direction.word}: {direction.what}", ours, relation])
    if not rows:
        return None
    counts = ", ".join(f"{relation}: {relations.count(relation)}" for relation in dict.fromkeys(relations))
    note = (
        f"{counts[0].upper()}{counts[1:]}. The published figures are mostly of one seed of {course.model_name} on "
        f"{course.data_name}. Agreement in a direction is none in size; and where the runs here are of a small model "
        "on a made-up task, disagreement is no refutation."
    )
    return Table("Directions: published and found here", HEAD, rows, note=note)


def _short(typed: str, other: str) -> str:
    """Return the overrides of a setting that the other does not have."""
    others = other.split()
    return " ".join(override for override in typed.split() if override not in others) or typed


DONE, PARTLY, NOT_YET, IN_WORDS = "done", "partly", "not yet run", "in words"


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure with the legend that gives its settings their colours."""

    stem: str  # of its file
    figure: Figure
    legend: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Quote:
    """One response to a problem, with its grade."""

    question: str
    gold: str
    response: str  # cut, free of control characters
    why: str  # a guess at the reason of its grade
    where: str  # file and line


@dataclass(slots=True)
class Section:
    """The answer to one question."""

    question: AssignmentQuestion
    state: str  # DONE, PARTLY, NOT_YET or IN_WORDS
    missing: list[str] = field(default_factory=list)  # commands that are still to be run
    lines: list[str] = field(default_factory=list)  # paragraphs
    verdicts: list[tuple[str, list[Verdict]]] = field(default_factory=list)  # what is compared, and the verdicts
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    quotes: list[tuple[str, list[Quote]]] = field(default_factory=list)  # title -> responses
    cases: list[Case] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)  # "to keep in mind"
    problems: list[str] = field(default_factory=list)  # found in the folders


@dataclass(slots=True)
class WriteUp:
    """The whole document."""

    title: str
    lead: list[str]
    sections: list[Section]
    directions: Table | None  # published directions next to those found
    published: Table | None
    problems: list[str]

    @property
    def checklist(self) -> Table:
        """Return the table of questions: state, and the command for what is missing."""
        rows = []
        for section in self.sections:
            commands = section.missing or section.question.all_commands
            rows.append([section.question.id, section.state, "\n".join(commands)])
        note = "Where a question is not done, the command is what is still to be run."
        return Table("Checklist", ["question", "state", "command"], rows, note=note)


DEEPEST = 5  # folders below the one given: runs/sweeps/CHAIN/SWEEP/RUN
NO_ALGORITHM = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sweep, or a single run, that may answer a question."""

    path: Path
    name: str  # of sweep=NAME, else of the folder
    begun: float  # time of the newest change
    is_sweep: bool
    algorithm: str  # of all its runs; NO_ALGORITHM if they differ or it is unknown
    sweep: str = ""  # of sweep=NAME
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its first run, by dotted names
    provenance: Mapping[str, Any] = field(default_factory=dict)  # the same run's

    def nearness(self, course: Assignment) -> tuple[bool, int, int, float]:
        """Return a sort key by closeness to the handout: model and data, their names, size of the run, time."""
        names = {"model.name": course.model, "data.name": course.data}
        named = sum(self.settings.get(key) == name for key, name in names.items())
        sizes = [self.settings.get(key) for key in ("n_steps", "rollout_batch_size", "question_batch_size")]
        work = math.prod(size for size in sizes if isinstance(size, int) and size > 0)
        return course.is_of(self.settings, self.provenance), named, work, self.begun


def found_below(folder: Path) -> list[Candidate]:
    """Return all sweeps and single runs below a folder, newest first; `ConfigError` if there is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"RUN={folder} is no folder: give the folder that holds the runs, such as runs")
    return sorted(_below(folder, DEEPEST), key=lambda one: (-one.begun, str(one.path)))


def _below(folder: Path, depth: int) -> Iterator[Candidate]:
    if (folder / FILE).exists():
        begun = (folder / FILE).stat().st_mtime
        try:
            state = read_state(folder, lambda _: None)
        except ConfigError:  # reported when it is read
            yield Candidate(folder, folder.name, begun, True, NO_ALGORITHM, folder.name)
            return
        algorithms = {algorithm_of(folder / run.name) for run in state.runs} - {NO_ALGORITHM}
        only = algorithms.pop() if len(algorithms) == 1 else NO_ALGORITHM
        first = next((folder / run.name for run in state.runs if (folder / run.name / CONFIG).exists()), None)
        yield Candidate(folder, state.requested or folder.name, begun, True, only, state.requested, *_facts(first))
    elif (folder / CONFIG).exists():
        begun = (folder / CONFIG).stat().st_mtime
        yield Candidate(folder, folder.name, begun, False, algorithm_of(folder), "", *_facts(folder))
    elif depth:
        with os.scandir(folder) as entries:
            inner = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False) and not e.name.startswith("."))
        for path in inner:
            yield from _below(Path(path), depth - 1)


def algorithm_of(run: Path) -> str:
    """Return the algorithm of a run, read from the text of its config."""
    try:
        lines = (run / CONFIG).read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return NO_ALGORITHM
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("algorithm:")), NO_ALGORITHM)


def _facts(run: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings and the provenance of a run; empty if they cannot be read."""
    try:
        reader = RunFolder(run, lambda _: None) if run is not None else None
        return (flat(reader.settings), reader.provenance) if reader is not None else ({}, {})
    except ConfigError:
        return {}, {}


BUILT_IN = "stories"  # prefix of the data that questions are rehearsed on
REHEARSED = "_short"  # suffix of the prompts for the built-in model
TRAINING = ("grpo", "sft", "ei")


def plain(value: Any) -> str:
    """Return a setting's value as in the questions, where a prompt for the built-in model counts as the prompt itself.

    >>> plain("r1_zero_short"), plain(None), plain(1.0)
    ('r1_zero', 'null', '1')
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return "null" if value is None else str(value).removesuffix(REHEARSED)


def unfit(
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any],
    summary: Mapping[str, Any],
    question: AssignmentQuestion,
    course: Assignment,
    starts: Collection[str],
) -> str:
    """Return why a run does not answer a question; "" if it does.

    `starts`: hashes of the weights that training runs of this model began with.
    """
    for key in question.settings:
        wanted = [plain(settings.get(one[1:])) if one.startswith("$") else one for one in question.values(key)]
        if key in settings and plain(settings[key]) not in wanted:
            return f"{key}={plain(settings[key])}, and asked for is {' or '.join(wanted)}"
    data, name = str(settings.get("data.name")), str(settings.get("model.name"))
    if data != course.data and not data.startswith(BUILT_IN):
        return f"its data is {data}, and asked for is {course.data_name}"
    if not name.startswith(course.model) and name not in ("tiny", "local"):
        return f"its model is {name}, and asked for is {course.model_name}"
    if by := trained_by(settings, provenance):
        return f"its model was trained before it began, by {by}"
    weights = setting_in(provenance, "model.start_weights")
    if settings.get("model.path") and weights and starts and weights not in starts:
        return "its model is not the one that the training runs began with"
    evaluated, available = number(summary.get("eval_problems")), number(setting_in(summary, "data_sizes.validation"))
    if question.whole and evaluated is not None and available is not None and evaluated < available:
        return f"it asked {evaluated:.0f} of {available:.0f} problems, and asked for are all"
    return ""


def trained_by(settings: Mapping[str, Any], provenance: Mapping[str, Any]) -> str:
    """Return the run that left the model which a run starts from; "" if no training run did."""
    path = settings.get("model.path")
    place = Path(str(provenance.get("directory") or ".")) / Path(str(path)).expanduser()
    for folder in (place, *place.parents)[:4] if path else ():
        if (folder / CONFIG).is_file() and (folder / STATUS).is_file():
            return str(folder) if algorithm_of(folder) in TRAINING else ""
    return ""
