"""The problems of a run, from its `data` settings: read, split, filtered, checked, and counted."""

import contextlib
import json
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.config.data import (
    CountdownConfig,
    DataConfig,
    FieldsConfig,
    FileDataConfig,
    FunctionDataConfig,
    GymConfig,
    RowsDataConfig,
    StoriesConfig,
)
from rlreason.config.evaluation import as_eval, naming_eval_settings
from rlreason.config.leaves import SPLITS, locate, may_be_hub_name, resource_dir
from rlreason.config.rules import too_many_problems
from rlreason.config.run import RunConfig
from rlreason.data.ground_truth import check_ground_truths, with_ground_truth
from rlreason.data.prompts import check_template, filling, filter_correct, trace_text, with_traces
from rlreason.data.rows import Names, field_names, own_id, to_problem
from rlreason.data.sources import Row, Table, file_rows, hub_splits, make_gym, question_hash, read_table, rows_of
from rlreason.data.tasks import load_countdown, make_countdown, make_stories, with_wrong_solutions
from rlreason.errors import ConfigError, DataError
from rlreason.grading import Grader
from rlreason.runtime.text import few, question_key, question_keys, shorten
from rlreason.types import Problem


def identified(tables: Sequence[Table]) -> list[list[Problem]]:
    """The problems of each table under the data's own ids, if every row has a different one; else numbered."""
    own = [id for table in tables for id in table.own_ids]
    if None in own or len(set(own)) < len(own):
        return [table.problems for table in tables]
    return [[replace(p, id=id) for p, id in zip(t.problems, t.own_ids, strict=True) if id is not None] for t in tables]


