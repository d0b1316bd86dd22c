"""The problems of a run, from its `data` settings: read, held apart, filtered, checked, and drawn from."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.config.data import DataConfig, FieldsConfig, FileDataConfig, StoriesConfig
from rlreason.config.evaluation import as_typed, asked_data, evaluation_of
from rlreason.config.jobs import EvalJobConfig
from rlreason.config.rules import too_many_asked
from rlreason.config.run import RunConfig, TrainingConfig
from rlreason.config.sft import SFTConfig
from rlreason.config.store import resource_dir
from rlreason.config.tasks import CountdownConfig, GymConfig
from rlreason.config.uses import handles_traces, uses_training_data
from rlreason.data.countdown import load_countdown, make_countdown
from rlreason.data.files import Row, Table, file_rows, hub_splits, locate, may_be_hub_name, read_table
from rlreason.data.ground_truth import check_ground_truths, with_ground_truth
from rlreason.data.gym import make_gym
from rlreason.data.rows import Names, field_names, own_id, to_problem
from rlreason.data.splits import by_pass_rate, hold_out, identified, read_pass_rates, subset, without_overlap
from rlreason.data.stories import make_stories
from rlreason.data.traces import check_template, filter_correct, trace_text, with_traces
from rlreason.errors import ConfigError, DataError
from rlreason.grading import Grader
from rlreason.setup.templates import filling
from rlreason.types import Problem

Say = Callable[[str], None]
Hub = Callable[[], Mapping[str, Iterable[Any]]]
Problems = list[Problem]

SPLITS = ("train", "validation", "valid", "val", "dev", "test")  # where problems usually are

GROUND_TRUTH = "ground_truth"  # the label of a table that is read for its answers alone


class Loaded(NamedTuple):
    """What a run works with; `sizes` are numbers of problems on the way there, for the console and the summary."""

    train: Problems
    validation: Problems
    sizes: dict[str, int]


def load_data(run: RunConfig, *, grader: Grader | None = None, judge: Grader | None = None, say: Say = print) -> Loaded:
    """The problems of a run. Whatever is left out is said.

    With a grader, the gold answers are checked: of validation by `judge`, who grades evaluations, and of train where
    it is sampled from.
    """
    data, evaluation, traces = run.data, evaluation_of(run), handles_traces(run)
    asked, judge = evaluation.data, judge or grader
    fill_asked = filling(evaluation.prompt)
    if asked is not data and not uses_training_data(run):
        validation = asked_checked(run, read_asked(run, fill_asked, say), judge, say)
        return Loaded([], validation, {"validation": len(validation)})
    template = run.prompt.trace if traces else ""
    if traces:
        check_template(template)
    train, validation = read_splits(data, say, traces)
    sizes = {"train_read": len(train)}
    if isinstance(run, EvalJobConfig) and run.split == "train":
        enough(run, train)
    elif asked is data:
        enough(run, validation)
    if not uses_training_data(run):
        train = []  # nothing is learned: training data must not stop a measurement
    own = run if isinstance(run, TrainingConfig) else evaluation
    fill = filling(own.prompt)
    if isinstance(data, FileDataConfig):
        train, validation = answered(data, train, validation, fill, say)
    if asked is not data:
        validation = read_asked(run, fill_asked, say)
    if not uses_training_data(run):
        validation = asked_checked(run, validation, judge, say)
        return Loaded([], validation, {"validation": len(validation)})
    train = told(say, *without_overlap(train, validation, data.overlap, fill))
    if data.pass_rates is not None:
        rates = read_pass_rates(Path(data.pass_rates).expanduser())
        train = told(say, *by_pass_rate(train, rates, data.min_pass_rate, data.max_pass_rate))
    if traces:
        train = told(say, *with_traces(train, template, skip=data.bad_rows == "skip"))
    if data.filter == "correct":
        assert grader is not None, "data.filter=correct needs the grader"
        sizes["train_before_filter"] = len(train)
        train = told(say, *filter_correct(train, partial(trace_text, template=template), grader.grade_batch))
        sizes["train_filtered"] = len(train)
    validation = asked_checked(run, validation, judge, say, needed=not isinstance(run, SFTConfig))
    if not isinstance(run, SFTConfig):
        train = told(say, *gold_checked(train, judge if isinstance(run, EvalJobConfig) else grader, data))
    if data.limit is not None and data.limit > len(train):
        say(f"! data.limit={data.limit} is more than the {len(train)} training problems there are: all are used")
    train = subset(train, data.limit, run.seed)
    return Loaded(train, validation, sizes | {"train": len(train), "validation": len(validation)})


def enough(run: RunConfig, asked: Problems) -> Problems:
    """The problems that evaluations ask from, unless the settings ask for more than there are."""
    if bad := too_many_asked(run, len(asked), resource_dir("conf")):
        raise ConfigError("\n".join(bad))
    return asked


def gold_checked(
    problems: Problems, grader: Grader | None, data: DataConfig, needed: bool = True
) -> tuple[Problems, Sequence[str]]:
    """(problems, notes on ground truths that cannot be earned); which form a plug-in expects is unknown."""
    return check_ground_truths(problems, grader, data.bad_gold, needed) if grader else (problems, [])


def asked_checked(run: RunConfig, asked: Problems, judge: Grader | None, say: Say, needed: bool = True) -> Problems:
    """The problems that evaluations ask from, their gold answers checked."""
    data = evaluation_of(run).data
    with asked_data(run):
        return told(say, *gold_checked(asked, judge, data, needed))


def read_asked(run: RunConfig, fill: Callable[[str], str], say: Say) -> Problems:
    """The validation problems of an evaluation's own data, and nothing else where they are files of their own."""
    data = evaluation_of(run).data

    def note(text: str) -> None:
        say(as_typed(text, data))

    with asked_data(run):
        if not isinstance(data, FileDataConfig):
            return enough(run, read_splits(data, note, traces=False)[1])
        hub = cache(partial(hub_splits, data.path or "", data.hub_config))
        name = data.train if data.n_validation is not None else data.validation or _measured_on(data, hub)
        table = read_split(data, name, Path(name).stem, hub, traces=False)
        (problems,) = identified([table])
        told(note, problems, table.notes)
        if (n := data.n_validation) is not None:
            if n > len(problems):
                raise ConfigError(
                    f"data.n_validation={n} is more than the {len(problems)} problems there are: lower it"
                )
            problems = subset(problems, n, data.split_seed)
        return enough(run, answered(data, [], problems, fill, note)[1])


