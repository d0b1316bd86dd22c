"""Define the answer to one question of a write-up as plain data; Markdown and page are written only from it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlreason.report.assignment.courses import AssignmentQuestion
from rlreason.report.content import Case, Entry, Figure, Table, Verdict

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
