"""Describe a sweep and its runs, check its folder, and keep the outcomes of its runs in `sweep.json`."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from rlreason.errors import ConfigError
from rlreason.records.files import CONFIG, FUNCTIONS, SUMMARY, Note, checkpoints_in, finite
from rlreason.records.provenance import source_digests
from rlreason.records.reader import (
    DIVERGED,
    RunFolder,
    ended_by_itself,
    exit_code_of_status,
    known_status,
    read_ending,
    read_status,
    runs_in,
    settings_in,
    write_status,
)
from rlreason.records.resume import HARMLESS, MAY_CHANGE, changed, flat_text
from rlreason.runtime.files import holder, number, write_whole
from rlreason.runtime.machine import VISIBLE
from rlreason.runtime.streams import print_stderr
from rlreason.runtime.text import few, first_line, redacted

FEWEST_SEEDS = 3  # that must have ended before a sweep stops a setting
SWEEPS = Path("runs/sweeps")  # sweeps write below it, unless hydra.sweep.dir says otherwise
Setting = dict[str, str]  # swept key -> value as typed
Entries = list[dict[str, Any]]  # of a part of sweep.json
Key = tuple[tuple[str, str], ...]  # the same as the key of a mapping
#: The report's result for a setting: accuracy with its 95% interval, if any, and the verdict in a word.
Judged = tuple[tuple[float, float, float] | None, str]

FILE = "sweep.json"
REFERENCE = "reference"
WAITING = "waiting"  # a run's status before its start; the others are those of records.reader.STATUSES
DOMINATED = "stopped:dominated"
KILLED = "killed without a chance to say so"


@dataclass(slots=True)
class RunState:
    """The state of one run."""

    name: str  # of its folder: the swept values in full, keys in alphabetical order, the seed last
    overrides: list[str]  # for `python -m rlreason`; without hydra's own
    setting: Setting  # the swept values in the order of the name, without the seed
    seed: int
    status: str = WAITING
    reason: str = ""
    started: str | None = None  # ISO 8601 with the offset from UTC
    ended: str | None = None
    seconds: float | None = None  # wall clock of the run, over all its parts
    gpus: list[str] = field(default_factory=list)  # that its last start saw, as in CUDA_VISIBLE_DEVICES
    shared_machine: bool = False  # others of the sweep could run at the same time: its times are not comparable
    accuracy: float | None = None  # of the final evaluation; 0.0 counts for a diverged run that has none
    accuracy_interval: tuple[float, float] | None = None  # 95%, over problems
    accuracy_before: float | None = None
    score: float | None = None  # of a run of discovery, in place of an accuracy
    length: float | None = None
    problems: int | None = None
    protocol: str | None = None  # hash

    @property
    def figure(self) -> float | None:
        """Return its accuracy, or its score."""
        return self.accuracy if self.score is None else self.score

    @property
    def key(self) -> Key:
        """Return its setting as a key."""
        return tuple(self.setting.items())

    @property
    def of_its_own(self) -> bool:
        """Return whether it reached an end of its own: there is nothing left to run."""
        return self.status != WAITING and ended_by_itself(self.status)

    @property
    def status_text(self) -> str:
        """Return the status with its reason."""
        return f"{self.status} ({self.reason})" if self.reason else self.status


#: Settings in which a finished run may differ: they change none of its figures.
SAME_FIGURES = (*HARMLESS, "checkpoint", "logger", "waits", "save_rollouts_every", "monitors.dominated")
#: Differences in these do not make two settings of two runs.
NO_SETTING = (*SAME_FIGURES, "seed", "eval_every", "save_model", "profile", "monitors", "hydra", "grading.workers")


def refuse_changed(
    folder: Path,
    runs: Sequence[RunState],
    config_of: Callable[[RunState], str],
    sources_of: Callable[[RunState], Mapping[str, str]] = lambda run: {},
) -> None:
    """Raise `ConfigError` if the folder of a run is being written, or holds steps of other settings or functions.

    `folder`: the sweep's. `config_of` returns the text that a run would write, `sources_of` setting -> source of the
    user's functions.
    """
    for run in runs:
        place = folder / run.name
        if who := holder(place):  # of an earlier start of the sweep, which was killed: its runs end by themselves
            where = f"hydra.sweep.dir={folder}: {run.name} is being written by {who}"
            raise ConfigError(f"{where}: wait for it or end it, or give another folder (sweep_name=NAME)")
        finished = (place / SUMMARY).exists()
        if not (place / CONFIG).exists() or not (finished or checkpoints_in(place)):
            continue
        allowed = SAME_FIGURES if finished else MAY_CHANGE
        if not any(word.startswith("rollout=") for word in run.overrides):
            allowed = (*allowed, "rollout.engine")  # rollout=auto, which a node of a cluster may decide differently
        different = changed(settings_in(place), flat_text(config_of(run)), allowed)
        then, now = RunFolder(place).provenance.get("own_functions"), source_digests(sources_of(run))
        if not different and then and then != now:
            names = [key for key in now if then.get(key) != now[key]]
            different = f"{few(names)} has another source now: a run keeps it in {FUNCTIONS}"
        if different:
            kind = "finished" if finished else "half-done"
            raise ConfigError(
                f"hydra.sweep.dir={folder} holds a {kind} run {run.name} with other settings ({different}): "
                "move its folder away, or give the sweep a folder of its own (sweep_name=NAME, or hydra.sweep.dir=DIR)"
            )


@dataclass(slots=True)
class SweepState:
    """The state of a sweep, also of one that has been designed and not begun."""

    name: str
    command: str
    axes: list[str]  # the swept keys without the seed, in alphabetical order
    reference: Setting | None  # the setting that the others are compared with; None: the file names none
    status: str  # running, finished, failed, interrupted
    jobs: int
    launcher: str
    runs: list[RunState]
    carried: Entries = field(default_factory=list)  # what carry= brought, see report/carry.py
    #: By monitors.dominated: {"setting": Setting, "reason": str}.
    stopped_settings: Entries = field(default_factory=list)
    max_seeds: int = 0  # of seed=auto; 0: the seeds were fixed
    #: Of seed=auto: {"seeds": at this look, "stopped": settings that get no more, as in `stopped_settings`}.
    looks: Entries = field(default_factory=list)
    sweep: str = ""  # the value of sweep=, whatever its folder is called; "" without it
    version: int = 1

    def settings(self) -> list[Setting]:
        """Return each setting once, in the order of the runs."""
        return [dict(key) for key in dict.fromkeys(run.key for run in self.runs)]

    @property
    def code(self) -> int:
        """Return the exit code of the sweep, once it has ended."""
        return {"finished": 0, "interrupted": 130}.get(self.status, 1)

    def run(self, name: str) -> RunState:
        """Return the run of this name; `KeyError` if there is none."""
        return {run.name: run for run in self.runs}[name]

    def refresh(self, folder: Path, say: Note = print_stderr) -> None:
        """Look the runs up in the sweep's folder, and list the settings that runs were stopped for; see `refreshed`."""
        self.runs = [refreshed(run, folder, say) for run in self.runs]
        reasons = {run.key: run.reason for run in self.runs if run.status == DOMINATED}
        self.stopped_settings = [{"setting": dict(key), "reason": reason} for key, reason in reasons.items()]

    def close(self, folder: Path, errors: Mapping[str, Exception | None], status: str = "") -> None:
        """Write the final state: of each run what its folder says, else the error of its job."""
        self.refresh(folder, print)
        for run in self.runs:
            error, killed = errors.get(run.name), run.reason == KILLED
            if error is not None and (killed or run.status == WAITING):  # the latter: refused before it wrote anything
                run.status, run.reason = "failed", first_line(error)
                if killed:
                    write_status(folder / run.name, run.status, run.reason)
        self.status = status or self._ending()
        write_state(folder, self)

    def _ending(self, *interrupted: str) -> str:
        """Return the status of a sweep that runs no more, by its runs; these statuses mean that it was interrupted."""
        if any(run.status in ("interrupted", *interrupted) for run in self.runs):
            return "interrupted"
        return "finished" if all(run.of_its_own for run in self.runs) else "failed"


