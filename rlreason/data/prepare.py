"""Prepare the problems of a run from its `data` settings: read, split, filter, check and count them."""

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rlreason.config.data import (
    CountdownConfig,
    DataConfig,
    FileDataConfig,
    FunctionDataConfig,
    GymConfig,
    StoriesConfig,
)
from rlreason.config.leaves import SPLITS, locate, prompt_renderer
from rlreason.config.rules import too_many_problems
from rlreason.config.run import RunConfig, as_eval, naming_eval_settings, naming_set, of_set
from rlreason.data.prompts import check_template, filter_correct, note_other_forms, with_traces
from rlreason.data.sources import (
    GROUND_TRUTH,
    RawRow,
    Say,
    Table,
    as_table,
    file_rows,
    hub_splits,
    numbered,
    question_hash,
    rows_of_split,
    validation_split,
)
from rlreason.data.tasks import load_countdown, make_countdown, make_gym, make_stories, with_wrong_solutions
from rlreason.errors import ConfigError, DataError
from rlreason.grading import Grader
from rlreason.grading.formats import FORMATS
from rlreason.runtime.plugins import describe_error, load
from rlreason.runtime.text import few, question_key, shorten
from rlreason.types import Problem

Problems = list[Problem]
Splits = tuple[Problems, Problems]  # train, validation
Fill = Callable[[str], str]  # writes a question into a prompt
Judges = Mapping[str, Grader]  # by the names of `eval.sets`
_WORD = re.compile(r"(?<![\\\w])[a-z]{3,}(?!\w)", re.I)  # of plain language
MOST_WORDS = 6  # of a ground truth; beyond them it is a sentence
NONE: Mapping[str, Any] = MappingProxyType({})


def with_ids(tables: Sequence[Table]) -> list[Problems]:
    """Return each table's problems under the data's own ids if every row has a different one; else numbered."""
    own = [id for table in tables for _, id in table]
    numbered = None in own or len(set(own)) < len(own)
    return [[p if numbered else replace(p, id=id or "") for p, id in table] for table in tables]


def hold_out(problems: Problems, n: int, seed: int) -> Splits:
    """Return (the rest, n drawn by seed); the draws are nested: 100 are among 200. `ConfigError` if none is left."""
    if n >= len(problems):
        raise ConfigError(f"data.n_validation={n} must be less than the {len(problems)} problems there are: lower it")
    held = subset(problems, n, seed)
    ids = {p.id for p in held}
    return [p for p in problems if p.id not in ids], held


def subset(problems: Problems, limit: int | None, seed: int) -> Problems:
    """Draw `limit` problems by seed; the draws are nested: 128 are among 256. None takes all, in order."""
    if limit is None or limit >= len(problems):
        return problems
    shuffled = list(problems)
    random.Random(f"subset/{seed}").shuffle(shuffled)
    return shuffled[:limit]


def without_overlap(
    train: Problems, validation: Sequence[Problem], policy: str, fill: Fill, say: Say, what: str = "validation"
) -> Problems:
    """Return the training problems. `policy` for a question in both: refuse (`DataError`), drop, or allow it.

    `what`: a word for the other questions. Questions are compared by `question_key`, which ignores case, punctuation,
    width and a label in front. `fill` writes a question into the run's prompt, to recognise rows that give their whole
    prompt.
    """

    def keys(p: Problem) -> list[str]:
        texts = [p.question, fill(p.question)] if p.prompt is None else [p.question]
        return list(map(question_key, texts))

    ids = {key: p.id for p in validation for key in keys(p)}
    shared = {p.id: ids[key] for p in train for key in keys(p) if key in ids}
    if not shared:
        return train
    pairs = few([f"{a} is {b}" for a, b in shared.items()], 3)
    found = f"{len(shared)} training questions are {what} questions too ({pairs})"
    rest = [p for p in train if p.id not in shared]
    if policy == "refuse" or (policy == "drop" and not rest):
        cure = "drop takes them out of the training data, allow keeps them"
        raise DataError(f"data.overlap={policy}: {found}: {cure}, or give other files")
    if policy == "allow":
        say(f"! {found}, and data.overlap=allow keeps them: {what} accuracy may be memory")
        return train
    say(f"! {found}: dropped from the training data")
    return rest


