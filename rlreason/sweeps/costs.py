"""What a sweep's runs will take in time and disk, by those that have finished: here, or in a sweep much like it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlreason.config.any_run import AnyRunConfig
from rlreason.errors import ConfigError
from rlreason.records.reader import RunFolder
from rlreason.sweeps.design import Design
from rlreason.sweeps.state import FILE, RunState, SweepState, read_state

MEASURED = ("finished", "budget")  # ends that a run's time and size may be taken from
#: What must be equal in a run of another sweep for its time to say something of this one's.
ALIKE = (
    "algorithm", "n_steps", "model.name", "model.path", "data.name", "rollout_batch_size", "question_batch_size",
    "train_batch_size", "epochs_per_rollout", "sampling.max_tokens", "group_size", "prompt.name", "eval.card",
    "budget.hours", "budget.tokens", "budget.steps", "budget.calls", "strategy", "client.model", "problem",
)  # fmt: skip
LOOKED_AT = 6  # other sweeps, the newest first: a plan is to come at once


class Cost(NamedTuple):
    """Of one run: its wall clock in seconds, what it leaves in bytes, and which runs these come from."""

    seconds: float
    size: float
    source: str


def state_so_far(design: Design) -> SweepState | None:
    """What is known of the sweep from an earlier start; None where there was none."""
    if not (design.folder / FILE).exists():
        return None
    try:
        return read_state(design.folder)
    except ConfigError:
        return None


def cost_of(design: Design, run: AnyRunConfig, before: SweepState | None) -> Cost | None:
    """The mean cost of finished runs of this sweep, else of one beside it that is alike; None where there are none."""
    if before and (found := _mean(before, design.folder, "this sweep")):
        return found
    for folder in _others(design.folder):
        try:
            state = read_state(folder)
            ended = next((one for one in _measured(state) if (folder / one.name).is_dir()), None)
            if ended and alike(RunFolder(folder / ended.name, lambda _: None), run):
                return _mean(state, folder, folder.name)
        except ConfigError:  # of a later version, or broken: another one may tell
            continue
    return None


def alike(folder: RunFolder, run: AnyRunConfig) -> bool:
    """Whether a run in a folder had the settings that decide over its time, as far as both have them."""
    return all(folder.setting(key) == _setting(run, key) for key in ALIKE)


def _setting(run: Any, key: str) -> Any:
    for name in key.split("."):
        run = getattr(run, name, None)
    return run


def _others(folder: Path) -> Iterator[Path]:
    """Sweeps beside this one and the stages of such, the newest first."""
    here = folder.parent
    files = [path for pattern in (f"*/{FILE}", f"*/*/{FILE}") for path in here.glob(pattern)]
    newest = sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)
    yield from [path.parent for path in newest if path.parent != folder][:LOOKED_AT]


def _measured(state: SweepState) -> list[RunState]:
    return [run for run in state.runs if run.status in MEASURED and run.seconds]


def _mean(state: SweepState, folder: Path, name: str) -> Cost | None:
    """Over the finished runs; those that had the machine for themselves where there are any."""
    ended = _measured(state)
    alone = [run for run in ended if not run.shared_machine]
    if not ended:
        return None
    used = alone or ended
    source = f"{len(used)} finished run{'s' * (len(used) > 1)} of {name}"
    source += ", which shared the machine" * (not alone)
    sizes = [size_of(folder / run.name) for run in used[:5]]
    seconds = sum((run.seconds or 0.0) - start_paid_once(RunFolder(folder / run.name, lambda _: None)) for run in used)
    return Cost(max(seconds, 0.0) / len(used), sum(sizes) / len(sizes), source)


def start_paid_once(run: RunFolder) -> float:
    """Seconds in which a run taught its start model that the next ones find in the cache."""
    start = (run.summary or {}).get("start") or {}
    made = start.get("source") == "made" and run.setting("model.cache") is not None
    return float(start.get("seconds") or 0.0) if made else 0.0


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
