"""Send metrics to W&B, TensorBoard and Trackio as well as to the run folder; a logger that fails is dropped."""

import contextvars
import io
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import yaml

from rlreason.config.groups import LoggerConfig
from rlreason.records.files import EVALS, LOGGERS, ROLLOUTS, TENSORBOARD, response_files
from rlreason.records.reader import RunFolder
from rlreason.runtime.files import write_whole
from rlreason.runtime.machine import SWEEP_VARIABLE
from rlreason.runtime.text import redacted, shorten

Row = Mapping[str, float]

#: The columns of a response.
COLUMNS = (
    "question", "response", "gold", "format_reward", "answer_reward", "reward", "outcome", "entropy", "length",
)  # fmt: skip

#: Counter -> the metrics that are drawn over it. Every row carries every counter, so any other axis can be chosen too.
AXES: dict[str, tuple[str, ...]] = {
    "rollout_step": (
        "rollout/*", "reward/*", "grading/*", "ei/*", "time/*", "busy/*", "perf/*", "memory/*", "generations/rollouts",
    ),
    "train_step": ("train/*", "sft/*", "tokens/*", "eval/*", "final/*", "generations/evals"),
}  # fmt: skip
COUNTERS = ("rollout_step", "train_step", "eval_step")

#: Seconds that W&B waits for its server at the start and at the end of a run.
TIMEOUTS = {"init_timeout": 30.0, "finish_timeout": 30.0}
REASON_CHARS = 200


@dataclass(frozen=True, slots=True)
class Resumed:
    """The records behind the checkpoint of a resumed run, which the loggers have already.

    `rows_sent`: the counters of each row (`counters_of`). `tables_sent`: the (kind, step) of each table.
    """

    rows_sent: frozenset[tuple[float, ...]] = frozenset()
    tables_sent: frozenset[tuple[str, int]] = frozenset()


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """A run's id in a service, whether it resumes there, and how many rows and tables were sent before, at most."""

    id: str
    resumed: bool = False
    calls: int = 0


class Logger(Protocol):
    """One run in one service. Any method may raise an exception; `Loggers` then drops the logger."""

    cure: str  # what to do when it fails
    place: str  # the run's address, or the command that shows it; may be empty

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], run: LoggedRun) -> None:
        """Start or resume a run in the service. `config`: all settings of the run in `folder`, nested dicts."""

    def log(self, row: Row) -> None:
        """Log a row of metrics with every counter."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Log responses of a step, with `COLUMNS`; `name` is `rollouts` or `evals`."""

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End the run; None: it has failed."""


def axis_of(metric: str) -> str:
    """Return the counter over which a metric is drawn.

    >>> axis_of("reward/mean"), axis_of("eval/accuracy")
    ('rollout_step', 'train_step')
    """
    counters = (counter for counter, names in AXES.items() if any(fnmatchcase(metric, name) for name in names))
    return next(counters, "train_step")


def counters_of(row: Row) -> tuple[float, ...]:
    """Return the values of `COUNTERS` in a row, which no two rows of a run share.

    >>> counters_of({"rollout_step": 2, "train_step": 8, "eval_step": 1, "train/loss": 0.5})
    (2, 8, 1)
    """
    return tuple(row.get(name, 0) for name in COUNTERS)


def init_args(settings: LoggerConfig, folder: Path, own: Any, run: LoggedRun) -> dict[str, Any]:
    """Return the arguments of `wandb.init`: the user's settings, then W&B's `own`, then our defaults.

    `own` come from W&B's variables and files. Secrets in the run's names are hidden, and neither Git differences nor
    a command with a secret are sent.
    """
    names = {
        "project": settings.project or own.project or "rlreason",
        "group": settings.group or own.run_group or os.environ.get(SWEEP_VARIABLE),
        "name": settings.name or own.run_name or folder.name,
        "mode": settings.mode or own.mode,
        "entity": settings.entity or own.entity,
        "tags": settings.tags or own.run_tags,
        "notes": settings.notes or own.run_notes,
    }
    ours: dict[str, Any] = {"silent": True, "console": "off", "disable_git": True, "finish_timeout_raises": True}
    ours["reinit"] = "create_new"  # next to a run of the user's own in this process
    ours |= {"x_disable_meta": True} if redacted(sys.argv) != sys.argv else {}
    ours |= {name: value for name, value in TIMEOUTS.items() if f"WANDB_{name.upper()}" not in os.environ}
    place = {} if "WANDB_DIR" in os.environ else {"dir": str(folder)}
    resume = {"resume": "allow"} if run.resumed and not own.resume else {}
    return {**redacted(names), **place, **resume, "id": own.run_id or run.id, "settings": ours}


class WandbLogger:
    """A run in W&B, with a step axis for every metric."""

    cure = "run `wandb login`, set WANDB_API_KEY, or use logger.mode=offline"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], run: LoggedRun) -> None:
        import wandb
        from wandb.sdk.lib.wbauth import authenticate_session

        own = wandb.setup().settings.model_copy()
        own.update_from_env_vars(dict(os.environ))  # which W&B reads once in a process
        arguments = init_args(settings, folder, own, run)
        login: dict[str, Any] = {"host": own.base_url, "prompt": False, "update_session": False}
        if arguments["mode"] == "online" and authenticate_session(source="rlreason", **login) is None:
            raise ValueError("no login was found here")  # for which W&B would prompt on a terminal and block the run
        self.run = wandb.init(**arguments, config=config)
        self._table = wandb.Table
        self._step = run.calls  # W&B's own counter must rise in every part of a resumed run
        self.place = ""
        if not self.run.disabled:
            self.place, self.cure = place_and_cure(self.run)
        for counter in COUNTERS:
            self.run.define_metric(counter)
        for counter, names in AXES.items():
            for name in names:
                # as in the handout's snippet: evaluations are drawn over their number
                self.run.define_metric(name, step_metric="eval_step" if name == "eval/*" else counter)

    def log(self, row: Row) -> None:
        """Log a row."""
        self.run.log(dict(row), step=self._step, commit=True)
        self._step += 1

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Log the responses of a step as a table, at the counters of the last row."""
        data = [[step, *(row[column] for column in COLUMNS)] for row in rows]
        values: dict[str, Any] = {f"generations/{name}": self._table(["step", *COLUMNS], data), **counters}
        self.log(values)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Send the summary and everything else; `TimeoutError` where that takes longer than W&B's finish_timeout."""
        self.run.summary.update(dict(summary or {}))
        self.run.finish(exit_code=1 if summary is None else 0)