def setting_text(setting: Setting) -> str:
    """Return a setting as it is typed.

    >>> setting_text({"loss": "grpo_clip", "epochs": "2"}), setting_text({})
    ('loss=grpo_clip epochs=2', 'the default')
    """
    return " ".join(f"{key}={value}" for key, value in setting.items()) or "the default"


def looks_text(state: SweepState) -> str:
    """Return with how many seeds looks were taken, and which settings got no more; "" where seeds were fixed."""
    if not state.looks:
        return ""
    stopped: dict[int, list[str]] = {look["seeds"]: [] for look in state.looks}
    for look in state.looks:
        stopped[look["seeds"]] += [setting_text(one["setting"]) for one in look["stopped"]]
    text = f"looks: with {few(list(map(str, stopped)), 20)} of at most {state.max_seeds} seeds"
    ended = [f"with {n}: {few(names)}" for n, names in stopped.items() if names and n < state.max_seeds]
    return f"{text}; decided or given up {'; '.join(ended)}" if ended else text


def begun(state: SweepState, folder: Path) -> SweepState:
    """Return the state of a designed sweep as it begins, or resumes: with what its folder records of earlier runs."""
    before = read_state(folder) if (folder / FILE).exists() or runs_in(folder) else replace(state, runs=[])
    other = [f"max_seeds={state.max_seeds}"] if state.max_seeds not in (0, before.max_seeds) else []
    other += [f"seed={run.seed}" for run in state.runs if run.seed >= before.max_seeds]
    if before.looks and other:
        raise ConfigError(
            f"{other[0]}: the looks of {folder} with up to max_seeds={before.max_seeds} seeds have spent the 5%: keep "
            "to these, or give the sweep a folder of its own (sweep_name=NAME)"
        )
    old = {run.name: run for run in before.runs}
    runs = [replace(run, shared_machine=old.pop(run.name, run).shared_machine) for run in state.runs]
    axes, first = [list(run.setting) for run in runs], runs[0]
    earlier = [was for was in old.values() if (folder / was.name / SUMMARY).exists()]  # of other seeds or values
    if apart := [was.name for was in earlier if list(was.setting) not in axes]:
        print_stderr(f"! {folder}: other axes, so not in this sweep's tables: {few(apart, 3)}")
    for was in (was for was in earlier if was.name not in apart):
        if was.overrides and (different := changed(_shared(was), _shared(first), NO_SETTING)):
            raise ConfigError(
                f"hydra.sweep.dir={folder} holds {was.name} of another sweep ({different}): type all but seeds and "
                "values as it was, or give this sweep a folder of its own (sweep_name=NAME)"
            )
        runs.append(was)
    state = replace(
        state,
        status="running",
        runs=runs,
        reference=state.reference or before.reference,
        carried=state.carried or before.carried,
        looks=[*before.looks],
        max_seeds=state.max_seeds or before.max_seeds,
    )
    state.refresh(folder)
    return state


