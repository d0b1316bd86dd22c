"""The problems of a run, from its `data` settings: read, held apart, filtered, checked, and drawn from."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlreason.config.data import Data, FileData, Stories
from rlreason.config.imitation import SFT
from rlreason.config.run import Run
from rlreason.config.store import resource_dir
from rlreason.config.tasks import Countdown, Gym
from rlreason.config.unread import handles_traces, uses_training_data
from rlreason.data.countdown import load_countdown, make_countdown
from rlreason.data.files import Row, Table, file_rows, hub_splits, locate, read_table
from rlreason.data.golds import check_answers
from rlreason.data.gym import make_gym
from rlreason.data.rows import Names, field_names, own_id, to_problem
from rlreason.data.splits import by_pass_rate, hold_out, identified, read_pass_rates, subset, without_overlap
from rlreason.data.stories import make_stories
from rlreason.data.traces import check_template, filter_correct, trace_text, with_traces
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.prompts import load_template, render
from rlreason.types import Problem

Say = Callable[[str], None]
Problems = list[Problem]


def load_data(run: Run, *, grader: Grader | None = None, say: Say = print) -> tuple[Problems, Problems]:
    """(train, validation). Whatever is left out is said.

    With a grader, the gold answers are checked: of validation, and of train where it is sampled from.
    """
    data, traces = run.data, handles_traces(run)
    template = run.prompt.trace if traces else ""
    if traces:
        check_template(template)
    train, validation = read_splits(data, say, traces)

    def checked(problems: Problems, needed: bool = True) -> Problems:
        if grader is None or grader.plugin:  # which form of answer a plug-in expects is unknown
            return problems
        return told(say, *check_answers(problems, grader, data.bad_gold, needed))

    if not uses_training_data(run):
        return [], checked(validation)  # nothing is learned: training data must not stop a measurement
    fill = partial(render, load_template(run.prompt.file, resource_dir("prompts")))
    train = told(say, *without_overlap(train, validation, data.overlap, fill))
    if data.pass_rates is not None:
        rates = read_pass_rates(Path(data.pass_rates).expanduser())
        train = told(say, *by_pass_rate(train, rates, data.min_pass_rate, data.max_pass_rate))
    if traces:
        train = told(say, *with_traces(train, template, skip=data.bad_rows == "skip"))
    if data.filter == "correct":
        assert grader is not None, "data.filter=correct needs the grader"
        grade = partial(grader.grade_batch, count=False)
        train = told(say, *filter_correct(train, partial(trace_text, template=template), grade))
    validation = checked(validation, needed=not isinstance(run, SFT))
    if not isinstance(run, SFT):
        train = checked(train)
    if data.limit is not None and data.limit > len(train):
        say(f"! data.limit={data.limit} is more than the {len(train)} training problems there are: all are used")
    return subset(train, data.limit, run.seed), validation


def told(say: Say, problems: Problems, notes: str | Iterable[str]) -> Problems:
    for note in [notes] if isinstance(notes, str) else notes:
        say(note)
    return problems


def read_splits(data: Data, say: Say, traces: bool = True) -> tuple[Problems, Problems]:
    """(train, validation) as the source has them: here a new kind of data finds its place.

    `traces`: given responses will be imitated or judged, so it matters what form they have.
    """
    if isinstance(data, Stories):
        make = partial(make_stories, min_events=data.min_events, max_events=data.max_events, max_value=data.max_value)
        return make(data.n_train, seed=0), make(data.n_validation, seed=0, validation=True)
    if isinstance(data, Countdown) and data.path is not None:
        skip = data.bad_rows == "skip"
        *halves, notes = load_countdown(data.path, data.name, data.n_train, data.n_validation, skip)
        return told(say, halves[0], notes), halves[1]
    if isinstance(data, Countdown):
        sizes = {key: getattr(data, key) for key in ("seed", "min_count", "max_count", "max_value", "max_target")}
        return make_countdown(data.n_train, **sizes), make_countdown(data.n_validation, **sizes, validation=True)
    if isinstance(data, Gym):
        made = make_gym(data.tasks, data.n_validation + data.n_train, data.seed)
        return made[data.n_validation :], made[: data.n_validation]
    assert isinstance(data, FileData)
    return read_files(data, say, traces)


def read_files(data: FileData, say: Say, traces: bool = True) -> tuple[Problems, Problems]:
    """(train, validation) of files or a hub data set."""
    hub = cache(lambda: hub_splits(data.path or "", data.hub_config))
    names = [data.train] if data.n_validation is not None else [data.train, data.validation or _measured_on(data, hub)]
    labels = [Path(name).stem for name in names]
    if len(set(labels)) < len(labels):
        labels = ["train", "validation"]
    tables = [read_split(data, name, label, hub, traces) for name, label in zip(names, labels, strict=True)]
    for table in tables:
        told(say, table.problems, table.notes)
    problems = identified(tables)
    if data.n_validation is not None:
        return hold_out(problems[0], data.n_validation, data.split_seed)
    return problems[0], problems[1]


def read_split(
    data: FileData, split: str, label: str, hub: Callable[[], Mapping[str, Iterable[Any]]], traces: bool
) -> Table:
    names: Names = field_names(asdict(data.fields))
    wrap = traces and data.response_as == "solution"
    parse = partial(to_problem, names=names, gold=data.gold, max_chars=data.max_chars, wrap=wrap)
    if traces and data.filter == "correct":  # a trace that brings its own gold answer would always be right
        parse = partial(parse, gold_in_response=False)
    source, rows = _rows(data, split, hub)
    prefix, skip = f"{data.name}-{label}", data.bad_rows == "skip"
    return read_table(rows, source, prefix, parse, partial(own_id, names=names), skip)


def _rows(data: FileData, split: str, hub: Callable[[], Mapping[str, Iterable[Any]]]) -> tuple[str, Iterable[Row]]:
    """(what the source is called, its rows)."""
    if file := locate(data.path, split):
        return str(file), file_rows(file)
    splits = hub()
    if split not in splits:
        raise ConfigError(f"data.path={data.path} has no split {split}: choose one of {', '.join(splits)}")
    return f"{data.path}/{split}", ((f"row {number}", row) for number, row in enumerate(splits[split]))


def _measured_on(data: FileData, hub: Callable[[], Mapping[str, Iterable[Any]]]) -> str:
    """The split to validate on where none was named."""
    for name in ("validation", "test"):
        if locate(data.path, name) or (not Path(data.path or "").expanduser().is_dir() and name in hub()):
            return name
    raise ConfigError(
        f"data.path={data.path} holds neither validation nor test: name one with data.validation, or hold out some of "
        "train with data.n_validation=200"
    )
