"""Read the questions of an assignment and published figures from the two data files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from rlreason.records.reader import setting_in
from rlreason.report.content import Case, Entry, Figure, Table, Verdict
from rlreason.report.verdicts import signed
from rlreason.runtime.files import number

COURSES, PUBLISHED = (Path(__file__).parent / name for name in ("courses.yaml", "published.yaml"))

SAME_SIZE = 0.1  # how far the parameters of a model may be from those of the course's, counted this way or that


@dataclass(frozen=True, slots=True)
class AssignmentQuestion:
    """One question of a handout; see the head of courses.yaml for its fields."""

    id: str
    title: str
    asks: str  # what is handed in
    command: str = ""  # that runs what answers it; "": its writer answers it in words
    commands: Mapping[str, str] = field(default_factory=dict)  # of single sweeps, where they have one of their own
    sweeps: Sequence[str] = ()
    algorithm: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)  # that runs of the algorithm have: a value, or several
    each: str = ""  # one of them, of whose values each has to be there
    whole: bool = False  # whether their evaluation asks all there is
    instead: str = ""  # a sweep whose reference is the run that is asked for
    bar: float | None = None  # 0 to 1
    steps: int = 0  # that the bar is set for; 0: any
    figures: Sequence[str] = ()
    parts: Sequence[str] = ()
    note: str = ""  # what the write-up cannot say for its writer

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
    source: str  # a sentence's worth: who says so
    band: bool = False  # whether it stands as a grey band in the question's picture


@dataclass(frozen=True, slots=True)
class Direction:
    """The published verdict on one setting against another."""

    question: str
    setting: str  # as typed
    reference: str
    word: str  # better, worse, same or cannot tell
    what: str
    source: str
    small: Sequence[
        str
    ] = ()  # setting and reference of the same ratio at scale=embedded, or as another sweep types them
    but: str = ""  # why it does not compare with what is found here

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return the pairs of settings that it applies to."""
        return [(self.setting, self.reference)] + ([(self.small[0], self.small[1])] if self.small else [])


@dataclass(frozen=True, slots=True)
class Assignment:
    """An assignment: its questions in the handout's order, and what others got with its model on its data."""

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
    told = yaml.safe_load(PUBLISHED.read_text("utf-8"))
    sources, published = told["sources"], told["courses"][name]
    figures = [
        PublishedFigure(**{**one, "low": one["low"] / 100, "high": one["high"] / 100, "source": sources[one["source"]]})
        for one in published.pop("figures")
    ]
    directions = [Direction(**{**one, "source": sources[one["source"]]}) for one in published.pop("directions")]
    questions = questions_of(courses, name)
    return Assignment(
        name=name,
        title=courses[name]["title"],
        questions=questions,
        figures=figures,
        directions=directions,
        lacks=courses[name].get("lacks", ""),
        **published,
    )


def questions_of(courses: Mapping[str, Any], name: str) -> list[AssignmentQuestion]:
    """Return the questions of a course; those taken from another have its commands with this course's experiment."""
    found: list[AssignmentQuestion] = []
    for told in courses[name]["questions"]:
        if "take" not in told:
            found.append(
                AssignmentQuestion(**{("instead" if key == "or" else key): value for key, value in told.items()})
            )
            continue
        other = told["take"]["course"]
        theirs = questions_of(courses, other)
        ids = [question.id for question in theirs]
        first, last = ids.index(told["take"]["first"]), ids.index(told["take"]["last"])
        found += [_in_course(question, other, name) for question in theirs[first : last + 1]]
    return found


def _in_course(question: AssignmentQuestion, theirs: str, ours: str) -> AssignmentQuestion:
    def mine(command: str) -> str:
        return command.replace(f"experiment={theirs}", f"experiment={ours}").removesuffix(" data.path=MATH_DIR")

    commands = {sweep: mine(command) for sweep, command in question.commands.items()}
    return replace(question, command=mine(question.command), commands=commands)