def note_repetitions(problems: Sequence[Problem], what: str, judge: Grader | None, say: Say) -> None:
    """Say how many problems ask a question again, and which of these questions have different ground truths."""
    same = str.__eq__ if judge is None or judge.plugin else judge.same
    answers: dict[str, list[str]] = {}
    for p in problems:
        answers.setdefault(question_key(p.question), []).extend([p.answer] if p.answer else [])
    if len(answers) == len(problems):
        return
    say(f"{len(problems)} {what} rows ask {len(answers)} different questions")
    pairs = [(of[0], other) for of in answers.values() for other in of[1:] if other != of[0]]
    conflicts = [f"{shorten(one, 30)} and {shorten(other, 30)}" for one, other in pairs if not same(other, one)]
    if conflicts:
        say(f"! {len(conflicts)} {what} rows have another ground truth than their question had: {few(conflicts, 3)}")


def by_pass_rate(problems: Problems, data: DataConfig, path: Path, say: Say) -> Problems:
    """Return the problems with a pass rate in the range of the settings, and count the others.

    `path`: a file of correct answers and samples by question hash; lines of the same question add up. `DataError` for
    a malformed line, or where no problem is left.
    """
    low, high, samples, correct = data.min_pass_rate, data.max_pass_rate, Counter[str](), Counter[str]()
    for where, row in file_rows(path):
        row = row if isinstance(row, dict) else {}
        key, n, c = (row.get(name) for name in ("question_hash", "samples", "correct"))
        if not (isinstance(key, str) and isinstance(n, int) and isinstance(c, int) and 0 <= c <= n > 0):
            raise DataError(
                f"{path}, {where} is no pass rate: it must hold question_hash, samples (1 or more) and correct "
                "(0 to samples); algorithm=evaluate writes such a file"
            )
        samples[key] += n
        correct[key] += c
    hashes = [(p, question_hash(p.question)) for p in problems]
    rated = [(p, correct[key] / samples[key]) for p, key in hashes if key in samples]
    kept = [p for p, rate in rated if low <= rate <= high]
    hard, unrated = sum(rate < low for _, rate in rated), len(problems) - len(rated)
    counts = (
        f"kept {len(kept)} of {len(problems)} problems with a pass rate in [{low:g}, {high:g}]; dropped: "
        f"{hard} below, {len(rated) - len(kept) - hard} above, {unrated} without a pass rate"
    )
    if not kept:
        cure = "widen data.min_pass_rate and data.max_pass_rate, or make the file with algorithm=evaluate on this data"
        raise DataError(f"data.pass_rates: {counts}: {cure}")
    say(("! " if unrated else "") + counts)
    return kept


def read_splits(data: DataConfig, say: Say, traces: bool = True, validation_only: bool = False) -> Splits:
    """Read (train, validation) from the source; a new kind of data is added here.

    `traces`: given responses will be imitated or graded, so their form matters. `validation_only`: of files, only the
    validation split is read.
    """
    match data:
        case StoriesConfig():
            sizes = (data.min_events, data.max_events, data.max_value)
            stories = partial(make_stories, seed=0, sizes=sizes, guessed=data.guess != "none")
            train = with_wrong_solutions(stories(data.n_train), data.wrong_share if traces else 0.0)
            return train, list(stories(data.n_validation, validation=True))
        case CountdownConfig(path=None):
            return make_countdown(data), make_countdown(data, validation=True)
        case CountdownConfig():
            return load_countdown(data, say)
        case GymConfig():
            problems = make_gym(data.tasks, data.n_validation + data.n_train, data.seed)
            return problems[data.n_validation :], problems[: data.n_validation]
        case FunctionDataConfig():
            return read_function(data, say, traces)
    assert isinstance(data, FileDataConfig)
    return read_files(data, say, traces, validation_only)