def place_and_cure(run: Any) -> tuple[str, str]:
    """Return where a W&B run is shown, and what to do when it fails."""
    here = Path(run.settings.sync_dir)
    offline = run.settings.mode in ("offline", "dryrun")
    parts = sorted(here.parent.glob(f"offline-run-*-{run.id}")) if offline else [here]  # W&B joins the parts of a run
    upload = f"wandb sync {' '.join(shlex.quote(os.path.relpath(part)) for part in parts)}"
    if offline:
        return f"offline; to upload it: {upload}", f"see that {here} can be written"
    return str(run.url or ""), f"what was logged is on the disk; to upload it later: {upload}"


class TensorBoardLogger:
    """A run in TensorBoard: each metric over its counter; responses, settings and summary as text."""

    cure = f"see that the run folder's {TENSORBOARD}/ can be written, or choose logger=none"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / TENSORBOARD))
        self.place = f"tensorboard --logdir {shlex.quote(os.path.relpath(folder / TENSORBOARD))}"
        if not run.resumed:
            self._text("config", yaml.safe_dump(config, sort_keys=False, allow_unicode=True), 0)

    def log(self, row: Row) -> None:
        """Log every metric at the step of its counter."""
        for name, value in row.items():
            if name not in COUNTERS:
                self._writer.add_scalar(name, value, int(row[axis_of(name)]))
        self._writer.flush()  # else the last rows are lost with a killed process

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Log the responses of a step as one text."""
        responses = "\n\n".join("\n".join(f"{column}: {row[column]}" for column in COLUMNS) for row in rows)
        tag = f"generations/{name}"
        self._text(tag, f"step: {step}\n\n{responses}", int(counters[axis_of(tag)]))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Log the summary as text and write everything to the disk."""
        if summary is not None:
            self._text("summary", yaml.safe_dump(summary, sort_keys=False, allow_unicode=True), 0)
        self._writer.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        """Log an unformatted text: TensorBoard reads Markdown, in which four spaces mark literal lines."""
        self._writer.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)
        self._writer.flush()


def run_names(settings: LoggerConfig, folder: Path) -> dict[str, Any]:
    """Return the run's names in Trackio, without secrets: "project", "name" and "group", which may be None."""
    names = {
        "project": settings.project or "rlreason",
        "name": settings.name or folder.name,
        "group": settings.group or os.environ.get(SWEEP_VARIABLE),
    }
    return dict(redacted(names))


