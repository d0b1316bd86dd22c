"""The config group `data`: where problems come from. It knows no other room, and no torch."""

from dataclasses import dataclass
from pathlib import Path

from omegaconf import MISSING


@dataclass
class Data:
    name: str = MISSING

    def problems(self) -> list[str]:
        return []


@dataclass
class Stories(Data):
    min_events: int = 2
    max_events: int = 4
    max_value: int = 20
    n_train: int = 8192
    n_validation: int = 1024

    def problems(self) -> list[str]:
        bad = []
        if not 1 <= self.min_events <= self.max_events:
            bad.append(
                f"data.min_events={self.min_events} and data.max_events={self.max_events}: 1 <= min <= max must hold"
            )
        if not 2 <= self.max_value <= 99:
            bad.append(f"data.max_value={self.max_value} must lie in 2..99: numbers have at most two digits")
        if min(self.n_train, self.n_validation) < 1:
            bad.append(f"data.n_train={self.n_train} and data.n_validation={self.n_validation} must be above 0")
        return bad


@dataclass
class FileData(Data):
    path: str = MISSING  # a folder with train.jsonl and test.jsonl, or a hub name
    train_limit: int | None = None  # use the first so many after a shuffle by seed

    def problems(self) -> list[str]:
        if self.train_limit is not None and self.train_limit < 1:
            return [f"data.train_limit={self.train_limit} must be at least 1, or null to use every problem"]
        folder = Path(self.path).expanduser()
        cure = "give a folder with train.jsonl and test.jsonl"
        if not folder.is_dir():
            # One slash and no leading dot may be a hub name; anything else was meant as a folder.
            may_be_hub_name = self.path.count("/") == 1 and not self.path.startswith((".", "/", "~"))
            return [] if may_be_hub_name else [f"data.path={self.path} is no folder: {cure}"]
        missing = [name for name in ("train.jsonl", "test.jsonl") if not (folder / name).is_file()]
        return [f"data.path={self.path} holds no {missing[0]}: {cure}"] if missing else []
