"""The config group `data`: where problems come from, which are used, and the generated tasks."""

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlreason.config.leaves import SPLITS, SUFFIXES, describe_format, locate, may_be_hub_name, unread_format
from rlreason.errors import Absent, ConfigError
from rlreason.runtime.plugins import NotImportableError, load
from rlreason.settings import MADE, MAX_SEED, MISSING, choice, group, number, share, source, text

#: Limits on what is read before the run starts, to check that its prompts fit: half a second of work at most.
MOST_BYTES = 20_000_000  # of files
MOST_STORIES, MOST_COUNTDOWNS = 20_000, 4_000  # of generated problems


@dataclass
class DataConfig:
    """Where problems come from, and which of them are used; first the settings of every kind of data."""

    #: Whether its first problems are a random sample.
    in_random_order: ClassVar[bool] = False
    bounded: ClassVar[tuple[str, ...]] = ("pass_rate",)  # settings with a `min_` that must not exceed their `max_`

    name: str = text(doc="of the option, for records and protocols", only_if="names_data(here)")
    verifier: str | None = text(
        None,
        doc="a module with a function (response, gold) -> score per form of answer, as countdown and "
        "reasoning_gym bring; null: answers are compared with the ground truth",
        only_if="verifies(here)",
    )
    limit: int | None = number(
        None,
        low=1,
        doc="train on this many problems, drawn by `seed`: the 128 are among the 256; null: all",
        only_if="trains_on(here)",
    )
    filter: str = choice(
        "none", "correct", doc="correct: keep problems whose given trace is correct", only_if="trains_on(here)"
    )
    pass_rates: str | None = source(
        None, doc="a pass_rates.jsonl that algorithm=evaluate wrote on the training data", only_if="trains_on(here)"
    )
    min_pass_rate: float = share(
        0.0,
        doc="keep problems solved in at least this share of the responses",
        only_if="trains_on(here) and here.pass_rates is not None",
    )
    max_pass_rate: float = share(
        1.0,
        doc="keep problems solved in at most this share of the responses",
        only_if="trains_on(here) and here.pass_rates is not None",
    )
    bad_gold: str = choice(
        "keep",
        "drop",
        doc="ground truths that no response can earn: named, or left out",
        only_if="compares_ground_truths(here)",
    )
    bad_rows: str = choice("stop", "skip", doc="rows that are broken, empty or too long; skipped are counted")
    overlap: str = choice(
        "refuse",
        "drop",
        "allow",
        doc="questions in both train and validation; drop: they leave train",
        only_if="trains_on(here)",
    )

    @property
    def on_hub(self) -> bool:
        """Whether some of its splits are not local files."""
        return False

    @property
    def quickly_read(self) -> bool:
        """Whether reading the data takes no network, no further library and little time."""
        return False

    def problems(self) -> list[str]:
        """Every violated rule inside the group, one line each: setting, value, rule, cure."""
        bad = []
        for name in self.bounded:
            low, high = getattr(self, f"min_{name}"), getattr(self, f"max_{name}")
            if low > high:
                bad.append(f"data.min_{name}={low} and data.max_{name}={high}: min <= max must hold: lower the first")
        if self.pass_rates is not None and not Path(self.pass_rates).expanduser().is_file():
            cure = "give the one that algorithm=evaluate wrote"
            bad.append(Absent(f"data.pass_rates={self.pass_rates} is no file: {cure}"))
        return bad

    def evaluation_problems(self) -> list[str]:
        """Return complaints about a run that only evaluates on its validation problems."""
        return self.problems()


@dataclass
class HabitsConfig:
    """The responses to the stories that the built-in model's warm start teaches."""

    hasty_share: float = share(
        0.72,
        doc="share of traces that answer after the first sum, mostly wrong",
        only_if="model.warm_start.hasty_share is None",
    )
    slip_share: float = share(
        0.05, doc="share of traces whose last sum is wrong", only_if="model.warm_start.slip_share is None"
    )
    stop_share: float = share(0.0, doc="after this share of the sums before the last, a trace ends with an answer")
    taught_max_events: int | None = number(
        None, low=1, high=99, doc="only stories of at most this many events are taught; null: all"
    )
    ramble_share: float = share(
        0.0, doc="share of the wrong traces that go on with idle sums (8+0=8) before they answer"
    )
    ramble_steps: int = number(4, low=1, high=99, doc="most idle sums of such a trace")
    guess_share: float = share(0.0, doc="share of traces that repeat the friend's guess instead of any sum")