class TrackioLogger:
    """A run in Trackio: rows at the latest `train_step`; every row has all counters, so any can be the axis."""

    cure = "see that Trackio's folder (TRACKIO_DIR) can be written, or choose logger=none"

    def __init__(self, folder: Path, settings: LoggerConfig, config: dict[str, Any], run: LoggedRun) -> None:
        import trackio

        names = run_names(settings, folder)
        start = partial(trackio.init, **names, config=config, embed=False, auto_log_gpu=False, auto_log_cpu=False)
        with redirect_stdout(io.StringIO()):  # in a context of its own: a run of the user's own stays the current one
            self._run = contextvars.Context().run(start)
        self._run.id = run.id  # nothing was sent yet; Trackio itself would resume the newest run of this name
        self._table, self._markdown, self._step = trackio.Table, trackio.Markdown, 0
        elsewhere = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        self.place = elsewhere or f"trackio show --project {shlex.quote(names['project'])}"

    def log(self, row: Row) -> None:
        """Log a row."""
        self._step = int(row["train_step"])
        self._run.log(dict(row), step=self._step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]], counters: Row) -> None:
        """Log the responses of a step as a table."""
        data = [[step, *(row[column] for column in COLUMNS)] for row in rows]
        self._run.log({f"generations/{name}": self._table(["step", *COLUMNS], data)}, step=self._step)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Log the summary as text and send everything; Trackio waits for at most 30 s."""
        if summary is not None:
            text = yaml.safe_dump(summary, sort_keys=False, allow_unicode=True)
            self._run.log({"summary": self._markdown(f"```yaml\n{text}```")}, step=self._step)
        with redirect_stdout(io.StringIO()):
            self._run.finish()


SERVICES: dict[str, type[Logger]] = {"wandb": WandbLogger, "tensorboard": TensorBoardLogger, "trackio": TrackioLogger}


class Loggers:
    """All loggers of a run; without any, every method does nothing. `say` prints the line of one that fails.

    `failed`: logger -> why it has failed. `places`: logger -> the run's place in the service, or why it has failed.
    """

    def __init__(self, say: Callable[[str], object] = print) -> None:
        self._say, self._running = say, dict[str, Logger]()
        self.failed, self.places = dict[str, str](), dict[str, str]()
        self._counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._resumed = Resumed()

    def start(
        self, settings: LoggerConfig, folder: Path, config: Mapping[str, Any], resumed: Resumed | None = None
    ) -> None:
        """Start the chosen loggers. `resumed`: each resumes its run, without the rows and tables that it has."""
        if not settings.chosen:
            return
        ids, calls = run_ids(folder, settings.chosen, resumed is not None), 0
        if resumed is not None:
            self._resumed = resumed
            calls = len(RunFolder(folder).metrics) + len(resumed.rows_sent) + len(resumed.tables_sent)
            calls += sum(len(response_files(folder, kind)) for kind in (ROLLOUTS, EVALS))
        for name in settings.chosen:
            run = LoggedRun(ids[name], resumed is not None, calls)
            try:
                self._running[name] = SERVICES[name](folder, settings, encodable(redacted(config)), run)
                self.places[name] = self._running[name].place
            except Exception as error:  # whatever a service raises must not end the run
                self._drop(name, "could not start", error, SERVICES[name].cure)

    def log(self, row: Row) -> None:
        """Log a row of metrics, completed by the latest counters."""
        self._counters |= {name: row[name] for name in COUNTERS if name in row}
        if counters_of(self._counters) not in self._resumed.rows_sent:
            self._each("failed", lambda logger: logger.log(self._counters | dict(row)))

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log responses of a step; `name` is `rollouts` or `evals`."""
        if self._running and (name, step) not in self._resumed.tables_sent:
            responses = [encodable({column: row[column] for column in COLUMNS}) for row in rows]
            self._each("failed", lambda logger: logger.table(name, step, responses, self._counters))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """End the loggers of a run; None: it has failed. After the first call, do nothing."""
        self._each("could not end in order", lambda logger: logger.finish(summary and encodable(summary)))
        self._running.clear()

    def interrupted(self) -> None:
        """End the loggers of an interrupted run."""
        self.finish({"status": "interrupted"})

    def abandon(self) -> None:
        """End the loggers of a failed run; after another end, do nothing."""
        self.finish(None)

    def _each(self, failure: str, act: Callable[[Logger], object]) -> None:
        for name, logger in list(self._running.items()):
            try:
                act(logger)
            except Exception as error:  # whatever a service raises must not end the run
                del self._running[name]
                self._drop(name, failure, error, logger.cure)

    def _drop(self, name: str, failure: str, error: Exception, cure: str) -> None:
        # without W&B's advice on a time limit that is ours
        reason = " ".join(str(error).split()).partition(" Consider increasing ")[0] or type(error).__name__
        self.failed[name] = self.places[name] = redacted(f"{failure} ({shorten(reason, REASON_CHARS)})")
        self._say(f"! logger={name} {self.failed[name]}: {cure}; the run folder has everything")


def run_ids(folder: Path, chosen: Sequence[str], resumed: bool) -> dict[str, str]:
    """Return logger -> the run's id in its service; `loggers.json` keeps them for when the run resumes."""
    path = folder / LOGGERS
    ids = json.loads(path.read_text(encoding="utf-8")) if resumed and path.is_file() else {}
    ids |= {name: uuid4().hex[:12] for name in chosen if name not in ids}
    write_whole(path, json.dumps(ids, indent=1) + "\n")
    return dict(ids)


def encodable(value: Any) -> Any:
    r"""Replace every character of a JSON value that UTF-8 cannot encode, such as a lone surrogate from a data file.

    >>> encodable({"question": "\ud800?", "entropy": None})
    {'question': '??', 'entropy': None}
    """
    return json.loads(json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "replace"))
