"""Describe a sweep before it runs (`Design`), and check that its folder holds only runs of the same settings."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG, SUMMARY, checkpoints_in
from rlreason.records.reader import RunFolder
from rlreason.records.resume import HARMLESS, MAY_CHANGE, settings_changed
from rlreason.runtime.files import holder

FEWEST_SEEDS = 3  # that must have ended before a sweep stops a setting
SWEEPS = Path("runs/sweeps")  # sweeps write below it, unless hydra.sweep.dir says otherwise
Setting = dict[str, str]  # swept key -> value as typed
Key = tuple[tuple[str, str], ...]  # the same as the key of a mapping


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a sweep."""

    name: str  # of its folder: the swept values in full, keys in alphabetical order, the seed last
    overrides: list[str]  # for `python -m rlreason`; without hydra's own
    setting: Setting  # the swept values in the order of the name, without the seed
    seed: int

    @property
    def key(self) -> Key:
        """Return its setting as a key."""
        return tuple(self.setting.items())


@dataclass(frozen=True, slots=True)
class Design:
    """A whole sweep; each of its runs has been composed and checked."""

    name: str
    folder: Path
    runs: list[PlannedRun]
    axes: list[str]  # the swept keys without the seed, in alphabetical order
    reference: Setting | None = None  # the setting that the others are compared with; None: the file names none
    sweep: str = ""  # the file given by sweep=; "" where the axes were typed

    @property
    def seeds(self) -> list[int]:
        """Return the seeds of all runs, sorted."""
        return sorted({run.seed for run in self.runs})

    def settings(self) -> list[Setting]:
        """Return each setting once, in the order of the runs."""
        return [dict(key) for key in dict.fromkeys(run.key for run in self.runs)]


WAIT_S = 60.0  # for runs of an earlier start of the sweep, which end by themselves when it is killed
#: Settings in which a finished run may differ: they change none of its figures.
SAME_FIGURES = (*HARMLESS, "checkpoint", "logger", "waits", "save_rollouts_every", "monitors.dominated")
CURES = "move its folder away, or give the sweep a folder of its own (sweep_name=NAME, or hydra.sweep.dir=DIR)"


@dataclass(frozen=True, slots=True)
class Composed:
    """What a sweep needs of a run's composed config."""

    config: str  # as the run writes it to its folder
    gpus: int = 1  # that it needs by its settings
    vllm: bool = False  # its engine, which decides while it is loaded how it uses the processors


def refuse_changed(design: Design, composed: Callable[[PlannedRun], Composed]) -> None:
    """Raise `ConfigError` if a finished or half-done run in its folder has other settings than it has now."""
    for run in design.runs:
        folder = design.folder / run.name
        finished = (folder / SUMMARY).exists()
        if not (folder / CONFIG).exists() or not (finished or checkpoints_in(folder)):
            continue
        allowed = SAME_FIGURES if finished else MAY_CHANGE
        if not any(word.startswith("rollout=") for word in run.overrides):
            allowed = (*allowed, "rollout.engine")  # rollout=auto, which a node of a cluster may decide differently
        now = composed(run).config
        if different := settings_changed(RunFolder(folder).config, now, allowed):
            kind = "finished" if finished else "half-done"
            raise ConfigError(
                f"hydra.sweep.dir={design.folder} holds a {kind} run {run.name} with other settings ({different}): "
                f"{CURES}"
            )


def wait_for_earlier(design: Design, say: Callable[[str], object], limit_s: float = WAIT_S) -> None:
    """Wait while runs of an earlier start still write into their folders; `ConfigError` after `limit_s` seconds."""
    end, said = time.monotonic() + limit_s, False
    places = {run.name: design.folder / run.name for run in design.runs}
    while busy := {name: who for name, place in places.items() if (who := holder(place)) is not None}:
        name, who = next(iter(busy.items()))
        if time.monotonic() > end:
            raise ConfigError(
                f"hydra.sweep.dir={design.folder}: {name} is being written by {who}: wait for it or end it, and type "
                "the sweep again; or give this one a folder of its own (sweep_name=NAME)"
            )
        if not said:
            say(f"note: {name} is still being written by {who}: waiting for it, at most {limit_s:.0f} s")
            said = True
        time.sleep(0.5)
