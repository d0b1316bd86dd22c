"""The interface of a logger, the counter over which each metric is drawn, and silencing a service's output."""

import builtins
import os
import re
import shlex
import sys
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import yaml

from rlreason.config.groups import LOGGERS, LoggerConfig
from rlreason.records.files import TENSORBOARD
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.text import redacted

Row = Mapping[str, float]
Table = tuple[str, int]  # (rollouts or evals, step)

#: The columns of a response.
COLUMNS = (
    "question", "response", "gold", "format_reward", "answer_reward", "reward", "outcome", "entropy", "length",
)  # fmt: skip

#: Counter -> the metrics that are drawn over it. Every row carries every counter, so any other axis can be chosen too.
AXES: dict[str, tuple[str, ...]] = {
    "rollout_step": (
        "rollout/*",
        "reward/*",
        "grading/*",
        "ei/*",
        "time/*",
        "busy/*",
        "perf/*",
        "memory/*",
        "generations/rollouts",
    ),
    "train_step": ("train/*", "sft/*", "tokens/*", "eval/*", "final/*", "generations/evals"),
}
COUNTERS = ("rollout_step", "train_step", "eval_step")

LIMIT_S = 60.0  # a run waits this long for a service, at its start and at its end


class SentRun(NamedTuple):
    """A run's id in a service, whether this process resumes it, and `calls`, the most rows and tables sent before."""

    id: str
    goes_on: bool = False
    calls: int = 0


@dataclass
class Sent:
    """What a service already has of the rows and tables to come, which are skipped once each.

    `metrics`: (metric, value of its counter) -> how often. `rows`: the number of first rows to skip entirely.
    """

    metrics: Counter[tuple[str, int]] = field(default_factory=Counter)
    tables: Counter[Table] = field(default_factory=Counter)
    rows: int = 0

    def add(self, row: Mapping[str, object]) -> None:
        """Count a row that the service has; it has every counter."""
        counters = {name: int(float(str(row[name]))) for name in COUNTERS if name in row}
        for name in row:
            if (axis := axis_of(name)) in counters and name not in COUNTERS:
                self.metrics[name, counters[axis]] += 1

    def new_in(self, row: Row) -> Row | None:
        """Return the row without the metrics that the service has; None where none are left."""
        if self.rows:
            self.rows -= 1
            return None
        if not self.metrics:  # always, in a run that is not resumed
            return row
        there = {name for name in row if name not in COUNTERS and self._take(name, int(row[axis_of(name)]))}
        left = {name: value for name, value in row.items() if name not in there}
        return None if there and left.keys() <= set(COUNTERS) else left

    def has_table(self, name: str, step: int) -> bool:
        """Whether the service already has the table."""
        self.tables[name, step] -= 1
        return self.tables[name, step] >= 0

    def _take(self, name: str, step: int) -> bool:
        if found := self.metrics.get((name, step), 0):
            self.metrics[name, step] = found - 1
        return found > 0


class Logger(Protocol):
    """One run in one service. Any method may raise or hang: `guarded.Loggers` handles that."""

    cure: str  # what a user can do where it fails; that of the class where it does not start
    place: str  # the run's address, or the command that shows it; may be empty

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: SentRun) -> None:
        """Start or resume a run in the service. `config`: all settings of the run in `folder`, nested dicts."""

    def sent(self) -> Sent | None:
        """Return what the service has of a resumed run; None: everything that was sent to it."""

    def log(self, row: Row) -> None:
        """Log a row of metrics with every counter."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Log responses of a step, with `COLUMNS`; `name` is `rollouts` or `evals`."""

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """End a run that has ended by itself or was interrupted, at these counters."""

    def abandon(self) -> None:
        """End a run that has failed."""


def axis_of(metric: str) -> str:
    """Return the counter over which a metric is drawn.

    >>> axis_of("reward/mean"), axis_of("eval/accuracy")
    ('rollout_step', 'train_step')
    """
    drawn = (counter for counter, names in AXES.items() if any(fnmatchcase(metric, name) for name in names))
    return next(drawn, "train_step")


def sendable(value: Any) -> Any:
    r"""Replace every character that UTF-8 cannot encode, such as a lone surrogate from a JSON file.

    >>> sendable({"question": "\ud800?", "entropy": None})
    {'question': '??', 'entropy': None}
    """
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {sendable(key): sendable(child) for key, child in value.items()}
    return [sendable(child) for child in value] if isinstance(value, list | tuple) else value