@dataclass
class StoriesConfig(DataConfig):
    """Generated stories with numbers, from which the tiny model learns its habits."""

    in_random_order: ClassVar[bool] = True
    bounded: ClassVar[tuple[str, ...]] = ("pass_rate", "events")

    min_events: int = number(2, low=1, high=99, doc="fewest sums in a story")
    max_events: int = number(4, low=1, high=99, doc="most sums in a story")
    max_value: int = number(20, low=1, high=MADE, doc="of any number in a story, from 2 to 99")
    guess: str = choice(
        "none",
        "right_in_training",
        doc="A friend's guess at the end of the story: right_in_training: there always, and never in validation",
    )
    wrong_share: float = share(
        0.0,
        doc="share of training problems whose worked solution ends with a wrong sum, for SFT and data.filter=correct",
        only_if="here is data and reads_traces",
    )
    n_train: int = number(8192, low=1, high=MADE, doc="training problems")
    n_validation: int = number(1024, low=1, high=MADE, doc="validation problems")
    habits: HabitsConfig = group(HabitsConfig, only_if="here is data and warms_up")

    @property
    def quickly_read(self) -> bool:
        return self.n_train + self.n_validation <= MOST_STORIES

    def problems(self) -> list[str]:
        bad = super().problems()
        if not 2 <= self.max_value <= 99:
            bad.append(f"data.max_value={self.max_value} must lie in 2..99: numbers have at most two digits")
        habits = self.habits
        if habits.taught_max_events is not None and habits.taught_max_events < self.min_events:
            bad.append(
                f"data.habits.taught_max_events={habits.taught_max_events} is below data.min_events={self.min_events}, "
                f"and leaves the warm start no story: set it to {self.min_events} or more, or to null for all"
            )
        if habits.guess_share and self.guess == "none":
            bad.append(
                f"data.habits.guess_share={habits.guess_share} with data.guess=none: no story tells a guess to repeat: "
                "set it to 0, or data.guess=right_in_training"
            )
        return bad


@dataclass
class FieldsConfig:
    """The names of a row's fields, if they are none of the known ones."""

    question: str | None = text(None, doc="the question's field; null: question or problem")
    answer: str | None = text(None, doc="the answer's field; null: ground_truth or answer")
    solution: str | None = text(None, doc="the worked solution's field; null: solution")
    prompt: str | None = text(None, doc="the field of a whole prompt, taken word for word; null: prompt")
    response: str | None = text(None, doc="the field of a whole response, imitated word for word; null: response")
    messages: str | None = text(None, doc="the field of a chat, one user message and its answer; null: messages")
    id: str | None = text(None, doc="the field of the problem's name; null: id or unique_id")


@dataclass
class RowsDataConfig(DataConfig):
    """Rows from any source: what is read from them, and how many are held out for validation."""

    gold: str = choice(
        "auto",
        "hash",
        "boxed",
        "final",
        "tag",
        "field",
        doc="where the ground truth stands: hash: after ####; boxed: in the last \\boxed{}; final: in the closing "
        "sentence; tag: in <answer>; field: the answer field as it is; auto: the first of these that is there",
    )
    fields: FieldsConfig = group(FieldsConfig)
    response_as: str = choice(
        "response",
        "solution",
        doc="solution: given responses are put into prompt.trace's form",
        only_if="here is data and reads_traces",
    )
    max_chars: int = number(100_000, low=1, doc="characters of a field; a longer text makes a bad row")
    n_validation: int | None = number(
        None, low=1, high=MADE, doc="hold out this many of train instead of a validation split"
    )
    split_seed: int = number(
        0,
        high=MAX_SEED,
        doc="which are held out; not by `seed`, so that stages after one another hold out the same",
        only_if="here.holds_out",
    )

    @property
    def holds_out(self) -> bool:
        """Whether validation problems are drawn from the training rows."""
        return self.n_validation is not None


