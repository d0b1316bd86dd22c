"""Write up a whole assignment, in the handout's order, from the runs below one folder: Markdown and one HTML page.

courses.yaml has the questions of each course; its head describes their fields.
"""

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from rlreason.config.leaves import flat, typed_word
from rlreason.errors import ConfigError
from rlreason.records.console import Console
from rlreason.records.files import CONFIG, STATUS, SUMMARY
from rlreason.records.reader import RunFolder, runs_in, setting_in
from rlreason.report.content import TABLES, Figure, Report, Table, filled, plain_colours
from rlreason.report.documents import policy_of, standalone, with_own_ids
from rlreason.report.read import read_study
from rlreason.report.sections import accuracy_of, build_report, percent
from rlreason.report.study import COMPARING, Study, StudyRun, half
from rlreason.report.verdicts import best_of
from rlreason.runtime.files import write_whole
from rlreason.runtime.streams import Answer
from rlreason.runtime.text import few
from rlreason.sweeps.state import FILE, read_state

COURSES = Path(__file__).with_name("courses.yaml")
FILES = "writeup_files"  # folder of the pictures, next to the Markdown
MARKDOWN, PAGE = "writeup.md", "writeup.html"
SWEEP = "python -m rlreason -m sweep={sweep} {experiment} {data}"
BUILT_IN = "stories"  # prefix of the data that questions are rehearsed on
REHEARSED = "_short"  # suffix of the prompts for the built-in model
DONE, PARTLY, NOT_YET, IN_WORDS = "done", "partly", "not yet run", "in words"
MOST_REFUSED = 4  # runs with a reason why they do not answer a question
CLOCKS: dict[str, str] = TABLES["clocks"]  # a picture of the accuracy against a clock -> title of its x


# ---- questions ----


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a handout; the head of courses.yaml describes its fields."""

    id: str
    title: str
    asks: str
    typed: Mapping[str, str]  # of the course
    command: str = ""
    sweeps: Sequence[str] = ()
    algorithm: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    each: str = ""
    whole: bool = False
    instead: str = ""
    bar: float | None = None  # 0 to 1
    steps: int = 0  # 0: any
    figures: Sequence[str] = ()
    parts: Sequence[str] = ()
    note: str = ""

    def values(self, key: str) -> list[str]:
        """Return the allowed values of one of its settings, as typed."""
        value = self.settings.get(key, [])
        return [plain(one) for one in (value if isinstance(value, list) else [value])]

    def commands(self, sweeps: Sequence[str] | None = None) -> list[str]:
        """Return the commands that run these of its sweeps, or all; none if it is answered in words."""
        command = self.command or (SWEEP if self.sweeps else "")
        names = (self.sweeps or [""]) if sweeps is None else sweeps
        typed = [" ".join(command.format(sweep=name, **self.typed).split()) for name in names if command]
        return list(dict.fromkeys(typed))


@dataclass(frozen=True, slots=True)
class Course:
    """A course's assignment, and what others got with its model on its data."""

    title: str
    questions: Sequence[Question]
    model: str  # names as in conf/
    model_name: str
    data: str
    data_name: str
    published: Sequence[Mapping[str, str]]  # question, text, source
    lacks: str = ""

    def is_of(self, settings: Mapping[str, Any]) -> bool:
        """Return whether a run has the course's model and data, by their names."""
        is_model = settings.get("model.name") in (self.model, f"{self.model}_base")
        return is_model and settings.get("data.name") == self.data

    def has(self, study: Study) -> bool:
        """Return whether all runs that have begun have the course's model and data."""
        return all(self.is_of(run.settings) for run in study.runs if run.settings)


def course_of(name: str) -> Course:
    """Return the course of this name; `KeyError` if there is none."""
    course = yaml.safe_load(COURSES.read_text("utf-8"))[name]
    typed = course.pop("typed")
    questions = [Question(typed=typed, **one) for one in course.pop("questions")]
    return Course(questions=questions, **course)