NOT_RUN = "not run"
HEAD = ["question", "setting against reference", "published", "found here", "the two"]


def agreement(published: str, found: str, but: str = "") -> str:
    """Return how two directions relate; `found` is a verdict's word or outcome.

    >>> [agreement("worse", word) for word in ("worse", "diverged", "better", "same", "cannot tell")]
    ['agrees', 'agrees', 'disagrees', 'disagrees', 'cannot tell']
    >>> agreement("cannot tell", "better"), agreement("worse", "worse", "another budget"), agreement("same", "same")
    ('cannot tell', 'not comparable', 'agrees')
    """
    if but or found == "not compared":
        return "not comparable"
    if "cannot tell" in (published, found):
        return "cannot tell"
    return "agrees" if published == ("worse" if found == "diverged" else found) else "disagrees"


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
    """Return the settings of a line as (key, value), numbers by their value: 1e-2 is 0.01.

    >>> typed_settings("learning_rate=1e-2 loss=grpo_clip") == typed_settings("loss=grpo_clip learning_rate=0.01")
    True
    """
    found: set[tuple[str, str | float]] = set()
    for word in typed.split():
        key, _, value = word.partition("=")
        try:
            found.add((key, float(value)))
        except ValueError:
            found.add((key, value))
    return found


def directions_table(course: Assignment, verdicts: Mapping[str, Sequence[Verdict]]) -> Table | None:
    """Return all published directions of a course, or None. `verdicts`: question -> verdicts of its sweeps."""
    rows = []
    for direction in course.directions:
        found = verdict_of(direction, verdicts.get(direction.question, []))
        a, b = found.typed if found is not None else (direction.setting, direction.reference)
        said = NOT_RUN if found is None else _found(found)
        word = NOT_RUN if found is None else agreement(direction.word, found.outcome or found.word, direction.but)
        published = f"{direction.word}: {direction.what}"
        pair = f"{_short(a, b)} against {_short(b, a)}"
        rows.append([direction.question, pair, published, said, _why(word, direction)])
    if not rows:
        return None
    counts = [row[-1].partition(":")[0] for row in rows]
    said = ", ".join(f"{word}: {counts.count(word)}" for word in dict.fromkeys(counts))
    note = (
        f"{said[0].upper()}{said[1:]}. The published figures are mostly of one seed of {course.model_name} on "
        f"{course.data_name}. Agreement in a direction is none in size; and where the runs here are of a small model "
        "on a made-up task, disagreement is no refutation."
    )
    return Table("Directions: published and found here", HEAD, rows, note=note)


def _found(verdict: Verdict) -> str:
    word = verdict.outcome or verdict.word
    if verdict.word == "diverged":
        word = f"{word}, it diverged" if word != "diverged" else word
    if (d := verdict.difference) is None:
        return word
    return f"{word}: {signed(d.mean)} points ({signed(d.low)} to {signed(d.high)})"


def _short(typed: str, other: str) -> str:
    """Return the overrides of a setting that the other does not have."""
    theirs = other.split()
    return " ".join(word for word in typed.split() if word not in theirs) or typed


def _why(word: str, direction: Direction) -> str:
    return f"{word}: {direction.but}" if word == "not comparable" and direction.but else word


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
    why: str  # a guess at why it earned what it did
    where: str  # file and line


@dataclass(slots=True)
class Section:
    """The answer to one question."""

    question: AssignmentQuestion
    state: str  # DONE, PARTLY, NOT_YET or IN_WORDS
    missing: list[str] = field(default_factory=list)  # commands that are still to be run
    lines: list[str] = field(default_factory=list)  # paragraphs
    verdicts: list[tuple[str, list[Verdict]]] = field(default_factory=list)  # what was asked -> verdicts
    pictures: list[Picture] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    quotes: list[tuple[str, list[Quote]]] = field(default_factory=list)  # title -> responses
    cases: list[Case] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)  # what to keep in mind when reading its figures
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