def told(say: Say, problems: Problems, notes: str | Iterable[str]) -> Problems:
    for note in [notes] if isinstance(notes, str) else notes:
        say(note)
    return problems


def read_splits(data: DataConfig, say: Say, traces: bool = True) -> tuple[Problems, Problems]:
    """(train, validation) as the source has them: here a new kind of data finds its place.

    `traces`: given responses will be imitated or judged, so it matters what form they have.
    """
    if isinstance(data, StoriesConfig):
        make = partial(make_stories, min_events=data.min_events, max_events=data.max_events, max_value=data.max_value)
        return make(data.n_train, seed=0), make(data.n_validation, seed=0, validation=True)
    if isinstance(data, CountdownConfig) and data.path is not None:
        skip = data.bad_rows == "skip"
        *halves, notes = load_countdown(data.path, data.name, data.n_train, data.n_validation, skip)
        return told(say, halves[0], notes), halves[1]
    if isinstance(data, CountdownConfig):
        sizes = {key: getattr(data, key) for key in ("seed", "min_count", "max_count", "max_value", "max_target")}
        return make_countdown(data.n_train, **sizes), make_countdown(data.n_validation, **sizes, validation=True)
    if isinstance(data, GymConfig):
        made = make_gym(data.tasks, data.n_validation + data.n_train, data.seed)
        return made[data.n_validation :], made[: data.n_validation]
    assert isinstance(data, FileDataConfig)
    return read_files(data, say, traces)


def read_files(data: FileDataConfig, say: Say, traces: bool = True) -> tuple[Problems, Problems]:
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
    rows = told(say, rows, "! " * bool(missed) + said)
    return rows[: len(train)], rows[len(train) :]


def _ground_truth(data: FileDataConfig) -> dict[str, Problems]:
    """Source -> problems with answers: data.ground_truth, or the usual splits beside the training rows."""
    hub = cache(partial(hub_splits, data.path or "", data.hub_config))
    if data.ground_truth is not None:
        return {data.ground_truth: _with_either_names(data, data.ground_truth, hub)}
    train = locate(data.path, data.train)
    read = {train} if data.n_validation else {train, locate(data.path, data.validation or _measured_on(data, hub))}
    beside = [data.path, str(train.parent)] if train else [data.path]
    files = [file for folder in beside if folder for name in SPLITS if (file := locate(folder, name))]
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
    names: Names = field_names(asdict(data.fields))
    wrap = traces and data.response_as == "solution"
    parse = partial(to_problem, names=names, gold=data.gold, max_chars=data.max_chars, wrap=wrap)
    if label == GROUND_TRUTH or (traces and data.filter == "correct") or data.ground_truth is not None:
        # A trace that brings its own gold answer would always be right.
        parse = partial(parse, gold_in_response=False)
    source, rows = _rows(data, split, hub)
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


def _measured_on(data: FileDataConfig, hub: Hub) -> str:
    """The split to validate on where none was named."""
    if name := data.measured_on():
        return name
    on_hub = () if Path(data.path or "").expanduser().is_dir() else hub()
    for name in ("validation", "test"):
        if name in on_hub:
            return name
    raise ConfigError(data.unmeasured())