def _shared(run: RunState) -> Setting:
    """Return the overrides that a run shares with all of its sweep, whose spelling does not matter."""
    shared = dict[str, str]()
    for word in redacted(run.overrides):
        key, _, value = word.lstrip("+~").partition("=")
        key, value = key.rpartition("@")[2], value.strip("'\"").casefold()
        with suppress(ValueError):
            value = str(float(value))
        if key not in run.setting and "${seed}" not in value:  # which names a model of the stage before, here or moved
            shared[key] = value
    return shared


def write_state(folder: Path, state: SweepState) -> None:
    """Replace `sweep.json` as a whole. `UnwritableError` if the system refuses."""
    write_whole(folder / FILE, json.dumps(finite(redacted(asdict(state))), indent=1) + "\n")


def read_state(folder: Path, say: Note = print_stderr) -> SweepState:
    """Return the state of the sweep in a folder, while it runs or later; `ConfigError` if there is no sweep.

    Its runs are looked up in their folders: the sweep may have been killed. Broken files are reported to `say`. A
    folder of runs without a state is a sweep too, of which the runs' names say all but the reference.
    """
    state = _parsed(folder / FILE)
    if state is None:
        runs = []
        for place in runs_in(folder):
            setting = dict(part.partition("=")[::2] for part in place.name.split(",") if "=" in part)
            seed = setting.pop("seed", "0")
            runs.append(RunState(place.name, [], setting, int(seed) if seed.isdigit() else 0))
        if not runs:
            raise ConfigError(f"{folder} is no folder of a sweep: it holds no {FILE} and no runs; give one of {SWEEPS}")
        axes, sweep = sorted({key for run in runs for key in run.setting}), folder.name.partition(",")[0]
        state = SweepState(folder.name, "", axes, None, "running", 1, "processes", runs, sweep=sweep)
        if (folder / FILE).exists():
            say(f"{folder / FILE} cannot be read: the runs' names say all but the reference")
    state.refresh(folder, say)
    if state.status == "running" and holder(folder) is None:
        state.status = state._ending(WAITING, "running")
    return state