_thread = threading.local()
_lock = threading.Lock()


def listen() -> list[tuple[str, str]]:
    """Collect (function, text) of all later calls of silenced functions in this thread, instead of showing them."""
    heard: list[tuple[str, str]] = []
    _thread.heard = heard
    return heard


def silence(module: ModuleType, name: str) -> None:
    """Silence a function with which a module shows texts, in the threads that `listen`; other threads still show."""
    shows = vars(module).get(name) or vars(builtins).get(name)
    with _lock:
        if shows is None or hasattr(shows, "heard"):
            return

        @wraps(shows)
        def heard_or_shown(*words: Any, **how: Any) -> None:
            heard = getattr(_thread, "heard", None)
            if heard is None:
                shows(*words, **how)
            else:
                heard.append((name, " ".join(map(str, words[:1]))))

        vars(heard_or_shown)["heard"] = True
        vars(module)[name] = heard_or_shown


HEADER = 7  # bytes of an empty file of W&B's
#: Seconds that W&B waits for its server at the start and at the end, a little less than the run waits for W&B.
TIMEOUTS = {"init_timeout": LIMIT_S / 2, "finish_timeout": 0.75 * LIMIT_S}


def changed_settings(wandb: Any) -> dict[str, Any]:
    """Return W&B's settings whose environment variables have changed since W&B read them, once in a process."""
    before, now = wandb.Settings(), wandb.Settings()
    before.update_from_env_vars(getattr(wandb.setup(), "_settings_environ", None) or os.environ)
    now.update_from_env_vars(os.environ)
    names = before.model_fields_set | now.model_fields_set
    return {name: getattr(now, name) for name in names if getattr(now, name) != getattr(before, name)}


def init_args(settings: LoggerConfig, folder: Path, own: Any, new: dict[str, Any], known: SentRun) -> dict[str, Any]:
    """Return the arguments of `wandb.init`: the user's settings, and our defaults where W&B has no value of its own.

    `own` are W&B's settings from its variables and files, which are not passed, so that they hold, except for those
    `new` since W&B read them. Secrets in the run's names are hidden.
    """
    given = {field.name: getattr(settings, field.name) for field in fields(settings) if field.name not in LOGGERS}
    defaults = {"project": "rlreason", "group": os.environ.get(SWEEP_VARIABLE), "name": folder.name}
    named = {"project": own.project, "group": own.run_group, "name": own.run_name}
    kept = {key: value for key, value in given.items() if value is not None}
    place = {} if "WANDB_DIR" in os.environ else {"dir": str(folder)}
    ours = new | {"silent": True, "finish_timeout_raises": True, "reinit": "create_new"}  # next to the user's runs
    ours |= {"disable_git": True}  # it would keep the difference from a commit, secrets included
    ours |= {"x_disable_meta": True} if redacted(sys.argv) != sys.argv else {}  # it would keep the command
    ours |= {"console": "off"} if own.console == "auto" else {}  # a run reports for itself
    ours |= {key: value for key, value in TIMEOUTS.items() if f"WANDB_{key.upper()}" not in os.environ}
    place |= {} if own.run_id else {"id": known.id}
    place |= {"resume": "allow"} if known.goes_on and not own.resume else {}
    names = {key: value for key, value in defaults.items() if value and not named[key]} | kept
    return place | {"settings": ours} | dict(redacted(names))


def refuse_without_login(settings: LoggerConfig, own: Any) -> None:
    """`ValueError` without a login, for which W&B would prompt on a terminal and block the run."""
    if (settings.mode or own.mode) != "online":
        return
    from wandb.sdk.lib.wbauth import authenticate_session

    if authenticate_session(host=own.base_url, source="rlreason", prompt=False, update_session=False) is None:
        raise ValueError("no login was found here")


