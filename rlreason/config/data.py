"""The config group `data`: where problems come from, and which of them are used.

It knows how sources are named (`data/files.py`), no other room, and no torch.
"""

from dataclasses import dataclass, field
from pathlib import Path

from omegaconf import MISSING

from rlreason.data.files import SUFFIXES, locate, may_be_hub_name

WORDS = {
    "filter": ("none", "correct"),
    "bad_gold": ("keep", "drop"),
    "bad_rows": ("stop", "skip"),
    "overlap": ("refuse", "drop", "allow"),
}


@dataclass
class DataConfig:
    """Keys of every kind of data: what is done with the problems once they are there."""

    name: str = MISSING
    verifier: str | None = (
        None  # a module with one function (response, gold) -> score per form of answer; null: equality
    )
    limit: int | None = None  # train on so many problems, drawn by seed: 128 are among 256; null: all
    filter: str = "none"  # none | correct: keep the problems whose trace the grader accepts
    pass_rates: str | None = None  # a pass_rates.jsonl that algorithm=evaluate wrote on the training data
    min_pass_rate: float = 0.0  # keep problems that were solved at least so often,
    max_pass_rate: float = 1.0  # and at most so often
    bad_gold: str = "keep"  # gold answers that do not grade themselves right are said, and: keep | drop
    bad_rows: str = "stop"  # what cannot be used (broken, empty, too long): stop | skip, counted and said
    overlap: str = "refuse"  # questions of both train and validation: refuse | drop (from train) | allow

    def problems(self) -> list[str]:
        bad = _no_such_word(self, WORDS)
        if self.min_pass_rate > self.max_pass_rate:
            bad.append(
                f"data.min_pass_rate={self.min_pass_rate} and data.max_pass_rate={self.max_pass_rate}: "
                "min <= max must hold: lower the first"
            )
        if self.pass_rates is not None and not Path(self.pass_rates).expanduser().is_file():
            bad.append(f"data.pass_rates={self.pass_rates} is no file: give the one that algorithm=evaluate wrote")
        return bad

    def problems_asked(self) -> list[str]:
        """What is wrong where nothing is learned and its validation problems alone are asked."""
        return self.problems()


@dataclass
class StoriesConfig(DataConfig):
    min_events: int = 2
    max_events: int = 4
    max_value: int = 20
    n_train: int = 8192
    n_validation: int = 1024

    def problems(self) -> list[str]:
        bad = super().problems()
        if self.min_events > self.max_events:
            bad.append(
                f"data.min_events={self.min_events} and data.max_events={self.max_events}: min <= max must hold: "
                "lower the first"
            )
        if not 2 <= self.max_value <= 99:
            bad.append(f"data.max_value={self.max_value} must lie in 2..99: numbers have at most two digits")
        return bad


@dataclass
class FieldsConfig:
    """The names of a row's fields, where they are none of the known ones."""

    question: str | None = None  # question, problem
    answer: str | None = None  # ground_truth, answer
    solution: str | None = None  # solution
    prompt: str | None = None  # prompt: taken word for word, no template is filled
    response: str | None = None  # response: imitated word for word
    messages: str | None = None  # messages: one user message and its answer
    id: str | None = None  # id, unique_id


@dataclass
class FileDataConfig(DataConfig):
    path: str | None = None  # a folder or a hub name; null: train and validation are files
    train: str = "train"  # a file in the folder, a split on the hub, or a file anywhere (.jsonl, .json)
    validation: str | None = None  # the same; null: validation or test where there is one, or n_validation
    n_validation: int | None = None  # hold so many of train out instead
    ground_truth: str | None = None  # named like train: questions with answers, for rows that bring none
    split_seed: int = 0  # which are held out; not `seed`, so that runs that follow each other hold out the same
    hub_config: str | None = None  # of a hub data set that has several
    gold: str = (
        "auto"  # where the gold answer stands: auto | hash (####) | boxed | final (sentence) | tag (<answer>) | field
    )
    fields: FieldsConfig = field(default_factory=FieldsConfig)
    response_as: str = "response"  # response: as it is | solution: to be put into the prompt's form (prompt.trace)
    max_chars: int = 100_000  # a longer text makes a bad row

    def problems(self) -> list[str]:
        return self._rules() + self._absent("train", "validation", "ground_truth")

    def problems_asked(self) -> list[str]:
        if self.n_validation is not None:
            return self._rules() + self._absent("train", "ground_truth")
        bad = self._rules() + self._absent("validation", "ground_truth")
        if not bad and self.validation is None and self.path is not None and not self.measured_on():
            if Path(self.path).expanduser().is_dir():
                return [self.unmeasured()]
            bad = self._absent_split("path", "validation")
        return bad

    def measured_on(self) -> str | None:
        """The file of the folder that is asked where none was named; a hub has its own."""
        return next((name for name in ("validation", "test") if locate(self.path, name)), None)

    def unmeasured(self) -> str:
        return (
            f"data.path={self.path} holds neither validation nor test: name one with data.validation, or hold out some "
            "of train with data.n_validation=200"
        )

    def _rules(self) -> list[str]:
        golds = ("auto", "hash", "boxed", "final", "tag", "field")
        bad = super().problems() + _no_such_word(self, {"gold": golds, "response_as": ("response", "solution")})
        if self.validation is not None and self.n_validation is not None:
            bad.append(
                f"data.validation={self.validation} and data.n_validation={self.n_validation}: set one of them to null"
            )
        return bad

    def _absent(self, *keys: str) -> list[str]:
        """Complaints about files that are not there; what a hub holds is seen when it is read."""
        bad = [line for key in keys for line in self._absent_split(key, getattr(self, key))]
        if not bad and self.path is None and self.validation is None and self.n_validation is None:
            bad.append(
                "data.validation has no value: give data.validation=FILE, or hold out with data.n_validation=200"
            )
        return bad

    def _absent_split(self, key: str, split: str | None) -> list[str]:
        if split is None or locate(self.path, split):
            return []
        if self.path is None or Path(split).suffix in SUFFIXES[1:]:
            return [f"data.{key}={split} is no file: give a .jsonl or .json file, or a folder as data.path"]
        if Path(self.path).expanduser().is_dir():
            return [f"data.path={self.path} holds no {split}.jsonl: give another folder, or a file as data.{key}"]
        if may_be_hub_name(self.path):
            return []
        cure = "give a folder with train.jsonl and test.jsonl, a hub name, or files as data.train and data.validation"
        return [f"data.path={self.path} is no folder: {cure}"]


def _no_such_word(data: DataConfig, words: dict[str, tuple[str, ...]]) -> list[str]:
    return [
        f"data.{key}={getattr(data, key)} is none of {', '.join(known)}: choose one"
        for key, known in words.items()
        if getattr(data, key) not in known
    ]