def read_files(data: FileDataConfig, say: Say, traces: bool = True, validation_only: bool = False) -> Splits:
    """Read (train, validation) from files or a hub data set."""

    def table(split: str, label: str) -> Table:
        return as_table(data, *rows_of_split(data.path, split, data.hub_config), label, traces, say)

    if data.n_validation is not None:
        (problems,) = with_ids([table(data.train, Path(data.train).stem)])
        if validation_only and data.n_validation == len(problems):
            return [], problems
        return hold_out(problems, data.n_validation, data.split_seed)
    validation = data.validation or validation_split(data)
    labels = [Path(data.train).stem, Path(validation).stem]
    if validation_only:
        return [], with_ids([table(validation, labels[1])])[0]
    if labels[0] == labels[1]:
        labels = ["train", "validation"]
    train, held = with_ids([table(data.train, labels[0]), table(validation, labels[1])])
    return train, held


def read_function(data: FunctionDataConfig, say: Say, traces: bool = True) -> Splits:
    """Read (train, validation) from a user's function, which returns rows, or rows by train and validation.

    `DataError` where it fails or returns something else, `ConfigError` where data.n_validation is set although the
    function splits the rows itself.
    """
    try:
        returned = load(data.function)(**data.options)
        splits = dict(returned) if isinstance(returned, Mapping) else {"train": returned}
        if set(splits) not in ({"train"}, {"train", "validation"}):
            raise TypeError(f"it returned the keys {sorted(splits)}: return rows, or rows by train and validation")
        rows: dict[str, list[RawRow]] = {}
        for label, table in sorted(splits.items()):
            if hasattr(table, "iterrows"):  # of pandas, with empty cells
                table = table.astype(object).where(table.notna(), None).to_dict("records")
            plain = (row.facts | asdict(row) if isinstance(row, Problem) else row for row in table)
            rows[label] = list(numbered(plain))
    except Exception as error:  # anything that a user's function raises
        raise DataError(f"data.function={data.function} fails: {describe_error(error)}: fix it") from error
    if len(rows) == 2 and data.n_validation is not None:
        raise ConfigError(
            f"data.n_validation={data.n_validation}: {data.function} returns validation rows of its own: leave it out"
        )
    tables = [as_table(data, f"{data.function}'s {k} rows", rows[k], k, traces, say) for k in rows]
    train, *validation = with_ids(tables)
    if validation:
        return train, validation[0]
    n = data.n_validation or min(200, max(1, len(train) // 10))
    if data.n_validation is None:
        say(f"{n} of the {len(train)} problems are held out for validation (data.n_validation)")
    return hold_out(train, n, data.split_seed)


def check_ground_truths(
    problems: Problems, grader: Grader | None, data: DataConfig, say: Say, needed: bool = True
) -> Problems:
    """Count ground truths that earn no reward, and return the problems; without them with `data.bad_gold=drop`.

    Raises `DataError` where no problem can earn a reward, unless answers are not `needed`: SFT learns without them.
    Nothing is checked without a grader or for a plug-in, whose form of an answer is unknown.
    """
    if grader is None or grader.plugin:
        return problems
    stated, answers = FORMATS[grader.reward].written, [p.answer for p in problems]
    grades = grader.grade_batch(list(map(stated.format, answers)), answers)  # each by a response that states it
    wrong = {p.id for p, grade in zip(problems, grades, strict=True) if grade.outcome != "correct"}
    if not needed and not any(p.answer for p in problems):
        say("! no validation problem has a ground truth: accuracy stays 0 and says nothing")
        return problems
    if len(wrong) == len(problems):
        raise DataError(
            f"none of {len(problems)} problems has a ground truth that grades itself right, so nothing can be earned "
            f"({few(list(wrong), 3)}): choose data with answers, or say where they stand (data.gold, "
            "data.fields.answer, or a file of their own: data.ground_truth)"
        )
    if prose := [p.id for p in problems if len(_WORD.findall(p.answer)) > MOST_WORDS + p.answer.count(",")]:
        found = f"{len(prose)} of {len(problems)} ground truths are sentences ({few(prose)})"
        say(f"! {found}, which only the same sentence equals: data.gold or data.fields.answer say where answers stand")
    done = "dropped" if data.bad_gold == "drop" else "cannot be earned"
    if wrong:
        ids = few([p.id for p in problems if p.id in wrong])
        found = f"{len(wrong)} of {len(problems)} ground truths are missing or do not grade themselves right"
        say(f"! {found}; {done}: {ids}")
    return [p for p in problems if p.id not in wrong or data.bad_gold == "keep"]


def with_ground_truths(data: DataConfig, train: Problems, validation: Problems, fill: Fill, say: Say) -> Splits:
    """Look up ground truths for rows of files without one, where requested or needed to filter.

    They are found by question in data.ground_truth, or else in the usual splits and the validation data. `fill` writes
    a question into the run's prompt; a whole prompt whose problem was found gets the bare question. Return
    (train, validation).
    """
    wanting = sum(not p.answer for p in (*train, *validation))
    if not isinstance(data, FileDataConfig) or not wanting:
        return train, validation
    if data.ground_truth is None and (all(p.answer for p in train) or data.filter != "correct"):
        return train, validation
    sources = _known(data) | {"the validation data": validation}
    partners: dict[str, Problem] = {}  # of two alike, the first counts
    for p in (p for known in sources.values() for p in known if p.answer):
        for text in (p.question, fill(p.question)):
            partners.setdefault(question_hash(text), p)
    rows, found = Problems(), 0
    for p in (*train, *validation):
        partner = partners.get(question_hash(p.question))
        if partner and not p.answer:  # a bare question keeps its white space
            p = replace(p, answer=partner.answer, question=p.question if p.prompt is None else partner.question)
            found += 1
        rows.append(p)
    if not found and (data.ground_truth is not None or not any(p.answer for p in train)):
        key = "data.filter=correct" if data.ground_truth is None else f"data.ground_truth={data.ground_truth}"
        raise DataError(
            f"{key}: {wanting} rows bring no ground truth, and no row with the same question in {', '.join(sources)} "
            "has one: give a file with these questions and their answers as data.ground_truth, or rows with a field "
            "ground_truth"
        )
    mark = "! " if found < wanting else ""
    say(f"{mark}{wanting} rows bring no ground truth: found by question for {found} in {', '.join(sources)}")
    return rows[: len(train)], rows[len(train) :]


def _known(data: FileDataConfig) -> dict[str, Problems]:
    """Return source -> problems with answers: data.ground_truth, or the usual splits next to the training rows."""
    train = locate(data.path, data.train)
    if data.ground_truth is not None:
        splits = [data.ground_truth]
    elif train is None:
        splits = [name for name in hub_splits(data.path or "", data.hub_config) if name != data.train]
    else:
        files = [locate(data.path or str(train.parent), name) for name in SPLITS]
        splits = [str(file) for file in files if file not in (None, train)]
    found: dict[str, Problems] = {}
    for split in splits:
        source, rows = rows_of_split(data.path, split, data.hub_config)
        try:
            table = as_table(data, source, rows, GROUND_TRUTH, traces=False, say=lambda note: None)
            found[split] = [problem for problem, _ in table]
        except DataError:
            if data.ground_truth is not None:
                raise  # of the usual splits one may hold no row that can be used
    return found


class Loaded(NamedTuple):
    """The problems of a run; `sizes` are the numbers after each step of the preparation, for console and summary."""

    train: Problems
    validation: Problems
    sizes: dict[str, int]
    sets: Mapping[str, Problems] = NONE  # of each of `eval.sets`


def own_validation(run: RunConfig, say: Say) -> Problems:
    """Read the problems of `eval.data`."""
    own, fill = run.evaluation.data, prompt_renderer(run.evaluation.prompt.file)

    def note(text: str) -> None:
        say(as_eval("data", text, own))

    with naming_eval_settings(run, "data"):
        problems = read_splits(own, note, traces=False, validation_only=True)[1]
        return with_ground_truths(own, [], problems, fill, note)[1]


def load_sets(run: RunConfig, judges: Judges, say: Say) -> dict[str, Problems]:
    """Load the problems of each of `eval.sets`; `judges` check their ground truths, as in `load_data`."""
    sets = dict[str, Problems]()
    for name, asked in run.by_set().items():

        def note(text: str, name: str = name) -> None:
            say(of_set(name, f"{name}: {text}"))

        with naming_set(name):
            problems = own_validation(asked, note)
            with naming_eval_settings(asked, "data"):
                sets[name] = check_ground_truths(problems, judges.get(name), asked.evaluation.data, note)
            for key in ("problems", "final_problems"):  # of its own: the run's are a bound
                if (count := getattr(run.eval.by_name[name], key) or 0) > (there := len(problems)):
                    raise ConfigError(f"eval.{key}={count} is more than the {there} problems there are: lower it")
        note_repetitions(sets[name], name, judges.get(name), say)
    return sets


def load_data(
    run: RunConfig,
    *,
    grader: Grader | None = None,
    judge: Grader | None = None,
    judges: Judges = NONE,
    say: Say = print,
) -> Loaded:
    """Load the problems of a run, with a note on everything that is left out; a run that only measures has none to
    train on.

    With a grader, ground truths are checked: of validation by `judge`, which grades evaluations, of each of `eval.sets`
    by its own of `judges`, and of train where it is sampled from.
    """
    judge, data, sizes = judge or grader, run.data, dict[str, int]()
    if run.reads_traces:
        check_template(run.prompt.trace)
    train, validation = Problems(), Problems()
    if run.eval.data is None or run.uses_training_data:  # else training data must not stop a measurement
        fill = prompt_renderer(run.asking.prompt.file)
        train, validation = read_splits(data, say, run.reads_traces)
        train = train if run.uses_training_data else []
        train, validation = with_ground_truths(data, train, validation, fill, say)
    if run.eval.data is not None:
        validation = own_validation(run, say)
    if bad := too_many_problems(run, len(validation if run.trains or not run.uses_training_data else train)):
        raise ConfigError("\n".join(bad))
    sets = load_sets(run, judges, say)
    if run.uses_training_data:
        sizes["train_read"] = len(train)
        train = without_overlap(train, validation, data.overlap, fill, say)
        for name, asked in sets.items():
            train = without_overlap(train, asked, data.overlap, fill, say, f"eval.sets.{name}")
        if data.pass_rates is not None:
            train = by_pass_rate(train, data, Path(data.pass_rates).expanduser(), say)
        if run.reads_traces:
            train = with_traces(train, run.prompt.trace, data.bad_rows == "skip", say)
            if judge is not None and not judge.plugin and data.filter == "none":  # the filter drops them
                note_other_forms(train, run.prompt.trace, judge.reward, say)
        if data.filter == "correct":
            assert grader is not None
            sizes["train_before_filter"] = len(train)
            train = filter_correct(train, run.prompt.trace, grader, say)
            sizes["train_filtered"] = len(train)
    with naming_eval_settings(run, "data"):
        needed = not run.uses_training_data or run.samples_training_data
        validation = check_ground_truths(validation, judge, run.evaluation.data, say, needed)
    note_repetitions(validation, "validation", judge, say)
    of_training = grader if run.trains else judge
    if run.samples_training_data:
        train = check_ground_truths(train, of_training, data, say)
    note_repetitions(train, "training", of_training, say)
    if run.uses_training_data:
        train = subset(train, data.limit, run.seed)
        sizes["train"] = len(train)
    return Loaded(train, validation, sizes | {"validation": len(validation)}, sets)