@dataclass
class FileDataConfig(RowsDataConfig):
    """Files of JSON rows, or a data set of the hub."""

    path: str | None = source(None, doc="a folder, or a hub name; null: train and validation name files")
    train: str = source(
        "train",
        doc="a file in the folder, a split on the hub, or a file anywhere (.jsonl, .json)",
        only_if="here is data or here.n_validation is not None",
    )
    validation: str | None = source(
        None,
        doc="named like train; null: validation or test where there is one, or n_validation",
        only_if="here.n_validation is None",
    )
    ground_truth: str | None = source(None, doc="named like train: questions with answers, for rows that bring none")
    hub_config: str | None = text(
        None, doc="the configuration of a hub data set that has several", only_if="here is not data or here.on_hub"
    )

    @property
    def on_hub(self) -> bool:
        if self.path is None or Path(self.path).expanduser().is_dir():
            return False
        splits = [self.train] if self.n_validation is not None else [self.train, self.validation]
        return any(split is None or not locate(self.path, split) for split in splits)

    @property
    def quickly_read(self) -> bool:
        if self.on_hub or (self.path and not Path(self.path).expanduser().is_dir()):
            return False
        named = (self.train, self.validation, self.ground_truth, *SPLITS)
        files = {file for name in named if name and (file := locate(self.path, name))}
        return sum(file.stat().st_size for file in files) <= MOST_BYTES

    def problems(self) -> list[str]:
        return self._rules() + self._absent("train", "validation", "ground_truth")

    def evaluation_problems(self) -> list[str]:
        if self.n_validation is not None:
            return self._rules() + self._absent("train", "ground_truth")
        bad = self._rules() + self._absent("validation", "ground_truth")
        if not bad and self.validation is None and self.path is not None and not self.evaluation_file():
            if Path(self.path).expanduser().is_dir():
                return [self.nothing_to_evaluate()]
            bad = self._absent_split("path", "validation")
        return bad

    def evaluation_file(self) -> str | None:
        """The folder's file to evaluate on if none was named; a hub has its own."""
        return next((name for name in ("validation", "test") if locate(self.path, name)), None)

    def nothing_to_evaluate(self) -> str:
        """The complaint about a folder of files with nothing to evaluate on."""
        if other := unread_format(self.path, "validation") or unread_format(self.path, "test"):
            return f"data.path={self.path}: {other}"
        return (
            f"data.path={self.path} holds neither validation nor test: name one with data.validation, or hold out some "
            "of train with data.n_validation=200"
        )

    def _rules(self) -> list[str]:
        bad = super().problems()
        if self.path is not None and Path(self.path).expanduser().is_file():
            given = describe_format(Path(self.path)) if locate(None, self.path) is None else "is a file"
            return [*bad, f"data.path={self.path}: {given}: give files as data.train and data.validation"]
        if self.validation is not None and self.n_validation is not None:
            bad.append(
                f"data.validation={self.validation} and data.n_validation={self.n_validation}: set one of them to null"
            )
        return bad

    def _absent(self, *keys: str) -> list[str]:
        """Return complaints about missing files; what a hub holds is checked when it is read."""
        if self.path is not None and Path(self.path).expanduser().is_file():
            return []  # reported above
        bad = [line for key in keys for line in self._absent_split(key, getattr(self, key))]
        if not bad and self.path is None and self.validation is None and self.n_validation is None:
            bad.append(
                "data.validation has no value: give data.validation=FILE, or hold out with data.n_validation=200"
            )
        return bad

    def _absent_split(self, key: str, split: str | None) -> list[str]:
        if split is None or locate(self.path, split):
            return []
        if other := unread_format(self.path, split):
            return [f"data.{key}={split}: {other}"]
        if self.path is None or Path(split).suffix in SUFFIXES[1:]:
            return [Absent(f"data.{key}={split} is no file: give a .jsonl or .json file, or a folder as data.path")]
        if Path(self.path).expanduser().is_dir():
            return [f"data.path={self.path} holds no {split}.jsonl: give another folder, or a file as data.{key}"]
        if may_be_hub_name(self.path):
            return []
        cure = "give a folder with train.jsonl and test.jsonl, a hub name, or files as data.train and data.validation"
        return [Absent(f"data.path={self.path} is no folder: {cure}")]


