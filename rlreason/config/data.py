"""The config group `data`: where problems come from, which are used, and the generated tasks."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

from rlreason.config.leaves import locate, may_be_hub_name
from rlreason.errors import Absent, ConfigError
from rlreason.runtime.plugins import NotImportableError, load
from rlreason.settings import MADE, MAX_SEED, MISSING, Settings, choice, count, group, number, share, text

RATED = "trains_on(here) and here.pass_rates is not None"


@dataclass
class DataConfig(Settings):
    """Where problems come from, and which of them are used; first the settings of every kind of data."""

    has_stories = False  # generated ones, in random order, which the tiny model understands
    on_hub: ClassVar[Any] = False  # whether some of its splits are not local files
    quickly_read: ClassVar[Any] = False  # whether reading it takes no network, no further library and no user's code

    name: str = text(
        doc="of the option, for records and protocols", only_if="here is not data or trains or eval.data is None"
    )
    verifier: str | None = text(
        None,
        "a module with a function (response, gold) -> score per form of answer; null: the built-in comparison",
        only_if="verifies(here)",
    )
    limit: int | None = count(
        None, "train on so many, by `seed`: the 128 are among the 256; null: all", only_if="trains_on(here)"
    )
    filter: str = choice("none | correct", "correct: keep those with a correct trace", only_if="trains_on(here)")
    pass_rates: str | None = text(None, "a pass_rates.jsonl of algorithm=evaluate", only_if="trains_on(here)")
    min_pass_rate: float = share(0.0, "keep what is solved at least in this share", only_if=RATED)
    max_pass_rate: float = share(1.0, "keep what is solved at most in this share", only_if=RATED)
    bad_gold: str = choice("keep | drop", "ground truths none can earn", only_if="compares_ground_truths(here)")
    bad_rows: str = choice("stop | skip", "rows that are broken, empty or too long; skipped are counted")
    overlap: str = choice(
        "refuse | drop | allow", "questions in both splits; drop: from train", only_if="trains_on(here)"
    )

    def rules(self) -> Iterator[str]:
        """Check lower against upper bounds, and that the file of pass rates is there."""
        for name in (f.name.removeprefix("min_") for f in fields(self) if f.name.startswith("min_")):
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low > high:
                yield f"data.min_{name}={low} is above data.max_{name}={high}: lower it"
        if self.pass_rates is not None and not Path(self.pass_rates).expanduser().is_file():
            yield Absent(f"data.pass_rates={self.pass_rates} is no file: give the one that algorithm=evaluate wrote")

    def evaluation_problems(self) -> list[str]:
        """Return complaints about a run that only evaluates on its validation problems."""
        return self.problems()


@dataclass
class HabitsConfig:
    """The responses to the stories that the built-in model's warm start teaches."""

    hasty_share: float = share(
        0.72, "share that answers after the first sum, mostly wrong", only_if="model.warm_start.hasty_share is None"
    )
    slip_share: float = share(0.05, "share whose last sum is wrong", only_if="model.warm_start.slip_share is None")
    stop_share: float = share(0.0, "after this share of the sums before the last, a trace ends with an answer")
    taught_max_events: int | None = count(None, "most events of a taught story; null: all", 99)
    ramble_share: float = share(0.0, "share of the wrong ones with idle sums (8+0=8) before the answer")
    ramble_steps: int = count(4, "most idle sums of such a trace", 99)
    guess_share: float = share(0.0, "share that repeats the friend's guess instead of any sum")


@dataclass
class StoriesConfig(DataConfig):
    """Generated stories with numbers, from which the tiny model learns its habits."""

    has_stories = quickly_read = True

    min_events: int = count(2, "fewest sums in a story", 99)
    max_events: int = count(4, "most sums in a story", 99)
    max_value: int = number(20, "of any number in a story", low=2, high=99)
    guess: str = choice("none | right_in_training", "a friend's guess at the end, wrong in validation")
    wrong_share: float = share(
        0.0, "share of the training solutions with a wrong last sum", only_if="here is data and reads_traces"
    )
    n_train: int = count(8192, "training problems", MADE)
    n_validation: int = count(1024, "validation problems", MADE)
    habits: HabitsConfig = group(HabitsConfig, only_if="here is data and warms_up")


@dataclass
class FieldsConfig:
    """The names of a row's fields, if they are none of the known ones."""

    question: str | None = text(None, "the question's field; null: question or problem")
    answer: str | None = text(None, "the answer's field; null: ground_truth or answer")
    solution: str | None = text(None, "the worked solution's field; null: solution")
    prompt: str | None = text(None, "the field of a whole prompt, taken word for word; null: prompt")
    response: str | None = text(None, "the field of a whole response, imitated word for word; null: response")
    messages: str | None = text(None, "the field of a chat, one user message and its answer; null: messages")
    id: str | None = text(None, "the field of the problem's name; null: id or unique_id")


@dataclass
class RowsDataConfig(DataConfig):
    """Rows from any source: what is read from them, and how many are held out for validation."""

    gold: str = choice(
        "auto | hash | boxed | final | tag | field",
        "where the ground truth stands: hash: after ####; boxed: in the last \\boxed{}; final: in the closing "
        "sentence; tag: in <answer>; field: the answer field as it is; auto: the first of these that is there",
    )
    fields: FieldsConfig = group(FieldsConfig)
    response_as: str = choice(
        "response | solution", "solution: in prompt.trace's form", only_if="here is data and reads_traces"
    )
    max_chars: int = count(100_000, "characters of a field; a longer text makes a bad row")
    max_steps: int | None = count(None, "most <<3+4=7>> in a solution, in both splits; null: all, and those with none")
    n_validation: int | None = count(None, "hold out this many of train for validation", MADE)
    split_seed: int = number(
        0, "which are held out, not by `seed`: the same in all stages", high=MAX_SEED, only_if="here.holds_out"
    )

    @property
    def holds_out(self) -> bool:
        """Whether validation problems are drawn from the training rows."""
        return self.n_validation is not None