class WandbLogger:
    """A run in W&B, with a step axis for every metric."""

    cure = "run `wandb login`, set WANDB_API_KEY, or use logger.mode=offline"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: SentRun) -> None:
        import wandb
        from wandb.errors import term

        silence(term, "_log")
        listen()
        new = changed_settings(wandb)
        own = wandb.setup().settings.model_copy(update=new)
        refuse_without_login(settings, own)
        self.run = wandb.init(**init_args(settings, folder, own, new, known), config=config)
        self._new = self.run.disabled or not (
            earlier_parts(self.run) if is_offline(self.run) else self.run.starting_step
        )
        # W&B's own counter, where it does not know the run's progress
        self._step = known.calls if is_offline(self.run) and not self._new else None
        self._table = wandb.Table
        self.place, self.cure = place_and_cure(self.run)
        for counter in COUNTERS:
            self.run.define_metric(counter)
        for counter, names in AXES.items():
            for name in names:
                # as in the handout's snippet: evaluations are drawn over their number
                self.run.define_metric(name, step_metric="eval_step" if name == "eval/*" else counter)

    def sent(self) -> Sent | None:
        """Return an empty `Sent` where W&B has nothing of the run, else None."""
        return Sent() if self._new else None

    def log(self, row: Row) -> None:
        """Log a row."""
        self._log(dict(row))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Log the responses of a step as a table, at the counters of the last row."""
        data = [[step, *(row[column] for column in COLUMNS)] for row in rows]
        self._log({f"generations/{name}": self._table(["step", *COLUMNS], data), **counters})

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """Send the summary and everything else; `TimeoutError` where that takes too long."""
        self.run.summary.update(dict(summary))
        self.run.finish()
        if not self.run.disabled and not os.path.isdir(self.run.settings.sync_dir):
            raise FileNotFoundError(f"{self.run.settings.sync_dir} was removed")

    def abandon(self) -> None:
        """End it as a failed run."""
        self.run.finish(exit_code=1)

    def _log(self, values: dict[str, Any]) -> None:
        if self._step is None:
            return self.run.log(values)
        self.run.log(values, step=self._step, commit=True)
        self._step += 1


def is_offline(run: Any) -> bool:
    """Whether nothing is sent to a server during the run."""
    return run.settings.mode in ("offline", "dryrun")


def earlier_parts(run: Any) -> list[Path]:
    """Return W&B's folders of the earlier parts of a run, oldest first."""
    here = Path(run.settings.sync_dir)
    files = [file for file in here.parent.glob(f"*run-*-{run.id}/*.wandb") if file.stat().st_size > HEADER]
    folders = [file.parent for file in files if file.parent.name != here.name]
    return sorted(folders, key=lambda folder: folder.name.rpartition("run-")[2])


def place_and_cure(run: Any) -> tuple[str, str]:
    """Return (the place of a W&B run, empty where W&B is disabled; the cure when it fails)."""
    if run.disabled:
        return "", "leave logger=wandb out"
    here = Path(run.settings.sync_dir)
    folders = [*earlier_parts(run), here] if is_offline(run) else [here]  # W&B puts the parts of one run together
    upload = f"wandb sync {' '.join(shlex.quote(os.path.relpath(folder)) for folder in folders)}"
    if is_offline(run):
        return f"offline; to upload it: {upload}", f"see that {run.settings.sync_dir} can be written"
    return str(run.url or ""), f"what was logged is on the disk; to upload it later: {upload}"


FLUSHED_EVERY_S = 10
_TABLE = re.compile(r"generations/(\w+)/text_summary")  # the tag of a table
_STEP = re.compile(r"step: (\d+)")  # in its first line


