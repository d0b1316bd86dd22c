"""What a sweep is before it runs: its runs in order, what differs between them, and where each of them writes."""

from dataclasses import dataclass, field
from pathlib import Path

Setting = dict[str, str]  # swept key -> value as typed


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a sweep."""

    name: str  # of its folder: the swept values in full, keys in alphabetical order, the seed last
    words: list[str]  # its overrides, for `python -m rlreason`; without hydra's own
    setting: Setting  # the swept values in the order of the name, without the seed
    seed: int


@dataclass(frozen=True, slots=True)
class Design:
    """A whole sweep, each of its runs composed and checked."""

    name: str
    folder: Path
    runs: list[PlannedRun]
    axes: list[str]  # the swept keys without the seed, in alphabetical order
    reference: Setting | None = None  # the setting that the others are compared with; None: the file names none
    carries: bool = True  # whether a chain hands its winner on
    words: list[str] = field(default_factory=list)  # those that were typed, to type them again

    @property
    def seeds(self) -> list[int]:
        """Those of all runs, sorted."""
        return sorted({run.seed for run in self.runs})

    def settings(self) -> list[Setting]:
        """Each setting once, in the order of the runs."""
        return [dict(items) for items in dict.fromkeys(tuple(run.setting.items()) for run in self.runs)]
