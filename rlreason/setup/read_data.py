"""Problems as their source has them: made up here, from files or from the hub, with the ground truth that they lack."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from rlreason.config.data import DataConfig, FieldsConfig, FileDataConfig, RowsDataConfig, StoriesConfig
from rlreason.config.sources import SPLITS, locate, may_be_hub_name
from rlreason.config.tasks import CountdownConfig, FunctionDataConfig, GymConfig
from rlreason.data.countdown import load_countdown, make_countdown
from rlreason.data.files import Row, Table, file_rows, hub_splits, read_table
from rlreason.data.ground_truth import with_ground_truth
from rlreason.data.gym import make_gym
from rlreason.data.own import rows_of
from rlreason.data.rows import Names, field_names, own_id, to_problem
from rlreason.data.splits import hold_out, identified
from rlreason.data.stories import make_stories, with_wrong_solutions
from rlreason.errors import ConfigError, DataError
from rlreason.types import Problem

Say = Callable[[str], None]
Hub = Callable[[], Mapping[str, Iterable[Any]]]
Problems = list[Problem]

GROUND_TRUTH = "ground_truth"  # the label of a table that is read for its answers alone


def with_notes(say: Say, problems: Problems, notes: str | Iterable[str]) -> Problems:
    """The problems, after a line for each note on what was left out."""
    for note in [notes] if isinstance(notes, str) else notes:
        say(note)
    return problems


def read_splits(data: DataConfig, say: Say, traces: bool = True) -> tuple[Problems, Problems]:
    """(train, validation) as the source has them: here a new kind of data finds its place.

    `traces`: given responses will be imitated or judged, so it matters what form they have.
    """
    if isinstance(data, StoriesConfig):
        make = partial(
            make_stories,
            min_events=data.min_events,
            max_events=data.max_events,
            max_value=data.max_value,
            guessed=data.guess != "none",
        )
        train = make(data.n_train, seed=0)
        train = with_wrong_solutions(train, data.wrong_share) if traces else train
        return train, make(data.n_validation, seed=0, validation=True)
    if isinstance(data, CountdownConfig) and data.path is not None:
        skip = data.bad_rows == "skip"
        *halves, notes = load_countdown(data.path, data.name, data.n_train, data.n_validation, skip)
        return with_notes(say, halves[0], notes), halves[1]
    if isinstance(data, CountdownConfig):
        sizes = {key: getattr(data, key) for key in ("seed", "min_count", "max_count", "max_value", "max_target")}
        return make_countdown(data.n_train, **sizes), make_countdown(data.n_validation, **sizes, validation=True)
    if isinstance(data, GymConfig):
        made = make_gym(data.tasks, data.n_validation + data.n_train, data.seed)
        return made[data.n_validation :], made[: data.n_validation]
    if isinstance(data, FunctionDataConfig):
        return read_function(data, say, traces)
    assert isinstance(data, FileDataConfig)
    return read_files(data, say, traces)


def read_files(data: FileDataConfig, say: Say, traces: bool = True) -> tuple[Problems, Problems]:
    """(train, validation) of files or a hub data set."""
    hub = cache(lambda: hub_splits(data.path or "", data.hub_config))
    names = [data.train] if data.n_validation is not None else [data.train, data.validation or measured_on(data, hub)]
    labels = [Path(name).stem for name in names]
    if len(set(labels)) < len(labels):
        labels = ["train", "validation"]
    tables = [read_split(data, name, label, hub, traces) for name, label in zip(names, labels, strict=True)]
    for table in tables:
        with_notes(say, table.problems, table.notes)
    problems = identified(tables)
    if data.n_validation is not None:
        return hold_out(problems[0], data.n_validation, data.split_seed)
    return problems[0], problems[1]


def read_function(data: FunctionDataConfig, say: Say, traces: bool = True) -> tuple[Problems, Problems]:
    """(train, validation) of a function of the user's own."""
    rows = rows_of(data)
    sources = {label: (f"{data.function}'s {label} rows", numbered) for label, numbered in rows.items()}
    tables = [as_table(data, *source, label, traces) for label, source in sources.items()]
    for table in tables:
        with_notes(say, table.problems, table.notes)
    problems = identified(tables)
    if len(problems) > 1:
        return problems[0], problems[1]
    n = data.n_validation or min(200, max(1, len(problems[0]) // 10))
    if data.n_validation is None:
        say(f"{n} of the {len(problems[0])} problems are held out for validation (data.n_validation)")
    return hold_out(problems[0], n, data.split_seed)


def answered(
    data: FileDataConfig, train: Problems, validation: Problems, fill: Callable[[str], str], say: Say
) -> tuple[Problems, Problems]:
    """(train, validation), with ground truth for rows that bring none where it is asked for, or needed to filter.

    It is looked up by question in data.ground_truth, or else in whatever is at hand.
    """
    rows = [*train, *validation]
    without = {
        name: sum(not p.answer for p in part) for name, part in (("training", train), ("validation", validation))
    }
    lacking = sum(without.values())
    if data.ground_truth is None and (not without["training"] or data.filter != "correct"):
        return train, validation
    if not lacking:
        say(f"! data.ground_truth={data.ground_truth} is not read: every row brings its own ground truth")
        return train, validation
    sources = _ground_truth(data) | {"the validation data": validation}
    rows, found = with_ground_truth(rows, [p for problems in sources.values() for p in problems], fill)
    said = " and ".join(f"{n} {name} rows" for name, n in without.items() if n) + " bring no ground truth"
    if not found and (data.ground_truth is not None or not any(p.answer for p in rows[: len(train)])):
        key = "data.filter=correct" if data.ground_truth is None else f"data.ground_truth={data.ground_truth}"
        raise DataError(
            f"{key}: {said}, and no row with the same question in {', '.join(sources)} has one: give a file with these "
            "questions and their answers as data.ground_truth, or rows with a field ground_truth"
        )
    missed = f", and for {lacking - found} it was not found" if found < lacking else ""
    said += f": found by question for {found} in {', '.join(sources)}{missed}"
    rows = with_notes(say, rows, "! " * bool(missed) + said)
    return rows[: len(train)], rows[len(train) :]


def _ground_truth(data: FileDataConfig) -> dict[str, Problems]:
    """Source -> problems with answers: data.ground_truth, or the usual splits next to the training rows."""
    hub = cache(partial(hub_splits, data.path or "", data.hub_config))
    if data.ground_truth is not None:
        return {data.ground_truth: _with_either_names(data, data.ground_truth, hub)}
    train = locate(data.path, data.train)
    read = {train} if data.n_validation else {train, locate(data.path, data.validation or measured_on(data, hub))}
    folders = [data.path, str(train.parent)] if train else [data.path]
    files = [file for folder in folders if folder for name in SPLITS if (file := locate(folder, name))]
    splits = [str(file) for file in dict.fromkeys(files) if file not in read]
    if (
        data.path
        and may_be_hub_name(data.path)
        and data.n_validation is None
        and not locate(None, data.validation or "")
    ):
        splits += [name for name in hub() if name != data.train]  # it was read for validation
    found: dict[str, Problems] = {}
    for split in splits:
        with contextlib.suppress(DataError):  # of no use for this
            found[split] = _with_either_names(data, split, hub)
    return found


def _with_either_names(data: FileDataConfig, split: str, hub: Hub) -> Problems:
    """Its usable rows, by the fields' names that were given for the training rows, or else by the known ones."""
    try:
        return read_split(data, split, GROUND_TRUTH, hub, traces=False).problems
    except DataError:
        if data.fields == FieldsConfig():
            raise
    return read_split(replace(data, fields=FieldsConfig()), split, GROUND_TRUTH, hub, traces=False).problems


def read_split(data: FileDataConfig, split: str, label: str, hub: Hub, traces: bool) -> Table:
    """The problems of one file or split of the hub; `label` is part of the ids of rows that bring none."""
    has_truth = label != GROUND_TRUTH and data.ground_truth is None
    return as_table(data, *_rows(data, split, hub), label, traces, has_truth)


def as_table(
    data: RowsDataConfig, source: str, rows: Iterable[Row], label: str, traces: bool, truth_in_response: bool = True
) -> Table:
    """Rows as problems. `source`: what they are called; `truth_in_response`: a response may bring the ground truth."""
    names: Names = field_names(asdict(data.fields))
    wrap = traces and data.response_as == "solution"
    parse = partial(to_problem, names=names, rule=data.gold, max_chars=data.max_chars, wrap=wrap)
    if not truth_in_response or (traces and data.filter == "correct"):
        # A trace that brings its own ground truth would always be right.
        parse = partial(parse, truth_in_response=False)
    prefix, skip = f"{data.name}-{label}", data.bad_rows == "skip"
    return read_table(rows, source, prefix, parse, partial(own_id, names=names), skip)


def _rows(data: FileDataConfig, split: str, hub: Hub) -> tuple[str, Iterable[Row]]:
    """(what the source is called, its rows)."""
    if file := locate(data.path, split):
        return str(file), file_rows(file)
    splits = hub()
    if split not in splits:
        raise ConfigError(f"data.path={data.path} has no split {split}: choose one of {', '.join(splits)}")
    return f"{data.path}/{split}", ((f"row {number}", row) for number, row in enumerate(splits[split]))


def measured_on(data: FileDataConfig, hub: Hub) -> str:
    """The split to validate on where none was named."""
    if name := data.measured_on():
        return name
    on_hub = () if Path(data.path or "").expanduser().is_dir() else hub()
    for name in ("validation", "test"):
        if name in on_hub:
            return name
    raise ConfigError(data.unmeasured())