def hold_out(problems: list[Problem], n: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """(the rest, n drawn by seed). The first 100 drawn are among the first 200. `ConfigError` if none is left."""
    if n >= len(problems):
        raise ConfigError(f"data.n_validation={n} must be less than the {len(problems)} problems there are: lower it")
    held = subset(problems, n, seed)
    ids = {p.id for p in held}
    return [p for p in problems if p.id not in ids], held


def subset(problems: list[Problem], limit: int | None, seed: int) -> list[Problem]:
    """`limit` problems drawn by seed, nested: the first 128 are among the first 256. None takes all, in order."""
    if limit is None or limit >= len(problems):
        return problems
    order = list(range(len(problems)))
    random.Random(f"subset/{seed}").shuffle(order)
    return [problems[i] for i in order[:limit]]


def without_overlap(
    train: list[Problem], validation: Sequence[Problem], policy: str, fill: Callable[[str], str]
) -> tuple[list[Problem], list[str]]:
    """(train, notes). `policy` for a question of both: refuse it (`DataError`), drop it, or allow it with a note.

    Questions are the same by `question_key`: case, punctuation, width or a label in front make no other one. `fill`
    writes a question into the run's prompt: a row that gives its whole prompt is recognised by that.
    """
    prompted = any(p.prompt is not None for p in (*train, *validation))

    def keys(p: Problem) -> list[str]:
        """What a problem is recognised by: its question or whole prompt, and the question in the run's prompt."""
        in_prompt = [question_key(fill(p.question))] if prompted and p.prompt is None else []
        return [question_key(p.question), *in_prompt]

    asked = {key: p.id for p in validation for key in keys(p)}
    shared = {p.id: asked[key] for p in train for key in keys(p) if key in asked}
    if not shared:
        return train, []
    pairs = few([f"{a} is {b}" for a, b in shared.items()], 3)
    found = f"{len(shared)} training questions are validation questions too ({pairs})"
    if policy == "refuse":
        cure = "drop takes them out of the training data, allow keeps them"
        raise DataError(f"data.overlap=refuse: {found}: {cure}, or give other files")
    if policy == "allow":
        return train, [f"! {found}, and data.overlap=allow keeps them: validation accuracy may be memory"]
    rest = [p for p in train if p.id not in shared]
    if not rest:
        raise DataError(f"data.overlap=drop: {found}, and that is all of them: give other files")
    return rest, [f"! {found}: dropped from the training data"]


def repeated(problems: Sequence[Problem], what: str, same: Callable[[str, str], bool]) -> list[str]:
    """Notes: how many rows ask how many questions, where some are repeated, and those with different ground truths.

    `what`: 'training', say. `same`: whether two ground truths are one answer.
    """
    rows: dict[str, list[Problem]] = {}
    for key, p in zip(question_keys((p.id, p.question) for p in problems).values(), problems, strict=True):
        rows.setdefault(key, []).append(p)
    if len(rows) == len(problems):
        return []
    notes = [f"{len(problems)} {what} rows ask {len(rows)} different questions"]
    torn = []
    for of in rows.values():
        first, *others = [p for p in of if p.answer] or of[:1]
        if other := next((p for p in others if p.answer != first.answer and not same(p.answer, first.answer)), None):
            torn.append(f"{first.id} says {shorten(first.answer, 30)}, {other.id} {shorten(other.answer, 30)}")
    if torn:
        notes.append(f"! {len(torn)} {what} questions have different ground truths in different rows: {few(torn, 3)}")
    return notes


def read_pass_rates(path: Path) -> dict[str, float]:
    """Question hash -> correct / samples, over all lines of a question; `DataError` for a line of another form."""
    samples: dict[str, int] = {}
    correct: dict[str, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            key, n, c = row["question_hash"], row["samples"], row["correct"]
            sound = isinstance(key, str) and isinstance(n, int) and isinstance(c, int) and 0 <= c <= n > 0
        except (ValueError, KeyError, TypeError):
            sound = False
        if not sound:
            raise DataError(
                f"{path}, line {number} is no pass rate: it must hold question_hash, samples (1 or more) and correct "
                "(0 to samples); algorithm=evaluate writes such a file"
            )
        samples[key], correct[key] = samples.get(key, 0) + n, correct.get(key, 0) + c
    return {key: correct[key] / n for key, n in samples.items()}


def by_pass_rate(
    problems: list[Problem], rates: Mapping[str, float], low: float, high: float
) -> tuple[list[Problem], str]:
    """(problems with a pass rate in [low, high], a line on the others); `DataError` where there are none."""
    known = [(p, rates.get(question_hash(p.question))) for p in problems]
    kept = [p for p, rate in known if rate is not None and low <= rate <= high]
    hard = sum(rate is not None and rate < low for _, rate in known)
    easy = sum(rate is not None and rate > high for _, rate in known)
    without = sum(rate is None for _, rate in known)
    counts = (
        f"kept {len(kept)} of {len(problems)} problems with a pass rate in [{low:g}, {high:g}]; dropped: "
        f"{hard} below, {easy} above, {without} without a pass rate"
    )
    if not kept:
        cure = (
            "make the file with algorithm=evaluate on this data"
            if without == len(problems)
            else "widen data.min_pass_rate and data.max_pass_rate"
        )
        raise DataError(f"data.pass_rates: {counts}: {cure}")
    return kept, ("! " if without else "") + counts


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
    if name := data.evaluation_file():
        return name
    on_hub = () if Path(data.path or "").expanduser().is_dir() else hub()
    for name in ("validation", "test"):
        if name in on_hub:
            return name
    raise ConfigError(data.nothing_to_evaluate())


class Loaded(NamedTuple):
    """What a run works with; `sizes` are numbers of problems on the way there, for the console and the summary."""

    train: Problems
    validation: Problems
    sizes: dict[str, int]


def load_data(run: RunConfig, *, grader: Grader | None = None, judge: Grader | None = None, say: Say = print) -> Loaded:
    """The problems of a run. Whatever is left out is said.

    With a grader, the ground truths are checked: of validation by `judge`, who grades evaluations, and of train where
    it is sampled from.
    """
    judge = judge or grader
    if run.reads_traces:
        check_template(run.prompt.trace)
    train, validation = read_problems(run, say)
    if not run.uses_training_data:
        validation = asked_checked(run, validation, judge, say)
        return Loaded([], validation, {"validation": len(validation)})
    train, sizes = selected(run, train, validation, grader, say)
    validation = asked_checked(run, validation, judge, say, needed=run.samples_training_data)
    if run.samples_training_data:
        train = with_notes(say, *ground_truths_checked(train, grader if run.trains else judge, run.data))
    train = with_notes(say, train, repeated(train, "training", same_truth(grader)))
    limit = run.data.limit
    if limit is not None and limit > len(train):
        say(f"! data.limit={limit} is more than the {len(train)} training problems there are: all are used")
    train = subset(train, limit, run.seed)
    return Loaded(train, validation, sizes | {"train": len(train), "validation": len(validation)})


def read_problems(run: RunConfig, say: Say) -> tuple[Problems, Problems]:
    """(train, validation), with ground truth as far as it is found; what only measures gets no training problems."""
    data, own = run.data, run.eval.data
    if own is not None and not run.uses_training_data:
        return [], read_asked(run, say)
    train, validation = read_splits(data, say, run.reads_traces)
    if run.uses_training_data and not run.trains:
        enough(run, train)
    elif own is None:
        enough(run, validation)
    if not run.uses_training_data:
        train = []  # nothing is learned: training data must not stop a measurement
    if isinstance(data, FileDataConfig):
        train, validation = answered(data, train, validation, filling(run.asking.prompt), say)
    return train, validation if own is None else read_asked(run, say)


def selected(
    run: RunConfig, train: Problems, validation: Problems, grader: Grader | None, say: Say
) -> tuple[Problems, dict[str, int]]:
    """The training problems that are used, and how many there were on the way."""
    data, sizes = run.data, {"train_read": len(train)}
    train = with_notes(say, *without_overlap(train, validation, data.overlap, filling(run.asking.prompt)))
    if data.pass_rates is not None:
        rates = read_pass_rates(Path(data.pass_rates).expanduser())
        train = with_notes(say, *by_pass_rate(train, rates, data.min_pass_rate, data.max_pass_rate))
    if run.reads_traces:
        train = with_notes(say, *with_traces(train, run.prompt.trace, skip=data.bad_rows == "skip"))
    if data.filter == "correct":
        assert grader is not None, "data.filter=correct needs the grader"
        sizes["train_before_filter"] = len(train)
        texts = partial(trace_text, template=run.prompt.trace)
        train = with_notes(say, *filter_correct(train, texts, grader.grade_batch))
        sizes["train_filtered"] = len(train)
    return train, sizes


def enough(run: RunConfig, asked: Problems) -> Problems:
    """The problems that evaluations ask from, unless the settings ask for more than there are."""
    if bad := too_many_problems(run, len(asked), resource_dir("conf")):
        raise ConfigError("\n".join(bad))
    return asked


def ground_truths_checked(
    problems: Problems, grader: Grader | None, data: DataConfig, needed: bool = True
) -> tuple[Problems, Sequence[str]]:
    """(problems, notes on ground truths that cannot be earned); which form a plug-in expects is unknown."""
    if not grader or grader.plugin:
        return problems, []
    return check_ground_truths(problems, grader, data.bad_gold, needed)


def asked_checked(run: RunConfig, asked: Problems, judge: Grader | None, say: Say, needed: bool = True) -> Problems:
    """The problems that evaluations ask from, their ground truths checked."""
    data = run.evaluation.data
    with naming_eval_settings(run, "data"):
        asked = with_notes(say, *ground_truths_checked(asked, judge, data, needed))
    return with_notes(say, asked, repeated(asked, "validation", same_truth(judge)))


def same_truth(grader: Grader | None) -> Callable[[str, str], bool]:
    """Whether two ground truths are one answer: by the grader's rules, or as they are written."""
    return str.__eq__ if grader is None or grader.plugin else grader.same


def read_asked(run: RunConfig, say: Say) -> Problems:
    """The validation problems of an evaluation's own data, and nothing else where they are files of their own."""
    data, fill = run.evaluation.data, filling(run.evaluation.prompt)

    def note(text: str) -> None:
        say(as_eval("data", text, data))

    with naming_eval_settings(run, "data"):
        if not isinstance(data, FileDataConfig):
            return enough(run, read_splits(data, note, traces=False)[1])
        hub = cache(partial(hub_splits, data.path or "", data.hub_config))
        name = data.train if data.n_validation is not None else data.validation or measured_on(data, hub)
        table = read_split(data, name, Path(name).stem, hub, traces=False)
        (problems,) = identified([table])
        with_notes(note, problems, table.notes)
        if (n := data.n_validation) is not None:
            if n > len(problems):
                raise ConfigError(
                    f"data.n_validation={n} is more than the {len(problems)} problems there are: lower it"
                )
            problems = subset(problems, n, data.split_seed)
        return enough(run, answered(data, [], problems, fill, note)[1])