def sweeps_named(folder: Path, name: str) -> list[Path]:
    """Return the folders in `folder`, stages of chains too, of sweeps that were started as `sweep=name`."""
    files = sorted([*folder.glob(f"*/{FILE}"), *folder.glob(f"*/*/{FILE}")])
    return [path.parent for path in files if (state := _parsed(path)) and state.sweep == name]


def refreshed(run: RunState, folder: Path, say: Note = print_stderr) -> RunState:
    """Return what the run's own folder, below that of the sweep, says of it; what it cannot say is taken from `run`."""
    place = folder / run.name
    now = RunState(run.name, run.overrides, run.setting, run.seed, shared_machine=run.shared_machine)
    reader = RunFolder(place, say)
    origin, summary = reader.provenance, reader.summary
    now.started, now.ended = (origin.get("earlier_parts") or [origin])[0].get("started"), origin.get("ended")
    visible = (origin.get("environment") or {}).get(VISIBLE)
    now.gpus = visible.split(",") if visible else []
    if summary is None:
        status, reason = read_status(place), read_ending(place).get("reason", "")
        if status == "running" and holder(place) is None:
            now.status, now.reason = "interrupted", KILLED
        elif status and (not ended_by_itself(status) or status == DOMINATED or (place / SUMMARY).exists()):
            now.status, now.reason = status, reason
        elif run.status in ("failed", DOMINATED):
            now.status, now.reason = run.status, run.reason
        return now
    now.status, now.reason = known_status(str(summary.get("status", ""))), str(summary.get("reason", ""))
    for name in ("accuracy", "accuracy_before", "score", "length"):
        setattr(now, name, number(summary.get(name)))
    low, high = map(number, summary.get("accuracy_interval") or (None, None))
    now.accuracy_interval = None if low is None or high is None else (low, high)
    if now.accuracy is None and exit_code_of_status(now.status) == DIVERGED:
        now.accuracy, now.accuracy_interval = 0.0, None
        now.reason = "; ".join(filter(None, (now.reason, "without a figure of its own, it counts as accuracy 0")))
    now.problems = summary.get("eval_problems")
    now.protocol = (summary.get("protocol") or {}).get("hash")
    now.seconds = number(summary.get("seconds")) or run.seconds
    return now


def _parsed(path: Path) -> SweepState | None:
    """Return the file's content; None if it is missing or damaged."""
    try:
        state = msgspec.json.decode(path.read_bytes(), type=SweepState)
    except (OSError, ValueError):
        return None
    outside = any(Path(run.name).is_absolute() or ".." in Path(run.name).parts for run in state.runs)
    return None if outside else state