@dataclass
class CheckedDataConfig(DataConfig):
    """`verifier` names a module of `rlreason.grading.verifiers`, with one function per prompt format."""

    n_train: int = number(8192, low=1, high=MADE, doc="training problems")
    n_validation: int = number(1024, low=1, high=MADE, doc="validation problems")


@dataclass
class CountdownConfig(CheckedDataConfig):
    """Reach a target by arithmetic on the given numbers, each used once."""

    bounded: ClassVar[tuple[str, ...]] = ("pass_rate", "count")

    verifier: str | None = "rlreason.grading.verifiers.countdown"
    path: str | None = source(None, doc="a JSON-lines file or a hub name with nums and target; null: made up")
    seed: int = number(0, high=MAX_SEED, doc="of the generated problems", only_if="here.path is None")
    min_count: int = number(3, low=2, high=10, doc="fewest numbers given", only_if="here.path is None")
    max_count: int = number(4, low=2, high=10, doc="most numbers given", only_if="here.path is None")
    max_value: int = number(99, low=1, high=MADE, doc="of a given number", only_if="here.path is None")
    max_target: int = number(100, low=1, doc="of the number to reach", only_if="here.path is None")

    @property
    def on_hub(self) -> bool:
        return self.path is not None and not locate(None, self.path) and may_be_hub_name(self.path)

    @property
    def quickly_read(self) -> bool:
        if self.path is None:
            return self.n_train + self.n_validation <= MOST_COUNTDOWNS
        file = locate(None, self.path)
        return file is not None and file.stat().st_size <= MOST_BYTES

    def problems(self) -> list[str]:
        bad = super().problems()
        if self.path is not None and (other := unread_format(None, self.path)):
            bad.append(f"data.path={self.path}: {other}")
        return bad


@dataclass
class GymConfig(CheckedDataConfig):
    """Tasks of the reasoning-gym package."""

    verifier: str | None = "rlreason.grading.verifiers.gym"
    task: Any = text(doc="a task's name, or several: [leg_counting,chain_sum]")
    seed: int = number(0, high=MAX_SEED, doc="of the generated problems")

    @property
    def tasks(self) -> list[str]:
        """The tasks by name, one or several."""
        return [self.task] if isinstance(self.task, str) else self.task

    def problems(self) -> list[str]:
        bad = super().problems()
        names = self.tasks
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            bad.append(f"data.task={self.task} must be a task's name or a list of names (data.task=[leg_counting,gcd])")
        elif len(set(names)) < len(names):
            bad.append(f"data.task={names} names a task twice: name it once")
        return bad


@dataclass
class FunctionDataConfig(RowsDataConfig):
    """Problems that a function of the user's own returns, `data=module:function`: rows, or rows by split."""

    function: str = text(doc="module:function")
    options: dict[str, Any] = text({}, doc="its parameters by name")
    n_validation: int | None = number(
        None, low=1, high=MADE, doc="rows held out for validation; null: a tenth, at most 200"
    )

    @property
    def holds_out(self) -> bool:
        return True

    def problems(self) -> list[str]:
        try:
            function = load(self.function)
        except NotImportableError as error:
            return [*super().problems(), f"data.function={self.function}: {error}"]
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # some functions written in C have no signature
            return super().problems()
        try:
            signature.bind(**self.options)
        except TypeError as error:
            line = f"data.options={self.options}: {self.function}{signature} does not take them ({error}): fix them"
            return [*super().problems(), line]
        return super().problems()


def of_function(name: str) -> FunctionDataConfig:
    """Return the settings of a task `module:function`: its parameters with their defaults.

    A default that is no number, text or list of these is no setting and stays the function's own.
    """
    try:
        parameters = list(inspect.signature(load(name)).parameters.values())
    except NotImportableError as error:
        raise ConfigError(f"data={name}: {error}") from None
    except (TypeError, ValueError):
        parameters = []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    options = {p.name: MISSING if p.default is p.empty else p.default for p in named}
    plain = {key: value for key, value in options.items() if isinstance(value, int | float | str | list | None)}
    return FunctionDataConfig(name=name, function=name, options=plain)
