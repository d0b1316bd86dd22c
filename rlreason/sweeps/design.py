"""What a sweep is before it runs: its runs in order, what differs between them, and where each of them writes."""

from dataclasses import dataclass
from pathlib import Path

FEWEST_SEEDS = 3  # that must have ended before a sweep gives a setting up
SWEEPS = Path("runs/sweeps")  # sweeps write below it, unless hydra.sweep.dir says otherwise
Setting = dict[str, str]  # swept key -> value as typed
Key = tuple[tuple[str, str], ...]  # the same as the key of a mapping


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a sweep."""

    name: str  # of its folder: the swept values in full, keys in alphabetical order, the seed last
    words: list[str]  # its overrides, for `python -m rlreason`; without hydra's own
    setting: Setting  # the swept values in the order of the name, without the seed
    seed: int

    @property
    def key(self) -> Key:
        """Its setting as a key."""
        return tuple(self.setting.items())


@dataclass(frozen=True, slots=True)
class Design:
    """A whole sweep, each of its runs composed and checked."""

    name: str
    folder: Path
    runs: list[PlannedRun]
    axes: list[str]  # the swept keys without the seed, in alphabetical order
    reference: Setting | None = None  # the setting that the others are compared with; None: the file names none
    sweep: str = ""  # the file that was asked for by sweep=; none where its axes were typed

    @property
    def seeds(self) -> list[int]:
        """Those of all runs, sorted."""
        return sorted({run.seed for run in self.runs})

    def settings(self) -> list[Setting]:
        """Each setting once, in the order of the runs."""
        return [dict(key) for key in dict.fromkeys(run.key for run in self.runs)]