@dataclass
class FileDataConfig(RowsDataConfig):
    """Files of JSON rows, or a data set of the hub."""

    path: str | None = text(None, "a folder, or a hub name; null: train and validation name files")
    train: str = text(
        "train",
        "a file in the folder, a split on the hub, or a file anywhere (.jsonl, .json)",
        only_if="here is data or here.n_validation is not None",
    )
    validation: str | None = text(
        None, "named like train; null: validation or test where there is one", only_if="here.n_validation is None"
    )
    ground_truth: str | None = text(None, "named like train: questions with answers, for rows that bring none")
    hub_config: str | None = text(None, "of a hub data set that has several configurations", only_if="here.on_hub")

    def rules(self, evaluated: bool = False) -> Iterator[str]:
        """Check that the files are there, as far as they are no hub data set's; `evaluated`: those of an evaluation."""
        held_out = self.n_validation is not None
        if self.validation is not None and held_out:
            both = f"data.validation={self.validation} and data.n_validation={self.n_validation}"
            yield f"{both}: set one of them to null"
        read = ("validation", "ground_truth") if evaluated and not held_out else ("train", "validation", "ground_truth")
        for key in read:
            split = getattr(self, key)
            if split is None or locate(self.path, split):
                continue
            if self.path is None or Path(split).suffix or Path(self.path).expanduser().is_dir():
                missing = f"data.{key}={split} is no .jsonl or .json file, by itself or in data.path={self.path}"
                yield Absent(f"{missing}: give one, or the folder that holds it")
            elif not may_be_hub_name(self.path):  # what a hub holds is checked when it is read
                cure = f"give a folder with {split}.jsonl, a hub name, or files as data.train and data.validation"
                yield Absent(f"data.path={self.path} is no folder: {cure}")
        if not held_out and self.path is None and self.validation is None:
            yield "data.validation has no value: give data.validation=FILE, or hold out with data.n_validation=200"

    @property
    def on_hub(self) -> bool:
        """Whether some of it is on the hub, and in no local file."""
        if self.path is None or Path(self.path).expanduser().is_dir():
            return False
        splits = [self.train] if self.n_validation is not None else [self.train, self.validation]
        return any(split is None or not locate(self.path, split) for split in splits)

    @property
    def quickly_read(self) -> bool:
        """Whether reading it takes no network."""
        return not self.on_hub

    def evaluation_problems(self) -> list[str]:
        return [*DataConfig.rules(self), *self.rules(evaluated=True)]


@dataclass
class CheckedDataConfig(DataConfig):
    """`verifier` names a module of `rlreason.grading.verifiers`, with one function per prompt format."""

    n_train: int = count(8192, "training problems", MADE)
    n_validation: int = count(1024, "validation problems", MADE)


@dataclass
class CountdownConfig(CheckedDataConfig):
    """Reach a target by arithmetic on the given numbers, each used once."""

    verifier: str | None = "rlreason.grading.verifiers.countdown"
    path: str | None = text(None, "a JSON-lines file or a hub name with nums and target; null: made up")
    seed: int = number(0, "of the generated problems", high=MAX_SEED, only_if="here.path is None")
    min_count: int = number(3, "fewest numbers given", low=2, high=10, only_if="here.path is None")
    max_count: int = number(4, "most numbers given", low=2, high=10, only_if="here.path is None")
    max_value: int = count(99, "of a given number", MADE, only_if="here.path is None")
    max_target: int = count(100, "of the number to reach", only_if="here.path is None")

    @property
    def on_hub(self) -> bool:
        """Whether some of it is on the hub, and in no local file."""
        return self.path is not None and not locate(None, self.path) and may_be_hub_name(self.path)


@dataclass
class GymConfig(CheckedDataConfig):
    """Tasks of the reasoning-gym package."""

    verifier: str | None = "rlreason.grading.verifiers.gym"
    task: Any = text(doc="a task's name, or several: [leg_counting,chain_sum]")
    seed: int = number(0, "of the generated problems", high=MAX_SEED)

    @property
    def tasks(self) -> list[str]:
        """The tasks by name, one or several."""
        return [self.task] if isinstance(self.task, str) else self.task


@dataclass
class FunctionDataConfig(RowsDataConfig):
    """Problems that a function of the user's own returns, `data=module:function`: rows, or rows by split."""

    function: str = text(doc="module:function")
    options: dict[str, Any] = text({}, "its parameters by name")
    n_validation: int | None = count(None, "rows held out; null: a tenth, at most 200", MADE)

    def rules(self) -> Iterator[str]:
        """Check that the function can be imported."""
        try:
            load(self.function)
        except NotImportableError as error:
            yield f"data.function={self.function}: {error}"

    @property
    def holds_out(self) -> bool:
        return True


def of_function(name: str) -> FunctionDataConfig:
    """Return the settings of a task `module:function`: its parameters with their defaults.

    A default that is no number, text or list of these is no setting and stays the function's own.
    """
    try:
        parameters = list(inspect.signature(load(name)).parameters.values())
    except NotImportableError as error:
        raise ConfigError(f"data={name}: {error}") from None
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    options = {p.name: MISSING if p.default is p.empty else p.default for p in named}
    plain = {key: value for key, value in options.items() if isinstance(value, int | float | str | list | None)}
    return FunctionDataConfig(name=name, function=name, options=plain)