class TensorBoardLogger:
    """A run in TensorBoard: each metric over its counter; responses, settings and summary as text."""

    cure = f"see that the run folder's {TENSORBOARD}/ can be written, or choose logger=none"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: SentRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder / TENSORBOARD
        self._before = sorted(self._folder.glob("events.*")) if known.goes_on else []
        self._writer = SummaryWriter(str(self._folder), flush_secs=FLUSHED_EVERY_S)
        self.place = f"tensorboard --logdir {shlex.quote(os.path.relpath(self._folder))}"
        if not self._before:
            self._text("config", yaml.safe_dump(config, sort_keys=False, allow_unicode=True), 0)

    def sent(self) -> Sent:
        """Return the contents of the earlier parts' event files, without what a killed part had not written."""
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

        sent = Sent()
        for path in self._before:
            for event in LegacyEventFileLoader(str(path)).Load():
                for value in event.summary.value:
                    if kind := _TABLE.fullmatch(value.tag):
                        step = _STEP.search(value.tensor.string_val[0].decode("utf-8", "replace"))
                        sent.tables.update([(kind[1], int(step[1]))] if step else [])
                    else:
                        sent.metrics[value.tag, event.step] += 1
        return sent

    def log(self, row: Row) -> None:
        """Log every metric at the step of its counter."""
        self._check()
        for name, value in row.items():
            if name not in COUNTERS:
                self._writer.add_scalar(name, value, int(row[axis_of(name)]))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Log the responses of a step as one text."""
        shown = "\n\n".join("\n".join(f"{column}: {row[column]}" for column in COLUMNS) for row in rows)
        tag = f"generations/{name}"
        self._text(tag, f"step: {step}\n\n{shown}", int(counters[axis_of(tag)]))
        self._writer.flush()  # else it may be lost with the process

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """Log the summary as text and write everything to the disk."""
        self._text("summary", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True), int(counters["train_step"]))
        self.abandon()

    def abandon(self) -> None:
        """Write everything to the disk."""
        self._writer.close()

    def _check(self) -> None:
        """`FileNotFoundError` where the folder was emptied: TensorBoard would fail in a thread, with a traceback."""
        if not any(self._folder.iterdir()):
            raise FileNotFoundError(f"{self._folder} was emptied")

    def _text(self, tag: str, text: str, step: int) -> None:
        """Log an unformatted text: TensorBoard reads Markdown, in which four spaces mark literal lines."""
        self._check()
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)


OWN = {"step", "timestamp"}  # columns of Trackio's store
WARNS = "_emit_nonfatal_warning"  # the function of Trackio's warnings, after which it continues


def run_names(settings: LoggerConfig, folder: Path) -> dict[str, Any]:
    """Return the run's names in Trackio, without secrets: "project", "name" and "group", which may be None."""
    named = {
        "project": settings.project or "rlreason",
        "name": settings.name or folder.name,
        "group": settings.group or os.environ.get(SWEEP_VARIABLE),
    }
    return dict(redacted(named))


class TrackioLogger:
    """A run in Trackio: rows at the latest `train_step`; every row has all counters, so any can be the axis."""

    cure = "see that Trackio's folder (TRACKIO_DIR) can be written, or choose logger=none"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], known: SentRun) -> None:
        import trackio
        from trackio import run, utils

        for module in (trackio, run, utils):
            silence(module, "print")
            silence(module, WARNS)
        self._heard = listen()  # in this thread, which also has its own current run, a context variable of Trackio's
        elsewhere = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        named = run_names(settings, folder)
        self._local, self._table, self._text = not elsewhere, trackio.Table, trackio.Markdown
        callers = trackio.config  # of a user's own run, which the module shows
        self._run = trackio.init(
            **named,
            config=config,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        trackio.config = callers
        self._run.id = known.id  # nothing was sent yet; Trackio itself would resume the newest run of this name
        self._store = vars(trackio)["SQLiteStorage"]
        self._heard.clear()  # it started
        self._lost = dict[str, str]()  # the run's warnings, also from Trackio's threads
        vars(self._run)["_warn_once"] = self._lost.setdefault
        self.place = elsewhere or f"trackio show --project {shlex.quote(named['project'])}"

    def sent(self) -> Sent | None:
        """Return what Trackio's store on this computer has; None where the run is stored elsewhere."""
        if not self._local:
            return None
        sent, run = Sent(), self._run
        if run.id not in [record["id"] for record in self._store.get_run_records(run.project)]:
            return sent
        for row in self._store.get_logs(run.project, run.name, run_id=run.id):
            tables = {name: value for name, value in row.items() if name.startswith("generations/")}
            sent.add({name: value for name, value in row.items() if name not in tables.keys() | OWN})
            for name, value in tables.items():
                sent.tables[name.partition("/")[2], int(value["_value"][0]["step"])] += 1
        return sent

    def log(self, row: Row) -> None:
        """Log a row; raise where Trackio could not store earlier ones."""
        self._run.log(dict(row), step=int(row["train_step"]))
        if self._local:
            self._check()

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Log the responses of a step as a table."""
        data = [[step, *(row[column] for column in COLUMNS)] for row in rows]
        self._run.log({f"generations/{name}": self._table(["step", *COLUMNS], data)}, step=int(counters["train_step"]))

    def finish(self, summary: Mapping[str, Any], counters: Row) -> None:
        """Log the summary as text and send everything."""
        text = yaml.safe_dump(summary, sort_keys=False, allow_unicode=True)
        self._run.log({"summary": self._text(f"```yaml\n{text}```")}, step=int(counters["train_step"]))
        self.abandon()
        self._check()

    def abandon(self) -> None:
        """Send everything."""
        self._run.finish()

    def _check(self) -> None:
        """`OSError` where Trackio has warned that it could not write or send."""
        if lost := [*self._lost.values(), *(text for name, text in self._heard if name == WARNS)]:
            raise OSError(lost[0])
