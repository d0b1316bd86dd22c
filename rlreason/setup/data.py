"""The problems of a run, from its `data` settings: read, held apart, filtered, checked, and drawn from."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from rlreason.config.data import DataConfig, FileDataConfig
from rlreason.config.evaluation import as_eval, asked_by
from rlreason.config.rules import too_many_asked
from rlreason.config.run import RunConfig
from rlreason.config.sources import resource_dir
from rlreason.data.files import hub_splits
from rlreason.data.ground_truth import check_ground_truths
from rlreason.data.splits import by_pass_rate, identified, read_pass_rates, repeated, subset, without_overlap
from rlreason.data.traces import check_template, filter_correct, trace_text, with_traces
from rlreason.errors import ConfigError
from rlreason.grading import Grader
from rlreason.setup.read_data import Problems, Say, answered, measured_on, read_split, read_splits, with_notes
from rlreason.setup.templates import filling


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
    validation = asked_checked(run, validation, judge, say, needed=run.asks_training_data)
    if run.asks_training_data:
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
    if bad := too_many_asked(run, len(asked), resource_dir("conf")):
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
    with asked_by(run, "data"):
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

    with asked_by(run, "data"):
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