def plain(value: Any) -> str:
    """Return a setting's value as in the questions, where a prompt for the built-in model counts as the prompt itself.

    >>> plain("r1_zero_short"), plain(None), plain(1.0)
    ('r1_zero', 'null', '1')
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:g}"
    return typed_word(value).removesuffix(REHEARSED)


# ---- runs ----


@dataclass(eq=False)
class Found:
    """A sweep, or a run by itself, that may answer a question; its study is read when it is needed."""

    path: Path
    sweep: str = ""  # of sweep=NAME; "" of a run, or of a sweep without
    settings: Mapping[str, Any] = field(default_factory=dict)  # of its first run, by dotted names

    @property
    def name(self) -> str:
        """Return the name of the sweep, else that of the folder."""
        return self.sweep or self.path.name

    @cached_property
    def study(self) -> Study:
        """Its runs; `ConfigError` if they cannot be read."""
        return read_study([self.path])

    @cached_property
    def report(self) -> Report:
        """The report of its study."""
        return build_report(self.study)

    def values(self, key: str) -> set[str]:
        """Return the values of a setting among its runs."""
        return {plain(run.settings.get(key)) for run in self.study.runs}


@dataclass(slots=True)
class Runs:
    """The sweeps and runs below one folder."""

    course: Course
    found: list[Found]  # the nearest to the handout first
    problems: list[str] = field(default_factory=list)  # folders that could not be read

    def sweep(self, name: str) -> Found | None:
        """Return the nearest sweep of a name, or None."""
        return next((one for one in self.found if one.sweep == name and self.readable(one)), None)

    def readable(self, one: Found) -> bool:
        """Return whether a folder has a study; add a message to `problems` if not."""
        try:
            return bool(one.study.runs)
        except ConfigError as error:
            self.problems.append(str(error))
            return False


def runs_below(course: Course, folder: Path) -> Runs:
    """Return all sweeps and single runs below a folder; `ConfigError` if there is no folder.

    The nearest to the handout come first: by model and data, then those with a run that ended, size, the newest.
    """
    if not folder.is_dir():
        raise ConfigError(f"RUN={folder} is no folder: give the folder that holds the runs, such as runs")
    written = {file.parent: file.stat().st_mtime for name in (CONFIG, FILE) for file in folder.rglob(name)}
    found = list[Found]()
    for place in sorted(written):
        is_hidden = any(part.startswith(".") for part in place.relative_to(folder).parts)
        if not is_hidden and written.keys().isdisjoint(place.parents):  # of a sweep's runs the sweep alone
            found.append(Found(place))
    for one in found:
        with suppress(ConfigError):  # reported when its question reads it
            if (one.path / FILE).exists():
                one.sweep = one.path.name
                one.sweep = read_state(one.path, lambda _: None).sweep
            first = next(iter(runs_in(one.path)), one.path)
            one.settings = flat(RunFolder(first, lambda _: None).settings)

    def nearness(one: Found) -> tuple[bool, bool, int, float]:
        sizes = [one.settings.get(key) for key in ("n_steps", "rollout_batch_size", "question_batch_size")]
        size = math.prod(size for size in sizes if isinstance(size, int))
        has_ended = any((run / SUMMARY).exists() for run in (one.path, *runs_in(one.path)))
        return course.is_of(one.settings), has_ended, size, written[one.path]

    return Runs(course, sorted(found, key=nearness, reverse=True))


def _why_not(question: Question, course: Course, run: StudyRun) -> str:
    """Return why a run does not answer a question; "" if it does."""
    settings = run.settings
    for key, values in question.settings.items():
        if isinstance(settings.get(key), list) and {*values[0]} <= {*settings[key]}:  # more is as good
            continue
        wanted = [plain(settings.get(one[1:])) if one.startswith("$") else one for one in question.values(key)]
        if key in settings and plain(settings[key]) not in wanted:
            return f"{key}={plain(settings[key])}, and asked for is {' or '.join(wanted)}"
    data, name = str(settings.get("data.name")), str(settings.get("model.name"))
    if data != course.data and not data.startswith(BUILT_IN):
        return f"its data is {data}, and asked for is {course.data_name}"
    if not name.startswith(course.model) and name not in ("tiny", "local"):
        return f"its model is {name}, and asked for is {course.model_name}"
    if model := settings.get("model.path"):
        place = Path(run.provenance.get("directory") or ".") / str(model)
        if any((folder / STATUS).is_file() for folder in place.parents):
            return f"its model was trained before it began, by {place.parent}"
    asked, validation = (setting_in(run.summary, key) for key in ("eval_problems", "data_sizes.validation"))
    if question.whole and asked and validation and asked < validation:
        return f"it asked {asked} of {validation} problems, and asked for are all"
    return ""


# ---- sections ----


@dataclass(frozen=True, slots=True)
class Shown:
    """What one sweep or run shows for a question: its report, with its own paragraphs and pictures."""

    read: Found
    lines: list[str]
    pictures: dict[str, Figure]  # name of the file, without its ending -> picture


@dataclass(slots=True)
class Section:
    """The answer to one question."""

    question: Question
    state: str = IN_WORDS  # DONE, PARTLY, NOT_YET or IN_WORDS
    missing: list[str] = field(default_factory=list)  # commands that are still to be run
    lines: list[str] = field(default_factory=list)  # paragraphs
    shown: list[Shown] = field(default_factory=list)


def section_of(question: Question, runs: Runs) -> Section:
    """Return the section of one question: its state, and everything that its studies show."""
    commands = question.commands()
    if not commands:
        return Section(question)
    sweeps, refused, reference = {name: runs.sweep(name) for name in question.sweeps}, list[str](), ""
    reads = [sweep for sweep in sweeps.values() if sweep is not None]
    missing = question.commands([name for name, sweep in sweeps.items() if sweep is None])
    if not reads and question.algorithm:
        named = {name for one in runs.course.questions for name in (*one.sweeps, one.instead)} - {""}
        for one in runs.found:  # the nearest of the algorithm and settings that no question names
            if one.settings.get("algorithm") != question.algorithm or one.sweep in named or not runs.readable(one):
                continue
            if reasons := [why for run in one.study.runs if (why := _why_not(question, runs.course, run))]:
                refused.append(f"{one.path.name} does not answer this: {reasons[0]}.")
            else:
                reads, missing = reads or [one], []
    if not reads and question.instead and (sweep := runs.sweep(question.instead)) is not None:
        reference = f"{sweep.study.reference.label}, the reference of {sweep.name}"
        alone = replace(sweep)
        alone.study = replace(sweep.study, axes=[], settings=[sweep.study.reference])
        reads = [alone]
    values = set(question.values(question.each)).difference(*(read.values(question.each) for read in reads))
    unfinished = sum(not run.ended for read in reads for run in read.study.runs)
    if values or unfinished or not reads:
        missing = missing or commands[:1]
    lines = _lines(
        "head",
        question=question,
        reference=reference,
        values=few(sorted(values)) if reads else "",
        unfinished=unfinished,
        refused=refused[:MOST_REFUSED] if values or not reads else [],
    )
    state = NOT_YET if not reads else PARTLY if missing else DONE
    return Section(question, state, missing, lines, [_shown(question, read, runs.course) for read in reads])


def _lines(part: str, **values: Any) -> list[str]:
    """Return the paragraphs that writeup_lines.txt.j2 has for the head of a section, or for a study."""
    text = filled("writeup_lines.txt.j2", part=part, percent=percent, **values)
    return [line for line in text.splitlines() if line]


def _shown(question: Question, read: Found, course: Course) -> Shown:
    study, best = read.study, best_of(read.study)
    fair = accuracy_of(best, half(study.settings, COMPARING) if len(study.settings) > 1 else None)
    reached = "cannot tell"
    if fair is not None and question.bar is not None and not fair[1] < question.bar <= fair[2]:
        reached = "reached" if fair[1] >= question.bar else "not reached"
    lines = _lines(
        "study",
        question=question,
        read=read,
        study=study,
        course=course,
        made=max((int(run.totals.get("step") or run.planned_steps or 0) for run in study.runs), default=0),
        best=best,
        fair=fair,
        reached=reached,
    )
    figures = {one.name: one for one in read.report.figures}
    if accuracy := figures.get("eval/accuracy"):
        title = f"{accuracy.title} against wall clock"
        for axis, x_title in CLOCKS.items():
            if any(axis in curve.x for curve in accuracy.curves):
                figures[axis] = replace(accuracy, name=axis, title=title, axis=axis, x_title=x_title)
    stem = f"{question.id}/{read.name}/"
    pictures = {re.sub(r"\W", "_", stem + name): figures[name] for name in question.figures if name in figures}
    return Shown(read, lines, pictures)


# ---- the document ----


@dataclass(frozen=True, slots=True)
class WriteUp:
    """The whole document."""

    title: str
    lead: list[str]
    sections: list[Section]
    tables: list[Table]  # the checklist, and what others got
    used: list[Found]  # by its sections
    problems: list[str]


def write_up(course: str, runs: Path, target: Path, console: Console) -> Answer:
    """Write writeup.md, its pictures and writeup.html into `target`, from the sweeps and runs below `runs`.

    `ConfigError` if there is no such folder, or it cannot be written to.
    """
    with console.wait("writing the write-up"):
        document = write_up_of(course, runs)
        try:
            svgs = write_markdown(document, target)
            drawn = {stem: Markup(with_own_ids(svg, stem)) for stem, svg in svgs.items()}  # made by vl-convert
            page = filled("writeup.html.j2", document=document, pictures=drawn, policy=policy_of())  # without a script
            write_whole(target / PAGE, page)
        except OSError as error:
            raise ConfigError(f"--out {target}: {error}: give --out FOLDER that can be written to") from None
    figures = {
        "title": document.title,
        "questions": [{"question": s.question.id, "state": s.state, "missing": s.missing} for s in document.sections],
        "problems": document.problems,
        "html": str(target / PAGE),
        "markdown": str(target / MARKDOWN),
    }
    written = f"write-up: {target / PAGE} and {target / MARKDOWN} (with {FILES}/)"
    return Answer(filled("writeup.txt.j2", document=document, written=written), figures)


def write_up_of(name: str, folder: Path) -> WriteUp:
    """Build the whole document of a course from the sweeps and runs below a folder."""
    runs = runs_below(course := course_of(name), folder)
    sections = [section_of(question, runs) for question in course.questions]
    rows = [[s.question.id, s.state, "\n".join(s.missing or s.question.commands())] for s in sections]
    note = "Where a question is not done, the command is what is still to be run."
    tables = [Table("Checklist", ["question", "state", "command"], rows, note=note)]
    if course.published:
        rows = [[one["question"], one["text"], one["source"]] for one in course.published]
        note = f"{course.model_name} on {course.data_name}; mostly one seed each, and no target."
        tables.append(Table("What others got", ["question", "figure", "source"], rows, note=note))
    used = list({shown.read.path: shown.read for section in sections for shown in section.shown}.values())
    lead = filled(
        "writeup_lead.txt.j2",
        course=course,
        done=sum(section.state == DONE for section in sections),
        total=len(sections),
        used=used,
        runs=[run for one in used for run in one.study.runs],
        strange=[one for one in used if not course.has(one.study)],
    )
    problems = list(dict.fromkeys([*runs.problems, *(line for one in used for line in one.report.problems)]))
    return WriteUp(f"{course.title}: write-up", lead.split("\n"), sections, tables, used, problems)


def write_markdown(document: WriteUp, folder: Path) -> dict[str, str]:
    """Write a document as Markdown, and its pictures; return stem -> SVG with CSS variables as colours."""
    (folder / FILES).mkdir(parents=True, exist_ok=True)
    svgs = {}
    for shown in (shown for section in document.sections for shown in section.shown):
        for stem, figure in shown.pictures.items():
            svgs[stem] = standalone(figure, shown.read.report.legend)
            write_whole(folder / FILES / f"{stem}.svg", plain_colours(svgs[stem]))
    write_whole(folder / MARKDOWN, filled("writeup.md.j2", document=document, files=FILES))
    return svgs
